"""How fast the engine of this process's world carries what is matched by name."""

from __future__ import annotations

import time
from typing import Final

from .state import HorovodState

_SPEED_S: Final = 10.0


class Speed:
    """How many bytes operations by name carry in a second: a mean over at least ten seconds."""

    def __init__(self) -> None:
        self._world: HorovodState | None = None
        self.since_s, self._num_bytes = 0.0, 0
        self._found = (0, 0.0)

    def look(self, world: HorovodState) -> tuple[int, float]:
        """Return the newest (milliseconds since 1970, megabytes a second); begin to measure in a new world."""
        now, moved = time.monotonic(), world.engine.world.moved_bytes
        if world is not self._world:
            self._world, self._found = world, (0, 0.0)
        elif now - self.since_s >= _SPEED_S:
            self._found = (int(time.time() * 1e3), (moved - self._num_bytes) / 1e6 / (now - self.since_s))
        else:
            return self._found
        self.since_s, self._num_bytes = now, moved
        return self._found
