"""Batches cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain
from .forwards.outputs import tensors_in
from .forwards.stage import Microbatch


def count_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch: the length of the first tensor among the inputs.

    Raises:
        UsageError: there is no tensor with a first dimension, or an input holds tensors where they cannot be cut.
    """
    rows = None
    for path, leaf in pytree.tree_leaves_with_path((args, dict(kwargs))):
        if isinstance(leaf, Tensor):
            if leaf.dim() and rows is None:
                rows = leaf.shape[0]
        elif next(tensors_in(leaf), None) is not None:
            what = f"input {_name(path)} is an object with tensors in it, which cannot be cut into microbatches"
            fix = "give tensors, or tuples, lists or dicts of them"
            raise UsageError(explain(what, value=type(leaf).__name__, fix=fix))
    if rows is None:
        what = "a pipeline cuts the batch along the first dimension of the model's inputs, and none of them is a tensor"
        raise UsageError(explain(what, value=[type(each).__name__ for each in args], fix="give the model a batch"))
    return rows


#: Of each leaf of the inputs, in which dimension its samples lie; None: it has none.
Dims: TypeAlias = tuple[int | None, ...]


class SampleDims:
    """In which dimension of each input of a model the samples lie, as the batches so far show it.

    It is the first one where that is as long as the batch. A mask of (tokens, tokens) is as long as a batch of so many samples
    too, but not as long as all other batches: it is whole in each of them once one batch has shown that.
    """

    def __init__(self) -> None:
        # By structure of the inputs, place among their leaves and number of dims: those that were as long as each batch.
        self._long: dict[tuple[str, int, int], set[int]] = {}
        # Those whose samples were found in another dimension than the first.
        self._elsewhere: dict[tuple[str, int, int], int] = {}

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dims:
        """Return the dimension of each leaf of the inputs; None for those that each microbatch gets whole."""
        return tuple(
            None if key is None or not self._long[key] else 0 if 0 in self._long[key] else self._elsewhere.get(key)
            for key in self._keys(args, kwargs)
        )

    def look_elsewhere(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take inputs to have their samples in a later dimension that is as long as each batch; return whether one has one.

        States of recurrent networks are such: (layers, samples, features).
        """
        keys = [key for key in self._keys(args, kwargs) if key is not None and key not in self._elsewhere]
        found = {key: min(self._long[key]) for key in keys if self._long[key] and 0 not in self._long[key]}
        self._elsewhere |= found
        return bool(found)

    def _keys(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, int, int] | None]:
        rows = count_rows(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        structure = str(spec)
        found: list[tuple[str, int, int] | None] = []
        for place, leaf in enumerate(leaves):
            key = (structure, place, leaf.dim()) if isinstance(leaf, Tensor) else None
            if key is not None:
                long = {dim for dim, size in enumerate(leaf.shape) if size == rows}
                self._long[key] = self._long.get(key, long) & long
            found.append(key)
        return found


def cut_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    dims: Dims | None = None,
) -> list[Microbatch]:
    """Cut a batch along its samples; the parts differ by one row at most, and there are no empty ones.

    Everything that has no samples is given to each microbatch whole. Tensors that require a gradient are cut from the graph:
    their parts are leaves.

    Args:
        args: the positional inputs of the model.
        kwargs: its keyword inputs.
        num_microbatches: at most; never more than rows.
        dims: in which dimension of each leaf of the inputs the samples lie; None: what this batch alone tells.
    """
    rows = count_rows(args, kwargs)
    if dims is None:
        dims = SampleDims().of(args, kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    count = max(1, min(num_microbatches, rows))
    least, rest = divmod(rows, count)
    found, start = [], 0
    for number in range(count):
        stop = start + least + (number < rest)
        inside = [
            _part(leaf, dim, start, stop) if isinstance(leaf, Tensor) else leaf
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        mine_args, mine_kwargs = pytree.tree_unflatten(inside, spec)
        found.append(Microbatch(number, mine_args, mine_kwargs, slice(start, stop), rows, dims))
        start = stop
    return found


def _part(tensor: Tensor, dim: int | None, start: int, stop: int) -> Tensor:
    cut = tensor if dim is None else tensor.narrow(dim, start, stop - start)
    cut = cut.contiguous() if dim else cut  # recurrent networks take no other states
    return cut.detach().requires_grad_() if tensor.requires_grad else cut


def with_rows(microbatch: Microbatch, num_rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a microbatch with another number of rows, of which some recur."""
    length = microbatch.rows.stop - microbatch.rows.start
    leaves, spec = pytree.tree_flatten((microbatch.args, dict(microbatch.kwargs)))
    if num_rows != length and length:
        places = torch.arange(num_rows) % length
        leaves = [
            leaf if dim is None else leaf.index_select(dim, places.to(leaf.device))
            for leaf, dim in zip(leaves, microbatch.dims, strict=True)
        ]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def _name(path: Any) -> str:
    """Return the name of an input from its place in ``(args, kwargs)``: ``"0"``, ``"input_ids"``, ``"batch['x']"``."""
    return pytree.keystr(path[1:2]).strip("[]'\"") + pytree.keystr(path[2:])
