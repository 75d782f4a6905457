"""Accelerate and the Trainer of transformers take "shm" by name, in scripts that never import Guozhuang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launching import guozhuang, needs, write

pytestmark = [pytest.mark.slow, needs("accelerate")]

ACCELERATE = """
import sys, torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=sys.argv[1])])
assert dist.get_backend() == accelerator.state.backend == "shm" and accelerator.num_processes == 2
rank = accelerator.process_index
model = accelerator.prepare(torch.nn.Linear(2, 2))
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
model(torch.full((1, 2), float(rank))).sum().backward()
assert model.module.weight.grad.tolist() == [[0.5, 0.5]] * 2
assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]
accelerator.end_training()
"""
TRAINER = """
import torch
import torch.distributed as dist
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
    def forward(self, x, labels=None):
        out = self.linear(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
assert dist.get_backend() == arguments.ddp_backend.replace("ccl", "shm")
rows = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
trainer = Trainer(Model(), arguments, train_dataset=[{"x": x, "labels": x.sum()} for x in rows])
trainer.train()
if arguments.process_index == 0:
    torch.save(trainer.model.state_dict(), arguments.ddp_backend + ".pt")
"""
OPTIONS = (
    *("--max_steps", 3, "--learning_rate", 0.1, "--use_cpu", "--save_strategy", "no"),
    *("--report_to", "none", "--output_dir", "out"),
)


def test_accelerate_takes_shm_by_name(tmp_path: Path) -> None:
    done = guozhuang("run", "-np", 2, write(tmp_path, ACCELERATE), "shm", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_script_for_oneccl_trains_on_shm_where_a_strategy_is_asked_for(tmp_path: Path) -> None:
    script = write(tmp_path, ACCELERATE)
    done = guozhuang("run", "-np", 2, "--strategy", "ddp", script, "ccl", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("backend ccl is not installed; the group is one of shm") == 1, done.stderr


def test_the_trainer_takes_shm_by_name(tmp_path: Path) -> None:
    script, weights = write(tmp_path, TRAINER), {}
    for backend in ("gloo", "shm", "ccl"):
        chosen = ["--strategy", "ddp"] if backend == "ccl" else []
        words = ["run", "-np", 2, *chosen, script, *OPTIONS, "--ddp_backend", backend]
        done = guozhuang(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        weights[backend] = torch.load(tmp_path / f"{backend}.pt")
    for name, weight in weights["gloo"].items():
        for backend in ("shm", "ccl"):
            torch.testing.assert_close(weights[backend][name], weight)
