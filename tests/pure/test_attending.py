"""Who processes the messages of sends and receives: the thread that waits for one, or else the group's own."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Set
from types import SimpleNamespace

import pytest

from guozhuang.errors import UsageError
from guozhuang.groups import attending
from guozhuang.groups.attending import Attendant, SpinLimit
from tests.waiting import LIMIT_S, NEVER_S, until


class NoMessages:
    """Messages in memory, of which there are none."""

    def spin(self, limit_s: float, /) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            time.sleep(limit_s)
        return False

    def arm(self) -> bool:
        return False


class Reads:
    """An attendant that reads a pipe, and who read what."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        os.set_blocking(self.out, False)
        self.read: list[tuple[str, bytes]] = []
        self.has_ended, self.fails = False, False
        self.attendant = Attendant(self.process, lambda: self.has_ended, 0.001, NoMessages())
        self.attendant.register(self.out, select.POLLIN)
        self.thread = threading.Thread(target=self.attendant.serve, name="own", daemon=True)
        self.thread.start()
        until(
            lambda: self.attendant._sleep_s > 0.0
        )  # the first call is over: the next one comes with what the pipe has

    def once_attended(self, do: Callable[..., object], *arguments: object) -> threading.Thread:
        """Call something in another thread as soon as this one waits and attends."""
        me = threading.get_ident()

        def wait_and_do() -> None:
            until(lambda: self.attendant._attending == me)
            do(*arguments)

        thread = threading.Thread(target=wait_and_do)
        thread.start()
        return thread

    def process(self, ready: Set[int] | None) -> float:
        if ready and self.out in ready:
            try:
                self.read.append((threading.current_thread().name, os.read(self.out, 1)))
            except BlockingIOError:
                return 3600.0  # another thread has read it since this one polled
            if self.fails:
                raise KeyboardInterrupt
        return 3600.0

    def close(self) -> None:
        self.has_ended = True
        self.attendant.wake()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        self.attendant.close()
        os.close(self.out)
        os.close(self.into)


@pytest.fixture
def reads() -> Iterator[Reads]:
    made = Reads()
    yield made
    made.close()


def test_the_own_thread_reads_while_nobody_waits(reads: Reads) -> None:
    os.write(reads.into, b"a")
    until(lambda: reads.read == [("own", b"a")])


def test_who_waits_reads_and_the_own_thread_takes_over_again(reads: Reads) -> None:
    writer = reads.once_attended(os.write, reads.into, b"a")
    reads.attendant.attend(lambda: len(reads.read) == 1, NEVER_S)
    writer.join()
    assert reads.read == [("MainThread", b"a")]
    os.write(reads.into, b"b")
    until(lambda: len(reads.read) == 2)
    assert reads.read[1] == ("own", b"b")


def test_a_wait_ends_by_its_limit(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def is_done() -> bool:
        now_s[0] += 0.01
        return False

    with monkeypatch.context() as patched:
        patched.setattr(attending, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        reads.attendant.attend(is_done, 0.035)
    assert now_s[0] == pytest.approx(0.05), "the limit had passed when it asked for the last time but one"


def test_a_wait_ends_at_once_where_another_waits(reads: Reads) -> None:
    other = threading.Thread(target=reads.attendant.attend, args=(lambda: bool(reads.read), NEVER_S), name="other")
    other.start()
    until(lambda: reads.attendant._attending)
    reads.attendant.attend(lambda: False, NEVER_S)  # returns at once
    os.write(reads.into, b"a")
    other.join(LIMIT_S)
    assert reads.read == [("other", b"a")]


def test_an_interrupt_in_a_wait_leaves_the_lock_free(reads: Reads) -> None:
    reads.fails = True
    writer = reads.once_attended(os.write, reads.into, b"a")
    with pytest.raises(KeyboardInterrupt):
        reads.attendant.attend(lambda: False, NEVER_S)
    writer.join()
    reads.fails = False
    os.write(reads.into, b"b")
    until(lambda: reads.read[1:] == [("own", b"b")])


def test_a_wait_inside_of_a_callback_is_refused(reads: Reads) -> None:
    refused: list[bool] = []

    def process(ready: Set[int] | None) -> float:
        with pytest.raises(UsageError, match="wait for it in another place"):
            attendant.attend(lambda: False, NEVER_S)
        refused.append(True)
        return 3600.0

    attendant = Attendant(process, lambda: False, 0.0, NoMessages())
    attendant.attend_now()
    attendant.close()
    assert refused == [True]


def test_what_is_called_at_once_has_the_lock_and_neither_waits_for_it_nor_keeps_it(reads: Reads) -> None:
    attendant = reads.attendant

    def within(argument: int) -> tuple[int, bool, object]:
        attendant.attend(lambda: True, NEVER_S)
        with pytest.raises(UsageError, match="waited for inside of another one"):  # nobody else could end it
            attendant.attend(lambda: False, NEVER_S)
        return argument, attendant.lock.locked(), attendant.at_once(within, 2)

    assert attendant.at_once(within, 1) == (1, True, None)
    with pytest.raises(ZeroDivisionError):
        attendant.at_once(lambda number: 1 / number, 0)
    assert attendant.at_once(within, 3) == (3, True, None)


def test_looks_in_vain_become_rare_and_one_that_finds_something_brings_them_back() -> None:
    spins = SpinLimit()
    for skipped in (1, 3, 7, 15, 15):
        assert spins.of(0.1) == spins.next_of(0.1) == 0.1
        spins.count(False)
        assert spins.of(0.1) == 0.0 and [spins.next_of(0.1) for _ in range(skipped)] == [0.0] * skipped
        assert spins.next_of(0.1) == 0.1
    spins.count(True)
    assert spins.next_of(0.1) == spins.next_of(0.1) == 0.1


def test_the_handler_of_a_signal_can_wait_inside_of_a_wait(reads: Reads) -> None:
    def handle(number: int, frame: object) -> None:
        os.write(reads.into, b"a")
        reads.attendant.attend(lambda: len(reads.read) == 1, NEVER_S)
        os.write(reads.into, b"b")

    before = signal.signal(signal.SIGUSR1, handle)
    killer = reads.once_attended(os.kill, os.getpid(), signal.SIGUSR1)
    try:
        reads.attendant.attend(lambda: len(reads.read) == 2, NEVER_S)
    finally:
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    assert reads.read == [("MainThread", b"a"), ("MainThread", b"b")]
    os.write(reads.into, b"c")
    until(lambda: reads.read[2:] == [("own", b"c")])


def test_a_wake_that_a_short_wait_reads_still_reaches_the_own_thread() -> None:
    """A transfer that nobody waits for has a deadline, which the own thread must learn of before it sleeps for an hour."""
    slept = [3600.0]
    turns: list[str] = []

    def process(ready: Set[int] | None) -> float:
        turns.append(threading.current_thread().name)
        return slept[0]

    ended: list[bool] = []
    attendant = Attendant(process, lambda: bool(ended), 0.0, NoMessages())
    attendant._away_until = -10.0  # nobody has waited for long
    thread = threading.Thread(target=attendant.serve, name="own", daemon=True)
    thread.start()
    try:
        until(lambda: attendant._sleeps_long)
        slept[0] = 0.01
        with attendant.lock:  # so that the wake is read by this thread, as if the own one were slower
            attendant._sleep_s = 0.01
        turns.clear()
        attendant.attend(lambda: bool(turns), NEVER_S)
        until(lambda: turns.count("own") >= 2)
    finally:
        ended.append(True)
        attendant.wake()
        thread.join(LIMIT_S)
        attendant.close()
