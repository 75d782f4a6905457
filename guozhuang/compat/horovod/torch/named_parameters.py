"""Finds the names by which ranks match gradients, and divides parameters into groups whose gradients are sent as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from guozhuang.errors import explain

from ..common.util import split_list

ParameterGroups: TypeAlias = int | Sequence[Sequence[Tensor]]


def names_of(
    named_parameters: Iterable[tuple[str, Tensor]] | None, param_groups: Sequence[dict[str, Any]]
) -> dict[Tensor, str]:
    """Return the name of each parameter, in the order of ``named_parameters``.

    Args:
        named_parameters: pairs, as of ``model.named_parameters()``; may contain more parameters than the optimizer has. None:
            names are made from each parameter's place in the optimizer.
        param_groups: the parameter groups of the optimizer.

    Raises:
        ValueError: an item is no pair, a name comes twice, or a parameter of the optimizer has no name.
    """
    ours = [p for group in param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}" for i, p in enumerate(ours)}
    pairs = list(named_parameters)
    wrong = [pair for pair in pairs if not isinstance(pair, tuple)]
    if wrong:
        what = "named_parameters should be a sequence of tuples (name, parameter)"
        raise ValueError(explain(what, value=type(wrong[0]).__name__, fix="pass model.named_parameters()"))
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        what = f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        fix = "with several models give each a prefix: model.named_parameters(prefix=...)"
        raise ValueError(explain(what, fix=fix))
    # A tensor with several names gets the last one in sorted order, which is the same on all ranks.
    last_name = {id(p): name for name, p in sorted(pairs, key=lambda pair: pair[0])}
    unnamed = [p for p in ours if id(p) not in last_name]
    if unnamed:
        what = "named_parameters was specified, but one or more model parameters were not named"
        shapes = ", ".join(str(tuple(p.shape)) for p in unnamed[:5])
        fix = "name all parameters that the optimizer has"
        raise ValueError(explain(what, value=f"{len(unnamed)}, of the shapes {shapes}", fix=fix))
    return {p: last_name[id(p)] for _, p in pairs}


def check_groups(groups: Any) -> None:
    """Check the type of the argument ``groups``.

    Raises:
        ValueError: it is neither a number above 0 nor a list of lists of tensors, each tensor once.
    """
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return
    if not isinstance(groups, list):
        raise ValueError(explain("groups should be a positive integer or a list of list of torch.Tensor", value=groups))
    seen: set[int] = set()
    for member in (member for group in groups for member in group):
        if not isinstance(member, torch.Tensor):
            raise ValueError(explain("groups must consist of torch.Tensor", value=type(member).__name__))
        if id(member) in seen:
            raise ValueError(explain("a parameter can only appear once in groups", value=tuple(member.shape)))
        seen.add(id(member))


def grouped(
    names: Sequence[str],
    parameters: Sequence[Tensor],
    groups: ParameterGroups,
    of_first_rank: Callable[[list[str]], list[str]],
) -> list[list[int]]:
    """Divide parameters into groups, the same on all ranks. Every rank must call this.

    Args:
        names: names of the parameters.
        parameters: the parameters whose gradients are exchanged.
        groups: the number of groups of about equal length, or lists of parameters; a parameter in no list is its own group.
        of_first_rank: returns on all ranks what the first rank passes to it, as ranks may have parameters in other orders.

    Returns:
        Groups of indices, none of them empty.

    Raises:
        ValueError: the first rank lacks one of the names.
    """
    agreed = {name: place for place, name in enumerate(of_first_rank(list(names)))}
    strange = [name for name in names if name not in agreed]
    if strange:
        what = "this rank exchanges a parameter that the first rank does not, so they cannot form groups"
        raise ValueError(explain(what, value=strange[0], fix="build the same model on every rank"))
    order = sorted(range(len(names)), key=lambda i: agreed[names[i]])
    if isinstance(groups, int):
        return [list(chunk) for chunk in split_list(order, groups) if chunk]
    place_of = {id(p): i for i, p in enumerate(parameters)}
    # Sort each group in the order of the first rank, too: it may come from a ``set``, whose order differs between ranks.
    rank_of = {i: place for place, i in enumerate(order)}
    chosen = [
        sorted((place_of[id(p)] for p in group if id(p) in place_of), key=rank_of.__getitem__) for group in groups
    ]
    taken = {i for group in chosen for i in group}
    return [group for group in chosen if group] + [[i] for i in order if i not in taken]
