"""Watches collectives that are pending for long: names the missing ranks, ends waits that exceed the limit, finds lost ranks.

[Note: the watch] Each engine has one watch thread, which sleeps as long as nothing is pending. Then it looks once a second, and
uses the store only if a submission is older than that. It writes the names that are pending on its rank to the store when they
have changed; a rank that has written none has none. So it is known which ranks have submitted a name and which are missing.
The lowest rank that has submitted it logs a warning.
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
from ...groups.agreement import StoreNotices
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
        self._processes: dict[int, Process] = {}  # by rank, as far as they have been read
        self._client = Client(_STORE_S, retries=True, starts=True)
        reports = dist.PrefixStore("report", store)
        # All notices stand under step 0: why ranks left or failed.
        self._notices = StoreNotices(reports, rank, size, self._client.call)
        store.set(f"card/{rank}", str(this_process(self._node)))

    def close(self) -> None:
        """End the thread; the store is not used any more."""
        self._client.close()

    def read_processes(self) -> None:
        """Read the process (node and pid) of each rank that has written it to the store; every rank does so on construction."""
        with contextlib.suppress(RuntimeError):
            for rank in set(range(self._size)) - self._processes.keys():
                if (card := self._read(f"card/{rank}")) is not None:
                    self._processes[rank] = Process.read(card)

    # ---- These methods are about ranks that leave or fail.

    def report(self, cause: str) -> None:
        """Write to the store why this rank leaves or has failed; ignore a store that does not answer."""
        self._notices.leave(0, cause)

    def reports(self) -> dict[int, str]:
        """Return by rank why other ranks left or failed, as they wrote it; empty if the store does not answer.

        Each answer of the store has a limit of its own: hundreds of ranks may read at once what hundreds have written.
        """
        return {rank: text for rank, text in self._notices.read(0, 0.0).items() if rank != self._rank}

    def ends(self, patience_s: float) -> tuple[dict[int, int], dict[int, str]]:
        """Return pids of this node's ranks that have ended, and the ranks' reports; wait ``patience_s`` at most for either.

        If ranks have ended, only their own reports are returned: other ranks may have failed because of them.
        """
        deadline = time.monotonic() + patience_s
        while True:
            ended = {rank: each.pid for rank, each in self._processes.items() if each.has_ended(self._node)}
            reports = self.reports()
            if ended or reports or time.monotonic() >= deadline:
                return ended, {rank: text for rank, text in reports.items() if rank in ended} if ended else reports
            time.sleep(_LOOK_S)

    # ---- Only the watch thread calls these, about stalls; they raise RuntimeError if the store does not answer.

    def publish(self, pending: Mapping[int, Sequence[str]]) -> None:
        """Write to the store which names are pending on this rank, by the number of their channel."""
        text = json.dumps(pending)
        self._client.call(lambda: self._store.set(f"pending/{self._rank}", text))

    def pending(self) -> dict[int, dict[int, list[str]]]:
        """Return the pending names that ranks have written to the store, by rank and number of the channel."""
        found = {}
        for rank in range(self._size):
            if (text := self._read(f"pending/{rank}")) is not None:
                found[rank] = {int(number): names for number, names in json.loads(text).items()}
        return found

    def _read(self, key: str) -> str | None:
        """Return the value of a key; None if it does not exist. Raise RuntimeError if the store does not answer."""
        return self._client.call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)


class StallWatch:
    """The thread that watches an engine's pending submissions. See [Note: the watch].

    Args:
        store: the messages of the engine's ranks.
        rank: rank of this process.
        settings: the limits.
        stop_s: age of a submission, in seconds, at which everything pending fails.
        channels: returns the engine's channels.
        stop: ends the engine on this rank with an error.
        tick_s: seconds between two looks at the pending submissions.
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
        self._next_warning = 0.0
        self._published: dict[int, list[str]] = {}
        self.num_looks = 0  # number of looks at the pending names that used the store
        self._thread = threading.Thread(target=self._work, name="guozhuang negotiated watch", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Wake the watch thread, because a collective was submitted."""
        if not self._is_awake.is_set():
            self._is_awake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._is_awake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _work(self) -> None:
        while not self._closed.is_set():
            self._is_awake.wait()
            self._is_awake.clear()  # before the look, so that a later submission wakes this thread again
            while not self._closed.wait(self._tick_s):
                since = {channel.number: channel.pending_since() for channel in self._channels()}
                if not any(since.values()):
                    self._next_warning = 0.0
                    break
                self._look(since)
            with contextlib.suppress(RuntimeError):
                self._publish({})

    def _look(self, since: dict[int, dict[str, float]]) -> None:
        now = time.monotonic()
        age_s = now - min(moment for moments in since.values() for moment in moments.values())
        if age_s < self._tick_s:
            return
        self.num_looks += 1
        try:
            if reports := self._store.reports():
                self._stop(NegotiationError("; ".join(reports.values())))
                return
            self._publish({key: list(moments) for key, moments in since.items() if moments})
            if self._settings.stall_check and age_s >= self._settings.stall_warning_s and now >= self._next_warning:
                self._next_warning = now + self._settings.stall_warning_s
                self._warn(self._missing(since, now - self._settings.stall_warning_s), self._settings.stall_warning_s)
        except RuntimeError as error:
            _LOG.debug("rank %d: the names that are pending on other ranks are not known: %s", self._rank, error)
        if age_s >= self._stop_s:
            self._end(since, now)

    def _publish(self, pending: dict[int, list[str]]) -> None:
        if pending != self._published:
            self._published = pending
            self._store.publish(pending)

    def _missing(self, since: dict[int, dict[str, float]], before: float) -> list[tuple[str, list[int], list[int]]]:
        """Return (name, ranks that submitted it, missing ranks) for names that are pending since ``before`` or longer."""
        published = self._store.pending()
        found = []
        for channel in self._channels():
            for name, moment in since.get(channel.number, {}).items():
                if moment > before:
                    continue
                pending = {rank: published.get(rank, {}).get(channel.number, ()) for rank in channel.ranks}
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
        missing: list[tuple[str, list[int], list[int]]] = []
        with contextlib.suppress(RuntimeError):  # without the store the error names no missing ranks
            missing = self._missing(since, now - self._stop_s)
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
