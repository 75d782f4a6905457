"""What a collective does, as data: streams of chunks, worked on in rounds with a barrier between them.

A collective is written as one or more `Program`; an engine (engine.py) runs it. All of these are tuples, so that building
one costs little and the C engine reads it as it is. They are immutable: a program may be kept and run again.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Final, NamedTuple

import torch


class StreamKind(enum.IntEnum):
    """What a stream does with a chunk."""

    COPY = 0  # one source to one destination
    REDUCE = 1  # all sources, in the given order, to every destination


class Op(enum.IntEnum):
    """How a REDUCE combines its sources. BAND, BOR and BXOR are for integers and bool."""

    SUM = 0  # integers wrap around; bool: or
    PROD = 1  # integers wrap around; bool: and
    MIN = 2  # NaN wins; of equal values the first; bool: and
    MAX = 3  # NaN wins; of equal values the first; bool: or
    BAND = 4
    BOR = 5
    BXOR = 6


class DType(enum.IntEnum):
    """The element types that a REDUCE knows. F16 and BF16 are combined and scaled in float32, then rounded once."""

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
TORCH_DTYPES: Final = tuple(DTYPE_OF)  # by DType
ELEMENT_BYTES: Final = tuple(t.itemsize for t in TORCH_DTYPES)  # by DType


class Status(enum.IntEnum):
    """How a run ended. The ranks that come with it are those that did not arrive, or whose descriptor is not this rank's."""

    OK = 0
    LOST = 1  # the process is gone
    LEFT = 2  # it left the group
    BROKEN = 3  # a collective failed there
    LATE = 4  # the time-out ran out
    DIFFER = 5  # descriptors differ


Outcome = tuple[int, tuple[int, ...]]  # (Status as int, ranks in ascending order)


class ChunkPlace(NamedTuple):
    """Where the chunks of a stream lie: chunk j at ``base + j * chunk_bytes``, or in a ring of three slots.

    Attributes:
        base: address of chunk 0.
        ring_bytes: 0, or the distance between the slots of a ring: chunk j lies at ``base + (j % 3) * ring_bytes``.
    """

    base: int
    ring_bytes: int = 0


class ChunkStream(NamedTuple):
    """One line of work over ``num_bytes``, cut into chunks: in round i it works on chunk ``i - stage``, if there is one.

    Attributes:
        kind: COPY (one source, one destination) or REDUCE.
        stage: the round of chunk 0; >= 0.
        num_bytes: of one place, all chunks together; 0 is allowed. A multiple of the element size for REDUCE.
        chunk_bytes: > 0; the last chunk may be shorter. A multiple of the element size for REDUCE.
        dsts: where the result goes. A destination may be one of the sources; apart from that, places must not overlap.
        srcs: what is combined, in this order.
        dtype: of the elements; ignored by COPY.
        op: ignored by COPY.
        scale: factor after combining; must be 1.0 for integers and bool; ignored by COPY.
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
        """How many chunks ``num_bytes`` makes."""
        return -(-self.num_bytes // self.chunk_bytes)


class Program(NamedTuple):
    """Streams that run side by side, with a barrier of all ranks after each round but the last.

    Attributes:
        streams: within a round they work one after the other, in this order.
        num_rounds: given where this rank has less to do than others: every rank must run the same number of rounds. None:
            computed from the streams, see ``rounds``.
        trailing_barrier: a barrier after the last round too.
    """

    streams: tuple[ChunkStream, ...] = ()
    num_rounds: int | None = None
    trailing_barrier: bool = False

    @property
    def rounds(self) -> int:
        """The number of rounds: ``num_rounds``, or until the last chunk of every stream; at least 1."""
        if self.num_rounds is not None:
            return self.num_rounds
        return max((s.num_chunks + s.stage for s in self.streams if s.num_bytes), default=1)

    @property
    def num_barriers(self) -> int:
        """How many barriers a run of this program passes."""
        return max(self.rounds, 1) - 1 + self.trailing_barrier
