"""What negotiation costs, counted: rounds, full rounds, collectives, copies; and what is written about it."""

import datetime
import sys
import threading
from collections.abc import Iterable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.gradients.named import Knobs, NamedChannel, NamedEngine, Settings, collectives, stalls
from guozhuang.gradients.named import channel as channels
from guozhuang.gradients.named.control import ChannelGroups
from guozhuang.groups.agreement import store_of
from tests.processes.negotiating import an_engine, full, in_place, reducing, run_engines, together
from tests.waiting import LIMIT_S, NEVER_S, until


class Counted:
    """Counts the all-reduces of data, and the all-gathers of rounds, in this process."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.pointers: list[int] = []
        self.num_gathers = 0
        all_reduce, all_gather = collectives.all_reduce, collectives.all_gather

        def counting(tensor: torch.Tensor, *args: Any) -> None:
            self.sizes.append(tensor.numel())
            self.pointers.append(tensor.data_ptr())
            all_reduce(tensor, *args)

        def counting_gathers(*args: Any) -> None:
            self.num_gathers += 1
            all_gather(*args)

        collectives.all_reduce, collectives.all_gather = counting, counting_gathers

    def forget(self) -> None:
        self.sizes, self.pointers = [], []
        self.num_gathers = 0


def wakes_only_when_told(channel: NamedChannel) -> bool:
    """Whether the channel's thread waits, without limit, for somebody to wake it."""
    frame = _frame_of(channel)
    return frame.f_code is threading.Condition.wait.__code__ and frame.f_locals["timeout"] is None


def is_in_a_round(channel: NamedChannel) -> bool:
    frame: FrameType | None = _frame_of(channel)
    while frame is not None and frame.f_code is not ChannelGroups.exchange.__code__:
        frame = frame.f_back
    return frame is not None


def _frame_of(channel: NamedChannel) -> FrameType:
    assert channel._thread is not None and channel._thread.ident is not None
    return sys._current_frames()[channel._thread.ident]


def steady_state(engine: NamedEngine) -> None:
    # Nothing is ever pending for so long that the watch would ask the store, and rounds begin when somebody waits.
    stalls.time = SimpleNamespace(monotonic=lambda: 0.0)  # type: ignore[assignment, attr-defined]
    channels.AGE_S = NEVER_S  # type: ignore[misc]
    channel, counted, store = engine.world, Counted(), store_of(dist.group.WORLD)
    names = [f"layer.{i}" for i in range(8)]
    together(channel, "begin")
    fewest = 100
    for step in range(8):
        rounds, full_rounds = channel.num_rounds, channel.num_full_rounds
        counted.forget()
        handles = [reducing(channel, name, full(step, 100)) for name in names]
        for handle in handles:
            assert torch.equal(handle.wait()[0], full(2 * step, 100))
        together(channel, "step")
        if step > 0:
            assert counted.num_gathers == channel.num_rounds - rounds, "a round is one collective"
            assert channel.num_full_rounds == full_rounds, "names that come again are sent as numbers"
        assert sum(counted.sizes) == 800
        fewest = min(fewest, len(counted.sizes))
    assert fewest <= 2, "what is ready together travels together"
    rounds, full_rounds = channel.num_rounds, channel.num_full_rounds
    until(lambda: wakes_only_when_told(channel))
    assert channel.num_rounds == rounds, "an idle engine holds no rounds"
    if channel.rank == 0:  # this rank waits in one round for the other one, and holds no other
        handle = reducing(channel, names[0], full(1.0, 100))
        assert not handle.done()
        until(lambda: is_in_a_round(channel))
        assert channel.num_rounds <= rounds + 1
        store.set("waited", "")
    else:
        store.wait(["waited"], datetime.timedelta(seconds=LIMIT_S))
        assert channel.num_rounds == rounds and wakes_only_when_told(channel), (
            "the other rank's request wakes nobody here"
        )
        handle = reducing(channel, names[0], full(1.0, 100))
    handle.wait()
    assert channel.num_rounds == rounds + 1 and channel.num_full_rounds == full_rounds
    assert engine._watch.num_looks == 0, "nobody asked the store"


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_steady_state_is_one_small_all_gather_a_round_and_an_idle_one_is_nothing(name: str) -> None:
    run_engines(steady_state, 2, name=name)


def copied_or_not(engine: NamedEngine) -> None:
    channel, counted = engine.world, Counted()
    rank = channel.rank or 0
    flat = channel.allocate(1000, torch.float32, torch.device("cpu"))
    views, large = flat.split([100, 300, 200, 400]), full(1.0, 1 << 19)
    flat.fill_(rank + 1.0)
    assert in_place(channel, "neighbours", *views).wait()[2] is views[2]
    assert flat.eq(3.0).all() and counted.sizes[-1] == 1000 and counted.pointers[-1] == flat.data_ptr(), "no copies"
    flat.fill_(1.0)
    in_place(channel, "gap", views[0], views[2], views[3]).wait()
    assert flat[:100].eq(2).all() and flat[100:400].eq(1).all() and flat[400:].eq(2).all()
    assert counted.sizes[-1] == 700 and counted.pointers[-1] != flat.data_ptr()
    handles = [in_place(channel, "large", large), in_place(channel, "small", views[0])]
    for handle in handles:
        handle.wait()
    assert large.eq(2).all() and large.data_ptr() in counted.pointers, "it goes alone, and as it is"
    other = channel.allocate(500, torch.float32, torch.device("cpu")) if rank else torch.zeros(600)[:500]
    other.fill_(1.0)
    first, second = other.split([200, 300]) if rank else (other[:200], other[200:].clone())  # apart on one rank
    in_place(channel, "apart", first, second).wait()
    assert first.eq(2.0).all() and second.eq(2.0).all()
    together(channel, "end")


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_neighbours_of_a_group_and_large_tensors_are_reduced_in_place(name: str) -> None:
    run_engines(copied_or_not, 2, name=name)


def limited_fusion(engine: NamedEngine) -> list[int]:
    channels.AGE_S = NEVER_S  # type: ignore[misc]  # all goes into one round: that of the first wait
    channel, counted = engine.world, Counted()
    group = [reducing(channel, "group", full(1.0, 10), full(1.0, 20)), reducing(channel, "one", full(1.0, 5))]
    small = [reducing(channel, f"{i}", full(1.0, 100)) for i in range(4)]
    for handle in [*group, *small]:
        for out in handle.wait():
            assert out.eq(2).all()
    together(channel)
    return counted.sizes


def test_the_threshold_and_groups_limit_what_travels_together() -> None:
    settings = Settings(fusion_threshold_bytes=800, fuse_groups=False)
    sizes = run_engines(limited_fusion, 2, settings=settings)[0]
    assert 30 in sizes, "a group goes as one, and alone"
    assert sum(sizes) == 435 and max(sizes) <= 200
    alone = run_engines(limited_fusion, 2, settings=Settings(fusion_threshold_bytes=0))[0]
    assert sorted(alone) == [5, 30, 100, 100, 100, 100]


class Turning:
    """A tuner that asks for other settings after each of some rounds."""

    def __init__(self) -> None:
        self.left = [Knobs(0, 1.0, True), Knobs(1 << 20, 2.0, False), Knobs(1 << 20, None, True)]
        self.observed: list[tuple[list[str], int, float]] = []

    def observe(self, names: Iterable[str], num_bytes: int, seconds: float) -> Knobs | None:
        self.observed.append((list(names), num_bytes, seconds))
        return self.left.pop(0) if self.left and len(self.observed) % 4 == 0 else None


def tuned(rank: int, num_ranks: int) -> None:
    tuner = Turning()
    with an_engine(Settings(autotune=lambda settings: tuner)) as engine:
        channel = engine.world
        seen = []
        for step in range(16):
            full_rounds = channel.num_full_rounds
            for handle in [reducing(channel, f"{i}", full(step, 10)) for i in range(3)]:
                assert handle.wait()[0].eq(num_ranks * step).all()
            seen.append((channel._threshold_bytes, channel._pace.cycle_time_ms, channel.num_full_rounds - full_rounds))
        assert seen[0][:2] == (128 << 20, None)
        assert seen[-1][:2] == (1 << 20, None) and seen[-1][2] == 0
        assert {each[:2] for each in seen} >= {(0, 1.0), (1 << 20, 2.0)}
        assert any(each[:2] == (1 << 20, 2.0) and each[2] for each in seen), "without a cache all is asked in full"
        if rank == 0:
            assert all(num == 40 * len(names) and seconds > 0 for names, num, seconds in tuner.observed)
            assert sum(names.count("allreduce.1") for names, _, _ in tuner.observed) == 16
        else:
            assert not tuner.observed


def test_a_tuner_turns_the_knobs_of_all_ranks() -> None:
    from tests.processes.shm_ranks import run_shm_ranks

    run_shm_ranks(tuned, 2)
