"""What holds for every exchange of gradients: a table of methods and properties, each method through DistributedDataParallel.

The model's gradients are given: small integers, which sums keep exact, so that two runs of a method that should see the same
gradients must give the same bits, however much the method loses.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.parameter_server import ParameterServer
from guozhuang.gradients.buckets import Bucket
from tests.processes.cases import as_table, assert_equal_across_ranks, grads, said, seeded
from tests.processes.gradient_methods import METHODS, Method, buckets_of, exchange_all, fill
from tests.threads.ranks import run_threads
from tests.waiting import LIMIT_S, until

SHAPES = {"first": (12, 10), "second": (7,), "third": (30, 20), "number": ()}
CAP_MB = 0.002  # several buckets


class Given(nn.Module):
    """Its loss is the sum of each parameter times what is given for it, which is therefore its gradient."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        super().__init__()
        for name, shape in shapes.items():
            dtype = (dtypes or {}).get(name, torch.float32)
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        # In the order of the parameters, so that the buckets are laid out as they were at first.
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.named_parameters():
            if name in given:
                total = total + (parameter * given[name]).double().sum()
        return total


def given(model: nn.Module, rank: int, step: int, scale: int = 1) -> dict[str, Tensor]:
    made = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        random = torch.Generator().manual_seed(10_000 * number + 100 * step + rank)
        values = torch.randint(-8, 9, parameter.shape, generator=random) * scale
        made[name.removeprefix("module.")] = values.to(parameter.dtype)
    return made


def wrapped(method: Method, size: int, model: nn.Module, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=options.pop("bucket_cap_mb", CAP_MB), **options)
    ddp.use_exchange(method.make(size))
    return ddp


def backward(ddp: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ddp(values).backward()
    return {name: gradient for name, gradient in grads(ddp).items() if gradient is not None}


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{name}: {float((value - theirs[name]).abs().max())} apart"


def near(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], exact: bool) -> None:
    """Equal bits, but for exchanges that scale gradients before they sum them, where the order of roundings shows."""
    if not exact:
        assert_equal(ours, theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-2)


def case_uneven_inputs(method: Method, rank: int, size: int) -> None:
    """Ranks without data add zeros."""
    ours, theirs = (wrapped(method, size, Given(SHAPES)) for _ in range(2))
    num_steps = 2 + size
    with ours.join():
        for step in range(2 + rank + 1):
            ours.zero_grad()
            last = backward(ours, given(ours, rank, step))
    for step in range(num_steps):
        theirs.zero_grad()
        wanted = backward(theirs, given(theirs, rank, step, scale=int(step <= 2 + rank)))
    if rank == size - 1:
        assert_equal(last, wanted)


def case_accumulation(method: Method, rank: int, size: int) -> None:
    """What was accumulated without an exchange goes with the next one."""
    ours, theirs = (wrapped(method, size, Given(SHAPES)) for _ in range(2))
    for step in range(0, 4, 2):
        ours.zero_grad()
        theirs.zero_grad()
        first, second = (given(ours, rank, each) for each in (step, step + 1))
        with ours.no_sync():
            ours(first).backward()
        found = backward(ours, second)
        near(found, backward(theirs, {name: first[name] + second[name] for name in first}), not method.says)


def case_parameter_groups(method: Method, rank: int, size: int) -> None:
    ddp = wrapped(method, size, Given(SHAPES))
    named = dict(ddp.module.named_parameters())
    names = list(named)
    two = [{"params": [named[n] for n in names[:2]]}, {"params": [named[n] for n in names[2:]], "lr": 0.5}]
    optimizer = torch.optim.SGD(two, lr=0.25)
    for step in range(3):
        before = {name: p.detach().clone() for name, p in named.items()}
        gradients = backward(ddp, given(ddp, rank, step))
        optimizer.step()
        for name, p in named.items():
            lr = 0.25 if name in names[:2] else 0.5
            torch.testing.assert_close(p.detach(), before[name] - lr * gradients[name])
        optimizer.zero_grad()
    assert_equal_across_ranks(ddp)


def case_mixed_dtypes(method: Method, rank: int, size: int) -> None:
    dtypes = {"first": torch.float64, "second": torch.bfloat16, "number": torch.float64}
    if method.refuses:
        with pytest.raises(UsageError, match="|".join(str(dtype) for dtype in method.refuses)):
            wrapped(method, size, Given(SHAPES, dtypes))
        return
    ddp = wrapped(method, size, Given(SHAPES, dtypes))
    for step in range(3):
        ddp.zero_grad()
        gradients = backward(ddp, given(ddp, rank, step))
    for name, p in ddp.module.named_parameters():
        assert gradients[name].dtype == p.dtype
        assert gradients[name].isfinite().all()
    assert_equal_across_ranks(ddp, lambda p: p.grad)


def case_one_number_and_a_huge_parameter(method: Method, rank: int, size: int) -> None:
    for shape in ((1,), (), (400, 300)):
        ddp = wrapped(method, size, Given({"only": shape}))
        for step in range(2):
            ddp.zero_grad()
            backward(ddp, given(ddp, rank, step))
        assert_equal_across_ranks(ddp, lambda p: p.grad)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in ddp.parameters())


def case_nan_is_said_and_goes_no_further_than_its_step(method: Method, rank: int, size: int) -> None:
    ddp = wrapped(method, size, Given(SHAPES))
    with said() as seen:
        for step in range(5):
            ddp.zero_grad()
            values = given(ddp, rank, step)
            if step == 3 and rank == size - 1:
                values["third"][2, 1] = float("nan")
            gradients = backward(ddp, values)
            if step == 3:
                found = gradients["third"].isnan()
                assert bool(found[2, 1]), "a NaN was hidden"
                least, most = found.float(), found.float()
                dist.all_reduce(least, dist.ReduceOp.MIN)
                dist.all_reduce(most, dist.ReduceOp.MAX)
                assert torch.equal(least, most), "a NaN did not reach all ranks"
            else:
                assert all(value.isfinite().all() for value in gradients.values()), step
    if method.says and size > 1 and rank == size - 1:
        assert any("third" in text for text in seen), seen
        assert any(f"rank {rank}" in text for text in seen), seen


def case_equal_bits_on_all_ranks(method: Method, rank: int, size: int) -> None:
    ddp = wrapped(method, size, Given(SHAPES))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        values = given(ddp, rank, step)
        backward(ddp, {name: value * 0.37 for name, value in values.items()})
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_across_ranks(ddp)


def case_resume_is_exact(method: Method, rank: int, size: int) -> None:
    def go_on(ddp: DistributedDataParallel) -> dict[str, Tensor]:
        found = {}
        for step in range(3, 5):
            ddp.zero_grad()
            found |= {f"{step} {name}": value for name, value in backward(ddp, given(ddp, rank, step)).items()}
        return found

    ours = wrapped(method, size, Given(SHAPES))
    for step in range(3):
        ours.zero_grad()
        backward(ours, given(ours, rank, step))
    saved = copy.deepcopy(ours.exchange_state_dict())
    again = wrapped(method, size, Given(SHAPES))
    again.load_exchange_state_dict(saved)
    assert_equal(go_on(ours), go_on(again))


def case_unused_parameters(method: Method, rank: int, size: int) -> None:
    """What a rank does not use counts as zeros."""
    ours, theirs = (wrapped(method, size, Given(SHAPES), find_unused_parameters=True) for _ in range(2))
    for step in range(3):
        values = given(ours, rank, step)
        unused = {"second", "number"} if rank else set()
        found = backward(ours, {name: value for name, value in values.items() if name not in unused})
        wanted = backward(theirs, {name: value * (name not in unused) for name, value in values.items()})
        near(found, wanted, not method.says)
        for ddp in (ours, theirs):
            ddp.zero_grad()


SIZES: list[list[tuple[int, ...]]] = [[(1,)], [(3, 5), (2,)], [(40, 50), (7,), (33, 3)]]


def case_state_goes_on_exactly_in_other_buckets(method: Method, rank: int, size: int) -> None:
    """Whether the layout changes in training or at a checkpoint; and with buckets of which some ranks have no part."""
    names = [name for bucket in buckets_of(SIZES) for name in bucket.names]

    def run(shapes: list[list[tuple[int, ...]]], reloads: bool, together: bool) -> list[Tensor]:
        exchange, buckets = method.make(size), buckets_of(shapes)
        state = exchange.prepare(buckets, dist.group.WORLD)
        for step in range(3):
            fill(buckets, rank, step)
            exchange_all(exchange, buckets, state, step)
        if together:
            [only] = buckets = buckets_of([[shape for each in shapes for shape in each]])
            only.names = tuple(names)
        if reloads:
            saved = copy.deepcopy(exchange.state_dict(state))
            state = exchange.prepare(buckets, dist.group.WORLD)
            exchange.load_state_dict(state, saved)
        elif together:
            state = exchange.prepare(buckets, dist.group.WORLD, state)
        results = []
        for step in range(3, 5):
            fill(buckets, rank, step)
            exchange_all(exchange, buckets, state, step)
            results += [bucket.flat.clone() for bucket in buckets]
        return results

    for shapes, together in ((SIZES, False), (SIZES, True), (SIZES[:1], False)):
        pair = [run(shapes, reloads, together) for reloads in (True, False)]
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True)), together


def case_the_order_in_which_buckets_end_does_not_matter(method: Method, rank: int, size: int) -> None:
    shapes: list[list[tuple[int, ...]]] = [[(11 + i,)] for i in range(9)]
    results = []
    for shuffles in (False, True):
        exchange, buckets = method.make(size), buckets_of(shapes)
        state = exchange.prepare(buckets, dist.group.WORLD)
        for step in range(2):
            fill(buckets, rank, step)
            works = [exchange.start(bucket, state, step) for bucket in buckets]
            dist.all_reduce(torch.ones(3))  # of the main thread, in the group that was handed over
            if shuffles:
                random.Random(rank).shuffle(works)
            for work in works:
                work.wait()
                assert work.is_completed()
        results.append([bucket.flat for bucket in buckets])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def case_a_bucket_without_elements(method: Method, rank: int, size: int) -> None:
    exchange, bucket = method.make(size), Bucket(0, True, ["none"], [nn.Parameter(torch.zeros(0, 3))])
    state = exchange.prepare([bucket], dist.group.WORLD)
    exchange.start(bucket, state, 0).wait()
    exchange.load_state_dict(state, exchange.state_dict(state))


def case_what_does_not_fit_is_refused(method: Method, rank: int, size: int) -> None:
    exchange, buckets = method.make(size), buckets_of([[(9,)]])
    state = exchange.prepare(buckets, dist.group.WORLD)
    with pytest.raises(UsageError, match=r"the checkpoint holds|keeps no state|no state of"):
        exchange.load_state_dict(state, {"of": {"another": torch.zeros(1)}})
    # Of a node only the first rank may have to refuse.
    if method.says and not method.takes_integers and not isinstance(exchange, Hierarchical):
        with pytest.raises(UsageError, match="int64"):
            exchange.prepare([Bucket(0, True, ["counts"], [torch.zeros(3, dtype=torch.int64)])], dist.group.WORLD)


NUM_STEPS = 60
_ONE_AT_A_TIME = threading.Lock()


def first_model() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))


def loss_of(model: nn.Module, step: int, ranks: Sequence[int], size: int) -> Tensor:
    x = torch.cat([torch.randn(16, 10, generator=torch.Generator().manual_seed(step * size + rank)) for rank in ranks])
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


@functools.cache
def loss_of_plain_averaging(size: int) -> float:
    """The last loss of one process on the batches of all ranks, which is what averaged gradients give."""
    model = first_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        loss = loss_of(model, step, range(size), size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def case_it_trains_about_as_well_as_plain_averaging(method: Method, rank: int, size: int) -> None:
    if method.loss is None:
        return
    ddp = DistributedDataParallel(first_model(), bucket_cap_mb=0.0003)
    ddp.use_exchange(method.make(size))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        loss = loss_of(ddp, step, [rank], size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    with _ONE_AT_A_TIME:
        plain = loss_of_plain_averaging(size)
    assert float(total) / size < method.loss * plain + 0.05, (float(total) / size, plain)
    assert ddp.exchange_state_dict()["step"] == NUM_STEPS


test_holds = as_table(globals(), METHODS, long=case_it_trains_about_as_well_as_plain_averaging)


def drops_works(rank: int, size: int) -> None:
    exchange, [bucket] = ParameterServer(part_bytes=2000), buckets_of([[(30, 20)]])
    state = exchange.prepare([bucket], dist.group.WORLD)
    work = exchange.start(bucket, state, 0)
    work.wait()
    seen = weakref.ref(work)
    del work
    until(lambda: seen() is None, LIMIT_S)  # a thread may hold an answer for a moment
    state.close()


def test_works_of_servers_end_without_the_garbage_collector() -> None:
    """They hold slices of a bucket, which would count as held by the program."""
    run_threads(drops_works, 2)
