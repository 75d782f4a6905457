"""Words that ranks leave for each other in the store, for the moments in which the rounds do not tell: stalls and failures.

Nobody waits in the store for another rank: each looks whether a word is there, and reads it only then.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch.distributed as dist

from ..errors import WorldError
from ..groups.shared_memory.meeting import identity
from ..groups.shared_memory.roll_call import Process, this_process

_T = TypeVar("_T")
_STORE_S: Final = 1.0  # for one question to a store whose keeper may be what was lost
_LOOK_S: Final = 0.02


class Board:
    """What an engine's ranks tell each other. Every rank must construct it.

    Args:
        store: of this engine alone.
        rank: this process.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._node = _node()
        self._processes: dict[int, Process] = {}
        store.set(f"card/{rank}", str(this_process(self._node)) if self._node else "")

    def read_cards(self) -> None:
        """Learn the processes of all ranks; all must have constructed their boards."""
        cards = {rank: self._store.get(f"card/{rank}").decode() for rank in range(self._size)}
        self._processes = {rank: Process.read(card) for rank, card in cards.items() if card}

    # Failures.

    def tell(self, word: str) -> None:
        """Leave word of why this rank goes or stands still."""

        def leave() -> None:
            self._store.set(f"word/{self._rank}", word)
            self._store.add("words", 1)

        _limited(leave, None)

    def words(self) -> dict[int, str]:
        """What other ranks left."""

        def read() -> dict[int, str]:
            if not self._store.add("words", 0):
                return {}
            there = [rank for rank in range(self._size) if rank != self._rank and self._store.check([f"word/{rank}"])]
            return {rank: self._store.get(f"word/{rank}").decode() for rank in there}

        return _limited(read, {})

    def news(self, patience_s: float) -> tuple[dict[int, int], dict[int, str]]:
        """The pids of other ranks of this node that have ended, and what ranks left; as soon as there is any, or after so long.

        Of ranks that have ended only those words are told that they left themselves: others may have ended because of it.
        """
        deadline = time.monotonic() + patience_s
        while True:
            ended = {rank: each.pid for rank, each in self._processes.items() if each.has_ended(self._node)}
            words = self.words()
            if ended or words or time.monotonic() >= deadline:
                return ended, {rank: word for rank, word in words.items() if rank in ended} if ended else words
            time.sleep(_LOOK_S)

    # Stalls. Only the engine's watch calls these.

    def ask(self) -> int:
        """Ask all ranks what they have pending; return the number of the question."""
        return int(self._store.add("asked", 1))

    def num_asked(self) -> int:
        """How many questions were asked."""
        return int(self._store.add("asked", 0))

    def answer(self, number: int, pending: Mapping[int, Sequence[str]]) -> None:
        """Say what this rank has pending.

        Args:
            number: of questions asked before.
            pending: names by the number of their channel.
        """
        self._store.set(f"pending/{self._rank}", json.dumps([number, {str(key): pending[key] for key in pending}]))

    def answers(self, number: int) -> dict[int, dict[int, list[str]]]:
        """By rank, what those have pending that answered this question or a later one."""
        found = {}
        for rank in range(self._size):
            if self._store.check([f"pending/{rank}"]):
                last, pending = json.loads(self._store.get(f"pending/{rank}"))
                if last >= number:
                    found[rank] = {int(key): names for key, names in pending.items()}
        return found


def _node() -> str:
    with contextlib.suppress(WorldError):
        return identity()
    return ""  # a system without /proc


def _limited(call: Callable[[], _T], otherwise: _T, limit_s: float = _STORE_S) -> _T:
    """Ask the store, but wait for the answer no longer than this; the answer of one that is gone is ``otherwise``."""
    found: list[_T] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # DistStoreError, DistNetworkError
            found.append(call())

    asking = threading.Thread(target=ask, name="guozhuang negotiated words", daemon=True)
    asking.start()
    asking.join(limit_s)
    return found[0] if found else otherwise
