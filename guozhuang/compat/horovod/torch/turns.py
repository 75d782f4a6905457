"""Operations of one name that are under way at once.

[Note: one name, several operations] The engine takes a name once at a time. So the operations of one name take turns under
``_NUM_TURNS`` names, "x", "x#1" and so on. All ranks submit equally many operations of a name, so they agree on the turn. An
operation whose turn is still taken waits for that one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from torch import Tensor

from guozhuang.gradients.named import DuplicateNameError

from .handles import table
from .submitting import Call

_NUM_TURNS: Final = 4


class NameTurns:
    """The turn of each name in one world. See [Note: one name, several operations]."""

    def __init__(self) -> None:
        self._world: Any = None
        self._last: dict[str, list[int]] = {}  # the handles of a name's operations, the newest last
        self._num_begun: dict[str, int] = {}

    def begin(self, world: Any, call: Call, tensor: Tensor) -> int:
        """Submit an operation in the next turn of its name, and return its handle; see ``Call.begin`` for the errors.

        Args:
            world: that of this process; turns begin from the first in a new one, as all its ranks do.
            call: the operation, which has a name.
            tensor: its tensor.
        """
        if world is not self._world:
            self._world = world
            self._last.clear()
            self._num_begun.clear()
        name = call.name
        assert name is not None
        turn, handles = self._num_begun.get(name, 0) % _NUM_TURNS, self._last.get(name, [])
        call = dataclasses.replace(call, name=f"{name}#{turn}" if turn else name)
        try:
            handle = call.begin([tensor])
        except DuplicateNameError:
            for earlier in handles[:1]:  # the one that had this turn before
                table.settle(earlier)
            handle = call.begin([tensor])
        self._num_begun[name] = self._num_begun.get(name, 0) + 1
        self._last[name] = [*handles[1 - _NUM_TURNS :], handle]
        return handle
