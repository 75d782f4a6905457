"""``DistributedOptimizer`` with BytePS's contract, on the exchange of gradients of the layer for Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from guozhuang import world
from guozhuang.compat.horovod.common.process_sets import global_process_set
from guozhuang.compat.horovod.torch import optimizer as combining
from guozhuang.compat.horovod.torch.compression import Compression
from guozhuang.compat.horovod.torch.gradient_units import GradientUnits
from guozhuang.compat.horovod.torch.named_parameters import names_of
from guozhuang.compat.horovod.torch.submitting import Average
from guozhuang.compat.prepared import say_once
from guozhuang.errors import explain
from guozhuang.exchange.parameter_server import AsyncParameterServer

from .session import declared, here, is_asynchronous

_NO_BOUND: Final = 2**31 - 1  # of how far asynchronous workers may be apart: BytePS knows none


class _AveragingOptimizer(combining._DistributedOptimizer):
    """The user's optimizer, which averages gradients over all ranks before each step."""

    _warns_of_two_exchanges = False  # BytePS sends again in silence

    @property
    def _push_pull_delay(self) -> dict[Tensor, int]:
        return self._allreduce_delay

    @property
    def _requires_update(self) -> set[Tensor]:
        return {one.parameter for one in self._exchange.hooked}

    @override
    def _may_zero(self) -> None:
        """Let go of the gradients that are under way, at any time: what was sent is what the next step uses."""
        for parameter in self._exchange.sent():
            parameter.grad = None


_DistributedOptimizer = _AveragingOptimizer  # the name that scripts know


class _AsyncOptimizer(combining._Distributed):
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


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Make an optimizer step on the mean of all ranks' gradients. Every rank must call, after ``bps.init()``.

    While backward runs each gradient is sent as soon as it is computed; ``step()`` waits for the results. With
    BYTEPS_ENABLE_ASYNC=1 each rank steps on its own gradients, and adds its step to weights that servers hold.

    Args:
        optimizer: any torch optimizer; the returned one shares its parameter groups and state.
        named_parameters: pairs of name and parameter, for all parameters of the optimizer (``model.named_parameters()``).
            Ranks match gradients by these names. None: by the place in the optimizer, counted through all groups.
        compression: the compressor of gradients that are sent; not used in asynchronous training, which sends none.
        backward_passes_per_step: number of backward passes whose gradients are added up on this rank before they are sent.
            They are not divided by that number.

    Returns:
        An object of a class with the name of the optimizer's own, derived from it.

    Raises:
        ValueError: not initialised; names are missing or double; a number or an object is no right one.
        AssertionError: asynchronous training of one rank.
    """
    size = here().size
    combining.check_arguments(optimizer, compression)
    combining.checked_passes(backward_passes_per_step)
    given = names_of(named_parameters, optimizer.param_groups)
    declared.of_training(given.values())
    if is_asynchronous() and size < 2:
        what = "BYTEPS_ENABLE_ASYNC=1 needs several ranks (DMLC_NUM_WORKER > 1)"
        raise AssertionError(explain(what, value=size, fix="start more, or leave the variable out"))
    names = {p: f"Gradient.{name}" for p, name in given.items()}
    kind = _AsyncOptimizer if is_asynchronous() else _AveragingOptimizer
    made = combining.derived(kind, optimizer)
    made._take_over(optimizer, names, Average, global_process_set)
    units = (global_process_set, backward_passes_per_step, compression, Average, 1.0, False)
    made._exchange = GradientUnits(names, *units)
    made._is_exchanging = False
    if kind is _AveragingOptimizer:
        made._hook()
        if size > 1:
            begin_with_zeros(names)
    else:
        say_once("asynchronous training: ranks do not wait for each other, servers add up what their steps change")
    return made


def begin_with_zeros(parameters: Iterable[Tensor]) -> None:
    """Give each trainable parameter a gradient of zeros, as BytePS does; what it has already is overwritten."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
