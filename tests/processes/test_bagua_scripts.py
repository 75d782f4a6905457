"""Whole scripts in the shape of Bagua's published examples run unchanged by `guozhuang run`, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from guozhuang.compat.horovod.common import extension
from tests import launching
from tests.launching import ROOT, guozhuang, write

pytestmark = pytest.mark.waits

# What they share: a task that can be learned, and its share of a rank.
BEGIN = """
import os, sys
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
torch.set_num_threads(1)

def loader(batch_size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 8, generator=generator)
    data = TensorDataset(x, (x[:, :4].sum(1) > x[:, 4:].sum(1)).long())
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, bagua.get_world_size(), bagua.get_rank()))

def net():
    torch.manual_seed(10 + bagua.get_rank())
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

def choose(name, model, lr):
    if name == "qadam":
        from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=20)
        return optimizer, QAdamAlgorithm(optimizer)
    options = {"sync_interval_ms": 5} if name == "async" else {}
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), Algorithm.init(name, **options)

def tell(model, batches):
    model.eval()
    with torch.no_grad():
        right = torch.tensor([sum((model(x).argmax(1) == y).float().sum().item() for x, y in batches)])
    bagua.allreduce_inplace(right)
    print(f"accuracy {right.item() / 512:.3f}")
"""

# The data is made by one rank while the others wait; the device is asked for before the group is there.
DIGITS = """
name = sys.argv[1]
assert bagua.get_local_rank() == bagua.get_rank() and not dist.is_initialized()
bagua.init_process_group()
if bagua.get_local_rank() == 0:
    dist.barrier()
else:
    dist.barrier()
batches, model = loader(16), net()
optimizer, algorithm = choose(name, model, 0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
fuses = "fuse" in sys.argv
model = model.with_bagua([optimizer], algorithm, do_flatten=not fuses)
if fuses:
    from bagua.torch_api.contrib import fuse_optimizer
    optimizer = fuse_optimizer(optimizer, do_flatten=True)
for epoch in range(8):
    if name == "async":
        model.bagua_algorithm.resume(model)
    batches.sampler.set_epoch(epoch)
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.fuse_step() if fuses else optimizer.step()
    if name == "async":
        model.bagua_algorithm.abort(model)
    scheduler.step()
    tell(model, batches) if epoch == 7 else None
if bagua.get_rank() == 0:
    torch.save(model.state_dict(), "digits.pt")
    assert list(torch.load("digits.pt")) == list(net().state_dict())
"""

# With accumulation, and a checkpoint that rank 0 writes and every rank loads before training goes on.
RESUMED = """
bagua.init_process_group()
for run in range(2):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    first = 0
    if os.path.exists("checkpoint.pt"):
        saved = torch.load("checkpoint.pt")
        first = saved["epoch"]
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
    model = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    batches = loader(16)
    for epoch in range(first, first + 4):
        model.train()
        for number, (x, y) in enumerate(batches):
            steps = number % 2 == 1
            model.bagua_ddp.require_backward_grad_sync = steps
            (F.cross_entropy(model(x), y) / 2).backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    if run == 0 and bagua.get_rank() == 0:
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
                   "checkpoint.pt")
    dist.barrier()
assert first == 4
tell(model, batches)
"""

# Several groups of parameters, one without decay; clipping between backward and step.
GROUPS = """
bagua.init_process_group()
model, batches = net(), loader(16)
plain = [p for name, p in model.named_parameters() if name.endswith("bias")]
others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
optimizer = torch.optim.AdamW(
    [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=0.01, eps=1e-8)
model = model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False))
for epoch in range(6):
    model.train()
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
tell(model, batches)
"""

SCRIPTS = {"digits": DIGITS, "resumed": RESUMED, "groups": GROUPS}
SLOW = ["gradient_allreduce", "bytegrad", "low_precision_decentralized", "qadam", "async"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digits", ["decentralized"]),
        pytest.param("digits", ["gradient_allreduce", "fuse"], marks=pytest.mark.slow),
        pytest.param("digits", ["decentralized", "fuse"], marks=pytest.mark.slow),
        *(pytest.param("digits", [each], marks=pytest.mark.slow) for each in SLOW),
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("resumed", "groups")),
    ],
)
@pytest.mark.parametrize(
    "backend", [[], pytest.param(["--backend", "gloo"], marks=pytest.mark.slow)], ids=["shm", "gloo"]
)
def test_published_shapes_learn(tmp_path: Path, name: str, words: list[str], backend: list[str]) -> None:
    script = write(tmp_path, BEGIN + SCRIPTS[name])
    done = guozhuang("run", "-np", 2, *backend, script, *words, folder=tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"accuracy ([0-9.]+)", done.stdout)
    assert len(found) == 2 and len(set(found)) == 1 and float(found[0]) > 0.9, done.stdout


SAME = """
import importlib, sys
import bagua, bagua.torch_api, bagua.torch_api.algorithms.q_adam, bagua.torch_api.bucket
from bagua.torch_api.communication import new_group
import guozhuang.compat.bagua as ours
assert bagua is ours and bagua.torch_api is ours.torch_api
assert sys.modules["bagua.torch_api.bucket"] is importlib.import_module("guozhuang.compat.bagua.torch_api.bucket")
for name in ("bagua.service", "bagua.bagua_define"):
    try:
        importlib.import_module(name)
        raise SystemExit(name + " is there")
    except ModuleNotFoundError as error:
        assert "BAGUA_DEFAULT_BUCKET_SIZE" in str(error) and error.name == name
print(bagua.torch_api.get_world_size(), hasattr(__import__("torch").nn.Linear(1, 1), "with_bagua"))
"""


@pytest.mark.slow  # the finder and the text of these folders are those of Horovod and BytePS
@pytest.mark.parametrize("folder", [extension.ON_PATH, ROOT / "packaging/bagua/guozhuang_bagua"], ids=["run", "extra"])
def test_both_names_are_one_module(tmp_path: Path, folder: Path) -> None:
    path = f"{folder}:{extension.ON_PATH}:{ROOT}"
    done = launching.python("-c", SAME, folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr


def test_only_bagua_adds_to_modules(tmp_path: Path) -> None:
    code = "import guozhuang, torch; print(hasattr(torch.nn.Module, 'with_bagua'))"
    assert launching.python("-c", code, folder=tmp_path).stdout == "False\n"
