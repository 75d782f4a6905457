"""What every process group written in Python must answer for itself: its place and its names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from guozhuang.world import versions

if TYPE_CHECKING:
    # Torch's annotations list every form in which its own groups may be called; a subclass has to take one of them only,
    # what torch.distributed passes.
    _ProcessGroup = Any
else:
    _ProcessGroup = dist.ProcessGroup


class PythonGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that knows its rank, size and names; PyTorch asks for them by methods it expects to be overridden.

    Without a name FSDP2, DTensor and functional collectives refuse a group. A subclass answers to the names that older
    versions of PyTorch call, too.

    Args:
        rank: this process within the group.
        size: how many ranks the group has.
        backend: the name that ``torch.distributed`` tells for such groups.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        versions.answer_older_names(cls)

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # the other constructor, with a store, refuses subclasses
        self._rank, self._size, self._backend = rank, size, backend
        self._name, self._description = "", ""

    def getBackendName(self) -> str:
        """The name of the kind of group."""
        return self._backend

    def getRank(self) -> int:
        """This process within the group."""
        return self._rank

    def getSize(self) -> int:
        """How many ranks the group has."""
        return self._size

    def setGroupName(self, name: str) -> None:
        """Take the name that ``torch.distributed`` gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name that ``torch.distributed`` gave."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Take the description that ``torch.distributed`` gives the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The description that ``torch.distributed`` gave."""
        return self._description
