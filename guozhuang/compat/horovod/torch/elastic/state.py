"""The state of a PyTorch training: models, optimizers, samplers, and plain values."""

from __future__ import annotations

import abc
import copy
from typing import Any

import torch

from guozhuang.compat.horovod.common.elastic import ObjectState

from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from ..mpi_ops import rank
from .sampler import ElasticSampler


class StateHandler(abc.ABC):
    """How values of one type are saved, brought back, and made the same on all ranks.

    Args:
        value: the one that is looked after.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @abc.abstractmethod
    def save(self) -> None:
        """Keep a copy of what the value holds."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Put back what was kept."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Take over what rank 0 holds. Every rank must call.

        It is not to be kept yet: a later handler may fail, and all go back to what was saved together. ``save`` follows.
        """

    def set_value(self, value: Any) -> None:
        """Look after another value from now on, and keep a copy of what it holds."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """For ``torch.nn.Module``: its ``state_dict``."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """Copy the parameters and buffers."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Write the copies back, in place."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Overwrite parameters and buffers with those of rank 0. Every rank must call."""
        present = self.value.state_dict()
        tensors = {name: value for name, value in present.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        others = {name: value for name, value in present.items() if name not in tensors}
        if others:  # what get_extra_state gives
            self.value.load_state_dict(present | broadcast_object(others, root_rank=0))


class OptimizerStateHandler(StateHandler):
    """For ``torch.optim.Optimizer``: its ``state_dict``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """Copy the state and the options."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load copies of them; gradients that were under way are given up."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over state and options of rank 0. Every rank must call."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """For ``ElasticSampler``: how far its epoch is."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """Note it."""
        self._saved = dict(self.value.state_dict())

    def restore(self) -> None:
        """Go back to what was noted."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Be as far as rank 0, and share out what is left. Every rank must call."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))


_Registry = list[tuple[type, type[StateHandler]]]
_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """Which handler looks after values of which type; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: _Registry) -> None:
    """Let states that are made from now on use these handlers.

    Args:
        registry: pairs of a type and its handler, the more special types first.
    """
    _registry[:] = registry


class TorchState(ObjectState):
    """What a training needs to go on after ranks were lost or came. For ``hvd.elastic.run``::

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
        """Keep a copy of everything, to come back to it."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Come back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over everything from rank 0, and then save all of it. Every rank must call, with the same names and shapes.

        Where it fails in the middle, ``restore`` brings back what was saved before, as a whole.

        Raises:
            HorovodInternalError: ranks differ, or one is lost.
        """
        for _, handler in sorted(self._handlers.items()):
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """The set of ranks has changed: share out anew what is left of the epoch."""
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
