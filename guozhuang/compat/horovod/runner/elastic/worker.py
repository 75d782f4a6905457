"""A worker's side of an elastic run: it comes to the driver for each round, and hears of hosts that came or went.

``hvd.init()`` calls ``enter``; ``hvd.elastic.run`` and ``state.commit()`` ask the ``membership`` for the rest.

[Note: a round that breaks before it begins] A worker may be lost while the others make their world: before the first
``hvd.init()`` is done, or when they come back after a failure. That is no failure of those others, whose hosts would be left
alone for it. So they come for the next round by themselves, after a pause that grows; it is the driver who knows when to stop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.runner.elastic.board import HostUpdateResult as HostUpdateResult
from guozhuang.compat.horovod.runner.elastic.board import Round, Update, WorkerBoard
from guozhuang.compat.horovod.runner.elastic.lost_peers import LostPeers
from guozhuang.errors import MismatchError, WorldError, explain
from guozhuang.gradients.named import NegotiationError
from guozhuang.net import client
from guozhuang.net.store import connect

# A waiting worker looks at the store after such pauses.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.2
# Before the next round is asked for, where one broke before it began: so long, and twice as long each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# For the driver to tell that a worker is gone, whose connections end before that.
_WORD_S = 3.0
# The ranks of a round have all come when it begins: they meet in less than the driver waits for them to come back.
_SHARE_OF_TIMEOUT, _LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 1 / 3, 20.0, 600.0
_FIX = "look at the output of horovodrun; its process may be stopped, or its host not be reachable"
_T = TypeVar("_T")
_log = logging.getLogger("guozhuang")


class RemovedError(RuntimeError):
    """This worker is in no round any more: its host or slot is gone, or the job is over. It should end."""


class SilentDriverError(WorldError):
    """The driver is gone, or does not answer."""


class Membership:
    """This process as a worker of a driver. ``membership()`` makes the one that there is.

    Args:
        told: what the environment says of the driver.

    Attributes:
        current: the newest round that this worker came into; None before the first.
        may_skip_sync: to be told to the driver when this worker joins next: it holds what the others of its round hold.
        has_state: to be told too: it has what has been trained, because it was synced since its process began.
        has_entered: to be told too: in the newest round it came as far as the end of ``hvd.init()``.
        world_timeout_s: limit for the ranks of a round to connect, and of collectives of ``torch.distributed``'s default group.

    Raises:
        SilentDriverError: the driver does not answer.
    """

    def __init__(self, told: elastic_variables.Driver) -> None:
        self._told, self._seat = told, elastic_variables.Seat(told)
        self.current: Round | None = None
        self.may_skip_sync = self.has_state = self.has_entered = False
        share_s = _SHARE_OF_TIMEOUT * told.timeout_s
        self.world_timeout_s = min(max(share_s, _LEAST_TIMEOUT_S), _MOST_TIMEOUT_S)
        self._newest_update = 0.0
        self._where = f"the driver's store at {told.host}:{told.port}"
        self._board = self._ask(lambda: WorkerBoard(connect(told.host, told.port, told.timeout_s), told.worker))
        self._lost_peers = LostPeers(self._board)

    def join(self) -> Round:
        """Wait until the driver begins the next round with this worker in it, and take the place there.

        Raises:
            RemovedError: there is no place in it, or none will come.
            SilentDriverError: the driver is gone, or silent for longer than HOROVOD_ELASTIC_TIMEOUT.
        """
        self._lost_peers.begin(0)
        found = self._wait(self.may_skip_sync)
        self.may_skip_sync = self.has_entered = False
        self._lost_peers.begin(found.number)
        return found

    def breaks(self, abort: Callable[[], object]) -> None:
        """Call this, from another thread, when the driver tells that a worker of the newest round is gone.

        Args:
            abort: makes collectives of this round fail.
        """
        if self.current is not None:
            self._lost_peers.breaks(self.current.number, abort)

    def has_lost(self, wait_s: float = 0.0) -> bool:
        """Whether the driver has told that a worker of the newest round is gone.

        Args:
            wait_s: how long at most to wait for it, in seconds.
        """
        deadline = time.monotonic() + wait_s
        while not self._lost_peers.lost() and time.monotonic() < deadline:
            time.sleep(_LONGEST_LOOK_S)
        return bool(self._lost_peers.lost())

    def updates(self) -> list[Update]:
        """Hosts that came or went since the last call, and since the newest round began."""
        found = self._ask(self._board.update)
        if found is None or found.timestamp <= self._newest_update:
            return []
        self._newest_update = found.timestamp
        return [found]

    def _round(self, number: int) -> Round:
        return self._ask(lambda: self._board.round(number))

    def _ask(self, do: Callable[[], _T]) -> _T:
        """See [Note: waiting for a store] in ``world.waiting``."""
        try:
            return client.within(self._told.timeout_s, self._where, do, fix=_FIX)
        except RuntimeError as error:  # a WorldError, or what PyTorch's store raises
            raise SilentDriverError(str(error)) from error

    def _wait(self, may_skip_sync: bool) -> Round:
        after = 0 if self.current is None else self.current.number
        worker, timeout_s = self._told.worker, self._told.timeout_s
        self._ask(lambda: self._board.come(after, may_skip_sync, self.has_state, self.has_entered))
        began = heard = time.monotonic()
        beat, looked, notices = -1, after, client.Notices()
        while True:
            news = self._ask(self._board.news)
            now = time.monotonic()
            if news.over:
                raise RemovedError(f"removed from elastic job: {news.over}")
            if news.newest > looked:
                looked = news.newest
                found = self._round(looked)
                if worker in found.places:
                    return self._enter(found)
                if after:
                    text = "removed from elastic job: the slot of this worker is gone, and the others go on without it"
                    raise RemovedError(text)
            if news.beat != beat:
                beat, heard = news.beat, now
            if now - heard > timeout_s:
                what = (
                    f"the driver of this elastic job has not begun a round, nor done anything else, for {timeout_s:g} s"
                )
                raise SilentDriverError(explain(what, fix=_FIX))
            if notices.are_due():
                notices.say("this worker waits for the driver to begin the next round")
            time.sleep(min(_LONGEST_LOOK_S, max(_FIRST_LOOK_S, 0.1 * (now - began))))

    def _enter(self, found: Round) -> Round:
        worker = self._told.worker
        place = found.places[worker]
        self._seat.take(place, found.number, found.towards.get(worker, ""))
        self.current, self._newest_update = found, max(self._newest_update, found.updated)
        if place.rank == 0:
            _log.info("round %d of the elastic job begins with %d ranks", found.number, place.size)
        return found


@dataclass
class _Membership:
    """What this process is; the driver knows it by one number for as long as it lives."""

    membership: Membership | None = None


_here = _Membership()


def membership() -> Membership | None:
    """This process as a worker of an elastic driver; None where it is none, as in what a worker has forked or started."""
    told = elastic_variables.driver()
    if told is None:
        return None
    if _here.membership is None:
        _here.membership = Membership(told)
        elastic_variables.claim()
    return _here.membership


def enter(make_world: Callable[[Membership], _T]) -> _T:
    """Come into the next round with ``Membership.join``, and make its world; ``hvd.init()`` calls it, where there is a driver.

    See [Note: a round that breaks before it begins].

    Args:
        make_world: meets the other ranks; called again, in the next round, where one of them was lost meanwhile. When it raises
            it leaves nothing behind.

    Returns:
        What ``make_world`` returns.

    Raises:
        RemovedError: the worker is in no round any more ("removed from elastic job").
        SilentDriverError: the driver is gone, or silent for longer than HOROVOD_ELASTIC_TIMEOUT.
        Exception: whatever else ``make_world`` raises that no lost rank has led to.
    """
    here = membership()
    assert here is not None, "an elastic driver started this process"
    pause_s = _FIRST_PAUSE_S
    while True:
        here.join()
        try:
            found = make_world(here)
        except RuntimeError as error:
            is_meant = isinstance(error, WorldError | HorovodInternalError | NegotiationError)
            if isinstance(error, MismatchError) or not (is_meant or here.has_lost(_WORD_S)):
                raise
            _log.warning("the world of round %d was not entered: %s", here.current.number if here.current else 0, error)
        else:
            here.has_entered = True
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
