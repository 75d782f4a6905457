"""Flat memory: that which a channel gave out, and where in it a tensor lies; and that in which it packs."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from .table import Place

_NUM_TAKEN: Final = 100  # looks at how much was needed, before memory shrinks


class Scratch:
    """Memory that is taken again and again, one piece at a time. It grows at once, and shrinks when less was needed for long.

    Args:
        allocate: makes flat tensors: ``allocate(num_elements, dtype, device)``.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype, torch.device], Tensor]) -> None:
        self._allocate = allocate
        self._held: Tensor | None = None
        self._most = self._num_taken = 0

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A piece, with anything in it; the last one must not be used any more. Dtype and device must be always the same."""
        self._most, self._num_taken = max(self._most, num_elements), self._num_taken + 1
        size = 0 if self._held is None else self._held.numel()
        shrinks = self._num_taken >= _NUM_TAKEN and 2 * self._most < size
        if self._held is None or size < num_elements or shrinks:
            self._held = None  # before the other one is made
            self._held = self._allocate(self._most if shrinks else num_elements, dtype, device)
        if self._num_taken >= _NUM_TAKEN:
            self._most = self._num_taken = 0
        return self._held[:num_elements]


class FlatMemories:
    """Flat tensors by address.

    [Note: where tensors lie] Ranks reduce neighbouring tensors in one piece only if they are neighbours on all ranks, so what
    a rank asks for says where its tensor lies: the how-manieth flat tensor of the channel, which element. What was freed stays
    in the list until its addresses come again. That does no harm: a place is worked out from true addresses, so tensors with
    neighbouring places are neighbours, and where they are so by chance, in memory of another's, they are copied (execution.py).

    Args:
        allocate: makes flat tensors of zeros: ``allocate(num_elements, dtype, device)``.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype, torch.device], Tensor]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        # Begins, rising, and (end, number, dtype) of each; replaced as one, so that a look-up needs no lock.
        self._known: tuple[list[int], list[tuple[int, int, torch.dtype]]] = [], []
        self._num = 0

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a flat tensor of zeros in memory that the group reduces in place, and remember where it is."""
        flat = self._allocate(num_elements, dtype, device)
        begin = flat.data_ptr()
        end = begin + num_elements * flat.itemsize
        with self._lock:
            begins, held = self._known
            first = bisect.bisect_left(begins, begin)
            while first > 0 and held[first - 1][0] > begin:
                first -= 1
            last = first
            while last < len(begins) and begins[last] < end:
                last += 1
            one = end, self._num, dtype
            self._known = [*begins[:first], begin, *begins[last:]], [*held[:first], one, *held[last:]]
            self._num += 1
        return flat

    def places_of(self, tensors: tuple[Tensor, ...]) -> tuple[Place, ...] | None:
        """Where tensors lie, in elements; None unless all of them lie in one of the flat tensors."""
        if not self._known[0]:
            return None
        if len(tensors) == 1:
            place = self._place_of(tensors[0])
            return None if place is None else (place,)
        places = [self._place_of(tensor) for tensor in tensors]
        known = tuple(place for place in places if place is not None)
        return known if len(known) == len(tensors) and len({number for number, _ in known}) == 1 else None

    def _place_of(self, tensor: Tensor) -> Place | None:
        (begins, held), address = self._known, tensor.data_ptr()
        i = bisect.bisect_right(begins, address) - 1
        if i < 0:
            return None
        end, number, dtype = held[i]
        num_bytes = tensor.numel() * tensor.itemsize
        first, rest = divmod(address - begins[i], tensor.itemsize)
        if num_bytes == 0 or rest or address + num_bytes > end or tensor.dtype != dtype:
            return None
        return number, first
