"""A worker's side of an elastic run: who it is, how it comes into rounds, and what breaks them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.runner.elastic import crew, worker
from guozhuang.compat.horovod.runner.elastic.board import DriverBoard, HostUpdateResult, WorkerBoard
from guozhuang.compat.horovod.runner.elastic.worker import LostPeers
from guozhuang.errors import MismatchError, UsageError, WorldError
from guozhuang.gradients.named import NegotiationError
from guozhuang.launch.rendezvous.fixed import Attempt, NodeShare
from guozhuang.launch.request import environment_of_launchers
from guozhuang.net.client import PatientStore
from guozhuang.net.meet import roll_call
from guozhuang.net.store import connect, serve
from guozhuang.world import session
from guozhuang.world.discovery import discover
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until


def test_the_variables_of_a_worker() -> None:
    told = elastic_variables.Driver("127.0.0.1", 4123, 7, 600)
    variables = crew.variables(told, "a")
    assert elastic_variables.driver(variables) == told and variables["HOROVOD_HOSTNAME"] == "a"
    assert variables["HOROVOD_CONTROLLER"] == variables["HOROVOD_CPU_OPERATIONS"] == "gloo"
    for environ, threads in ((dict[str, str](), "2"), ({"OMP_NUM_THREADS": "3"}, "3")):
        assert environment_of_launchers(2, [], environ)["OMP_NUM_THREADS"] == threads
    assert elastic_variables.driver({}) is None
    for wrong in ("7", "x@h:1", "7@h", "7@:3", "7@h:1 by me"):
        with pytest.raises(ValueError, match="GUOZHUANG_HOROVOD_ELASTIC"):
            elastic_variables.driver({elastic_variables.VARIABLE: wrong})


def test_what_a_worker_starts_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(elastic_variables.VARIABLE, "7@127.0.0.1:4123")
    told = elastic_variables.driver()
    assert told is not None and told.worker == 7, "whichever process comes first, as of a shell script"
    for _ in range(2):
        elastic_variables.claim()
        assert elastic_variables.driver() == told
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert elastic_variables.driver() is None and worker.membership() is None


def test_workers_get_the_users_variables_and_none_of_an_outer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {
        "LOCAL_SCRATCH": "/scratch",
        "GROUP_NAME": "a",
        "ROLE_MODEL": "b",
        "MASTER_KEY": "c",
        "HOROVOD_CYCLE_TIME": "2",
    }
    outer = [
        "RANK",
        "LOCAL_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "HOROVOD_SIZE",
    ]
    outer += ["GUOZHUANG_SECRET", "GUOZHUANG_HOROVOD_ELASTIC", "HOROVOD_ELASTIC", "HOROVOD_CROSS_RANK"]
    for name, value in {**users, **dict.fromkeys(outer, "1")}.items():
        monkeypatch.setenv(name, value)
    found = crew.environment_of_workers({"MORE": "1"})
    assert found.items() >= {**users, "MORE": "1"}.items() and not found.keys() & set(outer)


def test_ranks_that_wait_for_each_other_learn_that_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver writes where the first world of a round looks."""
    listener = socket.create_server(("127.0.0.1", 0))
    told = elastic_variables.Driver("127.0.0.1", listener.getsockname()[1], 0, 600)
    store = serve(listener, LIMIT_S)
    DriverBoard(store).give_up(7, "worker 3 ended with exit code 1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    worker.RoundVariables().write(Attempt(7, 0, [NodeShare(2)], told.host, told.port), 0, "")
    try:
        met, _ = session.meet(discover(), LIMIT_S)
        with pytest.raises(WorldError, match="worker 3 ended with exit code 1"):
            roll_call(met, 0, 2, LIMIT_S)
        with contextlib.closing(PatientStore(store)) as patient:
            assert WorkerBoard(patient, 0).lost(7) == "worker 3 ended with exit code 1"
    finally:
        session._leave_meeting()


class Meeting:
    """A driver's board and a worker of it, which waits for rounds in a thread."""

    def __init__(self, timeout_s: float) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.board = DriverBoard(serve(listener, LIMIT_S))
        self.worker = worker.Membership(elastic_variables.Driver("127.0.0.1", port, 4, timeout_s))

    def join(self, do: Callable[[], object]) -> tuple[Any, dict[int, Any]]:
        """What the worker's ``join`` returns or raises, and what it had told, when ``do`` was called after it had come."""
        found: list[Any] = []

        def join() -> None:
            try:
                found.append(self.worker.join())
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        arrived = until(lambda: self.board.arrivals([4, 5]))
        do()
        thread.join(LIMIT_S)
        return found[0], arrived


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = Meeting(600.0)
    yield found
    found.worker.close()


def test_a_worker_comes_into_rounds_and_hears_of_hosts(meeting: Meeting) -> None:
    board, here = meeting.board, meeting.worker
    assert here.world_timeout_s == 200.0, "who waits for a lost rank comes back before the driver gives it up"
    board.update(HostUpdateResult.added, 3.0)
    found, arrived = meeting.join(lambda: board.announce(1, False, [[3], [4], [6]], [""] * 3))
    assert arrived == {4: (0, False, False, False)} and found.number == 1 and here.current is found
    assert (os.environ["RANK"], os.environ["HOROVOD_SIZE"], os.environ["LOCAL_RANK"]) == ("1", "3", "0")
    assert not here.updates(), "the round was the answer to it"
    board.update(HostUpdateResult.removed, 2.0)  # a clock that was set back
    [update] = here.updates()
    assert update.timestamp > 3.0 and update.result == HostUpdateResult.removed and not here.updates()
    assert not here.has_lost()
    board.give_up(1, "rank 0 ended")
    assert here.has_lost(LIMIT_S)
    here.may_skip_sync = here.has_state = here.has_entered = True
    found, arrived = meeting.join(lambda: board.announce(2, True, [[5, 4]], [""]))
    assert (
        arrived == {4: (1, True, True, True)}
        and found.may_skip_sync
        and found.place_of(4) == (0, 1)
        and found.place_of(6) is None
    )
    assert not here.has_lost() and not here.may_skip_sync and here.has_state and not here.has_entered


def test_a_worker_without_a_place_is_told_so(meeting: Meeting) -> None:
    meeting.join(lambda: meeting.board.announce(1, False, [[4]], [""]))
    found, _ = meeting.join(lambda: meeting.board.announce(2, False, [[5]], [""]))
    assert isinstance(found, worker.RemovedError) and "removed from elastic job: the slot" in str(found)


def test_a_worker_that_comes_after_the_end_is_told_so(meeting: Meeting) -> None:
    found, _ = meeting.join(lambda: meeting.board.dismiss("rank 0 has ended well"))
    assert isinstance(found, worker.RemovedError) and "rank 0 has ended well" in str(found)


def test_a_driver_that_does_nothing_is_given_up() -> None:
    meeting = Meeting(NEVER_S)
    meeting.worker._driver = replace(meeting.worker._driver, timeout_s=EXPIRES_S)  # only now: it is connected
    try:
        found, _ = meeting.join(meeting.board.beat)
        assert isinstance(found, worker.SilentDriverError)
        assert f"has not begun a round, nor done anything else, for {EXPIRES_S} s" in str(found)
    finally:
        meeting.worker.close()


class StoppedStore:
    """A connection to a store whose process can be stopped, and continued: until then no call is answered."""

    def __init__(self, store: Any) -> None:
        self._store, self.runs = store, threading.Event()
        self.runs.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self.runs.wait(LIMIT_S)
            return getattr(self._store, name)(*arguments)

        return call


def test_a_driver_that_was_silent_for_a_while_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that was stopped, or cut off: when it is back, commits and the watch over lost workers work as before."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(worker, "connect", lambda *where: StoppedStore(connect(*where)))
    meeting = Meeting(NEVER_S)
    here, board, store = meeting.worker, meeting.board, meeting.worker._store.inner
    assert isinstance(store, StoppedStore)

    def updates() -> list[Any]:
        with contextlib.suppress(worker.SilentDriverError):  # until the late answers have come
            return here.updates()
        return []

    try:
        meeting.join(lambda: board.announce(1, False, [[4]], [""]))
        store.runs.clear()
        here._store._client.limit_s = EXPIRES_S
        with pytest.raises(worker.SilentDriverError, match="has not answered"):
            here.updates()
        here._store._client.limit_s = NEVER_S
        board.update(HostUpdateResult.added, 3.0)
        board.give_up(1, "rank 0 ended")
        store.runs.set()
        assert until(updates, LIMIT_S)[0].timestamp == 3.0
        assert here.has_lost(LIMIT_S)
    finally:
        store.runs.set()
        here.close()


class Rounds:
    """A membership whose rounds begin at once."""

    def __init__(self, lost: bool = False) -> None:
        self.current: Any = None
        self.has_entered, self._lost = False, lost

    def join(self) -> None:
        self.current = SimpleNamespace(number=1 if self.current is None else self.current.number + 1)
        self.has_entered = False

    def has_lost(self, wait_s: float) -> bool:
        return self._lost


def _fails(errors: list[BaseException]) -> Callable[[Rounds], int]:
    def make_world(here: Rounds) -> int:
        if errors:
            raise errors.pop(0)
        return int(here.current.number)

    return make_world


def _enter(monkeypatch: pytest.MonkeyPatch, here: Rounds, errors: list[BaseException]) -> tuple[int, list[float]]:
    slept: list[float] = []
    monkeypatch.setattr(worker, "membership", lambda: here)
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=slept.append))
    make_world: Any = _fails(errors)
    return worker.enter(make_world), slept


def test_a_round_that_breaks_before_it_begins_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Rounds()
    lost = [WorldError("rank 1 ended"), HorovodInternalError("lost"), NegotiationError("lost"), *[WorldError("")] * 6]
    number, slept = _enter(monkeypatch, here, [*lost])
    assert number == 10 and here.has_entered
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], "pauses grow"


@pytest.mark.parametrize("error", [MismatchError("other settings"), UsageError("wrong"), RuntimeError("out of memory")])
def test_what_no_lost_rank_has_led_to_leaves(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    here = Rounds()
    with pytest.raises(type(error)):
        _enter(monkeypatch, here, [error])
    assert not here.has_entered


def test_an_unclear_error_counts_where_the_driver_has_lost_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _enter(monkeypatch, Rounds(lost=True), [RuntimeError("connection reset")])[0] == 2


def test_a_driver_that_is_gone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Rounds()

    def join() -> None:
        raise worker.SilentDriverError("the driver is gone")

    monkeypatch.setattr(here, "join", join)
    with pytest.raises(worker.SilentDriverError):
        _enter(monkeypatch, here, [])


class Board:
    """Which rounds have lost somebody."""

    def __init__(self) -> None:
        self.words: dict[int, str] = {}
        self.then: Callable[[], None] = lambda: None

    def lost(self, number: int) -> str:
        found = self.words.get(number, "")
        self.then()
        return found


def test_a_round_is_broken_once_and_no_other() -> None:
    board, called = Board(), list[str]()
    lost = LostPeers(board, look_every_s=3600.0)
    try:
        lost.begin(3)
        lost.breaks(3, lambda: called.append("first"))
        lost.breaks(2, lambda: called.append("of a round before"))
        board.words = {2: "long ago"}
        lost.look()
        assert not called and not lost.lost()
        board.words[3] = "rank 1 ended"
        for _ in range(2):
            lost.look()
        assert called == ["first"] and lost.lost() == "rank 1 ended"
        lost.breaks(3, lambda: called.append("later"))
        assert called == ["first", "later"], "who comes after that is told at once"
        lost.begin(4)
        lost.breaks(4, lambda: called.append("next"))
        lost.look()
        assert not lost.lost() and len(called) == 2
    finally:
        lost.close()


def test_an_answer_about_a_round_that_was_left_meanwhile_breaks_nothing() -> None:
    board, called = Board(), list[str]()
    lost = LostPeers(board, look_every_s=3600.0)
    try:
        lost.begin(3)
        board.words, board.then = {3: "rank 1 ended"}, lambda: lost.begin(4)
        lost.breaks(3, lambda: called.append("of 3"))
        lost.look()
        lost.breaks(4, lambda: called.append("of 4"))
        assert not called and not lost.lost()
    finally:
        lost.close()


def test_one_that_cannot_be_broken_does_not_keep_the_others() -> None:
    board, called = Board(), list[str]()

    def raises() -> None:
        raise ValueError("closed")

    lost = LostPeers(board, look_every_s=0.01)  # its thread looks
    try:
        lost.begin(1)
        for abort in (raises, lambda: called.append("second"), lambda: None):
            lost.breaks(1, abort)
        board.words = {1: "gone"}
        until(lambda: called)
        assert called == ["second"]
    finally:
        lost.close()
