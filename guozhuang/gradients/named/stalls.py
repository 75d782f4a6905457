"""Watches what is pending for long: says which ranks are missing, ends what would wait for ever, and finds out who is lost.

[Note: the watch] One thread per engine, asleep as long as nothing is pending; then it looks once a second, and does not even
ask the store if all is younger than that. A rank with something old pending asks all others, through the store, what they have
pending; every watch that is awake answers within a second, and a rank that does not answer has nothing pending. So who has a
name is known, and who is missing. Of the ranks that have it the lowest one says so in its log.
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

_STORE_S: Final = 1.0  # for one answer of a store whose keeper may be what was lost
_LOOK_S: Final = 0.02
_LOG = logging.getLogger("guozhuang")
_NUM_TOLD: Final = 20  # names of one rank


class EngineStore:
    """The store in which an engine's ranks leave words for each other. Every rank must construct it.

    Nobody waits in the store for another rank: each looks whether a word is there, and reads it only then. The store is
    asked in a thread, because its keeper may be what was lost. The thread starts at once: when an interpreter ends, none can.

    Args:
        store: of this engine alone.
        rank: this process.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._node = node_identity(SHARE_MEMORY)
        self._processes: dict[int, Process] = {}  # of ranks that have constructed theirs
        self._client = Client(_STORE_S, retries=True, starts=True)
        store.set(f"card/{rank}", str(this_process(self._node)))

    def close(self) -> None:
        """End the thread; nothing is told or asked any more."""
        self._client.close()

    def read_cards(self) -> None:
        """Learn the processes of all ranks that have constructed theirs."""
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
        """Return what is there; None if nothing is. Raises RuntimeError."""
        return self._client.call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)


class StallWatch:
    """The watch of an engine. See [Note: the watch].

    Args:
        store: of the engine.
        rank: this process.
        settings: the limits.
        stop_s: after how many seconds all that is pending fails.
        channels: those that there are.
        stop: ends the engine on this rank.
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
        self._question: tuple[int, float] | None = None  # number, and when the answers are there
        self.num_looks = 0  # that asked the store
        self._thread = threading.Thread(target=self._work, name="guozhuang negotiated watch", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Something is pending from now on."""
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
            self._is_awake.clear()  # before the look, so that what comes after it wakes this thread again
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
        """Hear of what has ended the engine elsewhere, answer what was asked, ask and warn."""
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
        """Of what has been pending since before a moment: name, ranks that have it, ranks that are missing."""
        answers = self._store.answers(number)
        found = []
        for channel in self._channels():
            for name, moment in since.get(channel.number, {}).items():
                if moment > before:
                    continue
                pending = {rank: answers.get(rank, {}).get(channel.number, ()) for rank in channel.ranks}
                has = sorted({self._rank, *(rank for rank in channel.ranks if name in pending[rank])})
                # Who has joined needs nothing to have it done.
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
        """Ask once more who is missing, and end the engine."""
        missing: list[tuple[str, list[int], list[int]]] = []
        with contextlib.suppress(RuntimeError):  # then nobody knows
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
