"""``run_fn``: what is called in which order after failures and changes of hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from guozhuang.compat.horovod.common import elastic, elastic_variables
from guozhuang.compat.horovod.common.elastic import ObjectState, State, run_fn
from guozhuang.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from guozhuang.compat.horovod.runner.elastic import worker


class Recorded(State):
    """Notes what is called."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        super().__init__(lambda each: each, lambda: 0)
        self.calls: list[str] = []
        self._fails = fails or {}

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self._fails:
            raise self._fails.pop(name)

    def save(self) -> None:
        self._note("save")

    def restore(self) -> None:
        self._note("restore")

    def sync(self) -> None:
        self._note("sync")

    def reset(self) -> None:
        self._note("state.reset")


@pytest.fixture
def membership(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = SimpleNamespace(may_skip_sync=None, current=SimpleNamespace(may_skip_sync=False), updates=list)
    monkeypatch.setattr(worker, "membership", lambda: found)
    monkeypatch.setattr(elastic_variables, "driver", lambda: object())
    yield found


def runs(state: Recorded, membership: Any, events: list[Any], reset_error: Exception | None = None) -> list[Any]:
    """The calls, with what the function did, and what was told to the driver at each reset."""
    told = []

    def func(state: Recorded) -> str:
        state.calls.append("func")
        event = events.pop(0)
        if isinstance(event, Exception):
            raise event
        return str(event)

    def reset() -> None:
        state.calls.append("reset")
        told.append(membership.may_skip_sync)
        if reset_error is not None:
            raise reset_error

    assert run_fn(func, reset)(state) == "done"
    return [*state.calls, *told]


def test_a_failure_restores_and_syncs(membership: Any) -> None:
    found = runs(Recorded(), membership, [HorovodInternalError("lost"), "done"])
    assert found == ["sync", "func", "restore", "reset", "state.reset", "sync", "func", False]


def test_updates_keep_the_state_and_the_driver_decides_about_the_sync(membership: Any) -> None:
    found = runs(Recorded(), membership, [HostsUpdatedInterrupt(skip_sync=True), "done"])
    assert found == ["sync", "func", "reset", "state.reset", "sync", "func", True], "somebody is new"
    membership.current.may_skip_sync = True
    found = runs(Recorded(), membership, [HostsUpdatedInterrupt(skip_sync=True), "done"])
    assert found == ["sync", "func", "reset", "state.reset", "func", True]


def test_failures_in_the_sync_and_in_callbacks_are_failures_like_others(membership: Any) -> None:
    state = Recorded({"sync": HorovodInternalError("lost")})
    found = runs(state, membership, ["done"])
    assert membership.has_state
    assert found == ["sync", "restore", "reset", "state.reset", "sync", "func", False]
    state = Recorded({"state.reset": HorovodInternalError("lost")})
    found = runs(state, membership, [HorovodInternalError("lost"), "done"])
    once = ["restore", "reset", "state.reset"]
    assert found == ["sync", "func", *once, *once, "sync", "func", False, False]


@pytest.mark.parametrize(
    "error", [worker.RemovedError("removed"), worker.SilentDriverError("silent"), KeyError("mine")]
)
def test_what_nothing_can_be_done_about_leaves(membership: Any, error: Exception) -> None:
    with pytest.raises(type(error)):
        runs(Recorded(), membership, [HorovodInternalError("lost")], error)


def test_other_exceptions_of_the_function_leave(membership: Any) -> None:
    state = Recorded()
    with pytest.raises(ZeroDivisionError):
        runs(state, membership, [ZeroDivisionError()])
    assert state.calls == ["sync", "func"]


def test_without_a_driver_everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_variables, "driver", lambda: None)
    for error in (HorovodInternalError("lost"), HostsUpdatedInterrupt(True)):
        state = Recorded()
        with pytest.raises(type(error)):
            runs(state, SimpleNamespace(), [error])
        assert state.calls == ["sync", "func"]


def test_what_the_driver_tells_rank_0_is_told_to_all(membership: Any) -> None:
    sent: list[Any] = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return value

    def state_of(rank: int) -> ObjectState:
        return ObjectState(broadcast, lambda: rank, count=0)

    membership.updates = lambda: [SimpleNamespace(timestamp=5.0, result=2), SimpleNamespace(timestamp=6.0, result=1)]
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state_of(0).commit()
    assert sent == [(0, 6.0, 3)] and not caught.value.skip_sync
    state_of(1).commit()
    assert sent[1] == (0, 0, 0), "the others do not ask"


def test_attributes_are_saved_as_copies() -> None:
    brought: Callable[[Any], Any] = lambda value: value | {"notes": ["of rank 0"]}  # noqa: E731
    state = ObjectState(brought, lambda: 1, epoch=0, notes=["first"])
    state.notes.append("more")
    state.restore()
    assert state.notes == ["first"]
    state.epoch, state.other = 3, "not part of it"
    state.sync()
    state.notes.append("more")
    state.restore()
    assert (state.epoch, state.notes, state.other) == (3, ["of rank 0"], "not part of it")
    assert elastic.ObjectState(brought, lambda: 0)._saved_state == {}
