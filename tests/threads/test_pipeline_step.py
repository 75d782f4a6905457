"""``model.step(x, y)`` trains as one process on the whole batch, under every schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from guozhuang.errors import UsageError
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.pipeline import divide_pipeline
from guozhuang.parallel.prepare import Divided
from guozhuang.strategies.model_step import PipelineStep, answering_once
from guozhuang.world.layout import Layout
from tests.threads.ranks import GENERATOR, run_threads

ROWS, TOKENS, WORDS = 11, 5, 20


class Tagger(nn.Module):
    """Its embedding is also the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        kind = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(kind(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(6))
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        rows = self.words(words)
        for layer in self.layers:
            rows = layer(rows)
        return {"logits": self.head(rows) * scale}


class Normed(nn.Module):
    """Running statistics are those of the whole batch; of each microbatch there is the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(True)) for _ in range(6))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = rows + block(rows)
        return rows


def masked_mean(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())


def sum_and_count(output: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    losses = functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return losses, (labels >= 0).sum()


def _made(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    with GENERATOR:
        torch.manual_seed(5)
        model = kind().double()
        words = torch.randint(0, WORDS, (ROWS, TOKENS))
        labels = torch.randint(0, WORDS, (ROWS, TOKENS)).masked_fill(torch.rand(ROWS, TOKENS) < 0.5, -100)
    return model, words, labels


def _train(rank: int, size: int, schedule: str, loss: Any) -> Any:
    model, words, labels = _made(Tagger)
    group = make_axes(Layout(pp=size))
    pipe = divide_pipeline(model, group, num_microbatches=4, schedule=schedule, loss=loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        losses.append(pipe.step(words, labels, scale=2.0))
        if step == 1:  # a second batch is added, a call in the order of GPipe too
            losses.append(pipe.step(words[:6], labels[:6]))
            loss_of_call = masked_mean(pipe(words), labels)
            loss_of_call.backward()
            losses.append(loss_of_call.detach())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = pipe(words)["logits"]
    held = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
    return torch.stack(losses), after, held


def _alone() -> Any:
    model, words, labels = _made(Tagger)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        losses.append(masked_mean(model(words, scale=2.0), labels))
        if step == 1:
            losses += [masked_mean(model(words[:6]), labels[:6]), masked_mean(model(words), labels)]
        for loss in losses[-1:] if step != 1 else losses[-3:]:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (
        torch.stack([loss.detach() for loss in losses]),
        model(words)["logits"].detach(),
        dict(model.named_parameters()),
    )


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "loss"),
    (
        pytest.param("1f1b", 3, masked_mean, marks=pytest.mark.slow),
        pytest.param("1f1b", 2, sum_and_count, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, masked_mean, marks=pytest.mark.slow),
        ("zero-bubble", 3, masked_mean),
        pytest.param("gpipe", 2, masked_mean, marks=pytest.mark.slow),
    ),
)
def test_steps_are_those_of_one_process(schedule: str, num_ranks: int, loss: Any) -> None:
    losses, after, parameters = _alone()
    seen = set()
    for got in run_threads(_train, num_ranks, schedule, loss):
        torch.testing.assert_close(got[0], losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(got[1], after, rtol=1e-7, atol=1e-9)
        for name, parameter in got[2].items():
            torch.testing.assert_close(parameter, parameters[name].detach(), rtol=1e-7, atol=1e-9)
        seen |= got[2].keys()
    assert seen == parameters.keys()


def _normed(rank: int, size: int, schedule: str) -> Any:
    model = _made(Normed)[0]
    rows = torch.arange(72, dtype=torch.float64).reshape(12, 6).sin()
    alone, whole = copy.deepcopy(model), copy.deepcopy(model)
    pipe = divide_pipeline(model, make_axes(Layout(pp=size)), num_microbatches=3, schedule=schedule, loss=nn.MSELoss())
    loss = pipe.step(rows, rows.flip(1))
    expected = sum(nn.functional.mse_loss(alone(part), part.flip(1)) / 3 for part in rows.split(4))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    whole(rows)  # running statistics in the first layer: those of the whole batch
    for mine, other in zip(model.blocks, alone.blocks, strict=True):
        if mine[0].weight.numel():
            torch.testing.assert_close(mine[0].weight.grad, other[0].weight.grad)
            assert int(mine[1].num_batches_tracked) == 1
    if rank == 0:
        torch.testing.assert_close(model.blocks[0][1].running_mean, whole.blocks[0][1].running_mean)


@pytest.mark.parametrize("schedule", (pytest.param("1f1b", marks=pytest.mark.slow), "zero-bubble"))
def test_batches_are_normalized_by_microbatch(schedule: str) -> None:
    run_threads(_normed, 2, schedule)


def _with_a_batch(rank: int, size: int) -> Any:
    model, words, labels = _made(Tagger)
    axes = make_axes(Layout(pp=size))
    pipe = divide_pipeline(model, axes, num_microbatches=4, loss=masked_mean)
    step = PipelineStep(Divided(model, axes, pipe=pipe), [torch.optim.SGD(model.parameters(), lr=0.1)])
    parts: list[str] = []
    batch = {"words": words, "labels": labels}

    def loss_of(model: Any, batch: Any) -> Tensor:
        return masked_mean(model(batch["words"], scale=2.0), batch["labels"])

    return torch.stack([step(batch, loss_of, passed=parts.append) for _ in range(2)]), parts


def test_a_loss_that_calls_the_model_twice_is_refused() -> None:
    model = answering_once(torch.ones(2))
    assert model("anything").sum() == 2
    with pytest.raises(UsageError, match=r"calls the model twice.*Fix: call model\(\.\.\.\) once"):
        model("anything")


def test_a_step_on_a_batch_follows_the_schedule() -> None:
    model, words, labels = _made(Tagger)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(masked_mean(model(words, scale=2.0), labels))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for got, parts in run_threads(_with_a_batch, 2):
        torch.testing.assert_close(got, torch.stack(losses).detach(), rtol=1e-9, atol=0)
        assert parts == ["forward", "backward", "optimizer"] * 2


def _refused(rank: int, size: int) -> None:
    model, words, labels = _made(Tagger)
    axes = make_axes(Layout(pp=size))
    with pytest.raises(UsageError, match="needs the loss of each microbatch"):
        divide_pipeline(model, axes).step(words, labels)
    with pytest.raises(UsageError, match="takes the model's inputs and then the targets"):
        divide_pipeline(model, axes, loss=masked_mean).step()
    with pytest.raises(UsageError, match="2 or more stages on each of 2 ranks, and cut makes 3"):
        divide_pipeline(model, axes, cut=["layers.1", "layers.3"], schedule="interleaved", loss=masked_mean)
    pipe = divide_pipeline(_made(Normed)[0], axes, loss=nn.MSELoss())
    with pytest.raises(UsageError, match=r"an input of model\.step requires a gradient"):
        pipe.step(torch.zeros(4, 6, requires_grad=True), torch.zeros(4, 6))


def test_what_cannot_be_stepped_is_named() -> None:
    run_threads(_refused, 2)
