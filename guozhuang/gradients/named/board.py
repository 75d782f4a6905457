"""Words that ranks leave for each other in the store, for the moments in which the rounds do not tell: stalls and failures.

Nobody waits in the store for another rank: each looks whether a word is there, and reads it only then.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch.distributed as dist

from ...net.client import Client
from ...watch.processes import SHARE_MEMORY, Process, node_identity, this_process

_T = TypeVar("_T")
_STORE_S: Final = 1.0  # for one answer of a store whose keeper may be what was lost
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
        self._node = node_identity(SHARE_MEMORY)
        self._processes: dict[int, Process] = {}  # of ranks that have constructed their boards
        store.set(f"card/{rank}", str(this_process(self._node)))
        # Its thread is started at once: an interpreter that ends starts none.
        self._client = Client(_STORE_S, retries=True, starts=True)

    def close(self) -> None:
        """End the thread; nothing is told or asked any more."""
        self._client.close()

    def read_cards(self) -> None:
        """Learn the processes of all ranks that have constructed their boards."""
        with contextlib.suppress(RuntimeError):
            for rank in range(self._size):
                card = None if rank in self._processes else self._read(f"card/{rank}")
                if card is not None:
                    self._processes[rank] = Process.read(card)

    # Failures.

    def tell(self, word: str) -> None:
        """Leave word of why this rank goes or stands still, if the store takes it."""

        def leave() -> None:
            self._store.set(f"word/{self._rank}", word)
            self._store.add("words", 1)

        with contextlib.suppress(RuntimeError):
            self._client.call(leave)

    def words(self) -> dict[int, str]:
        """What other ranks left; nothing if the store does not say."""
        found = {}
        with contextlib.suppress(RuntimeError):
            if self._client.call(lambda: self._store.add("words", 0)):
                for rank in range(self._size):
                    word = None if rank == self._rank else self._read(f"word/{rank}")
                    if word is not None:
                        found[rank] = word
        return found

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

    # Stalls. Only the engine's watch calls these; they raise RuntimeError.

    def ask(self) -> int:
        """Ask all ranks what they have pending; return the number of the question."""
        return self._client.call(lambda: int(self._store.add("asked", 1)))

    def num_asked(self) -> int:
        """How many questions were asked."""
        return self._client.call(lambda: int(self._store.add("asked", 0)))

    def answer(self, number: int, pending: Mapping[int, Sequence[str]]) -> None:
        """Say what this rank has pending.

        Args:
            number: of questions asked before.
            pending: names by the number of their channel.
        """
        said = json.dumps([number, {str(key): pending[key] for key in pending}])
        self._client.call(lambda: self._store.set(f"pending/{self._rank}", said))

    def answers(self, number: int) -> dict[int, dict[int, list[str]]]:
        """By rank, what those have pending that answered this question or a later one."""
        found = {}
        for rank in range(self._size):
            said = self._read(f"pending/{rank}")
            if said is not None:
                last, pending = json.loads(said)
                if last >= number:
                    found[rank] = {int(key): names for key, names in pending.items()}
        return found

    def _read(self, key: str) -> str | None:
        """What is there; None if nothing is. Raises RuntimeError."""
        return self._client.call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)
