"""Accelerate and the Trainer of transformers, real ones, with one word changed: weights equal those of their own DDP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launching import environment, guozhuang, needs, write
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow, needs("accelerate")]

# The shape of Accelerate's own example (nlp_example.py): prepare all, accumulate, clip, step the scheduler, gather metrics.
ACCELERATE = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
import guozhuang

def train(accelerator, model, optimizer, scheduler, loader, epochs):
    loss_fn = nn.CrossEntropyLoss()
    for epoch in epochs:
        model.train()
        for a, b in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(a), b))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step(); scheduler.step(); optimizer.zero_grad()
        model.eval()
        right = 0
        for a, b in loader:
            with torch.no_grad():
                p, b = accelerator.gather_for_metrics((model(a).argmax(-1), b))
            right += (p == b).sum().item()
    return right

def main(strategy):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, strategy=strategy,
                              kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    set_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    bare = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + 0.1 * s))
    x = torch.randn(36, 8, generator=torch.Generator().manual_seed(3))
    y = (x.sum(1) > 0).long() + (x[:, 0] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    train(accelerator, model, optimizer, scheduler, loader, range(2))
    folder = f"state-{strategy}"
    accelerator.save_state(folder)
    right = train(accelerator, model, optimizer, scheduler, loader, range(2))
    accelerator.wait_for_everyone()
    weights = dict(accelerator.get_state_dict(model))
    accelerator.load_state(folder)
    assert train(accelerator, model, optimizer, scheduler, loader, range(2)) == right
    accelerator.wait_for_everyone()
    again = dict(accelerator.get_state_dict(model))
    assert list(weights) == list(bare.state_dict()), list(weights)
    unwrapped = accelerator.unwrap_model(model)
    assert unwrapped is bare, type(unwrapped)
    resumed = max((weights[k] - again[k]).abs().max().item() for k in weights)
    if accelerator.is_main_process:
        torch.save((weights, right, resumed), f"{strategy}.pt")

def main_of_prepared():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = guozhuang.prepare(model, optimizer, "diloco")
    taken, wrapped = accelerator.prepare(model, optimizer)
    assert taken is model and wrapped.optimizer is optimizer  # taken over, not averaged in each step too
    try:
        nn.parallel.DistributedDataParallel(model)
    except ValueError as error:
        assert "diloco" in str(error), error
    else:
        raise AssertionError("wrapped twice")

guozhuang.init()
for strategy in (None, *sys.argv[1:]):
    main(strategy)
main_of_prepared()
"""
EXACT = ("ddp", "sharded", "sharded-weights", "parameter-server")
OTHERS = ("topk", "diloco", "decentralized")


def test_accelerates_example_under_each_strategy_is_that_of_its_own_ddp_and_goes_on_from_its_state(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, ACCELERATE)
    done = guozhuang("run", "-np", 2, script, *EXACT, *OTHERS, folder=tmp_path)
    assert done.returncode == 0, done
    assert done.stderr.count("Accelerate trains by strategy ddp, 2 ranks on backend shm") == 1, done.stderr
    expected, right, _ = torch.load(tmp_path / "None.pt")
    for strategy in (*EXACT, *OTHERS):
        weights, its_right, resumed = torch.load(tmp_path / f"{strategy}.pt")
        assert resumed == 0, strategy
        if strategy in EXACT:
            assert its_right == right, strategy
            for name, tensor in expected.items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0 if strategy == "ddp" else 1e-6)


# The shape of run_glue.py: a BERT with a head, the Trainer with accumulation, clipping, evaluation and checkpoints.
TRAINER = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

out, *options = sys.argv[1:]
args = TrainingArguments(
    output_dir=out, use_cpu="use_cpu" in options, per_device_train_batch_size=4, max_steps=6, learning_rate=1e-3,
    max_grad_norm=0.5, gradient_accumulation_steps=2, logging_steps=2, save_steps=4, eval_strategy="steps", eval_steps=4,
    report_to=[], seed=5, disable_tqdm=True,
)
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100, num_labels=2,
))
draw = torch.Generator().manual_seed(3)
data = [{"input_ids": torch.randint(0, 100, (12,), generator=draw), "labels": i % 2} for i in range(48)]
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:16])
trainer.train(resume_from_checkpoint=next((each for each in options if "checkpoint-" in each), None))
assert trainer.args.world_size == 2
trainer.save_model(out + "/final")
"""


def test_the_trainer_under_a_strategy_is_that_of_its_own_ddp_and_resumes(tmp_path: Path) -> None:
    script = write(tmp_path, TRAINER)

    def weights(name: str, *words: str, strategy: str | None = None) -> dict[str, torch.Tensor]:
        chosen = [] if strategy is None else ["--strategy", strategy]
        done = guozhuang("run", "-np", 2, *chosen, script, name, *words, folder=tmp_path)
        assert done.returncode == 0, done
        assert done.stderr.count("guozhuang: Accelerate trains by strategy") == (strategy is not None), done.stderr
        return load_file(tmp_path / name / "final" / "model.safetensors")

    expected = weights("theirs", "use_cpu")
    found = weights("sharded", strategy="sharded")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    # One rank writes; under diloco each rank has an optimizer and an exchange of its own, which are kept for the resumption.
    straight = weights("straight", strategy="diloco")
    resumed = weights("resumed", "straight/checkpoint-4", strategy="diloco")
    for name, tensor in straight.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=0)


AGAIN = """
import os, torch
from accelerate import Accelerator

accelerator, module = Accelerator(cpu=True), torch.nn.Linear(4, 1)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(accelerator.process_index))
for _ in range(2):
    model, optimizer = accelerator.prepare(module, torch.optim.Adam(module.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    module = accelerator.unwrap_model(model)
torch.save(accelerator.get_state_dict(model)["weight"].clone(), f"again{accelerator.process_index}.pt")
"""


def by_accelerate(*words: object, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """``accelerate launch``, as a user types it."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_a_module_that_is_trained_again_with_a_new_optimizer_is_averaged_again(tmp_path: Path, strategy: str) -> None:
    script = write(tmp_path, AGAIN)
    if strategy == "sharded":  # Accelerate's own launcher would start one rank
        done = by_accelerate("--cpu", "--num_processes", 2, script, folder=tmp_path, GUOZHUANG_STRATEGY=strategy)
    else:
        done = guozhuang("run", "-np", 2, script, folder=tmp_path, GUOZHUANG_STRATEGY=strategy)
    assert done.returncode == 0, done
    assert f"Accelerate trains by strategy {strategy}, 2 ranks on backend shm" in done.stderr, done.stderr
    first, second = (torch.load(tmp_path / f"again{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)


REFUSED = """
import os, torch
from types import SimpleNamespace
from unittest import mock
from accelerate import Accelerator
from accelerate.utils import DistributedType
from guozhuang.compat.accelerate import launched

def words(environ={}, has_gpu=False, **more):
    told = dict(cpu=False, use_cpu=False, num_processes=2, num_machines=1, mpirun_hostfile=None) | more
    with mock.patch.dict(os.environ, environ), mock.patch.object(torch.accelerator, "is_available", lambda: has_gpu):
        return launched(lambda asked: (["python"], {}), SimpleNamespace(**told))[0]

def ranks_of(rank, size, local_size):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{name}": str(n) for name, n in zip(names, (rank, size, rank % local_size, local_size))}

assert "-np" in words() and "-np" in words(ranks_of(0, 1, 1)) and "-np" in words(has_gpu=True, cpu=True)
assert "-np" in words({"RANK": "0", "WORLD_SIZE": "1"})
alone = ["python"]
assert words(ranks_of(1, 2, 2)) == words(ranks_of(1, 2, 1)) == alone, "mpirun started the others"
assert words({"RANK": "1", "WORLD_SIZE": "2"}) == words({"PMI_RANK": "1", "PMI_SIZE": "2"}) == alone
assert words(has_gpu=True) == words(mpirun_hostfile="hosts") == words(num_processes=1) == alone

accelerator = Accelerator(cpu=True)
try:
    type(accelerator)._check_kind(SimpleNamespace(distributed_type=DistributedType.FSDP), "sharded")
except ValueError as error:
    assert "got 'FSDP'" in str(error), error
else:
    raise AssertionError("not refused")
"""


def test_a_strategy_that_cannot_act_is_said_or_refused(tmp_path: Path) -> None:
    script = write(tmp_path, REFUSED)
    done = by_accelerate("--cpu", "--num_processes", 1, script, folder=tmp_path, GUOZHUANG_STRATEGY="sharded")
    assert done.returncode == 0 and done.stderr.count("strategy sharded has this one process to train in") == 1, done
