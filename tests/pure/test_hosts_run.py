"""What the launcher of several hosts tells each of them at the end; with made-up hosts."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from guozhuang.launch.console import display
from guozhuang.launch.console.screen import Screen
from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts.failure import LOST, HostFailure
from guozhuang.launch.hosts.frames import RanksFinished
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.options import plan
from guozhuang.launch.hosts.run import HostsRun
from guozhuang.launch.hosts.supervisor import AgentStarted, EndAgent
from guozhuang.launch.options.arguments import read
from guozhuang.launch.request import RunReport
from guozhuang.launch.signals import RUN_FAILED


class MadeUp(Link):
    """A host that ends as soon as it is told to."""

    told: object

    def say(self, request: object) -> None:
        self.told, self.is_closed, self.code = request, True, 0


@pytest.fixture
def run() -> Iterator[HostsRun]:
    found = HostsRun(plan(read(["-H", "a,b", "t.py"]), {}), [False, False], b"")
    started = {AgentStarted: AgentStarted(1, 2)}
    finished = {RanksFinished: RanksFinished()}
    found._links = [MadeUp("a", 0, False, {**started}), MadeUp("b", 1, False, {**started, **finished})]
    yield found
    found._selector.close()


def told(run: HostsRun) -> list[Any]:
    return [link.told for link in run._links]  # type: ignore[attr-defined]


def test_a_host_whose_ranks_have_finished_gets_little_time(run: HostsRun) -> None:
    run._end(10.0)
    assert told(run) == [EndAgent(10.0), EndAgent(2.0)]


def test_only_signals_of_an_own_meaning_are_handed_on(run: HostsRun) -> None:
    for number, handed_on in (
        (signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGTERM),
        (RUN_FAILED, signal.SIGTERM),
    ):
        for link in run._links:
            link.is_closed = False
        run._signals[:] = [number]
        assert run._stop() == 128 + number
        assert told(run) == [EndAgent(30.0, handed_on), EndAgent(2.0, handed_on)]


def test_agents_learn_that_they_end_because_of_a_failure(run: HostsRun) -> None:
    run._links[0].is_closed, run._links[0].code = True, LOST
    run._failures = [HostFailure(run._links[0], LOST, "was lost")]
    assert run._fail() == LOST and run._links[1].told == EndAgent(2.0, RUN_FAILED)  # type: ignore[attr-defined]


def test_ranks_get_as_long_as_the_user_gave_them(run: HostsRun) -> None:
    assert run._grace_s(30.0) == 30.0
    run._wanted = dataclasses.replace(run._wanted, shutdown_timeout_s=120)
    assert run._grace_s(30.0) == run._grace_s(10.0) == 125.0
    run._wanted = dataclasses.replace(run._wanted, shutdown_timeout_s=60)
    assert run._grace_s(90.0) == 90.0


@pytest.mark.parametrize(
    ("drawn", "reset"),
    [
        (b"\x1b[?25l\x1b[?1049h\x1b[Hfull screen", b"\x1b[?1049l\x1b[?25h"),
        (b"\x1b[?25l\r[0] 10%", b"\n\x1b[?25h"),
    ],
)
@pytest.mark.parametrize("end", ["lost", "signal", "error"])
def test_the_terminal_is_reset_for_a_host_that_cannot(
    run: HostsRun, monkeypatch: pytest.MonkeyPatch, end: str, drawn: bytes, reset: bytes
) -> None:
    """Rank 0 draws when its host is lost, so neither it nor its agent shows the cursor or leaves the full screen."""
    shown: list[bytes] = []
    terminal = SimpleNamespace(screen=Screen(shown.append, True), is_terminal=True, colour=True)
    monkeypatch.setattr(display, "Target", lambda *_, **__: terminal)
    run._display = display.Display()

    def start() -> None:
        run._display.take(run._links[0], "stderr", drawn)
        if end == "lost":
            run._links[0].is_closed = True
            run._failures = [HostFailure(run._links[0], LOST, "was lost")]
        elif end == "signal":
            run._signals.append(signal.SIGTERM)
        else:
            raise RuntimeError
        run._follow(lambda: False)

    monkeypatch.setattr(run, "_start", start)
    if end == "error":
        with pytest.raises(RuntimeError):
            run.run()
    else:
        assert run.run() == (LOST if end == "lost" else 128 + signal.SIGTERM)
    data = b"".join(shown)
    assert data.startswith(drawn)
    for each in (b"\x1b[?1049l", b"\x1b[?25h"):
        assert data.count(each) == reset.count(each)
    _, *told = data.partition(b"\x1b[?1049l" if b"1049" in drawn else drawn)[2].split(b"guozhuang run: ")
    assert [line.partition(b"\n")[0].decode() for line in told] == {
        "lost": ["host a was lost", "then host b was ended because of it"],
        "signal": [
            "got SIGTERM; ending the ranks of 2 hosts",
            *[f"then host {each} was ended because of it" for each in "ab"],
        ],
        "error": [],
    }[end]


def test_an_error_leaves_no_descriptor_open(run: HostsRun) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyError), run._caught_signals():
        raise KeyError
    assert os.listdir("/proc/self/fd") == before


def test_a_host_is_the_cause_unless_its_agent_says_otherwise() -> None:
    def found(**report: object) -> hosts_failure.HostFailure:
        messages: dict[type, Any] = {AgentStarted: AgentStarted(1, 2)}
        messages |= {RunReport: RunReport(**report)} if report else {}  # type: ignore[arg-type]
        return hosts_failure.of(Link("a", 0, False, messages, code=3))

    assert found().is_cause and found(who="rank 2", code=3).is_cause
    assert not found(text="node 1: its agent ended", code=3, is_cause=False).is_cause
    assert hosts_failure.summary(found(who="rank 2", host="of the machine")).title == "rank 2 on host a"
    assert hosts_failure.summary(found()).title == "host a"
