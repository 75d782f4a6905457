"""Coded exchanges on real ranks, against a few lines that compute what every rank should hold."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.codecs.base import Codec
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.onebit import OneBit
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.codecs.topk import TopK
from guozhuang.exchange.compressed import Compressed
from guozhuang.gradients.buckets import Bucket
from tests.processes.cases import as_tests, said, seeded
from tests.processes.gradient_methods import buckets_of, exchange_all, fill
from tests.pure.test_codecs import bagua_uint8
from tests.ranks import RankError, run_ranks
from tests.threads.ranks import run_threads
from tests.waiting import NEVER_S

SHAPES = [[(1,)], [(3, 5), (2,)], [(100, 100), (7,), (33, 3)]]


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


class Corrected:
    """All ranks of momentum correction with the k greatest of each row, in numpy."""

    def __init__(self, size: int, count: int, k: int, mu: float, nesterov: bool, masks: bool) -> None:
        self.size, self.count, self.k, self.mu, self.nesterov, self.masks = (
            size,
            count,
            k,
            np.float32(mu),
            nesterov,
            masks,
        )
        self.length = -(-count // size)
        self.u, self.e = (np.zeros((size, size, self.length), np.float32) for _ in range(2))
        self.s = np.zeros((size, self.length), np.float32)

    def greatest(self, rows: np.ndarray) -> np.ndarray:
        places = np.argsort(-np.abs(rows), axis=-1)[..., : self.k]
        kept = np.zeros_like(rows)
        np.put_along_axis(kept, places, np.take_along_axis(rows, places, -1), -1)
        return kept

    def step(self, gradients: list[Tensor]) -> np.ndarray:
        g = np.zeros((self.size, self.size * self.length), np.float32)
        g[:, : self.count] = torch.stack(gradients).numpy()
        g = g.reshape(self.u.shape)
        self.u = self.mu * self.u + g
        wanted = (g + self.mu * self.u if self.nesterov else self.u) + self.e
        sent = self.greatest(wanted)
        self.e = wanted - sent
        if self.masks:
            self.u[sent != 0] = 0
        wanted = sent.mean(0) + self.s
        means = self.greatest(wanted)
        self.s = wanted - means
        return means.reshape(-1)[: self.count]


def case_momentum_correction_is_the_formula(rank: int, size: int) -> None:
    for nesterov, masks in ((False, True), (True, False), (True, True), (False, False)):
        [bucket] = buckets_of([[(7, 11), (13,)]])
        exchange = Compressed(TopK(3), error_feedback=True, momentum=0.9, nesterov=nesterov, masks_momentum=masks)
        state = exchange.prepare([bucket], dist.group.WORLD)
        model = Corrected(size, bucket.flat.numel(), 3, 0.9, nesterov, masks)
        for step in range(12):
            gradients = []
            for other in range(size):
                fill([bucket], other, step)
                gradients.append(bucket.flat.clone())
            wanted = torch.from_numpy(model.step(gradients))
            fill([bucket], rank, step)
            exchange.start(bucket, state, step).wait()
            torch.testing.assert_close(bucket.flat, wanted, rtol=1e-5, atol=1e-6)
            saved = exchange.state_dict(state)
            u = torch.cat([saved["momentum"][name] for name in bucket.names])
            whole = torch.from_numpy(model.u[rank].reshape(-1)[: model.count])
            torch.testing.assert_close(u, whole, rtol=1e-5, atol=1e-6)


def case_momentum_of_all_is_that_of_sgd(rank: int, size: int) -> None:
    """What loses nothing, with an optimizer without momentum, is SGD with momentum. Also alone in the world."""
    with seeded(0):
        bare = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for nesterov in (False, True):
        ours, theirs = (DistributedDataParallel(copy.deepcopy(bare), bucket_cap_mb=0.0001) for _ in range(2))
        everything = TopK(10**9)
        ours.use_exchange(Compressed(everything, momentum=0.9, nesterov=nesterov, masks_momentum=False))
        optimizers = (
            torch.optim.SGD(ours.parameters(), lr=0.05),
            torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov),
        )
        for step in range(6):
            for ddp, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * size + rank))
                parts = x.chunk(2)
                with ddp.no_sync():
                    ddp(parts[0]).square().mean().backward()
                ddp(parts[1]).square().mean().backward()
                optimizer.step()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)


def case_nan_leaves_the_momentum_as_it_was(rank: int, size: int) -> None:
    [bucket] = buckets_of([[(9,)]])
    exchange = Compressed(TopK(2), error_feedback=True, momentum=0.9)
    state = exchange.prepare([bucket], dist.group.WORLD)
    fill([bucket], rank, 0)
    exchange.start(bucket, state, 0).wait()
    before = exchange.state_dict(state)["momentum"]["p0.0"]
    fill([bucket], rank, 1)
    bucket.flat[3] = float("nan")
    exchange.start(bucket, state, 1).wait()
    assert bucket.flat.isnan().all() and torch.equal(exchange.state_dict(state)["momentum"]["p0.0"], before)


def case_a_state_of_other_settings_is_refused(rank: int, size: int) -> None:
    buckets = buckets_of(SHAPES)
    kinds = [
        Compressed(TopK(2)),
        Compressed(TopK(2), error_feedback=True),
        Compressed(TopK(2), error_feedback=True, momentum=0.9),
    ]
    states = [exchange.prepare(buckets, dist.group.WORLD) for exchange in kinds]
    for i, (exchange, state) in enumerate(zip(kinds, states, strict=True)):
        for j, (other, saved) in enumerate(zip(kinds, states, strict=True)):
            found = other.state_dict(saved)
            if i == j:
                exchange.load_state_dict(state, found)
                continue
            with pytest.raises(UsageError, match="the checkpoint holds"):
                exchange.load_state_dict(state, found)


def case_what_is_not_finite_is_said_and_reaches_all(rank: int, size: int) -> None:
    buckets = buckets_of([[(6,), (50,)]])
    exchange = Compressed(MinMax8(), error_feedback=True)
    state = exchange.prepare(buckets, dist.group.WORLD)
    fill(buckets, rank, 0)
    exchange_all(exchange, buckets, state, 0)
    before = exchange.state_dict(state)["sent"]["p0.1"]
    fill(buckets, rank, 1)
    if rank == size - 1:
        buckets[0].views[1][7] = float("inf")
    with said() as seen:
        exchange_all(exchange, buckets, state, 1)
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


def case_float64_beyond_float32_is_said(rank: int, size: int) -> None:
    bucket = Bucket(0, True, ["fine", "huge"], [torch.zeros(40, dtype=torch.float64) for _ in range(2)])
    exchange = Compressed(MinMax8(), error_feedback=True)
    state = exchange.prepare([bucket], dist.group.WORLD)
    if rank == 0:
        bucket.views[1][3] = 1e39
    with said() as seen:
        exchange.start(bucket, state, 0).wait()
    assert bucket.flat.isnan().all()
    assert ("'huge'" in seen[0] and "'fine'" not in seen[0]) if rank == 0 else not seen


def case_feedback_that_overflowed_is_forgotten(rank: int, size: int) -> None:
    for codec, momentum in ((MinMax8(), 0.0), (Dithering(block=8), 0.0), (OneBit(block=8), 0.0), (TopK(2), 0.9)):
        [bucket] = buckets_of([[(9,), (200,)]])
        exchange = Compressed(codec, error_feedback=True, momentum=momentum, masks_momentum=False)
        state = exchange.prepare([bucket], dist.group.WORLD)
        with said() as seen:
            for step in range(8):
                fill([bucket], rank, step)
                if rank == size - 1 and step < 3:
                    bucket.views[1][5:7] = torch.tensor([3.3e38, -3.3e38])
                exchange.start(bucket, state, step).wait()
            for kept in exchange.state_dict(state).values():
                assert all(value.isfinite().all() for value in kept.values()), codec
        lowest, highest = bucket.flat.clone(), bucket.flat.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        assert bucket.flat.isfinite().all() and torch.equal(lowest, highest), codec
        if rank == size - 1 and isinstance(codec, MinMax8 | TopK):
            assert any("of 'p0." in text and "overflowed" in text for text in seen), seen


class OtherOrder(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(30, 3), nn.Linear(8, 30), nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def case_resume_is_exact_where_layers_are_used_in_another_order(rank: int, size: int) -> None:
    with seeded(0):
        bare = OtherOrder()

    def begin(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
        ddp.use_exchange(Compressed(OneBit(), error_feedback=True))
        return ddp

    def train(ddp: DistributedDataParallel, steps: range) -> None:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in steps:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * size + rank))
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for stop in (0, 1, 3):  # before the ranks agreed on a layout, before it was taken up, after
        ours = begin(bare)
        registered = ours.reducer.layout
        train(ours, range(stop))
        saved = copy.deepcopy(ours.exchange_state_dict())
        again = begin(ours.module)
        again.load_exchange_state_dict(saved)
        for ddp in (ours, again):
            train(ddp, range(stop, stop + 3))
        assert ours.reducer.layout == again.reducer.layout != registered
        for (name, p), q in zip(ours.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q), (stop, name)
    old = begin(ours.module)
    old.load_exchange_state_dict({key: value for key, value in saved.items() if key != "layout"})
    train(old, range(1))
    other = begin(ours.module)
    other.load_exchange_state_dict({**saved, "layout": [["another"]]})
    train(other, range(1))


test_cases = as_tests(globals(), (2, 3, 4), on="threads")


def test_momentum_of_one_rank_is_that_of_sgd() -> None:
    run_threads(case_momentum_of_all_is_that_of_sgd, 1)


def test_momentum_that_makes_no_sense_is_refused() -> None:
    for momentum in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="below 1"):
            Compressed(TopK(), momentum=momentum)
    with pytest.raises(UsageError, match="nesterov"):
        Compressed(TopK(), nesterov=True)


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
    results = run_ranks(fails_on_one, 2, collect_errors=True, group_timeout_s=NEVER_S)
    assert not isinstance(results[1], RankError), results[1]
    assert results[1].startswith("ValueError: no code for this")
    assert "an earlier exchange failed" in results[1]
