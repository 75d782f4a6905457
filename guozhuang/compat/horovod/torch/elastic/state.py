"""The state of a PyTorch training: models, optimizers, samplers, and plain values."""

from __future__ import annotations

import abc
import copy
from typing import Any

import torch
from typing_extensions import override

from guozhuang.compat.horovod.common.elastic import ObjectState

from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from ..mpi_ops import rank
from .sampler import ElasticSampler


class StateHandler(abc.ABC):
    """Saves, restores and synchronizes one value of a ``TorchState``; there is a subclass for each kind of value.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @abc.abstractmethod
    def save(self) -> None:
        """Keep a copy of the value's content."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Set the value's content to the copy."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Set the value's content to that of rank 0. Every rank must call this.

        It must not be saved here: a later handler may fail, and then all values are restored together. ``save`` follows.
        """

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, and keep a copy of its content."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles a value by its ``state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    @override
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    @override
    def restore(self) -> None:
        self.value.load_state_dict(self._saved)


class ModelStateHandler(_StateDictHandler):
    """Handles a ``torch.nn.Module``: its parameters and buffers, which are restored in place."""

    def sync(self) -> None:
        """Overwrite parameters and buffers with those of rank 0. Every rank must call this."""
        present = self.value.state_dict()
        tensors = {name: value for name, value in present.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        others = {name: value for name, value in present.items() if name not in tensors}
        if others:  # values that are no tensors, such as a module's extra state
            self.value.load_state_dict(present | broadcast_object(others, root_rank=0))


class OptimizerStateHandler(_StateDictHandler):
    """Handles a ``torch.optim.Optimizer``: its state and options."""

    def restore(self) -> None:
        """Load copies of the saved state and options; the results of running exchanges are dropped."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Replace state and options by those of rank 0. Every rank must call this."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """Handles an ``ElasticSampler``: the epoch and the number of samples that were processed."""

    def sync(self) -> None:
        """Set the sampler to the position of rank 0, and divide the remaining samples. Every rank must call this."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))


_Registry = list[tuple[type, type[StateHandler]]]
_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """Return the list of (type, handler class); the first entry whose type fits a value is used."""
    return _registry


def set_handler_registry(registry: _Registry) -> None:
    """Set the types and handlers that ``TorchState`` objects constructed from now on use.

    Args:
        registry: pairs of a type and its handler, the more special types first.
    """
    _registry[:] = registry


class TorchState(ObjectState):
    """The state of a PyTorch training, with which ``hvd.elastic.run`` continues after ranks were lost or added::

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    All values become attributes. Models, optimizers and samplers are saved by their ``state_dict`` and restored in place; for
    other types see ``set_handler_registry``. Everything else must be picklable, and is copied.

    Args:
        model: the model.
        optimizer: the optimizer, distributed or not.
        **kwargs: further values by name, of any of these kinds.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs |= {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        handlers, plain = {}, {}
        for name, value in kwargs.items():
            handler = _handler(value)
            if handler is None:
                plain[name] = value
            else:
                handlers[name] = handler
        self._handlers: dict[str, StateHandler] = handlers
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)
        for name, handler in handlers.items():
            super().__setattr__(name, handler.value)

    def save(self) -> None:
        """Keep a copy of all values, for ``restore``."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Set all values to the last saved copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Set all values to those of rank 0, and then save them. Every rank must call, with the same names and shapes.

        If it fails in the middle, ``restore`` sets all values to the copies that were saved before.

        Raises:
            HorovodInternalError: ranks differ, or one is lost.
        """
        for _, handler in sorted(self._handlers.items()):
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide the remaining samples of the epoch among the ranks again, after the set of ranks has changed."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
