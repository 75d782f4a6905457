"""Models, batches and optimizers in many variants: how they train on real ranks, and in one process on all ranks' batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import guozhuang.compat.horovod.torch as hvd

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


class Sometimes(Words):
    """The table is used in one of the branches only: no rank knows before that its gradients are sparse."""

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return super().forward(x, 0) if branch else self.head(x[:, 0, 0, :4])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 3)

    def forward(self, x: Tensor, _: int) -> Tensor:
        return self.last(self.second(self.first(x[:, 0, 0]).double()).float())


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


def thawed(net: nn.Module, step: int) -> None:
    """Let a layer be as it is at first."""
    net.get_submodule("left").requires_grad_(step >= 3)


def reformatted(net: nn.Module, step: int) -> None:
    """Change the memory format in the middle of training, and that of the gradients with it."""
    if step == 3:
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


KEPT: list[Tensor] = []


def kept_on_one_rank(net: nn.Module, step: int) -> None:
    """What shares memory with a gradient is held on rank 0, so there the next one lies elsewhere."""
    gradient = net.get_submodule("left").weight.grad
    if step == 2 and hvd.rank() == 0 and isinstance(gradient, Tensor):
        KEPT.append(gradient.detach())


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


def wrapped(optimizer: Any, net: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **options)


def by_layers(optimizer: Any, net: nn.Module) -> Any:
    groups = [list(net.get_submodule(name).parameters()) for name in ("stem", "head")]
    return wrapped(optimizer, net, groups=groups)


class Own(hvd.Compression.none):  # type: ignore[misc, valid-type]
    """A compressor of the user's, which does nothing."""


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
    "thawed": Case(sgd, wrapped, before=thawed),
    "reformatted": Case(sgd, wrapped, before=reformatted),
    "kept": Case(sgd, wrapped, before=kept_on_one_rank),
    "clipped": Case(sgd, wrapped, clip=True),
    "sparse": Case(plain_sgd, wrapped, model=Words),
    "sparse on some ranks": Case(plain_sgd, wrapped, model=Sometimes, branch=each_its_own),
    "sparse later": Case(plain_sgd, wrapped, model=Sometimes, branch=lambda rank, step: int(rank == 1 and step > 2)),
    "sparse and coded": Case(plain_sgd, partial(wrapped, compression=Own), model=Sometimes, branch=each_its_own),
    "mixed": Case(sgd, wrapped, model=Mixed),
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
