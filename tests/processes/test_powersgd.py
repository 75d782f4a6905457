"""PowerSGD on real ranks, against the algorithm as the paper writes it, with a QR decomposition, in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError
from guozhuang.exchange.powersgd import PowerSGD
from guozhuang.gradients.buckets import Bucket
from tests.processes.cases import as_tests, seeded
from tests.processes.gradient_methods import buckets_of, exchange_all, fill, gradient

SHAPES: list[list[tuple[int, ...]]] = [[(40, 30), (7,), (40, 30)], [(12, 3, 5, 2), (5, 4), (1,)]]
POWER = PowerSGD(rank=2, min_compression_rate=2)
COMPRESSED = {"p0.0", "p0.2", "p1.0"}


class Paper:
    """One matrix, all ranks in one process, in float64."""

    def __init__(self, shape: Sequence[int], first_basis: Tensor, size: int) -> None:
        self.m = shape[0]
        self.n = math.prod(shape[1:])
        self.basis = first_basis.double()
        self.errors = [torch.zeros(self.m, self.n, dtype=torch.float64) for _ in range(size)]

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        wanted = [g.double().view(self.m, self.n) + e for g, e in zip(gradients, self.errors, strict=True)]
        p, _ = torch.linalg.qr(sum(m @ self.basis for m in wanted) / len(wanted))
        self.basis = sum(m.T @ p for m in wanted) / len(wanted)
        result = p @ self.basis.T
        self.errors = [m - result for m in wanted]
        return result


def case_it_is_the_papers(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    state = POWER.prepare(buckets, dist.group.WORLD)
    first = POWER.state_dict(state)["basis"]
    assert first.keys() == COMPRESSED
    shapes = {name: view.shape for bucket in buckets for name, view in zip(bucket.names, bucket.views, strict=True)}
    papers = {name: Paper(shapes[name], first[name], size) for name in COMPRESSED}
    for step in range(4):
        fill(buckets, rank, step)
        exchange_all(POWER, buckets, state, step)
        for bucket in buckets:
            for name, view in zip(bucket.names, bucket.views, strict=True):
                gradients = [gradient(name, view.shape, each, step) for each in range(size)]
                mean = sum(gradients) / size
                wanted = papers[name].step(gradients).view(view.shape).float() if name in COMPRESSED else mean
                torch.testing.assert_close(view, wanted, rtol=1e-3, atol=1e-3)


def case_all_ranks_hold_the_same_bits_and_nothing_is_lost(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    state = POWER.prepare(buckets, dist.group.WORLD)
    got = [torch.zeros_like(bucket.flat) for bucket in buckets]
    wanted = [torch.zeros_like(bucket.flat) for bucket in buckets]
    for step in range(5):
        fill(buckets, rank, step)
        for bucket, total in zip(buckets, wanted, strict=True):
            mean = bucket.flat.clone()
            dist.all_reduce(mean)
            total += mean / size
        exchange_all(POWER, buckets, state, step)
        for bucket, total in zip(buckets, got, strict=True):
            lowest, highest = bucket.flat.clone(), bucket.flat.clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            assert torch.equal(lowest, highest)
            total += bucket.flat
    errors = POWER.state_dict(state)["error"]
    for bucket, total, mean in zip(buckets, got, wanted, strict=True):
        held = Bucket(0, True, bucket.names, bucket.parameters)
        for name, view in zip(held.names, held.views, strict=True):
            if name in errors:
                view.copy_(errors[name].view(view.shape))
        dist.all_reduce(held.flat)
        torch.testing.assert_close(total + held.flat / size, mean, rtol=1e-4, atol=1e-4)


def case_low_rank_gradients_travel_exactly(rank: int, size: int) -> None:
    [bucket] = buckets_of([[(30, 20)]])
    state = POWER.prepare([bucket], dist.group.WORLD)
    with seeded(0):
        left, right = torch.randn(30, 2), torch.randn(2, 20)
    for step in range(3):
        bucket.flat.copy_((left @ right).view(-1) * (rank + 1))
        exchange_all(POWER, [bucket], state, step)
        mean = (left @ right).view(-1) * (size + 1) / 2
        if step:
            torch.testing.assert_close(bucket.flat, mean, rtol=1e-3, atol=1e-3)


def case_zeros_and_huge_numbers(rank: int, size: int) -> None:
    [bucket] = buckets_of([[(30, 20)]])
    state = POWER.prepare([bucket], dist.group.WORLD)
    for step, scale in enumerate((0.0, 1e18, 1e-18, 0.0, 1.0)):
        bucket.flat.copy_(torch.ones(600) * scale)
        exchange_all(POWER, [bucket], state, step)
        assert bucket.flat.isfinite().all(), scale
        if scale == 1e18:
            torch.testing.assert_close(bucket.flat, torch.ones(600) * scale)


def case_huge_numbers_spoil_their_step_only(rank: int, size: int) -> None:
    [bucket] = buckets_of([[(30, 20)]])
    state = POWER.prepare([bucket], dist.group.WORLD)
    with seeded(0):
        signs = torch.randn(30, 20).sign().view(-1)
    for step, scale in enumerate((1.0, 3e36, 1e37, 3e37, 1e38, 3e38, 3e38)):
        bucket.flat.copy_(signs * scale)
        exchange_all(POWER, [bucket], state, step)
        assert all(bool(value.isfinite().all()) for kept in POWER.state_dict(state).values() for value in kept.values())
    assert bucket.flat.isnan().all()
    for step in range(7, 10):
        bucket.flat.copy_(signs)
        exchange_all(POWER, [bucket], state, step)
    assert bucket.flat.isfinite().all()


def case_the_rank_comes_back_after_a_step_of_lower_rank(rank: int, size: int) -> None:
    [bucket] = buckets_of([[(30, 20)]])
    state = POWER.prepare([bucket], dist.group.WORLD)
    with seeded(0):
        left, right = torch.randn(30, 2), torch.randn(2, 20)
    for step in range(6):
        low = step < 2
        bucket.flat.copy_((left[:, :1] @ right[:1] if low else left @ right).view(-1))
        exchange_all(POWER, [bucket], state, step)
    torch.testing.assert_close(bucket.flat, (left @ right).view(-1), rtol=1e-3, atol=1e-3)


def case_states_of_other_ranks_are_refused(rank: int, size: int) -> None:
    fewer = PowerSGD(rank=1)
    buckets = buckets_of(SHAPES)
    state = fewer.prepare(buckets, dist.group.WORLD)
    with pytest.raises(UsageError, match="another shape"):
        fewer.load_state_dict(state, POWER.state_dict(POWER.prepare(buckets_of(SHAPES), dist.group.WORLD)))
    with pytest.raises(UsageError, match="no state of PowerSGD"):
        fewer.load_state_dict(state, {})


def case_what_is_not_finite_reaches_all_and_leaves_no_trace(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    state = POWER.prepare(buckets, dist.group.WORLD)
    fill(buckets, rank, 0)
    exchange_all(POWER, buckets, state, 0)
    before = POWER.state_dict(state)
    fill(buckets, rank, 1)
    if rank == 0:
        buckets[0].views[0][1, 1] = float("nan")
    exchange_all(POWER, buckets, state, 1)
    assert buckets[0].views[0].isnan().all() and buckets[1].flat.isfinite().all()
    after = POWER.state_dict(state)
    for kind in ("error", "basis"):
        assert torch.equal(before[kind]["p0.0"], after[kind]["p0.0"])


test_cases = as_tests(globals(), (2, 3), on="threads")


@pytest.mark.parametrize(
    ("kind", "value"), [("rank", 0), ("min_compression_rate", 0.0), ("min_compression_rate", -1.0)]
)
def test_what_makes_no_sense_is_refused(kind: str, value: float) -> None:
    with pytest.raises(UsageError):
        PowerSGD(**{kind: value})  # type: ignore[arg-type]
