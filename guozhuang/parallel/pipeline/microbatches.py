"""Batches cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def cut_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_microbatches: int) -> list[Microbatch]:
    """Cut a batch along the first dimension; the parts differ by one row at most, and there are no empty ones.

    Tensors whose first dimension has another length, and everything else, are given to each microbatch whole. Tensors that
    require a gradient are cut from the graph: their parts are leaves.

    Args:
        args: the positional inputs of the model.
        kwargs: its keyword inputs.
        num_microbatches: at most; never more than rows.
    """
    rows = count_rows(args, kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    count = max(1, min(num_microbatches, rows))
    least, rest = divmod(rows, count)
    found, start = [], 0
    for number in range(count):
        stop = start + least + (number < rest)
        inside = [_part(leaf, slice(start, stop), rows) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        mine_args, mine_kwargs = pytree.tree_unflatten(inside, spec)
        found.append(Microbatch(number, mine_args, mine_kwargs, slice(start, stop), rows))
        start = stop
    return found


def _part(tensor: Tensor, rows: slice, num_rows: int) -> Tensor:
    cut = tensor[rows] if tensor.dim() and tensor.shape[0] == num_rows else tensor
    return cut.detach().requires_grad_() if tensor.requires_grad else cut


def with_rows(microbatch: Microbatch, num_rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a microbatch with another number of rows, of which some recur."""
    length = microbatch.rows.stop - microbatch.rows.start
    leaves, spec = pytree.tree_flatten((microbatch.args, dict(microbatch.kwargs)))
    if num_rows != length and length:
        places = torch.arange(num_rows) % length
        leaves = [
            leaf[places.to(leaf.device)]
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == length
            else leaf
            for leaf in leaves
        ]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def _name(path: Any) -> str:
    """Return the name of an input from its place in ``(args, kwargs)``: ``"0"``, ``"input_ids"``, ``"batch['x']"``."""
    return pytree.keystr(path[1:2]).strip("[]'\"") + pytree.keystr(path[2:])
