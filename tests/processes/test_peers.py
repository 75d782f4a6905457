"""PyTorch's own pipeline and tensor parallelism as strategies: they train as one process does, and what they cannot is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.errors import UsageError
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S


class Block(nn.Module):
    """A transformer's block with parts of usual names, so that plans find them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 64), "fc2": nn.Linear(64, width)})

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)]
        x = x + self.o_proj(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](torch.relu(self.mlp["fc1"](x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 2)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x.mean(1))}


def loss_of(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["words"])["logits"], batch["answers"])


def losses(strategy: str, **options: Any) -> list[float]:
    torch.manual_seed(3)
    model = Model()
    pair = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **options)
    words = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(1))
    batch = {"words": words, "answers": words[:, 0] % 2}
    return [float(pair.step(batch, loss_of)) for _ in range(4)]


def peers(rank: int, size: int) -> dict[str, list[float]]:
    gz.init()
    found = {strategy: losses(strategy) for strategy in ("torch-tensor", "torch-pipeline")}
    found["1f1b"] = losses("torch-pipeline", schedule="1f1b", microbatches=4)
    with pytest.raises(UsageError, match="two schedules"):
        losses("torch-pipeline", schedule="zero-bubble")
    with pytest.raises(UsageError, match="cuts a batch of 16 into 5 equal"):
        losses("torch-pipeline", microbatches=5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(UsageError, match="torch-tensor has nothing to divide"):
        gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "torch-tensor")
    with pytest.raises(UsageError, match="owns the training step"):
        gz.prepare(made := Model(), torch.optim.SGD(made.parameters(), lr=0.1), "torch-pipeline")[0](torch.zeros(2, 3))
    gz.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.versions
def test_peers_train_as_one_process_does() -> None:
    alone = losses("single")
    gz.shutdown()
    for found in run_ranks(peers, 2, init=False, timeout_s=3 * LIMIT_S):
        for strategy, each in found.items():
            assert each == pytest.approx(alone, rel=1e-5), strategy
