"""What was agreed on before: a slot for each name, the same on every rank, so that a repeated request is one byte.

[Note: slots] Every rank puts, uses and evicts the same names in the same order, because it does so only for what a round told
all of them. So a slot means the same everywhere without a word about it. A rank compares what it is asked for with what it
asked under that name before; where that is equal on all ranks, all that was agreed on is still true.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from .table import Response


class ResponseCache:
    """Responses by slot, the longest unused given up first. See [Note: slots].

    Args:
        capacity: how many at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: dict[str, int] = {}
        self._held: OrderedDict[int, Response] = OrderedDict()  # the longest unused first
        self._free: list[int] = []
        self.num_slots = 0  # that were ever in use

    def __len__(self) -> int:
        return len(self._held)

    def slot_of(self, name: str) -> int | None:
        """Where a name is held."""
        return self._slots.get(name)

    def name_at(self, slot: int) -> str:
        """The name that a slot stands for."""
        return self._held[slot].name

    def at(self, slot: int) -> Response | None:
        """What a slot holds."""
        return self._held.get(slot)

    def use(self, slot: int) -> Response:
        """What a slot holds, which thereby is the last to be given up."""
        self._held.move_to_end(slot)
        return self._held[slot]

    def put(self, response: Response) -> list[int]:
        """Hold a response under a new name. Returns the slots that were given up for it."""
        if self.capacity == 0:
            return []
        given_up = []
        while len(self._held) >= self.capacity:
            slot = next(iter(self._held))
            self.evict(slot)
            given_up.append(slot)
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self.num_slots
            self.num_slots += 1
        self._slots[response.name] = slot
        self._held[slot] = response
        return given_up

    def evict(self, slot: int) -> None:
        """Give up what a slot holds."""
        del self._slots[self._held.pop(slot).name]
        heapq.heappush(self._free, slot)

    def slots(self) -> list[int]:
        """Those that hold something, rising."""
        return sorted(self._held)
