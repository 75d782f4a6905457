"""A channel: ranks that submit collectives by name, and threads that agree in rounds which are ready and carry them out.

[Note: threads of a channel] Any thread may submit or wait; one thread of the channel takes part in the rounds and carries out
their decisions. ``_changed`` guards the state that both use: new and pending handles, the pace, the end of the channel. The
thread holds that lock only to read and change this state, never during a collective. A handle is removed from ``_pending``
under the lock, and the thread that removed it ends it; so a handle ends once, by the channel's thread or by ``stop``, and its
name is free before any waiting thread continues. The thread is a daemon, so that a process can exit although a peer is missing.

[Note: pace] A round costs each rank some tens of microseconds, and wakes all ranks, so it should find much to do; but gradients
that are ready early should be sent while backward still computes. Without a fixed cycle a rank takes part in a round when a
thread waits or polls, when 25 MiB were submitted, or when the oldest new submission is a tenth of a second old: that is longer
than the backward of a small model, whose gradients so are sent at once. If a round made nothing ready, ranks wait for each
other's next requests: the next round comes after a pause, which doubles each time, unless this rank has a new submission.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError, explain
from ...exchange.nan_watch import NanWatch
from ...groups.allocation import zeros_for
from ...timeline import Instant, Span
from .control import ChannelGroups
from .execution import Executor, batches
from .requests import request_of
from .rounds import RoundOutcome, Rounds
from .settings import Knobs, Tuner
from .submission import JOIN_NAME, DuplicateNameError, Handle, Kind, NegotiationError, Submission

if TYPE_CHECKING:
    from .engine import NamedEngine

BYTES: Final = 25 << 20
AGE_S: Final = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Pace:
    """Decides when a rank begins a round. It reads no clock: every time is an argument, in seconds. See [Note: pace].

    Args:
        cycle_time_ms: time between the beginnings of two rounds; None: no fixed cycle, see [Note: pace].

    Attributes:
        cycle_time_ms: see the argument; may be changed between rounds.
        is_urgent: whether this rank takes part in every round at once, because it has joined, leaves or has failed.
    """

    def __init__(self, cycle_time_ms: float | None) -> None:
        self.cycle_time_ms = cycle_time_ms
        self.is_urgent = False
        self._num_pending = self._num_fresh = self._num_wanted = 0
        self._fresh_bytes, self._oldest = 0, 0.0
        self._began = self._ended = -1.0
        self._pause_s = 0.0

    def submitted(self, num_bytes: int, now: float) -> bool:
        """Record a submission; return whether it may change when the next round is ``due``."""
        is_idle = self._num_pending == 0
        if self._num_fresh == 0:
            self._oldest = now
        was_enough = self._fresh_bytes >= BYTES
        self._num_pending += 1
        self._num_fresh += 1
        self._fresh_bytes += num_bytes
        is_enough = self._fresh_bytes >= BYTES and not was_enough
        if is_idle or self._num_fresh == 1:  # a new submission ends the pause after a fruitless round
            return True
        return self.cycle_time_ms is None and (is_enough or self._num_wanted > 0)

    def wanted(self) -> None:
        """Record that a thread waits for a pending submission, or polls it."""
        self._num_wanted += 1

    def settled(self, was_wanted: bool) -> None:
        """Record that a pending submission has ended, and whether a thread waited for it."""
        self._num_pending -= 1
        if was_wanted:
            self._num_wanted -= 1

    def due(self, now: float) -> float | None:
        """Return the time of the next round, at least ``now``; None if this rank has no reason for one."""
        if self.is_urgent:
            return now
        if self._num_pending == 0:
            return None
        if self.cycle_time_ms is not None:
            earliest = self._began + self.cycle_time_ms / 1e3
            return max(now, earliest if self._num_fresh else max(earliest, self._ended + self._pause_s))
        if self._num_fresh:
            if self._num_wanted or self._fresh_bytes >= BYTES:
                return now
            return max(now, self._oldest + AGE_S)
        pause_s = self._pause_s if self._num_wanted else max(self._pause_s, AGE_S)
        return max(now, self._ended + pause_s)

    def begins(self, now: float) -> None:
        """Record that a round begins, which includes all new submissions."""
        self._began = now
        self._num_fresh, self._fresh_bytes = 0, 0

    def ends(self, now: float, was_fruitful: bool) -> None:
        """Record that a round ends, and whether it made a collective ready."""
        self._ended = now
        self._pause_s = 0.0 if was_fruitful else min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


class NamedChannel:
    """Some ranks that negotiate collectives with each other. A ``NamedEngine`` makes it, on every rank of its group.

    Args:
        number: number of the channel, the same on all ranks.
        ranks: its ranks in the engine's group, in rising order.
        rank: rank of this process in the channel; None if it is no member.
        groups: the groups that carry the channel; None if this process is no member.
        engine: the engine that makes the channel.
        tuner: the tuner, on rank 0 in the world's channel; None elsewhere and without autotuning.

    Attributes:
        number, ranks, rank: see the arguments. settings: the settings of the engine.
        size: number of ranks.
        group: the group that carries most data; None if this process is no member, and after the end.
        moved_bytes: size of this rank's tensors in all collectives that were carried out.
    """

    def __init__(
        self,
        number: int,
        ranks: Sequence[int],
        rank: int | None,
        groups: ChannelGroups | None,
        engine: NamedEngine,
        tuner: Tuner | None = None,
    ) -> None:
        self.number, self.ranks, self.rank, self.size = number, tuple(ranks), rank, len(ranks)
        self._engine, self.settings, self._groups, self._tuner = engine, engine.settings, groups, tuner
        self._process = os.getpid()
        self.group: dist.ProcessGroup | None = None
        self.moved_bytes = 0
        self._changed = threading.Condition(threading.Lock())
        self._fresh: list[Handle] = []
        self._pending: dict[str, Handle] = {}
        self._pace = Pace(engine.settings.cycle_time_ms)
        self._threshold_bytes = engine.settings.fusion_threshold_bytes
        self._leaves = False
        self._ended: NegotiationError | None = None  # why the channel has ended; None while it accepts submissions
        self._knobs: Knobs | None = None
        self._observed_s = self._last_round_s = time.monotonic()
        self._thread: threading.Thread | None = None
        if groups is None or rank is None:
            return
        self.group = groups.device
        self._allocate = zeros_for(groups.cpu)
        self._rounds = Rounds(groups.exchange, rank, self.ranks, engine.settings.cache_capacity)
        self._executor = Executor(groups.device, groups.cpu, rank, self._allocate, groups.averages)
        self._thread = threading.Thread(target=self._work, name=f"guozhuang negotiated {number}", daemon=True)
        self._thread.start()

    # ---- These methods are for users of the channel.

    def nan_watch(self) -> NanWatch:
        """Return a new watch of gradients for one user of the channel, whose steps nobody else counts."""
        assert self.group is not None, "this process is no member"
        return NanWatch(self.group)

    def submit(self, submission: Submission) -> Handle:
        """Submit a collective and return its handle at once; it starts when all ranks of the channel have submitted it.

        Ranks may submit in any order, and from any thread. The tensors must not be used before the handle is done.

        Raises:
            ValueError: this process is no member, or was forked from one; or the submission is invalid.
            DuplicateNameError: an earlier submission of that name has not ended.
            NegotiationError: the channel has ended; the text says why.
        """
        if self._thread is None:
            raise ValueError(explain(f"this process is none of the ranks {list(self.ranks)}", value=submission.name))
        if os.getpid() != self._process:
            self._refuse_process()
        request, ready = request_of(submission, self.size), None
        if request.device != "cpu":  # see [Note: streams of a channel] in execution.py
            ready = torch.accelerator.current_stream(submission.tensors[0].device).record_event()
        handle = Handle(submission, request, self._hurry, time.monotonic(), ready)
        with self._changed:
            if self._ended is not None:
                raise self._ended.again() from self._ended.__cause__
            if submission.name in self._pending:
                what = f"{submission.kind.value} of a name that is under way: two tensors must not have the same name at a time"
                fix = "give them different names, or wait for the first one"
                raise DuplicateNameError(explain(what, value=submission.name, fix=fix))
            self._pending[submission.name] = handle
            self._fresh.append(handle)
            if self._pace.submitted(request.num_bytes, handle.since):
                self._changed.notify_all()
        self._engine.touch()
        return handle

    def join(self, device: int | None = None) -> Handle:
        """Declare that this rank has no more data: it supplies zeros to all-reduces until all ranks of the channel have joined.

        In the meantime other kinds of collectives fail on the ranks that submit them. Earlier submissions of this rank end
        before the handle of the join does. Raises the errors of ``submit``.

        Args:
            device: index of the accelerator on which zeros are made for other ranks' tensors on accelerators, if this rank
                never submitted any there. None: the accelerator that is current in the calling thread.
        """
        if device is None and torch.accelerator.is_available():
            device = torch.accelerator.current_device_index()
        if self._thread is not None:
            self._executor.joined_on = device or 0
        return self.submit(Submission(Kind.JOIN, JOIN_NAME, ()))

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of zeros in memory that the group reduces in place."""
        if self._thread is None:
            raise ValueError(explain(f"this process is none of the ranks {list(self.ranks)}"))
        if os.getpid() != self._process:
            self._refuse_process()
        return self._allocate(num_elements, dtype, device)

    @property
    def num_rounds(self) -> int:
        """Number of rounds that this rank took part in."""
        return self._rounds.num_rounds

    @property
    def num_full_rounds(self) -> int:
        """Number of rounds in which some rank sent a request in full, not as the number of an earlier one."""
        return self._rounds.num_full_rounds

    def pending_since(self) -> dict[str, float]:
        """Return the pending names with the monotonic time of each submission; for a join, the last round's time if later."""
        with self._changed:
            return {
                name: handle.since if handle.request.kind != Kind.JOIN else max(handle.since, self._last_round_s)
                for name, handle in self._pending.items()
            }

    # ---- These methods end the channel; only the engine calls them.

    def leave(self) -> None:
        """Ask the channel's thread to leave the channel in the next round, and return at once."""
        with self._changed:
            self._leaves = self._pace.is_urgent = True
            self._changed.notify_all()

    def wait_left(self, patience_s: float) -> bool:
        """Wait at most ``patience_s`` until the thread has ended; return whether it has."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience_s)
            return not self._thread.is_alive()
        return True

    def stop(self, error: NegotiationError) -> None:
        """Refuse further submissions and fail the pending ones; the thread ends as soon as it is in no collective."""
        with self._changed:
            if self._ended is None:
                self._ended = error
            taken = list(self._pending.values())
            self._pending.clear()
            self._fresh.clear()
            self._pace.is_urgent = True
            self._changed.notify_all()
        for handle in taken:
            handle.end(error)

    def abort(self) -> None:
        """Break the groups, so that no thread waits in their collectives any more, here or on a peer."""
        if self._groups is not None:
            self._groups.abort()

    def give_back(self) -> None:
        """Close the groups; call it only after the thread has ended."""
        self.group = None
        if self._groups is not None:
            self._executor.close()
            self._groups.close()

    # ---- These methods run on the channel's thread, except the first two.

    def _refuse_process(self) -> NoReturn:
        """Raise UsageError: a forked process has neither the thread nor the connections, so no handle would ever end there."""
        what = f"this process was forked off the one (pid {self._process}) that makes the collectives"
        fix = "submit and wait there, or begin a world in the new process"
        raise UsageError(explain(what, value=os.getpid(), fix=fix))

    def _hurry(self, handle: Handle) -> None:
        if os.getpid() != self._process:
            self._refuse_process()
        with self._changed:
            if handle.has_ended or handle.is_wanted:
                return
            handle.is_wanted = True
            self._pace.wanted()
            self._changed.notify_all()

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._take_part():
                pass
        except BaseException as error:
            if self._ended is None:
                try:
                    self._engine.broke(self, error)
                except BaseException:  # fail the pending handles, or threads would wait for them for ever
                    self.stop(NegotiationError(str(error)))
                    raise

    def _take_part(self) -> bool:
        """Take part in one round when it is due and carry out its decisions; return whether there will be another round."""
        with self._changed:
            while True:
                if self._ended is not None:
                    return False
                now = time.monotonic()
                due = self._pace.due(now)
                if due is not None and due <= now:
                    break
                self._changed.wait(None if due is None else due - now)
            fresh, self._fresh = self._fresh, []
            leaves = self._leaves
            self._pace.begins(now)
        if (trace := self._engine.trace) is not None and self._engine.marks_cycles:
            trace.record(Instant("CYCLE_START", "cycles", int(now * 1e9), {}))
        knobs, self._knobs = self._knobs, None
        outcome = self._rounds.hold([(each.submission.name, each.request) for each in fresh], leaves, knobs)
        del fresh
        with self._changed:
            if self._ended is not None:  # stopped meanwhile: without its failed handles this rank would send zeros
                return False
            handles = {each.name: self._pending[each.name] for each in outcome.responses if each.name in self._pending}
        zeros_are_due = self._rounds.has_joined or outcome.last_joined is not None
        assert zeros_are_due or len(handles) == len(outcome.responses), "a rank answers only what it asked for"
        self._carry_out(outcome, handles)
        del handles
        with self._changed:
            self._last_round_s = time.monotonic()
            self._pace.ends(self._last_round_s, bool(outcome.responses))
            self._pace.is_urgent = self._leaves or self._rounds.has_joined
        if outcome.leaving:
            self._part(outcome.leaving, leaves)
        return not outcome.leaving

    def _carry_out(self, outcome: RoundOutcome, handles: Mapping[str, Handle]) -> None:
        if outcome.knobs is not None:
            self._threshold_bytes = outcome.knobs.fusion_threshold_bytes
            self._pace.cycle_time_ms = outcome.knobs.cycle_time_ms
        trace = self._engine.trace
        if trace is not None:
            now = time.monotonic()
            for each in outcome.responses:
                since = handles[each.name].since if each.name in handles else now
                trace.record(_span(f"NEGOTIATE_{each.request.kind.name}", each.name, since, now))
        good = [response for response in outcome.responses if response.error is None]
        for response in outcome.responses:
            if response.error is not None:
                kinds = {request.kind for request in response.requests.values()}
                self._settle([response.name], NegotiationError(response.error, is_of_kinds=len(kinds) > 1))
        num_bytes, moved = 0, []
        for batch in batches(good, self._threshold_bytes, self.settings.fuse_groups):
            began = time.monotonic()
            names = [each.name for each in batch]
            self._executor.carry_out(batch, {name: handles[name] for name in names if name in handles})
            if trace is not None:
                ended = time.monotonic()
                for name in names:
                    trace.record(_span(batch[0].request.kind.name, name, began, ended))
            batch_bytes = sum(each.request.num_bytes for each in batch)
            self.moved_bytes += batch_bytes
            if self._tuner is not None:
                num_bytes += batch_bytes
                moved += [each.name for each in batch if each.request.shapes]
            if outcome.last_joined is not None and batch[0].request.kind == Kind.JOIN:
                handles[JOIN_NAME].last_joined = outcome.last_joined
            self._settle(names)
        if num_bytes and self._tuner is not None:
            now = time.monotonic()
            self._knobs = self._tuner.observe(moved, num_bytes, now - self._observed_s)
            self._observed_s = now

    def _settle(self, names: Sequence[str], error: NegotiationError | None = None) -> None:
        """Remove handles from ``_pending`` and end them. See [Note: threads of a channel]."""
        taken = []
        with self._changed:
            for name in names:
                handle = self._pending.pop(name, None)
                if handle is not None:
                    self._pace.settled(handle.is_wanted)
                    handle.is_wanted = True  # so that a thread that waits from now on is not counted
                    taken.append(handle)
        for handle in taken:
            handle.end(error)

    def _part(self, leaving: Sequence[int], leaves: bool) -> None:
        """End the channel, because some of its ranks leave."""
        who = ", ".join(f"rank {self.ranks[rank]}" for rank in leaving)
        with self._changed:
            names = list(self._pending)
        during = f" while {', '.join(names[:10])} was under way" if names else ""
        text = explain(
            f"the collectives of ranks {list(self.ranks)} were shut down by {who}{during}",
            rank=self.ranks[self.rank or 0],
            fix="let every rank make the same collectives before it shuts down; look at that rank's own error",
        )
        if not leaves:
            self._engine.left(self, text)
        self.stop(NegotiationError(text))


def _span(name: str, track: str, since_s: float, until_s: float) -> Span:
    return Span(name, track, int(since_s * 1e9), int(until_s * 1e9), {})
