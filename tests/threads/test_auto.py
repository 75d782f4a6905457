"""``--strategy auto``: while a race changes the way of averaging, the training is that of ddp, bit by bit."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from guozhuang.cost.race import Race
from guozhuang.sharding import shard
from guozhuang.strategies import auto
from guozhuang.strategies.ways import Setup, ddp
from guozhuang.world import World
from tests.threads.ranks import GENERATOR, run_threads

NUM_STEPS = 45  # in which the first six blocks end


class OrderedRace(Race):
    """Ends after two rounds, and says then that the last contender was the fastest."""

    @property
    def is_over(self) -> bool:
        return self.num_rounds >= 2

    def add(self, seconds: Any) -> None:
        assert set(seconds) == set(self.alive)
        self.num_rounds += 1
        for name in self.alive:
            self._logs[name].append(0.0)
        if self.is_over:
            while len(self.alive) > 1:
                self.drop(self.alive[0], "slower")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.parts(x)
        return found


def made(momentum: bool) -> tuple[Model, torch.optim.Optimizer]:
    with GENERATOR:
        torch.manual_seed(3)
        model = Model()
    if momentum:
        return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def divided_step(rank: int, size: int) -> None:
    """Make an optimizer of the base class: PyTorch wraps the step of a class when its first object is made."""
    model, optimizer = made(False)
    shard(model, optimizer)


def train(rank: int, size: int, prepare: Any, momentum: bool, form: str) -> list[Tensor]:
    """Train; return all weights, running statistics and the optimizer's state after each step, as one vector."""
    model, optimizer = made(momentum)
    world = mock.Mock(spec=World, rank=rank, size=size, num_nodes=1, device=torch.device("cpu"))
    prepared, stepped = prepare(model, optimizer, Setup(world))
    scheduler = torch.optim.lr_scheduler.StepLR(stepped, 10, 0.5)
    generator, found = torch.Generator().manual_seed(5), []
    for step in range(NUM_STEPS):
        for _ in range(2 if form == "accumulated" else 1):
            x = torch.randn(4 * size, 7, generator=generator)[rank::size]
            prepared(x).square().mean().backward()
        if form == "clipped":
            nn.utils.clip_grad_norm_(prepared.parameters(), 0.1)
        stepped.step()
        scheduler.step()
        stepped.zero_grad(set_to_none=form != "kept")
        if step % 9 == 8:  # a checkpoint, also while the state is divided
            state = stepped.state_dict()
            found.append(torch.cat([v.flatten() for s in state["state"].values() for v in s.values()]))
            if form == "loaded":
                stepped.load_state_dict(state)
        found.append(torch.cat([t.detach().flatten().double() for t in prepared.state_dict().values()]))
    return found


@pytest.mark.parametrize(
    ("size", "momentum", "form"),
    [(2, False, "plain"), (3, True, "accumulated"), (2, False, "kept"), (2, False, "loaded"), (2, True, "clipped")],
)
def test_the_training_is_that_of_ddp_in_every_bit(
    size: int, momentum: bool, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_threads(divided_step, 2)
    with mock.patch.object(auto, "Race", OrderedRace), caplog.at_level(logging.WARNING, "guozhuang"):
        raced = run_threads(train, size, auto.prepare_auto, momentum, form)
    plain = run_threads(train, size, ddp, momentum, form)
    for mine, theirs in zip(raced, plain, strict=True):
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if size == 2:
                assert torch.equal(a, b), f"value {step}, apart by {(a - b).abs().max()}"
            else:  # the order of sums may be another one
                torch.testing.assert_close(a, b)
    said = [r.getMessage() for r in caplog.records if "strategy auto" in r.getMessage()]
    assert len(said) == 1
    if form == "clipped":
        assert "nothing" not in said[0] and "sharded was not tried: the script changes gradients" in said[0]
    else:
        assert "strategy auto: sharded" in said[0] and "steps of this training" in said[0]
