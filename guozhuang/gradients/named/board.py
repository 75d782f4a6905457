"""Words that ranks leave for each other in the store, for the moments in which the rounds do not tell: stalls and failures.

Nobody waits in the store for another rank: each looks whether a word is there, and reads it only then.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch.distributed as dist

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
        self._asking = _Asking()

    def close(self) -> None:
        """End the thread; nothing is told or asked any more."""
        self._asking.close()

    def read_cards(self) -> None:
        """Learn the processes of all ranks that have constructed their boards."""
        with contextlib.suppress(StoreSilent):
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

        with contextlib.suppress(StoreSilent):
            self._asking.ask(leave)

    def words(self) -> dict[int, str]:
        """What other ranks left; nothing if the store does not say."""
        found = {}
        with contextlib.suppress(StoreSilent):
            if self._asking.ask(lambda: self._store.add("words", 0)):
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

    # Stalls. Only the engine's watch calls these; they raise StoreSilent.

    def ask(self) -> int:
        """Ask all ranks what they have pending; return the number of the question."""
        return self._asking.ask(lambda: int(self._store.add("asked", 1)))

    def num_asked(self) -> int:
        """How many questions were asked."""
        return self._asking.ask(lambda: int(self._store.add("asked", 0)))

    def answer(self, number: int, pending: Mapping[int, Sequence[str]]) -> None:
        """Say what this rank has pending.

        Args:
            number: of questions asked before.
            pending: names by the number of their channel.
        """
        said = json.dumps([number, {str(key): pending[key] for key in pending}])
        self._asking.ask(lambda: self._store.set(f"pending/{self._rank}", said))

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
        """What is there; None if nothing is. Raises StoreSilent."""
        return self._asking.ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None)


class StoreSilent(RuntimeError):
    """The store is gone, or does not answer."""


class _Asking:
    """Asks the store in a thread of its own, and waits for no answer longer than a second.

    The thread is made at once: when an interpreter ends, none can be begun.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="guozhuang negotiated words", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], _T]) -> _T:
        """Call it in the thread, and return what it returns.

        Raises:
            StoreSilent: it raised a RuntimeError, or did not return in time.
        """
        answers: queue.SimpleQueue[tuple[_T] | None] = queue.SimpleQueue()

        def answer() -> None:
            found = None
            with contextlib.suppress(RuntimeError):  # DistStoreError, DistNetworkError
                found = (call(),)
            answers.put(found)

        self._calls.put(answer)
        found = None
        with contextlib.suppress(queue.Empty):
            found = answers.get(timeout=_STORE_S)
        if found is None:
            raise StoreSilent("the store does not answer")
        return found[0]

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(_STORE_S)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
