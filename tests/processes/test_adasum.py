"""The adaptive sum on real ranks, against the recursion on each parameter's gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.adasum import Adasum
from guozhuang.gradients.buckets import Bucket
from tests.processes.cases import (
    as_tests,
    assert_equal_across_ranks,
    batch,
    mlp,
    said,
    seeded,
)
from tests.processes.gradient_methods import buckets_of, exchange_all, fill
from tests.processes.test_compressed import SHAPES
from tests.pure.test_adasum import adasum


def wanted_of(parts: Sequence[Tensor]) -> Tensor:
    shape = parts[0].shape
    return torch.from_numpy(adasum([p.double().reshape(-1).numpy() for p in parts])).view(shape)


def of_all_ranks(size: int, step: int) -> list[list[Bucket]]:
    everyone = [buckets_of(SHAPES) for _ in range(size)]
    for rank, buckets in enumerate(everyone):
        fill(buckets, rank, step)
    return everyone


def case_each_parameter_is_the_recursion(rank: int, size: int) -> None:
    exchange, buckets = Adasum(), buckets_of(SHAPES)
    state = exchange.prepare(buckets, dist.group.WORLD)
    for step in range(3):
        fill(buckets, rank, step)
        exchange_all(exchange, buckets, state, step)
        everyone = of_all_ranks(size, step)
        for b, bucket in enumerate(buckets):
            for i, view in enumerate(bucket.views):
                wanted = wanted_of([others[b].views[i] for others in everyone])
                torch.testing.assert_close(view.double(), wanted, rtol=1e-5, atol=1e-5)
            lowest, highest = bucket.flat.clone(), bucket.flat.clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            assert torch.equal(lowest, highest)


def case_every_dtype_and_size(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        for scale in (1.0, 1e-4):
            exchange = Adasum()
            bucket = Bucket(0, True, ["p", "q"], [torch.zeros(41, dtype=dtype), torch.zeros(1, dtype=dtype)])
            state = exchange.prepare([bucket], dist.group.WORLD)
            parts = [
                (torch.randn(42, generator=torch.Generator().manual_seed(r), dtype=torch.float32) * scale).to(dtype)
                for r in range(size)
            ]
            bucket.flat.copy_(parts[rank])
            exchange.start(bucket, state, 0).wait()
            real = [torch.view_as_real(p).reshape(-1) if dtype.is_complex else p for p in parts]
            found = torch.view_as_real(bucket.flat).reshape(-1) if dtype.is_complex else bucket.flat
            at = 82 if dtype.is_complex else 41
            wanted = torch.cat([wanted_of([p[:at] for p in real]), wanted_of([p[at:] for p in real])])
            tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}.get(dtype, 1e-5)
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * scale)


def case_zeros_of_all_and_of_some(rank: int, size: int) -> None:
    exchange, [bucket] = Adasum(), buckets_of([[(3, 5), (2,)]])
    state = exchange.prepare([bucket], dist.group.WORLD)
    bucket.flat.zero_()
    exchange.start(bucket, state, 0).wait()
    assert torch.equal(bucket.flat, torch.zeros(17))
    bucket.flat.fill_(2.0 if rank == 0 else 0.0)
    exchange.start(bucket, state, 1).wait()
    assert torch.equal(bucket.flat, torch.full((17,), 2.0))


def case_nan_is_said_and_spoils_its_parameter_only(rank: int, size: int) -> None:
    if size == 1:
        return  # alone, a gradient is left as it is
    exchange, [bucket] = Adasum(), buckets_of([[(6,), (50,)]])
    state = exchange.prepare([bucket], dist.group.WORLD)
    fill([bucket], rank, 0)
    if rank == size - 1:
        bucket.views[1][7] = float("inf")
    with said() as seen:
        exchange.start(bucket, state, 0).wait()
    assert bucket.views[1].isnan().all() and bucket.views[0].isfinite().all()
    if rank == size - 1:
        assert "'p0.1'" in seen[0] and f"rank {rank}" in seen[0], seen
    else:
        assert not seen


def case_integers_are_refused(rank: int, size: int) -> None:
    bucket = Bucket(0, True, ["counts"], [torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(UsageError, match="int64"):
        Adasum().prepare([bucket], dist.group.WORLD)


def case_ranks_without_data_change_nothing_whatever_is_divided_by(rank: int, size: int) -> None:
    found = []
    for initial in (True, False):
        ddp = DistributedDataParallel(mlp())
        ddp.use_exchange(Adasum())
        with ddp.join(divide_by_initial_world_size=initial):
            for step in range(1 + 2 * rank):
                ddp.zero_grad()
                ddp(batch(rank, step)).pow(2).mean().backward()
        found.append([p.grad for p in ddp.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seldom = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        y = self.net(x)
        return self.seldom(y) if seldom else y


def case_ddp_trains_with_it(rank: int, size: int) -> None:
    """Accumulation, parameters that only some ranks use, several buckets, ranks that run out of data: still the formula."""
    with seeded(0):
        module = Sometimes()
    ddp = DistributedDataParallel(copy.deepcopy(module), find_unused_parameters=True, bucket_cap_mb=0.0002)
    ddp.use_exchange(Adasum())

    def loss_of(model: nn.Module, of: int, step: int, part: int) -> Tensor:
        loss: Tensor = model(batch(of, step + 100 * part), of == 0).pow(2).mean()
        return loss

    counts = [5 if r == 0 else 3 for r in range(size)]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(counts[rank]):
            optimizer.zero_grad()
            with ddp.no_sync():
                loss_of(ddp, rank, step, 0).backward()
            loss_of(ddp, rank, step, 1).backward()
            optimizer.step()
    for step in range(max(counts)):
        own = []
        for other in range(size):
            module.zero_grad()
            if step < counts[other]:
                (loss_of(module, other, step, 0) + loss_of(module, other, step, 1)).backward()
            own.append([torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
        for i, p in enumerate(module.parameters()):
            p.data -= 0.1 * wanted_of([g[i] for g in own]).float()
    for (name, p), q in zip(ddp.module.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
    assert_equal_across_ranks(ddp)


test_cases = as_tests(
    globals(),
    (3,),
    slow=(1, 2, 4, 8),
    on="threads",
    not_slow=[case_each_parameter_is_the_recursion, case_ddp_trains_with_it],
)
