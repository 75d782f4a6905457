"""Build each collective as a Program: which rank copies or combines which bytes, through which memory, in which round.

Pure functions of addresses and sizes. A collective travels in one of three ways:

- one shot: for small tensors. Every rank copies its input into its one-shot area; after one barrier each rank reads its part.
- staged: through the ranks' rings, in chunks; each round works on several chunks, one per stage.
- in place: the inputs (or outputs) are in memory that the peers map, so nothing is copied twice.

One shot and staged are the same program over different windows: see ``Window``. Every byte sent by a rank is written by that
rank, except in place, where the rank that combined a part writes the result to all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from .program import ChunkPlace, ChunkStream, Program, StreamKind

ALIGNMENT_BYTES: Final = 64  # lanes and parts begin at cache lines: no two ranks write to the same line
NUM_SLOTS: Final = 3  # slots of a ring: in each round one is written, one combined, one read
# Bytes between two barriers: few enough that all ranks' windows stay in the cache, enough that few barriers are needed.
CHUNK_BYTES: Final = 512 * 1024
CROWDED_CHUNK_BYTES: Final = 1024 * 1024  # used when ranks outnumber cores: each barrier then costs a context switch


class MemoryRange(NamedTuple):
    """A range of bytes in this rank's own memory."""

    address: int
    num_bytes: int


class Combining(NamedTuple):
    """The operation by which a reduction combines elements; see ``ChunkStream``.

    Attributes:
        dtype: a ``DType``.
        op: an ``Op``.
        scale: factor after combining.
        name: the operation's name, for errors.
    """

    dtype: int
    op: int
    scale: float = 1.0
    name: str = ""


class Window(NamedTuple):
    """Shared memory of every rank through which data travels, divided into lanes; each lane holds one chunk at a time.

    Attributes:
        bases: the window's address, by rank.
        lane_bytes: the size of a lane; a multiple of 64.
        slot_bytes: distance between the three slots of a ring, each with all lanes; 0: one slot, every piece is one chunk.
    """

    bases: tuple[int, ...]
    lane_bytes: int
    slot_bytes: int

    def lane(self, rank: int, lane: int) -> ChunkPlace:
        """Return where the chunks of a lane, one of the window's divisions, lie in a rank's window."""
        return ChunkPlace(self.bases[rank] + lane * self.lane_bytes, self.slot_bytes)

    def num_chunks(self, num_bytes: int) -> int:
        """Return the number of chunks of the longest piece (``num_bytes``); at least 1, so that every program has a barrier."""
        return max(-(-num_bytes // self.lane_bytes), 1)


def one_shot_window(bases: Sequence[int], area_bytes: int, num_lanes: int, longest_bytes: int) -> Window | None:
    """Return a window over the ranks' one-shot areas; None if the pieces do not fit into one area.

    Args:
        bases: address of the area, by rank.
        area_bytes: size of one area.
        num_lanes: how many pieces one rank has in its area at the same time.
        longest_bytes: size of the longest piece of any rank.
    """
    lane_bytes = aligned(max(longest_bytes, 1))
    return Window(tuple(bases), lane_bytes, 0) if lane_bytes * num_lanes <= area_bytes else None


def ring_window(bases: Sequence[int], ring_bytes: int, num_lanes: int, longest_bytes: int, crowded: bool) -> Window:
    """Return a window over the ranks' rings, through which pieces of any size pass in chunks.

    Args:
        bases: address of the ring, by rank.
        ring_bytes: size of one ring.
        num_lanes: how many pieces one rank has in its ring at the same time.
        longest_bytes: size of the longest piece of any rank.
        crowded: whether ranks outnumber cores.
    """
    largest = ring_bytes // (NUM_SLOTS * num_lanes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    assert largest > 0, "the ring is too small for this many ranks"
    wanted = CROWDED_CHUNK_BYTES if crowded else CHUNK_BYTES
    lane_bytes = min(largest, wanted, aligned(max(longest_bytes, 1)))
    return Window(tuple(bases), lane_bytes, lane_bytes * num_lanes)


def aligned(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def parts_of(num_bytes: int, num_parts: int) -> list[tuple[int, int]]:
    """Divide bytes into parts at cache-line borders: ``(offset, num_bytes)`` by rank; the last ones may be shorter or empty."""
    each = aligned(-(-num_bytes // num_parts))
    bounds = [min(each * i, num_bytes) for i in range(num_parts + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


class Moves(NamedTuple):
    """The pieces that one rank moves: broadcast, gather, scatter, all_gather and all_to_all differ only in these.

    Attributes:
        num_lanes: how many lanes each rank's window needs.
        sent: ``(lane, piece)``: this rank copies the piece into this lane of its window.
        taken: ``(rank, lane, piece)``: this rank copies that rank's lane into the piece.
        kept: ``(address, piece)``: this rank copies its own bytes at the address into the piece.
        longest_bytes: the size of the longest piece that any rank sends.
    """

    num_lanes: int
    sent: Sequence[tuple[int, MemoryRange]]
    taken: Sequence[tuple[int, int, MemoryRange]]
    kept: Sequence[tuple[int, MemoryRange]]
    longest_bytes: int


def exchange(window: Window, rank: int, moves: Moves) -> Program:
    """Move pieces between ranks, through a window with enough lanes."""
    _, sent, taken, kept, longest_bytes = moves
    chunk = window.lane_bytes
    streams = [
        ChunkStream(
            StreamKind.COPY, 0, piece.num_bytes, chunk, (window.lane(rank, lane),), (ChunkPlace(piece.address),)
        )
        for lane, piece in sent
        if piece.num_bytes
    ]
    # The rank copies its own bytes before the barrier, in time that it may else spend waiting for other ranks.
    streams += [_copy(piece.address, source, piece.num_bytes) for source, piece in kept if piece.num_bytes]
    streams += [
        ChunkStream(
            StreamKind.COPY, 1, piece.num_bytes, chunk, (ChunkPlace(piece.address),), (window.lane(peer, lane),)
        )
        for peer, lane, piece in taken
        if piece.num_bytes
    ]
    return Program(tuple(streams), window.num_chunks(longest_bytes) + 1)


def fetch(taken: Sequence[tuple[int, MemoryRange]]) -> Program:
    """Copy from peers' memory that this rank maps: from each address to its piece.

    Peers may change their memory after the last barrier.
    """
    streams = [_copy(piece.address, source, piece.num_bytes) for source, piece in taken if piece.num_bytes]
    return Program(tuple(streams), 1, trailing_barrier=True)


def read(taken: Sequence[tuple[int, int, MemoryRange]], kept: Sequence[tuple[int, MemoryRange]] = ()) -> Program:
    """Copy from memory of the peers' own processes: ``taken`` has rank, address there and piece; ``kept`` is as in ``Moves``.

    Peers may change their memory after the last barrier.
    """
    streams = [
        ChunkStream(
            StreamKind.READ,
            0,
            piece.num_bytes,
            piece.num_bytes,
            (ChunkPlace(piece.address),),
            (ChunkPlace(source),),
            rank,
        )
        for rank, source, piece in taken
        if piece.num_bytes
    ]
    streams += [_copy(piece.address, source, piece.num_bytes) for source, piece in kept if piece.num_bytes]
    return Program(tuple(streams), 1, trailing_barrier=True)


def reduce_one_shot(window: Window, rank: int, piece: MemoryRange, how: Combining, root: int | None) -> Program:
    """Combine small tensors: every rank (or only ``root``) combines the tensors in all ranks' windows, which have one lane."""
    whole, num_bytes = (ChunkPlace(piece.address),), piece.num_bytes
    if not num_bytes:
        return Program((), 2)
    streams = [ChunkStream(StreamKind.COPY, 0, num_bytes, window.lane_bytes, (window.lane(rank, 0),), whole)]
    if root is None or root == rank:
        sources = tuple(whole[0] if peer == rank else window.lane(peer, 0) for peer in range(len(window.bases)))
        streams.append(_combine(1, num_bytes, window.lane_bytes, whole, sources, how))
    return Program(tuple(streams), 2)


def reduce_staged(window: Window, rank: int, piece: MemoryRange, how: Combining, root: int | None) -> Program:
    """Combine large tensors of equal size: rank r combines part r of all ranks; all ranks (or only ``root``) collect the parts.

    The window has a lane per rank. A rank does not copy its own part to it: in round j it copies chunk j of the other parts
    to its window, in round j + 1 it combines chunk j of its own part from its tensor and the peers' windows, in round j + 2 it
    reads chunk j of the other parts. Without ``root`` the result replaces the tensor; with ``root`` only the root's changes.
    """
    ranks, chunk = range(len(window.bases)), window.lane_bytes
    parts = [
        MemoryRange(piece.address + offset, num_bytes) for offset, num_bytes in parts_of(piece.num_bytes, len(ranks))
    ]
    others = [(peer, parts[peer]) for peer in ranks if peer != rank and parts[peer].num_bytes]
    mine, collects = parts[rank], root is None or root == rank
    streams = []
    if collects:
        streams += [
            ChunkStream(
                StreamKind.COPY, 2, part.num_bytes, chunk, (ChunkPlace(part.address),), (window.lane(peer, peer),)
            )
            for peer, part in others
        ]
    if mine.num_bytes:
        here = ChunkPlace(mine.address)
        sources = tuple(here if peer == rank else window.lane(peer, rank) for peer in ranks)
        # A rank that collects the result writes its own part to its tensor, and to its window for the other ranks.
        targets = ((here,) if collects else ()) + (() if root == rank else (window.lane(rank, rank),))
        streams.append(_combine(1, mine.num_bytes, chunk, targets, sources, how))
    streams += [
        ChunkStream(StreamKind.COPY, 0, part.num_bytes, chunk, (window.lane(rank, peer),), (ChunkPlace(part.address),))
        for peer, part in others
    ]
    return Program(tuple(streams), window.num_chunks(parts[0].num_bytes) + 2)


def reduce_in_place(addresses: Sequence[int], rank: int, num_bytes: int, how: Combining, root: int | None) -> Program:
    """Combine tensors that all ranks map: rank r combines part r of all ranks and writes it to all (or only to ``root``)."""
    offset, part_bytes = parts_of(num_bytes, len(addresses))[rank]
    if not part_bytes:
        return Program((), 1, trailing_barrier=True)
    sources = tuple(ChunkPlace(address + offset) for address in addresses)
    targets = sources if root is None else (sources[root],)
    return Program((_combine(0, part_bytes, part_bytes, targets, sources, how),), 1, trailing_barrier=True)


def reduce_scatter(
    window: Window, rank: int, inputs: Sequence[MemoryRange], output: int, how: Combining, longest_bytes: int
) -> Program:
    """Combine piece r of all ranks on rank r. The window needs one lane per rank; ``output`` is an address."""
    chunk = window.lane_bytes
    streams = [
        ChunkStream(
            StreamKind.COPY, 0, piece.num_bytes, chunk, (window.lane(rank, peer),), (ChunkPlace(piece.address),)
        )
        for peer, piece in enumerate(inputs)
        if peer != rank and piece.num_bytes
    ]
    mine = inputs[rank]
    if mine.num_bytes:
        sources = tuple(
            ChunkPlace(mine.address) if peer == rank else window.lane(peer, rank) for peer in range(len(window.bases))
        )
        streams.append(_combine(1, mine.num_bytes, chunk, (ChunkPlace(output),), sources, how))
    return Program(tuple(streams), window.num_chunks(longest_bytes) + 1)


def reduce_scatter_in_place(sources: Sequence[int], output: int, num_bytes: int, how: Combining) -> Program:
    """Combine this rank's piece directly from the memory of all ranks; ``sources``: the piece's address on each rank."""
    if not num_bytes:
        return Program((), 1, trailing_barrier=True)
    places = tuple(ChunkPlace(source) for source in sources)
    return Program((_combine(0, num_bytes, num_bytes, (ChunkPlace(output),), places, how),), 1, trailing_barrier=True)


def _copy(target: int, source: int, num_bytes: int) -> ChunkStream:
    return ChunkStream(
        StreamKind.COPY,
        0,
        0 if target == source else num_bytes,
        num_bytes,
        (ChunkPlace(target),),
        (ChunkPlace(source),),
    )


def _combine(
    stage: int,
    num_bytes: int,
    chunk_bytes: int,
    targets: tuple[ChunkPlace, ...],
    sources: tuple[ChunkPlace, ...],
    how: Combining,
) -> ChunkStream:
    return ChunkStream(StreamKind.REDUCE, stage, num_bytes, chunk_bytes, targets, sources, how.dtype, how.op, how.scale)
