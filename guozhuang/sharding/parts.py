"""Assigns weights to ranks: parameters are put in buckets, buckets cut in slices, slices in blocks. No communication.

A bucket is one flat tensor that holds parameters of one optimizer group, dtype and device, one after the other. Rank r
owns the r-th of its ``num_ranks`` slices. There are two kinds of members, never in one bucket:
 - Parameters that are stepped element by element. The slices are equal, and cut through parameters. The user's optimizer sees
   a slice as blocks: 1-dimensional pieces small enough that an optimizer which passes over its tensors several times finds
   them in the cache.
 - *Whole* members, for an optimizer that needs each matrix as it is. Each has one owner, chosen so that all ranks have nearly
   equal work: the costliest parameters first, each to the rank that has least so far (Graham, Bounds on Multiprocessing Timing
   Anomalies, 1969: at most 4/3 of the best). A bucket holds the parameters in the order of their owners, and slices end where
   owners change, so that a slice may be of any size, or empty. The optimizer sees one block for each parameter, in its shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..gradients.buckets import DEFAULT_CAP_BYTES, Caps, Slot, assign, dense_stride

#: Every parameter, slice and block begins at a multiple of this many elements: 64 bytes of float32.
ALIGN_ELEMENTS = 16
#: Upper bound of a block: its weight, gradient and two tensors of state in float32 fit into a second-level cache.
BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Member:
    """The properties of one parameter on which the layout depends.

    Attributes:
        num_elements: number of elements, which may be 0.
        dtype: dtype of the parameter, its gradient and its flat tensor.
        device: device of the parameter.
        group: index of the parameter's group in the optimizer.
        position: the parameter's index in the model; later parameters get their gradients earlier.
        cost: None for a parameter that is stepped element by element; for a whole one what its step costs, in any unit.
    """

    num_elements: int
    dtype: torch.dtype
    device: torch.device
    group: int
    position: int
    cost: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the parameter has one owner."""
        return self.cost is not None


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, end) of a parameter, counted in memory order; they lie at ``offset`` of the bucket's flat tensor."""

    parameter: int
    start: int
    end: int
    bucket: int
    offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """Elements [start, end) of a bucket's flat tensor, which one rank's optimizer holds as one parameter.

    Attributes:
        group: index of the parameter group in the optimizer.
        bucket: index of the bucket.
        start: first element, a multiple of :data:`ALIGN_ELEMENTS`.
        end: one behind the last element. Between and behind the pieces there may be padding.
        pieces: the parts of parameters in this block, in order; never empty.
        is_whole: whether the optimizer holds the block's only parameter in its shape; else the block is 1-dimensional.
    """

    group: int
    bucket: int
    start: int
    end: int
    pieces: tuple[Piece, ...]
    is_whole: bool = False

    @property
    def num_elements(self) -> int:
        """The block's number of elements, with the padding."""
        return self.end - self.start

    @property
    def parameters(self) -> frozenset[int]:
        """Indices of the parameters that have a piece in this block."""
        return frozenset(piece.parameter for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Parameters that lie one after the other in one flat tensor.

    Attributes:
        index: position in the order in which gradients are expected and collectives are issued.
        group: index of the parameter group in the optimizer.
        dtype: dtype of the flat tensor.
        device: device of the flat tensor.
        parameters: indices of the parameters, in flat order.
        offsets: where each parameter begins, in elements.
        num_elements: size with all padding, a multiple of :data:`ALIGN_ELEMENTS`.
        slice_starts: where each rank's slice begins, and last ``num_elements``.
        is_whole: whether the parameters have one owner each, so that the slices are not equal.
    """

    index: int
    group: int
    dtype: torch.dtype
    device: torch.device
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    num_elements: int
    slice_starts: tuple[int, ...]
    is_whole: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the flat tensor in bytes."""
        return self.num_elements * self.dtype.itemsize

    def slice_of(self, rank: int) -> tuple[int, int]:
        """Return the range of elements that ``rank`` owns: the first one, and one behind the last."""
        return self.slice_starts[rank], self.slice_starts[rank + 1]

    @property
    def slice_sizes(self) -> list[int]:
        """The number of elements of each rank's slice."""
        return [end - start for start, end in itertools.pairwise(self.slice_starts)]


@dataclass(frozen=True)
class BucketLayout:
    """The assignment of elements to buckets, ranks and blocks; the same on all ranks.

    Attributes:
        num_ranks: number of slices of a bucket.
        members: the parameters that require a gradient, by index, in the user's order over all groups.
        buckets: all buckets, in the order in which their collectives are issued.
        block_elements: upper bound of a block.
    """

    num_ranks: int
    members: tuple[Member, ...]
    buckets: tuple[FlatBucket, ...]
    block_elements: int = BLOCK_ELEMENTS

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each parameter, the index of its bucket and its offset in that bucket, in elements."""
        found: dict[int, tuple[int, int]] = {}
        for bucket in self.buckets:
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                found[parameter] = (bucket.index, offset)
        return tuple(found[i] for i in range(len(self.members)))

    def blocks_of(self, rank: int, separate: Collection[int] = frozenset()) -> list[Block]:
        """Return the blocks of a rank, ordered by group, bucket and start.

        Args:
            rank: the rank that owns them.
            separate: indices of parameters that may not share a block with any other.
        """
        blocks = [block for bucket in self.buckets for block in self._cut(bucket, rank, separate)]
        return sorted(blocks, key=lambda block: (block.group, block.bucket, block.start))

    def pieces_in(self, bucket: FlatBucket, low: int, high: int) -> Iterator[Piece]:
        """Yield the pieces of parameters in the elements ``low`` to ``high`` of a bucket, in element order."""
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            first, last = max(offset, low), min(offset + self.members[parameter].num_elements, high)
            if first < last:
                yield Piece(parameter, first - offset, last - offset, bucket.index, first)

    def describe(self) -> list[str]:
        """Return a text for each bucket; ranks compare these texts to find different layouts."""
        return [
            f"bucket {b.index} of group {b.group}: {b.num_elements} {str(b.dtype).removeprefix('torch.')}, "
            f"parameters {', '.join(map(str, b.parameters))}"
            + (f", slices of {', '.join(map(str, b.slice_sizes))}" if b.is_whole else "")
            for b in self.buckets
        ]

    def _cut(self, bucket: FlatBucket, rank: int, separate: Collection[int]) -> Iterator[Block]:
        if bucket.is_whole:
            for piece in self.pieces_in(bucket, *bucket.slice_of(rank)):
                end = piece.offset + aligned(piece.end)
                yield Block(bucket.group, bucket.index, piece.offset, end, (piece,), is_whole=True)
            return
        for start, end in self._runs(bucket, *bucket.slice_of(rank), separate):
            for low in range(start, end, self.block_elements):
                high = min(low + self.block_elements, end)
                pieces = tuple(self.pieces_in(bucket, low, high))
                if pieces:
                    yield Block(bucket.group, bucket.index, low, high, pieces)

    def _runs(self, bucket: FlatBucket, start: int, end: int, separate: Collection[int]) -> Iterator[tuple[int, int]]:
        """Cut [start, end) so that each parameter in ``separate`` has a range of its own."""
        begin = start
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            if parameter not in separate:
                continue
            low, high = max(offset, start), min(offset + aligned(self.members[parameter].num_elements), end)
            if low >= high:
                continue
            if begin < low:
                yield begin, low
            yield low, high
            begin = high
        if begin < end:
            yield begin, end


def aligned(num_elements: int) -> int:
    """Round ``num_elements`` up to a multiple of :data:`ALIGN_ELEMENTS`."""
    return -(-num_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def lay_out(
    members: Sequence[Member],
    num_ranks: int,
    cap_bytes: int = DEFAULT_CAP_BYTES,
    block_elements: int = BLOCK_ELEMENTS,
) -> BucketLayout:
    """Assign the elements of parameters to buckets, ranks and blocks.

    Args:
        members: the parameters, by index.
        num_ranks: number of ranks that share the work.
        cap_bytes: upper bound of a bucket; a bucket of a single parameter may exceed it.
        block_elements: upper bound of a block, a multiple of :data:`ALIGN_ELEMENTS`.
    """
    assert num_ranks > 0 and block_elements > 0 and block_elements % ALIGN_ELEMENTS == 0
    owners = _owners(members, num_ranks)
    found: list[tuple[int, tuple[int, ...]]] = []  # buckets, each with the position of its last parameter in backward
    for group, is_whole in sorted({(m.group, m.is_whole) for m in members}):
        indices = [i for i, m in enumerate(members) if (m.group, m.is_whole) == (group, is_whole)]
        indices.sort(key=lambda i: -members[i].position)
        slots = [Slot(aligned(members[i].num_elements), members[i].dtype, members[i].device) for i in indices]
        for bucket in assign(slots, range(len(slots)), Caps((cap_bytes,))):
            chosen = tuple(indices[k] for k in bucket)
            found.append((min(members[i].position for i in chosen), chosen))
    found.sort(key=lambda item: -item[0])
    buckets = tuple(_bucket(members, owners, num_ranks, index, chosen) for index, (_, chosen) in enumerate(found))
    return BucketLayout(num_ranks, tuple(members), buckets, block_elements)


def _owners(members: Sequence[Member], num_ranks: int) -> dict[int, int]:
    """Return the rank that owns each whole member, by index: costliest first, each to the rank with the least so far."""
    costs = {i: m.cost for i, m in enumerate(members) if m.cost is not None}
    load, owners = [0.0] * num_ranks, {}
    for i in sorted(costs, key=lambda i: (-costs[i], i)):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def _bucket(
    members: Sequence[Member], owners: dict[int, int], num_ranks: int, index: int, chosen: tuple[int, ...]
) -> FlatBucket:
    first = members[chosen[0]]
    if first.is_whole:
        chosen = tuple(sorted(chosen, key=lambda i: owners[i]))  # in one owner's slice the order stays
    sizes = [aligned(members[i].num_elements) for i in chosen]
    total = sum(sizes)
    if first.is_whole:
        of_rank = [sum(n for i, n in zip(chosen, sizes, strict=True) if owners[i] == r) for r in range(num_ranks)]
    else:
        of_rank = [aligned(-(-max(total, 1) // num_ranks))] * num_ranks
    starts = tuple(itertools.accumulate(of_rank, initial=0))
    offsets = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    kind = first.group, first.dtype, first.device
    return FlatBucket(index, *kind, chosen, offsets, starts[-1], starts, first.is_whole)


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor``'s elements as a 1-dimensional tensor, in the order in which those of ``like`` lie in memory.

    The result is a view if ``tensor`` has that order itself, else a copy.

    Args:
        tensor: has the shape of ``like``.
        like: a parameter.
    """
    tensor = tensor.detach()
    stride = dense_stride(like)
    if tensor.numel() > 1 and tuple(tensor.stride()) != stride:
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
