"""The simulation of a step, against closed forms and against rules that any result must keep."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.cost.cluster import GLOO, LOOPBACK, Cluster, LinkSpeed, Transport
from guozhuang.cost.collectives import CollectiveCost
from guozhuang.cost.sharing import CORES, Active, ActivePiece
from guozhuang.cost.simulate import WAITING, simulate
from guozhuang.cost.spread import Spread, simulate_spread
from guozhuang.cost.trace import Compute, Event, Start, Trace, Wait
from guozhuang.errors import UsageError
from tests.drawing import examples

RATE = 100.0  # bytes/s


def machine(num_nodes: int, per_node: int = 1, cores: int = 0, lanes: int = 1, **more: Any) -> Cluster:
    links = LinkSpeed(0.0, 0.0), LinkSpeed(0.0, RATE)
    return Cluster(num_nodes, per_node, cores, *links, Transport("gloo", lanes=lanes), **more)


def wire(operation: str, num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> CollectiveCost:
    """Every byte crosses the wire once, and costs no processor time."""
    return CollectiveCost(num_bytes / RATE, num_bytes, num_bytes, 0.0, 1)


def half_the_wire(operation: str, num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> CollectiveCost:
    return dataclasses.replace(wire(operation, num_bytes, ranks, cluster), nic_bytes=num_bytes / 2)


def busy(operation: str, num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> CollectiveCost:
    """A collective that keeps one core of each rank busy all the time."""
    return CollectiveCost(num_bytes / RATE, num_bytes, 0.0, num_bytes / RATE, 1)


def buckets(sizes: Sequence[int], pieces: Sequence[float], forward: float = 1.0, num_ranks: int = 2) -> Trace:
    """A bucket is full after each piece of backward; the step ends with the last of them."""
    ranks = tuple(range(num_ranks))
    events: list[Event] = [Compute("forward", forward)] if forward else []
    for call, (size, seconds) in enumerate(zip(sizes, pieces, strict=True)):
        events += [Compute("backward", seconds), Start(call, "all_reduce", size, ranks)]
    return Trace(0, num_ranks, tuple(events + [Wait(call) for call in range(len(sizes))]))


def step_s(trace: Trace, cluster: Cluster, costs: Any = wire, **more: Any) -> float:
    return simulate(trace, cluster, costs=costs, **more).step_s


def test_one_bucket_of_everything_is_exposed_whole() -> None:
    found = simulate(buckets([500], [3.0]), machine(2), costs=wire)
    assert found.step_s == pytest.approx(1 + 3 + 5)
    assert found.parts == pytest.approx(
        {"data": 0, "forward": 1, "backward": 3, "exchange": 0, "optimizer": 0, WAITING: 5}
    )
    assert found.bounds == pytest.approx((5, 9)) and found.sent_bytes == pytest.approx(500)


@pytest.mark.parametrize("size", [100, 1, 3])  # seconds of communication: 10, .1 and .3 of backward's
def test_many_small_buckets_leave_the_last_one_or_what_the_wire_cannot_carry(size: int) -> None:
    many, backward = 1000, 10.0
    t_comm, last = many * size / RATE, size / RATE
    found = step_s(buckets([size] * many, [backward / many] * many, forward=0.0), machine(2))
    assert found == pytest.approx(backward + max(0.0, t_comm - backward) + last, rel=2e-3)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 3)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from([wire, half_the_wire, busy]),
)
@examples(60)
def test_a_step_lies_between_its_bounds_and_is_what_brute_force_finds(
    pieces: list[tuple[int, float]], lanes: int, costs: Any
) -> None:
    sizes, seconds = [size for size, _ in pieces], [each for _, each in pieces]
    trace = buckets(sizes, seconds)
    found = simulate(trace, machine(2, lanes=lanes), costs=costs)
    assert found.bounds[0] - 1e-9 <= found.step_s <= found.bounds[1] + 1e-9 or lanes > 1
    if costs is busy or lanes == 1:  # flows that do not share anything: a queue with so many servers
        free, ready = [0.0] * lanes, 1.0
        for size, piece in pieces:
            ready += piece
            free.sort()
            free[0] = max(ready, free[0]) + size / RATE
        assert found.step_s == pytest.approx(max(ready, *free))
    both = [dataclasses.replace(trace, rank=rank) for rank in range(2)]
    assert simulate(both, machine(2, lanes=lanes), costs=costs).step_s == pytest.approx(found.step_s)


def test_two_lanes_share_the_wire_fairly() -> None:
    """500 and 100 bytes begin together: each has half of the wire until the small one ends after 2 s."""
    trace = buckets([500, 100], [1.0, 0.0])
    assert step_s(trace, machine(2, lanes=2)) == pytest.approx(1 + 1 + 6)
    stretched = simulate(trace, machine(2, lanes=2), costs=wire).stretched
    assert [stretched[2], stretched[4]] == pytest.approx([6, 2])
    # A collective that can use half of the wire at most leaves the other half to another one.
    assert step_s(trace, machine(2, lanes=2), half_the_wire) == pytest.approx(1 + 1 + 5)
    # With one lane bucket 1 waits until bucket 0 has ended.
    assert simulate(trace, machine(2), costs=wire).stretched[4] == pytest.approx(1)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (0, 1 + 4 + 1),
        (2, 1 + 4 + 1),
        (1, 1 + 6 + 1),
    ],  # one core: 1 s, then both at half speed for 4 s, then 2 s, then 1 s
)
def test_transport_takes_cores_from_backward(cores: int, expected: float) -> None:
    trace = buckets([200, 100], [1.0, 4.0], forward=0.0)
    assert step_s(trace, machine(2, cores=cores), busy) == pytest.approx(expected)


def test_who_receives_a_message_on_crowded_cores_waits_for_its_turn() -> None:
    """Measured: 0.2 to 0.5 ms of 2 ranks, 4.6 to 6.0 ms of 4 ranks on 2 cores."""
    for num_ranks, low, high in ((2, 0.0002, 0.0006), (4, 0.0046, 0.006)):
        host = Cluster(1, num_ranks, 2, LOOPBACK, LOOPBACK, GLOO)
        for size in (4 << 10, 64 << 10):
            call = Start(0, "all_reduce", size, tuple(range(num_ranks)), blocking=True)
            assert low < simulate(Trace(0, num_ranks, (call,)), host).step_s < high


def test_gloo_adds_numbers_of_16_bits_slowly() -> None:
    host = Cluster(1, 2, 2, LOOPBACK, LOOPBACK, GLOO)
    times = [
        simulate(Trace(0, 2, (Start(0, operation, 8_000_000, (0, 1), True, element_bytes=size),)), host).step_s
        for operation in ("all_reduce", "all_gather")
        for size in (4, 2)
    ]
    assert times[1] - times[0] == pytest.approx(4e6 * 2e-9) and times[2] == times[3]


def test_ranks_of_a_host_share_its_cores() -> None:
    trace = Trace(0, 4, (Compute("forward", 1.0),))
    assert step_s(trace, machine(1, 4, cores=2)) == pytest.approx(2)
    assert step_s(trace, machine(4, 1, cores=2)) == pytest.approx(1)
    assert step_s(trace, machine(4, 1, cores=2, shares_host=True)) == pytest.approx(2)
    crowding = (1.0, 1.2, 2.0, 2.6)
    for num_ranks, factor in enumerate(crowding, 1):
        alone = Trace(0, num_ranks, (Compute("forward", 1.0),))
        one_by_one = [dataclasses.replace(alone, rank=rank) for rank in range(num_ranks)]
        for traces in (alone, one_by_one):
            found = simulate(traces, machine(1, num_ranks, cores=2), costs=wire, crowding=crowding)
            assert found.step_s == pytest.approx(factor)
            assert found.processor_s == pytest.approx(1)


def test_a_late_rank_is_waited_for() -> None:
    early, late = buckets([100], [1.0]), buckets([100], [4.0])
    found = simulate([early, dataclasses.replace(late, rank=1)], machine(2), costs=wire)
    assert found.step_s == pytest.approx(1 + 4 + 1)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 4), (4, 6)])
@pytest.mark.parametrize("message", [0, 25])
def test_a_pipeline_takes_the_textbooks_time(num_stages: int, num_microbatches: int, message: int) -> None:
    forward, backward = 1.0, 2.0
    traces = []
    for stage in range(num_stages):
        call = itertools.count()
        events: list[Event] = []
        for part, seconds, before, after in (
            ("forward", forward, stage - 1, stage + 1),
            ("backward", backward, stage + 1, stage - 1),
        ):
            for _ in range(num_microbatches):
                if 0 <= before < num_stages:
                    events.append(Start(next(call), "recv", message, (before, stage), blocking=True))
                events.append(Compute(part, seconds))
                if 0 <= after < num_stages:
                    events.append(Start(next(call), "send", message, (stage, after)))
        events.append(Start(next(call), "barrier", 0, tuple(range(num_stages)), blocking=True))
        traces.append(Trace(stage, num_stages, tuple(events)))
    found = simulate(traces, machine(num_stages), costs=wire)
    hops = 2 * (num_stages - 1) * message / RATE
    assert found.step_s == pytest.approx((num_microbatches + num_stages - 1) * (forward + backward) + hops)


def test_messages_of_a_connection_arrive_one_after_another() -> None:
    """The second rank works for 1 s on the first of two messages while the second one is on its way."""
    sender = Trace(0, 2, tuple(Start(call, "send", 100, (0, 1)) for call in range(2)))
    events = [(Start(call, "recv", 100, (0, 1), blocking=True), Compute("forward", 1.0)) for call in range(2)]
    receiver = Trace(1, 2, tuple(itertools.chain.from_iterable(events)))
    barrier = Start(9, "barrier", 0, (0, 1), blocking=True)
    both = [dataclasses.replace(each, events=(*each.events, barrier)) for each in (sender, receiver)]
    assert simulate(both, machine(2), costs=wire).step_s == pytest.approx(3.0)


def test_work_and_communication_of_other_threads_and_of_the_next_step() -> None:
    """A background thread encodes, exchanges and decodes; the next step waits for it."""
    both = (0, 1)
    events = (
        Wait(2),  # of the step before
        Compute("forward", 1.0),
        Start(0, "hand_over", 0, (0,)),
        Wait(0, thread=1),
        Compute("exchange", 1.0, thread=1),
        Start(1, "all_reduce", 300, both, blocking=True, thread=1),
        Start(2, "hand_over", 0, (0,), thread=1),
        Compute("backward", 2.0),
    )
    trace = Trace(0, 2, events)
    assert step_s(trace, machine(2)) == pytest.approx(1 + 1 + 3)  # forward, then the background
    assert step_s(trace, machine(2, 1, cores=1)) == pytest.approx(1 + 2 + 3)  # it computes beside backward
    assert step_s(Trace(0, 2, events[1:]), machine(2), num_repetitions=9) == pytest.approx(3)  # nobody waits


def test_steps_of_a_period_are_divided() -> None:
    events: tuple[Event, ...] = (*[Compute("forward", 1.0)] * 4, Start(0, "all_reduce", 200, (0, 1), blocking=True))
    assert step_s(Trace(0, 2, events, num_steps=4), machine(2)) == pytest.approx(1.5)


def test_the_recorded_table_of_four_hosts_on_two_cores() -> None:
    """Samples/s of ``none`` and ``torch-ddp`` in the first sweep of benchmarks/README.md, ``links.py``: 4 hosts, 2 cores.

    Nothing is fitted: the step of ``none`` and the gradients are given, and gloo's processor time per byte is that of one row's
    processor column. Backward is three fifths of a step; the embedding's gradient, the last one, has a bucket of its own.
    """
    megabytes = {"tiny": (15.6, 1.9), "mini": (31.3, 13.6), "small": (62.5, 52.8)}  # of the embedding, of the rest
    recorded = [
        (10e9, "tiny", 332.7, 160.6), (10e9, "mini", 67.8, 48.9), (10e9, "small", 20.6, 15.7),
        (1e9, "tiny", 326.2, 90.3), (1e9, "mini", 71.7, 28.3), (1e9, "small", 19.9, 10.9), (1e8, "tiny", 309.2, 13.6),
    ]  # fmt: skip
    errors, sums = [], []
    for rate, model, none, expected in recorded:
        work, (embedding, rest) = 32 / none / 2, megabytes[model]
        sizes = [1.05, *[26.2] * 4]
        sizes = [min(size, max(0.0, rest - sum(sizes[:at]))) for at, size in enumerate(sizes)] + [embedding]
        pieces = [0.55 * work * size / rest for size in sizes[:-1]] + [0.0]
        trace = buckets([int(size * 1e6) for size in sizes], pieces, 0.3 * work, 4)
        trace = dataclasses.replace(trace, events=(*trace.events, Compute("optimizer", 0.15 * work)))
        link = LinkSpeed(1e-4, rate / 8 * 0.957)
        hosts = Cluster(
            4, 1, 2, LOOPBACK, link, dataclasses.replace(GLOO, processor_s_per_message=0.0), shares_host=True
        )
        errors.append(simulate(trace, hosts).step_s * expected / 32 - 1)
        wire = 1.5 * (embedding + rest) * 1e6
        sums.append((32 / none + 2 * wire * 0.97e-9 + wire * 8 / rate) * expected / 32 - 1)
    assert statistics.mean(map(abs, sums)) == pytest.approx(0.059, abs=0.01)  # nothing overlaps: the mark
    assert statistics.mean(map(abs, errors)) < 0.057, errors


def test_calls_that_do_not_match_are_named() -> None:
    one = Trace(0, 2, (Start(0, "all_reduce", 8, (0, 1), blocking=True),))
    other = Trace(1, 2, (Compute("forward", 1.0),))
    with pytest.raises(UsageError, match="ranks 0 wait"):
        simulate([one, other], machine(2), costs=wire)
    with pytest.raises(UsageError, match="has 4 ranks"):
        simulate(one, machine(4), costs=wire)


def test_ranks_wait_for_the_slowest() -> None:
    spread = Spread((0.9, 1.0, 1.1))
    expected = [
        sum(max(draw) for draw in itertools.product(spread.observed, repeat=count)) / 3**count for count in (1, 2, 5)
    ]
    assert [spread.slowest(n, 20000) for n in (1, 2, 5)] == pytest.approx(expected, rel=2e-3)
    assert Spread(spread.observed, correlation=1.0).slowest(64, 5000) == pytest.approx(1.0, rel=5e-3)
    assert Spread((1.0,), slow=((1, 2.0),)).slowest(4) == pytest.approx(2.0)
    assert spread.slowest(64, 300, averaged_steps=16) - 1 < (spread.slowest(64, 300) - 1) / 2


@pytest.mark.parametrize("costs", [wire, busy])
def test_a_spread_of_nothing_changes_nothing_and_one_of_something_is_the_slowest(costs: Any) -> None:
    trace, cluster = buckets([30, 70, 50], [1.0, 0.2, 2.0], num_ranks=4), machine(4, cores=1, lanes=2)
    if costs is wire:  # shared wires are shared in the simulation of one rank
        trace = buckets([30, 70, 50], [1.0, 2.0, 2.0], num_ranks=4)
    found = simulate(trace, cluster, costs=costs)
    assert simulate_spread(trace, cluster, Spread((1.0,)), costs=costs) == pytest.approx(found.step_s)
    spread = Spread((0.8, 1.0, 1.2))
    slower = simulate_spread(trace, cluster, spread, costs=costs, num_repetitions=300)
    computing = found.step_s - found.parts[WAITING]
    assert slower == pytest.approx(computing * spread.slowest(4, 3000) + found.parts[WAITING], rel=0.02)


def test_a_spread_of_groups_waits_within_them() -> None:
    spread, cluster = Spread((1.0,), slow=((5, 3.0),)), machine(8)
    for ranks, slow in (((0, 1), {4, 5}), ((0, 4), {1, 5}), ((0, 2), {5, 7})):
        trace = Trace(0, 8, (Compute("forward", 1.0), Start(0, "all_reduce", 0, ranks, blocking=True)))
        assert simulate_spread(trace, cluster, spread, costs=wire) == pytest.approx(3.0), slow
    with pytest.raises(UsageError, match="equal distances"):
        simulate_spread(Trace(0, 8, (Start(0, "all_reduce", 0, (0, 1, 3)),)), cluster, spread, costs=wire)


def test_work_waits_while_transfers_take_all_cores() -> None:
    """Two transfers want all cores and more: the rate of the work is exactly zero meanwhile, and nothing divides by it."""
    ended: list[str] = []
    active = Active(1.0, ())
    for name in ("first", "second"):
        active.add(ActivePiece(1.0, {(CORES, 0): (3.0, 1.0)}, functools.partial(ended.append, name)))
    work = ActivePiece(0.5, {}, lambda: ended.append("work"), host=0, threads=1.0)
    active.add(work)
    passed, rates = 0.0, list[float]()
    while active:
        passed += active.pass_time()
        rates.append(work.rate)
        for do in active.take_ended():
            do()
    assert rates[0] == 0.0 and ended == ["first", "second", "work"] and passed == pytest.approx(3.0 + 0.5)
