"""Parts, their servers and their order; what a server keeps. No communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.errors import MismatchError, UsageError, WorldError
from guozhuang.exchange.parameter_server import AsyncParameterServer, ParameterServer
from guozhuang.exchange.parameter_server.parts import cut
from guozhuang.exchange.parameter_server.protocol import Opcode, ServerMessage
from guozhuang.exchange.parameter_server.service import HeldParts, copy_into
from tests.drawing import examples

SIZES = st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from([1, 2, 4, 8, 16])), max_size=6)


@examples(60)
@given(SIZES, st.integers(1, 300_000), st.integers(1, 5))
def test_parts_cover_each_tensor_once(sizes: list[tuple[int, int]], part_bytes: int, num_servers: int) -> None:
    part_bytes = max(part_bytes, sum(n * w for n, w in sizes) // 2000)  # not millions of parts
    parts = cut(sizes, part_bytes, num_servers)
    assert [part.index for part in parts] == list(range(len(parts)))
    for tensor, (num_elements, width) in enumerate(sizes):
        end = 0
        for part in (p for p in parts if p.tensor == tensor):
            assert part.start == end and part.num_elements > 0
            assert part.num_bytes == part.num_elements * width <= max(part_bytes, width)
            end += part.num_elements
        assert end == num_elements


@examples(60)
@given(SIZES, st.integers(1, 300_000), st.integers(1, 5))
def test_no_server_has_more_than_a_part_too_much(
    sizes: list[tuple[int, int]], part_bytes: int, num_servers: int
) -> None:
    part_bytes = max(part_bytes, sum(n * w for n, w in sizes) // 2000)
    parts = cut(sizes, part_bytes, num_servers)
    loads = [sum(p.num_bytes for p in parts if p.server == s) for s in range(num_servers)]
    assert max(loads) - min(loads) <= max((p.num_bytes for p in parts), default=0)


def test_a_large_tensor_is_shared_evenly() -> None:
    parts = cut([(25 << 18, 4)], 4_000_000, 4)  # 26 MB: 7 parts, made 8
    assert len(parts) == 8
    assert [part.server for part in parts] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert len(cut([(1000, 4)], 4_000_000, 4)) == 1  # not worth it


def test_what_the_next_forward_needs_first_is_most_urgent() -> None:
    # Buckets are filled in the order of backward: what comes last is needed first.
    parts = cut([(10, 4), (20, 4)], 40, 2, last_is_first=True)
    by_urgency = sorted(parts, key=lambda part: part.urgency)
    assert [(p.tensor, p.start) for p in by_urgency] == [(1, 10), (1, 0), (0, 0)]
    assert [p.urgency for p in cut([(10, 4), (20, 4)], 40, 2)] == [0, 1, 2]


def test_a_message_comes_out_as_it_went_in() -> None:
    for opcode in Opcode:
        for has_payload in (False, True):
            message = ServerMessage(opcode, 3, 2**31 + 5, 2**40, torch.bfloat16, 2**33 + 1, has_payload)
            assert ServerMessage.decode(message.encode()) == message
    with pytest.raises(WorldError, match="no message to a parameter server"):
        ServerMessage.decode(torch.full((6,), 99))


@pytest.mark.parametrize("make", [ParameterServer, AsyncParameterServer])
def test_numbers_that_make_no_sense(make: Callable[..., Any]) -> None:
    for wrong in ({"part_bytes": 0}, {"servers": -1}):
        with pytest.raises(UsageError):
            make(**wrong)
    with pytest.raises(UsageError):
        AsyncParameterServer(max_staleness_steps=-1)


class Worker:
    """Asks a server's parts, and keeps what it answers."""

    def __init__(self, held: HeldParts, rank: int, num_elements: int = 2) -> None:
        self.held, self.rank, self.num_elements = held, rank, num_elements
        self.got: Tensor | None = None
        self.num_steps: dict[int, int] = {}

    def join(self, part: int = 0) -> int:
        """The last step of the slowest worker."""
        lowest = torch.zeros(1, dtype=torch.int64)
        message = ServerMessage(Opcode.JOIN, 0, part, 0, torch.int64, 1)
        self.held.take(self.rank, message, None, True, copy_into(lowest))
        return int(lowest)

    def ask(self, opcode: Opcode, values: list[float] | None, number: int = 0, part: int = 0) -> None:
        self.got = None
        if opcode is Opcode.DELTA:
            self.num_steps[part] = number = number or self.num_steps.get(part, 0) + 1
        elif opcode is Opcode.AGREE:
            self.num_steps[part] = 0
        into = torch.zeros(self.num_elements)
        payload = None if values is None else torch.tensor(values)
        reply = copy_into(into)

        def answered(answer: Tensor) -> Any:
            self.got = into
            return reply(answer)

        message = ServerMessage(opcode, 0, part, number, torch.float32, self.num_elements, values is not None)
        self.held.take(self.rank, message, payload, True, answered)


def answers(workers: list[Worker]) -> list[list[float] | None]:
    return [None if w.got is None else w.got.tolist() for w in workers]


def test_a_sum_is_made_in_the_order_of_ranks() -> None:
    large, values = 2.0**24, [[2.0**24, 0.0], [1.0, 0.0], [-(2.0**24), 0.0]]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        held = HeldParts(3)
        workers = [Worker(held, rank) for rank in range(3)]
        for step in range(2):
            for rank in order:
                workers[rank].ask(Opcode.SUM, values[rank], step)
            expected = (torch.tensor(large) + 1.0 - large).item()  # 0: the one is lost, in whatever order they come
            assert answers(workers) == [[expected, 0.0]] * 3


def test_a_sum_of_different_steps_or_sizes_is_refused() -> None:
    held = HeldParts(2)
    Worker(held, 0).ask(Opcode.SUM, [1.0, 1.0], 4)
    with pytest.raises(MismatchError, match=r"ranks 0 and 1 do not send the same part.*step 4.*step 5"):
        Worker(held, 1).ask(Opcode.SUM, [1.0, 1.0], 5)
    with pytest.raises(MismatchError, match=r"3 of torch\.float32"):
        Worker(held, 1, 3).ask(Opcode.SUM, [1.0, 1.0, 1.0], 4)


def test_a_sum_does_not_wait_for_who_has_left() -> None:
    held = HeldParts(3)
    Worker(held, 0).ask(Opcode.SUM, [1.0, 1.0], 4)
    assert held.oldest_wait() is not None and held.oldest_wait()[1:] == ([1, 2], "the sum of step 4 of part 0")
    with pytest.raises(WorldError, match="rank 2 has left, and others wait for the sum of step 4"):
        held.leave(2)


def seeded(num_workers: int, bound: int) -> tuple[HeldParts, list[Worker]]:
    held = HeldParts(num_workers)
    workers = [Worker(held, rank) for rank in range(num_workers)]
    for worker in workers:
        worker.ask(Opcode.SEED, [10.0, 20.0] if worker.rank == 0 else None, bound)
    assert answers(workers) == [[10.0, 20.0]] * num_workers
    return held, workers


def test_weights_move_at_once_and_the_bound_holds() -> None:
    held, (fast, slow) = seeded(2, 2)
    fast.ask(Opcode.DELTA, [1.0, 0.0])
    assert answers([fast]) == [[11.0, 20.0]]
    fast.ask(Opcode.DELTA, [1.0, 0.0])
    assert answers([fast]) == [[12.0, 20.0]]
    fast.ask(Opcode.DELTA, [1.0, 0.0])
    assert fast.got is None, "three steps ahead of a bound of two"
    assert held.oldest_wait() is not None and held.oldest_wait()[1] == [1]
    slow.ask(Opcode.DELTA, [0.0, 5.0])
    assert answers([fast, slow]) == [[13.0, 25.0]] * 2
    assert held.oldest_wait() is None


def test_without_staleness_all_get_the_same_in_every_step() -> None:
    _, workers = seeded(3, 0)
    for step in range(1, 3):
        for worker in workers[::-1]:
            assert step == 1 or worker.got is not None
            worker.ask(Opcode.DELTA, [1.0, float(worker.rank)])
        assert answers(workers) == [[10.0 + 3 * step, 20.0 + 3 * step]] * 3


def test_who_agrees_or_has_left_holds_nobody_and_agreed_weights_are_equal() -> None:
    held, (a, b, _) = seeded(3, 0)
    a.ask(Opcode.AGREE, None)
    b.ask(Opcode.DELTA, [1.0, 1.0])
    assert b.got is None
    held.leave(2)
    assert answers([a, b]) == [None, [11.0, 21.0]]
    b.ask(Opcode.AGREE, [0.5, 0.5])
    assert answers([a, b]) == [[11.5, 21.5]] * 2
    a.ask(Opcode.DELTA, [1.0, 1.0])  # from there both are active again
    assert a.got is None
    b.ask(Opcode.DELTA, [1.0, 1.0])
    assert answers([a, b]) == [[13.5, 23.5]] * 2
    with pytest.raises(MismatchError, match=r"3 of torch\.float32"):
        Worker(held, 0, 3).ask(Opcode.DELTA, [1.0, 1.0, 1.0])


def test_who_rests_holds_nobody_until_its_next_step() -> None:
    _, (a, b) = seeded(2, 0)
    b.ask(Opcode.DELTA, [1.0, 0.0])
    assert b.got is None
    a.ask(Opcode.REST, None)
    assert answers([a, b]) == [[11.0, 20.0]] * 2
    b.ask(Opcode.DELTA, [1.0, 0.0])
    assert answers([b]) == [[12.0, 20.0]]
    assert a.join() == 2
    a.ask(Opcode.DELTA, [0.0, 1.0], 3)  # from where b is: one step further than b now
    assert a.got is None
    b.ask(Opcode.DELTA, [1.0, 0.0])
    assert answers([a, b]) == [[13.0, 21.0]] * 2


def test_who_comes_back_from_a_rest_waits_for_nobody_in_a_circle() -> None:
    """Its first step comes to part 0 before, and to part 1 after the other one's next step; both go on all the same."""
    held = HeldParts(2)
    a, b = workers = [Worker(held, rank) for rank in range(2)]
    for part in range(2):
        for worker in workers:
            worker.ask(Opcode.SEED, [0.0, 0.0] if worker.rank == 0 else None, 0, part)
        a.ask(Opcode.REST, None, 0, part)
        for step in (1, 2, 3):
            b.ask(Opcode.DELTA, [1.0, 0.0], step, part)
            assert b.got is not None
    joined = a.join()
    assert joined == 3
    a.ask(Opcode.DELTA, [0.0, 1.0], joined + 1, 0)
    b.ask(Opcode.DELTA, [1.0, 0.0], 4, 0)
    assert answers(workers) == [[4.0, 1.0]] * 2
    b.ask(Opcode.DELTA, [1.0, 0.0], 4, 1)
    assert b.got is not None, "the other one does not count in this part yet"
    a.ask(Opcode.DELTA, [0.0, 1.0], joined + 1, 1)
    assert answers(workers) == [[4.0, 1.0], [4.0, 0.0]]
    for step in (5, 6):
        for part in range(2):
            for worker in workers:
                worker.ask(Opcode.DELTA, [1.0, 1.0], step, part)
            assert a.got is not None and b.got is not None, (step, part)


def test_weights_that_were_never_seeded() -> None:
    with pytest.raises(MismatchError, match="rank 1 asked for weights before they were seeded"):
        Worker(HeldParts(2), 1).ask(Opcode.DELTA, [1.0, 1.0])
