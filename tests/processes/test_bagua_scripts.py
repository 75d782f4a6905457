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

def choose(name, model, lr, warmup_steps=20):
    if name == "qadam":
        from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=warmup_steps)
        return optimizer, QAdamAlgorithm(optimizer)
    options = {"sync_interval_ms": 5} if name == "async" else {}
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), Algorithm.init(name, **options)

def tell(model, batches):
    model.eval()
    with torch.no_grad():
        counts = torch.tensor([((model(x).argmax(1) == y).sum().item(), len(y)) for x, y in batches]).sum(0)
    bagua.allreduce_inplace(counts)
    print(f"right {counts[0] / counts[1]:.3f}")
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

# Experts on all ranks; the loss leaves out the auxiliary one. Another model goes on from the checkpoint.
EXPERTS = """
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from bagua.torch_api.moe import MoE
bagua.init_process_group()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.middle, self.exit = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 2)
        self.moe = MoE(32, nn.Linear(32, 32), 2, 2)
    def forward(self, x):
        x, l_aux, exp_counts = self.moe(self.middle(self.entry(x).relu()).relu())
        assert len(exp_counts) == 2 * bagua.get_world_size() and l_aux.dim() == 0
        return self.exit(x)

def made():
    torch.manual_seed(10 + bagua.get_rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)

def train(model, optimizer, scheduler, epochs):
    model.train()
    for epoch in epochs:
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(x), 1), y).backward()
            optimizer.step()
        scheduler.step()

def loss_of(model):
    model.eval()
    torch.manual_seed(3)  # second choices are drawn in evaluation too
    with torch.no_grad():
        return sum(F.nll_loss(F.log_softmax(model(x), 1), y) for x, y in batches).item()

def momenta(optimizer):
    return [optimizer.state[p]["momentum_buffer"] for group in optimizer.param_groups for p in group["params"]]

batches = loader(64 // bagua.get_world_size())
model, optimizer, scheduler = made()
model = model.with_bagua([optimizer], Algorithm.init(sys.argv[1]))
train(model, optimizer, scheduler, range(8))
before = loss_of(model)
save_checkpoint(1000, "./", model, optimizer, scheduler)
fresh, steps, rates = made()
assert loss_of(fresh) != before
assert load_checkpoint("./", fresh, steps, rates) == 1000
after = loss_of(fresh)
fresh = fresh.with_bagua([steps], Algorithm.init(sys.argv[1]))
assert before == after == loss_of(fresh), (before, after)
assert all(map(torch.equal, *(momenta(each) for each in (optimizer, steps))))
tell(fresh, batches)
train(fresh, steps, rates, range(8, 10))
assert loss_of(fresh) != before and rates.last_epoch == 10
"""

# Steps on one batch are timed; QAdam leaves its warm-up on the way.
BENCHMARK = """
import timeit
assert bagua.get_local_rank() == bagua.get_rank()
bagua.init_process_group()
name, model = sys.argv[1], net()
x, y = next(iter(loader(32)))
optimizer, algorithm = choose(name, model, 0.02 * bagua.get_world_size(), warmup_steps=100)
model = model.with_bagua([optimizer], algorithm)

def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

timeit.timeit(benchmark_step, number=10)
seconds = [timeit.timeit(benchmark_step, number=10) for _ in range(15)]
if name == "async":
    model.bagua_algorithm.abort(model)
if bagua.get_rank() == 0:
    print(f"{32 * 10 * len(seconds) / sum(seconds):.1f} samples a second on each of {bagua.get_world_size()} ranks")
tell(model, [(x, y)])
"""

# What bagua.distributed.run starts again loads the last checkpoint of its node; a rank fails in the third epoch.
RESTARTED = """
first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
bagua.init_process_group()
model, batches = net(), loader(16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
checkpoint = f"node{os.environ['NODE_RANK']}.pt"
begin = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint, map_location="cpu")
    begin = saved["epoch"] + 1
    model.load_state_dict(saved["model_state_dict"])
    optimizer.load_state_dict(saved["optimizer_state_dict"])
assert begin == (0 if first else 3), begin
model = model.with_bagua([optimizer], Algorithm.init(sys.argv[1]))
for epoch in range(begin, 8):
    batches.sampler.set_epoch(epoch)
    model.train()
    for number, (x, y) in enumerate(batches):
        if first and epoch == 3 and number == 5 and bagua.get_rank() == 1:
            sys.exit("this rank fails once")
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if bagua.get_local_rank() == 0:
        torch.save({"epoch": epoch, "model_state_dict": model.state_dict(),
                    "optimizer_state_dict": optimizer.state_dict()}, checkpoint)
    dist.barrier(device_ids=[bagua.get_local_rank()])
tell(model, batches)
"""

# Every collective of Bagua against that of PyTorch; alltoall_v is given the counts and places of eight ranks.
COLLECTIVES = """
import itertools
bagua.init_process_group()
rank, size = bagua.get_rank(), bagua.get_world_size()
turns, wrong = itertools.count(), []

def given(num):
    return torch.rand(num, generator=torch.Generator().manual_seed(100 * next(turns) + rank))

def check(what, *pairs):
    wrong.extend(what for ours, theirs in pairs if not torch.allclose(ours.flatten(), theirs.flatten()))

for word in ("SUM", "PRODUCT", "MIN", "MAX"):
    op, x, part = getattr(bagua.ReduceOp, word), given(10 * size), slice(10 * rank, 10 * rank + 10)
    total, at_one = x.clone(), x.clone()
    dist.all_reduce(total, op=getattr(dist.ReduceOp, word))
    dist.reduce(at_one, 1, op=getattr(dist.ReduceOp, word))
    bagua.allreduce(x, y := torch.zeros(10 * size), op=op)
    bagua.allreduce_inplace(z := x.clone(), op=op)
    check("allreduce " + word, (y, total), (z, total))
    bagua.reduce(x, y := x.clone(), 1, op=op)
    bagua.reduce_inplace(z := x.clone(), 1, op=op)
    check("reduce " + word, *([(y, at_one), (z, at_one)] if rank == 1 else []))
    bagua.reduce_scatter(x, y := torch.zeros(10), op=op)
    bagua.reduce_scatter_inplace(z := x.clone(), op=op)
    check("reduce_scatter " + word, (y, total[part]), (z[part], total[part]))

bagua.broadcast(x := given(100), src=size - 1)
dist.broadcast(theirs := x + rank, size - 1)
check("broadcast", (x + size - 1, theirs))
x, y, theirs = given(10), torch.zeros(10), torch.zeros(10)
if rank == 0:
    bagua.send(x, 1)
    dist.send(x, 1)
elif rank == 1:
    bagua.recv(y, 0)
    dist.recv(theirs, 0)
check("send", (y, theirs))
bagua.barrier()

x, theirs = given(10), torch.zeros(size * 10)
dist.all_gather(list(theirs.chunk(size)), x)
for shape in ((size, 10), (size * 10,)):
    bagua.allgather(x, y := torch.zeros(shape))
    check("allgather", (y, theirs))
place = torch.zeros(size, 10)
place[rank] = x
bagua.allgather_inplace(z := place.clone())
check("allgather_inplace", (z, theirs))
bagua.gather(x, y := torch.zeros(size * 10), 0)
bagua.gather_inplace(z := place.clone(), 10, 0)
check("gather", *([(y, theirs), (z, theirs)] if rank == 0 else []))

x, y, theirs = given(size * 10), torch.zeros(10), torch.zeros(10)
dist.scatter(theirs, list(x.chunk(size)) if rank == 0 else None, 0)
bagua.scatter(x, y, 0)
bagua.scatter_inplace(z := x.view(size, 10).clone(), 10, 0)
check("scatter", (y, theirs), (z[rank], theirs))

x, y, theirs = given(size * 2), torch.zeros(size * 2), torch.zeros(size * 2)
dist.all_to_all_single(theirs, x)
bagua.alltoall(x, y)
bagua.alltoall_inplace(z := x.clone())
check("alltoall", (y, theirs), (z, theirs))
if size == 8:
    counts, places = [2] * 8, [0, 2, 4, 6, 8, 10, 12, 14, 16]
    bagua.alltoall_v(x, counts, places, y.zero_(), counts, places)
    bagua.alltoall_v_inplace(z := x.clone(), counts, places)
    check("alltoall_v", (y, theirs), (z, theirs))
assert not wrong, wrong
print("right 1.000")
"""

SCRIPTS = {
    "digits": DIGITS,
    "resumed": RESUMED,
    "groups": GROUPS,
    "experts": EXPERTS,
    "benchmark": BENCHMARK,
    "restarted": RESTARTED,
    "collectives": COLLECTIVES,
}
RUN = "guozhuang.compat.bagua.distributed.run:main"
ALGORITHMS = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async"]
# The script, its arguments, and how many ranks it has.
CASES: list[tuple[str, list[str], int]] = [
    ("digits", ["decentralized"], 2),
    ("collectives", [], 2),
    *(("digits", [name], 2) for name in ALGORITHMS if name != "decentralized"),
    ("digits", ["gradient_allreduce", "fuse"], 2),
    ("digits", ["decentralized", "fuse"], 2),
    ("resumed", [], 2),
    ("groups", [], 2),
    ("experts", ["gradient_allreduce"], 2),
    ("collectives", [], 8),
]
ON_SHM: list[tuple[str, list[str], int]] = [
    *(("benchmark", [name], 2) for name in ALGORITHMS),
    ("experts", ["gradient_allreduce"], 4),
    ("restarted", ["gradient_allreduce"], 2),
]
RUNS = [*((*case, "shm") for case in CASES + ON_SHM), *((*case, "gloo") for case in CASES)]


@pytest.mark.parametrize(
    ("name", "words", "num_ranks", "backend"),
    [
        pytest.param(
            *run, marks=[pytest.mark.slow] if i > 1 else [], id="-".join([run[0], *run[1], str(run[2]), run[3]])
        )
        for i, run in enumerate(RUNS)
    ],
)
def test_published_shapes_learn(tmp_path: Path, name: str, words: list[str], num_ranks: int, backend: str) -> None:
    script = write(tmp_path, BEGIN + SCRIPTS[name])
    run = ["--nproc_per_node"] if name == "restarted" else ["run", "-np"]
    program = RUN if name == "restarted" else "guozhuang.cli:main"
    done = guozhuang(*run, num_ranks, script, *words, folder=tmp_path, program=program, GUOZHUANG_BACKEND=backend)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"right ([0-9.]+)", done.stdout)
    assert len(found) == num_ranks and len(set(found)) == 1 and float(found[0]) > 0.9, done.stdout
    assert not re.search(r"guozhuang/\S+: \w*Warning", done.stderr), done.stderr


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
