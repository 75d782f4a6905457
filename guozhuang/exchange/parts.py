"""A bucket cut into one part for each rank of a node, and what is kept by part brought together by parameter, and cut again."""

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
    """What a part holds of one parameter: its numbers from ``begin`` to ``end``, under a name of their own."""

    parameter: str
    name: str
    begin: int
    end: int


@dataclass
class Part:
    """This rank's part of a bucket.

    Attributes:
        bucket: the whole.
        part: itself, as a bucket of real numbers; None where the whole has too few numbers for all ranks.
        pieces: what it is made of, in order.
        wire: where the whole travels if it cannot do so as it lies: padded, or in another dtype.
        own: where the part arrives, as long as all parts; ``part.flat`` if that is of this length and dtype. None for a bucket
            that was not cut.
    """

    bucket: Bucket
    part: Bucket | None
    pieces: list[ParameterSlice]
    wire: Tensor | None
    own: Tensor | None


def cut(bucket: Bucket, place: int, size: int, wire_dtype: torch.dtype) -> Part:
    """Make a part of a bucket: as long as those of the others, but the last ones, which may be shorter or empty.

    Args:
        bucket: the whole.
        place: whose part: that of a rank, 0 .. ``size`` - 1.
        size: how many parts there are.
        wire_dtype: in which the whole travels.
    """
    flat = numbers(bucket)
    length = -(-flat.numel() // size)
    first, last = place * length, (place + 1) * length
    pieces, begin = [], 0
    for name, count in zip(bucket.names, _counts(bucket), strict=True):
        low, high = max(first - begin, 0), min(last - begin, count)
        if low < high:
            # Another piece of the parameter has another name: what belongs to it is not taken for this one's.
            own_name = name if (low, high) == (0, count) else f"{name}[{low}:{high}]"
            pieces.append(ParameterSlice(name, own_name, low, high))
        begin += count
    one, part = flat.new_empty(1), None
    if pieces:
        stand_ins = [one.expand(piece.end - piece.begin) for piece in pieces]  # sizes without memory
        part = Bucket(bucket.index, bucket.is_last, [piece.name for piece in pieces], stand_ins)
    wire = None
    if wire_dtype != flat.dtype or length * size != flat.numel():
        wire = torch.zeros(length * size, dtype=wire_dtype, device=flat.device)
    if part is not None and wire_dtype == flat.dtype and part.flat.numel() == length:
        return Part(bucket, part, pieces, wire, part.flat)
    return Part(bucket, part, pieces, wire, torch.zeros(length, dtype=wire_dtype, device=flat.device))


def uncut(bucket: Bucket, leads: bool, wire_dtype: torch.dtype) -> Part:
    """Return the whole of a bucket as the part of the rank that leads, and no part for the others; arguments as for ``cut``."""
    flat = numbers(bucket)
    wire = None if wire_dtype == flat.dtype else torch.empty_like(flat, dtype=wire_dtype)
    return Part(bucket, bucket if leads else None, [], wire, None)


def whole_values(kept: Any, parts: Iterable[Part], group: dist.ProcessGroup) -> Any:
    """Bring together what ranks keep of their pieces: the same, by parameter. Every rank must call.

    Args:
        kept: mappings in mappings; the innermost that name all pieces of this rank hold a flat tensor for each.
        parts: all of this rank.
        group: the ranks that have the parts of a bucket.
    """
    parts = list(parts)
    found = list(_by_piece(kept, {piece.name for part in parts for piece in part.pieces}))
    # A rank without any piece cannot tell what is kept by piece; the first one has some.
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
    """Take this rank's pieces of what :func:`whole_values` brought together, perhaps for other parts."""
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
    """Yield what is kept by piece: the keys that lead to it, and itself."""
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
    """Bring together what ranks keep of one bucket."""
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
