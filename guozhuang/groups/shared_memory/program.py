"""A collective as data: streams of chunks, processed in rounds with a barrier between rounds.

A collective is written as one or more `Program`, which an engine (engine.py) runs. All types here are tuples, so that a program
is cheap to build and the C engine can read it directly. They are immutable: a program may be stored and run again.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Final, NamedTuple

import torch


class StreamKind(enum.IntEnum):
    """The operation that a stream performs on each chunk."""

    COPY = 0  # copies one source to one destination
    REDUCE = 1  # combines all sources, in the given order, and writes the result to every destination
    READ = 2  # copies one source, which lies in the memory of another rank's process, to one destination


class Op(enum.IntEnum):
    """The operation by which a REDUCE combines its sources. BAND, BOR and BXOR are for integers and bool."""

    SUM = 0  # integers wrap around; for bool a logical or
    PROD = 1  # integers wrap around; for bool a logical and
    MIN = 2  # NaN if any source is NaN; of equal values that of the first source; for bool a logical and
    MAX = 3  # NaN if any source is NaN; of equal values that of the first source; for bool a logical or
    BAND = 4
    BOR = 5
    BXOR = 6


class DType(enum.IntEnum):
    """The element types that a REDUCE supports. F16 and BF16 are combined and scaled in float32, then rounded once."""

    F32 = 0
    F64 = 1
    F16 = 2
    BF16 = 3
    I8 = 4
    U8 = 5
    I16 = 6
    I32 = 7
    I64 = 8
    BOOL = 9


DTYPE_OF: Final = MappingProxyType(
    {
        torch.float32: DType.F32,
        torch.float64: DType.F64,
        torch.float16: DType.F16,
        torch.bfloat16: DType.BF16,
        torch.int8: DType.I8,
        torch.uint8: DType.U8,
        torch.int16: DType.I16,
        torch.int32: DType.I32,
        torch.int64: DType.I64,
        torch.bool: DType.BOOL,
    }
)
TORCH_DTYPES: Final = tuple(DTYPE_OF)  # the torch dtype of each DType, in the order of the DTypes
ELEMENT_BYTES: Final = tuple(t.itemsize for t in TORCH_DTYPES)  # size of each DType's elements


class Status(enum.IntEnum):
    """The result of running a program; ``Outcome`` adds the ranks behind it."""

    OK = 0
    LOST = 1  # a rank's process is gone
    LEFT = 2  # a rank left the group
    BROKEN = 3  # a collective failed on a rank
    LATE = 4  # ranks did not arrive within the time-out
    DIFFER = 5  # ranks passed different descriptors, so made different calls
    UNREAD = 6  # the memory of a rank's process cannot be read (any more)
    UNEXPECTED = 7  # nothing failed, but ``then`` did not run, as the ranks' private bytes were not those expected


Outcome = tuple[int, tuple[int, ...]]  # (Status as int, ranks in ascending order)


class ChunkPlace(NamedTuple):
    """The addresses of a stream's chunks: chunk j at ``base + j * chunk_bytes``, or in a ring of three slots.

    Attributes:
        base: address of chunk 0.
        ring_bytes: 0, or the distance between the slots of a ring: chunk j lies at ``base + (j % 3) * ring_bytes``.
    """

    base: int
    ring_bytes: int = 0


class ChunkStream(NamedTuple):
    """One sequence of work over ``num_bytes``, cut into chunks: in round i it processes chunk ``i - stage``, if that exists.

    Attributes:
        kind: a ``StreamKind``; COPY and READ have one source and one destination.
        stage: the round of chunk 0; >= 0.
        num_bytes: the size of one place, all its chunks together; may be 0. A multiple of the element size for REDUCE.
        chunk_bytes: > 0; the last chunk may be shorter. A multiple of the element size for REDUCE.
        dsts: where the result is written. A destination may be one of the sources; otherwise places must not overlap.
        srcs: the inputs, combined in this order.
        dtype: a ``DType``; ignored by COPY. Of a READ the rank whose memory is read.
        op: an ``Op``; ignored by COPY and READ.
        scale: factor after combining; must be 1.0 for integers and bool; ignored by COPY and READ.
    """

    kind: int
    stage: int
    num_bytes: int
    chunk_bytes: int
    dsts: tuple[ChunkPlace, ...]
    srcs: tuple[ChunkPlace, ...]
    dtype: int = DType.F32
    op: int = Op.SUM
    scale: float = 1.0

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks in ``num_bytes``."""
        return -(-self.num_bytes // self.chunk_bytes)


class Program(NamedTuple):
    """Streams that run side by side, with a barrier of all ranks after each round except the last.

    Attributes:
        streams: within a round they are processed one after the other, in this order.
        num_rounds: set if this rank has less to do than others, since every rank must run the same number of rounds. None:
            computed from the streams, see ``rounds``.
        trailing_barrier: whether a barrier follows the last round too.
    """

    streams: tuple[ChunkStream, ...] = ()
    num_rounds: int | None = None
    trailing_barrier: bool = False

    @property
    def rounds(self) -> int:
        """Return the number of rounds: ``num_rounds``, or enough for the last chunk of every stream; at least 1."""
        if self.num_rounds is not None:
            return self.num_rounds
        return max((s.num_chunks + s.stage for s in self.streams if s.num_bytes), default=1)

    @property
    def num_barriers(self) -> int:
        """Return the number of barriers in a run of this program."""
        return max(self.rounds, 1) - 1 + self.trailing_barrier
