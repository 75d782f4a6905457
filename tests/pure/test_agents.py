"""Agents of a run hear of each other's ends: who was first, who is silent, and when all are done. Agents are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from guozhuang.launch.rendezvous import agents as module
from guozhuang.launch.rendezvous.agents import OtherAgents, OtherNodeError
from guozhuang.net.client import PatientStore
from tests.waiting import LIMIT_S, NEVER_S, until

Make = Callable[..., list[OtherAgents]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    # An agent that judges counts at most two beats of silence between two looks: where all are slow, nobody is silent.
    monkeypatch.setattr(module, "_BEAT_S", 0.02)
    made: list[OtherAgents] = []
    stores: list[PatientStore] = []

    def agents(number: int, silence_s: float = NEVER_S, tell_s: float = 0.3) -> list[OtherAgents]:
        monkeypatch.setattr(module, "_REPORT_S", tell_s)
        shared = dist.HashStore()
        for node in range(number):
            stores.append(PatientStore(shared))
            made.append(OtherAgents(stores[-1], node, number, "the agent of node 0", False, silence_s))
            made[-1].begin()
        return made

    yield agents
    for agent in made:
        fall_silent(agent)
    for store in stores:
        store.close()


def fall_silent(agent: OtherAgents) -> None:
    agent._end.set()
    if agent._thread is not None:
        agent._thread.join(LIMIT_S)
        assert not agent._thread.is_alive()


def hears(agent: OtherAgents) -> OtherNodeError:
    def look() -> OtherNodeError | None:
        try:
            agent.look()
        except OtherNodeError as error:
            return error
        return None

    found = until(look)
    assert found is not None
    return found


@pytest.mark.parametrize("gone", [0, 2])
def test_one_that_is_silent_is_named_on_all_others(make: Make, gone: int) -> None:
    agents = make(3, silence_s=1.0)
    fall_silent(agents[gone])
    for node in {0, 1, 2} - {gone}:
        error = hears(agents[node])
        assert f"node {gone} (host " in str(error) and "no sign of life" in str(error) and error.code == 1


def test_the_cause_is_who_did_not_react(make: Make) -> None:
    agents = make(3, tell_s=NEVER_S)
    found: list[OtherNodeError | None] = []
    reacting = threading.Thread(target=lambda: found.append(agents[0].give_up("lost a peer", 1, True)), daemon=True)
    reacting.start()

    def has_read() -> bool:
        agents[1].look()  # only a reaction yet: its own ranks may be the cause
        return 0 in agents[1]._given_up

    until(has_read)
    assert agents[2].give_up("boom", 7, False) is None
    reacting.join(LIMIT_S)
    assert found[0] is not None and (str(found[0]), found[0].code) == ("node 2: boom", 7)
    assert str(hears(agents[1])) == "node 2: boom"


def test_the_cause_of_a_reaction_may_be_a_node_that_is_silent(make: Make) -> None:
    agents = make(3, silence_s=1.0, tell_s=NEVER_S)
    fall_silent(agents[2])
    cause = agents[0].give_up("lost a peer", 1, True)
    assert cause is not None and "node 2 (host" in str(cause)


def test_where_all_only_reacted_all_say_the_same(make: Make) -> None:
    agents = make(3)
    found: dict[int, OtherNodeError | None] = {}

    def give_up(node: int) -> None:
        found[node] = agents[node].give_up("lost a peer", 10 + node, True)

    threads = [threading.Thread(target=give_up, args=(node,)) for node in (1, 2)]
    for thread in threads:
        thread.start()
    assert str(hears(agents[0])) == "node 1: lost a peer"
    for thread in threads:
        thread.join(LIMIT_S)
    assert found[1] is None and str(found[2]) == "node 1: lost a peer"


def test_all_are_done_when_the_last_one_is(make: Make) -> None:
    agents = make(2, silence_s=0.6)
    assert not agents[0].are_done("1") and not agents[0].are_done("1")
    assert agents[1].are_done("1") and agents[0].are_done("1")
    agents[1].close()
    closed_s = agents[0]._clock()
    until(lambda: agents[0]._clock() > closed_s + 2 * 0.6)  # silent now, and rightly
    agents[0].look()


def test_who_ends_without_a_word_gave_up(make: Make) -> None:
    agents = make(2)
    agents[1].close()
    assert str(hears(agents[0])) == "node 1: its agent ended"
