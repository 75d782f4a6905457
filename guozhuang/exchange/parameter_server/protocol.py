"""What workers and servers say to each other: a header of six numbers, and what is to be added, if anything.

[Note: messages] A worker sends a header with tag ``HEADER``, and its payload, if it has one, with tag ``PAYLOAD``; gloo keeps
the order of messages of one tag between two processes, so the n-th payload belongs to the n-th header that announces one.
The answer to a message about part i comes with tag ``REPLY + i``, and the worker waits there before it asks: answers come in
any order, and none waits for another one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from guozhuang.errors import WorldError, explain

HEADER, PAYLOAD, REPLY = 0, 1, 2
_WORDS = 6
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


class Kind(enum.IntEnum):
    """What a message asks for."""

    SUM = 1  # add to the sum of this step; answered when all workers have
    SEED = 2  # the weights begin with those of worker 0; answered when all workers have asked
    DELTA = 3  # add to the weights at once; answered with them, when the others are near enough
    AGREE = 4  # add to the weights; answered with them when all workers have asked
    GOODBYE = 5  # nothing more will come
    REST = 6  # no step will come for a while; answered with the weights at once


@dataclass(frozen=True, slots=True)
class Message:
    """A header.

    Attributes:
        kind: what is asked for.
        layout: which layout the part is of; workers count them alike.
        part: index in the layout.
        number: the step of a sum; the bound of staleness of a seed.
        dtype: of the part.
        num_elements: of the part.
        has_payload: whether values follow; a worker that has nothing to add sends none.
    """

    kind: Kind
    layout: int = 0
    part: int = 0
    number: int = 0
    dtype: torch.dtype = torch.float32
    num_elements: int = 0
    has_payload: bool = False

    def encode(self) -> Tensor:
        """Return the header as it travels."""
        extent = 2 * self.num_elements + self.has_payload
        words = (self.kind, self.layout, self.part, self.number, _DTYPES.index(self.dtype), extent)
        return torch.tensor(words, dtype=torch.int64)

    @classmethod
    def decode(cls, header: Tensor) -> Message:
        """Read a header.

        Raises:
            WorldError: it is none of ours.
        """
        kind, layout, part, number, dtype, extent = header.tolist()
        if kind not in Kind.__members__.values() or not 0 <= dtype < len(_DTYPES) or extent < 0:
            what = "a worker sent what is no message to a parameter server"
            raise WorldError(explain(what, value=header.tolist(), fix="run the same version on all hosts"))
        return cls(Kind(kind), layout, part, number, _DTYPES[dtype], extent // 2, bool(extent % 2))

    def __str__(self) -> str:
        """Say it in words."""
        what = {Kind.SUM: f"the sum of step {self.number}", Kind.SEED: "the first weights", Kind.DELTA: "weights"}
        return f"{what.get(self.kind, 'the agreed weights')} of part {self.part}"


def empty_header() -> Tensor:
    """Make room for a header."""
    return torch.empty(_WORDS, dtype=torch.int64)


def wire(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous CPU tensor: gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)
