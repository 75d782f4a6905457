"""QAdam and 1-bit Adam on real ranks, against a few lines that compute what every rank should hold, step by step."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.adam_momentum import AdamMomentum
from guozhuang.exchange.codecs.base import Codec
from guozhuang.exchange.codecs.onebit import OneBit
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.lab.measure import tcp_sent_bytes
from guozhuang.optim import QAdam
from tests.processes.cases import as_tests, assert_equal_across_ranks, batch, mlp, seeded
from tests.processes.test_compressed import bytegrad
from tests.ranks import run_ranks

WARMUP, STEPS = 4, 9


@dataclass(frozen=True)
class Exact(Codec):
    """Loses nothing, so what is left is the method's own."""

    def row_bytes(self, num_elements: int) -> int:
        return 4 * num_elements + 4 * (num_elements % 2)

    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        codes[:, : 4 * rows.shape[1]].view(torch.float32).copy_(rows)

    def decode(self, codes: Tensor, rows: Tensor) -> None:
        rows.copy_(codes[:, : 4 * rows.shape[1]].view(torch.float32))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases go by different betas, rates and decays."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    weights = [p for n, p in bare.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in bare.named_parameters() if n.endswith("bias")]
    return [
        {"params": weights, "lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"params": biases, "lr": 0.01, "betas": (0.6, 0.95), "eps": 1e-6},
    ]


class Model:
    """The maths: all ranks' gradients on one copy of the weights, in float64."""

    def __init__(self, module: nn.Module, size: int, mean: Callable[[list[Tensor]], Tensor], decoupled: bool) -> None:
        self.module, self.size, self.mean, self.decoupled = module, size, mean, decoupled
        self.m = {p: torch.zeros(p.shape, dtype=torch.float64) for p in module.parameters()}
        self.v = {p: torch.zeros_like(m) for p, m in self.m.items()}
        self.t = 0

    def gradients(self, step: int, ranks: list[int]) -> list[dict[nn.Parameter, Tensor]]:
        found = []
        for rank in ranks:
            self.module.zero_grad()
            self.module(batch(rank, step)).pow(2).mean().backward()
            found.append({p: p.grad.double() for p in self.module.parameters() if p.grad is not None})
        return found

    def step(
        self, step: int, order: list[nn.Parameter], ranks: list[int] | None = None, divisor: int | None = None
    ) -> None:
        own = self.gradients(step, ranks or list(range(self.size)))
        own += [{p: torch.zeros_like(g) for p, g in own[0].items()}] * ((divisor or len(own)) - len(own))
        self.t += 1
        settings = {
            p: (group["lr"], *group["betas"], group.get("eps", 1e-8), group.get("weight_decay", 0.0))
            for group in groups_of(self.module)
            for p in group["params"]
        }
        if self.t <= WARMUP:
            sent = {p: torch.stack([g[p] for g in own]).mean(0) for p in order}
        else:
            flats = []
            for g in own:
                parts = [settings[p][1] * self.m[p] + (1 - settings[p][1]) * g[p] for p in order]
                flats.append(torch.cat([part.reshape(-1) for part in parts]).float())
            parts = self.mean(flats).double().split([p.numel() for p in order])
            sent = {p: part.view(p.shape) for p, part in zip(order, parts, strict=True)}
        for p in order:
            lr, beta1, beta2, eps, decay = settings[p]
            weights = p.detach().double()
            extra = 0 if self.decoupled else decay * weights
            if self.decoupled:
                weights = weights * (1 - lr * decay)
            if self.t <= WARMUP:
                g = sent[p] + extra
                self.m[p] = beta1 * self.m[p] + (1 - beta1) * g
                self.v[p] = beta2 * self.v[p] + (1 - beta2) * g * g
            else:
                self.m[p] = sent[p] + (1 - beta1) * extra
            v = self.v[p] / (1 - beta2 ** min(self.t, WARMUP))
            p.data.copy_(weights - lr * self.m[p] / (1 - beta1**self.t) / (v.sqrt() + eps))


def order_of(ddp: DistributedDataParallel, module: nn.Module) -> list[nn.Parameter]:
    named = dict(module.named_parameters())
    assert ddp.reducer is not None
    [bucket] = ddp.reducer.buckets
    return [named[name.removeprefix("module.")] for name in bucket.names]


def train(ddp: DistributedDataParallel, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()


def plain_mean(flats: list[Tensor]) -> Tensor:
    return torch.stack(flats).mean(0)


def case_every_step_is_the_formula(rank: int, size: int) -> None:
    for codec, mean, decoupled, tolerance in (
        (Exact(), plain_mean, False, 1e-6),
        (Exact(), plain_mean, True, 1e-6),
        (MinMax8(), bytegrad, False, 2e-5),
    ):
        module = mlp()
        ddp = DistributedDataParallel(copy.deepcopy(module))
        optimizer = QAdam(
            groups_of(ddp), warmup_steps=WARMUP, codec=codec, decoupled_weight_decay=decoupled, foreach=bool(rank % 2)
        )
        ddp.use_exchange(optimizer.exchange())
        model = Model(module, size, mean if size > 1 else plain_mean, decoupled)
        for step in range(STEPS):
            train(ddp, optimizer, rank, range(step, step + 1))
            model.step(step, order_of(ddp, module))
            for (name, p), q in zip(ddp.module.named_parameters(), module.parameters(), strict=True):
                m = optimizer.state[p]["exp_avg"]
                torch.testing.assert_close(p.double(), q.double(), rtol=0, atol=tolerance, msg=f"{codec} {step} {name}")
                torch.testing.assert_close(
                    m.double(), model.m[q], rtol=1e-3, atol=tolerance, msg=f"m: {codec} {step} {name}"
                )
        assert_equal_across_ranks(ddp)


def case_the_warmup_is_adam_bit_for_bit(rank: int, size: int) -> None:
    for make, options in (
        (torch.optim.Adam, {"foreach": False, "weight_decay": 0.1}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True, "maximize": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ):
        ours, theirs = (DistributedDataParallel(mlp()) for _ in range(2))
        optimizer = QAdam.around(make(ours.parameters(), lr=0.01, **options), warmup_steps=WARMUP)
        ours.use_exchange(optimizer.exchange())
        plain = make(theirs.parameters(), lr=0.01, **options)
        train(ours, optimizer, rank, range(WARMUP))
        train(theirs, plain, rank, range(WARMUP))
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), (make, options)
        train(ours, optimizer, rank, range(WARMUP, STEPS))
        train(theirs, plain, rank, range(WARMUP, STEPS))
        assert_equal_across_ranks(ours)
        moved = [(p - q).abs().max() for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
        assert 0 < max(moved) < 0.1, (make, options, moved)  # it did another thing, in the same direction


def case_no_gradient_is_lost_at_the_boundary(rank: int, size: int) -> None:
    """The momentum is that of all gradients, each with its weight."""
    weight = nn.Parameter(torch.ones(3))
    holder = nn.Module()
    holder.weight = weight
    holder.forward = lambda x: weight * x
    ddp = DistributedDataParallel(holder)
    optimizer = QAdam(ddp.parameters(), lr=0.0, betas=(0.8, 0.9), warmup_steps=2, codec=Exact())
    ddp.use_exchange(optimizer.exchange())
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.full((3,), 10.0**step * (1 + rank))).sum().backward()
        optimizer.step()
    mean = sum(range(1, size + 1)) / size
    wanted = sum(0.2 * 0.8 ** (4 - step) * 10.0**step for step in range(5)) * mean
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.full((3,), wanted))


def case_onebit_adam_trains(rank: int, size: int) -> None:
    losses = {}
    for name in ("plain", "onebit"):
        model = mlp()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0002)
        optimizer: Any = torch.optim.Adam(ddp.parameters(), lr=0.01)
        if name == "onebit":
            optimizer = QAdam.around(optimizer, warmup_steps=15, codec=OneBit(block=64), error_feedback=True)
            ddp.use_exchange(optimizer.exchange())
        for step in range(60):
            x = batch(rank, step, rows=16)
            optimizer.zero_grad()
            loss = (ddp(x) - x[:, :3].sin()).square().mean()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
        assert_equal_across_ranks(ddp)
    assert losses["onebit"] < 1.5 * losses["plain"] + 0.02, losses


def case_resume_is_exact_in_both_phases(rank: int, size: int) -> None:
    def fresh() -> tuple[DistributedDataParallel, QAdam]:
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0002)
        optimizer = QAdam(groups_of(ddp), warmup_steps=WARMUP, codec=OneBit(block=8), error_feedback=True)
        ddp.use_exchange(optimizer.exchange())
        return ddp, optimizer

    for stop in (2, WARMUP, WARMUP + 2):
        ours, optimizer = fresh()
        train(ours, optimizer, rank, range(stop))
        saved = copy.deepcopy((ours.module.state_dict(), ours.exchange_state_dict(), optimizer.state_dict()))
        train(ours, optimizer, rank, range(stop, STEPS))
        theirs, resumed = fresh()
        theirs.module.load_state_dict(saved[0])
        theirs.load_exchange_state_dict(saved[1])
        resumed.load_state_dict(saved[2])
        train(theirs, resumed, rank, range(stop, STEPS))
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), (stop, name)


def case_accumulation_is_one_large_batch(rank: int, size: int) -> None:
    def run(parts: int, synchronizes: bool = False) -> DistributedDataParallel:
        ddp = DistributedDataParallel(mlp())
        optimizer = QAdam(ddp.parameters(), lr=0.01, warmup_steps=2, codec=Exact())
        ddp.use_exchange(optimizer.exchange())
        for step in range(5):
            optimizer.zero_grad()
            pieces = batch(rank, step).chunk(parts)
            for i, piece in enumerate(pieces):
                ddp.require_backward_grad_sync = synchronizes or i == len(pieces) - 1
                (ddp(piece).pow(2).mean() / parts).backward()
            optimizer.step()
        return ddp

    whole = run(1)
    for other in (run(2), run(2, True)):
        for p, q in zip(whole.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


class Sometimes(nn.Module):
    """A part that is used now and then, one that is not in the optimizer, and a word that comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.strange = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.words = nn.Embedding(5, 6)

    def forward(self, x: Tensor, seldom: bool, word: int) -> Tensor:
        y = self.strange(self.always(x)) + self.words(torch.tensor(word))
        return self.seldom(y) if seldom else y


def case_unused_parameters_and_strangers(rank: int, size: int) -> None:
    with seeded(3):
        bare = Sometimes()
    ddp = DistributedDataParallel(bare, find_unused_parameters=True)
    own = [p for n, p in bare.named_parameters() if not n.startswith("strange")]
    optimizer = QAdam(own, lr=0.01, warmup_steps=WARMUP, codec=MinMax8())
    ddp.use_exchange(optimizer.exchange())
    seldom_before = copy.deepcopy(bare.seldom.state_dict())
    for step in range(WARMUP + 5):
        optimizer.zero_grad()
        for p in bare.strange.parameters():
            p.grad = None
        used = step >= WARMUP + 2 and rank == 0
        ddp(batch(rank, step), used, step % 2 if step < WARMUP + 1 else 4).pow(2).mean().backward()
        if step < WARMUP + 2:
            assert bare.seldom.weight.grad is None
        weights = bare.words.weight.detach().clone()
        optimizer.step()
        # A row that had no gradient in the warm-up, and rows that never have one.
        assert float((bare.words.weight - weights).abs().max()) < 0.1, step
        assert torch.equal(bare.words.weight[2:4], weights[2:4])
        if step < WARMUP + 2:
            assert all(torch.equal(p, seldom_before[n]) for n, p in bare.seldom.state_dict().items())
    assert not torch.equal(bare.words.weight[4], weights[4])
    assert float((bare.seldom.weight - seldom_before["weight"]).abs().max()) < 0.05
    assert float((bare.seldom.weight - seldom_before["weight"]).abs().max()) > 0.001
    assert_equal_across_ranks(ddp)
    assert_equal_across_ranks(ddp, lambda p: p.grad)


def case_uneven_inputs(rank: int, size: int) -> None:
    """The rank with most data goes on as if the others were not there: their momentum, which is old, does not count."""
    for count, divides_by_all in (
        (WARMUP + 2, False),
        (2, False),
        (WARMUP + 2, True),
    ):  # behind the boundary, before it
        module = mlp()
        ddp = DistributedDataParallel(copy.deepcopy(module))
        optimizer = QAdam(groups_of(ddp), warmup_steps=WARMUP, codec=Exact())
        ddp.use_exchange(optimizer.exchange())
        model = Model(module, size, plain_mean, False)
        with ddp.join(divide_by_initial_world_size=divides_by_all):
            train(ddp, optimizer, rank, range(STEPS if rank == 0 else count))
        for step in range(STEPS):
            ranks = list(range(size)) if step < count else [0]
            model.step(step, order_of(ddp, module), ranks, size if divides_by_all else len(ranks))
        for (name, p), q in zip(ddp.module.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=f"{count} {name}")


def case_a_grad_scaler_changes_nothing_and_skips(rank: int, size: int) -> None:
    def run(scaler: Any, clip: bool = False) -> tuple[DistributedDataParallel, QAdam]:
        ddp = DistributedDataParallel(mlp())
        optimizer = QAdam(groups_of(ddp), warmup_steps=WARMUP, codec=MinMax8(), error_feedback=True)
        ddp.use_exchange(optimizer.exchange())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).pow(2).mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return ddp, optimizer

    plain, _ = run(None)
    for clip in (False, True):
        scaled, _ = run(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), clip)
        for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ddp, optimizer = run(scaler)
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer.zero_grad()
    loss = ddp(batch(rank, STEPS)).pow(2).mean()
    scaler.scale(loss * (float("inf") if rank == size - 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    optimizer.zero_grad()
    scaler.scale(ddp(batch(rank, STEPS)).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    assert_equal_across_ranks(ddp)

    saved = copy.deepcopy((ddp.exchange_state_dict(), optimizer.state_dict()))
    resumed = DistributedDataParallel(mlp())
    other = QAdam(groups_of(resumed), warmup_steps=WARMUP, codec=MinMax8(), error_feedback=True)
    resumed.use_exchange(other.exchange())
    resumed.load_exchange_state_dict(saved[0])
    other.load_state_dict(saved[1])
    with pytest.raises(UsageError, match="grad_scaler = scaler"):
        resumed(batch(rank)).sum().backward()


def case_a_scaler_that_comes_late_is_refused(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(mlp())
    optimizer = QAdam(ddp.parameters(), warmup_steps=1)
    ddp.use_exchange(optimizer.exchange())
    train(ddp, optimizer, rank, range(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(ddp(batch(rank)).sum()).backward()
    with pytest.raises(UsageError, match="before the scale of the loss was known"):
        scaler.step(optimizer)


def case_schedulers_hooks_and_closures_stay(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(mlp())
    adam = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5)
    seen = []
    adam.register_step_post_hook(lambda *_: seen.append("hook"))
    optimizer = QAdam.around(adam, warmup_steps=2)
    ddp.use_exchange(optimizer.exchange())
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert isinstance(later, torch.optim.lr_scheduler.LRScheduler)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ddp(batch(rank)).pow(2).mean()
        loss.backward()
        return loss

    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(4):
            losses.append(optimizer.step(closure).item())
            schedule.step()
    assert losses[3] < losses[0] and seen == ["hook"] * 4
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 32
    with pytest.raises(UsageError, match="steps through the QAdam"):
        adam.step()


def case_nan_reaches_all_and_is_over(rank: int, size: int) -> None:
    """NaN of one rank is NaN for all, and the next step is well again."""
    ddp = DistributedDataParallel(mlp())
    optimizer = QAdam(ddp.parameters(), warmup_steps=1, codec=OneBit(), error_feedback=True)
    ddp.use_exchange(optimizer.exchange())
    train(ddp, optimizer, rank, range(2))
    optimizer.zero_grad()
    (ddp(batch(rank)).sum() * (float("nan") if rank == size - 1 else 1.0)).backward()
    assert all(bool(p.grad.isnan().all()) for p in ddp.parameters() if p.grad is not None)
    train(ddp, optimizer, rank, range(2, 3))
    assert all(bool(p.isfinite().all()) for p in ddp.parameters())


def case_half_precision_and_channels_last(rank: int, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        with seeded(1):
            bare = nn.Conv2d(3, 4, 3, dtype=dtype).to(memory_format=torch.channels_last)
        results = []
        for codec in (None, Exact()):
            ddp = DistributedDataParallel(copy.deepcopy(bare))
            optimizer = QAdam(ddp.parameters(), lr=0.01, warmup_steps=2 if codec else 1000, codec=codec)
            ddp.use_exchange(optimizer.exchange())
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step * size + rank)).to(dtype)
                ddp(x).pow(2).mean().backward()
                optimizer.step()
            results.append([optimizer.state[p]["exp_avg"] for p in ddp.parameters()])
        for m, wanted in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(m, wanted, rtol=0.03, atol=1e-3 if dtype == torch.bfloat16 else 1e-6)


test_cases = as_tests(
    globals(), (2,), slow=(3, 4, 8), on="threads", in_processes=[case_schedulers_hooks_and_closures_stay]
)


def test_other_optimizers_are_refused() -> None:
    weights = [nn.Parameter(torch.zeros(2))]

    class Own(torch.optim.Adam):
        pass

    for other in (torch.optim.SGD(weights), Own(weights)):
        with pytest.raises(UsageError, match=r"torch\.optim\.Adam or torch\.optim\.AdamW"):
            QAdam.around(other)
    with pytest.raises(UsageError, match="warmup_steps"):
        QAdam(weights, warmup_steps=0)
    with pytest.raises(UsageError, match="capturable"):
        QAdam(weights, capturable=True)
    with pytest.raises(UsageError, match=r"keep optimizer\.state_dict\(\)"):
        copy.deepcopy(QAdam(weights))
    with pytest.raises(UsageError, match=r"steps through the QAdam .* Fix: call step\(\) of that QAdam"):
        QAdam(weights).inner.step()
    with pytest.raises(UsageError, match="another one"):
        AdamMomentum(QAdam(weights), Compressed(MinMax8(), momentum=0.9))


def test_a_state_of_adam_goes_on_with_the_second_moment_it_has() -> None:
    """v of 50 steps is corrected for 50 steps, not for the warm-up."""
    weight = nn.Parameter(torch.ones(1))
    adam = torch.optim.Adam([weight], lr=0.0, betas=(0.9, 0.99))
    for _ in range(50):
        weight.grad = torch.ones(1)
        adam.step()
    optimizer = QAdam([weight], lr=1.0, betas=(0.9, 0.99), warmup_steps=5)
    state = adam.state_dict()
    state["param_groups"][0]["lr"] = 1.0
    optimizer.load_state_dict(state)
    weight.grad = torch.ones(1)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.zeros(1), rtol=0, atol=1e-5)


def counted(rank: int, size: int) -> tuple[float, int]:
    ddp = DistributedDataParallel(nn.Linear(500, 400))
    optimizer = QAdam(ddp.parameters(), warmup_steps=2)
    exchange = optimizer.exchange()
    ddp.use_exchange(exchange)
    sent = []
    for _ in range(3):
        dist.barrier()
        sent.append(tcp_sent_bytes())
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.ones(2, 500)).sum().backward()
            optimizer.step()
    assert sent[1] is not None and sent[2] is not None
    return (sent[2] - sent[1]) / 4, exchange.traffic(500 * 400 + 400, 4, size) or 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
def test_it_sends_what_it_says() -> None:
    for sent, said in run_ranks(counted, 3):
        assert said <= sent <= said * 1.02 + 4096  # headers of messages and the barrier
