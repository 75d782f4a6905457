"""``DistributedOptimizer`` with BytePS's contract, on the exchange of gradients of the layer for Horovod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from guozhuang.compat.horovod.common.process_sets import global_process_set
from guozhuang.compat.horovod.torch import optimizer as combining
from guozhuang.compat.horovod.torch.adding import AddingOptimizer
from guozhuang.compat.horovod.torch.compression import Compression
from guozhuang.compat.horovod.torch.gradient_units import GradientUnits
from guozhuang.compat.horovod.torch.named_parameters import names_of
from guozhuang.compat.horovod.torch.submitting import Average
from guozhuang.compat.prepared import say_once
from guozhuang.errors import explain

from .session import declared, here, is_asynchronous


class _AveragingOptimizer(combining._DistributedOptimizer):
    """The user's optimizer, which averages gradients over all ranks before each step."""

    _warns_of_two_exchanges = False  # BytePS sends again in silence

    @property
    def _parameter_names(self) -> dict[int, str]:  # type: ignore[override]
        return {hash(p): name.removeprefix("Gradient.") for p, name in self._names.items()}

    @property
    def _push_pull_delay(self) -> dict[Tensor, int]:
        return self._allreduce_delay

    @property
    def _requires_update(self) -> set[Tensor]:
        return {one.parameter for one in self._exchange.hooked}

    @staticmethod
    def find_duplicates(names: Iterable[Any]) -> set[Any]:
        """Return those that come more than once."""
        return {name for name, count in Counter(names).items() if count > 1}

    @override
    def _may_zero(self) -> None:
        """Let go of the gradients that are under way, at any time: what was sent is what the next step uses."""
        for parameter in self._exchange.sent():
            parameter.grad = None


_DistributedOptimizer = _AveragingOptimizer  # the name that scripts know


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
    kind = AddingOptimizer if is_asynchronous() else _AveragingOptimizer
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
