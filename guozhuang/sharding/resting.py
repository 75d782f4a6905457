"""``RestingOptimizer``: a sharded optimizer that can stop dividing the weights between two steps, and begin again.

While it rests each rank has all weights in memory of its own and the whole state, and the user's optimizer steps all of them;
the caller sees to it that gradients are averaged, as DistributedDataParallel does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from typing_extensions import override

from .optimizer import ShardedOptimizer
from .state import Values


class RestingOptimizer(ShardedOptimizer):
    """Divides nothing after it was made, until :meth:`begin`. Made by ``shard(..., begins_at_rest=True)``.

    Attributes:
        is_resting: whether it divides nothing now.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._settle()

    @property
    def is_resting(self) -> bool:
        """Whether the weights and the state are whole on each rank now."""
        return self._is_later

    def rest(self) -> None:
        """Make weights and state whole on each rank. Every rank must call it, between two steps."""
        self._is_later = True
        self._rebuild()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            # The carrier's memory: all ranks of a node may share it, and it is freed with its last user.
            parameter.data = parameter.data.clone()
        self._settle()

    def _settle(self) -> None:
        """Give the state of whole parameters to the user's optimizer, which steps them while this one rests."""
        self.inner.state.update(self._others)
        self._others = {}

    @property
    @override
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        return self.inner.state if self.is_resting else super().state

    @override
    def _step(self, grad_scaler: Any) -> None:
        if not self.is_resting:
            super()._step(grad_scaler)
            return
        self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers, where nothing is stepped
        held = [group["params"] for group in self.param_groups]
        if grad_scaler is not None:
            gradients = [p.grad for params in held for p in params if p.grad is not None]
            if not self.unscale_together(grad_scaler, gradients, self.device, (self.group,)):
                return
        with self.inner_holds(held):
            self.inner.step()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        was_resting = self.is_resting
        if was_resting:
            self.begin()  # so that states keep their dtypes and ranks compare what they load, as at all times
        super().load_state_dict(state_dict)
        if was_resting:
            self.rest()

    @override
    def _whole(self) -> dict[Any, Values]:
        found = super()._whole()
        return found | {p: values for p, values in self.inner.state.items() if p in self._given}

    @property
    def _given(self) -> set[Tensor]:
        return {p for group in self.param_groups for p in group["params"]}
