"""Rounds among made-up ranks: threads that meet in memory. What they decide is the same on all of them, and right."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from guozhuang.gradients.named.requests import Message, NamedRequest
from guozhuang.gradients.named.rounds import RoundOutcome, Rounds
from guozhuang.gradients.named.settings import Knobs
from guozhuang.gradients.named.submission import Kind, Reduction


class Meeting:
    """Carries the words of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.said: list[object] = [None] * size
        self.num_exchanges = 0


class SpokenWords:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def least(self, vector: Tensor) -> None:
        all_said = self._say(vector.numpy().copy())
        assert len({len(each) for each in all_said}) == 1, "ranks know different numbers of slots"  # type: ignore[arg-type]
        vector.copy_(torch.from_numpy(np.min(np.stack(all_said), axis=0)))

    def exchange(self, message: bytes) -> list[bytes]:
        if self.rank == 0:
            self.meeting.num_exchanges += 1
        return self._say(message)  # type: ignore[return-value]

    def _say(self, what: object) -> list[object]:
        self.meeting.said[self.rank] = what
        self.meeting.barrier.wait()
        said = list(self.meeting.said)
        self.meeting.barrier.wait()
        return said


class World:
    """Ranks that hold rounds together."""

    def __init__(self, size: int, capacity: int = 1024) -> None:
        self.meeting = Meeting(size)
        names = [10 * rank for rank in range(size)]
        self.ranks = [Rounds(SpokenWords(self.meeting, rank), rank, names, capacity) for rank in range(size)]
        self.pool = ThreadPoolExecutor(size)

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


def test_a_name_is_ready_when_all_ranks_asked_and_known_when_it_came_again(make: Make) -> None:
    world = make(2)
    a, b = ("a", request(3)), ("b", request(4))
    for _ in range(2):
        assert names(world.hold([a, b], [b])) == ["b"]
        assert names(world.hold([], [a])) == ["a"]
    exchanges = world.meeting.num_exchanges
    for _ in range(3):
        assert names(world.hold([a], [b])) == []
        assert names(world.hold([b], [a])) == ["b", "a"], "by slot: b was agreed on first"
    assert world.meeting.num_exchanges == exchanges == 4
    assert [each.num_full_rounds for each in world.ranks] == [4, 4]
    assert [each.num_rounds for each in world.ranks] == [10, 10]


def test_names_that_come_once_push_nothing_out(make: Make) -> None:
    world = make(2, capacity=2)
    lasting = [("a", request(3)), ("b", request(4))]
    for _ in range(2):
        assert names(world.hold(lasting, lasting)) == ["a", "b"]
    for step in range(3):
        once = [(f"{step}.{i}", request(1)) for i in range(2000)]
        assert len(names(world.hold(once, once))) == 2000
        exchanges = world.meeting.num_exchanges
        assert names(world.hold(lasting, lasting)) == ["a", "b"]
        assert world.meeting.num_exchanges == exchanges
    rounds = world.ranks[0]
    assert len(rounds._seen) == 4096 and len(rounds._cache) == 2


def test_what_changed_is_asked_anew_by_all(make: Make) -> None:
    world = make(3)
    old, new = ("x", request(3)), ("x", request(4))
    for _ in range(2):
        assert names(world.hold([old], [old], [old])) == ["x"]
    assert names(world.hold([old], [new], [])) == [], "rank 0 counted on what rank 1 shows to be out of date"
    [response] = world.hold([], [], [new]).responses
    assert response.error is not None and "rank 0 has shape [3], rank 10 has shape [4]" in response.error
    assert names(world.hold([new], [new], [new])) == ["x"], "an error is not remembered, but the name is"
    exchanges = world.meeting.num_exchanges
    assert names(world.hold([new], [new], [new])) == ["x"]
    assert world.meeting.num_exchanges == exchanges


def test_rows_of_a_gather_are_remembered_by_rank(make: Make) -> None:
    world = make(2)
    one, two = (("x", request(rows, 2, kind=Kind.ALLGATHER)) for rows in (1, 5))
    for _ in range(3):
        [response] = world.hold([one], [two]).responses
        assert [response.requests[rank].shapes[0][0] for rank in (0, 1)] == [1, 5]
    assert world.meeting.num_exchanges == 2
    [response] = world.hold([one], [one]).responses
    assert [response.requests[rank].shapes[0][0] for rank in (0, 1)] == [1, 1]
    assert world.meeting.num_exchanges == 3


def test_what_is_never_remembered(make: Make) -> None:
    world = make(2)
    for kind in (Kind.BARRIER, Kind.ALLTOALL):
        for _ in range(3):
            one = ("x", request(2, kind=kind))
            assert names(world.hold([one], [one])) == ["x"]
    assert world.meeting.num_exchanges == 6


def test_the_longest_unused_name_is_forgotten_also_while_it_is_pending(make: Make) -> None:
    world = make(2, capacity=2)
    a, b, c = (("abc"[i], request(i)) for i in range(3))
    for _ in range(2):
        assert names(world.hold([a, b], [a, b])) == ["a", "b"]
    assert names(world.hold([a], [])) == [], "rank 0 counts on the slot of a"
    assert names(world.hold([c], [c])) == ["c"]
    assert names(world.hold([b, c], [b, c])) == ["b", "c"]
    exchanges = world.meeting.num_exchanges
    assert names(world.hold([b, c], [b, c])) == ["c", "b"], "c took the slot of a"
    assert world.meeting.num_exchanges == exchanges + 1, "a is sent"
    assert names(world.hold([], [a])) == ["a"]
    assert world.meeting.num_exchanges == exchanges + 2


def test_joined_ranks_are_ready_for_everything(make: Make) -> None:
    world = make(3)
    x, join = ("x", request(3)), ("join", request(kind=Kind.JOIN))
    for _ in range(2):
        assert names(world.hold([x], [x], [x])) == ["x"]
    assert names(world.hold([x], [join], [x])) == [], "rank 1 joins in this round; from the next one it is ready"
    assert world.ranks[1].has_joined and not world.ranks[0].has_joined
    assert names(world.hold([], [], [])) == ["x"]
    assert names(world.hold([("new", request(2))], [], [("new", request(2))])) == ["new"]
    [response] = world.hold(
        [("g", request(2, kind=Kind.ALLGATHER))], [], [("g", request(2, kind=Kind.ALLGATHER))]
    ).responses
    assert response.error == "Allgather is not supported with Join at this time. rank 10 joined before 'g'"
    outcome = world.hold([join], [], [])
    assert outcome.last_joined is None and not outcome.responses
    outcome = world.hold([], [], [join, ("alone", request(1)), x])
    assert outcome.last_joined is None and names(outcome) == ["x", "alone"]
    outcome = world.hold([], [], [])
    assert outcome.last_joined == 2 and names(outcome) == ["join"]
    assert not any(each.joined for each in world.ranks)
    assert names(world.hold([x], [x], [])) == [], "all that is over"
    assert names(world.hold([], [], [x])) == ["x"]


def test_what_comes_while_a_join_ends(make: Make) -> None:
    world = make(2)
    x, y, join = ("x", request(3)), ("y", request(3)), ("join", request(kind=Kind.JOIN))
    for _ in range(2):
        assert names(world.hold([x, y], [x, y])) == ["x", "y"]
    assert names(world.hold([join, x], [join])) == [], "rank 1 was not yet ready for x"
    other = ("y", request(4))
    outcome = world.hold([other, ("new", request(1))], [y])  # from other threads
    assert [each.name for each in outcome.responses] == ["x", "y", "new", "join"] and outcome.last_joined == 1
    assert outcome.responses[1].error is not None and "[4]" in outcome.responses[1].error
    assert names(world.hold([x, y], [x, y])) == ["x", "y"]


def test_who_leaves_and_new_settings_are_heard_by_all_in_one_round(make: Make) -> None:
    world = make(2)
    x, knobs = ("x", request(3)), Knobs(5, None, False)
    for _ in range(2):
        assert names(world.hold([x], [x])) == ["x"]
    outcome = world.hold([x], [x], knobs=(knobs, None))
    assert outcome.knobs == knobs and names(outcome) == ["x"]
    for _ in range(2):
        exchanges = world.meeting.num_exchanges
        assert names(world.hold([x], [x])) == ["x"] and world.meeting.num_exchanges == exchanges + 1, "no cache"
    assert names(world.hold([], [], knobs=(Knobs(5, 2.0, True), None))) == []
    for _ in range(2):
        world.hold([x], [x])
    exchanges = world.meeting.num_exchanges
    assert names(world.hold([x], [x])) == ["x"] and world.meeting.num_exchanges == exchanges
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
            ("b", request(kind=Kind.JOIN)),
            ("c", request(4, kind=Kind.ALLTOALL, splits=(1, 3), dtypes=(torch.bfloat16,))),
            ("d", request(4, kind=Kind.BROADCAST, root=1, device="cuda", reduction=Reduction.ADASUM)),
        ],
        leaves=True,
        knobs=(5, None, False),
    )
    assert Message.decoded(sent.encoded()) == sent
    own = request(2)._replace(shapes=(torch.zeros(2, 3).shape,))
    [(_, other)] = Message.decoded(Message([("x", own)]).encoded()).requests
    assert other == own, "sizes are tuples"
