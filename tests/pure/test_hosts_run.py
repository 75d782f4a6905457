"""What the launcher of several hosts tells each of them at the end; with made-up hosts."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.placement import plan
from guozhuang.launch.hosts.run import Run


class MadeUp(Link):
    """A host that ends as soon as it is told to."""

    told: Mapping[str, Any]

    def say(self, request: Mapping[str, Any]) -> None:
        self.told, self.is_closed, self.code = request, True, 0


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run(plan(["-H", "a,b", "t.py"], ["t.py"], {}), [False, False], b"")
    found._links = [MadeUp("a", 0, False, {"agent": 1}), MadeUp("b", 1, False, {"agent": 1, "finished": True})]
    yield found
    found._selector.close()


def told(run: Run) -> list[Any]:
    return [link.told for link in run._links]  # type: ignore[attr-defined]


def test_a_host_whose_ranks_have_finished_gets_little_time(run: Run) -> None:
    run._end(10.0)
    assert told(run) == [{"end": 10.0}, {"end": 2.0}]


def test_only_signals_of_an_own_meaning_are_handed_on(run: Run) -> None:
    run._end(30.0, signal.SIGUSR1)
    assert [each["signal"] for each in told(run)] == [signal.SIGUSR1] * 2
    for link in run._links:
        link.is_closed = False
    run._end(30.0, signal.SIGINT)
    assert told(run) == [{"end": 30.0}, {"end": 2.0}]


def test_ranks_get_as_long_as_the_user_gave_them(run: Run) -> None:
    assert run._grace_s(30.0) == 30.0
    run._wanted = dataclasses.replace(run._wanted, shutdown_timeout_s=120)
    assert run._grace_s(30.0) == run._grace_s(10.0) == 125.0
    run._wanted = dataclasses.replace(run._wanted, shutdown_timeout_s=3)
    assert run._grace_s(30.0) == 30.0


def test_an_agent_that_lost_another_is_not_the_cause() -> None:
    def is_cause(report: str) -> bool:
        link = Link("a", 0, False, {"supervisor": 1}, code=1)
        return hosts_failure.of(link, f"guozhuang run: {report}\n".encode()).is_cause

    assert is_cause("rank 0 failed first: exit code 1")
    for elsewhere in ("node 1: its agent ended", "node 1 (host b): no sign of life", "the first failure was on node 1",
                      "the agent of node 0, which keeps the store, is gone", "the other nodes gave this one up"):  # fmt: skip
        assert not is_cause(elsewhere)
