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
from torch.utils.dlpack import from_dlpack, to_dlpack

from guozhuang.gradients.buckets import DEFAULT_CAP_BYTES, Allocate, Caps, Slot, assign

_storage_use_count = torch._C._storage_Use_Count


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients; a program may choose another one than that of the parameter."""
    return parameter.grad_dtype or parameter.dtype


class Place:
    """The place of one gradient.

    [Note: kept gradients] After ``zero_grad`` has set ``.grad`` to None a program may still hold the gradient of an earlier
    step, or something that shares its memory (``p.grad.detach()``). It must not change under its hands. Nobody says so, but
    references do: the gradient has a storage of its own, over the memory of its place, and more references to the tensor or to
    that storage than our own tell. A tensor that is held is given memory of its own. Other tensors over the memory cannot be;
    they keep it, and the place moves. ``p.grad.data = ...``, which ``module.to(...)`` does too, leads a tensor away from it.

    Args:
        flat: what it lies in.
        offset: where in it, in elements.
        parameter: whose gradient it is.
        allocate: gives flat tensors of zeros.

    Attributes:
        wire: what is submitted: all elements of the place in the order of memory, contiguous.
        gradient: the same memory in the shape and memory format of the parameter, in the dtype of the wire. Autograd takes it
            for a tensor of its own, so that in-place calls which it refuses on views work. It has a version counter of its own
            too, so what the engine writes does not look like a change by the program.
    """

    def __init__(self, flat: Tensor, offset: int, parameter: Tensor, allocate: Allocate) -> None:
        self._allocate, self._shape = allocate, parameter.shape
        # Only the strides are asked for; an expanded or overlapping parameter gets those of a contiguous one.
        self._strides = torch.empty_like(parameter, device="meta").stride()
        dims = [d for d in range(parameter.dim()) if parameter.shape[d] > 1]
        outermost_first = sorted(dims, key=lambda d: -self._strides[d])
        self._wire_shape = list(parameter.shape)
        if outermost_first != dims:
            # One dim more than there are: a rank with another memory format differs in shape, and does not add up strangers.
            self._wire_shape = [parameter.shape[d] for d in outermost_first] + [1] * (parameter.dim() + 1 - len(dims))
        self._lie_in(flat[offset : offset + parameter.numel()])

    def is_taken_by(self, gradient: Tensor | None) -> bool:
        """Whether this gradient lies in the place."""
        return gradient is self.gradient and self.gradient.data_ptr() == self._address

    def leave_kept(self) -> bool:
        """Before the place is filled anew: leave its value to who still holds it. See [Note: kept gradients].

        Returns:
            Whether the place has moved, and with it ``wire``.
        """
        was_led_away = self.gradient.data_ptr() != self._address
        if _storage_use_count(self._storage._cdata) > self._own_tensors - was_led_away:
            self._lie_in(self._allocate(self._memory.numel(), self._memory.dtype, self._memory.device))
            return True
        if was_led_away:
            self._show()
        elif sys.getrefcount(self.gradient) > self._own_references:
            self.gradient.set_(self.gradient.clone())  # type: ignore[call-overload]
            self._show()
        return False

    def _lie_in(self, memory: Tensor) -> None:
        self._memory, self.wire = memory, memory.view(self._wire_shape)
        self._show()

    def _show(self) -> None:
        self._storage = from_dlpack(to_dlpack(self._memory)).untyped_storage()
        self.gradient = torch.empty(0, dtype=self._memory.dtype, device=self._memory.device)
        self.gradient.set_(self._storage, 0, self._shape, self._strides)
        self._address = self.gradient.data_ptr()
        self._own_references = sys.getrefcount(self.gradient)
        self._own_tensors = _storage_use_count(self._storage._cdata)


class GradientLayout:
    """The places of some parameters, by index.

    Args:
        parameters: in the order of their registration; dense, with elements.
        allocate: gives flat tensors of zeros.
        wire_dtype: the dtype in which gradients of a dtype travel.
    """

    def __init__(
        self, parameters: Sequence[Tensor], allocate: Allocate, wire_dtype: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        self._parameters, self._allocate = parameters, allocate
        slots = [Slot(p.numel(), wire_dtype(gradient_dtype(p)), p.device) for p in parameters]
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
            self._places[i] = Place(flat, offset, self._parameters[i], self._allocate)
            offset += self._slots[i].num_elements
        made = self._places[index]
        assert made is not None
        return made
