"""Coded exchanges on real ranks, against a few lines that compute what every rank should hold."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.buckets import Bucket
from guozhuang.errors import UsageError
from guozhuang.exchange.base import GradientExchange
from guozhuang.exchange.codec import Codec
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.dithering import Dithering
from guozhuang.exchange.quantize import MinMax8
from tests.processes.cases import names_of_cases, results_of_cases
from tests.pure.test_codecs import bagua_uint8
from tests.ranks import RankError, run_ranks

SHAPES = [[(1,)], [(3, 5), (2,)], [(100, 100), (7,), (33, 3)]]


def gradient(name: str, shape: Sequence[int], rank: int, step: int) -> Tensor:
    seed = sum(map(ord, name)) * 1000 + rank * 100 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + rank)


def buckets_of(shapes: list[list[tuple[int, ...]]]) -> list[Bucket]:
    made = []
    for index, members in enumerate(shapes):
        names = [f"p{index}.{i}" for i in range(len(members))]
        made.append(Bucket(index, index == len(shapes) - 1, names, [nn.Parameter(torch.zeros(s)) for s in members]))
    return made


def fill(buckets: Sequence[Bucket], rank: int, step: int) -> None:
    for bucket in buckets:
        for name, view in zip(bucket.names, bucket.views, strict=True):
            view.copy_(gradient(name, view.shape, rank, step))


def exchange_all(exchange: GradientExchange[Any], buckets: Sequence[Bucket], state: Any, step: int) -> None:
    for work in [exchange.start(bucket, state, step) for bucket in buckets]:
        work.wait()


def bytegrad(parts: list[Tensor]) -> Tensor:
    """What all ranks hold after ByteGrad, from what each had."""
    size, count = len(parts), parts[0].numel()
    length = -(-count // size)
    padded = torch.zeros(size, size * length)
    padded[:, :count] = torch.stack(parts)
    rows = padded.view(size, size, length).numpy()
    owners = []
    for i in range(size):
        mean = torch.stack([torch.from_numpy(bagua_uint8(rows[rank, i])) for rank in range(size)]).mean(0)
        owners.append(torch.from_numpy(bagua_uint8(mean.numpy())))
    return torch.cat(owners)[:count]


def case_minmax8_is_bytegrad(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    exchange = Compressed(MinMax8())
    state = exchange.prepare(buckets, dist.group.WORLD)
    for step in range(2):
        fill(buckets, rank, step)
        exchange_all(exchange, buckets, state, step)
        for bucket in buckets:
            parts = []
            for other in range(size):
                twin = buckets_of(SHAPES)[bucket.index]
                fill([twin], other, step)
                parts.append(twin.flat.clone())
            assert torch.equal(bucket.flat, bytegrad(parts)), (bucket.index, step)


def case_all_ranks_hold_the_same_bits(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    exchange = Compressed(Dithering(), error_feedback=True)
    state = exchange.prepare(buckets, dist.group.WORLD)
    fill(buckets, rank, 0)
    exchange_all(exchange, buckets, state, 0)
    for bucket in buckets:
        lowest, highest = bucket.flat.clone(), bucket.flat.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        assert torch.equal(lowest, highest)


def case_feedback_loses_nothing(rank: int, size: int) -> None:
    """The sum of all results, and what is still held back, is the sum of all means."""
    buckets, num_steps = buckets_of(SHAPES), 6
    exchange = Compressed(Dithering(block=8), error_feedback=True)
    state = exchange.prepare(buckets, dist.group.WORLD)
    got = [torch.zeros_like(bucket.flat) for bucket in buckets]
    wanted = [torch.zeros_like(bucket.flat) for bucket in buckets]
    for step in range(num_steps):
        fill(buckets, rank, step)
        means = [bucket.flat.clone() for bucket in buckets]
        for total, mean in zip(wanted, means, strict=True):
            dist.all_reduce(mean)
            total += mean / size
        exchange_all(exchange, buckets, state, step)
        for total, bucket in zip(got, buckets, strict=True):
            total += bucket.flat
    saved = exchange.state_dict(state)
    for bucket, total, mean in zip(buckets, got, wanted, strict=True):
        sent = torch.cat([saved["sent"][name] for name in bucket.names])
        dist.all_reduce(sent)
        held = sent / size + torch.cat([saved["means"][name] for name in bucket.names])
        torch.testing.assert_close(total + held, mean, rtol=1e-4, atol=1e-5)


def case_state_goes_on_exactly_in_other_buckets(rank: int, size: int) -> None:
    flat_shapes = [[shape for members in SHAPES for shape in members]]
    names = [name for bucket in buckets_of(SHAPES) for name in bucket.names]

    def run(reloads: bool) -> list[Tensor]:
        exchange = Compressed(Dithering(block=8), error_feedback=True)
        buckets = buckets_of(SHAPES)
        state = exchange.prepare(buckets, dist.group.WORLD)
        for step in range(3):
            fill(buckets, rank, step)
            exchange_all(exchange, buckets, state, step)
        [together] = buckets_of(flat_shapes)
        together.names = tuple(names)
        if reloads:
            saved = copy.deepcopy(exchange.state_dict(state))
            state = exchange.prepare([together], dist.group.WORLD)
            exchange.load_state_dict(state, saved)
        else:
            state = exchange.prepare([together], dist.group.WORLD, state)
        results = []
        for step in range(3, 5):
            fill([together], rank, step)
            exchange_all(exchange, [together], state, step)
            results.append(together.flat.clone())
        return results

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


def case_what_is_not_finite_is_said_and_reaches_all(rank: int, size: int) -> None:
    buckets = buckets_of([[(6,), (50,)]])
    exchange = Compressed(MinMax8(), error_feedback=True)
    state = exchange.prepare(buckets, dist.group.WORLD)
    fill(buckets, rank, 0)
    exchange_all(exchange, buckets, state, 0)
    before = exchange.state_dict(state)["sent"]["p0.1"]
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("guozhuang").addHandler(handler)
    fill(buckets, rank, 1)
    if rank == size - 1:
        buckets[0].views[1][7] = float("inf")
    exchange_all(exchange, buckets, state, 1)
    logging.getLogger("guozhuang").removeHandler(handler)
    assert buckets[0].flat.isnan().all()
    if rank == size - 1:
        assert "'p0.1'" in seen[0] and "NaN or infinity" in seen[0] and f"rank {rank}" in seen[0], seen
        assert torch.equal(exchange.state_dict(state)["sent"]["p0.1"], before)
    else:
        assert not seen
        exchange.state_dict(state)
    fill(buckets, rank, 2)
    exchange_all(exchange, buckets, state, 2)
    assert buckets[0].flat.isfinite().all()


@dataclass(frozen=True)
class Restless(MinMax8):
    """Takes another time on every rank and for every bucket."""

    def encode(self, rows: Tensor, codes: Tensor, random_bits: torch.Generator) -> None:
        time.sleep(random.Random(time.monotonic_ns()).random() * 0.01)
        super().encode(rows, codes, random_bits)


def case_the_order_in_which_buckets_end_does_not_matter(rank: int, size: int) -> None:
    shapes = [[(11 + i,)] for i in range(9)]
    exchange, buckets = Compressed(Restless()), buckets_of(shapes)
    state = exchange.prepare(buckets, dist.group.WORLD)
    for step in range(3):
        fill(buckets, rank, step)
        works = [exchange.start(bucket, state, step) for bucket in buckets]
        dist.all_reduce(torch.ones(3))  # of the main thread, in the group that was handed over
        order = list(range(len(works)))
        random.Random(rank).shuffle(order)
        for i in order:
            works[i].wait()
        for bucket in buckets:
            parts = []
            for other in range(size):
                twin = buckets_of(shapes)[bucket.index]
                fill([twin], other, step)
                parts.append(twin.flat.clone())
            assert torch.equal(bucket.flat, bytegrad(parts))


def case_integers_are_refused(rank: int, size: int) -> None:
    bucket = Bucket(0, True, ["counts"], [torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(UsageError, match="int64"):
        Compressed(MinMax8()).prepare([bucket], dist.group.WORLD)


def case_every_dtype_travels(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        bucket = Bucket(0, True, ["p"], [torch.zeros(40, dtype=dtype)])
        exchange = Compressed(MinMax8())
        state = exchange.prepare([bucket], dist.group.WORLD)
        bucket.flat.copy_(torch.linspace(-1, 1, 40) * (rank + 1))
        exchange.start(bucket, state, 0).wait()
        mean = torch.linspace(-1, 1, 40) * sum(range(1, size + 1)) / size
        torch.testing.assert_close(bucket.flat.to(torch.complex128).real.float(), mean, rtol=0.02, atol=0.02 * size)


def case_ddp_trains_with_it(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    plain = DistributedDataParallel(copy.deepcopy(model))
    coded = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0003)
    coded.use_exchange(Compressed(Dithering(), error_feedback=True))
    losses = {}
    for name, ddp in {"plain": plain, "coded": coded}.items():
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(60):
            x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step * size + rank))
            loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = float(loss)
    assert losses["coded"] < 1.3 * losses["plain"] + 0.05, losses
    assert coded.exchange_state_dict()["step"] == 60
    assert sorted(coded.exchange_state_dict()["exchange"]["sent"]) == sorted(n for n, _ in model.named_parameters())


def coded(model: nn.Module, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **options)
    ddp.use_exchange(Compressed(MinMax8()))
    return ddp


def near(ours: nn.Module, theirs: nn.Module) -> None:
    greatest = max(float(q.grad.abs().max()) for q in theirs.parameters() if q.grad is not None)  # of any bucket
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert float((p.grad - q.grad).abs().max()) <= 0.03 * greatest, name


def case_accumulation_and_uneven_inputs(rank: int, size: int) -> None:
    torch.manual_seed(0)
    bare = nn.Linear(8, 8)
    ours, theirs = coded(copy.deepcopy(bare)), DistributedDataParallel(copy.deepcopy(bare))
    for ddp in (ours, theirs):
        torch.manual_seed(rank)
        with ddp.no_sync():
            ddp(torch.randn(4, 8)).square().mean().backward()
        ddp(torch.randn(4, 8)).square().mean().backward()
    near(ours, theirs)
    for ddp in (ours, theirs):
        torch.manual_seed(rank)
        with ddp.join():
            for _ in range(2 + rank):
                ddp.zero_grad()
                ddp(torch.randn(4, 8)).square().mean().backward()
    if rank == size - 1:
        near(ours, theirs)


class Parts(nn.Module):
    """Two dtypes, one number, and a part that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.narrow = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.sometimes = nn.Linear(8, 8)

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        y = self.narrow(x) * self.scale + self.wide(x.double()).float()
        return self.sometimes(y) if all_of_it else y


def case_dtypes_a_number_and_unused_parameters(rank: int, size: int) -> None:
    torch.manual_seed(0)
    bare = Parts()
    ours = coded(copy.deepcopy(bare), find_unused_parameters=True)
    theirs = DistributedDataParallel(copy.deepcopy(bare), find_unused_parameters=True)
    for ddp in (ours, theirs):
        for step in range(2):
            ddp.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(4, 8), rank == 0).square().mean().backward()
    near(ours, theirs)


NAMES = names_of_cases(globals())
RESULTS = {size: results_of_cases(__name__, size, NAMES) for size in (2, 3)}


@pytest.mark.parametrize("size", RESULTS)
@pytest.mark.parametrize("name", NAMES)
def test_cases(name: str, size: int) -> None:
    RESULTS[size](name)


class Failing(MinMax8):
    def encode(self, rows: Tensor, codes: Tensor, random_bits: torch.Generator) -> None:
        raise ValueError("no code for this")


def fails_on_one(rank: int, size: int) -> str:
    bucket = buckets_of([[(9,)]])[0]
    codec: Codec = Failing() if rank == 1 else MinMax8()
    exchange = Compressed(codec)
    state = exchange.prepare([bucket], dist.group.WORLD)
    works = [exchange.start(bucket, state, step) for step in range(3)]
    texts = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return "; ".join(texts)


def test_an_error_of_one_rank_is_raised_there_and_later_exchanges_raise_too() -> None:
    results = run_ranks(fails_on_one, 2, collect_errors=True, group_timeout_s=3.0)
    assert not isinstance(results[1], RankError), results[1]
    assert results[1].startswith("ValueError: no code for this")
    assert "an earlier exchange failed" in results[1]
