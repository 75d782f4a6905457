"""Watches what is pending for long: says which ranks are missing, and ends what would wait for ever.

[Note: the watch] One thread per engine, asleep as long as nothing is pending; then it looks once a second, and does not even
ask the store if all is younger than that. A rank with something old pending asks all others, through the store, what they have
pending; every watch that is awake answers within a second, and a rank that does not answer has nothing pending. So who has a
name is known, and who is missing. Of the ranks that have it the lowest one says so in its log.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ...errors import explain
from .board import Board
from .settings import Settings
from .submission import JOIN_NAME, NegotiationError

_LOG = logging.getLogger("guozhuang")
_NUM_TOLD: Final = 20  # names of one rank


class Watched(Protocol):
    """What the watch knows of a channel."""

    number: int
    ranks: tuple[int, ...]

    def pending_since(self) -> dict[str, float]:
        """What this rank has pending, and since when on the monotonic clock; joins from the last round on."""
        ...


class Watch:
    """The watch of an engine. See [Note: the watch].

    Args:
        board: of the engine.
        rank: this process.
        settings: the limits.
        stop_s: after how many seconds all that is pending fails.
        channels: those that there are.
        stop: ends the engine on this rank.
        tick_s: seconds between two looks.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        settings: Settings,
        stop_s: float,
        channels: Callable[[], Sequence[Watched]],
        stop: Callable[[NegotiationError], object],
        tick_s: float = 1.0,
    ) -> None:
        self._board, self._rank, self._settings, self._stop_s = board, rank, settings, stop_s
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
        if words := self._board.words():
            self._stop(NegotiationError("; ".join(words.values())))
            return
        num_asked = self._board.num_asked()
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
        number = self._board.ask()
        self._answer(number, since)
        return number

    def _answer(self, number: int, since: dict[int, dict[str, float]]) -> None:
        self._num_answered = number
        self._board.answer(number, {key: list(moments) for key, moments in since.items()})

    def _missing(
        self, number: int, since: dict[int, dict[str, float]], before: float
    ) -> list[tuple[str, list[int], list[int]]]:
        """Of what has been pending since before a moment: name, ranks that have it, ranks that are missing."""
        answers = self._board.answers(number)
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
