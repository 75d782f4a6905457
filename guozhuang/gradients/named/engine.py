"""All channels of a process: how they are made, how they fail together, and how they end."""

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
from .channel import NamedChannel, Surroundings
from .collectives import CarrierError
from .control import Carriers
from .settings import Settings, Tuner
from .stalls import EngineStore, StallWatch
from .submission import NegotiationError
from .tracing import Tracing

_LOG = logging.getLogger("guozhuang")
_LEAVE_S: Final = 5.0  # for the others to leave too
_END_S: Final = 2.0  # for a thread whose groups are broken
# For the end of a process, whose connections end before it, or the word of a rank that knows more.
_PATIENCE_S: Final = 1.0
_LEAST_STOP_S: Final = 30 * 60.0
_FIX: Final = "look at that rank's own error, or in the system's log if it was killed"


class NamedEngine:
    """Collectives that are matched by name. Every rank of the group must construct it.

    [Note: failing together] After a rank is lost no collective can end, in any channel. So the first thread that meets an error
    ends the engine on its rank: it breaks all groups, by which the other ranks learn of it at once; finds out who was lost,
    from the processes of its node, or from the word of another rank; fails everything under way; and leaves word itself. What
    is submitted later fails with the same text. Making a new engine, in a new world, is up to the user.

    Args:
        group: the ranks; a group that ``torch.distributed`` knows, of whatever backend.
        settings: equal on all ranks.

    Attributes:
        world: the channel of all ranks.
        failure: why the engine stands still; None as long as it works, and after ``close``.

    Raises:
        MismatchError: ranks have different settings.
        UsageError: autotuning is asked for, and cannot be; on ranks where it could be, a MismatchError.
        NegotiationError: another rank is lost.
        WorldError: ranks did not come within the time-out of the group.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.failure: NegotiationError | None = None
        self._group, self._settings = group, settings
        self._rank, self._size, self._limit_s = group.rank(), group.size(), timeout_s(group)
        self._process = os.getpid()
        self._lock = threading.RLock()  # over failure, channels and closing
        self._closed = False
        self._channels: list[NamedChannel] = []
        self._num_made = 0
        whole = store_of(group)
        turn = whole.add(f"guozhuang/negotiated/turns/{self._rank}", 1)
        self._store: dist.Store = dist.PrefixStore(f"guozhuang/negotiated/{turn}", whole)
        self._words = EngineStore(self._store, self._rank, self._size)
        self._tracing = Tracing(writes=self._rank == 0)
        stop_s = settings.stall_stop_s or max(self._limit_s, _LEAST_STOP_S)
        self._watch = StallWatch(self._words, self._rank, settings, stop_s, lambda: self._channels, self._stop)
        try:
            self.world = self._begin(settings)
        except BaseException:
            self._watch.close()
            self._words.close()
            raise

    def add(self, ranks: Sequence[int], called: str = "channel") -> NamedChannel:
        """Make a channel of some ranks. Every rank of the engine's group must call it, with the same ranks.

        Args:
            ranks: in the engine's group, in any order.
            called: the user's word for it, in errors.

        Raises:
            ValueError: there is no such rank, or one is named twice.
            MismatchError: (a ValueError) ranks called with different ranks.
            NegotiationError: the engine stands still.
            WorldError: ranks did not come within the time-out of the group.
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
        """End a channel. Every rank of the engine's group must call it; what is under way in it fails.

        Raises:
            ValueError: it is the world's, or none of this engine.
            MismatchError: ranks called with different channels.
            NegotiationError: the engine stands still.
            WorldError: ranks did not come within the time-out of the group.
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
        """Begin to write a Chrome trace of what is negotiated and done; rank 0 of the engine's group writes it.

        Not collective. The file is complete at every moment.

        Raises:
            UsageError: one is being written.
            OSError: the file cannot be written.
        """
        self._tracing.start(path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the trace, if one is being written. Not collective."""
        self._tracing.stop()

    def fail(self, why: str) -> None:
        """Stand still from now on; what is under way fails, here and on the other ranks. See [Note: failing together].

        For who learns in another way that a rank is lost; from any thread. Not collective; nothing after ``close``.
        """
        self._stop(NegotiationError(explain(why, rank=self._rank)))

    def close(self) -> None:
        """Leave; what is under way on any rank fails. Every rank should call it, and gets some seconds for it.

        Again does nothing, nor does it in a process that was forked off. Nothing is left behind: threads, groups, files.
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
        self._words.close()
        self._tracing.stop()

    # How channels begin and end.

    def _begin(self, settings: Settings) -> NamedChannel:
        tuner = refusal = None
        try:
            tuner = _tuner(settings, decides=self._rank == 0)
        except UsageError as error:
            refusal = error
        shared = ("fusion_threshold_bytes", "cache_capacity", "fuse_groups")
        lines = [f"{name} = {getattr(settings, name)}" for name in shared]
        lines.append(f"autotune = {settings.autotune is not None if refusal is None else refusal}")
        try:
            self._agree("settings of negotiated collectives", lines, "give all ranks the same settings")
        finally:
            if refusal is not None:  # only now, so that the others hear of it and do not wait
                raise refusal
        self._words.read_cards()
        return self._make(range(self._size), tuner)

    def _agree(self, what: str, lines: Sequence[str], fix: str) -> None:
        agree(self._group, what, lines, self._limit_s, fix, self._look)

    def _look(self) -> None:
        """Raise if a rank cannot come to what all of them do together."""
        self._raise_failure()
        self._words.read_cards()
        if lost := self._lost(0.0):
            self._stop(NegotiationError(lost))
            self._raise_failure()

    def _make(self, members: Sequence[int], tuner: Tuner | None = None) -> NamedChannel:
        number = self._num_made
        self._num_made += 1
        rank = list(members).index(self._rank) if self._rank in members else None
        store = dist.PrefixStore(f"channel/{number}", self._store)
        carriers = self._connect(members, store) if rank is not None else None
        around = Surroundings(self._settings, self._tracing, self._watch.touch, self._broke, self._left, tuner)
        channel = NamedChannel(number, members, rank, carriers, around)
        with self._lock:
            self._channels = [*self._channels, channel]
            stands_still = self.failure is not None or self._closed
        if stands_still:  # whoever ended all channels may have come before this one
            channel.stop(NegotiationError("the engine stands still"))
            channel.abort()
            if channel.wait_left(_END_S):
                channel.give_back()
            self._raise_failure()
        return channel

    def _connect(self, members: Sequence[int], store: dist.Store) -> Carriers:
        try:
            return Carriers(self._group, members, store)
        except RuntimeError as error:  # a rank is lost, or did not come
            what = f"the ranks {list(members)} could not connect: {error}"
            failure = NegotiationError(self._lost(_PATIENCE_S) or explain(what, rank=self._rank, fix=_FIX))
            self._stop(failure)
            self._raise_failure()
            raise failure from error

    def _end(self, channels: Sequence[NamedChannel]) -> None:
        """Leave channels, together with their other ranks if those come in time."""
        for channel in channels:
            channel.leave()
        deadline = time.monotonic() + (_LEAVE_S if self.failure is None else _END_S)
        alone = [each for each in channels if not each.wait_left(max(0.0, deadline - time.monotonic()))]
        if alone and self._closed:
            self._words.tell(f"rank {self._rank} has shut down")
        for channel in alone:  # before what is under way fails here: others must not take part in it any more
            channel.abort()
        text = explain("negotiated collectives were shut down on this rank", rank=self._rank)
        for channel in channels:
            channel.stop(NegotiationError(text))
        for channel in channels:
            if channel.wait_left(_END_S):
                channel.give_back()
            else:
                _LOG.debug("rank %d: a thread is still in a collective of ranks %s", self._rank, channel.ranks)

    # How it fails. See [Note: failing together].

    def _broke(self, channel: NamedChannel, error: BaseException) -> None:
        with self._lock:
            if self._closed or channel not in self._channels:
                return  # it was broken on purpose, and is about to be stopped
            if self.failure is not None:
                return  # because of it; whoever is finding out the cause stops this channel too
            self.failure = NegotiationError(str(error))  # until more is known
        _LOG.debug("rank %d: a channel of ranks %s broke", self._rank, channel.ranks, exc_info=error)
        for each in self._channels:
            each.abort()
        try:
            text = self._why(channel, error)
        except Exception as another:  # whatever it is, those who wait must be told
            _LOG.debug("rank %d: the cause was not found out", self._rank, exc_info=another)
            text = explain(f"negotiated collectives cannot go on: {error}", rank=self._rank)
        self._fail(text, error)

    def _left(self, channel: NamedChannel, text: str) -> None:
        """Without a rank the world is not whole; other channels end by themselves."""
        if channel is self.world:
            self._stop(NegotiationError(text))

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
            self._words.tell(text)  # before anybody here learns of it, who may end the process
            for channel in self._channels:
                channel.abort()
        finally:
            for channel in self._channels:
                channel.stop(failure)

    def _why(self, channel: NamedChannel, error: BaseException) -> str:
        """Say what ended the engine, and name the lost rank where that can be found out."""
        if not isinstance(error, CarrierError):  # not what a lost peer leads to; see [Note: whose error]
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
        """Name ranks that are known to be gone, or say what others told; "" if nothing comes to light within the time."""
        ended, words = self._words.news(patience_s)
        if words:  # who ended after an error has left word of it
            told = "; ".join(dict.fromkeys(words[rank] for rank in sorted(words)))
            return explain(f"negotiated collectives cannot go on: {told}", rank=self._rank)
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


def _tuner(settings: Settings, decides: bool) -> Tuner | None:
    """Return the tuner of rank 0; the others could have none if it were to be theirs, so they check, too."""
    if settings.autotune is None:
        return None
    settings.autotune.check()
    return settings.autotune.make(settings) if decides else None
