"""The heartbeat: when a rank stops, every other rank logs its number, and the watcher logs the Python stacks of all ranks.

[Note: two threads] A client of a TCP store is one socket under one lock: a ``wait`` of the main thread would delay the
beats, so the heartbeat has a client of its own (``store.clone()``). If the process that keeps the store falls silent (a cut
cable, a stopped process), ``get`` and ``check`` block for ever, whatever the store's time-out is, because torch limits only the
wait for a key. So one thread talks to the store, and no other thread waits for it; the second one, the guard, samples the main
thread, ticks the clock, and notices when the first one gets no answer.

[Note: who watches] Every rank overwrites its own key once per interval and reads one key, the status of the watcher;
only the watcher reads all beats. With N ranks that is 2 N small requests per interval and one of N values. The interval grows
above 500 ranks (above 50 behind a door), so the store gets at most 1000 requests a second. The first watcher is rank 0. If
its status is not renewed, or its process has ended, the first rank that adds to the key of the next term takes over. Two
watchers at a time do no harm: the status with the higher term counts.

[Note: the clock] A run that was stopped as a whole (Ctrl-Z, a suspended virtual machine) must not look like a hang when it
continues. The clock of a rank is ticked by its guard and advances by two intervals at most per tick, so it stands still while
the rank is stopped.

[Note: how it ends] A main thread inside a wait of gloo or NCCL cannot be interrupted from Python, and an asynchronous
exception would never be raised in it. So after a hang the process logs the reason and ends at once with exit code 75,
as NCCL's watchdog does it. If a rank is *lost*, no rank is ended: gloo and "shm" raise by themselves then, in the
main thread, where a script can handle it. A rank that still waits ``hang_timeout_s`` later hangs, and is ended by that rule.

No signal is used: stacks are read by a thread (``sys._current_frames``). If a C call of the main thread holds Python's
lock for ever, the rank therefore sends no beat and no stack; ranks of the same node report that its process is alive.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from guozhuang.errors import UsageError, explain
from guozhuang.net.store import innermost
from guozhuang.registry import registry
from guozhuang.watch import afterwards, stacks
from guozhuang.watch.judge import AwakeClock, Beat, Judge, Limits
from guozhuang.watch.processes import GONE, SEE_EACH_OTHER, node_identity, state_of, this_process
from guozhuang.watch.report import EXIT_CODE, end, in_words
from guozhuang.watch.watcher import Report, Watcher, WatcherStatus, look_at_neighbours, read_reports, use_store

# Samples of the main thread's stack per beat: with more of them it is likelier to see that a thread in a loop moves.
_LOOKS_PER_BEAT = 4
# Seconds by which the watcher and the rank that keeps the store end later, so that all other ranks can read the last report.
_LONGER_S = 1.0
_JOIN_S = 2.0
_log = logging.getLogger("guozhuang")


def start(
    store: dist.Store,
    rank: int,
    size: int,
    hang_timeout_s: float | None,
    *,
    keeps_store: bool = False,
    behind_door: bool = False,
    interval_s: float | None = None,
    error_file: str = "",
) -> Heartbeat | None:
    """Start to publish heartbeats and to watch the other ranks. Every rank must call this, after its group was made.

    Returns at once. In a world of one, and with a store that is not a ``TCPStore`` (a file would grow with every beat), nothing
    is started, which is logged.

    Args:
        store: the store of this world; no other world may use the same keys in it ("heartbeat/...").
        rank: the rank of this process.
        size: number of ranks.
        hang_timeout_s: after so many seconds in which no rank started a collective while the main thread of one stood
            still, the stacks of all ranks are printed and every rank ends itself with exit code 75. None: lost ranks are
            reported, but no rank is ended and hangs are not detected. The value of the watcher (at first rank 0) counts.
        keeps_store: this process keeps the store: ``stop`` then waits a moment until the other ranks have stopped using it.
        behind_door: the store is behind a ``Door``; the same on every rank.
        interval_s: between two beats; None: 1 s, more above 500 ranks (50 behind a door). All other limits are multiples of
            it. The same on every rank.
        error_file: the file by which the agent that started this rank learns why it ended; "" without one.

    Returns:
        The heartbeat, to be ended by its ``stop``; None if none was started.

    Raises:
        UsageError: a time is not a number above 0.
    """
    for name, value in (("hang_timeout_s", hang_timeout_s), ("interval_s", interval_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(explain(f"{name} must be a number of seconds above 0", value=value, fix="leave it out"))
    if size == 1 or not isinstance(innermost(store), dist.TCPStore):
        why = "there is one rank" if size == 1 else "the store of the world is no TCPStore"
        _log.log(logging.INFO if hang_timeout_s is None else logging.WARNING, "no heartbeat: %s", why)
        return None
    limits = Limits.usual(size, behind_door) if interval_s is None else Limits.of(interval_s)
    prefixed: Any = dist.PrefixStore("heartbeat", store)
    own = prefixed.clone()  # a connection that only one thread uses: see [Note: two threads]
    own.set_timeout(timedelta(seconds=limits.lost_s))
    running = Heartbeat(own, rank, size, hang_timeout_s, limits, keeps_store, error_file)
    running.start()
    return running


class Heartbeat:
    """The threads that publish one rank's heartbeat and watch the other ranks, from ``start`` to ``stop``.

    Args:
        store: a client that no other thread uses.
        rank: the rank of this process.
        size: number of ranks.
        hang_timeout_s, keeps_store, error_file: see ``start``.
        limits: the time limits; must be the same on every rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        hang_timeout_s: float | None,
        limits: Limits,
        keeps_store: bool,
        error_file: str = "",
    ) -> None:
        self.rank, self.size, self._limits, self._hang_timeout_s = rank, size, limits, hang_timeout_s
        self._store, self._keeps_store, self._error_file = store, keeps_store, error_file
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._clock = AwakeClock(2 * limits.interval_s)
        # The node's identity is hashed to 12 digits, because it is in every beat.
        self._me = this_process(hashlib.sha256(node_identity(SEE_EACH_OTHER).encode()).hexdigest()[:12])
        # The guard thread writes the position of the main thread; the thread that talks to the store reads it.
        self._main = stacks.MainThread(0.0)
        self._collectives, self._exchanges, self._idle_since_s = (0, -1), 0, 0.0
        # The thread that talks to the store writes the state of its connection and of the watch; the guard thread reads it.
        self._num_answers = 0
        self._trouble = ""
        self._closing = self._is_ending = self._is_cut_off = False
        self._count = self._stacks_answered = self._last_report = 0
        self._status: WatcherStatus | None = None
        self._status_since_s = 0.0
        self._tried = 0
        self._watch: Watcher | None = None
        self._leave_reason: str | None = None
        self._texts: set[str] = set()
        # The exception of a collective because of which this rank leaves; the main thread sets it in ``stop``.
        self._error: BaseException | None = None
        self._dead_thread = ""
        self._is_cause_reported = threading.Event()
        self._guarding = self._thread("guard", self._guard)
        self._line = self._thread("store", self._use_store)

    def start(self) -> None:
        """Start the two threads of the heartbeat and return at once."""
        self._look()
        self._guarding.start()
        self._line.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Publish that this rank leaves, and end the threads. Call this before the process group is destroyed.

        A second call does nothing. Takes milliseconds; about an interval if this process keeps the store and other ranks still
        run; up to two seconds if the store does not answer. After an exception from a collective, whose cause may be on another
        rank, it waits for the report: an interval or two, at most three if no rank begins to gather it. There is no such
        wait if a loss was reported before.

        Args:
            error: why this rank leaves, published to the other ranks; None: the exception that is being handled, if any.
        """
        if self._stopped.is_set() or os.getpid() != self._me.pid:
            return  # a forked child has none of our threads, and must not use our socket
        error = error if error is not None else sys.exception()
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if isinstance(error, Exception) and stacks.is_of_a_collective(error):
            self._look()  # the last sample may be from before the collective that failed
            self._error = error
            self._wake.set()
            self._wait_for_report()
            if self._trouble:
                self._log_cut_off(0.0)
        self._leave_reason = "" if error is None else in_words(error)
        self._stopped.set()
        self._wake.set()
        for thread in (self._guarding, self._line):
            # Wait without a limit for a thread that ends this process; the main thread may be here because another rank ended.
            # Any other thread is abandoned if the store blocks it: it is a daemon thread, and does no harm.
            thread.join(None if self._is_ending else 0.0 if self._is_cut_off else _JOIN_S)
        if error is None and self._hang_timeout_s is not None:
            afterwards.start(self.rank, self._hang_timeout_s, self._error_file)

    def note_dead_thread(self, name: str, error: BaseException) -> None:
        """Tell the other ranks that an exception ended a thread of this one, for whose work they may wait. Any thread."""
        self._dead_thread = f"thread {name!r} ended with {in_words(error)}"

    def lost(self) -> Sequence[int]:
        """Return the ranks that are known to be lost; where this rank is cut off, the one that keeps the store."""
        status = self._status
        if status is None:
            return ()
        return (status.keeper[0],) if self._is_cut_off and status.keeper is not None else status.lost

    def _wait_for_report(self) -> None:
        status = self._status
        if status is not None and status.lost and self._last_report >= status.report:
            return  # no need to wait: this rank has logged the report of the loss already
        began_s, limits = time.monotonic(), self._limits
        while self._line.is_alive() and not self._is_cut_off and not self._is_cause_reported.wait(0.02):
            is_gathered = self._status is not None and self._status.stacks_request > 0
            if time.monotonic() - began_s > limits.report_wait_s + (limits.gather_s if is_gathered else 0.0):
                return

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Return a thread for ``work``; an exception in it, a bug of the heartbeat, ends the heartbeat and not the training."""

        def run() -> None:
            try:
                work()
            except Exception:
                self._closing = True
                self._wake.set()
                _log.exception(
                    "[rank %d] the heartbeat of this rank has ended by an error of its own. The training continues, but "
                    "the other ranks will report this rank as silent. Please report this error, with these lines",
                    self.rank,
                )

        return threading.Thread(target=run, name=f"{stacks.OWN_THREADS} {name}", daemon=True)

    # ---- the guard

    def _guard(self) -> None:
        since_answer_s, num_answers, clock_s = 0.0, 0, 0.0
        while not self._stopped.wait(self._limits.interval_s / _LOOKS_PER_BEAT):
            before_s, clock_s = clock_s, self._clock.tick()
            self._look()
            if self._num_answers != num_answers:
                since_answer_s, num_answers = 0.0, self._num_answers
                if self._is_cut_off:
                    self._is_cut_off = False
                    _log.warning("[rank %d] the store of the world answers again", self.rank)
                continue
            since_answer_s += clock_s - before_s
            if self._closing or (since_answer_s < self._limits.lost_s and not self._trouble):
                continue
            self._log_cut_off(since_answer_s)
            limit_s = self._hang_timeout_s
            idle_s, still_s = clock_s - self._idle_since_s, self._main.still_s(clock_s)
            if limit_s is not None and min(since_answer_s, idle_s, still_s) >= limit_s:
                what = f"{self._cut_off(since_answer_s)}\nIt has been standing at {self._main.place.text} for "
                what += f"{still_s:.0f} s (--hang-timeout {limit_s:g}), and ends itself with exit code {EXIT_CODE}."
                self._is_ending = True
                end(f"{what}\n{stacks.stacks_text()}", 0.0)

    def _look(self) -> None:
        clock_s = self._clock()
        self._main.look(clock_s)
        started, exchanges = stacks.started_collectives(), registry.num_exchanges
        if started is None or (started, exchanges) != (self._collectives, self._exchanges):
            self._idle_since_s = clock_s  # None: a rank without a group is never idle
        self._collectives = started if started is not None else self._collectives
        self._exchanges = exchanges

    def _log_cut_off(self, since_s: float) -> None:
        if not self._is_cut_off:
            self._is_cut_off = True
            _log.error("%s\n%s", self._cut_off(since_s), self._stacks())

    def _cut_off(self, since_s: float) -> str:
        keeper = self._status.keeper if self._status is not None else None
        who = f"rank {keeper[0]}, which keeps it," if keeper is not None else "the launcher, which keeps it,"
        if self._status is None:
            who = "the process that keeps it (the launcher or rank 0)"
        if self._trouble:
            what = f"the connection to the store of the world broke ({self._trouble}): {who} is gone"
        else:
            what = f"no answer from the store of the world for {since_s:.0f} s: {who} is gone or stopped, or this node cut off"
        if keeper is not None and keeper[1] == self._me.node:
            what += f" (its process {keeper[2]} is {state_of(keeper[2], keeper[3])})"
        return f"[rank {self.rank}] {what}. No heartbeat reaches another rank any more. The stacks of this rank:"

    def _stacks(self) -> str:
        return stacks.stacks_text() if self._error is None else stacks.error_text(self._error)

    # ---- the thread that talks to the store

    def _use_store(self) -> None:
        try:
            while not self._stopped.is_set() and not self._closing:
                self._round()
                self._num_answers += 1
                is_urgent = self._error is not None or (self._watch is not None and self._watch.is_urgent)
                self._wake.wait(self._limits.interval_s / (5 if is_urgent else 1))
                self._wake.clear()
            if not self._closing:
                self._publish_leave()
        except RuntimeError as error:  # the store is gone or silent: DistNetworkError, DistStoreError
            # Torch's client does not reconnect, and each further call writes a page to stderr: make no further call.
            self._trouble = str(error).splitlines()[0] if str(error) else type(error).__name__

    def _round(self) -> None:
        self._read_status()
        status = self._status
        self._closing = self._closing or (status is not None and status.closing)
        if status is not None and status.stacks_request > self._stacks_answered:
            self._store.set(f"stacks/{self.rank}", self._stacks())
            self._stacks_answered = status.stacks_request
        self._beat()
        if self._closing:
            return
        if status is not None and status.report > self._last_report and self._watch is None:
            for published in read_reports(self._store, self._last_report):
                self._last_report = published.number
                self._log_report(published)
        if self._watch is None:
            self._take_over_if_due()
        if self._watch is not None:
            report, lines = self._watch.round(self._clock())
            self._status = self._watch.status
            for line in lines:
                _log.warning("[rank %d] %s", self.rank, line)
            if report is not None:
                self._last_report = report.number
                self._log_report(report)

    def _read_status(self) -> None:
        if self._status is None and not self._store.check(["status"]):
            return  # no watcher has published a status yet
        status = WatcherStatus.from_bytes(self._store.get("status"))
        if self._watch is not None and status.term > self._watch.status.term:
            self._watch = None  # another rank took the watch over while this process was stopped
        if status != self._status:
            self._status, self._status_since_s = status, self._clock()

    def _take_over_if_due(self) -> None:
        clock_s, before = self._clock(), self._status
        silent_s = clock_s - self._status_since_s
        if before is None and self.rank != 0 and silent_s < self._limits.mute_s:
            return  # rank 0 becomes the first watcher, and may still need time to publish a status
        is_given_away = before is not None and before.watcher < 0 and self._tried <= before.term
        if before is not None and not is_given_away and silent_s < self._patience_s(before, silent_s):
            return
        self._status_since_s = clock_s
        # Try to become the watcher of a later term each time: the winner of an earlier term may have died without a status.
        self._tried = max(self._tried, before.term if before is not None else 0) + 1
        if self._store.add(f"term/{self._tried}", 1) > 1:
            return
        judge = Judge(self.size, self._limits, self._hang_timeout_s, clock_s)
        if before is not None and before.watcher >= 0:
            judge.silent_since(before.watcher, clock_s - silent_s)
        me = (self.rank, self._me.node, self._me.pid, self._me.start)
        keeper = me if self._keeps_store else before.keeper if before is not None else None
        status = WatcherStatus(self._tried, self.rank, process=me[1:], keeper=keeper)
        self._watch = Watcher(self._store, self.size, status, judge)
        if before is not None:
            _log.info("[rank %d] is now the watcher", self.rank)

    def _patience_s(self, status: WatcherStatus, silent_s: float) -> float:
        """Return for how many seconds the watcher's status may stay the same before this rank becomes the watcher."""
        is_urgent = self._error is not None
        looks = is_urgent or silent_s > 1.5 * self._limits.interval_s
        watcher = status.process
        if looks and watcher is not None and watcher[0] == self._me.node and state_of(*watcher[1:]) == GONE:
            return 0.0
        return self._limits.urgent_takeover_s if is_urgent else self._limits.takeover_s

    def _beat(self) -> None:
        clock_s, error, status = self._clock(), self._error, self._status
        place = self._main.place if error is None else stacks.place_of_error(error)
        self._count += 1
        beat = Beat(
            count=self._count,
            pid=self._me.pid,
            start=self._me.start,
            node=self._me.node,
            collectives=self._collectives[0],
            idle_s=round(clock_s - self._idle_since_s, 1),
            still_s=round(self._main.still_s(clock_s), 1),
            place=place.text,
            waits_in=place.waits_in,
            stacks_answered=self._stacks_answered,
            process_states=look_at_neighbours(status, self._me.node, self.rank) if status is not None else {},
            trouble=in_words(error) if error is not None else "",
            dead_thread=self._dead_thread,
            left=self._leave_reason,
            released_store=self._closing,
            **(registry.own_time.fields(clock_s) if registry.own_time is not None else {}),
        )
        self._store.set(f"beat/{self.rank}", beat.to_bytes().decode())

    def _publish_leave(self) -> None:
        self._beat()
        if self._watch is None and not self._keeps_store:
            return
        if self._watch is not None:
            self._watch.log_own_times(self.rank, registry.own_time is not None and registry.own_time.tells_table)
        before, closing = self._status or WatcherStatus(0, -1), self._keeps_store
        status = replace(before, term=before.term + 1, watcher=-1, stacks_request=0, suspects=(), closing=closing)
        self._store.set("status", status.to_bytes().decode())
        if self._keeps_store:
            # Wait until no rank uses the store: a call to a store that is gone makes torch write a page to stderr.
            deadline_s = time.monotonic() + 1.25 * self._limits.interval_s
            others = set(range(self.size)).difference(before.lost, {self.rank})
            while time.monotonic() < deadline_s and use_store(self._store, others):
                time.sleep(0.02)

    # ---- what the user sees

    def _log_report(self, report: Report) -> None:
        text = f"[rank {self.rank}] {report.full}"
        if report.ends:
            self._is_ending = True
            # This rank waits before it ends: other ranks read reports once per interval, from a store that a rank may keep.
            keeps = self._keeps_store or self._watch is not None
            end(text, 1.5 * self._limits.interval_s + (_LONGER_S if keeps else 0.0), report.hang, self._error_file)
        elif text not in self._texts:  # a new watcher publishes its predecessor's reports again: log each once
            self._texts.add(text)
            _log.error("%s", text)
        if self._error is not None:
            self._is_cause_reported.set()
