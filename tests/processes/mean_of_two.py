"""The simplest weight exchange, the mean of all weights after every second step, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.exchange.weights import WeightExchange
from guozhuang.weights.flat import FlatWeights, Named
from tests.processes.cases import seeded


@dataclass
class MeanState:
    flat: FlatWeights
    group: dist.ProcessGroup
    num_steps: int = 0
    closed: bool = False


@dataclass(frozen=True)
class MeanOfTwo(WeightExchange[MeanState]):
    start_step: int = 0

    def averages_gradients(self, step: int) -> bool:
        return step < self.start_step

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> MeanState:
        return MeanState(FlatWeights(parameters), group)

    def before_step(self, state: MeanState, step: int) -> None:
        pass

    def after_step(self, state: MeanState, step: int) -> None:
        state.num_steps += 1
        if step % 2 == 1:
            self.agree(state)

    def agree(self, state: MeanState) -> None:
        flats = state.flat.copy()
        for flat in flats:
            dist.all_reduce(flat, group=state.group)
            flat /= state.group.size()
        state.flat.write(flats)

    def close(self, state: MeanState) -> None:
        state.closed = True

    def state_dict(self, state: MeanState) -> dict[str, Any]:
        return {"num_steps": state.num_steps}

    def load_state_dict(self, state: MeanState, saved: Any) -> None:
        state.num_steps = saved["num_steps"]

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> None:
        return None


def made(norm: bool = False) -> nn.Module:
    with seeded(0):
        layers = [nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 4, generator=random), torch.randn(8, 3, generator=random)


def wrapped(
    start_step: int = 0, norm: bool = False, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = made(norm)
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp.use_weight_exchange(MeanOfTwo(start_step), optimizer)
    return ddp, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def twins(size: int, num_steps: int, start_step: int = 0) -> list[nn.Module]:
    """The same in one process: a model for each rank, and a mean after every second step."""
    models = [made() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
        if step < start_step:
            for same in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step % 2 == 1:
            average(models)
    return models


@torch.no_grad()
def average(models: list[nn.Module]) -> None:
    for same in zip(*(m.parameters() for m in models), strict=True):
        mean = torch.stack(list(same)).mean(0)
        for p in same:
            p.copy_(mean)
