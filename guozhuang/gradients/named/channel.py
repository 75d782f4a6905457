"""The ranks that negotiate with each other: who submits, the thread that goes from round to round, and how both end.

[Note: threads of a channel] Any thread may submit or wait; one thread of the channel holds the rounds and carries out what
they decide. ``_changed`` guards what both see: what is fresh, what is under way, the pace, how the channel ends. The thread
holds it only to look and to take, never in a collective. A handle leaves ``_under_way`` under the lock, and whoever took it out
ends it; so it ends once, by the thread or by ``stop``, and its name is free before anybody who waits goes
on. The thread is a daemon: an interpreter that ends does not wait for a peer that never comes.

[Note: pace] A round costs each rank some tens of microseconds, and wakes all of them, so it should find much to do; but what is
ready early should travel while backward still computes. Without a fixed cycle a rank comes when somebody waits, or polls; when
a bucketful of bytes has come together; or when what came first is a tenth of a second old: longer than the backward of a small
model, which so goes as one. If a round made nothing ready, ranks are pending on each other's next requests: the next one comes
after a pause that doubles, unless there is something new on this rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError, explain
from ...groups.allocation import zeros_for
from .control import Carriers
from .execution import Executor, batches
from .requests import Response, request_of
from .rounds import RoundOutcome, Rounds
from .settings import Knobs, Settings, Tuner
from .submission import JOIN_NAME, DuplicateNameError, Handle, Kind, NegotiationError, Submission
from .tracing import Tracing

BYTES: Final = 25 << 20
AGE_S: Final = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Pace:
    """Decides when; knows no clock: every moment is an argument, in seconds. See [Note: pace].

    Args:
        cycle_time_ms: between the beginnings of two rounds; None: as above.

    Attributes:
        cycle_time_ms: may be set between rounds.
        is_urgent: the rank comes to every round at once: it has joined, or leaves.
    """

    def __init__(self, cycle_time_ms: float | None) -> None:
        self.cycle_time_ms = cycle_time_ms
        self.is_urgent = False
        self._num_pending = self._num_fresh = self._num_wanted = 0
        self._fresh_bytes, self._oldest = 0, 0.0
        self._began = self._ended = -1.0
        self._pause_s = 0.0

    def submitted(self, num_bytes: int, now: float) -> bool:
        """Take note of a submission; tell whether ``due`` has to be asked anew."""
        is_idle = self._num_pending == 0
        if self._num_fresh == 0:
            self._oldest = now
        was_enough = self._fresh_bytes >= BYTES
        self._num_pending += 1
        self._num_fresh += 1
        self._fresh_bytes += num_bytes
        is_enough = self._fresh_bytes >= BYTES and not was_enough
        if is_idle or self._num_fresh == 1:  # what is fresh waits for no pause
            return True
        return self.cycle_time_ms is None and (is_enough or self._num_wanted > 0)

    def wanted(self) -> None:
        """Take note that somebody waits for something that is pending."""
        self._num_wanted += 1

    def settled(self, was_wanted: bool) -> None:
        """Take note that something pending has ended."""
        self._num_pending -= 1
        if was_wanted:
            self._num_wanted -= 1

    def due(self, now: float) -> float | None:
        """When the next round is due, now or later; None if there is nothing to come for."""
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
        """Take note that a round begins with all that was submitted."""
        self._began = now
        self._num_fresh, self._fresh_bytes = 0, 0

    def ends(self, now: float, was_fruitful: bool) -> None:
        """Take note of the end of a round: whether it made something ready."""
        self._ended = now
        self._pause_s = 0.0 if was_fruitful else min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


@dataclass(frozen=True)
class Surroundings:
    """What a channel is given by its engine.

    Attributes:
        settings: of the engine.
        tracing: records what the channel does.
        touch: tells the watch that something is pending.
        broke: to be called with what ended the channel's thread, from that thread.
        left: to be called with the ranks that left, and the words for it, if this rank did not leave itself.
        tuner: on rank 0 of the world's channel, if there is one.
    """

    settings: Settings
    tracing: Tracing
    touch: Callable[[], object]
    broke: Callable[[NamedChannel, BaseException], object]
    left: Callable[[NamedChannel, str], object]
    tuner: Tuner | None = None


class NamedChannel:
    """Ranks that negotiate with each other. A ``NamedEngine`` makes it, on every rank of its group.

    Args:
        number: of the channel, the same on all ranks.
        ranks: of the engine's group, rising.
        rank: this process among them; None if it is none of them.
        carriers: of the members.
        around: what the engine gives.

    Attributes:
        number, ranks: as above. rank: this process in the channel; None: no member. settings: of the engine.
        size: number of ranks.
        group: what carries the data; None where this process is no member, and after the end.
    """

    def __init__(
        self, number: int, ranks: Sequence[int], rank: int | None, carriers: Carriers | None, around: Surroundings
    ) -> None:
        self.number, self.ranks, self.rank, self.size = number, tuple(ranks), rank, len(ranks)
        self._around, self.settings, self._carriers, self._process = around, around.settings, carriers, os.getpid()
        self.group: dist.ProcessGroup | None = None
        self._changed = threading.Condition(threading.Lock())
        self._fresh: list[Handle] = []
        self._under_way: dict[str, Handle] = {}
        self._pace = Pace(around.settings.cycle_time_ms)
        self._threshold_bytes = around.settings.fusion_threshold_bytes
        self._leaves = False
        self._ended: NegotiationError | None = None  # why nothing is taken any more
        self._knobs: Knobs | None = None
        self._observed_s = self._last_round_s = time.monotonic()
        self._thread: threading.Thread | None = None
        if carriers is None or rank is None:
            return
        self.group = carriers.group
        self._allocate = zeros_for(carriers.cpu)
        self._rounds = Rounds(carriers.words, rank, self.ranks, around.settings.cache_capacity)
        self._executor = Executor(carriers.device, carriers.cpu, rank, self._allocate, carriers.averages)
        self._thread = threading.Thread(target=self._work, name=f"guozhuang negotiated {number}", daemon=True)
        self._thread.start()

    # What others call.

    def submit(self, submission: Submission) -> Handle:
        """Ask for a collective; return at once. It begins when all ranks of the channel have asked, in whatever order.

        From any thread. The tensors must not be touched before the handle is done.

        Raises:
            ValueError: this process is no member, or was forked off one; or the submission cannot work.
            DuplicateNameError: something of that name is under way.
            NegotiationError: the channel has ended; the text says why.
        """
        if self._thread is None:
            raise ValueError(explain(f"this process is none of the ranks {list(self.ranks)}", value=submission.name))
        if os.getpid() != self._process:
            self._refuse_process()
        request, ready = request_of(submission, self.size), None
        if request.device != "cpu":  # see [Note: streams of a channel]
            ready = torch.accelerator.current_stream(submission.tensors[0].device).record_event()
        handle = Handle(submission, request, self._hurry, time.monotonic(), ready)
        with self._changed:
            if self._ended is not None:
                raise self._ended.again() from self._ended.__cause__
            if submission.name in self._under_way:
                what = f"{submission.kind.value} of a name that is under way: two tensors must not have the same name at a time"
                fix = "give them different names, or wait for the first one"
                raise DuplicateNameError(explain(what, value=submission.name, fix=fix))
            self._under_way[submission.name] = handle
            self._fresh.append(handle)
            if self._pace.submitted(request.num_bytes, handle.since):
                self._changed.notify_all()
        self._around.touch()
        return handle

    def join(self, device: int | None = None) -> Handle:
        """Say that this rank has nothing more to reduce: it feeds zeros to all-reduces until all ranks of the channel joined.

        Other kinds fail on the ranks that ask for them in the meantime. What this rank has under way ends before the join does.
        Errors are those of ``submit``.

        Args:
            device: index of the accelerator on which zeros are made where others' tensors are on theirs, if this rank never
                had any. None: the one that is current in the calling thread.
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
        """Rounds that this rank took part in."""
        return self._rounds.num_rounds

    @property
    def num_full_rounds(self) -> int:
        """Those of them in which ranks exchanged more than readiness."""
        return self._rounds.num_full_rounds

    def pending_since(self) -> dict[str, float]:
        """What is under way, and since when on the monotonic clock; a join from the last round on."""
        with self._changed:
            return {
                name: handle.since if handle.request.kind != Kind.JOIN else max(handle.since, self._last_round_s)
                for name, handle in self._under_way.items()
            }

    # How it ends; the engine calls these.

    def leave(self) -> None:
        """Begin to leave: in the next round, or at once where the thread has ended."""
        with self._changed:
            self._leaves = self._pace.is_urgent = True
            self._changed.notify_all()

    def wait_left(self, patience_s: float) -> bool:
        """Wait until the thread has ended; tell whether it has."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience_s)
            return not self._thread.is_alive()
        return True

    def stop(self, error: NegotiationError) -> None:
        """Take nothing more, and fail what is under way; the thread ends as soon as it is in no collective."""
        with self._changed:
            if self._ended is None:
                self._ended = error
            taken = list(self._under_way.values())
            self._under_way.clear()
            self._fresh.clear()
            self._pace.is_urgent = True
            self._changed.notify_all()
        for handle in taken:
            handle.end(error)

    def abort(self) -> None:
        """Break the groups, so that no thread waits in a collective, here or on a peer."""
        if self._carriers is not None:
            self._carriers.abort()

    def give_back(self) -> None:
        """Give the groups back, once the thread has ended."""
        self.group = None
        if self._carriers is not None:
            self._executor.close()
            self._carriers.close()

    # The thread.

    def _refuse_process(self) -> NoReturn:
        """Neither the thread nor the connections are in a process that was forked off; nothing would ever end there."""
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
                    self._around.broke(self, error)
                except BaseException:  # nobody else would tell those who wait
                    self.stop(NegotiationError(str(error)))
                    raise

    def _take_part(self) -> bool:
        """Hold one round when it is due and carry out what it decides; tell whether there will be another one."""
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
        self._around.tracing.round_began(now)
        knobs, self._knobs = self._knobs, None
        outcome = self._rounds.hold([(each.submission.name, each.request) for each in fresh], leaves, knobs)
        del fresh
        with self._changed:
            if self._ended is not None:  # what it had has failed; zeros in place of it would be taken for it
                return False
            handles = {
                each.name: self._under_way[each.name] for each in outcome.responses if each.name in self._under_way
            }
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
        if self._around.tracing.is_on:
            self._trace_negotiated(outcome.responses, handles)
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
            if self._around.tracing.is_on:
                self._around.tracing.carried_out(batch[0].request.kind, names, began, time.monotonic())
            if self._around.tuner is not None:
                num_bytes += sum(each.request.num_bytes for each in batch)
                moved += [each.name for each in batch if each.request.shapes]
            if outcome.last_joined is not None and batch[0].request.kind == Kind.JOIN:
                handles[JOIN_NAME].last_joined = outcome.last_joined
            self._settle(names)
        if num_bytes and self._around.tuner is not None:
            now = time.monotonic()
            self._knobs = self._around.tuner.observe(moved, num_bytes, now - self._observed_s)
            self._observed_s = now

    def _settle(self, names: Sequence[str], error: NegotiationError | None = None) -> None:
        """Take handles out and end them. See [Note: threads of a channel]."""
        taken = []
        with self._changed:
            for name in names:
                handle = self._under_way.pop(name, None)
                if handle is not None:
                    self._pace.settled(handle.is_wanted)
                    handle.is_wanted = True  # who waits from now on must not be counted
                    taken.append(handle)
        for handle in taken:
            handle.end(error)

    def _part(self, leaving: Sequence[int], leaves: bool) -> None:
        """End the channel, because ranks of it leave."""
        who = ", ".join(f"rank {self.ranks[rank]}" for rank in leaving)
        with self._changed:
            names = list(self._under_way)
        during = f" while {', '.join(names[:10])} was under way" if names else ""
        text = explain(
            f"the collectives of ranks {list(self.ranks)} were shut down by {who}{during}",
            rank=self.ranks[self.rank or 0],
            fix="let every rank make the same collectives before it shuts down; look at that rank's own error",
        )
        if not leaves:
            self._around.left(self, text)
        self.stop(NegotiationError(text))

    def _trace_negotiated(self, responses: Sequence[Response], handles: Mapping[str, Handle]) -> None:
        now = time.monotonic()
        for each in responses:
            since = handles[each.name].since if each.name in handles else now
            self._around.tracing.negotiated(each.request.kind, [(each.name, since)], now)
