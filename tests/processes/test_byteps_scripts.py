"""Whole scripts in the shape of BytePS's published examples run unchanged by `guozhuang run`, and learn."""

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
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
torch.set_num_threads(1)

def loader(bps, batch_size):
    torch.manual_seed(1)
    x = torch.randn(512, 8)
    data = TensorDataset(x, (x[:, :4].sum(1) > x[:, 4:].sum(1)).long())
    sampler = DistributedSampler(data, num_replicas=bps.size(), rank=bps.rank())
    torch.manual_seed(10 + bps.rank())
    return DataLoader(data, batch_size=batch_size, sampler=sampler)

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

def share_right(model, batches):
    model.eval()
    right = sum((model(x).argmax(1) == y).float().sum().item() for x, y in batches)
    return right / sum(len(y) for _, y in batches)
"""

# With metrics that are averaged as 0-dim tensors.
DIGITS = """
import byteps.torch as bps
bps.init()
assert bps.local_rank() == bps.rank()
batches, model = loader(bps, 16), net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * bps.size(), momentum=0.5)
optimizer = bps.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=bps.Compression.fp16)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(8):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
found = bps.push_pull(torch.tensor(share_right(model, batches)), name="avg_accuracy").item()
print(f"accuracy {found:.3f}")
"""

# With accumulation, a checkpoint that rank 0 alone loads, rates that change in each batch, and clipping.
RESUMED = """
import byteps.torch as bps
bps.init()
model = net()
k, from_epoch = 2, 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
optimizer = bps.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=k)
for run in range(2):
    if os.path.exists("checkpoint.pt"):
        from_epoch = bps.push_pull(torch.tensor(1), name="resume_from_epoch").item()
    if from_epoch and bps.rank() == 0:
        saved = torch.load("checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    batches = loader(bps, 16 * k)
    for epoch in range(from_epoch, from_epoch + 4):
        model.train()
        for number, (x, y) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * bps.size() * k / (1 + 0.01 * number)
            optimizer.zero_grad()
            for i in range(0, len(x), 16):
                (F.cross_entropy(model(x[i : i + 16]), y[i : i + 16]) / k).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
    if run == 0:
        if bps.rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
        bps.push_pull(torch.ones(1), name="saved")
        bps.suspend()
        bps.resume(1, 1, int(os.environ["RANK"]))
print(f"accuracy {bps.push_pull(torch.tensor(share_right(model, batches)), name='accuracy').item():.3f}")
"""

# With buffers from rank 0, or with those of each rank.
PARALLEL = """
import byteps.torch as bps
from byteps.torch.parallel import DistributedDataParallel as DDP
bps.init()
batches = loader(bps, 16)
model = DDP(net(), device_ids=[bps.local_rank()], broadcast_buffers="own-buffers" not in sys.argv)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * bps.size(), momentum=0.5)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(8):
    batches.sampler.set_epoch(epoch)
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
print(f"accuracy {bps.push_pull(torch.tensor(share_right(model, batches)), name='accuracy').item():.3f}")
"""

# Steps on one batch are timed, before and after the world is left and entered again.
BENCHMARK = """
import timeit
import byteps.torch as bps
bps.init()
model, batch = net(), next(iter(loader(bps, 32)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * bps.size(), momentum=0.5)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)

def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()

def benchmark():
    timeit.timeit(benchmark_step, number=10)
    seconds = [timeit.timeit(benchmark_step, number=10) for _ in range(5)]
    if bps.rank() == 0:
        print(f"{32 * 50 / sum(seconds):.1f} samples a second on each of {bps.size()} ranks, {bps.local_size()} here")

benchmark()
place = bps.rank(), bps.size(), bps.local_rank()
bps.suspend()
bps.resume(1, 1, place[0])
assert (bps.rank(), bps.size(), bps.local_rank()) == place
benchmark()
print(f"accuracy {bps.push_pull(torch.tensor(share_right(model, [batch])), name='accuracy').item():.3f}")
"""

# Accumulation as BytePS documents it, without names.
ACCUMULATED = """
import byteps.torch as bps
bps.init()
batches, model = loader(bps, 8), net()
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02 * bps.size(), momentum=0.5))
optimizer.set_backward_passes_per_step(2)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(8):
    model.train()
    for number, (x, y) in enumerate(batches):
        (F.cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 1:
            optimizer.step()
            model.zero_grad()
print(f"accuracy {bps.push_pull(torch.tensor(share_right(model, batches)), name='accuracy').item():.3f}")
"""

CROSSING = """
import byteps.torch.cross_barrier as bps
from byteps.torch.ops import push_pull
bps.init()
batches, model = loader(bps, 16), net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = bps.CrossBarrier(model, optimizer, model.named_parameters(), num_steps=8 * len(batches))
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(8):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
print(f"accuracy {push_pull(torch.tensor(share_right(model, batches)), name='accuracy').item():.3f}")
"""

SCRIPTS = {
    "digits": DIGITS,
    "resumed": RESUMED,
    "parallel": PARALLEL,
    "benchmark": BENCHMARK,
    "accumulated": ACCUMULATED,
    "crossing": CROSSING,
}
OTHERS = ("resumed", "parallel", "parallel own-buffers", "benchmark", "accumulated", "crossing")


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("digits", "shm"),
        *(pytest.param(each, "shm", marks=pytest.mark.slow) for each in OTHERS),
        *(pytest.param(each, "gloo", marks=pytest.mark.slow) for each in ("digits", "resumed", "benchmark")),
    ],
)
def test_published_shapes_learn(tmp_path: Path, words: str, backend: str) -> None:
    name, *arguments = words.split()
    script = write(tmp_path, BEGIN + SCRIPTS[name])
    done = guozhuang("run", "-np", 2, "--backend", backend, script, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"accuracy ([0-9.]+)", done.stdout)
    assert len(found) == 2 and len(set(found)) == 1 and float(found[0]) > 0.9, done.stdout
    assert not re.search(r"guozhuang/\S+: \w*Warning", done.stderr), done.stderr


ASYNCHRONOUS = DIGITS.replace("lr=0.02 * bps.size(), momentum=0.5", "lr=0.01")


@pytest.mark.slow
def test_asynchronous_training_learns(tmp_path: Path) -> None:
    """Each rank ends when it is done; the other goes on with the weights that it holds a part of."""
    script = write(tmp_path, BEGIN + ASYNCHRONOUS.replace("range(8)", "range(12 + 8 * bps.rank())"))
    done = guozhuang("run", "-np", 2, script, folder=tmp_path, BYTEPS_ENABLE_ASYNC="1")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"accuracy ([0-9.]+)", done.stdout)
    assert len(found) == 2 and float(found[0]) > 0.85, done.stdout
    assert done.stderr.count("asynchronous training") == 1


STEPS = """
import torch
import byteps.torch as bps
bps.init()
p = torch.nn.Parameter(torch.ones(4))
optimizer = bps.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), named_parameters=[("p", p)])
for _ in range(2):
    p.grad = torch.ones(4)
    optimizer.step()
bps.push_pull(torch.ones(1), name="met")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "bps.shutdown()"])
def test_ranks_that_leave_servers_as_they_end(tmp_path: Path, end: str) -> None:
    """A thread that was inside gloo when the interpreter ended aborted most of such runs."""
    script = write(tmp_path, STEPS + end)
    done = guozhuang("run", "-np", 4, "--servers", 1, script, folder=tmp_path, BYTEPS_ENABLE_ASYNC="1")
    assert done.returncode == 0, done.stderr


SAME = """
import importlib, sys
import byteps, byteps.torch as bps, byteps.torch.cross_barrier, byteps.torch.parallel
from byteps.torch.ops import push_pull_async_inplace
import guozhuang.compat.byteps as ours
assert byteps is ours and byteps.__version__ == "0.2.5" and bps is ours.torch
assert sys.modules["byteps.torch.ops"] is importlib.import_module("guozhuang.compat.byteps.torch.ops")
import horovod.torch as hvd
for name in ("byteps.tensorflow", "horovod.tensorflow"):
    try:
        importlib.import_module(name)
        raise SystemExit(name + " is there")
    except ModuleNotFoundError as error:
        assert "PyTorch part only" in str(error) and error.name == name
bps.init()
print(bps.size(), bps.push_pull(bps.broadcast_object(__import__("torch").ones(2)), name="a").tolist())
"""


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(extension.ON_PATH, id="run", marks=pytest.mark.slow),
        pytest.param(ROOT / "packaging/byteps/guozhuang_byteps", id="extra", marks=pytest.mark.slow),
    ],
)
def test_both_names_are_one_module(tmp_path: Path, folder: Path) -> None:
    path = f"{folder}:{extension.ON_PATH}:{ROOT}"
    done = launching.python("-c", SAME, folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "1 [1.0, 1.0]\n"), done.stderr


def test_the_real_byteps_goes_before_ours(tmp_path: Path) -> None:
    real = tmp_path / "site" / "byteps"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("__version__ = 'real'\n")
    path = f"{extension.ON_PATH}:{real.parent}"
    done = launching.python("-c", "import byteps; print(byteps.__version__)", folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "real\n"), done.stderr
    assert "guozhuang: byteps itself is installed" in done.stderr and "pip uninstall byteps" in done.stderr
