"""Loaders that scripts make before they enter the world, and that take their rank's share at their first use.

[Note: loaders that wait] Scripts make loaders before they call prepare, which enters the world. Such a loader holds none of its
attributes until one is asked for, by the script or by a method; then it takes this rank's share, or all samples where there is
no world. Made at once as well, for one rank, it raises at its own line what is wrong with its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from guozhuang.errors import UsageError
from guozhuang.registry import registry


class WaitsForWorld:
    """The part of a loader that lets it wait. See [Note: loaders that wait].

    Attributes:
        is_of_no_world: whether it was used before there was a world, so that it gives all samples.
    """

    is_of_no_world = False
    _make: Callable[[], WaitsForWorld]
    _alone: dict[str, Any]

    def wait_for_world(self, make: Callable[[], WaitsForWorld]) -> None:
        """Take this rank's share at the first use only. See [Note: loaders that wait]."""
        alone = dict(vars(self))
        vars(self).clear()
        vars(self).update(_make=make, _alone=alone)

    @property
    def is_settled(self) -> bool:
        """Whether the share of this rank is chosen."""
        return "_make" not in vars(self)

    def settle(self) -> None:
        """Take this rank's share, if that is not done yet."""
        if not self.is_settled:
            is_of_no_world = not has_world()
            found = self._alone if self._alone and is_of_no_world else vars(self._make())
            del self._make, self._alone
            vars(self).update(found, is_of_no_world=is_of_no_world)

    def __getattr__(self, name: str) -> Any:
        if self.is_settled:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        settle_all()
        self.settle()
        return getattr(self, name)


def settle_all() -> None:
    """Settle loaders in the order in which they were made, so that the n-th loaders of all ranks belong together."""
    for each in registry.loaders:
        with contextlib.suppress(UsageError):  # raised again where that loader is used
            each.settle()


def has_world() -> bool:
    """Return whether this process has entered a world of several ranks."""
    return dist.is_available() and dist.is_initialized()
