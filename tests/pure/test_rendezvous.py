"""Nodes meet, one of them fails or is lost at a bad moment, and the others restart. Agents are threads here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.errors import WorldError
from guozhuang.launch.rendezvous.agents import OtherAgents, OtherNodeError
from guozhuang.launch.rendezvous.fixed import Attempt, FixedRendezvous, NodeShare
from guozhuang.net.client import PatientStore, look_s
from guozhuang.net.end_request import EndRequest
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.watch.processes import ENDED_BY_SIGTERM
from tests.ranks import free_port
from tests.waiting import LIMIT_S, NEVER_S, until


@pytest.fixture
def meetings() -> Iterator[list[FixedRendezvous]]:
    made: list[FixedRendezvous] = []
    yield made
    for each in made:
        if each._others is not None:
            each._others._has_ended, each._others._is_keeper = True, False  # nobody reads any more
    for each in reversed(made):
        each.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def fixed(meetings: list[FixedRendezvous], num_nodes: int, **more: Any) -> list[FixedRendezvous]:
    port = free_port()
    made = [
        FixedRendezvous(MeetingPoint("127.0.0.1", port), node, num_nodes, "run", NEVER_S, silence_s=NEVER_S, **more)
        for node in range(num_nodes)
    ]
    meetings += made
    return made


def look_again(some: list[FixedRendezvous]) -> None:
    """Their next look reads what the others have told, however soon it comes after the last one."""
    for each in some:
        assert each._others is not None
        each._others._looked = float("-inf")


def all_meet(pool: ThreadPoolExecutor, some: list[FixedRendezvous]) -> list[Attempt]:
    return [each.result(LIMIT_S) for each in [pool.submit(one.meet, NodeShare(1)) for one in some]]


@pytest.mark.parametrize("node", [0, 2])
def test_any_node_that_starts_its_ranks_anew_calls_the_others(
    meetings: list[FixedRendezvous], pool: ThreadPoolExecutor, node: int
) -> None:
    nodes = fixed(meetings, 3)
    all_meet(pool, nodes)
    assert not any(each.must_restart() for each in nodes)
    first = pool.submit(nodes[node].meet, NodeShare(1))
    others = [each for each in nodes if each is not nodes[node]]
    for each in others:
        until(each.must_restart)
    all_meet(pool, others)
    first.result(LIMIT_S)
    look_again(nodes)
    assert not any(each.must_restart() for each in nodes) and {each.attempt for each in nodes} == {1}


def test_each_rank_finds_its_place_among_nodes_of_different_sizes() -> None:
    shares = [NodeShare(2, role="a"), NodeShare(1, role="b"), NodeShare(3, role="a")]
    found = [
        Attempt(4, node, shares, "h", 7).environment(local)
        for node, share in enumerate(shares)
        for local in range(share.ranks)
    ]
    assert [each["RANK"] for each in found] == list("012345") and {each["WORLD_SIZE"] for each in found} == {"6"}
    assert [each["LOCAL_RANK"] for each in found] == list("010012")
    assert [each["ROLE_RANK"] for each in found] == list("010234")
    assert [each["ROLE_WORLD_SIZE"] for each in found] == list("551555")
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in found} == {"4"}


class Counted(PatientStore):
    """Counts what it is asked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked = 0
        call = self._client.call

        def counted(*what: Any, **options: Any) -> Any:
            self.asked += 1
            return call(*what, **options)

        self._client.call = counted  # type: ignore[method-assign]


def test_to_look_costs_one_question_however_many_nodes_there_are() -> None:
    shared = dist.HashStore()
    store, teller = Counted(shared), PatientStore(shared)
    try:
        one, other = (OtherAgents(each, node, 64, "it", False) for node, each in enumerate((store, teller)))
        one._look_s = 0
        for _ in range(10):
            one.look()
        assert store.asked == 10
        other._send("gave up", 1, 1, 1, "node 1: lost a peer")  # a reaction: the cause is waited for
        for _ in range(10):
            one.look()
        assert store.asked == 10 + 10 + 2, "each look asks once, and what is new is read once, when it is there"
        other._send("gave up", 1, 0, 7, "node 1: boom")
        with pytest.raises(OtherNodeError, match="node 1: boom"):
            one.look()
    finally:
        store.close()
        teller.close()


def test_who_waits_for_many_nodes_asks_seldom(meetings: list[FixedRendezvous]) -> None:
    """63 nodes may wait for the last one; all of them ask the store of the first."""
    [node] = [FixedRendezvous(MeetingPoint("127.0.0.1", 0), 0, 64, "run", 1.0)]
    meetings.append(node)
    store = Counted(dist.HashStore(), num_pollers=64)
    node._others = OtherAgents(store, 0, 64, "it", False)
    store.while_waiting = node._others.look
    with pytest.raises(WorldError, match=r"63 of 64 nodes did not come within 1 s: 1, 2, .* and 47 more"):
        node._roll_call(store, NodeShare(1))
    store.close()
    assert store.asked - 64 < 55, "32 ms apart at first, then further"
    assert [look_s(waited_s) for waited_s in (0, 2, 60)] == [0.002, 0.1, 0.2]


def test_a_key_of_another_agent_is_not_waited_for_when_that_one_is_gone() -> None:
    store = PatientStore(dist.HashStore())

    def gone() -> None:
        raise OtherNodeError("node 0 is gone")

    node = FixedRendezvous(MeetingPoint("127.0.0.1", 1), 1, 2, "run", 0.1)
    with pytest.raises(WorldError, match=r"the agent of node 0 did not remove the keys .* within 0\.1 s"):
        node._forget(store)
    node._timeout_s, store.while_waiting = NEVER_S, gone
    with pytest.raises(OtherNodeError, match="node 0 is gone"):
        node._forget(store)
    store.while_waiting = lambda: store.set("forgotten", "1")
    node._forget(store)
    store.close()


@pytest.mark.parametrize(("code", "is_signalled"), [(ENDED_BY_SIGTERM, False), (1, True)])
def test_all_nodes_know_that_the_ranks_were_asked_to_end(
    meetings: list[FixedRendezvous], pool: ThreadPoolExecutor, code: int, is_signalled: bool
) -> None:
    nodes = fixed(meetings, 2)
    all_meet(pool, nodes)
    assert not nodes[1].ask_to_end() and not nodes[0].was_asked_to_end(), "nobody looks for it"
    assert nodes[0]._kept is not None and nodes[1]._shared is not None
    request = EndRequest(nodes[0]._kept.store)
    with request.awaited():
        assert nodes[1].ask_to_end() and request.is_made()
        assert nodes[1]._shared._client.limit_s == NEVER_S, "what follows has its time"
        assert nodes[0].was_asked_to_end() and not nodes[0].must_signal() and not nodes[1].must_signal()
        if code == ENDED_BY_SIGTERM:
            request.is_obeyed = True
    assert nodes[1].must_signal() == (code != ENDED_BY_SIGTERM), "the ranks left their loop for another reason"
    with request.awaited():
        if code != ENDED_BY_SIGTERM:
            nodes[0].take_back_request()
            assert nodes[1].must_signal() and not nodes[1].was_asked_to_end()
        nodes[0].give_up("its ranks have ended", code, False)
        look_again(nodes)
        assert nodes[1].must_signal() == is_signalled
