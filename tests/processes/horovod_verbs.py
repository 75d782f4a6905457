"""The collectives of Horovod's interface as a table: in each of their forms they give what a plain expression of torch gives.

The forms of ``allreduce``, say, are ``allreduce``, ``allreduce_async``, ``allreduce_``, ``allreduce_async_`` (a last "_" means
in place) and the same four with ``grouped_`` before them. Not every collective has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import guozhuang.compat.horovod.torch as hvd
from tests.processes.horovod_cases import of_rank

FORMS = ("{}", "{}_async", "{}_", "{}_async_", "grouped_{}", "grouped_{}_async", "grouped_{}_", "grouped_{}_async_")
# What the member at a place has in the end, by the tensors of all members and that place.
Expected = Callable[[list[Tensor], int], Tensor]


@dataclass(frozen=True)
class Verb:
    """One collective.

    Attributes:
        name: of its plain form.
        result: what each member gets, by the tensors that all members gave.
        gradient: of what each member gave, by the gradients of all members' results.
        num_rows: of the tensor that a member gives, by its place and the number of members.
        dtypes: of the tensors.
        root: the place of the member whose rank is given as ``root_rank``; None if there is no such argument.
        options: further arguments.
    """

    name: str
    result: Expected
    gradient: Expected
    num_rows: Callable[[int, int], int] = lambda place, size: 3
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64, torch.int16)
    root: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def total(tensors: list[Tensor], place: int = 0) -> Tensor:
    return torch.stack(tensors).sum(0, dtype=tensors[0].dtype)


def mean(tensors: list[Tensor], place: int = 0) -> Tensor:
    """That of integers is cut towards zero."""
    exact = torch.stack(tensors).double().sum(0) / len(tensors)
    return (exact if tensors[0].is_floating_point() else exact.trunc()).to(tensors[0].dtype)


def transposed(tensors: list[Tensor], place: int) -> Tensor:
    """The rows that each member has for this place."""
    return torch.cat([each.chunk(len(tensors))[place] for each in tensors])


def part(whole: Tensor, tensors: list[Tensor], place: int) -> Tensor:
    """The first members get a row more where rows do not divide."""
    return whole.tensor_split(len(tensors))[place]


def at_root(root: int) -> Expected:
    """The gradient of a broadcast."""
    return lambda grads, place: mean(grads) * (place == root % len(grads))


MOVED, FLOATS = (torch.float32, torch.int64, torch.int16, torch.bool), (torch.float32, torch.float64)
SUM, SCALED = {"op": hvd.Sum}, {"prescale_factor": 0.5, "postscale_factor": 3.0}
VERBS: dict[str, Verb] = {
    "mean": Verb("allreduce", mean, mean),
    "sum": Verb("allreduce", total, total, options=SUM),
    "scaled mean": Verb(
        "allreduce", lambda ts, p: mean(ts) * 1.5, lambda gs, p: mean(gs) * 1.5, dtypes=FLOATS, options=SCALED
    ),
    "gathered": Verb(  # the gradient is of the mean over the ranks, not of the sum
        "allgather",
        lambda ts, p: torch.cat(ts),
        lambda gs, p: mean(gs).split([*range(1, len(gs) + 1)])[p],
        lambda place, size: place + 1,
        MOVED,
    ),
    "from the first": Verb("broadcast", lambda ts, p: ts[0], at_root(0), dtypes=MOVED, root=0),
    "from the last": Verb("broadcast", lambda ts, p: ts[-1], at_root(-1), dtypes=MOVED, root=-1),
    "transposed": Verb("alltoall", transposed, transposed, lambda place, size: 2 * size, MOVED),
    "mean in parts": Verb(
        "reducescatter",
        lambda ts, p: part(mean(ts), ts, p),
        lambda gs, p: torch.cat(gs),
        lambda place, size: 2 * size + 1,
    ),
    "scaled sum in parts": Verb(
        "reducescatter",
        lambda ts, p: part(total(ts), ts, p) * 1.5,
        lambda gs, p: torch.cat(gs) * len(gs) * 1.5,
        lambda place, size: 2 * size + 1,
        FLOATS,
        options=SUM | SCALED,
    ),
}


def check_verbs(members: Sequence[int], rank: int, **process_set: Any) -> None:
    """Run every form of every collective, and its gradient, among the members; each of them must call it."""
    for what, verb in VERBS.items():
        for form in FORMS:
            for dtype in verb.dtypes if hasattr(hvd, form.format(verb.name)) else ():
                try:
                    _check(f"{what} {form} {dtype}", verb, form, dtype, list(members), members.index(rank), process_set)
                except Exception as error:
                    error.add_note(f"{what}: {form.format(verb.name)} of {dtype} among ranks {members}")
                    raise


def _check(
    what: str, verb: Verb, form: str, dtype: torch.dtype, members: list[int], place: int, more: dict[str, Any]
) -> None:
    # What each member gives; a second tensor for a group.
    tensors = [of_rank(r, verb.num_rows(at, len(members)), 2, dtype=dtype) for at, r in enumerate(members)]
    everybodys = [tensors, [each.flip(0) for each in tensors]] if "grouped" in form else [tensors]
    has_gradient = dtype == torch.float32 and form in ("{}", "grouped_{}")
    is_leaf = has_gradient or (form == "{}_async_" and dtype.is_floating_point)
    given = [each[place].clone().requires_grad_(is_leaf) for each in everybodys]

    arguments = [given if "grouped" in form else given[0], *([] if verb.root is None else [members[verb.root]])]
    named = {"name": what} if "async" in form else {}
    found = getattr(hvd, form.format(verb.name))(*arguments, **verb.options, **named, **more)
    if "async" in form:
        found = hvd.synchronize(found)
        found = found[0] if verb.name == "alltoall" else found  # and how many rows came from whom
    assert isinstance(found, list) == ("grouped" in form)
    results = found if isinstance(found, list) else [found]

    for mine, result, of_all in zip(given, results, everybodys, strict=True):
        torch.testing.assert_close(result.detach(), verb.result(of_all, place))
        assert (result is mine) == form.endswith("_")
        assert result is mine or torch.equal(mine, of_all[place]), "what was given was changed"
        if has_gradient:
            shapes = [verb.result(of_all, at).shape for at in range(len(members))]
            gradients = [of_rank(50 + at, *shape) for at, shape in enumerate(shapes)]
            result.backward(gradients[place])
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, verb.gradient(gradients, place))
