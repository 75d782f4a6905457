"""How what several hosts print becomes one readable stream."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.launch.console import display as hosts_output
from guozhuang.launch.console.display import Display
from guozhuang.launch.console.screen import Screen
from guozhuang.launch.console.target import Target
from guozhuang.launch.hosts.link import Link
from tests.drawing import examples
from tests.waiting import LIMIT_S, until

FIRST, SECOND = Link("a", 0, False), Link("b", 1, False)


class Paper:
    """Standard output or error of a launcher."""

    colour = False
    is_terminal = False

    def __init__(self, descriptor: int, wait: object) -> None:
        self.data = b""
        self.screen = Screen(self.write, self.is_terminal)

    def write(self, data: bytes) -> None:
        self.data += data


class Terminal(Paper):
    """One on which lines can be drawn over."""

    colour = is_terminal = True


def display(monkeypatch: pytest.MonkeyPatch, kind: type[Paper], same: bool = True) -> tuple[Display, Paper, Paper]:
    monkeypatch.setattr(hosts_output, "Target", kind)
    monkeypatch.setattr(hosts_output, "is_same", lambda one, other: same)
    found = Display()
    out, err = found._targets.values()
    return found, out, err  # type: ignore[return-value]


def wait(shown: Display) -> None:
    deadline = time.monotonic() + LIMIT_S
    while shown.is_holding and time.monotonic() < deadline:
        time.sleep(0.01)
        shown.show_what_waits()


@pytest.mark.parametrize("kind", [Paper, Terminal])
def test_a_progress_bar_of_rank_0_lives_among_lines_of_other_hosts(
    monkeypatch: pytest.MonkeyPatch, kind: type[Paper]
) -> None:
    shown, out, _ = display(monkeypatch, kind)
    shown.take(FIRST, "stderr", b"\r[0] 10%")
    wait(shown)
    assert out.data == b"\r[0] 10%", "at once, not one step late"
    shown.take(SECOND, "stdout", b"[1] hel")
    shown.take(SECOND, "stdout", b"lo\n")
    shown.take(FIRST, "stderr", b"\r[0] 20%\n")
    if kind is Terminal:
        assert out.data == b"\r[0] 10%\r\x1b[J[1] hello\n[0] 10%\r[0] 20%\n"
    else:
        assert out.data == b"\r[0] 10%\n[1] hello\n\r[0] 20%\n"


def test_a_progress_bar_lives_among_lines_of_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, _ = display(monkeypatch, Terminal)
    shown.take(FIRST, "stderr", b"\r[0] 10%")
    wait(shown)
    shown.take(FIRST, "stdout", b"[1] hello\n")
    assert out.data == b"\r[0] 10%\r\x1b[J[1] hello\n[0] 10%"


def test_a_line_of_the_first_host_that_a_pipe_cut_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, _ = display(monkeypatch, Paper)
    shown.take(FIRST, "stdout", b"[0] one\n[0] tw")
    shown.take(SECOND, "stdout", b"[1] x\n")
    shown.take(FIRST, "stdout", b"o\n")
    assert out.data == b"[0] one\n[1] x\n[0] two\n"


@examples(50)
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_nothing_of_a_single_host_is_changed(data: bytes, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shown, out, err = display(monkeypatch, Paper, same=False)
        places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        for i, j in itertools.pairwise(places):
            shown.take(FIRST, "stdout", data[i:j])
            shown.take(FIRST, "stderr", data[i:j])
        shown.close(FIRST)
        assert out.data == err.data == data


def test_the_launcher_speaks_in_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, _ = display(monkeypatch, Paper)
    shown.take(FIRST, "stdout", b"\r[0] 10%")
    wait(shown)
    shown.say("host a failed")
    assert out.data == b"\r[0] 10%\nguozhuang run: host a failed\n"


def test_a_bar_is_shown_while_the_other_stream_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, err = display(monkeypatch, Paper, same=False)
    shown.take(FIRST, "stderr", b"a prompt: ")
    deadline = time.monotonic() + LIMIT_S
    while not err.data and time.monotonic() < deadline:
        shown.take(FIRST, "stdout", b"a line\n")
        time.sleep(0.01)
    assert err.data == b"a prompt: "
    shown.take(FIRST, "stderr", b"\n\r[0] 10%")
    assert err.data == b"a prompt: \n\r[0] 10%", "a drawing is shown at once"
    shown.take(FIRST, "stderr", b"\n\x1b[36m[0]\x1b[0m hel\x1b[3")
    assert err.data.endswith(b"10%\n"), "a coloured mark is no drawing"
    assert out.data == b"a line\n" * (len(out.data) // 7)


def full_pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    return reading, writing


def test_who_is_told_to_end_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launcher whose terminal, or pager, takes nothing: it is in a write when the signal comes."""
    told: list[int] = []
    reading, writing = full_pipe()
    monkeypatch.setattr(hosts_output, "Target", lambda descriptor, **more: Target(writing, **more))
    waits: list[bool] = []  # for each wait whether the signal had come before it

    class Poll:
        """Notes the waits for room."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, limit_ms: float) -> object:
            if limit_ms > 0:
                waits.append(bool(told))
            return self._poll.poll(limit_ms)

    def kill() -> None:
        until(lambda: waits)
        os.kill(os.getpid(), signal.SIGALRM)

    monkeypatch.setattr(hosts_output, "select", SimpleNamespace(poll=Poll, POLLOUT=select.POLLOUT))
    killer = threading.Thread(target=kill)
    shown = Display(is_over=lambda: bool(told))
    handler = signal.signal(signal.SIGALRM, lambda number, _: told.append(number))
    try:
        killer.start()
        for _ in range(100):
            shown.take(SECOND, "stdout", b"[1] hello\n" * 1000)
        shown.say("got SIGALRM")
        assert told and sum(waits) <= 1, "it waited once at most after the signal"
        os.read(reading, 65536)
        shown.say("the reader takes something again")
        os.set_blocking(reading, False)
        rest = b"".join(iter(lambda: os.read(reading, 65536) if select.select([reading], [], [], 0)[0] else b"", b""))
        assert rest.strip(b"x") == b"guozhuang run: the reader takes something again\n"
    finally:
        killer.join()
        signal.signal(signal.SIGALRM, handler)
        os.close(reading)
        os.close(writing)
