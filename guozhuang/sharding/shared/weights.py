"""The weights of a node, stored once in shared memory, and the treatment of changes that the program makes between steps.

[Note: one copy of the weights]
Every rank reads the weights in place while it computes, and each rank's optimizer writes its own part. No rank reads a weight
while another writes it, because weights are written only inside ``step()``, between two barriers of all ranks:
 - The first barrier (``collect``): a rank reaches it after its last backward of the step. Its forward and backward, which
   read weights, are over; it does not leave before all ranks have come. So when the first element is written every
   rank is inside ``step()``, and no rank reads more than the part that it alone writes.
 - The second barrier (``publish``): a rank reaches it after its last write, and returns from ``step()`` only once all have
   done so. So code that runs after ``step()`` sees all new weights and no further write before its own next ``step()``.
Reading weights between steps (evaluation, ``state_dict``, ``deepcopy``, ``save``) therefore needs no barrier and may
happen on one rank alone: the others cannot pass the first barrier without this rank. That reasoning does not cover
code that runs while its own process is inside ``step()``: other threads, and forked processes that
share this memory. They need a copy of their own.

[Note: changes between steps]
The program may change weights in place between steps: ``load_state_dict``, ``clamp_`` under ``no_grad``, a swap with
a moving average. Under data parallelism each rank applies the same change to its own weights. If every rank applied
``mul_(0.5)`` to the one copy, it would halve it n times, while others read. So the program sees a *private* mapping of the
shared memory: a page that the program writes to becomes this rank's own, and nobody else sees it; all other pages
show the one copy. At the next step the change is found (by the version counter that autograd keeps for every parameter,
or because a parameter has other memory), ranks compare the new values, each rank copies its part of
them into the one copy between the two barriers, and drops its private pages. All ranks must make the same changes, as they
must under data parallelism; here it is checked. Writes through ``p.data`` bypass the counter, and raise when they are found:
the kernel knows which pages are private. Asking it costs 50 ns a page, so the first steps test all of the weights, and each
later step a part of them.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from ...errors import UsageError, explain
from ...gradients.buckets import view_in
from ...groups.fake import FakeSegments
from ...groups.shared_memory.segments import PrivateView, Segment, SharedSegments
from ..carrier import is_at, put_back
from ..parts import BucketLayout

ALIGN_BYTES: Final = 1 << 16  # every bucket begins at a page boundary, also on systems with 64 KiB pages
_FULL_LOOKS: Final = 3  # so many first steps test all pages for hidden writes: most programs make theirs in each step
_LOOK_SHARE: Final = 32  # each later step tests one of this many parts of the weights for hidden writes


class SegmentPlaces:
    """The offsets of buckets and parameters in a shared-memory segment, in bytes.

    Attributes:
        bucket_starts: the offset of every bucket.
        starts: the offset of every parameter.
        num_bytes: the size of all buckets together.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self.bucket_starts: list[int] = []
        at = 0
        for bucket in layout.buckets:
            self.bucket_starts.append(at)
            at += -(-bucket.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.num_bytes = at
        self.starts = [
            self.bucket_starts[bucket] + offset * member.dtype.itemsize
            for (bucket, offset), member in zip(layout.places, layout.members, strict=True)
        ]
        self.sizes = [member.num_elements * member.dtype.itemsize for member in layout.members]


class SharedWeights:
    """Moves parameters into one shared segment of the node. Every rank must make one, with equal parameters.

    See [Note: one copy of the weights] and [Note: changes between steps].

    Attributes:
        flats: the shared copy of each bucket, as a flat tensor; written only between the two barriers of a step.
        places: the tensor in the private mapping that is each parameter's ``data``.
    """

    def __init__(
        self,
        segments: SharedSegments | FakeSegments,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        where: SegmentPlaces,
    ) -> None:
        self._names, self._parameters, self._layout, self._where = names, parameters, layout, where
        self._rank = segments.rank
        # Each rank needs a further page, on which it tests that the private mapping shows changes of the segment.
        num_bytes = where.num_bytes + segments.size * mmap.PAGESIZE
        made = segments.make(num_bytes, "weights", only=0)
        assert made[0] is not None
        self._segment: Segment = made[0]
        self._view = PrivateView(self._segment)
        self._segment.close_descriptor()
        if not self._view.follows(self._segment, where.num_bytes + segments.rank * mmap.PAGESIZE):
            what = "this system does not show changes of shared memory in private mappings of it, as Linux does"
            raise UsageError(
                explain(what, rank=self._rank, fix="use another group, e.g. gloo, for the strategy sharded")
            )
        self.flats = [
            self._segment.tensor(start, bucket.num_elements, bucket.dtype)
            for bucket, start in zip(layout.buckets, where.bucket_starts, strict=True)
        ]
        self.places = [
            view_in(self._view.tensor(start, p.numel(), p.dtype), 0, p)
            for start, p in zip(where.starts, parameters, strict=True)
        ]
        if segments.rank == 0:
            for i, parameter in enumerate(parameters):
                with torch.no_grad():
                    flat = self._segment.tensor(where.starts[i], parameter.numel(), parameter.dtype)
                    view_in(flat, 0, parameter).copy_(parameter)
        segments.meet(b"the weights are in shared memory")
        for parameter, place in zip(parameters, self.places, strict=True):
            parameter.data = place
        self._num_looks = 0
        self.remember()

    def remember(self) -> None:
        """Record the version counter of every parameter, by which :meth:`changed` finds later changes."""
        self._versions = [p._version for p in self._parameters]

    def changed(self) -> list[int]:
        """Return the parameters that the program changed since :meth:`remember`, and put those with other memory back.

        Raises:
            UsageError: a parameter has another dtype, shape or device now, or was written to through ``.data`` or ``.numpy()``.
        """
        found = {i for i, p in enumerate(self._parameters) if p._version != self._versions[i]}
        for i, (parameter, place) in enumerate(zip(self._parameters, self.places, strict=True)):
            if not is_at(parameter, place):
                put_back(parameter, place, self._names[i], self._rank)
                found.add(i)
        self._look_for_hidden(found)
        return sorted(found)

    def digest(self, changed: Sequence[int]) -> int:
        """Return a 64-bit number that identifies the changed parameters and their values; 0 for no change."""
        digest = len(changed)
        for i in changed:
            start, size = self._where.starts[i], self._where.sizes[i]
            seen = (ctypes.c_char * size).from_address(self._view.address + start) if size else b""
            digest = zlib.crc32(seen, zlib.crc32(i.to_bytes(8, "little"), digest & 0xFFFFFFFF)) | len(changed) << 32
        return digest

    def take_up(self, changed: Sequence[int]) -> None:
        """Copy this rank's part of the changed weights to the shared copy, and drop this rank's private pages of them.

        Every rank must call it, between the two barriers of a step.
        """
        is_changed = frozenset(changed)
        for bucket in self._layout.buckets:
            for piece in self._layout.pieces_in(bucket, *bucket.slice_of(self._rank)):
                if piece.parameter in is_changed:
                    itemsize = bucket.dtype.itemsize
                    at = self._where.starts[piece.parameter] + piece.start * itemsize
                    num_bytes = (piece.end - piece.start) * itemsize
                    ctypes.memmove(self._segment.address + at, self._view.address + at, num_bytes)
        for i in changed:
            self._view.forget(self._where.starts[i], self._where.starts[i] + self._where.sizes[i])

    def _look_for_hidden(self, known: set[int]) -> None:
        total, turn = self._where.num_bytes, self._num_looks - _FULL_LOOKS
        self._num_looks += 1
        low, high = 0, total
        if turn >= 0:
            share = max(-(-total // _LOOK_SHARE), ALIGN_BYTES)
            low = turn * share % (-(-total // share) * share)
            high = min(low + share, total)
        own = self._view.own_pages(low, high) if low < high else []
        if not own:
            return
        for i, (start, size) in enumerate(zip(self._where.starts, self._where.sizes, strict=True)):
            if i in known or not any(at < start + size and start < at + mmap.PAGESIZE for at in own):
                continue
            # No rank writes to the shared copy now. Equal bytes are no change: another weight may have made the page private.
            mine = (ctypes.c_char * size).from_address(self._view.address + start)
            if bytes(mine) != bytes((ctypes.c_char * size).from_address(self._segment.address + start)):
                what = f"{self._names[i]} was written to through .data or .numpy(), which hides the change from the optimizer"
                fix = "write `with torch.no_grad(): p.mul_(...)`, on every rank"
                raise UsageError(explain(what, rank=self._rank, fix=fix))
        spans = [(self._where.starts[i], self._where.starts[i] + self._where.sizes[i]) for i in known]
        for at in own:  # drop private pages, which would not show later changes of the shared copy
            if not any(start < at + mmap.PAGESIZE and at < end for start, end in spans):
                self._view.forget(at, at + mmap.PAGESIZE)
