"""Cuts a bucket into one part per rank of a node; joins state kept per part into state per parameter, and cuts it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..gradients.buckets import Bucket
from ..world import versions
from .numbers import numbers


@dataclass(frozen=True)
class ParameterSlice:
    """The elements ``begin`` to ``end`` of one flat parameter that lie in a part; ``name`` identifies this slice in states."""

    parameter: str
    name: str
    begin: int
    end: int


@dataclass
class Part:
    """This rank's part of a bucket.

    Attributes:
        bucket: the whole bucket.
        part: the part, as a bucket of real numbers; None if this rank gets no elements of the bucket: it has too few, or is
            not cut and another rank leads.
        pieces: the slices of parameters that lie in the part, in order.
        wire: buffer from which the whole bucket is sent if it must be padded or cast to another dtype first; else None.
        own: buffer that receives the part, as long as the parts of all ranks; ``part.flat`` itself if its length and dtype fit.
            None for a bucket that was not cut.
    """

    bucket: Bucket
    part: Bucket | None
    pieces: list[ParameterSlice]
    wire: Tensor | None
    own: Tensor | None


def cut(bucket: Bucket, place: int, size: int, wire_dtype: torch.dtype) -> Part:
    """Return one of ``size`` equal parts of a bucket; the last parts may be shorter or empty.

    Args:
        bucket: the whole bucket.
        place: the rank that gets the part, 0 .. ``size`` - 1.
        size: the number of parts.
        wire_dtype: the dtype in which the bucket is sent.
    """
    flat = numbers(bucket)
    length = -(-flat.numel() // size)
    first, last = place * length, (place + 1) * length
    pieces, begin = [], 0
    for name, count in zip(bucket.names, _counts(bucket), strict=True):
        low, high = max(first - begin, 0), min(last - begin, count)
        if low < high:
            # Each slice of a parameter has its own name, so that state of one slice is never loaded into another.
            own_name = name if (low, high) == (0, count) else f"{name}[{low}:{high}]"
            pieces.append(ParameterSlice(name, own_name, low, high))
        begin += count
    one, part = flat.new_empty(1), None
    if pieces:
        stand_ins = [one.expand(piece.end - piece.begin) for piece in pieces]  # shapes only: views of one element
        part = Bucket(bucket.index, bucket.is_last, [piece.name for piece in pieces], stand_ins)
    wire = None
    if wire_dtype != flat.dtype or length * size != flat.numel():
        wire = torch.zeros(length * size, dtype=wire_dtype, device=flat.device)
    if part is not None and wire_dtype == flat.dtype and part.flat.numel() == length:
        return Part(bucket, part, pieces, wire, part.flat)
    return Part(bucket, part, pieces, wire, torch.zeros(length, dtype=wire_dtype, device=flat.device))


def uncut(bucket: Bucket, leads: bool, wire_dtype: torch.dtype) -> Part:
    """Return a ``Part`` whose ``part`` is the whole bucket on the rank that leads, and None on other ranks.

    Args:
        bucket: the whole bucket.
        leads: whether this rank leads its node.
        wire_dtype: the dtype in which the bucket is sent.
    """
    flat = numbers(bucket)
    wire = None if wire_dtype == flat.dtype else torch.empty_like(flat, dtype=wire_dtype)
    return Part(bucket, bucket if leads else None, [], wire, None)


def whole_values(kept: Any, parts: Iterable[Part], group: dist.ProcessGroup) -> Any:
    """Return ``kept`` with values per slice gathered into values per whole parameter. Every rank must call.

    Args:
        kept: nested mappings; a mapping whose keys are the names of all slices of this rank holds a flat tensor for each slice.
        parts: all parts of this rank.
        group: the ranks that have the parts of a bucket.
    """
    parts = list(parts)
    found = list(_by_piece(kept, {piece.name for part in parts for piece in part.pieces}))
    # A rank without any slice cannot find the mappings by their keys; rank 0 always has slices and broadcasts where they are.
    told: list[Any] = [[(path, next(iter(values.values())).dtype) for path, values in found]]
    device = parts[0].bucket.flat.device if parts else None
    dist.broadcast_object_list(told, group=group, group_src=0, device=device)
    mine = dict(found)
    for path, dtype in told[0]:
        values: dict[str, Tensor] = {}
        for part in parts:
            values.update(_gather(part, mine.get(path, {}), dtype, group))
        kept = _replaced(kept, path, values)
    return kept


def cut_values(kept: Any, parts: Iterable[Part]) -> Any:
    """Cut the result of :func:`whole_values` into this rank's slices again; ``parts`` may differ from those given there."""
    if not isinstance(kept, Mapping):
        return kept
    parts = list(parts)
    if not kept or not all(isinstance(value, Tensor) for value in kept.values()):
        return {key: cut_values(value, parts) for key, value in kept.items()}
    return {
        piece.name: kept[piece.parameter][piece.begin : piece.end]
        for part in parts
        for piece in part.pieces
        if piece.parameter in kept
    }


def _counts(bucket: Bucket) -> list[int]:
    return [p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters]


def _by_piece(kept: Any, names: set[str], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each mapping whose keys are the slice names: the path of keys that leads to it, and the mapping."""
    if isinstance(kept, Mapping) and names:
        if kept.keys() == names:
            yield path, kept
        else:
            for key, value in kept.items():
                yield from _by_piece(value, names, (*path, key))


def _replaced(kept: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    return {**kept, path[0]: _replaced(kept.get(path[0], {}), path[1:], value)}


def _gather(part: Part, kept: Mapping[str, Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Gather the slices of one bucket from all ranks; return whole flat tensors by parameter."""
    assert part.own is not None
    own = torch.zeros(part.own.numel(), dtype=dtype, device=part.own.device)
    if part.pieces:
        values = torch.cat([kept[piece.name] for piece in part.pieces])
        own[: values.numel()].copy_(values)
    gathered = own.new_empty(group.size() * own.numel())
    versions.all_gather_single(gathered, own, group=group)
    counts = _counts(part.bucket)
    values = gathered[: sum(counts)].split(counts)
    return {name: value.clone() for name, value in zip(part.bucket.names, values, strict=True)}
