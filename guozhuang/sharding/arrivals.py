"""The hook by which a carrier learns that autograd has accumulated a gradient."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .carrier import Carrier


class Arrival:
    """The hook that a carrier registers on each parameter; autograd calls it when the gradient has been accumulated.

    Copies and pickles of the model do not contain it: PyTorch leaves hooks of tensors out. It does not keep the carrier alive:
    tensors hold their hooks where Python's garbage collector does not see them, so model and carrier would never be freed.

    Attributes:
        parameter: the parameter's index.
    """

    def __init__(self, carrier: Carrier, parameter: int) -> None:
        self._carrier, self.parameter = weakref.ref(carrier), parameter

    @property
    def carrier(self) -> Carrier:
        """The carrier that registered this hook; it must still be alive."""
        carrier = self._carrier()
        assert carrier is not None
        return carrier

    @property
    def is_alive(self) -> bool:
        """Whether the carrier that registered this hook still exists."""
        return self._carrier() is not None

    @property
    def is_idle(self) -> bool:
        """Whether this hook does nothing with a gradient."""
        carrier = self._carrier()
        return carrier is None or not carrier.listens

    def __call__(self, parameter: Tensor) -> None:
        """Pass the gradient in ``parameter.grad`` to the carrier, if that still exists and listens."""
        if not self.is_idle:
            self.carrier.arrived(self.parameter)


def arrival_of(parameter: Tensor) -> Arrival | None:
    """Return the hook that a carrier registered on this parameter; None if there is none, or its carrier is gone."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return next((hook for hook in (hooks or {}).values() if isinstance(hook, Arrival) and hook.is_alive), None)
