"""``--servers`` and ``--server-hosts``: which host gets which parameter servers, and how a run with them ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts import node, placement
from guozhuang.launch.hosts import options as hosts
from guozhuang.launch.hosts.frames import ServerEnded
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.run import HostsRun
from guozhuang.launch.hosts.supervisor import AgentStarted, EndAgent
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read

SCRIPT = ["train.py", "--servers", "9"]


def plan(*words: str) -> hosts.HostsPlan:
    return hosts.plan(read([*words, *SCRIPT]), {})


def placed(*words: str) -> list[tuple[str, list[int]]]:
    return [(name, list(numbers)) for name, numbers in plan(*words).servers]


def test_servers_are_spread_over_the_hosts_of_the_ranks() -> None:
    assert placed("-H", "a,b:2,c") == []
    assert placed("-H", "a,b:2,c", "--servers", "0") == []
    assert placed("-H", "a,b:2,c", "--servers", "2") == [("a", [0]), ("b", [1])]
    assert placed("-H", "a,b:2,c", "--servers", "5") == [("a", [0, 1]), ("b", [2, 3]), ("c", [4])]
    # A host that gets no ranks gets no servers either.
    assert placed("-H", "a:2,b", "-np", "2", "--servers=2") == [("a", [0, 1])]


def test_spare_hosts_get_what_they_are_named_with() -> None:
    assert placed("-H", "a", "--server-hosts", "s:2,me@t") == [("s", [0, 1]), ("me@t", [2])]
    assert placed("-H", "a", "--server-hosts", "s:2", "--server_hosts", "[fd00::1]:1") == [
        ("s", [0, 1]),
        ("fd00::1", [2]),
    ]
    assert placed("-H", "a", "--server-hosts=s:2,t", "--servers", "3") == [("s", [0, 1]), ("t", [2])]
    assert placed("-H", "a:1,b", "-np", "1", "--server-hosts", "b") == [("b", [0])]


def test_the_agents_hear_nothing_of_servers_and_the_script_keeps_its_own_options() -> None:
    wanted = plan("-H", "a,b", "--server-hosts", "s", "--servers", "1", "--backend", "gloo")
    assert {name: wanted.options[name] for name in ("backend", "servers", "server_hosts", "training_script_args")} == {
        "backend": "gloo", "servers": None, "server_hosts": None, "training_script_args": SCRIPT[1:]
    }  # fmt: skip
    assert wanted.names == ["a", "b", "s"]


@given(number=st.integers(0, 40), num_hosts=st.integers(1, 9))
def test_every_server_has_one_host_and_none_has_two_more_than_another(number: int, num_hosts: int) -> None:
    found = placement.place_servers(number, [], [f"h{host}" for host in range(num_hosts)])
    assert [each for _, numbers in found for each in numbers] == list(range(number))
    shares = [len(numbers) for _, numbers in found] + [0] * (num_hosts - len(found))
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-H", "a", "--servers", "-1"], "--servers is a count"),
        (["-H", "a", "--server-hosts", "s:0"], "at least one slot, in s:0"),
        (["-H", "a", "--server-hosts", "s:x"], "cannot be read in s:x"),
        (["-H", "a", "--server-hosts", ","], "--server-hosts names no host"),
        (["-H", "a", "--server-hosts=-oX"], "no name that ssh could take"),
        (["-H", "a", "--server-hosts", "s,t,s"], "names a host twice.*s"),
        (["-H", "a", "--server-hosts", "s,me@s"], "names a host twice"),
        (["-H", "a,b", "--server-hosts", "s,b:2"], "and b has ranks"),
        (["-H", "a", "--server-hosts", "s:2,t", "--servers", "2"], "do not agree: s:2,t:1 are 3 servers"),
        (["-H", "a", "--server-hosts", "s", "--servers", "0"], "do not agree"),
        (["-H", "a", "--server-hosts", "s:2222"], "port of ssh"),
        (["-H", "a", "--servers", "65"], "port of ssh"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--server-hosts", "s:2"], "--server-hosts serves only hosts that are started over ssh"),
        (["--servers", "-1"], "--servers is a count"),
        (
            ["--servers", "2", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1"],
            "needs a fixed number of nodes",
        ),
        (["--servers", "2", "--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "localhost:1"], "etcd"),
    ],
)
def test_what_cannot_work_without_hosts_is_refused(tmp_path: Path, words: list[str], text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(UsageError, match=text):
        found = read([*words, str(script)])
        assert not hosts.is_asked_for(found)
        options.plan(found, {})


def test_a_signal_while_the_watch_of_a_host_of_servers_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoServers:
        def __init__(self, *_: object) -> None: ...

        def start(self, address: str) -> None: ...

        def close(self) -> None: ...

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    said: list[Any] = []
    host = SimpleNamespace(
        _config=SimpleNamespace(serves=[0], num_servers=1),
        _channel=SimpleNamespace(watched=watched, say=said.append),
        _is_store_there=lambda: True,
    )
    monkeypatch.setattr(node, "Servers", NoServers)
    assert node.Node._serve(host, 1) == 1  # type: ignore[arg-type]
    assert said == [ServerEnded("its servers were told to end by SIGTERM")]


class MadeUp(Link):
    """A host that ends when it is told to; all of them note the order."""

    order: list[str]

    def say(self, request: object) -> None:
        self.order.append(f"{self.title}: {request}")
        self.is_closed, self.code = True, 0


def started() -> dict[type, Any]:
    return {AgentStarted: AgentStarted(1, 2)}


def made_up(run: HostsRun, links: Sequence[Link]) -> list[str]:
    order: list[str] = []
    for link in links:
        link.order = order  # type: ignore[attr-defined]
    run._links = list(links)
    return order


def test_servers_are_ended_after_the_ranks() -> None:
    run = HostsRun(plan("-H", "a", "--server-hosts", "s:3"), [False, False], b"")
    assert [link.title for link in run._links] == ["host a", "host s (parameter servers 0 to 2)"]
    order = made_up(run, [MadeUp("a", 0, False, started()), MadeUp("s", 1, False, started(), serves=[0, 1, 2])])
    run._end(30.0, 10)  # a signal of the user's is for ranks alone
    assert order == [f"host a: {EndAgent(30.0, 10)}", f"host s (parameter servers 0 to 2): {EndAgent(2.0)}"]
    run._selector.close()


def test_a_server_that_ended_is_the_cause() -> None:
    ended = ServerEnded("parameter server 3 (process 7) ended with exit code 1")
    link = Link("s", 1, False, {**started(), ServerEnded: ended}, code=1)
    link.serves = [3]
    found = hosts_failure.of(link)
    assert (found.code, found.is_cause, found.is_signal, found.is_of_script) == (1, True, True, True)
    assert f"{link.title} {found.text}".startswith(
        "host s (parameter server 3) ends the run: parameter server 3 (process 7) ended with exit code 1"
    )
    killed = hosts_failure.of(Link("s", 1, False, started(), code=-9, serves=[3]))
    assert killed.text.startswith("lost its agent by SIGKILL; its servers were ended")
