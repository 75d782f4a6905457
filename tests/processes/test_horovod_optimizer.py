"""Training with a DistributedOptimizer on real ranks equals training in one process on all ranks' batches."""

from __future__ import annotations

import argparse
import copy
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import guozhuang as gz
import guozhuang.compat.horovod.torch as hvd
from guozhuang.exchange.adasum import factors
from guozhuang.lab import compare
from guozhuang.lab.files import from_json
from tests.ranks import run_ranks

ROWS, STEPS, TOLERANCE = 4, 6, 3e-6


class Net(nn.Module):
    """Two branches, of which each rank takes the one that it is told to, or both; the second convolution is channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, branch: int = 2) -> Tensor:
        x = torch.tanh(self.stem(x)).mean((2, 3))
        parts = [side(x) for i, side in enumerate((self.left, self.right)) if branch in (i, 2)]
        return self.head(torch.tanh(torch.stack(parts).sum(0)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, _: int) -> Tensor:
        rows = (x.flatten(1)[:, :5].abs() * 5).long().clamp(max=10)
        return self.head(self.table(rows).mean(1))


def build(kind: type[nn.Module], num_ranks: int = 0) -> nn.Module:
    torch.manual_seed(5 + num_ranks)
    net = kind()
    return net.to(memory_format=torch.channels_last) if kind is Net else net


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, 2, 5, 5, generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def loss_of(net: nn.Module, step: int, rank: int, branch: int) -> Tensor:
    x, target = batch(step, rank)
    return F.cross_entropy(net(x, branch), target)


def each_its_own(rank: int, step: int) -> int:
    return (rank + step) % 2


def both(rank: int, step: int) -> int:
    return 2


def late(net: nn.Module, step: int) -> None:
    """Freeze a layer in the middle of training."""
    if step == 3:
        net.get_submodule("left").requires_grad_(False)


@dataclass(frozen=True)
class Case:
    """Attributes: ``wrap`` makes the optimizer distributed. ``scale`` is what the joined loss is multiplied with."""

    optimizer: Callable[..., torch.optim.Optimizer]
    wrap: Callable[[Any, nn.Module], Any]
    model: type[nn.Module] = Net
    branch: Callable[[int, int], int] = both
    passes: int = 1
    scale: Callable[[int], float] = lambda num_ranks: 1.0
    before: Callable[[nn.Module, int], None] = lambda net, step: None
    clip: bool = False
    tolerance: float = TOLERANCE
    optimizer_options: dict[str, Any] = field(default_factory=dict)


def wrapped(optimizer: Any, net: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **options)


def by_layers(optimizer: Any, net: nn.Module) -> Any:
    groups = [list(net.get_submodule(name).parameters()) for name in ("stem", "head")]
    return wrapped(optimizer, net, groups=groups)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
adamw = partial(torch.optim.AdamW, lr=1e-2)
plain_sgd = partial(torch.optim.SGD, lr=0.5)

CASES: dict[str, Case] = {
    "sgd": Case(sgd, wrapped),
    "adamw": Case(adamw, wrapped, tolerance=1e-4),  # it divides gradients by themselves, and so their rounding
    "unnamed": Case(sgd, lambda optimizer, net: hvd.DistributedOptimizer(optimizer)),
    "sum": Case(sgd, partial(wrapped, op=hvd.Sum), scale=float),
    "predivided": Case(sgd, partial(wrapped, gradient_predivide_factor=3.0)),
    "accumulated": Case(sgd, partial(wrapped, backward_passes_per_step=2), passes=2),
    "two groups": Case(sgd, partial(wrapped, groups=2)),
    "groups by layer": Case(sgd, by_layers),
    "half": Case(sgd, partial(wrapped, compression=hvd.Compression.fp16), tolerance=5e-3),
    "branches": Case(sgd, wrapped, branch=each_its_own),
    "branches in groups": Case(sgd, partial(wrapped, groups=2), branch=each_its_own),
    "branches accumulated": Case(sgd, partial(wrapped, backward_passes_per_step=2), branch=each_its_own, passes=2),
    "frozen": Case(sgd, wrapped, before=late),
    "clipped": Case(sgd, wrapped, clip=True),
    "sparse": Case(plain_sgd, wrapped, model=Words),
    "sparse as dense": Case(plain_sgd, partial(wrapped, sparse_as_dense=True), model=Words),
}


def alone(case: Case, num_ranks: int) -> nn.Module:
    """One process; each rank's part of the batch takes its own branch."""
    net = build(case.model)
    optimizer = case.optimizer(net.parameters())
    for step in range(STEPS):
        case.before(net, step)
        optimizer.zero_grad()
        for part in range(case.passes):
            number = step * case.passes + part
            losses = [loss_of(net, number, rank, case.branch(rank, number)) for rank in range(num_ranks)]
            (torch.stack(losses).mean() * case.scale(num_ranks) / case.passes).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
    return net


def on_rank(case: Case, rank: int) -> nn.Module:
    net = build(case.model, rank)  # other weights on each rank
    optimizer = case.optimizer(net.parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = case.wrap(optimizer, net)
    for step in range(STEPS):
        case.before(net, step)
        optimizer.zero_grad()
        for part in range(case.passes):
            number = step * case.passes + part
            (loss_of(net, number, rank, case.branch(rank, number)) / case.passes).backward()
        if case.clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return net


def difference(ours: nn.Module, twin: nn.Module) -> float:
    """The largest, relative to the largest weight of its tensor."""
    pairs = zip(ours.parameters(), twin.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def digest(net: nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in net.parameters():
        sha.update(parameter.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def all_cases(rank: int, num_ranks: int, backend: str) -> dict[str, tuple[float, str]]:
    gz.init(backend=backend)
    hvd.init()
    found = {}
    for place, (name, case) in enumerate(CASES.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net = on_rank(case, rank)
        error = difference(net, alone(case, num_ranks)) if place % num_ranks == rank else 0.0
        found[name] = (error, digest(net))
    hvd.shutdown()
    gz.shutdown()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "backend"), [(2, "shm"), (3, "gloo"), pytest.param(4, "shm", marks=pytest.mark.slow)]
)
def test_weights_equal_those_of_one_process(num_ranks: int, backend: str) -> None:
    results = run_ranks(all_cases, num_ranks, backend, init=False, timeout_s=90.0)
    wrong = []
    for name, case in CASES.items():
        if len({result[name][1] for result in results}) != 1:
            wrong.append(f"{name}: ranks hold different bits")
        error = max(result[name][0] for result in results)
        if not error <= case.tolerance:
            wrong.append(f"{name}: differs by {error:.2e}")
    assert not wrong, "\n".join(wrong)


# ---- several optimizers, orders, process sets, failures ---------------------------------------------------------------------


def in_other_orders(rank: int, num_ranks: int) -> list[float]:
    """Two models with an optimizer each; ranks go through them in different orders, and step in the same."""
    hvd.init()
    pairs = []
    for prefix in ("a", "b"):
        net = build(Net)
        names = net.named_parameters(prefix=prefix)
        pairs.append((net, hvd.DistributedOptimizer(sgd(net.parameters()), named_parameters=names)))
    for step in range(STEPS):
        order = pairs if rank % 2 == 0 else pairs[::-1]
        for net, _ in order:
            loss_of(net, step, rank, both(rank, step)).backward()
        for _, optimizer in pairs:
            optimizer.step()
        for _, optimizer in order:
            optimizer.zero_grad()
    twin = alone(CASES["sgd"], num_ranks)
    return [difference(net, twin) for net, _ in pairs]


def in_a_process_set(rank: int, num_ranks: int) -> tuple[float, str]:
    """The last rank trains by itself, the others together."""
    first = hvd.ProcessSet(range(num_ranks - 1))
    hvd.init(process_sets=[first])
    net = build(Net)
    optimizer = wrapped(sgd(net.parameters()), net, process_set=first)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, rank, both(rank, step)).backward()
        optimizer.step()
    if first.included():
        return difference(net, alone(CASES["sgd"], num_ranks - 1)), digest(net)
    twin = build(Net)
    plain = sgd(twin.parameters())
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(twin, step, rank, both(rank, step)).backward()
        plain.step()
    return difference(net, twin), ""


def with_uneven_data(rank: int, num_ranks: int) -> float:
    """Rank r has r + 2 batches; means are divided by all ranks to the end."""
    hvd.init()
    net, twin = build(Net), build(Net)
    optimizer, plain = wrapped(sgd(net.parameters()), net), sgd(twin.parameters())
    for step in range(rank + 2):
        optimizer.zero_grad()
        loss_of(net, step, rank, both(rank, step)).backward()
        optimizer.step()
    assert hvd.join() in range(num_ranks)
    hvd.broadcast_parameters(net.state_dict(), root_rank=num_ranks - 1)
    for step in range(num_ranks + 1):
        plain.zero_grad()
        for other in range(num_ranks):
            if step < other + 2:
                (loss_of(twin, step, other, both(rank, step)) / num_ranks).backward()
        plain.step()
    return difference(net, twin)


def after_a_mismatch(rank: int, num_ranks: int) -> tuple[str, float]:
    """On rank 1 a layer has another shape; all are told, and the next step works."""
    hvd.init()
    odd = nn.Linear(3, 2 + (rank == 1))
    wrong = wrapped(sgd(odd.parameters()), odd)
    odd(torch.ones(1, 3)).sum().backward()
    try:
        wrong.step()
        said = ""
    except hvd.HorovodInternalError as error:
        said = str(error)
    return said, difference(on_rank(CASES["sgd"], rank), alone(CASES["sgd"], num_ranks))


def adaptive_steps(rank: int, num_ranks: int) -> tuple[float, str]:
    """The sum of the steps that each rank would make, by the formula; each rank keeps its own momentum."""
    hvd.init()
    net, twin = build(Net), build(Net)
    optimizer = wrapped(sgd(net.parameters()), net, op=hvd.Adasum)
    theirs = [sgd(twin.parameters()) for _ in range(num_ranks)]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, rank, both(rank, step)).backward()
        optimizer.step()
        start = copy.deepcopy(twin.state_dict())
        went = []
        for other, plain in enumerate(theirs):
            twin.load_state_dict(start)
            plain.zero_grad()
            loss_of(twin, step, other, both(rank, step)).backward()
            plain.step()
            went.append([p.detach().clone() for p in twin.parameters()])
        twin.load_state_dict(start)
        for p, *ends in zip(twin.parameters(), *went, strict=True):
            rows = torch.stack([(end - p).detach().flatten() for end in ends]).double()
            step_of_all = (factors((rows @ rows.T)[None])[0][None] @ rows)[0].reshape(p.shape)
            p.data.add_(step_of_all.float())
    return difference(net, twin), digest(net)


def all_situations(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for situation in (in_other_orders, in_a_process_set, with_uneven_data, after_a_mismatch, adaptive_steps):
        found[situation.__name__] = situation(rank, num_ranks)
        hvd.shutdown()
    return found


def test_in_every_situation() -> None:
    results = run_ranks(all_situations, 3, init=False, timeout_s=90.0)
    for result in results:
        assert max(result["in_other_orders"]) < TOLERANCE
        assert result["in_a_process_set"][0] < TOLERANCE
        assert result["with_uneven_data"] < TOLERANCE
        said, error = result["after_a_mismatch"]
        assert "Mismatched allreduce tensor shapes" in said and error < TOLERANCE
        assert result["adaptive_steps"][0] < 1e-5
    assert results[0]["in_a_process_set"][1] == results[1]["in_a_process_set"][1]
    assert len({result["adaptive_steps"][1] for result in results}) == 1


# ---- the strategy -----------------------------------------------------------------------------------------------------------


def by_strategy(rank: int, num_ranks: int) -> tuple[bool, bool]:
    gz.init()
    trained = []
    for strategy in ("horovod", "ddp"):
        net = build(Net, rank)
        model, optimizer = gz.prepare(net, sgd(net.parameters()), strategy)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank, both(rank, step)).backward()
            optimizer.step()
        trained.append(net)
        assert isinstance(optimizer, torch.optim.SGD)
    was_running = hvd.is_initialized()
    del model, optimizer
    gz.shutdown()
    return digest(trained[0]) == digest(trained[1]), was_running and not hvd.is_initialized()


def test_the_strategy_gives_the_bits_of_ddp_and_ends_with_the_world() -> None:
    assert run_ranks(by_strategy, 2, init=False) == [(True, True)] * 2


@pytest.mark.slow
def test_compare_has_a_row_for_it(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    more = [
        "--strategies",
        "single,ddp,horovod",
        "--steps",
        "6",
        "--warmup-steps",
        "2",
        "--rounds",
        "1",
        "--timeout",
        "60",
    ]
    told = ["--workload", "tests.processes.tiny_workload:make", "--out", str(tmp_path), "--device", "cpu", *more]
    assert compare.run(parser.parse_args(told)) == 0
    rows = {row.name: row for row in from_json((tmp_path / "results.json").read_text()).rows if row.ok}
    assert list(rows) == ["single", "ddp", "horovod"]
    assert rows["horovod"].losses == pytest.approx(rows["single"].losses, rel=1e-5)
    assert rows["horovod"].difference is not None and rows["horovod"].difference.relative < 1e-5
    assert rows["horovod"].ranks_identical
