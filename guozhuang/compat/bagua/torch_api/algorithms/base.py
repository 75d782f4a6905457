"""``Algorithm``, the choice of a method for ``with_bagua``, and the registry of the methods by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, explain
from guozhuang.exchange import GradientExchange
from guozhuang.exchange.weights import WeightExchange


def local_names(module: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that stay on their rank: those that the module lists, and those of experts."""
    lists = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")
    named = {str(name) for each in lists for name in getattr(module, each, ())}
    return named | {name for name, p in module.named_parameters() if getattr(p, "expert", False)}


class NotCopied:
    """What a copy or a pickle of a module has None in place of: a copy of the model trains alone."""

    def __reduce__(self) -> Any:
        return type(None), ()


class AlgorithmImpl(NotCopied):
    """A method at work on one model. Guozhuang's methods take the place of Bagua's hooks and operations.

    A method of your own overrides :meth:`gradients`, or :meth:`weights` and one or more of the three moments. Forwards are
    those in training mode with gradients enabled, counted from 1. All ranks call all of them in one order.

    Args:
        process_group: the group of Bagua's kind that was given to ``with_bagua``.

    Attributes:
        exchange: what :meth:`weights` returned; None without an exchange of weights.
        state: the state of ``exchange``.
        restarts_when_loaded: whether to begin anew in the first forward after weights were loaded.
    """

    restarts_when_loaded = False

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.exchange: WeightExchange[Any] | None = None
        self.state: Any = None
        self._group: dist.ProcessGroup | None = None

    def need_reset(self, forward: int) -> bool:
        """Return whether to begin anew before this forward, from rank 0's weights."""
        return False

    def gradients(self, forward: int, optimizers: Sequence[torch.optim.Optimizer]) -> GradientExchange[Any] | None:
        """Return how gradients are exchanged from this forward on; None: they stay on each rank."""
        return None

    def weights(self, forward: int) -> WeightExchange[Any] | None:
        """Return how weights are exchanged from this forward on; None: they are not."""
        return None

    def check(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], do_flatten: bool) -> None:
        """Raise an error if the method cannot train this module with these optimizers."""

    def before_forward(self, forward: int) -> None:
        """Act before a forward."""

    def after_backward(self, forward: int) -> None:
        """Act after a backward, or before the optimizer's step if that comes first."""

    def after_step(self, forward: int) -> None:
        """Act after the step of any optimizer."""

    def begin(self, named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, forward: int) -> None:
        """Prepare the exchange of weights, which are equal now. Every rank must call it."""
        self._group = group
        self.exchange = self.weights(forward)
        if self.exchange is not None and named:
            self.state = self.exchange.prepare(named, group)

    def end(self) -> None:
        """Finish started exchanges of weights, and drop their results. Every rank must call it."""
        if self.exchange is not None and self.state is not None:
            self.exchange.end(self.state)
        self.exchange = self.state = None


class Algorithm:
    """The choice of a method with its options; one object serves any number of models."""

    def reify(self, process_group: Any) -> AlgorithmImpl:
        """Return the method at work on one model; a subclass defines it."""
        what = f"{type(self).__name__} does not say which method it is"
        raise NotImplementedError(explain(what, fix="define reify(process_group), which returns an AlgorithmImpl"))

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Return the algorithm of that name, made with the options ``kwargs``.

        Raises:
            KeyError: there is none of that name; the text lists the names.
            TypeError: an option that it does not have.
        """
        made: Algorithm = GlobalAlgorithmRegistry.get(name)(**kwargs)
        return made


class _AlgorithmRegistry(dict[str, dict[str, Any]]):
    """The algorithms by name; scripts register their own."""

    def register(self, name: str, algorithm: Any, description: str | None = None) -> None:
        """Add an algorithm: a class, or a function that makes one.

        Raises:
            TypeError: ``name`` is no text.
            ValueError: the name is taken.
        """
        if not isinstance(name, str):
            raise TypeError(explain("the name of an algorithm is a text", value=name, fix="give its name first"))
        if name in self:
            raise UsageError(explain("an algorithm of that name is registered", value=name, fix="choose another name"))
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str, default: Any = None) -> Any:
        """Return what was registered under the name, or ``default`` if that is not None.

        Raises:
            KeyError: there is none, and no default.
        """
        if name in self:
            return self[name]["algorithm"]
        if default is not None:
            return default
        what = f"no algorithm of this name is registered; there are {', '.join(self.available_algorithms())}"
        raise KeyError(explain(what, value=name, fix="take one of these, or register it"))

    def available_algorithms(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self)

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self.available_algorithms())}"


GlobalAlgorithmRegistry = _AlgorithmRegistry()
