"""Layouts of 2 by 2 ranks: accumulation, clipping, scaling, methods, shares of the data and states against one process."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.errors import MismatchError, UsageError
from guozhuang.strategies import get
from tests.ranks import GROUP_TIMEOUT_S, run_ranks
from tests.waiting import LIMIT_S

STEPS, MICRO, ROWS = 3, 2, 8  # optimizer steps, micro-batches in a step, rows of all ranks together in a micro-batch
LAYOUTS = (
    ("hybrid", "pp=2,tp=2"),
    ("hybrid", "pp=2,dp=2"),
    ("hybrid", "tp=2,dp=2"),
    ("sharded", "tp=2"),
    ("sharded", "pp=2"),
    ("pipeline", "dp=2"),
    ("quantize8", "pp=2"),
    ("fp16", "tp=2"),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, note: object = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)


def made() -> tuple[Blocks, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def rows(step: int, micro: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks together."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(ROWS, 4, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


def one_process() -> tuple[dict[str, Tensor], list[float], Any]:
    model, optimizer = made()
    norms = []
    for step in range(STEPS):
        batches = [rows(step, micro) for micro in range(MICRO)]
        model.loss(*(torch.cat(some) for some in zip(*batches, strict=True))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms, optimizer.state_dict()["state"]


def steps(strategy: str, layout: str, form: str) -> None:
    model, optimizer = gz.prepare(*made(), strategy=strategy, layout=layout, loss=nn.functional.cross_entropy)
    world = gz.init()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=form == "scaled")
    norms = []
    for step in range(STEPS):
        for micro in gz.accumulate(model, steps=MICRO):
            x, y = (each.chunk(world.data_size)[world.data_rank] for each in rows(step, micro))
            loss = model.loss(x, y) if form == "method" else nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss / MICRO).backward()
        scaler.unscale_(optimizer)
        norms.append(float(gz.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state, whole = model.state_dict(), optimizer.state_dict()["state"]
    if not get(strategy).exact:
        assert all(torch.isfinite(value).all() for value in state.values())
        return
    expected, expected_norms, expected_state = one_process()
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-7)
    assert list(state) == list(expected) and whole.keys() == expected_state.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    for key, values in expected_state.items():
        for name, value in values.items():
            torch.testing.assert_close(whole[key][name], value, rtol=1e-3, atol=1e-6)


def frozen(layout: str) -> None:
    """A frozen stage has nothing to average or to clip; parameters without a gradient are not stepped by zeros."""
    for trained in ("last.", "first."):
        model, optimizer = made()
        model.unused = nn.Linear(2, 2)
        optimizer.add_param_group({"params": model.unused.parameters()})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith((trained, "unused")))
        expected = copy.deepcopy(model)
        reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
        model, optimizer = gz.prepare(model, optimizer, strategy="hybrid", layout=layout)
        other, _ = gz.prepare(*made(), strategy="hybrid", layout=layout)  # in whose clipping no stage is to take part
        other(torch.ones(4, 4))
        world, scaler = gz.init(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS + 1):
            if step == STEPS - 1:  # layers are trained from here on
                for each in (expected, model):
                    each.requires_grad_(True)
            x, y = rows(step, 0)
            nn.functional.cross_entropy(expected(x), y).backward()
            x, y = (each.chunk(world.data_size)[world.data_rank] for each in (x, y))
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            norms = [float(nn.utils.clip_grad_norm_(each.parameters(), 0.1)) for each in (expected, model)]
            torch.testing.assert_close([norms[0]] * 2, [norms[1], float(total)], rtol=1e-5, atol=1e-7)
            for each in (expected, model):
                for layer in (each.first, each.last):  # nothing on the stages that do not hold it
                    for some in (layer.parameters(), [layer.weight]):
                        nn.utils.clip_grad_norm_([p for p in some if p.grad is not None], 0.03)
            scaler.step(optimizer)
            scaler.update()
            reference.step()
            for each in (optimizer, reference):
                each.zero_grad()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=2e-5)


def single_modules() -> None:
    """States of modules inside of a divided one are whole too, and load."""
    (model, _), whole = gz.prepare(*made(), strategy="hybrid", layout="pp=2,tp=2"), made()[0]
    model(rows(0, 0)[0], note=object())  # an object's text differs between the ranks, which is no other batch
    for name in ("first", "blocks", "last"):
        for key, value in getattr(whole, name).state_dict().items():
            assert torch.equal(getattr(model.module, name).state_dict()[key], value)
    changed = {key: value + 1 for key, value in whole.last.state_dict().items()}
    model.module.last.load_state_dict(changed)
    assert all(torch.equal(model.state_dict()[f"last.{key}"], value) for key, value in changed.items())


def refusals() -> None:
    world = gz.init()
    model, _ = gz.prepare(*made(), strategy="hybrid", layout="pp=2,tp=2")
    with pytest.raises(MismatchError, match="input 0 of the model differs between ranks that hold one copy"):
        model(torch.full((4, 4), float(world.rank)))
    early = gz.loader(range(8), num_replicas=4, rank=world.rank)
    with pytest.raises(UsageError, match="make the loader after prepare"):
        gz.prepare(*made(), strategy="tensor")
    del early
    with pytest.raises(UsageError, match="cannot average gradients between copies"):
        gz.prepare(*made(), strategy="sharded-weights", layout="tp=2")
    with pytest.raises(UsageError, match="does not fit the world of 4 ranks"):
        gz.prepare(*made(), strategy="tensor", layout="dp=3")
    with pytest.raises(UsageError, match="LBFGS searches along a line"):
        model = Blocks()
        gz.prepare(model, torch.optim.LBFGS(model.parameters()), strategy="pipeline")
    with pytest.raises(UsageError, match="whose shape is not known yet"):
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
        gz.prepare(model, torch.optim.AdamW(model.parameters()), strategy="pipeline")
    with pytest.raises(UsageError, match="needs the loss"):
        gz.prepare(*made(), strategy="pipeline", schedule="1f1b")


def shares() -> None:
    """Ranks that hold one copy of the model get the same batches, of gz.loader with and without a world."""
    pair = gz.prepare(*made(), strategy="hybrid", layout="tp=2,dp=2")
    world = gz.init()
    found = [list(gz.loader(range(8), 2, shuffle=False, world=given)) for given in (world, None)]
    expected = (
        [torch.tensor([0, 2]), torch.tensor([4, 6])] if world.rank < 2 else [torch.tensor([1, 3]), torch.tensor([5, 7])]
    )
    assert all(torch.equal(batch, wanted) for some in found for batch, wanted in zip(some, expected, strict=True))
    assert (world.data_rank, world.data_size) == (world.rank // 2, 2) and pair


def all_of(rank: int, size: int) -> list[str]:
    gz.init(timeout_s=GROUP_TIMEOUT_S)
    failed = []
    parts = [(steps, strategy, layout, form) for strategy, layout in LAYOUTS for form in ("plain", "method", "scaled")]
    for part, *arguments in (
        *parts,
        (frozen, "pp=2,dp=2"),
        (frozen, "pp=2,tp=2"),
        (single_modules,),
        (shares,),
        (refusals,),
    ):
        try:
            part(*arguments)  # type: ignore[operator]
        except Exception:
            failed.append(f"{part.__name__} {arguments}: {traceback.format_exc()[-1500:]}")
            break
    gz.shutdown()
    return failed


@pytest.mark.slow
def test_layouts_against_one_process() -> None:
    for failed in run_ranks(all_of, 4, init=False, timeout_s=3 * LIMIT_S):
        assert not failed, "\n".join(failed)
