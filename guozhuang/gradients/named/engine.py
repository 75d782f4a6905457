"""The engine of collectives that are matched by name: makes channels, lets them fail together, and ends them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

from ...errors import PeerLost, UsageError, explain
from ...groups.agreement import agree, store_of
from ...groups.subgroups import timeout_s
from ...net.store import next_part
from ...timeline import TraceStream
from .channel import NamedChannel
from .collectives import CarrierError
from .control import ChannelGroups
from .settings import Settings, Tuner
from .stalls import EngineStore, StallWatch
from .submission import NegotiationError

_LOG = logging.getLogger("guozhuang")
_LEAVE_S: Final = 5.0  # limit of the wait for other ranks to leave too
_END_S: Final = 2.0  # limit of the wait for a channel's thread to end, after its groups were broken
# Limit of the wait for the cause of a failure: a process that ends (its connections break earlier), or another rank's message.
_PATIENCE_S: Final = 1.0
_LEAST_STOP_S: Final = 30 * 60.0
_FIX: Final = "look at that rank's own error, or in the system's log if it was killed"


class NamedEngine:
    """Collectives that are matched by name. Every rank of the group must construct it.

    [Note: failing together] After a rank is lost no collective can end, in any channel. So the first thread that gets an error
    ends the engine on its rank: it breaks all groups, so that the other ranks fail at once, too; finds out which rank was lost,
    from the processes of its node or from another rank's message in the store; writes such a message itself; and fails all
    pending submissions. Later submissions fail with the same text. It is up to the user to make a new engine in a new world.

    Args:
        group: the ranks; a group that ``torch.distributed`` knows, of any backend.
        settings: the settings, equal on all ranks.

    Attributes:
        world: the channel of all ranks.
        settings: the settings.
        trace: the file to which rank 0 writes collectives while a timeline is on; marks_cycles: rounds, too.
        failure: the error with which the engine has failed; None as long as it works, or if it was closed without a failure.

    Raises:
        MismatchError: ranks have different settings.
        UsageError: on rank 0: the settings ask for autotuning, and it cannot be done; other ranks raise a MismatchError.
        NegotiationError: another rank is lost.
        WorldError: some rank did not construct its engine within the time-out of the group.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.failure: NegotiationError | None = None
        self._group, self.settings = group, settings
        self._rank, self._size, self._limit_s = group.rank(), group.size(), timeout_s(group)
        self._process = os.getpid()
        self._lock = threading.RLock()  # guards failure, _channels and _closed
        self._closed = False
        self._channels: list[NamedChannel] = []
        self._num_made = 0
        self._store = next_part(store_of(group), "negotiated", self._rank)
        self._notices = EngineStore(self._store, self._rank, self._size)
        self._timeline_path: str | None = None
        self.trace: TraceStream | None = None
        self.marks_cycles = False
        stop_s = settings.stall_stop_s or max(self._limit_s, _LEAST_STOP_S)
        self._watch = StallWatch(self._notices, self._rank, settings, stop_s, lambda: self._channels, self._stop)
        try:
            self.world = self._begin(settings)
        except BaseException:
            self._watch.close()
            self._notices.close()
            raise

    def add(self, ranks: Sequence[int], called: str = "channel") -> NamedChannel:
        """Make a channel of some ranks. Every rank of the engine's group must call it, with the same ranks.

        Args:
            ranks: ranks in the engine's group, in any order.
            called: the user's word for a channel, for errors.

        Raises:
            ValueError: there is no such rank, or one is named twice.
            MismatchError: (a ValueError) ranks called with different ranks.
            NegotiationError: the engine has failed or was closed.
            WorldError: some rank did not call within the time-out of the group.
        """
        self._raise_failure()
        wanted = sorted(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or wanted[0] < 0 or wanted[-1] >= self._size:
            what = f"a {called} needs different ranks of 0 to {self._size - 1}"
            raise ValueError(explain(what, value=list(ranks), rank=self._rank))
        fix = f"add the same {called}s in the same order on all ranks"
        self._agree(f"the ranks of a new {called}", [f"ranks {wanted}"], fix)
        return self._make(wanted)

    def remove(self, channel: NamedChannel) -> None:
        """End a channel. Every rank of the engine's group must call it; submissions pending in the channel fail.

        Raises:
            ValueError: it is the world's channel, or not a channel of this engine.
            MismatchError: ranks called with different channels.
            NegotiationError: the engine has failed or was closed.
            WorldError: some rank did not call within the time-out of the group.
        """
        self._raise_failure()
        if channel is self.world or channel not in self._channels:
            what = "only a channel that was added can be removed"
            raise ValueError(explain(what, value=list(channel.ranks), rank=self._rank))
        fix = "remove the same channels in the same order on all ranks"
        line = f"channel {channel.number} of ranks {list(channel.ranks)}"
        self._agree("the channel to remove", [line], fix)
        with self._lock:
            self._channels = [each for each in self._channels if each is not channel]
        self._end([channel])

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Begin to write a Chrome trace of all collectives; rank 0 of the engine's group writes it.

        Not collective. The file is a complete JSON document at every moment.

        Raises:
            UsageError: a trace is being written already.
            OSError: the file cannot be written.
        """
        with self._lock:
            if self._timeline_path is not None:
                what = f"a timeline is being written to {self._timeline_path!r}"
                raise UsageError(explain(what, value=path, fix="stop it first"))
            if self._rank == 0:
                self.trace, self.marks_cycles = TraceStream(path), mark_cycles
            self._timeline_path = path

    def stop_timeline(self) -> None:
        """End the trace, if a trace is being written. Not collective."""
        with self._lock:
            trace, self.trace, self._timeline_path = self.trace, None, None
        if trace is not None:
            trace.close()

    def fail(self, why: str) -> None:
        """End the engine with an error; pending submissions fail here and on the other ranks. See [Note: failing together].

        For callers that find out by themselves that a rank is lost; in any thread. Not collective. No effect after ``close``.
        """
        self._stop(NegotiationError(explain(why, rank=self._rank)))

    def close(self) -> None:
        """End the engine; pending submissions fail on all ranks. Every rank should call it within some seconds of the others.

        A second call does nothing, nor does a call in a forked process. Threads, groups and the timeline's file are closed.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels, self._channels = self._channels, []
        self._end(channels)
        self._watch.close()
        self._notices.close()
        self.stop_timeline()

    # ---- These methods make channels and end them.

    def _begin(self, settings: Settings) -> NamedChannel:
        tuner = refusal = None
        try:
            tuner = settings.autotune(settings) if settings.autotune is not None and self._rank == 0 else None
        except UsageError as error:
            refusal = error
        shared = ("fusion_threshold_bytes", "cache_capacity", "fuse_groups")
        lines = [f"{name} = {getattr(settings, name)}" for name in shared]
        lines.append(f"autotune = {settings.autotune is not None if refusal is None else refusal}")
        try:
            self._agree("settings of negotiated collectives", lines, "give all ranks the same settings")
        finally:
            if refusal is not None:  # raised only now, so that the other ranks fail the comparison and do not wait
                raise refusal
        self._notices.read_processes()
        return self._make(range(self._size), tuner)

    def _agree(self, what: str, lines: Sequence[str], fix: str) -> None:
        agree(self._group, what, lines, self._limit_s, fix, self._look)

    def _look(self) -> None:
        """Raise NegotiationError if the engine has failed or another rank is lost; called while this rank waits for others."""
        self._raise_failure()
        self._notices.read_processes()
        if lost := self._lost(0.0):
            self._stop(NegotiationError(lost))
            self._raise_failure()

    def _make(self, members: Sequence[int], tuner: Tuner | None = None) -> NamedChannel:
        number = self._num_made
        self._num_made += 1
        rank = list(members).index(self._rank) if self._rank in members else None
        store = dist.PrefixStore(f"channel/{number}", self._store)
        groups = self._connect(members, store) if rank is not None else None
        channel = NamedChannel(number, members, rank, groups, self, tuner)
        with self._lock:
            self._channels = [*self._channels, channel]
            stands_still = self.failure is not None or self._closed
        if stands_still:  # the thread that stopped all channels may not have seen this new one
            channel.stop(NegotiationError("the engine stands still"))
            channel.abort()
            if channel.wait_left(_END_S):
                channel.give_back()
            self._raise_failure()
        return channel

    def _connect(self, members: Sequence[int], store: dist.Store) -> ChannelGroups:
        try:
            return ChannelGroups(self._group, members, store)
        except RuntimeError as error:  # a rank is lost, or did not connect in time
            what = f"the ranks {list(members)} could not connect: {error}"
            failure = NegotiationError(self._lost(_PATIENCE_S) or explain(what, rank=self._rank, fix=_FIX))
            self._stop(failure)
            self._raise_failure()
            raise failure from error

    def _end(self, channels: Sequence[NamedChannel]) -> None:
        """Leave channels together with their other ranks, or alone if those do not leave in time."""
        for channel in channels:
            channel.leave()
        deadline = time.monotonic() + (_LEAVE_S if self.failure is None else _END_S)
        alone = [each for each in channels if not each.wait_left(max(0.0, deadline - time.monotonic()))]
        if alone and self._closed:
            self._notices.report(f"rank {self._rank} has shut down")
        for channel in alone:  # before handles fail on this rank: other ranks must not complete those collectives
            channel.abort()
        text = explain("negotiated collectives were shut down on this rank", rank=self._rank)
        for channel in channels:
            channel.stop(NegotiationError(text))
        for channel in channels:
            if channel.wait_left(_END_S):
                channel.give_back()
            else:
                _LOG.debug("rank %d: a thread is still in a collective of ranks %s", self._rank, channel.ranks)

    # ---- These methods handle failures; channels call the first three. See [Note: failing together].

    def touch(self) -> None:
        """Wake the thread that watches for stalls, because a collective was submitted."""
        self._watch.touch()

    def left(self, channel: NamedChannel, text: str) -> None:
        """End the engine if ranks have left the world's channel; any other channel ends alone."""
        if channel is self.world:
            self._stop(NegotiationError(text))

    def broke(self, channel: NamedChannel, error: BaseException) -> None:
        """End the engine, because a channel's thread ended with an error; called from that thread."""
        with self._lock:
            if self._closed or channel not in self._channels:
                return  # no failure: this rank broke the channel's groups itself, to end it
            if self.failure is not None:
                return  # the thread that found the first failure also stops this channel
            self.failure = NegotiationError(str(error))  # replaced as soon as the cause is known
        _LOG.debug("rank %d: a channel of ranks %s broke", self._rank, channel.ranks, exc_info=error)
        for each in self._channels:
            each.abort()
        try:
            text = self._why(channel, error)
        except Exception as another:  # whatever it is, threads that wait must still get a failure
            _LOG.debug("rank %d: the cause was not found out", self._rank, exc_info=another)
            text = explain(f"negotiated collectives cannot go on: {error}", rank=self._rank)
        self._fail(text, error)

    def _stop(self, error: NegotiationError) -> None:
        with self._lock:
            if self._closed or self.failure is not None:
                return
            self.failure = error
        self._fail(str(error), error)

    def _fail(self, text: str, cause: BaseException) -> None:
        failure = NegotiationError(text)
        if cause is not failure and not isinstance(cause, NegotiationError):
            failure.__cause__ = cause
        self.failure = failure
        try:
            self._notices.report(text)  # before handles fail: a thread that gets the failure may end the process
            for channel in self._channels:
                channel.abort()
        finally:
            for channel in self._channels:
                channel.stop(failure)

    def _why(self, channel: NamedChannel, error: BaseException) -> str:
        """Return the error text for what ended the engine; the text names the lost rank if that can be found out."""
        if not isinstance(error, CarrierError):  # not from a lost peer: see [Note: whose error] in collectives.py
            what = f"negotiated collectives ended after {type(error).__name__}: {error}"
            return explain(what, rank=self._rank, fix="mend the cause")
        if text := self._lost(_PATIENCE_S):
            return text
        if isinstance(error.__cause__, PeerLost):
            lost = channel.ranks[error.__cause__.rank]
            return explain(f"rank {lost} is lost; negotiated collectives cannot go on: {error}", rank=self._rank)
        what = f"a collective failed, as it does when a peer is lost; negotiated collectives cannot go on: {error}"
        return explain(what, rank=self._rank, fix=_FIX)

    def _lost(self, patience_s: float) -> str:
        """Return a text about ranks that have ended or reported a failure; "" if none is found within ``patience_s``."""
        ended, reports = self._notices.ends(patience_s)
        if reports:  # they come first: a rank that fails writes the cause before it ends
            causes = "; ".join(dict.fromkeys(reports[rank] for rank in sorted(reports)))
            return explain(f"negotiated collectives cannot go on: {causes}", rank=self._rank)
        if ended:
            who = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in sorted(ended.items()))
            return explain(f"{who} is gone; negotiated collectives cannot go on", rank=self._rank, fix=_FIX)
        return ""

    def _raise_failure(self) -> None:
        if os.getpid() != self._process:
            what = f"this process was forked off the one (pid {self._process}) that has the engine"
            raise UsageError(explain(what, value=os.getpid(), fix="make an engine in a new world"))
        if self.failure is not None:
            raise self.failure.again() from self.failure.__cause__
        if self._closed:
            raise NegotiationError(explain("the engine was closed", rank=self._rank))
