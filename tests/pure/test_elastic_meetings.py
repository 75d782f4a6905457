"""Nodes meet, one of them fails or is lost at a bad moment, and the others begin anew. Agents are threads here."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, dynamic_rendezvous

from guozhuang.errors import WorldError
from guozhuang.launch.rendezvous import elastic as elastic_nodes
from guozhuang.launch.rendezvous import stores as elastic_stores
from guozhuang.launch.rendezvous.base import AnewError, Meeting
from guozhuang.launch.rendezvous.elastic import ElasticMeeting
from guozhuang.launch.rendezvous.fixed import FixedMeeting
from guozhuang.launch.rendezvous.signs import OtherNodeError, Others
from guozhuang.launch.rendezvous.stores import Kept
from guozhuang.net.client import PatientStore, look_s
from tests.ranks import free_port

_QUICK = datetime.timedelta(seconds=0.2)
Open = Callable[..., list[Any]]


@pytest.fixture
def meetings() -> Iterator[list[Meeting]]:
    made: list[Meeting] = []
    yield made
    for each in made:
        if each._others is not None:
            each._others._has_ended, each._others._is_keeper = True, False  # nobody reads any more
    for each in reversed(made):
        each.leave()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Variables stay as they were, as by ``guozhuang run``; and torch elastic looks at its store more often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        patch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.02))
        yield


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def fixed(meetings: list[Meeting], num_nodes: int, **more: Any) -> list[FixedMeeting]:
    port = free_port()
    made = [FixedMeeting("127.0.0.1", port, node, num_nodes, "run", 10, None, **more) for node in range(num_nodes)]
    meetings += made
    return made


def elastic(meetings: list[Meeting], least: int, most: int, max_restarts: int) -> list[ElasticMeeting]:
    """Nodes of an elastic run, of which each has its number in the first round, and is lost after 0.6 s."""
    port, made = free_port(), []
    for _ in range(most):
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", "run", least, most, join_timeout=20, last_call_timeout=1
        )
        each = ElasticMeeting(parameters, "127.0.0.1", port, 20, None, max_restarts)
        object.__setattr__(each._handler.settings, "keep_alive_interval", _QUICK)
        object.__setattr__(each._handler.settings, "keep_alive_max_attempt", 3)
        each._handler._state_holder._cache_duration = 0.05  # type: ignore[attr-defined]
        made.append(each)
    meetings += made
    return made


def all_meet(pool: ThreadPoolExecutor, some: list[Any]) -> list[RendezvousInfo]:
    return [each.result(20) for each in [pool.submit(one.next_rendezvous) for one in some]]


def die(meeting: ElasticMeeting) -> None:
    """As if its agent had been killed."""
    meeting._handler._stop_heartbeats()
    if meeting._others is not None:
        meeting._others.forget()


@pytest.mark.parametrize("node", [0, 2])
def test_any_node_that_starts_its_ranks_anew_calls_the_others(
    meetings: list[Meeting], pool: ThreadPoolExecutor, node: int
) -> None:
    nodes = fixed(meetings, 3)
    all_meet(pool, nodes)
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0, 0]
    first = pool.submit(nodes[node].next_rendezvous)
    others = [each for each in nodes if each is not nodes[node]]
    for each in others:
        deadline = time.monotonic() + 5
        while not each.num_nodes_waiting():
            assert time.monotonic() < deadline, "it was not called"
            time.sleep(0.01)
    all_meet(pool, others)
    first.result(10)
    time.sleep(0.05)
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0, 0] and {each.attempt for each in nodes} == {1}


class Died(Exception):
    """Of an agent that was killed."""


@pytest.mark.parametrize("where", ["before the address", "before its store", "its store is gone", "before the roles"])
def test_who_is_lost_while_the_others_still_need_it_is_left_behind(
    meetings: list[Meeting], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lost, other = elastic(meetings, 1, 2, 3)

    def killed(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        raise Died

    build = dynamic_rendezvous.RendezvousStoreInfo.build

    def killed_as_first(rank: int, *arguments: Any, **more: Any) -> Any:
        if rank == 0:
            killed()
        return build(rank, *arguments, **more)

    def kept_nowhere(*arguments: Any) -> Kept:
        monkeypatch.undo()
        return Kept(dist.HashStore(), "127.0.0.1", 0, ("127.0.0.1", free_port()))

    if where == "before the address":
        monkeypatch.setattr(dynamic_rendezvous.RendezvousStoreInfo, "build", killed_as_first)
    elif where != "before the roles":
        monkeypatch.setattr(elastic_nodes, "keep", killed if where == "before its store" else kept_nowhere)

    def until_it_is_lost() -> None:
        with contextlib.suppress(Died):
            lost.next_rendezvous()
        die(lost)

    def begin() -> None:
        other.next_rendezvous().store.get("torchelastic/assigned_ranks/1")

    dying: Future[None] = pool.submit(until_it_is_lost)
    with pytest.raises(AnewError):
        pool.submit(begin).result(15)
    dying.result(1)
    found = other.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 1)


def test_who_begins_anew_is_not_lost(meetings: list[Meeting], pool: ThreadPoolExecutor) -> None:
    """It has no place among the nodes for a moment, and where no restart is allowed that was the end of the run."""
    nodes = elastic(meetings, 2, 3, 0)
    all_meet(pool, nodes)
    said: list[str] = []
    first, second, lost = nodes
    second.say = said.append
    die(lost)
    deadline = time.monotonic() + 10
    while not first.num_nodes_waiting():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again = pool.submit(first.next_rendezvous)
    while first._handler._this_node in second._state.participants:
        second._handler.num_nodes_waiting()
        time.sleep(0.02)
    assert second.num_nodes_waiting() == second.num_nodes_waiting() == 2
    [words] = said
    assert "node 0" in words and "starts its ranks anew" in words
    assert words.count("no sign of life") == 1 and words.partition("no sign of life")[0].rstrip().endswith("):")
    assert second.next_rendezvous().world_size == again.result(10).world_size == 2


def test_too_few_that_are_left_end_the_run(meetings: list[Meeting], pool: ThreadPoolExecutor) -> None:
    nodes = elastic(meetings, 2, 2, 0)
    all_meet(pool, nodes)
    die(nodes[1])
    with pytest.raises(OtherNodeError, match="1 nodes are left, at least 2 are needed"):
        while True:
            nodes[0].num_nodes_waiting()
            time.sleep(0.02)


class Counted(PatientStore):
    """Counts what it is asked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked = 0
        call = self._client.call

        def counted(*what: Any) -> Any:
            self.asked += 1
            return call(*what)

        self._client.call = counted  # type: ignore[method-assign]


def test_to_look_costs_one_question_however_many_nodes_there_are() -> None:
    shared = dist.HashStore()
    store, teller = Counted(shared), PatientStore(shared)
    try:
        one, other = (Others(each, node, 64, "it", False) for node, each in enumerate((store, teller)))
        one._look_s = 0
        for _ in range(10):
            one.look()
        assert store.asked == 10
        other._tell("gave up", 1, 1, 1, "lost a peer")  # a reaction: the cause is waited for
        for _ in range(10):
            one.look()
        assert store.asked == 10 + 10 + 2, "each look asks once, and what is new is read once, when it is there"
        other._tell("gave up", 1, 0, 7, "boom")
        with pytest.raises(OtherNodeError, match="node 1: boom"):
            one.look()
    finally:
        store.close()
        teller.close()


def test_who_waits_for_many_nodes_asks_seldom(meetings: list[Meeting]) -> None:
    """63 nodes may wait for the last one; all of them ask the store of the first."""
    [node] = [FixedMeeting("127.0.0.1", free_port(), 0, 64, "run", 1.0, None)]
    meetings.append(node)
    store = Counted(dist.HashStore())
    node._others = Others(store, 0, 64, "it", False)
    store.while_waiting = node._others.look
    with pytest.raises(WorldError, match=r"63 of 64 nodes did not come within 1 s: 1, 2, .* and 47 more"):
        node._roll_call(store)
    store.close()
    assert store.asked - 64 < 55, "20 ms apart at first, then further"
    assert [look_s(waited_s) for waited_s in (0, 2, 60)] == [0.02, 0.1, 0.2]


def test_a_key_of_another_agent_is_not_waited_for_when_that_one_is_gone() -> None:
    store = PatientStore(dist.HashStore())

    def gone() -> None:
        raise OtherNodeError("node 0 is gone")

    with pytest.raises(WorldError, match=r"node 0 did not say 'x' within 0\.1 s"):
        elastic_stores.wait_for(store, "x", 0.1, "node 0")
    store.while_waiting = gone
    with pytest.raises(OtherNodeError, match="node 0 is gone"):
        elastic_stores.wait_for(store, "x", 60, "node 0")
    threading.Timer(0.05, store.set, ("y", "z")).start()
    store.while_waiting = lambda: None
    assert elastic_stores.wait_for(store, "y", 5, "node 0") == "z"
    store.close()
