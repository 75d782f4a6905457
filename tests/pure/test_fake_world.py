"""A rank of a fake world: what its collectives leave behind, what its store answers, and the traces of strategies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import strategies, world
from guozhuang.cost.trace import Compute, Start, Trace, Wait
from guozhuang.errors import UsageError
from guozhuang.groups import agree, fake
from guozhuang.lab.planner.fake.traces import check_recordable, period_of

CPU = torch.device("cpu")


@pytest.fixture
def enter() -> Iterator[Callable[..., fake.Recorder]]:
    def enter(rank: int = 0, num_ranks: int = 4, num_nodes: int = 4, backend: str = "gloo") -> fake.Recorder:
        return fake.enter(rank, num_ranks, num_nodes, backend, CPU)[1]

    yield enter
    world.shutdown()


def test_results_are_those_of_equal_ranks(enter: Any) -> None:
    enter(rank=1)
    own = torch.arange(4.0)
    dist.all_reduce(total := own.clone())
    dist.all_reduce(least := own.clone(), dist.ReduceOp.MIN)
    parts = [torch.empty(4) for _ in range(4)]
    dist.all_gather(parts, own)
    dist.reduce_scatter_tensor(part := torch.empty(1), own)
    dist.all_to_all_single(swapped := torch.empty(4), own)
    dist.broadcast(own, src=0)
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": 1})
    got = [total, least, *parts, part, swapped, own]
    expected = [own * 4, own, *[own] * 4, torch.tensor([4.0]), torch.ones(4), torch.arange(4.0)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert objects == [{"rank": 1}] * 4
    agree(dist.group.WORLD, "what is compared", ["a line"], 5, "no fix")  # type: ignore[arg-type]
    dist.send(own, 3)
    dist.recv(found := torch.ones(4), 3)
    dist.recv(nothing := torch.ones(3), 2)
    assert torch.equal(found, own) and not nothing.any()


def test_groups_of_some_ranks_are_recorded_with_their_ranks(enter: Any) -> None:
    recorder = enter(rank=2)
    some = dist.new_group([0, 2])
    recorder.begin()
    dist.all_reduce(torch.ones(3), group=some, async_op=True)
    recorder.step_ended()
    (start,) = [each for each in recorder.traces()[0].events if isinstance(each, Start)]
    assert (start.operation, start.num_bytes, start.ranks, start.blocking) == ("all_reduce", 12, (0, 2), False)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_tensor_reduced_in_place_counts_this_ranks_part_of_the_others(enter: Any) -> None:
    def shared_bytes() -> int:
        return 1024 * int(re.findall(r"RssShmem:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    enter(num_nodes=1, backend="shm")
    group: Any = dist.group.WORLD
    before, num_bytes = shared_bytes(), 16 << 20
    tensor = group.empty(num_bytes // 4)
    assert shared_bytes() - before == pytest.approx(num_bytes * (1 + 3 / 4), rel=0.01)
    assert tensor.numel() * 4 == num_bytes == tensor.untyped_storage().nbytes()
    del tensor
    assert shared_bytes() - before < num_bytes / 100


def test_a_world_that_cannot_be_is_refused(enter: Any) -> None:
    for arguments in ((4, 4, 1), (0, 4, 3), (0, 0, 1)):
        with pytest.raises(UsageError, match="divides by the nodes"):
            enter(*arguments)
    enter()
    with pytest.raises(UsageError, match="start a new process"):
        enter()


_ALL_REDUCES = {"all_reduce": 1.0}
_TABLE: dict[str, tuple[str, int, dict[str, float]]] = {
    # strategy: backend, nodes, and the bytes of each operation as a multiple of those of the gradients in float32
    "none": ("gloo", 4, {}),
    "ddp": ("shm", 1, _ALL_REDUCES),
    "torch-ddp": ("gloo", 4, _ALL_REDUCES),
    "fp16": ("gloo", 2, {"all_reduce": 0.5}),
    "quantize8": ("gloo", 4, {"all_to_all": 0.25, "all_gather": 0.25}),
    "sharded": ("gloo", 4, {"reduce_scatter": 1.0, "all_gather": 1.0}),
    "local-sgd": ("gloo", 4, {"all_reduce": 1 / 16}),
    "decentralized-pairs": ("gloo", 4, {"send": 1.0, "recv": 1.0}),
    "sharded-weights": ("gloo", 4, {"reduce_scatter": 1.0, "all_gather": 2.0}),
}


@pytest.mark.parametrize("name", _TABLE)
def test_bytes_of_strategies(enter: Any, name: str) -> None:
    backend, num_nodes, expected = _TABLE[name]
    trace = _recorded(enter, name, backend, num_nodes)
    num_bytes: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, Start) and event.operation not in ("hand_over", "barrier"):
            num_bytes[event.operation] += event.num_bytes
    gradients = 4 * sum(p.numel() for p in _model().parameters()) * trace.num_steps
    shares = {operation: total / gradients for operation, total in num_bytes.items() if total > gradients / 1000}
    assert shares == pytest.approx(expected, rel=0.02)
    waited = {each.call for each in trace.events if isinstance(each, Wait)}
    assert waited == {each.call for each in trace.events if isinstance(each, Start) and not each.blocking}


def test_ranks_of_one_node_meet_twice_in_a_sharded_step(enter: Any) -> None:
    trace = _recorded(enter, "sharded", "shm", 1)
    assert [each.operation for each in trace.events if isinstance(each, Start)] == ["meeting", "meeting"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_one_process_plays_all_stages_of_a_pipeline(enter: Any, schedule: str) -> None:
    recorder = enter(num_ranks=3, num_nodes=3)
    torch.manual_seed(0)
    model, whole = (nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))) for _ in range(2))
    whole.load_state_dict(model.state_dict())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = {} if schedule == "gpipe" else {"loss": loss}
    cut = ["1", "2", "3", "4", "5"] if schedule == "interleaved" else ["2", "4"]
    pair = strategies.prepare(model, optimizer, "pipeline", schedule=schedule, microbatches=4, cut=cut, **loss_of)
    batch = torch.randn(8, 32), torch.randn(8, 32)
    recorder.begin()
    for _ in range(2):
        pair.step(batch, lambda model, batch: loss(model(batch[0]), batch[1]), passed=recorder.passed)
        recorder.step_ended()
        loss(whole(batch[0]), batch[1]).backward()
        with torch.no_grad():
            for p in whole.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
        whole.zero_grad()
    for mine, theirs in zip(pair[0].state_dict().values(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    traces = recorder.traces()
    assert [each.rank for each in traces] == [0, 1, 2]
    halves = {
        verb: [e for t in traces for e in t.events if isinstance(e, Start) and e.operation == verb]
        for verb in ("send", "recv")
    }
    told = {verb: Counter((e.ranks, e.num_bytes) for e in found) for verb, found in halves.items()}
    assert told["send"] == told["recv"]
    per_edge = 4 * (2 if schedule == "interleaved" else 1)  # microbatches that go from the first rank to the second
    assert told["send"][(0, 1), 2 * 32 * 4] == per_edge == told["send"][(1, 0), 2 * 32 * 4]
    work = [sum(e.seconds for e in t.events if isinstance(e, Compute)) for t in traces]
    assert min(work) > 0.2 * max(work)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))


def _recorded(enter: Any, name: str, backend: str, num_nodes: int) -> Trace:
    recorder = enter(num_nodes=num_nodes, backend=backend)
    torch.manual_seed(0)
    model = _model()
    pair = strategies.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), name)
    batch = torch.randn(8, 64)

    def loss(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().mean()
        return found

    losses = [pair.step(batch, loss) for _ in range(3)]
    period = period_of(pair[0])
    assert period == (16 if name == "local-sgd" else 1)
    recorder.begin()
    for _ in range(max(2, period)):
        losses.append(pair.step(batch, loss, passed=recorder.passed))
        recorder.step_ended()
    assert torch.stack(losses).isfinite().all()
    traces: tuple[Trace, ...] = recorder.traces(period)
    return traces[0]


def test_a_trace_has_medians_and_waits_for_calls_of_the_step_before() -> None:
    now = [0.0]
    recorder = fake.Recorder(0, 2, lambda: now[0])
    recorder.begin()
    calls: list[int] = []
    for seconds in (1.0, 2.0, 9.0):
        now[0] += 0.5
        recorder.passed("data")
        now[0] += seconds
        if calls:
            recorder.wait(calls[-1])
        calls.append(recorder.start("all_reduce", 100, (0, 1)))
        now[0] += 100.0  # the collective's own doing
        recorder.go_on()
        recorder.step_ended()
    (trace,) = recorder.traces()
    assert trace.events == (
        Compute("data", 0.5),
        Compute("forward", 5.5),  # of the two steps that have a wait
        Wait(0),
        Start(0, "all_reduce", 100, (0, 1)),
    )
    with pytest.raises(UsageError, match="record more steps"):
        recorder.traces(period=4)


def test_a_job_of_a_lane_counts_its_own_time_alone() -> None:
    now = [0.0]
    recorder = fake.Recorder(0, 2, lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    recorder.begin()
    work(5.0)
    job = recorder.run("lane", lambda: work(2.0))
    work(1.0)
    job.wait()
    recorder.step_ended()
    (trace,) = recorder.traces()
    times = [(event.thread, event.seconds) for event in trace.events if isinstance(event, Compute)]
    assert times == [(0, 5.0), (1, 2.0), (0, 1.0)]


def test_what_cannot_be_recorded_is_refused_with_the_reason() -> None:
    for name, why in {"dp": "one process", "async-model-average": "clock", "parameter-server": "servers"}.items():
        with pytest.raises(UsageError, match=why):
            check_recordable(strategies.get(name))
