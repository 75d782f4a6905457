"""Watches collectives that are pending for long: names the missing ranks, ends waits that exceed the limit, finds lost ranks.

[Note: the watch] Each engine has one watch thread, which sleeps as long as nothing is pending. Then it looks once a second, and
uses the store only if a submission is older than that. A rank with an old submission asks all others, through the store, what
they have pending; every watch that is awake answers within a second, and a rank that does not answer has nothing pending. So
it is known which ranks have submitted a name and which are missing. The lowest rank that has submitted it logs a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from ...errors import explain
from ...net.client import Client
from ...watch.processes import SHARE_MEMORY, Process, node_identity, this_process
from .settings import Settings
from .submission import JOIN_NAME, NegotiationError

if TYPE_CHECKING:
    from .channel import NamedChannel

_STORE_S: Final = 1.0  # limit for one answer of the store; the process that serves it may be the lost one
_LOOK_S: Final = 0.02
_LOG = logging.getLogger("guozhuang")
_NUM_TOLD: Final = 20  # most names that a warning lists for one missing rank


class EngineStore:
    """The messages that an engine's ranks leave for each other in a store. Every rank must construct it.

    No call waits in the store for another rank: it checks whether a key exists, and reads it only then. A thread makes the
    requests to the store, because the process that serves it may be the lost one. The thread starts in the constructor, because
    a thread cannot be started any more while an interpreter ends.

    Args:
        store: a store that only this engine uses.
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._node = node_identity(SHARE_MEMORY)
        self._processes: dict[int, Process] = {}  # by rank, of ranks whose cards were read
        self._client = Client(_STORE_S, retries=True, starts=True)
        store.set(f"card/{rank}", str(this_process(self._node)))

    def close(self) -> None:
        """End the thread; the store is not used any more."""
        self._client.close()

    def read_cards(self) -> None:
        """Read the process (node and pid) of each rank that has written its card; every rank does so on construction."""
        with contextlib.suppress(RuntimeError):
            for rank in range(self._size):
                card = None if rank in self._processes else self._read(f"card/{rank}")
                if card is not None:
                    self._processes[rank] = Process.read(card)

    # ---- Failures.

    def tell(self, word: str) -> None:
        """Write to the store why this rank leaves or has failed; ignore a store that does not answer."""

        def leave() -> None:
            self._store.set(f"word/{self._rank}", word)
            self._store.add("words", 1)

        with contextlib.suppress(RuntimeError):
            self._client.call(leave)

    def words(self) -> dict[int, str]:
        """Return by rank why other ranks left or failed, as they wrote it; empty if the store does not answer."""
        found = {}
        with contextlib.suppress(RuntimeError):
            if self._client.call(lambda: self._store.add("words", 0)):
                for rank in range(self._size):
                    word = None if rank == self._rank else self._read(f"word/{rank}")
                    if word is not None:
                        found[rank] = word
        return found

    def news(self, patience_s: float) -> tuple[dict[int, int], dict[int, str]]:
        """Return pids of this node's ranks that have ended, and what ranks wrote; wait ``patience_s`` at most for either.

        If ranks have ended, only what they themselves wrote is returned: other ranks may have failed because of them.
        """
        deadline = time.monotonic() + patience_s
        while True:
            ended = {rank: each.pid for rank, each in self._processes.items() if each.has_ended(self._node)}
            words = self.words()
            if ended or words or time.monotonic() >= deadline:
                return ended, {rank: word for rank, word in words.items() if rank in ended} if ended else words
            time.sleep(_LOOK_S)

    # ---- Stalls. Only the engine's watch calls these; they raise RuntimeError if the store does not answer.

    def ask(self) -> int:
        """Ask all ranks which names they have pending; return the number of this question."""
        return self._client.call(lambda: int(self._store.add("asked", 1)))

    def num_asked(self) -> int:
        """Return how many questions all ranks together have asked."""
        return self._client.call(lambda: int(self._store.add("asked", 0)))

    def answer(self, number: int, pending: Mapping[int, Sequence[str]]) -> None:
        """Write which names this rank has pending.

        Args:
            number: number of the last question, which this answers.
            pending: the names, by the number of their channel.
        """
        said = json.dumps([number, {str(key): pending[key] for key in pending}])
        self._client.call(lambda: self._store.set(f"pending/{self._rank}", said))

    def answers(self, number: int) -> dict[int, dict[int, list[str]]]:
        """Return the pending names, by rank and channel, of the ranks that answered this question or a later one."""
        found = {}
        for rank in range(self._size):
            said = self._read(f"pending/{rank}")
            if said is not None:
                last, pending = json.loads(said)
                if last >= number:
                    found[rank] = {int(key): names for key, names in pending.items()}
        return found

    def _read(self, key: str) -> str | None:
        """Return the value of a key; None if it does not exist. Raises RuntimeError if the store does not answer."""
        return self._client.call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)


class StallWatch:
    """The thread that watches an engine's pending submissions. See [Note: the watch].

    Args:
        store: the engine's messages.
        rank: rank of this process.
        settings: the limits.
        stop_s: age of a submission, in seconds, at which everything pending fails.
        channels: returns the engine's channels.
        stop: ends the engine on this rank with an error.
        tick_s: seconds between two looks.
    """

    def __init__(
        self,
        store: EngineStore,
        rank: int,
        settings: Settings,
        stop_s: float,
        channels: Callable[[], Sequence[NamedChannel]],
        stop: Callable[[NegotiationError], object],
        tick_s: float = 1.0,
    ) -> None:
        self._store, self._rank, self._settings, self._stop_s = store, rank, settings, stop_s
        self._channels, self._stop, self._tick_s = channels, stop, tick_s
        self._is_awake, self._closed = threading.Event(), threading.Event()
        self._num_answered = 0
        self._next_warning = 0.0
        self._question: tuple[int, float] | None = None  # number of the own question, and the time to read the answers
        self.num_looks = 0  # looks that used the store
        self._thread = threading.Thread(target=self._work, name="guozhuang negotiated watch", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Wake the watch, because a collective was submitted."""
        if not self._is_awake.is_set():
            self._is_awake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._is_awake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _work(self) -> None:
        while True:
            self._is_awake.wait()
            self._is_awake.clear()  # before the look, so that a later submission wakes this thread again
            while not self._closed.wait(self._tick_s):
                since = {channel.number: channel.pending_since() for channel in self._channels()}
                if not any(since.values()):
                    self._question, self._next_warning = None, 0.0
                    break
                self._look(since)
            if self._closed.is_set():
                return

    def _look(self, since: dict[int, dict[str, float]]) -> None:
        now = time.monotonic()
        age_s = now - min(moment for moments in since.values() for moment in moments.values())
        if age_s < self._tick_s:
            return
        self.num_looks += 1
        try:
            self._ask_around(since, now, age_s)
        except RuntimeError as error:
            _LOG.debug("rank %d: no look at what others have pending: %s", self._rank, error)
        if age_s >= self._stop_s:
            self._end(since, now)

    def _ask_around(self, since: dict[int, dict[str, float]], now: float, age_s: float) -> None:
        """End the engine if another rank's has failed; else answer questions, ask a question, or warn of missing ranks."""
        if words := self._store.words():
            self._stop(NegotiationError("; ".join(words.values())))
            return
        num_asked = self._store.num_asked()
        if num_asked > self._num_answered:
            self._answer(num_asked, since)
        warning_s = self._settings.stall_warning_s
        if self._question is not None:
            number, when = self._question
            if now >= when:
                self._question = None
                self._warn(self._missing(number, since, now - warning_s), warning_s)
        elif self._settings.stall_check and age_s >= warning_s and now >= self._next_warning:
            self._next_warning = now + warning_s
            self._question = self._ask(since), now + 2.5 * self._tick_s

    def _ask(self, since: dict[int, dict[str, float]]) -> int:
        number = self._store.ask()
        self._answer(number, since)
        return number

    def _answer(self, number: int, since: dict[int, dict[str, float]]) -> None:
        self._num_answered = number
        self._store.answer(number, {key: list(moments) for key, moments in since.items()})

    def _missing(
        self, number: int, since: dict[int, dict[str, float]], before: float
    ) -> list[tuple[str, list[int], list[int]]]:
        """Return (name, ranks that submitted it, missing ranks) for names that are pending since ``before`` or longer."""
        answers = self._store.answers(number)
        found = []
        for channel in self._channels():
            for name, moment in since.get(channel.number, {}).items():
                if moment > before:
                    continue
                pending = {rank: answers.get(rank, {}).get(channel.number, ()) for rank in channel.ranks}
                has = sorted({self._rank, *(rank for rank in channel.ranks if name in pending[rank])})
                # A rank that has joined takes part in everything without a submission.
                lacks = [rank for rank in channel.ranks if rank not in has and JOIN_NAME not in pending[rank]]
                if lacks:
                    found.append((name, has, lacks))
        return found

    def _warn(self, missing: Sequence[tuple[str, list[int], list[int]]], for_s: float) -> None:
        own = [each for each in missing if each[1][0] == self._rank]
        others = [each for each in missing if each[1][0] != self._rank]
        if own:
            _LOG.warning("%s", _words(own, for_s, self._rank))
        if others:
            _LOG.debug("%s", _words(others, for_s, self._rank))

    def _end(self, since: dict[int, dict[str, float]], now: float) -> None:
        """Ask once more which ranks are missing, and end the engine."""
        missing: list[tuple[str, list[int], list[int]]] = []
        with contextlib.suppress(RuntimeError):  # without the store the error names no missing ranks
            number = self._ask(since)
            self._closed.wait(2.5 * self._tick_s)
            missing = self._missing(number, since, now - self._stop_s)
        self._stop(NegotiationError(_words(missing, self._stop_s, self._rank)))


def _words(missing: Sequence[tuple[str, list[int], list[int]]], for_s: float, rank: int) -> str:
    what = f"ranks have been waiting for others for more than {for_s:g} s"
    fix = "look at what the missing ranks are doing (py-spy dump --pid): every rank must ask for the same names"
    by_rank: dict[int, list[str]] = {}
    for name, _, who in missing:
        for each in who:
            by_rank.setdefault(each, []).append(name)
    lines = []
    for each, names in sorted(by_rank.items()):
        more = f", and {len(names) - _NUM_TOLD} more" if len(names) > _NUM_TOLD else ""
        lines.append(f"  missing: rank {each} for {', '.join(names[:_NUM_TOLD])}{more}")
    if not lines:
        lines = [
            "  no rank is known to be missing: a collective that all of them began does not end, or the store is gone"
        ]
    return "\n".join([explain(f"stalled: {what}", rank=rank, fix=fix), *lines])
