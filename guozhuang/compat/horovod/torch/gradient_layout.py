"""Where gradients lie on their way: flat tensors that the channel's group reduces in place, and the place of each in them.

Parameters of one dtype and device lie next to each other in the reverse order of their registration, which is about the order
in which their gradients come: what is ready at the same time is adjacent, and travels as one without being packed. A flat
tensor is allocated when the first gradient of its parameters comes, so parameters that never get one cost nothing as long as
they fill flat tensors of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guozhuang.buckets import DEFAULT_CAP_BYTES, Allocate, Caps, Slot, assign


class Place:
    """The place of one gradient.

    Attributes:
        wire: what is submitted: all elements of the place in the order of memory, contiguous.
        gradient: the same memory in the shape and memory format of the parameter, in the dtype of the wire. Autograd takes it
            for a tensor of its own, so that in-place calls which it refuses on views work. It has a version counter of its own
            too, so what the engine writes does not look like a change by the program.
    """

    def __init__(self, flat: Tensor, offset: int, parameter: Tensor) -> None:
        # Only the strides are asked for; an expanded or overlapping parameter gets those of a contiguous one.
        strides = torch.empty_like(parameter, device="meta").stride()
        outermost_first = sorted(range(parameter.dim()), key=lambda d: -strides[d])
        self._flat, self._offset, self._strides = flat, offset, strides
        self.wire = flat[offset : offset + parameter.numel()].view([parameter.shape[d] for d in outermost_first])
        self._take(parameter.shape)

    def _take(self, shape: torch.Size) -> None:
        self.gradient = torch.empty(0, dtype=self._flat.dtype, device=self._flat.device)
        offset = self._flat.storage_offset() + self._offset
        self.gradient.set_(self._flat.untyped_storage(), offset, shape, self._strides)
        self._own_references = sys.getrefcount(self.gradient)

    def leave_kept(self) -> None:
        """Before the place is filled anew: if the program still holds the gradient of an earlier step, let that keep its value.

        After ``zero_grad`` has set ``.grad`` to None nobody says that the tensor is still held, but its references do. It is
        given memory of its own. (Other tensors that share its memory, such as ``p.grad.view(-1)``, are not found.)
        """
        if sys.getrefcount(self.gradient) > self._own_references:
            self.gradient.set_(self.gradient.clone())  # type: ignore[call-overload]
            self._take(self.gradient.shape)


class GradientLayout:
    """The places of some parameters, by index.

    Args:
        parameters: in the order of their registration; dense, with elements.
        allocate: gives flat tensors of zeros.
        wire_dtype: the dtype in which a parameter's gradient travels.
    """

    def __init__(
        self, parameters: Sequence[Tensor], allocate: Allocate, wire_dtype: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        self._parameters, self._allocate = parameters, allocate
        slots = [Slot(p.numel(), wire_dtype(p.dtype), p.device) for p in parameters]
        self._slots = slots
        self._members = assign(slots, range(len(slots) - 1, -1, -1), Caps((DEFAULT_CAP_BYTES,)))
        self._flat_of = {i: number for number, members in enumerate(self._members) for i in members}
        self._places: list[Place | None] = [None] * len(slots)

    def place(self, index: int) -> Place:
        """Return the place of a parameter, allocating what it lies in if need be."""
        found = self._places[index]
        if found is not None:
            return found
        members = self._members[self._flat_of[index]]
        num_elements = sum(self._slots[i].num_elements for i in members)
        flat = self._allocate(num_elements, self._slots[index].dtype, self._slots[index].device)
        offset = 0
        for i in members:
            self._places[i] = Place(flat, offset, self._parameters[i])
            offset += self._slots[i].num_elements
        made = self._places[index]
        assert made is not None
        return made
