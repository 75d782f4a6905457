"""What is sent: the number, size and order of collectives of each step are counted, and overlap is proved.

Counting happens below everything that could call a collective, Python or C++: each one passes PyTorch's dispatcher as an
operator of the namespace ``c10d``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

from guozhuang import DistributedDataParallel
from guozhuang.gradients.buckets import FIRST_CAP_BYTES, NUM_MARKS
from guozhuang.timeline import Instant, Timeline
from tests.processes.cases import as_tests
from tests.ranks import run_ranks
from tests.waiting import until

Call = tuple[str, int, str]  # operator, number of elements, dtype


class Counting(TorchDispatchMode):
    """Notes every collective that is issued by this thread while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            flat = list(itertools.chain.from_iterable(t if isinstance(t, (list, tuple)) else [t] for t in tensors))
            name = func.name().removeprefix("c10d::").rstrip("_")
            self.calls.append((name, sum(t.numel() for t in flat), str(flat[0].dtype).removeprefix("torch.")))
        return func(*args, **(kwargs or {}))


def step(ddp: nn.Module, *inputs: Any, sync: bool = True) -> list[Call]:
    """One forward and backward; return its collectives, without the marks that the first bucket carries."""
    with Counting() as counting:
        with nullcontext() if sync else ddp.no_sync():
            ddp(*inputs).pow(2).sum().backward()
        ddp.zero_grad()
    return without_marks(ddp, counting.calls)


def without_marks(ddp: nn.Module, calls: list[Call]) -> list[Call]:
    """Leave the ranks' numbers out of the call that carries them: one call in a step."""
    if not isinstance(ddp, DistributedDataParallel):
        return calls
    bucket = ddp.reducer.buckets[0]
    dtype = str(bucket.flat.dtype).removeprefix("torch.")
    marked: Call = ("allreduce", bucket.flat.numel() + NUM_MARKS, dtype)
    if marked not in calls:
        return calls
    assert calls.count(marked) == 1
    return [("allreduce", bucket.flat.numel(), dtype) if call == marked else call for call in calls]


class Four(nn.Module):
    """Four layers of 90, 90, 90 and 30 parameters' elements; ``use`` says how many take part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 3)])

    def forward(self, x: Tensor, use: int = 4) -> Tensor:
        for layer in self.layers[:use]:
            x = torch.tanh(layer(x))
        return x


LAYER_MB = 360 / (1 << 20)  # one layer of 90 float32 elements
ALL = 300
ORDER: Call = ("broadcast", 8, "int64")
QUESTION: Call = ("allreduce", 8, "int32")


def gradients(*sizes: int) -> list[Call]:
    return [("allreduce", size, "float32") for size in sizes]


def case_calls_of_a_plain_step(rank: int, size: int) -> None:
    x = torch.randn(2, 9)
    with Counting() as counting:
        ddp = DistributedDataParallel(Four())
    assert counting.calls == [("broadcast", ALL, "float32")]
    assert step(ddp, x) == [*gradients(ALL), ORDER]
    for _ in range(3):
        assert step(ddp, x) == gradients(ALL)
    assert step(ddp, x, sync=False) == []
    assert step(ddp, x, sync=False) == []
    assert step(ddp, x) == gradients(ALL)
    with torch.no_grad(), Counting() as counting:
        ddp(x)
    assert counting.calls == []


def case_calls_of_several_buckets(rank: int, size: int) -> None:
    x = torch.randn(2, 9)
    ddp = DistributedDataParallel(Four(), bucket_cap_mb=LAYER_MB)
    # in reverse order of registration: bias 3, weight 27 | bias 9 ... filled up to 90 elements
    first = step(ddp, x)
    assert first[-1] == ORDER
    for calls in (first[:-1], step(ddp, x), step(ddp, x)):
        assert len(calls) >= 4
        assert all(kind == "allreduce" and elements <= 90 for kind, elements, _ in calls)
        assert sum(elements for _, elements, _ in calls) == ALL
    listed = DistributedDataParallel(Four(), bucket_cap_mb_list=[120 / (1 << 20), 1])
    assert step(listed, x) == [*gradients(30, 270), ORDER]
    assert step(listed, x) == gradients(30, 270)


def case_calls_of_a_first_bucket(rank: int, size: int) -> None:
    """By default the first bucket holds at most 1 MiB, so that communication starts early."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        calls = [c for c in step(ddp, torch.randn(2, 256)) if c[0] == "allreduce"]
        assert len(calls) == 2
        assert 0 < calls[0][1] * 4 <= FIRST_CAP_BYTES
        assert sum(c[1] for c in calls) == 6 * (256 * 256 + 256)


def case_calls_with_unused_parameters(rank: int, size: int) -> None:
    x = torch.randn(2, 9)
    ddp = DistributedDataParallel(Four(), find_unused_parameters=True)
    assert step(ddp, x, 3) == [*gradients(ALL), QUESTION, ORDER]
    for use in (4, 2, 1 + rank, 4):
        assert step(ddp, x, use) == [*gradients(ALL), QUESTION]
    assert step(ddp, x, 2, sync=False) == []

    static = DistributedDataParallel(Four(), static_graph=True)
    assert step(static, x, 3) == [*gradients(ALL), QUESTION, ORDER]
    for _ in range(2):
        assert step(static, x, 3) == gradients(ALL)


def case_calls_for_skipped_parameters(rank: int, size: int) -> None:
    x = torch.randn(2, 9)
    options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": LAYER_MB}
    plain = DistributedDataParallel(Four(), **options)
    skipping = DistributedDataParallel(Four(), skip_all_reduce_unused_params=True, **options)
    for ddp in (plain, skipping):
        step(ddp, x)
        step(ddp, x)
    whole = step(plain, x, 2)
    assert sum(c[1] for c in whole) == ALL + 8
    calls = step(skipping, x, 2)
    assert calls[-1] == QUESTION
    assert len(calls) < len(whole)
    # Only buckets without any used parameter may be left out.
    of_bucket = [[skipping.reducer.names[i] for i in members] for members in skipping.reducer.layout]
    used = [any(name.startswith(("layers.0", "layers.1")) for name in names) for names in of_bucket]
    expected = [b.flat.numel() for b, is_used in zip(skipping.reducer.buckets, used, strict=True) if is_used]
    assert calls[:-1] == gradients(*expected)
    assert sum(expected) < ALL


def case_calls_for_skipped_parameters_with_uneven_inputs(rank: int, size: int) -> None:
    """A rank without data cannot know what the others use: it takes part in every bucket."""
    ddp = DistributedDataParallel(Four(), skip_all_reduce_unused_params=True, find_unused_parameters=True)
    with ddp.join():
        for _ in range(3 + rank):
            ddp.zero_grad()
            ddp(torch.ones(2, 9)).pow(2).sum().backward()
    if rank == 1:
        alone = Four()
        alone.load_state_dict(ddp.module.state_dict())
        alone(torch.ones(2, 9)).pow(2).sum().backward()
        for ours, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours.grad, own.grad / 2)


def case_calls_for_buffers(rank: int, size: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5))

    x = torch.randn(4, 9)
    state: list[Call] = [("broadcast", 10, "float32"), ("broadcast", 1, "int64")]
    parameters: list[Call] = [("broadcast", 60, "float32")]
    wires = gradients(60)
    for options, at_start, at_forward in (
        ({}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"forward_sync_buffers": True}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"init_sync": False}, None, True),
    ):
        with Counting() as counting:
            ddp = DistributedDataParallel(model(), **options)
        start = sorted(counting.calls)
        if at_start is None:
            assert start == []
        elif at_start:  # parameters and buffers of one dtype may travel together
            assert sum(c[1] for c in start) == 71 and len(start) == 2, start
        else:
            assert start == parameters
        step(ddp, x)
        calls = step(ddp, x)
        assert sorted(calls) == sorted([*wires, *(state if at_forward else [])]), options
        if at_forward:
            assert calls[-1:] == wires
            step(ddp, x, sync=False)
            assert step(ddp, x, sync=False) == []  # nothing was synchronized since, so buffers wait as well


def as_torch(rank: int, size: int) -> list[tuple[list[Call], list[Call]]]:
    found = []
    x = torch.randn(2, 9)
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        calls = []
        for wrapper in (DistributedDataParallel, TorchDDP):
            ddp = wrapper(Four(), bucket_cap_mb=LAYER_MB, **options)
            for _ in range(3):
                latest = step(ddp, x)
            calls.append([c for c in latest if c[0] == "allreduce"])
        found.append((calls[0], calls[1]))
    return found


def test_no_more_is_sent_than_by_torch_ddp() -> None:
    for ours, theirs in run_ranks(as_torch, 2)[0]:
        assert theirs, "the counting does not see PyTorch's collectives"
        assert sum(c[1] for c in ours) <= sum(c[1] for c in theirs)
        assert len(ours) <= len(theirs) + 1


# ---- order ------------------------------------------------------------------------------------------------------------------


class Fan(nn.Module):
    """Parts of different sizes whose gradients come in the reverse of the order in which they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, width) for width in (3, 5, 7, 11))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return torch.stack([self.parts[i](x).pow(2).sum() for i in order]).sum()


def different_orders(rank: int, size: int) -> tuple[list[list[Call]], list[list[str]], list[Tensor]]:
    torch.manual_seed(0)
    model = Fan()
    twin = Fan()
    twin.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    orders = {0: [2, 0, 3, 1], 1: [0, 1, 2, 3], 2: [3, 2, 1, 0]}
    calls = []
    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(size, 6)
        ddp.zero_grad()
        twin.zero_grad()
        with Counting() as counting:
            ddp(x[rank : rank + 1], orders[rank]).backward()
        calls.append(without_marks(ddp, counting.calls))
        (twin(x, orders[0]) / size).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    names = [[ddp.reducer.names[i] for i in members] for members in ddp.reducer.layout]
    return calls, names, [p.grad for p in model.parameters()]


def test_exchanges_have_one_order_on_all_ranks_and_it_is_the_one_rank_0_saw() -> None:
    results = run_ranks(different_orders, 3)
    for calls, names, grads in results[1:]:
        assert calls == results[0][0]
        assert names == results[0][1]
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0][2], strict=True))
    parts = [name[0].rsplit(".", 1)[0] for name in results[0][1]]
    assert [part for part, _ in itertools.groupby(parts)] == [f"parts.{i}" for i in (1, 3, 0, 2)]
    calls = results[0][0]
    assert calls[0][-1] == ("broadcast", 8, "int64")
    in_reverse_of_registration = [width * k for width in (11, 7, 5, 3) for k in (1, 6)]
    assert [c[1] for c in calls[0][:-1]] == in_reverse_of_registration
    for later in calls[1:]:
        assert [c[0] for c in later] == ["allreduce"] * 8
        sizes = [c[1] for c in later]
        assert [{a, b} for a, b in zip(sizes[::2], sizes[1::2], strict=True)] == [{w, 6 * w} for w in (5, 11, 3, 7)]


# ---- overlap ----------------------------------------------------------------------------------------------------------------


class Pausing(nn.Module):
    """Between the gradients of ``back`` and those of ``front``, backward waits until something has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(64, 64), nn.Linear(64, 64)
        self.pauses: list[tuple[int, int]] = []
        self.awaited: Callable[[], object] = lambda: True

    def forward(self, x: Tensor) -> Tensor:
        middle = self.front(x)
        middle.register_hook(self.pause)
        return self.back(middle)

    def pause(self, _: Tensor) -> None:
        start_ns = Timeline.now()
        until(self.awaited)
        self.pauses.append((start_ns, Timeline.now()))


def case_the_first_exchange_runs_while_backward_runs(rank: int, size: int) -> None:
    model = Pausing()
    ddp = DistributedDataParallel(model, bucket_cap_mb=64 * 65 * 4 / (1 << 20))
    for _ in range(2):
        ddp(torch.randn(4, 64)).sum().backward()  # the first step learns
    timeline = ddp.timeline = Timeline(rank)
    model.awaited = lambda: timeline.spans("exchange 0")  # which would come never if it did not run beside backward
    ddp(torch.randn(4, 64)).sum().backward()
    model.awaited = lambda: True
    ddp.timeline = None
    marks = {event.name: event.at_ns for event in timeline.events if isinstance(event, Instant)}
    (exchange,) = timeline.spans("exchange 0")
    (last,) = timeline.spans("exchange 1")
    pause_start_ns, pause_end_ns = model.pauses[-1]
    assert len(ddp.reducer.buckets) == 2
    # It starts before the pause and the other rank answers in it: bytes move while backward runs.
    assert marks["bucket 0 started"] < pause_start_ns
    assert exchange.end_ns < pause_end_ns
    assert pause_end_ns < marks["bucket 1 started"] < marks["backward ended"]
    assert last.start_ns <= marks["bucket 1 started"] <= last.end_ns
    before = len(timeline.events)
    ddp(torch.randn(4, 64)).sum().backward()
    assert len(timeline.events) == before  # off is off


def overlap_everywhere(rank: int, size: int, make: Callable[[], dict[str, Any]]) -> None:
    for options in make():
        ddp = DistributedDataParallel(Four(), bucket_cap_mb=LAYER_MB, **options)
        for _ in range(2):
            ddp(torch.randn(2, 9)).sum().backward()
        timeline = ddp.timeline = Timeline(rank)
        ddp(torch.randn(2, 9)).sum().backward()
        marks = [event for event in timeline.events if isinstance(event, Instant)]
        ended = next(m.at_ns for m in marks if m.name == "backward ended")
        started = [m.at_ns for m in marks if m.name.endswith("started")]
        assert len(started) == len(ddp.reducer.buckets) >= 4
        assert all(at_ns < ended for at_ns in started), options


def option_sets() -> list[dict[str, Any]]:
    return [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"batched_grad_copy": True},
        {"gradient_as_bucket_view": True},
    ]


def test_every_full_bucket_leaves_before_backward_ends_whatever_the_options() -> None:
    run_ranks(overlap_everywhere, 2, option_sets)


def case_buckets_do_not_wait_for_parameters_that_backward_will_not_reach(rank: int, size: int) -> None:
    """The parameters of the buckets that come first get no gradient this time: the others must not wait for them."""
    ddp = DistributedDataParallel(Four(), bucket_cap_mb=LAYER_MB, find_unused_parameters=True)
    for _ in range(2):
        ddp(torch.randn(2, 9)).sum().backward()
    first = {ddp.reducer.names[i].split(".")[1] for i in ddp.reducer.layout[0]}
    assert first <= {"2", "3"}
    ddp.zero_grad()
    timeline = ddp.timeline = Timeline(rank)
    ddp(torch.randn(2, 9), 2).sum().backward()
    marks = [event.name for event in timeline.events if isinstance(event, Instant)]
    names = [name for name in marks if not name.endswith("ready")]
    assert len(marks) - len(names) == len(ddp.reducer.buckets)
    started = [f"bucket {i} started" for i in range(len(ddp.reducer.buckets))]
    assert names == [*started, "backward ended"]
    assert ddp.module.layers[3].weight.grad is None and ddp.module.layers[0].weight.grad is not None


test_cases = as_tests(globals(), (2,))
