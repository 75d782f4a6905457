"""Which slots of this rank's main segment hold a chunk that some rank has still to copy out.

[Note: a rank that empties nothing] A rank that is stopped, or that failed, keeps its slots: it may still read them. So that
it does not keep all, a rank may hold a further slot only while more are free than it holds: one rank alone gets half of
them, the next half of what is left. Two are enough to copy in and out at the same time.
"""

from __future__ import annotations

from .engine import NUM_SLOTS


class Slots:
    """The slots of one rank, as sender. Belongs to one thread. See [Note: a rank that empties nothing]."""

    def __init__(self) -> None:
        self._free = list(range(NUM_SLOTS))
        self._users: dict[int, tuple[int, int]] = {}  # receiver, and number of the send
        self._num_held: dict[int, int] = {}  # per receiver

    def take(self, receiver: int, number: int) -> int | None:
        """Return a free slot for a chunk of a send; None if the receiver has to empty others first."""
        held = self._num_held.get(receiver, 0)
        if held >= len(self._free):
            return None
        slot = self._free.pop()
        self._users[slot] = (receiver, number)
        self._num_held[receiver] = held + 1
        return slot

    def emptied(self, slot: int) -> int:
        """Take back a slot; return the number of the send that used it."""
        receiver, number = self._users.pop(slot)
        self._num_held[receiver] -= 1
        self._free.append(slot)
        return number

    def take_back_all(self, receiver: int) -> None:
        """Take back what a rank held that has ended."""
        for slot in [slot for slot, user in self._users.items() if user[0] == receiver]:
            self.emptied(slot)
