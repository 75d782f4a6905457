"""The base class of process groups that hand every call to another process group."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from guozhuang.groups.base import PythonGroup
from guozhuang.world import versions


def _collective(name: str) -> Callable[..., Any]:
    known = versions.name_of(name)  # PyTorch's name of the method, which depends on its version

    def call(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        return self._forward(known, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"Hand ``{name}``, which every rank calls, to the group that runs it, and return its work."
    return call


def _by_some(name: str) -> Callable[..., Any]:
    def call(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._target(), name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"Hand ``{name}``, which not every rank calls, to the group that runs it."
    return call


class ForwardingGroup(PythonGroup):
    """A group that runs no collective itself. Constructor: see ``PythonGroup``."""

    @abc.abstractmethod
    def _target(self) -> Any:
        """Return the group that runs the calls; the one for calls that not every rank makes, if there are several."""

    def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Hand a collective to the group that runs it, and return the work."""
        return getattr(self._target(), method)(*args, **kwargs)

    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    reduce = _collective("reduce")
    broadcast = _collective("broadcast")
    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    all_gather_single = _collective("all_gather_single")
    all_gather_single_coalesced = _collective("all_gather_single_coalesced")
    reduce_scatter = _collective("reduce_scatter")
    reduce_scatter_single = _collective("reduce_scatter_single")
    reduce_scatter_single_coalesced = _collective("reduce_scatter_single_coalesced")
    alltoall = _collective("alltoall")
    all_to_all_single = _collective("all_to_all_single")
    gather = _collective("gather")
    scatter = _collective("scatter")
    barrier = _collective("barrier")
    monitored_barrier = _collective("monitored_barrier")

    send = _by_some("send")
    recv = _by_some("recv")
    recv_anysource = _by_some("recv_anysource")
    _get_backend = _by_some("_get_backend")

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the device types that the other group supports; torch's object collectives read this."""
        return list(self._target()._device_types)
