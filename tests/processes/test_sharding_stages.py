"""Stages 2 and 3 by fully_shard: the weights of one process, whatever optimizer; clipping, scaling, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from guozhuang import compat
from guozhuang.errors import UsageError
from guozhuang.lab import compare, options
from guozhuang.lab.results import from_json
from guozhuang.sharding import clip_grad_norm_
from guozhuang.sharding.fully import shard_fully
from guozhuang.sharding.whole import full_weights, is_divided
from tests.processes.cases import as_tests, batch, mean_loss, twin_of
from tests.ranks import run_ranks

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.out = nn.Linear(8, 3)  # 3 rows: not a multiple of the ranks
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.05}]


OPTIMIZERS = {
    "momentum": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}


def check(model: nn.Module, twin: nn.Module) -> None:
    found = full_weights(model)
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


def step(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def trains(rank: int, world_size: int, keep_weights: bool) -> None:
    for make in OPTIMIZERS.values():
        model = Net()
        twin = twin_of(model)
        optimizer, twin_optimizer = make(model), make(twin)
        for some, its in ((model, optimizer), (twin, twin_optimizer)):  # state from before is taken along
            step(some, its, mean_loss(some, world_size, 99))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        twins = torch.optim.lr_scheduler.StepLR(twin_optimizer, 2)
        if rank > 0:
            with torch.no_grad():
                model.inp.weight.add_(1.0)  # rank 0's weights win
        model, same = shard_fully(model, optimizer, keep_weights=keep_weights)
        assert same is optimizer and is_divided(model)
        for k in range(5):
            norm = step(model, optimizer, model(batch(rank, k)).pow(2).mean())
            expected = step(twin, twin_optimizer, mean_loss(twin, world_size, k))
            torch.testing.assert_close(norm, expected)
            schedule.step()
            twins.step()
        check(model, twin)
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held <= 0.75 * sum(p.numel() for p in twin.parameters())


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shm"])
@pytest.mark.parametrize("keep_weights", [True, False], ids=["gradients", "weights"])
def test_it_trains_as_one_process(keep_weights: bool, backend: str) -> None:
    run_ranks(trains, 2, keep_weights, backend=backend)


def checkpoints(rank: int, world_size: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    model = Net()
    optimizer: Any = OPTIMIZERS["adamw"](model)
    model, optimizer = shard_fully(model, optimizer, keep_weights=False)
    if saved is not None:
        set_model_state_dict(model, saved["model"], options=FULL)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=FULL)
    for k in range(3):
        step(model, optimizer, model(batch(0, k)).pow(2).mean())
    return copy.deepcopy(
        {
            "model": get_model_state_dict(model, options=FULL),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
        }
    )


def test_whole_checkpoints_load_on_another_number_of_ranks_and_on_none() -> None:
    first = run_ranks(checkpoints, 2, None)[0]
    second = run_ranks(checkpoints, 3, first)[0]
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model)
    for _ in range(2):
        for k in range(3):
            step(model, optimizer, model(batch(0, k)).pow(2).mean())
    for name, p in model.named_parameters():
        torch.testing.assert_close(second["model"][name], p.detach(), rtol=1e-5, atol=1e-6)
    fresh = Net()
    fresh.load_state_dict({**second["model"]})


def case_a_grad_scaler_skips_together(rank: int, world_size: int) -> None:
    model = Net()
    model, optimizer = shard_fully(model, torch.optim.SGD(model.parameters(), lr=0.1), keep_weights=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    seen = []
    for k in range(3):
        x = batch(rank, k)
        if k == 1 and rank == 1:
            x = x * float("inf")
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    assert seen == [64.0, 32.0, 32.0]
    assert all(bool(w.isfinite().all()) for w in full_weights(model).values())


@pytest.mark.slow
def test_all_three_are_rows_of_a_comparison(tmp_path: Path) -> None:
    parser = options.parser()
    names = ["single", "sharded", "sharded-gradients", "sharded-weights"]
    told = ["--workload", "tests.processes.tiny_workload:make", "--out", str(tmp_path), "--rounds", "1", "--steps", "4"]
    more = ["--warmup-steps", "2", "--timeout", "60", "--strategies", ",".join(names)]
    assert compare.run(parser.parse_args([*told, *more]), compat.extension().python_path) == 0
    results = from_json((tmp_path / "results.json").read_text())
    single = results.row("single")
    assert single is not None
    for name in names[1:]:
        row = results.row(name)
        assert row is not None and row.difference is not None and row.difference.relative < 1e-5, name
        assert row.losses == pytest.approx(single.losses, rel=1e-5)
        assert row.ranks_identical and row.metrics == pytest.approx(single.metrics, abs=0.05)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def case_nan_is_noticed_and_ends_the_run_where_that_was_asked(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GUOZHUANG_STOP_ON_NAN", "1")
        bare = nn.Linear(4, 2)
        model, optimizer = shard_fully(bare, torch.optim.SGD(bare.parameters(), 0.1), keep_weights=False)
    for step in range(3):
        model(torch.full((2, 4), float("nan") if (step, rank) == (1, 1) else 1.0)).sum().backward()
        if step == 1:
            with pytest.raises(
                FloatingPointError, match=r"step 1: the averaged gradient of 'weight'.* all ranks' batches"
            ):
                optimizer.step()
            return
        optimizer.step()
        optimizer.zero_grad()


def case_what_cannot_be_divided_is_refused(rank: int, world_size: int) -> None:
    def refused(model: nn.Module, optimizer: Optimizer, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            shard_fully(model, optimizer, keep_weights=True)

    model = Net()
    refused(model, torch.optim.LBFGS(model.parameters()), "LBFGS cannot step divided weights")
    scalar = Scalar()
    refused(scalar, torch.optim.SGD(scalar.parameters(), lr=0.1), r"\['scale'\]")
    empty = nn.Sequential(nn.Linear(4, 0), nn.Linear(4, 2))
    refused(empty, torch.optim.SGD(empty.parameters(), lr=0.1), r"without elements \(got \['0\.weight', '0\.bias'\]\)")
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        hooked = nn.Linear(4, 2)
        handle = getattr(hooked.bias, kind)(lambda given: None)
        refused(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), r"hooks that the script.*\['bias'\]")
        handle.remove()
        shard_fully(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), keep_weights=True)
    stepped = torch.optim.Adafactor(model.parameters())
    model(batch(0)).sum().backward()
    stepped.step()
    refused(model, stepped, "Adafactor cannot step divided weights")


test_cases = as_tests(globals(), (2,))
