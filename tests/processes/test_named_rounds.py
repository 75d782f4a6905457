"""What negotiation costs, counted: rounds, full rounds, collectives, copies; and what is written about it."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from guozhuang.errors import UsageError
from guozhuang.gradients.named import Kind, Knobs, NamedEngine, Settings, Submission, collectives
from guozhuang.gradients.named import engine as engines
from tests.processes.negotiating import an_engine, asked, full, in_place, reduced, reducing, run_engines, together


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


def steady_state(engine: NamedEngine) -> None:
    channel, counted = engine.world, Counted()
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
    time.sleep(0.3)
    assert channel.num_rounds == rounds, "an idle engine holds no rounds"
    if channel.rank == 0:  # this rank waits in one round for the other one, and holds no other
        handle = reducing(channel, names[0], full(1.0, 100))
        assert not handle.done()
        time.sleep(0.3)
        assert channel.num_rounds <= rounds + 1
    else:
        time.sleep(0.5)
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


def submitted_again(engine: NamedEngine) -> None:
    """The same submissions in every step: in place, packed, with new outputs, in two channels, with a rank that joined."""
    channel, part = engine.world, engine.add([0, 1])
    rank = channel.rank or 0
    flat = channel.allocate(600, torch.float32, torch.device("cpu"))
    views, others = list(flat.split([100, 200, 300])), [full(0.0, 50) for _ in range(3)]
    mine = [_over_itself(f"in place {i}", view) for i, view in enumerate(views)]
    mine += [_over_itself(f"packed {i}", other) for i, other in enumerate(others)]
    mine += [Submission(Kind.ALLREDUCE, f"new {i}", (other,)) for i, other in enumerate(others)]
    kept: list[torch.Tensor] = []
    for step in range(12):
        where = channel if step % 4 else part
        flat.fill_(rank + step)
        for other in others:
            other.fill_(rank + 2 * step)
        if step % 3 == 0:
            mine = mine[::-1]
        of_new = [where.submit(each) for each in mine if each.outputs is None]
        for handle in of_new:
            assert handle.wait()[0].eq(1 + 4 * step).all()
            kept.append(handle.wait()[0])
        for handle in [where.submit(each) for each in mine if each.outputs is not None]:
            handle.wait()
        assert flat.eq(1 + 2 * step).all(), step
        assert all(other.eq(1 + 4 * step).all() for other in others)
    expected = [1.0 + 4 * step for step in range(12) for _ in range(3)]
    assert [each[0].item() for each in kept] == expected, "what was returned before stays as it was"
    if rank == 1:
        channel.join().wait()
        return
    for step in range(2):
        flat.fill_(5.0 + step)
        for handle in [channel.submit(each) for each in mine if "in place" in each.name]:
            handle.wait()
        assert flat.eq(5.0 + step).all(), "the other rank joined, and adds zeros"
    channel.join().wait()


def _over_itself(name: str, tensor: torch.Tensor) -> Submission:
    tensors = (tensor,)  # the very same object: only then the engine sees that nothing has to be copied
    return Submission(Kind.ALLREDUCE, name, tensors, tensors)


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_submission_may_come_again_and_again(name: str) -> None:
    run_engines(submitted_again, 2, name=name)


def limited_fusion(engine: NamedEngine) -> list[int]:
    channel, counted = engine.world, Counted()
    group = [reducing(channel, "group", full(1.0, 10), full(1.0, 20)), reducing(channel, "one", full(1.0, 5))]
    small = [reducing(channel, f"{i}", full(1.0, 100)) for i in range(4)]
    if channel.rank:
        time.sleep(0.1)  # all that the other rank has comes into one round
    for handle in [*group, *small]:
        for out in handle.wait():
            assert out.eq(2).all()
    together(channel)
    return counted.sizes


def test_the_threshold_and_groups_limit_what_travels_together() -> None:
    settings = Settings(fusion_threshold_bytes=800, cycle_time_ms=100.0, fuse_groups=False)
    sizes = run_engines(limited_fusion, 2, settings=settings)[0]
    assert 30 in sizes, "a group goes as one, and alone"
    assert sum(sizes) == 435 and max(sizes) <= 200
    alone = run_engines(limited_fusion, 2, settings=Settings(fusion_threshold_bytes=0, cycle_time_ms=100.0))[0]
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
    engines._tuner = lambda settings, decides: tuner if decides else None  # type: ignore[assignment]
    with an_engine() as engine:
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


def timeline(engine: NamedEngine, folder: str) -> None:
    channel, path = engine.world, Path(folder) / f"{engine.world.rank}.json"
    reduced(channel, "before", full(1.0))
    engine.start_timeline(str(path), mark_cycles=True)
    with pytest.raises(UsageError, match="is being written"):
        engine.start_timeline(str(path))
    together(channel, "started")
    reduced(channel, "x", full(1.0))
    _ = [asked(channel, Kind.BROADCAST, "y", full(1.0), root=0).wait() for _ in range(2)]
    together(channel, "all seen")
    if channel.rank == 0:
        now = json.loads(path.read_text())  # complete while it is written
        assert {"ALLREDUCE", "NEGOTIATE_ALLREDUCE", "CYCLE_START"} <= {event["name"] for event in now}
    engine.stop_timeline()
    reduced(channel, "after", full(1.0))
    engine.stop_timeline()
    engine.start_timeline(str(path) + ".second")
    reduced(channel, "z", full(1.0))
    together(channel, "z seen")


def test_the_timeline_of_rank_0(tmp_path: Path) -> None:
    run_engines(timeline, 2, str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0.json", "0.json.second"]
    events = json.loads((tmp_path / "0.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"allreduce.x", "broadcast.y"} <= set(names.values()) and "allreduce.before" not in names.values()
    of_x = [event for event in events if names.get(event["pid"]) == "allreduce.x" and event["ph"] == "X"]
    assert [event["name"] for event in of_x] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    assert of_x[0]["ts"] + of_x[0]["dur"] <= of_x[1]["ts"] + 1 and of_x[1]["dur"] > 0
    of_y = [event["name"] for event in events if names.get(event["pid"]) == "broadcast.y" and event["ph"] == "X"]
    assert of_y == ["NEGOTIATE_BROADCAST", "BROADCAST"] * 2
    assert (tmp_path / "0.json").read_text().count("start_time_since_epoch_in_micros") == 1
    second = (tmp_path / "0.json.second").read_text()
    assert "allreduce.z" in second and "CYCLE_START" not in second and "allreduce.after" not in second
    json.loads(second)
