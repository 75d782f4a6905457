"""An optimizer without a wrapper of the model, whose steps servers add to the weights that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist

from guozhuang import world
from guozhuang.exchange.parameter_server import AsyncParameterServer

from .optimizer import _Distributed

_NO_BOUND: Final = 2**31 - 1  # of how far workers may be apart


class AddingOptimizer(_Distributed):
    """The user's optimizer, whose steps are added to weights that servers hold; ranks do not wait for each other."""

    _servers: Any = None
    _num_steps = 0

    def synchronize(self) -> None:
        """Do nothing: gradients are not exchanged; ``step`` exchanges what it changed."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: an asynchronous step cannot do without its exchange."""
        raise AssertionError("skip_synchronize cannot be used in async training")
        yield

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step as the wrapped optimizer does, send what that changed, and take the servers' weights.

        The first call connects to the servers and gives them the weights of rank 0, which all ranks take over: every rank must
        call it. Later ones wait for no other rank.

        Raises:
            WorldError: in the first call, a rank or server did not join in time.
        """
        exchange = AsyncParameterServer(max_staleness_steps=_NO_BOUND)
        if self._servers is None:
            assert dist.group.WORLD is not None
            named = [(f"AsyncParam.{name}", p) for p, name in sorted(self._names.items(), key=lambda each: each[1])]
            self._servers = exchange.prepare([(name, p) for name, p in named if p.requires_grad], dist.group.WORLD)
            world.before_leaving(self._leave)
        arguments = (closure, *args) if closure is not None or args else ()
        result = super().step(*arguments, **kwargs)
        self._num_steps += 1
        exchange.after_step(self._servers, self._num_steps)
        self._stepped()
        return result

    step.hooked = True  # type: ignore[attr-defined]

    def _leave(self) -> None:
        if self._servers is not None:
            AsyncParameterServer().close(self._servers)
            self._servers = None
