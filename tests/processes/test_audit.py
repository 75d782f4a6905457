"""``guozhuang run --audit N``: steps of exact strategies are compared with one process, and a wrong factor is named.

In processes: rank 0 forks, and its copy takes the world, the groups and the loaders for those of one process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.strategies.audit import audit as of_audit
from tests.processes.cases import said
from tests.ranks import run_ranks

NUM_SAMPLES, EVERY = 48, 2
EQUAL = ""


class Samples(Dataset[Any]):
    """Samples with different numbers of tokens, whose targets are the class of each."""

    def __init__(self, pads: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 5, generator=generator)
        self.y = torch.randint(0, 3, (NUM_SAMPLES, 4), generator=generator)
        self.lengths = torch.randint(1, 5, (NUM_SAMPLES,), generator=generator)
        if pads:
            self.y[torch.arange(4)[None] >= self.lengths[:, None]] = -100
        self.pads = pads

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i] if self.pads else self.y[i, : self.lengths[i]]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest of a batch, so that ranks have tensors of different widths."""
    longest = max(len(y) for _, y in samples)
    return torch.stack([x for x, _ in samples]), torch.stack(
        [F.pad(y, (0, longest - len(y)), value=-100) for _, y in samples]
    )


def of_four(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, set[int]]:
    """Make what cannot be joined, and no batch of all ranks."""
    if len(samples) != 4:
        raise ValueError(f"{len(samples)} samples in place of 4")
    return torch.stack([x for x, _ in samples]), {len(samples)}


def with_a_lambda(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Any]:
    return torch.stack([x for x, _ in samples]), lambda: samples


class OnlyOnce(Samples):
    """Gives each sample once."""

    def __init__(self) -> None:
        super().__init__(False)
        self.given: set[int] = set()

    @override
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i in self.given:
            raise RuntimeError("it was read before")
        self.given.add(i)
        return super().__getitem__(i)


# What cannot be joined, by the dataset and the function that collates, and what is said.
UNJOINED: dict[str, tuple[Callable[[], Samples], Any, str]] = {
    "collate": (lambda: Samples(False), of_four, "ValueError: 8 samples in place of 4"),
    "read": (OnlyOnce, of_four, "RuntimeError: it was read before"),
    "pickle": (lambda: Samples(False), with_a_lambda, "lambda"),
}


class Net(nn.Module):
    """Predicts four tokens of a sample."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(5, 16), between, nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(torch.tanh(self.first(x)))).view(-1, 4, 3)
        return found


def losses(model: Any, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    outputs = model(x)[:, : y.shape[1]].flatten(0, 1)
    return F.cross_entropy(outputs, y.flatten(), ignore_index=-100, reduction=reduction)


def plain(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return F.mse_loss(model(x)[:, 0], x[:, :3])


def summed(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return F.mse_loss(model(x)[:, 0], x[:, :3], reduction="sum")


def summed_by_ranks(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return summed(model, x, y, world) * world.data_size


def multiplied(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return plain(model, x, y, world) * world.size


def divided_by_own_samples(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return summed(model, x, y, world) / (3 * len(x)) / (1 if world.size == 1 else 1.25)


def means(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return losses(model, x, y, "mean")


def global_means(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    return gz.global_mean(losses(model, x, y, "sum"), (y != -100).sum())


def means_by_hand(model: Any, x: Tensor, y: Tensor, world: Any) -> Tensor:
    count = (y != -100).sum().float()
    dist.all_reduce(count)
    return losses(model, x, y, "sum") * dist.get_world_size() / count


HALF = "gradients are exactly half of those of one process. Fix: this is 1/n with 2 ranks: a mean of sums"
TWICE = "gradients are exactly twice those of one process. Fix: this is n with 2 ranks"
OTHER = "gradients are exactly 0.8 times those of one process. Fix: a mean of means"
MEANS = "the gradients of 4 parameters are not those of one process; of 'first.weight': .* is a mean of means: gz.global_mean"
NORM = "Fix: BatchNorm takes the statistics of each rank's part of the batch"
# The loss, what is between the layers, whether the dataset pads, what else the script does, and what the audit says.
ROWS: dict[str, tuple[Any, Any, bool, str, str]] = {
    "a mean": (plain, nn.Identity, True, "", EQUAL),
    "clipped": (plain, nn.Identity, True, "clips", EQUAL),
    "accumulated": (plain, nn.Identity, True, "accumulates", EQUAL),
    "a sum": (summed, nn.Identity, True, "", HALF),
    "a sum times the ranks": (summed_by_ranks, nn.Identity, True, "", EQUAL),
    "a mean times the ranks": (multiplied, nn.Identity, True, "", TWICE),
    "another number": (divided_by_own_samples, nn.Identity, True, "", OTHER),
    "means over tokens": (means, nn.Identity, True, "", MEANS),
    "means over tokens that collate pads": (means, nn.Identity, False, "", MEANS),
    "the mean over all tokens": (global_means, nn.Identity, True, "", EQUAL),
    "the mean over tokens that collate pads": (global_means, nn.Identity, False, "", EQUAL),
    "the mean over all tokens by hand": (means_by_hand, nn.Identity, True, "", EQUAL),
    "BatchNorm": (plain, lambda: nn.BatchNorm1d(16), True, "", NORM),
    "SyncBatchNorm": (plain, lambda: nn.SyncBatchNorm(16), True, "", EQUAL),
    "dropout": (plain, lambda: nn.Dropout(0.3), True, "", "this says nothing; set dropout to 0"),
}
STRATEGIES = ("ddp", "torch-ddp", "sharded", "sharded-gradients", "sharded-weights", "parameter-server", "sparse-rows")
# Of one strategy all rows, of the others those in which they could go another way.
FEW = ("a mean", "clipped", "accumulated", "a sum", "the mean over all tokens")


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged in this block."""
    logging.getLogger("guozhuang").setLevel(logging.INFO)
    with said() as texts:
        yield texts


def train(strategy: str, row: str, loss_of: Any, batch_options: dict[str, Any]) -> tuple[str, list[str]]:
    """Train a few steps; return what was raised, and what was logged of audits."""
    _, between, pads, habit, _ = ROWS[row]
    torch.manual_seed(0)
    model: Any = Net(between())
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), 0.05), strategy)
    options: dict[str, Any] = {"collate_fn": padded} if not pads else {}
    loader = gz.loader(Samples(pads), 4, **options, **batch_options)
    world = gz.init()
    steps = 2 if habit == "accumulates" else 1
    batches = iter(loader)
    raised = ""
    with heard() as texts:
        try:
            for _ in range(len(loader) // steps):
                for _ in gz.accumulate(model, steps) if steps > 1 else range(1):
                    x, y = next(batches)
                    (loss_of(model, x, y, world) / steps).backward()
                if habit == "clips":
                    gz.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        except UsageError as error:
            raised = str(error)
    return raised, [text for text in texts if "audit" in text]


def audited(rank: int, world_size: int, strategy: str, rows: tuple[str, ...], **options: Any) -> list[Any]:
    gz.init()
    return [train(strategy, row, ROWS[row][0], options) for row in rows]


def check(row: str, of_ranks: list[tuple[str, list[str]]], strategy: str) -> None:
    wanted = ROWS[row][-1]
    raised, logged = of_ranks[0]
    if wanted and "says nothing" not in wanted:
        assert all(f"audit of step 0 under {strategy}: " in text for text, _ in of_ranks), (row, of_ranks)
        assert re.search(wanted, raised), (row, raised)
        return
    assert not any(text for text, _ in of_ranks), (row, of_ranks)
    assert len(logged) >= 2 and (wanted or "gradients are those of one process") in logged[0], (row, logged)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUOZHUANG_AUDIT", str(EVERY))


def test_the_factor_of_gradients_is_named() -> None:
    rows = tuple(ROWS)
    found = run_ranks(audited, 2, "ddp", rows)
    for i, row in enumerate(rows):
        check(row, [each[i] for each in found], "ddp")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(each, marks=() if each in ("sharded", "sharded-gradients") else pytest.mark.slow)
        for each in STRATEGIES[1:]
    ],
)
def test_under_every_exact_strategy(strategy: str) -> None:
    found = run_ranks(audited, 2, strategy, FEW)
    for i, row in enumerate(FEW):
        check(row, [each[i] for each in found], strategy)


@pytest.mark.parametrize("row", ["a mean", "the mean over all tokens"])
def test_unequal_parts_of_a_batch_are_weighed(row: str) -> None:
    found = run_ranks(functools.partial(audited, shares=[3, 1]), 2, "ddp", (row,))
    check(row, [each[0] for each in found], "ddp")


def by_other_loaders(rank: int, world_size: int, kind: str) -> tuple[str, list[str]]:
    """Train with batches that are no gz.loader's, or with two models, or with a closure."""
    world = gz.init()
    model: Any = Net(nn.Identity())
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), 0.05), "ddp")
    other, its_optimizer = model, optimizer
    if kind == "two models":
        other = nn.Linear(5, 3)
        other, its_optimizer = gz.prepare(other, torch.optim.SGD(other.parameters(), 0.05), "ddp")
    if kind == "a model that is gone":
        probe: Any = nn.Linear(5, 3)
        probe, its_optimizer = gz.prepare(probe, torch.optim.SGD(probe.parameters(), 0.05), "ddp")
        probe(torch.ones(4, 5)).sum().backward()
        its_optimizer.step()
        del probe, its_optimizer
        gc.collect()
    data = Samples(True)
    loader: Any = gz.loader(data, 4, shuffle=False)
    if kind == "DistributedSampler":
        loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    elif kind == "by hand":
        loader = [(data.x[i + rank :: 24], data.y[i + rank :: 24]) for i in range(0, 12, 2)]
    raised = ""
    with heard() as texts:
        try:
            for x, y in loader:

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    optimizer.zero_grad()
                    loss = summed(model, x, y, world)
                    loss.backward()
                    return loss

                if kind == "two models":
                    its_optimizer.zero_grad()
                    F.mse_loss(other(x), x[:, :3]).backward()
                    its_optimizer.step()
                if kind == "a closure":
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        except UsageError as error:
            raised = str(error)
    return raised, texts


def never_steps(rank: int, world_size: int) -> list[str]:
    gz.init()
    model: Any = Net(nn.Identity())
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), 0.05), "ddp")
    with heard() as texts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_audit, "_MOST_BATCHES", 2)
        for x, _ in gz.loader(Samples(True), 4):
            model(x).sum().backward()
    del optimizer  # what it steps is audited until then
    return texts


def on_unjoined(rank: int, world_size: int) -> list[list[str]]:
    gz.init()
    found = []
    for make, collate, _ in UNJOINED.values():
        model: Any = Net(nn.Identity())
        model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), 0.05), "ddp")
        with heard() as texts:
            for x, _ in gz.loader(make(), 4, collate_fn=collate):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        found.append([text for text in texts if "not compared with one process, because" in text])
    return found


@pytest.mark.slow
def test_what_fails_when_batches_are_joined_is_said() -> None:
    for told, (_, _, why) in zip(run_ranks(on_unjoined, 2)[0], UNJOINED.values(), strict=True):
        assert len(told) == 3 and why in told[0], told


@pytest.mark.slow
def test_batches_that_no_step_follows_are_not_kept_for_ever() -> None:
    told = [text for text in run_ranks(never_steps, 2)[0] if "audit of step 0" in text]
    assert len(told) == 1 and told[0].endswith("because its optimizer has not stepped after 2 batches")


@pytest.mark.parametrize("kind", ["DistributedSampler", "a closure", "a model that is gone"])
def test_other_loops_are_audited_too(kind: str) -> None:
    for raised, _ in run_ranks(by_other_loaders, 2, kind):
        assert HALF in raised


def test_of_two_models_the_one_that_steps_first_is_compared() -> None:
    raised, logged = run_ranks(by_other_loaders, 2, "two models")[0]
    assert not raised
    assert sum("gradients are those of one process" in text for text in logged) >= 2


def test_batches_that_cannot_be_joined_are_said() -> None:
    raised, logged = run_ranks(by_other_loaders, 2, "by hand")[0]
    assert not raised
    told = [text for text in logged if "not compared with one process, because ranks share no batches" in text]
    assert len(told) == 3 and told[0].startswith("audit of step 0:")


def repeated(rank: int, world_size: int) -> list[str]:
    gz.init()
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), 0.05), "tensor")
    with heard() as texts:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
    return texts


def test_the_proof_of_a_divided_model_is_repeated() -> None:
    logged = run_ranks(repeated, 2)[0]
    assert sum("proof: as in one process" in text for text in logged) == 3
