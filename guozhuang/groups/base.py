"""The base classes of process groups written in Python: they hold what torch.distributed reads from any group."""

from __future__ import annotations

import abc
import datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from guozhuang.world import versions

if TYPE_CHECKING:
    # Type checkers get no base class: torch annotates several overloads of each method, and a subclass implements
    # only the one that torch.distributed calls.
    _ProcessGroup = Any
else:
    _ProcessGroup = dist.ProcessGroup


class PythonGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that knows its rank, size and names; PyTorch reads them through methods that subclasses override.

    FSDP2, DTensor and functional collectives refuse a group without a name. A subclass also has the method names that
    older versions of PyTorch call.

    Args:
        rank: this process within the group.
        size: how many ranks the group has.
        backend: the backend name that ``torch.distributed`` reports for such groups.
    """

    #: Whether works of sends and receives tell by ``is_completed`` that they have ended, though nobody has waited for them,
    #: and may be waited for with a limit again and again.
    works_tell_their_end = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        versions.answer_older_names(cls)

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # ProcessGroup's other constructor, which takes a store, refuses subclasses
        self._rank, self._size, self._backend = rank, size, backend
        self._name, self._description = "", ""

    def getBackendName(self) -> str:
        """Return the backend name."""
        return self._backend

    def get_backend(self, device: torch.device | str) -> Any:
        """Return the backend for a device, as versions of PyTorch from 2.14 on call ``_get_backend``."""
        return self._get_backend(device)

    def getRank(self) -> int:
        """Return this process's rank within the group."""
        return self._rank

    def getSize(self) -> int:
        """Return the number of ranks of the group."""
        return self._size

    def setGroupName(self, name: str) -> None:
        """Store the name that ``torch.distributed`` gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name that ``torch.distributed`` gave the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Store the description that ``torch.distributed`` gives the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return the description that ``torch.distributed`` gave the group."""
        return self._description


versions.attach_no_flight_recorder(PythonGroup)


class OwnBackend(PythonGroup):
    """A group that is its own backend for CPU tensors, so that torch.distributed reads the properties of both from it.

    A subclass sets ``_store`` and ``_timeout``.
    """

    _store: dist.Store
    _timeout: datetime.timedelta

    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_tensor_alloc = supports_time_estimate = False

    @property
    def options(self) -> object:
        """Return the options that the group was made with."""
        return torch._C._distributed_c10d.Backend.Options(self._backend, self._timeout)

    @abc.abstractmethod
    def _group_on(self, device: torch.device) -> Any:
        """Return the group for tensors on another device than the CPU; raise RuntimeError if there is none."""

    def _get_backend(self, device: torch.device | str) -> Any:
        device = torch.device(device)
        return self if device.type == "cpu" else self._group_on(device)._get_backend(device)

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was made with."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from the creation of the group, or from the last change of its ranks."""

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Change the time-out of calls that begin from now on. Affects this rank only."""
        self._timeout = timeout

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.set_timeout(timeout)
