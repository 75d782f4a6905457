"""Rounds among made-up ranks: threads that meet in memory. What they decide is the same on all of them, and right."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from guozhuang.gradients.named.requests import Message, NamedRequest
from guozhuang.gradients.named.rounds import RoundOutcome, Rounds
from guozhuang.gradients.named.settings import Knobs
from guozhuang.gradients.named.submission import Kind, Reduction
from tests.waiting import LIMIT_S


class Meeting:
    """Carries the messages of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.messages = [b""] * size

    def exchange(self, rank: int, message: bytes) -> list[bytes]:
        self.messages[rank] = message
        self.barrier.wait()
        found = list(self.messages)
        self.barrier.wait()
        return found


class World:
    """Ranks that hold rounds together."""

    def __init__(self, size: int, capacity: int = 1024) -> None:
        self.meeting = Meeting(size)
        names = [10 * rank for rank in range(size)]
        self.ranks = [Rounds(partial(self.meeting.exchange, rank), rank, names, capacity) for rank in range(size)]
        self.pool = ThreadPoolExecutor(size)

    @property
    def num_full(self) -> int:
        """Number of rounds in which some rank sent a request in full."""
        [num] = {each.num_full_rounds for each in self.ranks}
        return num

    def hold(self, *fresh: Sequence[tuple[str, NamedRequest]], **more: Sequence[object]) -> RoundOutcome:
        """One round; the outcome, which is the same on all ranks."""

        def take_part(rank: int) -> RoundOutcome:
            own = {key: value[rank] for key, value in more.items()}
            return self.ranks[rank].hold(fresh[rank], **own)  # type: ignore[arg-type]

        outcomes = list(self.pool.map(take_part, range(len(self.ranks))))
        for outcome in outcomes[1:]:
            assert outcome == outcomes[0]
        return outcomes[0]


@pytest.fixture
def make() -> object:
    worlds = []

    def world(size: int, capacity: int = 1024) -> World:
        worlds.append(World(size, capacity))
        return worlds[-1]

    yield world
    for each in worlds:
        each.pool.shutdown()


Make = Callable[..., World]


def request(*shape: int, kind: Kind = Kind.ALLREDUCE, **more: object) -> NamedRequest:
    return NamedRequest(kind, (shape,), (torch.float32,))._replace(**more)  # type: ignore[arg-type]


def names(outcome: RoundOutcome) -> list[str]:
    assert not [each.error for each in outcome.responses if each.error]
    return [each.name for each in outcome.responses]


def test_a_name_is_ready_when_all_ranks_asked_and_has_a_number_when_it_comes_again(make: Make) -> None:
    world = make(2)
    a, b = ("a", request(3)), ("b", request(4))
    assert names(world.hold([a, b], [b])) == ["b"]
    assert names(world.hold([], [a])) == ["a"]
    for _ in range(3):
        assert names(world.hold([a], [b])) == []
        assert names(world.hold([b], [a])) == ["a", "b"], "in the order in which they were requested"
    assert world.num_full == 2 and [each.num_rounds for each in world.ranks] == [8, 8]


def test_what_changed_is_sent_in_full_by_the_ranks_where_it_did(make: Make) -> None:
    world = make(3)
    old, new = ("x", request(3)), ("x", request(4))
    assert names(world.hold([old], [old], [old])) == ["x"]
    assert names(world.hold([old], [new], [])) == []
    [response] = world.hold([], [], [new]).responses
    assert response.error is not None and "rank 0 has shape [3], rank 10 has shape [4]" in response.error
    num_full = world.num_full
    assert names(world.hold([old], [old], [old])) == ["x"], "an error changes nothing"
    assert world.num_full == num_full
    for _ in range(2):
        assert names(world.hold([new], [new], [new])) == ["x"]
    assert world.num_full == num_full + 1


def test_rows_of_a_gather_are_remembered_by_rank(make: Make) -> None:
    world = make(2)
    one, two = (("x", request(rows, 2, kind=Kind.ALLGATHER)) for rows in (1, 5))
    for ranks, num_full in (((one, two), 1), ((one, two), 1), ((one, one), 2), ((one, one), 2)):
        [response] = world.hold([ranks[0]], [ranks[1]]).responses
        assert [response.requests[rank] for rank in (0, 1)] == [each[1] for each in ranks]
        assert world.num_full == num_full


def test_the_longest_unused_name_is_forgotten_also_while_it_is_pending(make: Make) -> None:
    world = make(2, capacity=2)
    a, b, c = (("abc"[i], request(i)) for i in range(3))
    assert names(world.hold([a, b], [a, b])) == ["a", "b"]
    assert names(world.hold([a], [])) == [], "rank 0 has sent the number of a"
    assert names(world.hold([c], [c])) == ["c"]
    assert names(world.hold([b], [b])) == ["b"] and world.num_full == 2, "c took the place of a"
    assert names(world.hold([], [a])) == ["a"] and world.num_full == 3
    assert names(world.hold([a, b], [a, b])) == ["a", "b"] and world.num_full == 3
    assert all(len(each._known) == len(each._numbers) == 2 for each in world.ranks)


def test_joined_ranks_are_ready_for_everything(make: Make) -> None:
    world = make(3)
    x, join = ("x", request(3)), ("join", request(kind=Kind.JOIN))
    assert names(world.hold([x], [x], [x])) == ["x"]
    assert names(world.hold([x], [join], [x])) == ["x"], "rank 1 is ready from the round on in which it joins"
    assert world.ranks[1].has_joined and not world.ranks[0].has_joined
    assert names(world.hold([("new", request(2))], [], [("new", request(2))])) == ["new"]
    gather = ("g", request(2, kind=Kind.ALLGATHER))
    [response] = world.hold([gather], [], [gather]).responses
    assert response.error == "Allgather is not supported with Join at this time. rank 10 joined before 'g'"
    outcome = world.hold([join], [], [])
    assert outcome.last_joined is None and not outcome.responses
    assert names(world.hold([x], [], [])) == [], "rank 2 is missing, although rank 0 has joined"
    outcome = world.hold([], [], [("alone", request(1)), join])
    assert outcome.last_joined == 2 and names(outcome) == ["x", "alone", "join"], "what is pending anywhere ends first"
    assert not any(each.joined for each in world.ranks)
    assert names(world.hold([x], [x], [])) == [], "all that is over"
    assert names(world.hold([], [], [x])) == ["x"]


def test_what_comes_while_a_join_ends(make: Make) -> None:
    world = make(2)
    x, y, join = ("x", request(3)), ("y", request(3)), ("join", request(kind=Kind.JOIN))
    assert names(world.hold([x, y], [x, y])) == ["x", "y"]
    outcome = world.hold([join, x, ("y", request(4))], [y, join])  # from several threads of a rank
    assert [each.name for each in outcome.responses] == ["x", "y", "join"] and outcome.last_joined == 1
    assert outcome.responses[1].error is not None and "[4]" in outcome.responses[1].error
    assert names(world.hold([x, y], [x, y])) == ["x", "y"]


def test_who_leaves_and_new_settings_are_heard_by_all_in_one_round(make: Make) -> None:
    world = make(2)
    x, knobs = ("x", request(3)), Knobs(5, None, False)
    world.hold([x], [x])
    outcome = world.hold([x], [x], knobs=(knobs, None))
    assert outcome.knobs == knobs and names(outcome) == ["x"] and world.num_full == 1
    for num_full in (2, 3):
        assert names(world.hold([x], [x])) == ["x"] and world.num_full == num_full, "no numbers"
    assert names(world.hold([], [], knobs=(Knobs(5, 2.0, True), None))) == []
    for _ in range(3):
        assert names(world.hold([x], [x])) == ["x"] and world.num_full == 4
    assert world.hold([x], [], leaves=(False, True)).leaving == [1]


@pytest.mark.parametrize("seed", range(12))
def test_shuffled_ranks_decide_alike_and_lose_nothing(make: Make, seed: int) -> None:
    shared = random.Random(seed)
    size, capacity = shared.choice((2, 3, 4)), shared.choice((0, 1, 2, 5, 1024))
    world = make(size, capacity)
    steps, num_names = 30, 6
    # Every rank asks for every name as often, in an order of its own; a name again only when it is done.
    todo = [[f"{i}" for i in range(num_names) for _ in range(steps // num_names)] for _ in range(size)]
    for rank, left in enumerate(todo):
        random.Random(100 * seed + rank).shuffle(left)
    pending: list[set[str]] = [set() for _ in range(size)]
    turns = [dict.fromkeys((f"{i}" for i in range(num_names)), 0) for _ in range(size)]
    done: dict[str, int] = {}
    num_errors = 0
    for _ in range(2000):
        fresh = []
        for rank in range(size):
            mine = []
            for name in [name for name in dict.fromkeys(todo[rank]) if name not in pending[rank]][
                : shared.randrange(3)
            ]:
                turn = turns[rank][name]
                turns[rank][name] += 1
                todo[rank].remove(name)
                pending[rank].add(name)
                odd = int(name == "0" and turn % 3 == 2 and rank == size - 1)  # a mismatch now and then
                mine.append((name, request(1 + turn // 2 + odd)))
            fresh.append(mine)
        outcome = world.hold(*fresh)
        for response in outcome.responses:
            assert all(response.name in each for each in pending), "nobody is missing"
            assert set(response.requests) == set(range(size))
            num_errors += response.error is not None
            done[response.name] = done.get(response.name, 0) + 1
            for each in pending:
                each.remove(response.name)
        if not any(todo) and not any(pending):
            break
    assert done == {f"{i}": steps // num_names for i in range(num_names)}
    assert num_errors == 1


def test_messages_say_the_same_on_the_other_side() -> None:
    sent = Message(
        [
            ("ä", request(2, 3, prescale=0.1)),
            17,
            ("b", request(kind=Kind.JOIN)),
            ("c", request(4, kind=Kind.ALLTOALL, splits=(1, 3), dtypes=(torch.bfloat16,))),
            ("d", request(4, kind=Kind.BROADCAST, root=1, device="cuda", reduction=Reduction.ADASUM)),
        ],
        leaves=True,
        knobs=Knobs(5, None, False),
    )
    assert Message.decoded(sent.encoded()) == sent
    own = request(2)._replace(shapes=(torch.zeros(2, 3).shape,))
    [(_, other)] = Message.decoded(Message([("x", own)]).encoded()).requests
    assert other == own, "sizes are tuples"
