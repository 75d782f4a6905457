"""Profiles and predictions that are made up, so that the right answers are known."""

import math
from dataclasses import asdict, replace

import pytest

from guozhuang.cost.cluster import Cluster, LinkSpeed, Transport
from guozhuang.cost.hardware import DEVICES
from guozhuang.cost.prediction.interval import CHECK, COMPARE, half_width
from guozhuang.cost.prediction.predict import SLOWEST, WAITING, machine_of, predict
from guozhuang.cost.prediction.profile import (
    BatchTime,
    CollectiveTime,
    Crowding,
    GradientTime,
    Profile,
    scaled,
    trace_name,
)
from guozhuang.cost.trace import Compute, Start, Trace, Wait
from guozhuang.errors import UsageError
from guozhuang.lab.contender import contenders
from guozhuang.lab.predict.arguments import numbers
from guozhuang.lab.predict.curves import curve
from guozhuang.lab.predict.narrowing import advice, as_measured
from guozhuang.lab.predict.profile import Recording, Wanted
from guozhuang.records import build, plain

TRACE = Trace(0, 2, (Compute("backward", 0.2), Start(0, "all_reduce", 64, (0, 1)), Wait(0), Compute("optimizer", 0.1)))


def parts(forward: float, optimizer: float = 0.1) -> dict[str, float]:
    return {"data": 0.0, "forward": forward, "backward": 2 * forward, "optimizer": optimizer}


PROFILE = Profile(
    workload="w",
    conditions={},
    device="cpu",
    num_threads=1,
    num_cores=2,
    batch_size=8,
    batches=(BatchTime(4, parts(0.05), 140, 9), BatchTime(8, parts(0.1), 180, 9), BatchTime(16, parts(0.2), 260, 9)),
    gradients=(GradientTime("b", 8, 0.01), GradientTime("a", 4, 0.1), GradientTime("frozen", 4, float("inf"))),
    crowding=(
        Crowding(1, 1, parts(0.1), ((0.4, 0.4),)),
        Crowding(1, 2, parts(0.06, 0.05), ((0.23,),)),
        Crowding(2, 1, parts(0.12), ((0.46,), (0.46,))),
        Crowding(4, 1, parts(0.24, 0.2), ((0.9,),) * 4),
    ),
    traces={trace_name("ddp", 2, 1, "shm"): (TRACE,)},
)


def test_a_profile_survives_json() -> None:
    assert build(Profile, plain(asdict(PROFILE))) == PROFILE  # with the infinite time of a gradient that never came


@pytest.mark.parametrize(
    ("batch_size", "forward_s", "memory"), [(8, 0.1, 180), (4, 0.05, 140), (32, 0.4, 420), (6, 0.075, 160)]
)
def test_other_batch_sizes_lie_on_a_line(batch_size: int, forward_s: float, memory: float) -> None:
    found = PROFILE.parts(batch_size)
    assert {part: found[part] for part in parts(0.0)} == pytest.approx(parts(forward_s))
    assert PROFILE.memory_bytes(batch_size) == pytest.approx(memory)


@pytest.mark.parametrize(
    ("num_ranks", "num_threads", "forward"),
    [(1, 1, 1.0), (2, 1, 1.2), (3, 1, 1.8), (4, 1, 2.4), (8, 1, 4.8), (1, 2, 0.6), (2, 2, 1.2)],
)
def test_crowding_is_measured_between_and_takes_turns_beyond(num_ranks: int, num_threads: int, forward: float) -> None:
    assert PROFILE.crowd(num_ranks, num_threads)["forward"] == pytest.approx(forward)


def test_threads_that_were_not_measured_are_refused() -> None:
    with pytest.raises(UsageError, match="no process of 3 threads, only of 1, 2"):
        PROFILE.crowd(2, 3)


def test_only_work_is_scaled() -> None:
    found = scaled(TRACE, {"backward": 1.5})
    assert found.events == (Compute("backward", 0.2 * 1.5), *TRACE.events[1:])


def test_gradients_that_never_come_are_not_sent() -> None:
    assert PROFILE.gradient_bytes == 12


# Every rank has cores of its own, and the network alone costs time: 8 MB of gradients at 80 MB/s.
GLOO = Transport("gloo", lanes=2)
APART = Cluster(4, 1, 2, LinkSpeed(0.0, 1e12), LinkSpeed(1e-6, 80e6), GLOO, name="4x2cores")
STEADY = replace(
    PROFILE,
    gradients=(GradientTime("last", 4 << 20, 0.1), GradientTime("first", 4 << 20, 0.2)),
    crowding=tuple(
        replace(each, steps=tuple((sum(each.parts.values()),) * 9 for _ in each.steps)) for each in PROFILE.crowding
    ),
    traces={},
)


def test_ranks_that_exchange_nothing_take_as_long_as_one() -> None:
    found = predict(STEADY, APART, "none", 4)
    assert found.step_s == pytest.approx(sum(parts(0.1).values()))
    assert found.perfect_s == pytest.approx(found.step_s) and found.efficiency == pytest.approx(1)
    assert found.samples_per_s == pytest.approx(4 * 8 / found.step_s)
    assert found.widened == ()  # the links carry nothing


def test_what_backward_does_not_hide_is_waited_for() -> None:
    wire_s = 2 * 3 / 4 * (8 << 20) / 80e6  # of a ring of 4
    found = predict(STEADY, APART, "ddp", 4)
    low, high = found.bounds
    assert low <= found.step_s <= high and "links as described, not as measured" in found.widened
    assert found.parts[WAITING] == pytest.approx(wire_s / 2, rel=0.01)  # the second bucket; backward hides the first
    assert found.largest_term in found.parts and sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.interval_s[0] < found.step_s < found.interval_s[1]
    one_bucket = predict(STEADY, APART, "ddp", 4, cap_bytes=1 << 30)
    assert one_bucket.step_s >= found.step_s


def test_batches_are_other_points_of_a_line_and_widen_outside() -> None:
    inside, outside = predict(STEADY, APART, "none", 2, 16), predict(STEADY, APART, "none", 2, 64)
    assert inside.step_s == pytest.approx(sum(parts(0.2).values()))
    assert outside.step_s == pytest.approx(sum(parts(0.8).values()))
    assert any("64 samples a step" in why for why in outside.widened)

    def width(found: object) -> float:
        low, high = found.interval_s  # type: ignore[attr-defined]
        return float(high / low)

    assert width(outside) > width(inside) > 1


@pytest.mark.parametrize(("strategy", "grows"), [("tensor", True), ("sharded", False)])
def test_activations_grow_with_the_batch_and_gradients_do_not(strategy: str, grows: bool) -> None:
    everyone = (0, 1, 2, 3)
    trace = Trace(0, 4, (Start(0, "all_reduce", 20_000_000, everyone, True), Start(1, "barrier", 0, everyone, True)))
    profile = replace(STEADY, traces={trace_name(strategy, 4, APART.num_nodes, APART.transport.name): (trace,)})
    small, large = (predict(profile, APART, strategy, 4, batch).step_s for batch in (8, 16))
    assert large / small == pytest.approx(2 if grows else 1, rel=0.01)


def test_ranks_on_one_machine_are_as_crowded_as_was_measured() -> None:
    here = machine_of(STEADY, "shm")
    measured = next(each for each in STEADY.crowding if each.num_ranks == 4)
    assert predict(STEADY, here, "none", 4).step_s == pytest.approx(measured.step_s)
    found = predict(STEADY, here, "none", 8)
    assert found.step_s == pytest.approx(2 * measured.step_s)
    assert any("8 ranks on one machine, measured up to 4" in why for why in found.widened)


def test_one_process_with_all_cores_trains_on_all_samples() -> None:
    found = predict(STEADY, machine_of(STEADY, "shm"), "single", 2, num_threads=2)
    assert found.step_s == pytest.approx(0.06 * 2 * 3 + 0.05)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "batch", "cluster", "message"),
    [
        ("ddp", 0, 8, APART, "at least one rank"),
        ("ddp", 2, 0, APART, "at least one sample"),
        ("ddp", 8, 8, APART, "8 ranks are more than 4x2cores has"),
        ("sharded", 4, 8, APART, "no trace of sharded on 4 ranks of 4 nodes over gloo"),
        (
            "ddp",
            2,
            8,
            replace(APART, device=DEVICES["A100-80"]),
            "was measured on cpu, and the cluster computes on A100",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    strategy: str, num_ranks: int, batch: int, cluster: Cluster, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        predict(STEADY, cluster, strategy, num_ranks, batch)


def test_the_machine_of_a_profile_has_its_collectives() -> None:
    times = tuple(
        CollectiveTime("gloo", 2, size, 1e-4 + size * 2e-9, 5e-5 + size * 1e-9)
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)
    )
    found = machine_of(replace(STEADY, collectives=times), "gloo")
    assert found.transport.processor_s_per_byte == pytest.approx(1e-9, rel=0.1)
    assert len(found.inside.table) == 4 and found.cores_per_node == 2


@pytest.mark.parametrize(("text", "found"), [("1,2,4", (1, 2, 4)), ("2-4", (2, 3, 4)), ("8, 1-2,2", (1, 2, 8))])
def test_numbers_of_ranks(text: str, found: tuple[int, ...]) -> None:
    assert numbers(text) == found


@pytest.mark.parametrize("text", ["0", "2-1", "two", "", "1,-2", "9999999"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        numbers(text)


def test_curves_follow_the_laws() -> None:
    def step(num_ranks: int, batch: int) -> object:
        return predict(STEADY, APART, "ddp" if num_ranks > 1 else "none", num_ranks, batch)

    found = curve("ddp", (1, 2, 4), 8, 16, step, samples=1e6, price=2.0, noise_scale=64.0)  # type: ignore[arg-type]
    one, two, four = found.points
    assert one.weak_efficiency == pytest.approx(1) and four.weak_efficiency < two.weak_efficiency < 1
    assert two.strong_s is not None and two.serial_share is not None
    assert two.amdahl == pytest.approx(one.strong_s / two.strong_s)  # type: ignore[operator]
    assert two.amdahl == pytest.approx(two.gustafson)  # the same work, by the share of the time on two
    assert four.smallest_batches[1] is not None and four.smallest_batches[1] > (four.smallest_batches[0] or 0)
    batch = four.smallest_batches[0]
    assert batch is not None and step(4, batch).efficiency >= 0.8 > step(4, batch - 1).efficiency  # type: ignore[attr-defined]
    assert four.seconds == pytest.approx(1e6 / 32 * four.weak_s)
    assert four.money == pytest.approx(four.seconds / 3600 * 4 * 2)
    assert four.seconds_to_loss == pytest.approx((1 + 64 / 32) * four.weak_s)


def test_a_profile_is_extended_in_the_time_of_its_own_machine() -> None:
    asked = Wanted(((1, 1), (8, 1)), ("shm",), (recording("ddp", 2), recording("sharded", 2)))
    lacking = asked.beside(PROFILE)
    assert lacking.crowds == ((1, 1), (8, 1)) and lacking.backends == ("shm",)
    assert [each.name for each in lacking.recordings] == ["sharded on 2 ranks of 1 over shm"]
    # When the rest was measured the machine was half as fast.
    rest = replace(
        PROFILE,
        crowding=(Crowding(1, 1, parts(0.2, 0.2), ((0.8,),)), Crowding(8, 1, parts(0.9, 0.9), ((3.6,),) * 8)),
        traces={"sharded on 2 ranks of 1 over shm": (TRACE,)},
        collectives=(CollectiveTime("shm", 2, 4096, 1e-5, 1e-5),),
        created="later",
    )
    found = PROFILE.extended(rest)
    assert found.crowd(8, 1)["forward"] == pytest.approx(4.5)
    assert found.traces["sharded on 2 ranks of 1 over shm"][0].events[0] == Compute("backward", 0.1)
    assert found.traces.keys() > PROFILE.traces.keys() and found.collectives == rest.collectives
    assert asked.beside(found) == Wanted((), (), ())
    assert found.extended(replace(rest, created="last")).created == ", extended last"


def recording(name: str, num_ranks: int) -> Recording:
    return Recording(contenders(name, None, 1, True, num_ranks)[0], num_ranks, 1, "shm", 2)


def gossip(num_ranks: int) -> Trace:
    at = 1 % num_ranks
    sent = (Start(0, "send", 8 << 20, (0, at)), Start(1, "recv", 8 << 20, (at, 0)), Wait(0), Wait(1))
    return Trace(0, num_ranks, (Compute("backward", 0.2), *sent, Compute("optimizer", 0.1)))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_messages_between_two_ranks_are_waited_for_on_any_number_of_ranks(num_ranks: int) -> None:
    traces = {trace_name("decentralized", num_ranks, num_ranks, "gloo"): (gossip(num_ranks),)}
    cluster = replace(APART, num_nodes=num_ranks)
    steady = predict(replace(STEADY, traces=traces), cluster, "decentralized", num_ranks)
    assert steady.step_s == pytest.approx(0.3 + (8 << 20) / 80e6, rel=0.02)
    uneven = replace(STEADY.crowding[0], steps=((0.3, 0.5) * 9,))
    found = predict(
        replace(STEADY, traces=traces, crowding=(uneven, *STEADY.crowding[1:])), cluster, "decentralized", num_ranks
    )
    assert found.parts[SLOWEST] > 0.01 and found.step_s > steady.step_s


@pytest.mark.parametrize("strategy", ["none", "ddp", "pipeline"])
def test_bounds_hold_the_step(strategy: str) -> None:
    first = (Compute("forward", 0.1), Start(0, "send", 1 << 20, (0, 1)), Start(1, "recv", 1 << 20, (1, 0)), Wait(1))
    last = (Start(0, "recv", 1 << 20, (0, 1)), Wait(0), Compute("forward", 0.3), Start(1, "send", 1 << 20, (1, 0)))
    stages = (Trace(0, 2, (*first, Compute("backward", 0.2))), Trace(1, 2, (*last, Wait(1))))
    profile = replace(STEADY, traces={trace_name("pipeline", 2, 1, "shm"): stages})
    found = predict(profile, machine_of(STEADY, "shm"), strategy, 2)
    assert 0 < found.bounds[0] <= found.step_s <= found.bounds[1]
    if strategy == "none":
        assert found.bounds == pytest.approx((found.step_s, found.step_s))
    if strategy == "pipeline":
        assert found.bounds[0] == pytest.approx(0.3) and found.bounds[1] == pytest.approx(0.6, rel=0.01)


def test_the_interval_follows_what_is_known_and_the_advice_narrows_it() -> None:
    described, busy = predict(STEADY, APART, "ddp", 4), predict(replace(STEADY, busy=0.5), APART, "ddp", 4)
    assert half_width(busy.doubts) > half_width(described.doubts) > half_width(described.doubts, CHECK)
    assert described.interval_s[1] / described.step_s == pytest.approx(math.exp(half_width(described.doubts)))
    links = advice(described, {CHECK: "check", "profile": "profile"})
    assert links is not None and links.command == "check"
    assert described.interval_s[0] < links.interval_s[0] < links.interval_s[1] < described.interval_s[1]
    assert advice(described, {}) is None and advice(predict(STEADY, APART, "none", 1), {CHECK: "check"}) is None
    told = advice(described, {CHECK: "check", COMPARE: "compare"})
    assert told is not None and told.command == "compare"
    found = as_measured(described, [0.5, 0.51, 0.49])
    assert found.step_s == 0.5 and sum(found.parts.values()) == pytest.approx(0.5)
    assert found.interval_s[1] / found.interval_s[0] == pytest.approx(told.interval_s[1] / told.interval_s[0])


def test_collectives_far_outside_of_what_was_measured_widen_the_interval() -> None:
    near, far = (
        predict(STEADY, replace(APART, between=replace(APART.between, table=((4.0, size, 0.1),))), "ddp", 4)
        for size in (4e6, 1e4)
    )
    assert near.widened == () and "as large" in " ".join(far.widened)
    assert half_width(far.doubts) > half_width(near.doubts)
