"""What the launcher of several hosts tells each of them at the end; with made-up hosts."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts.frames import RanksFinished
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.options import plan
from guozhuang.launch.hosts.run import HostsRun
from guozhuang.launch.hosts.supervisor import AgentStarted, EndAgent
from guozhuang.launch.options.plan import read
from guozhuang.launch.request import RunReport


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
    run._end(30.0, signal.SIGUSR1)
    assert [each.signal for each in told(run)] == [signal.SIGUSR1] * 2
    for link in run._links:
        link.is_closed = False
    run._end(30.0, signal.SIGINT)
    assert told(run) == [EndAgent(30.0), EndAgent(2.0)]


def test_ranks_get_as_long_as_the_user_gave_them(run: HostsRun) -> None:
    assert run._grace_s(30.0) == 30.0
    run._wanted = dataclasses.replace(run._wanted, shutdown_timeout_s=120)
    assert run._grace_s(30.0) == run._grace_s(10.0) == 125.0
    run._wanted = dataclasses.replace(run._wanted, shutdown_timeout_s=3)
    assert run._grace_s(30.0) == 30.0


def test_a_host_is_the_cause_unless_its_agent_says_otherwise() -> None:
    def found(**report: object) -> hosts_failure.HostFailure:
        messages: dict[type, Any] = {AgentStarted: AgentStarted(1, 2)}
        messages |= {RunReport: RunReport(**report)} if report else {}  # type: ignore[arg-type]
        return hosts_failure.of(Link("a", 0, False, messages, code=3))

    assert found().is_cause and found(who="rank 2", code=3).is_cause
    assert not found(text="node 1: its agent ended", code=3, is_cause=False).is_cause
    assert hosts_failure.summary(found(who="rank 2", host="of the machine")).title == "rank 2 on host a"
    assert hosts_failure.summary(found()).title == "host a"
