"""The calls in which the ranks of a group wait for each other: a rank that makes one alone is told, and so are the others.

[Note: calls that need every rank] States of divided models and optimizers are made whole by collectives, so ``state_dict()``
needs every rank. A script that calls it on rank 0 alone lets the others go on to their next forward or step, where they wait
for rank 0 in other collectives. So calls are numbered, which all ranks make in the same order, and before the collectives of a
state the ranks meet in the store. Who waits there reads in which call others wait, by [Note: who is behind] in steps.py: one
with a number that is not below its own was begun without it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from ..errors import WorldError
from ..groups.subgroups import timeout_s
from .steps import Begun, StepsBehind


def points_of(group: dist.ProcessGroup) -> Points:
    """Return what numbers the calls of a group. Every rank must call it first at one point.

    It is held by those that use it, which ranks forget at different times; the numbers go on.
    """
    if group not in _calls:
        _calls[group] = _Calls(group)
    calls = _calls[group]
    found = None if calls.points is None else calls.points()
    if found is None:
        found = Points(group, calls)
        calls.points = weakref.ref(found)
    return found


class _Calls(Begun):
    """How many calls were made, and what knows them at present."""

    num_made = 0
    points: weakref.ref[Points] | None = None


class Points:
    """Numbers the calls that need every rank of a group, of all models and optimizers; see :func:`points_of`.

    Args:
        group: the ranks.
        calls: the numbers.
    """

    def __init__(self, group: dist.ProcessGroup, calls: _Calls) -> None:
        self._group, self._steps, self._calls = weakref.ref(group), StepsBehind(group, calls), calls

    @contextlib.contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """Record that this rank may wait for the others inside this context.

        Args:
            call: its name, for errors.

        Raises:
            WorldError: it failed, and another rank has left a notice that it makes another call.
        """
        number = self._calls.num_made
        self._calls.num_made += 1
        try:
            with self._steps.inside(number, call):
                yield
        except RuntimeError as error:
            if isinstance(error, WorldError | dist.DistError) or "gloo" in str(error):
                error.add_note(f"This rank was in {call}, which needs every rank.")
            raise

    def meet(self, call: str) -> None:
        """Wait until all ranks make this call.

        Args:
            call: its name, for errors.

        Raises:
            WorldError: others wait for this rank in another call; or they have ended, or did not come in time.
        """
        group = self._group()
        if group is None or group.size() == 1:
            return
        fix = f"call {call} on every rank, then save on one: not inside `if rank == 0:`"
        number = self._calls.num_made
        with self.inside(call):
            self._steps.gather(call, timeout_s(group), number, fix, is_step=False)


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()
