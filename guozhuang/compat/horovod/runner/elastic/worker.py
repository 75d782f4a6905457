"""A worker's side of an elastic run: it joins each round through the driver, and learns of hosts that were added or removed.

``hvd.init()`` calls ``enter``; ``hvd.elastic.run`` and ``state.commit()`` use the ``Membership``.

[Note: a round that breaks before it begins] A worker may be lost while the other workers connect: in the first
``hvd.init()``, or after a failure. These must not end with an error then, or the driver would blacklist their hosts too. So
they wait for the next round by themselves, after a pause that grows; the driver ends the job after too many such rounds.

[Note: the right round] The main thread moves on to the next round by itself. So each abort callback is registered for one
round, as soon as a thread may wait in that round, also while its world is still being made; a callback that is registered
after the round was found broken is called at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.common.extension import OF_HOROVODRUN
from guozhuang.compat.horovod.runner.elastic.board import HostUpdateResult as HostUpdateResult
from guozhuang.compat.horovod.runner.elastic.board import Round, Update, WorkerBoard
from guozhuang.errors import MismatchError, WorldError, explain
from guozhuang.gradients.named import NegotiationError
from guozhuang.launch.rendezvous.fixed import Attempt, NodeShare
from guozhuang.net import client, interfaces
from guozhuang.net.store import connect

# Seconds before a worker joins another round after one broke before it began: the first pause, doubled up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# Seconds to wait for the driver to report a lost worker: the worker's connections break before the driver knows of it.
_WORD_S = 3.0
_POLL_S = 0.2
# Limit for the ranks of a round to connect: a share of the elastic time-out, for which the driver waits, and bounds in seconds.
_SHARE_OF_TIMEOUT, _LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 1 / 3, 20.0, 600.0
# Seconds between two queries of the store by ``LostPeers``, and for its thread to end.
_LOOK_S, _JOIN_S = 1.0, 2.0
_FIX = "look at the output of horovodrun; its process may be stopped, or its host not be reachable"
_T = TypeVar("_T")
_log = logging.getLogger("guozhuang")


class RemovedError(RuntimeError):
    """The driver has removed this worker: its host or slot is gone, or the job is over. The process should end."""


class SilentDriverError(WorldError):
    """The driver is gone, or does not answer."""


class LostPeers:
    """A thread that aborts the collectives of a round when the driver reports that a worker of the round is gone.

    Mostly the collectives have failed by then: when a process ends, the kernel closes its connections. But a host without
    power, or behind a cut cable, closes none, and a collective would wait for it until its time-out. The driver notices such a
    host within seconds, because its heartbeats stop. The thread starts when the object is made.

    Args:
        board: where the driver reports lost workers.
        look_every_s: the pause between two looks at the board, in seconds.
    """

    def __init__(self, board: WorkerBoard, look_every_s: float = _LOOK_S) -> None:
        self._board, self._look_every_s = board, look_every_s
        self._lock = threading.Lock()  # guards the next three attributes
        self._round = 0
        self._aborts: list[Callable[[], object]] = []
        self._why = ""  # the reason why the round is broken; "" while it is not
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod lost peers", daemon=True)
        self._thread.start()

    def begin(self, number: int) -> None:
        """Watch the round ``number`` from now on, or none if it is 0; drop the callbacks of the round before."""
        with self._lock:
            self._round, self._aborts, self._why = number, [], ""

    def breaks(self, number: int, abort: Callable[[], object]) -> None:
        """Register a callback to be called when a worker of the round is gone; call it at once if one is gone already.

        Args:
            number: the number of the round. If it is not the newest any more, nothing is registered.
            abort: makes all waits for that worker fail; it may be called more than once, and from any thread.
        """
        with self._lock:
            if number != self._round:
                return
            self._aborts.append(abort)
            is_broken = bool(self._why)
        if is_broken:
            _call(abort)

    def lost(self) -> str:
        """Return the driver's reason why the newest round is broken; "" as long as there is none."""
        return self._why

    def look(self) -> None:
        """Read from the driver's store whether a worker of the round is gone, and if so call the callbacks."""
        with self._lock:
            number, is_broken = self._round, bool(self._why)
        if not number or is_broken:
            return
        why = self._board.lost(number)
        with self._lock:
            if not why or self._round != number:
                return
            self._why, aborts = why, list(self._aborts)
        _log.debug("breaking the collectives of round %d: %s", number, why)
        for abort in aborts:
            _call(abort)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._over.wait(self._look_every_s):
            try:
                self.look()
            except RuntimeError as error:  # the driver is gone; the main thread reports that itself
                _log.debug("the driver does not answer: %s", error)


def _call(abort: Callable[[], object]) -> None:
    try:
        abort()
    except Exception as error:  # ``abort`` fails if the collectives or their group have ended already
        _log.debug("there is nothing left to break: %s", error)


class RoundVariables:
    """Writes the place of this worker in a round into the environment of this process, from which ``init`` reads it.

    Other launchers set these variables before a process starts. Here the rank changes from round to round while the process
    continues. The ranks meet in the driver's store, as torch elastic's do in its agent's store; each round has its own part
    there. So the loss of rank 0 does not lose the store.
    """

    def __init__(self) -> None:
        self._interfaces: tuple[str, ...] = ()

    def write(self, attempt: Attempt, local_rank: int, towards: str) -> None:
        """Set the environment variables of a round, and remove those of the round before.

        Args:
            attempt: the hosts of the round, and the address of the driver's store.
            local_rank: the local rank of this worker.
            towards: an address by which this host reaches the driver's if ranks are on several machines; else "".
        """
        for name in self._interfaces:
            os.environ.pop(name, None)
        found: dict[str, str] = {}
        if towards:
            try:
                found = interfaces.variables_towards(towards, os.environ)
            except WorldError as error:
                _log.warning("no network interface chosen for gloo and NCCL: %s", error)
        self._interfaces = tuple(found)
        place = attempt.place(local_rank) | {"host": os.environ.get("HOROVOD_HOSTNAME", "")}
        found |= {name: text.format(**place) for name, text in OF_HOROVODRUN.rank_variables.items()}
        os.environ.update(found | attempt.environment(local_rank))


class Membership:
    """This process as a worker of an elastic driver. A process has at most one; ``membership()`` makes it.

    ``join`` reports ``may_skip_sync``, ``has_state`` and ``has_entered`` to the driver.

    Args:
        driver: the driver's address and this worker's number, from the environment.

    Attributes:
        current: the newest round that this worker joined; None before the first.
        may_skip_sync: this worker holds the same state as the other ranks of its round.
        has_state: this worker has the trained state, because it was synced since its process began.
        has_entered: this worker has completed ``hvd.init()`` in the newest round.
        world_timeout_s: limit for the ranks of a round to connect, and of collectives of ``torch.distributed``'s default group.

    Raises:
        SilentDriverError: the driver does not answer.
    """

    def __init__(self, driver: elastic_variables.Driver) -> None:
        self._driver, self._variables = driver, RoundVariables()
        self.current: Round | None = None
        self.may_skip_sync = self.has_state = self.has_entered = False
        share_s = _SHARE_OF_TIMEOUT * driver.timeout_s
        self.world_timeout_s = min(max(share_s, _LEAST_TIMEOUT_S), _MOST_TIMEOUT_S)
        self._newest_update = 0.0
        limit_s, where = driver.timeout_s, f"the driver's store at {driver.host}:{driver.port}"
        store = _asked(
            lambda: client.within(limit_s, where, lambda: connect(driver.host, driver.port, limit_s), fix=_FIX)
        )
        self._store = client.PatientStore(store, client=client.Client(limit_s, retries=True), name=where)
        self._board = WorkerBoard(self._store, driver.worker)
        self._lost_peers = LostPeers(self._board)
        # End the threads at exit: the interpreter must not end while a thread is inside a call of PyTorch's store.
        atexit.register(self.close)

    def join(self) -> Round:
        """Wait until the driver begins the next round with this worker in it, and write its rank there into the environment.

        Raises:
            RemovedError: the round has no place for this worker, or no further round will begin.
            SilentDriverError: the driver is gone, or silent for longer than HOROVOD_ELASTIC_TIMEOUT.
        """
        self._lost_peers.begin(0)
        found = self._wait(self.may_skip_sync)
        self.may_skip_sync = self.has_entered = False
        self._lost_peers.begin(found.number)
        return found

    def close(self) -> None:
        """End the threads of this object."""
        atexit.unregister(self.close)
        self._lost_peers.close()
        self._store.close()

    def breaks(self, abort: Callable[[], object]) -> None:
        """Register a callback that another thread calls when the driver reports that a worker of the newest round is gone.

        Args:
            abort: makes the collectives of this round fail.
        """
        if self.current is not None:
            self._lost_peers.breaks(self.current.number, abort)

    def has_lost(self, wait_s: float = 0.0) -> bool:
        """Return whether the driver has reported that a worker of the newest round is gone.

        Args:
            wait_s: how long to wait for such a report, in seconds.
        """
        deadline = time.monotonic() + wait_s
        while not self._lost_peers.lost() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return bool(self._lost_peers.lost())

    def updates(self) -> list[Update]:
        """Return the newest change of hosts, or nothing if the newest round or an earlier call has taken it into account."""
        found = _asked(self._board.update)
        if found is None or found.timestamp <= self._newest_update:
            return []
        self._newest_update = found.timestamp
        return [found]

    def _wait(self, may_skip_sync: bool) -> Round:
        after = 0 if self.current is None else self.current.number
        worker, timeout_s = self._driver.worker, self._driver.timeout_s
        _asked(self._board.come, after, may_skip_sync, self.has_state, self.has_entered)
        began = heard = time.monotonic()
        beat, looked, notices = -1, after, client.Notices()
        while True:
            news = _asked(self._board.news)
            now = time.monotonic()
            if news.over:
                raise RemovedError(f"removed from elastic job: {news.over}")
            if news.newest > looked:
                looked = news.newest
                found = _asked(self._board.round, looked)
                place = found.place_of(worker)
                if place is not None:
                    return self._enter(found, *place)
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
            time.sleep(client.look_s(now - began))

    def _enter(self, found: Round, node: int, local_rank: int) -> Round:
        shares = [NodeShare(len(each)) for each in found.workers]
        attempt = Attempt(found.number, node, shares, self._driver.host, self._driver.port)
        self._variables.write(attempt, local_rank, found.towards[node])
        self.current, self._newest_update = found, max(self._newest_update, found.updated)
        if node == local_rank == 0:
            size = sum(each.ranks for each in shares)
            _log.info("round %d of the elastic job begins with %d ranks", found.number, size)
        return found


def _asked(do: Callable[..., _T], *arguments: Any) -> _T:
    """Return the result of a request to the driver's store; raise SilentDriverError if the driver does not answer."""
    try:
        return do(*arguments)
    except RuntimeError as error:  # a WorldError, or an error of PyTorch's store
        raise SilentDriverError(str(error)) from error


@dataclass
class _Membership:
    """Holds the one ``Membership`` of this process, which keeps its worker number for life."""

    membership: Membership | None = None


_here = _Membership()


def membership() -> Membership | None:
    """Return the membership of this process; None if no elastic driver started it, as in a process that a worker started."""
    driver = elastic_variables.driver()
    if driver is None:
        return None
    if _here.membership is None:
        _here.membership = Membership(driver)
        elastic_variables.claim()
    return _here.membership


def enter(make_world: Callable[[Membership], _T]) -> _T:
    """Join the next round with ``Membership.join``, and make its world. ``hvd.init()`` calls it if there is a driver.

    See [Note: a round that breaks before it begins].

    Args:
        make_world: connects to the other ranks; called again, in the next round, if a rank was lost meanwhile. When it raises
            an error it must leave nothing behind.

    Returns:
        The result of ``make_world``.

    Raises:
        RemovedError: the driver has removed this worker ("removed from elastic job").
        SilentDriverError: the driver is gone, or silent for longer than HOROVOD_ELASTIC_TIMEOUT.
        Exception: any other error of ``make_world`` that no lost rank explains.
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
