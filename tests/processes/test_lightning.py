"""Lightning's Trainer and Fabric, real ones, with one word changed: weights equal those of their own DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launching import guozhuang, needs, python, write
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow, needs("lightning")]

# The shape of Lightning's own examples: a module with an optimizer and a schedule, accumulation, clipping, validation and
# checkpoints; one with two optimizers that are stepped by hand; and a loop with Fabric.
DEFINITIONS = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import guozhuang
import {package} as L
from guozhuang.compat.lightning import GuozhuangStrategy

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
Y = (X.sum(1) > 0).long()

class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, index):
        self.log("right", (self(batch[0]).argmax(-1) == batch[1]).float().mean(), sync_dist=True)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

class ByHand(Classifier):
    automatic_optimization = False
    def training_step(self, batch, index):
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]

def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=4)

def train(strategy, kind=Classifier, epochs=2, **options):
    L.seed_everything(7, verbose=False)
    module = kind()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=epochs, strategy=strategy, enable_progress_bar=False, logger=False,
        enable_model_summary=False, default_root_dir="root",
        enable_checkpointing=kind is Classifier and "ckpt_path" not in options,
        **({{}} if kind is ByHand else {{"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}),
    )
    trainer.fit(module, loader(), loader(), **options)
    assert trainer.strategy.model is module, "the wrapper is off again"
    checkpoint = trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path
    weights = {{k: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for k, v in module.state_dict().items()}}
    right = float(trainer.callback_metrics["right"])
    if strategy == "guozhuang":
        trainer.fit(module, loader())  # what was prepared for the first training is gone, and so is its group's hold on it
    return weights, right, checkpoint

def again(strategy):
    # trains a module twice, each time with a trainer and an optimizer of its own, and evaluates it
    L.seed_everything(7, verbose=False)
    module = Classifier()
    for _ in range(2):
        trainer = L.Trainer(
            accelerator="cpu", devices=2, max_epochs=1, strategy=strategy(), enable_progress_bar=False, logger=False,
            enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=0.1,
        )
        trainer.fit(module, loader())
    right = trainer.validate(module, loader(), verbose=False)[0]["right"]
    return {{k: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for k, v in module.state_dict().items()}}, right
"""
TRAINER = """
found = {"by hand, ours": train("guozhuang", ByHand)}
assert torch.distributed.get_backend() == "shm"
for name in sys.argv[1:]:
    weights, right, checkpoint = train(GuozhuangStrategy(name), epochs=1)
    resumed = train(GuozhuangStrategy(name), ckpt_path=checkpoint)
    found[name] = (*train(GuozhuangStrategy(name))[:2], resumed[0])
    found[name + " again"] = again(lambda: GuozhuangStrategy(name))
guozhuang.shutdown()
found |= {"theirs": train("ddp"), "by hand": train("ddp", ByHand), "again": again(lambda: "ddp")}
torch.save(found, f"found{torch.distributed.get_rank()}.pt")
"""
SERVED_TOO = """
found = {"by name": train("guozhuang"), "sharded": train(GuozhuangStrategy("sharded"))}
guozhuang.shutdown()
os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # rank 0 may still be closing the store that it had
torch.save(found | {"theirs": train("ddp")}, f"found{torch.distributed.get_rank()}.pt")
"""
EXACT, OTHERS = ("ddp", "sharded", "sharded-weights"), ("diloco", "topk")


def test_lightnings_trainer_is_that_of_its_own_ddp_and_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    script, strategies = write(tmp_path, DEFINITIONS.format(package="lightning") + TRAINER), (*EXACT, *OTHERS)
    done = guozhuang("run", "-np", 2, script, *strategies, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert done.returncode == 0 and not any(text in done.stderr for text in ("hide your model's", "(DTensors)")), done
    found, other = (torch.load(tmp_path / f"found{rank}.pt") for rank in range(2))
    expected, right, _ = found["theirs"]
    for name, tensor in found["by hand"][0].items():
        torch.testing.assert_close(found["by hand, ours"][0][name], tensor, rtol=0, atol=1e-7)
        assert torch.equal(found["by hand, ours"][0][name], other["by hand, ours"][0][name])
    for strategy in strategies:
        weights, its_right, resumed = found[strategy]
        for name, tensor in expected.items():
            assert torch.equal(weights[name], other[strategy][0][name]) or strategy == "sharded-weights", strategy
            torch.testing.assert_close(resumed[name], weights[name], rtol=0, atol=0, msg=f"{strategy} {name}")
            if strategy in EXACT:
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0 if strategy == "ddp" else 1e-6)
        assert strategy in OTHERS or its_right == right, strategy
        (twice, right_then), (expected_then, their_right_then) = found[f"{strategy} again"], found["again"]
        for name, tensor in expected_then.items():
            assert torch.equal(twice[name], other[f"{strategy} again"][0][name]), f"{strategy} {name}"
            if strategy in EXACT:
                torch.testing.assert_close(twice[name], tensor, rtol=0, atol=1e-6, msg=f"{strategy} {name}")
        assert strategy in OTHERS or right_then == their_right_then, strategy


def test_the_package_pytorch_lightning_is_served_too(tmp_path: Path) -> None:
    """By the same classes, made from its own: what they do is in the test above."""
    script = write(tmp_path, DEFINITIONS.format(package="pytorch_lightning") + SERVED_TOO)
    done = python(script, folder=tmp_path, timeout_s=3 * LIMIT_S)  # Lightning starts the second rank
    assert done.returncode == 0 and "hide your model's" not in done.stderr, done
    found, other = (torch.load(tmp_path / f"found{rank}.pt") for rank in range(2))
    (expected, right, _) = found["theirs"]
    for name in ("by name", "sharded"):
        assert found[name][1] == right, name
        for key, tensor in expected.items():
            torch.testing.assert_close(found[name][0][key], tensor, rtol=0, atol=1e-6, msg=f"{name} {key}")
            assert torch.equal(found[name][0][key], other[name][0][key]), f"{name} {key}"


FABRIC = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.fabric import Fabric
from guozhuang.compat.lightning import GuozhuangFabricStrategy

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))

def steps(fabric, model, optimizer, data):
    for i, (x,) in enumerate(data):
        is_accumulating = i % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(x).square().mean())
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()

def train(strategy):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(7)
    bare = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(X), batch_size=4))
    steps(fabric, model, optimizer, data)
    path = f"state-{type(strategy).__name__}-{getattr(strategy, 'name', strategy)}.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
    fabric.barrier()
    steps(fabric, model, optimizer, data)
    weights = dict(fabric.strategy.get_module_state_dict(model._forward_module))
    weights = {k: v.clone() for k, v in weights.items()}
    rest = fabric.load(path, {"model": model, "optimizer": optimizer, "epoch": 0})
    assert not rest, list(rest)
    steps(fabric, model, optimizer, data)
    again = dict(fabric.strategy.get_module_state_dict(model._forward_module))
    assert list(again) == list(bare.state_dict())
    return weights, max((weights[k] - again[k]).abs().max().item() for k in weights)

found = {"guozhuang": train("guozhuang"), "theirs": train("ddp")}
for name in sys.argv[1:]:
    found[name] = train(GuozhuangFabricStrategy(name))
if torch.distributed.get_rank() == 0:
    torch.save((found, torch.distributed.get_backend()), "found.pt")
"""


def test_fabrics_loop_is_that_of_its_own_ddp_and_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    done = python(
        write(tmp_path, FABRIC), *EXACT, *OTHERS, folder=tmp_path, timeout_s=3 * LIMIT_S
    )  # it starts the second rank
    assert done.returncode == 0, done
    assert done.stderr.count("guozhuang: Lightning trains by strategy ddp, 2 ranks on backend shm") == 1, done.stderr
    found, backend = torch.load(tmp_path / "found.pt")
    assert backend == "shm"
    for strategy in ("guozhuang", *EXACT, *OTHERS):
        weights, resumed = found[strategy]
        assert resumed == 0, strategy
        for name, tensor in found["theirs"][0].items():
            if strategy not in OTHERS:
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
