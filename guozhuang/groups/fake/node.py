"""A fake group of ranks on one node, and the segments that they would share.

[Note: memory of the others] In a reduction in place a rank reads and writes its part of every rank's tensor, so the kernel
counts 1/n of each of the others' for it too: of a tensor of S bytes S + (n-1)/n S. A fake rank maps as much and commits it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from guozhuang.groups.shared_memory.segments import Segment

from .process_group import FakeGroup

_SMALL_BYTES: Final = 64 << 10  # tensors up to this size share pages
_BESIDE_BYTES: Final = 4 << 20  # areas for small tensors, rings, threads: as measured with 2 and 4 ranks


class FakeNodeGroup(FakeGroup):
    """A fake group of ranks on one node that would share memory, as those of the backend "shm" do."""

    _copies = False
    _beside_bytes = _BESIDE_BYTES

    def empty(self, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory that the group would reduce in place, with as much as this rank would map of the others'."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes <= _SMALL_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        segment = Segment.create(num_bytes + num_bytes * (self._size - 1) // self._size, "fake", committed=True)
        segment.close_descriptor()
        return segment.tensor(0, num_elements, dtype)

    def segments(self) -> FakeSegments:
        """Return what makes further segments that all ranks would map."""
        return FakeSegments(self)


class FakeSegments:
    """Stands for ``SharedSegments``: the segments of the other ranks are memory of this process, with zeros.

    Args:
        group: the ranks, all on one node.
    """

    def __init__(self, group: FakeNodeGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def meet(self, what: bytes, private: bytes = b"") -> tuple[bytes, ...]:
        """Record a meeting; return what each rank would say, which is the same on all."""
        group = self._group
        group._record("meeting", 0, group._ranks, blocking=True)
        group.recorder.go_on()
        return (private,) * self.size

    def make(self, num_bytes: int, name: str, only: int | None = None) -> list[Segment | None]:
        """Make the segments of all ranks, each of this rank's size; see ``SharedSegments.make``."""
        self.meet(b"sharing memory")
        return [
            Segment.create(num_bytes, f"{name}-{rank}") if num_bytes and only in (None, rank) else None
            for rank in range(self.size)
        ]
