"""What the driver of an elastic run does around its decisions: what it shows, whom it tells of which network, signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from guozhuang.compat.horovod.runner.elastic import driver
from guozhuang.compat.horovod.runner.elastic.crew import Printed
from guozhuang.compat.horovod.runner.elastic.printing import Printing
from guozhuang.compat.horovod.runner.elastic.writing import Room, Writer
from guozhuang.launch.console.target import Target


def until(what: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_reads_waits_for_room() -> None:
    room, done = Room(most_bytes=10), threading.Event()
    room.take(9)
    room.wait()
    room.take(4)
    assert room.is_full()
    waits = threading.Thread(target=lambda: (room.wait(), done.set()))
    waits.start()
    assert not done.wait(0.05)
    room.give(4)
    assert done.wait(5)
    waits.join()
    room.take(100)
    room.close()
    room.wait()
    assert not room.is_full()


def test_a_reader_that_takes_nothing_holds_up_no_one_but_who_prints() -> None:
    reads, writes = os.pipe()
    written: list[int] = []
    target = Target(writes, is_queued=True)
    writer = Writer([target], written.append)
    data = bytes(1 << 20)
    try:
        target.screen.lines(b"", [data])
        writer.drawn(7)
        assert not writer.wait(0.05) and not written
        target.screen.lines(b"", [data])  # nobody waits here
        writer.drawn(5)
        num_read = 0
        while num_read < 2 * len(data) + 2:
            num_read += len(os.read(reads, 1 << 16))
        assert writer.wait(10.0) and sum(written) == 12
        target.screen.lines(b"", [data])
        writer.drawn()
        until(lambda: not target._queue)  # it is in the middle of writing
        began = time.monotonic()
        writer.close()
        assert time.monotonic() < began + 1.0
    finally:
        os.close(reads)  # ends what is being written
        until(lambda: not writer._thread.is_alive())
        os.close(writes)


def test_what_is_shown_is_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    shown: list[int] = []
    printing = Printing(lambda worker: f"a#{worker}", False, None, 2, shown.append)
    printing.take(0, "stdout", b"one\ntw")
    printing.is_rank(0, 1)
    printing.take(0, "stdout", b"o\n")
    printing.say("horovodrun: something")
    assert printing.wait(10.0) and sum(shown) == 8
    assert printing.last_lines(0, 5) == ["one", "two"]
    printing.forget(0)
    assert printing.last_lines(0, 5) == []
    printing.close()
    assert not printing._writer._thread.is_alive()
    assert capfd.readouterr() == ("[a#0] one\n[1] two\n", "horovodrun: something\n")


def test_what_a_worker_prints_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: 5.0))
    here: Any = SimpleNamespace(
        _printing=SimpleNamespace(take=lambda *given: told.append(given)),
        _job=SimpleNamespace(heard=lambda *given: told.append(given)),
    )
    driver._Driver._understand(here, Printed(3, "stderr", b"step 1"))
    assert told == [(3, "stderr", b"step 1"), (3, 5.0)]


def test_which_network_a_round_uses() -> None:
    """Hosts name an address of the driver's host; loopback is none that leads from one host to another."""
    assert driver._towards(["a", "b"], {}) == {}
    assert driver._towards(["a", "b"], {"a": "127.0.0.1"}) == {}, "this machine under another name"
    reached = {"a": "127.0.0.1", "b": "10.0.0.1", "c": "10.1.0.1", "away": "10.9.0.1"}
    assert driver._towards(["here", "a", "b", "c"], reached) == {
        "here": "10.0.0.1",
        "a": "10.0.0.1",
        "b": "10.0.0.1",
        "c": "10.1.0.1",
    }
    assert driver._towards(["here", "a"], reached) == {}


def test_signals_are_noted_and_handlers_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in driver._ENDING}
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGQUIT else real(number))
    noted: list[int] = []
    with driver._noted(noted):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert real(signal.SIGQUIT) == before[signal.SIGQUIT], "one that is not Python's stays"
    assert noted == [signal.SIGTERM] * 2
    assert {number: real(number) for number in driver._ENDING} == before
