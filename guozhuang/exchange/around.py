"""Base classes of exchanges that wrap another one: each method calls the inner exchange's, unless the wrapper overrides it.

A wrapper keeps the inner exchange in one of its fields, and the inner exchange's state in its own state.
``class WeightWarmup(AroundWeights[...], inner="then")`` names the field; without a name it is ``inner``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from typing_extensions import override

from .base import Exchange, GradientExchange, State
from .weights import WeightExchange


class _Around(Exchange[State]):
    """The methods that wrappers of gradient exchanges and of weight exchanges share."""

    _inner_field: ClassVar[str] = "inner"

    def __init_subclass__(cls, inner: str = "inner", **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._inner_field = inner

    @property
    def _inner(self) -> Any:
        return getattr(self, self._inner_field)

    def inner_state(self, state: State) -> Any:
        """Return the inner exchange's state, given the wrapper's; by default the two are the same object."""
        return state

    def inner_acts(self, state: State) -> bool:
        """Return whether the inner exchange currently acts on this rank; if not, calls are not forwarded to it."""
        return True

    @override
    def state_dict(self, state: State) -> dict[str, Any]:
        return self._inner.state_dict(self.inner_state(state)) if self.inner_acts(state) else {}

    @override
    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(self.inner_state(state), saved)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> Any:
        """Return the bytes that the inner exchange sends."""
        return self._inner.traffic(num_elements, element_bytes, world_size)


class AroundGradients(_Around[State], GradientExchange[State]):
    """An exchange of gradients that wraps another one. A subclass defines ``prepare`` and ``start``."""

    @property
    @override
    def one_round(self) -> bool:
        return bool(self._inner.one_round)

    @property
    @override
    def averages(self) -> bool:
        return bool(self._inner.averages)

    @property
    @override
    def sums(self) -> bool:
        return bool(self._inner.sums)

    @override
    def input_scale(self, world_size: int) -> float:
        return float(self._inner.input_scale(world_size))


def _forwarded(name: str) -> Callable[..., None]:
    """Return a method that calls the inner exchange's method of that name, if the inner exchange acts at the time."""

    def method(self: AroundWeights[Any], state: Any, *step: int) -> None:
        if self.inner_acts(state):
            getattr(self._inner, name)(self.inner_state(state), *map(self.inner_step, step))

    return method


class AroundWeights(_Around[State], WeightExchange[State]):
    """An exchange of weights that wraps another one. A subclass defines ``prepare``."""

    def inner_step(self, step: int) -> int:
        """Return the step number to pass to the inner exchange in the wrapper's step ``step``."""
        return step

    @property
    @override
    def in_step(self) -> bool:
        return bool(self._inner.in_step)

    @override
    def averages_gradients(self, step: int) -> bool:
        return bool(self._inner.averages_gradients(self.inner_step(step)))

    @override
    def averages_over_all(self, step: int) -> bool:
        return bool(self._inner.averages_over_all(self.inner_step(step)))

    @override
    def gradients(self) -> GradientExchange[Any] | None:
        found: GradientExchange[Any] | None = self._inner.gradients()
        return found

    miss_step = _forwarded("miss_step")
    before_step = _forwarded("before_step")
    after_step = _forwarded("after_step")
    agree = _forwarded("agree")
    rest = _forwarded("rest")
    close = _forwarded("close")
    end = _forwarded("end")
