"""How what several hosts print becomes one readable stream."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guozhuang.launch import hosts_output
from guozhuang.launch.hosts_output import Display
from guozhuang.launch.remote_link import Link
from guozhuang.launch.screen import Screen

FIRST, SECOND = Link("a", 0, False), Link("b", 1, False)


class Paper:
    """Standard output or error of a launcher."""

    colour = False
    is_terminal = False

    def __init__(self, descriptor: int) -> None:
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
    deadline = time.monotonic() + 5
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
        assert out.data == b"\r[0] 10%\r\x1b[K[1] hello\n[0] 10%\r[0] 20%\n"
    else:
        assert out.data == b"\r[0] 10%\n[1] hello\n\r[0] 20%\n"


def test_a_progress_bar_lives_among_lines_of_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, _ = display(monkeypatch, Terminal)
    shown.take(FIRST, "stderr", b"\r[0] 10%")
    wait(shown)
    shown.take(FIRST, "stdout", b"[1] hello\n")
    assert out.data == b"\r[0] 10%\r\x1b[K[1] hello\n[0] 10%"


def test_a_line_of_the_first_host_that_a_pipe_cut_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, _ = display(monkeypatch, Paper)
    shown.take(FIRST, "stdout", b"[0] one\n[0] tw")
    shown.take(SECOND, "stdout", b"[1] x\n")
    shown.take(FIRST, "stdout", b"o\n")
    assert out.data == b"[0] one\n[1] x\n[0] two\n"


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_nothing_of_a_single_host_is_changed(data: bytes, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shown, out, err = display(monkeypatch, Paper, same=False)
        places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        for i, j in itertools.pairwise(places):
            shown.take(FIRST, "stdout", data[i:j])
            shown.take(FIRST, "stderr", data[i:j])
        assert shown.close(FIRST) == b""
        assert out.data == err.data == data


def test_reports_are_kept_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out, err = display(monkeypatch, Paper, same=False)
    for link, text in (
        (FIRST, b"guozhuang run: rank 0 failed first: x"),
        (SECOND, b"guozhuang run: node 0 (host a): no sign"),
    ):
        shown.take(link, "stderr", b"before\n" + text[:9])
        wait_s = time.monotonic() + 0.06
        while time.monotonic() < wait_s:
            shown.show_what_waits()
        shown.take(link, "stderr", text[9:] + b"\n  more\n  last")
        shown.take(link, "stdout", text + b"\n")
        assert shown.close(link) == text + b"\n  more\n  last\n"
    assert err.data == b"before\n" * 2
    assert out.data.count(b"guozhuang run") == 2, "on standard output it is the script's own"


def test_the_launcher_speaks_in_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, out, _ = display(monkeypatch, Paper)
    shown.take(FIRST, "stdout", b"\r[0] 10%")
    wait(shown)
    shown.say("host a failed")
    assert out.data == b"\r[0] 10%\n"
    assert capsys.readouterr().err == "guozhuang run: host a failed\n"
