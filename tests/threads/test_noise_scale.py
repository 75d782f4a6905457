"""The gradient noise scale: that of gradients whose noise is known, for the ranks' own norms and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce, CommHook, GradientExchange
from guozhuang.exchange.noise_scale import NoiseMeter, NoiseScale
from tests.processes.cases import assert_equal_across_ranks
from tests.threads.ranks import run_threads

WIDTH, BATCH = 400, 8


class Linear(nn.Module):
    """Its gradient on a sample is the sample: a mean of ``signal`` in each element, with a variance of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * (self.one + self.other)).sum(1).mean()


def trained(
    meter: NoiseMeter | None, rank: int, signal: float, steps: int = 30, inner: GradientExchange[Any] | None = None
) -> Any:
    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.001)
    if meter is not None:
        model.use_exchange(NoiseScale(inner or AllReduce(), meter))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model(torch.randn(BATCH, WIDTH, generator=draw) + signal).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("signal", [0.5, 0.1])
def test_noise_that_is_known_is_found(signal: float) -> None:
    def on_rank(rank: int, size: int) -> float | None:
        meter = NoiseMeter(smoothing=0.99)
        measured, plain = trained(meter, rank, signal), trained(None, rank, signal)
        assert all(torch.equal(p, q) for p, q in zip(measured.parameters(), plain.parameters(), strict=True))
        assert_equal_across_ranks(measured)
        assert meter.num_steps == 30
        return meter.noise_scale(BATCH)

    found = run_threads(on_rank, 3)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(1.0 / signal**2, rel=0.15)  # variance 1 over signal^2, for each element


def test_norms_above_the_largest_float16_are_measured() -> None:
    def on_rank(rank: int, size: int) -> float | None:
        model, meter = DistributedDataParallel(Linear().half()), NoiseMeter()
        model.use_exchange(NoiseScale(AllReduce(), meter))
        draw = torch.Generator().manual_seed(rank)
        for _ in range(20):
            rows = 4096 * (torch.randn(BATCH, WIDTH, generator=draw) + 0.5)  # the norm of all is above 1e5
            model(rows.half()).backward()
            model.zero_grad()
        return meter.noise_scale(BATCH)

    assert run_threads(on_rank, 2)[0] == pytest.approx(4.0, rel=0.3)


def test_it_costs_nothing_while_it_is_off_and_measures_some_steps() -> None:
    def on_rank(rank: int, size: int) -> tuple[int, int, Any]:
        off, some, alone = NoiseMeter(), NoiseMeter(every=4), NoiseMeter()
        off.is_on = False
        for meter in (off, some):
            trained(meter, rank, 0.5, steps=9)
        return off.num_steps, some.num_steps, (off.noise_scale(BATCH), alone.noise_scale(BATCH))

    assert run_threads(on_rank, 2)[0] == (0, 3, (None, None))


def test_a_step_whose_exchange_is_waited_for_twice_counts_once() -> None:
    """Backward waits for each bucket of a hook of several rounds, and for all of them at its end."""

    def mean(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def on_rank(rank: int, size: int) -> tuple[int, int]:
        hooked, plain = NoiseMeter(), NoiseMeter()
        trained(plain, rank, 0.5, steps=5)
        trained(hooked, rank, 0.5, steps=5, inner=CommHook(mean, None))
        assert hooked.noise_scale(BATCH) == pytest.approx(plain.noise_scale(BATCH), rel=1e-3)
        return hooked.num_steps, plain.num_steps

    assert run_threads(on_rank, 2) == [(5, 5)] * 2


def test_what_cannot_be_told_is_not_told() -> None:
    def on_rank(rank: int, size: int) -> list[float | None]:
        found = []
        for own, averaged in ((2.0, 1.0), (8.0, 2.0), (1.0, 1.5), (math.nan, 1.0)):
            meter = NoiseMeter(smoothing=0.0)
            assert dist.group.WORLD is not None
            meter.add(torch.tensor(own), torch.tensor(averaged), dist.group.WORLD)
            found.append(meter.noise_scale(BATCH))
        return found

    assert run_threads(on_rank, 2)[1] == [math.inf, math.inf, 0.0, None]
    with pytest.raises(UsageError, match=r"smoothing=1\.0, every=1"):
        NoiseMeter(smoothing=1.0)
