"""Batches cut into microbatches, and the test that all ranks of a pipeline have the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
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


def check_equal(args: tuple[Any, ...], kwargs: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Compare the inputs of all ranks of a pipeline, by checksums. Every rank must call it.

    Raises:
        UsageError: on every rank, if they differ; the text names the input and the ranks.
    """
    mine = {
        _name(path): (str(tuple(leaf.shape)), str(leaf.dtype), _checksum(leaf))
        if isinstance(leaf, Tensor)
        else str(leaf)
        for path, leaf in pytree.tree_leaves_with_path((args, dict(kwargs)))
        if isinstance(leaf, Tensor | int | float | str | bool | None)
    }
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    for rank, theirs in enumerate(everyones):
        different = [name for name in {**everyones[0], **theirs} if everyones[0].get(name) != theirs.get(name)]
        if different:
            name = different[0]
            what = f"input {name} differs between ranks {_of(group, 0)} and {_of(group, rank)} of one pipeline"
            shown = f"{_shown(everyones[0].get(name))} and {_shown(theirs.get(name))}"
            fix = "give all ranks of a pipeline the same batch: gz.loader does, as does a sampler with world.data_rank"
            raise UsageError(explain(what, value=shown, fix=fix))


def _of(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _shown(told: Any) -> str:
    return f"{told[1]} of shape {told[0]} with checksum {told[2]:08x}" if isinstance(told, tuple) else str(told)


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())


def _name(path: Any) -> str:
    """Return the name of an input from its place in ``(args, kwargs)``: ``"0"``, ``"input_ids"``, ``"batch['x']"``."""
    return pytree.keystr(path[1:2]).strip("[]'\"") + pytree.keystr(path[2:])
