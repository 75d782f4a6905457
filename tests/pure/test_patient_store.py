"""A store that does not answer ends neither the process nor the patience of who waits for a key."""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import torch.distributed as dist

from guozhuang.errors import PeerLost
from guozhuang.exchange.parameter_server import protocol
from guozhuang.net.client import Client, PatientStore
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until


class Deaf(dist.Store):
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.asked = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        return True


class Falling(dist.Store):
    """Answers until it falls silent, and then not until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.go = dist.HashStore(), threading.Event()
        self.go.set()

    def set(self, key: str, value: str) -> None:
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        self.inner.wait(keys, timeout or datetime.timedelta(seconds=NEVER_S))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert self.go.wait(LIMIT_S), "nobody waits so long for an answer"
        return self.inner.compare_set(key, expected, desired)


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    made = Deaf()
    yield made
    made.go.set()


def test_no_answer_is_an_error_and_then_at_once(deaf: Deaf) -> None:
    store = PatientStore(deaf, client=Client(EXPIRES_S))
    with pytest.raises(dist.DistNetworkError, match="has not answered"):
        store.check(["a"])
    store._client.limit_s = NEVER_S
    with pytest.raises(dist.DistNetworkError, match="has not answered"):
        store.within("part").check(["a"])
    assert "has not answered" in store.lost
    store.close()


def test_a_signal_gets_through(deaf: Deaf) -> None:
    def told(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, told)
    store = PatientStore(deaf, client=Client(NEVER_S))

    def kill() -> None:
        assert deaf.asked.wait(LIMIT_S)
        os.kill(os.getpid(), signal.SIGALRM)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.check(["a"])
    finally:
        killer.join()
        signal.signal(signal.SIGALRM, before)
        deaf.go.set()
        store.close()


def test_who_is_about_to_end_waits_less(deaf: Deaf) -> None:
    store = PatientStore(deaf, client=Client(600))
    with store.hurried():
        assert store._client.limit_s == 2
    assert store._client.limit_s == 600
    store.hurry()
    with pytest.raises(dist.DistNetworkError, match="for 2 s"):
        store.check(["a"])
    store.close()


def test_parts_and_keys_that_come_later() -> None:
    whole = PatientStore(dist.HashStore())
    part = whole.within("agents").within("1")
    part.while_waiting = lambda: part.set("late", "x")
    assert part.get("late") == b"x" == whole.get("agents/1/late")
    assert part.add("n", 2) == 2 and part.add("n", 1) == 3
    with pytest.raises(dist.DistStoreError, match="never"):
        part.wait(["never"], datetime.timedelta(seconds=EXPIRES_S))

    def look() -> None:
        raise LookupError

    part.while_waiting = look
    with pytest.raises(LookupError):
        part.get("never")
    whole.close()


def test_a_worker_raises_though_the_store_of_the_parameter_servers_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_ANSWER_S", EXPIRES_S)
    store = Falling()
    group = protocol.join(store, 0, 1, 0, NEVER_S)
    store.go.clear()
    try:
        error = group.error_of(0, "the sum of step 3", RuntimeError("Connection closed by peer"))
        assert isinstance(error, PeerLost) and "rank 0 (process" in str(error) and "is gone" in str(error)
        group.abort(0, "rank 0 ended")
    finally:
        store.go.set()
    group.store._client.limit_s = NEVER_S

    def is_asked() -> bool:
        group.abort(0, "rank 0 ended")
        return store.inner.check(["failure"])

    until(is_asked)  # the store answers again, and is asked again
    again = group.error_of(0, "the sum of step 3", RuntimeError("Connection closed by peer"))
    assert "rank 0 ended; this rank was waiting for the sum of step 3" in str(again)
    group.close()
