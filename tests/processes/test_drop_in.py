"""``guozhuang run --replace-ddp``: a script that knows PyTorch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from guozhuang.compat.drop_in import _with
from tests.launching import guozhuang, write

# The shape of PyTorch's own tutorial.
SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

if "shm" in sys.argv:
    assert not any(name.startswith("guozhuang") for name in sys.modules)
    init_process_group("shm")
elif "mesh" in sys.argv:
    init_device_mesh("cpu", (2,))
else:
    init_process_group("ccl" if "ccl" in sys.argv else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
model = DDP(model, find_unused_parameters=True)
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for _ in range(5):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()
if rank == 0:
    package = type(model).__module__.partition(".")[0]
    torch.save([model.state_dict(), package, dist.get_backend(), list(sys.modules)], sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_plain_script_trains_by_our_class_over_shm_and_to_the_same_weights(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    cases = (
        (script, "theirs.pt"),
        ("--replace-ddp", script, "ours.pt"),
        ("--replace-ddp", script, "m.pt", "mesh"),
        (script, "named.pt", "shm"),
        ("--replace-ddp", script, "ccl.pt", "ccl"),
    )
    done = [guozhuang("run", "-np", 2, *words, folder=tmp_path, forks_ranks=False) for words in cases]
    assert [each.returncode for each in done] == [0] * 5, done
    assert torch.load(tmp_path / "named.pt")[1:3] == ["torch", "shm"]  # the backend alone, by its name
    theirs, ours, mesh = (torch.load(tmp_path / name) for name in ("theirs.pt", "ours.pt", "m.pt"))
    assert theirs[1:3] == ["torch", "gloo"] and "guozhuang" not in theirs[3]
    assert ours[1:3] == mesh[1:3] == ["guozhuang", "shm"]
    assert list(ours[0]) == list(theirs[0]) and all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
    assert "guozhuang:" not in done[0].stderr
    assert torch.load(tmp_path / "ccl.pt")[1:3] == ["guozhuang", "shm"]
    assert done[4].stderr.count("of backend ccl is one of shm: ccl is not installed; 2 ranks on one node") == 1, done[4]
    said = [line for line in done[1].stderr.splitlines() if "guozhuang: " in line]
    assert len(said) == 2 and "gloo is one of shm" in said[0] and "DistributedDataParallel is Guozhuang's" in said[1]


# As PyTorch's ImageNet example does without CUDA.
UNWRAPPED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
if torch.cuda.is_available():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_train_apart_are_told_at_the_first_step(tmp_path: Path) -> None:
    script = write(tmp_path, UNWRAPPED)
    done = guozhuang("run", "-np", 2, "--replace-ddp", script, folder=tmp_path, forks_ranks=False)
    said = "an optimizer steps, and the script has made no DistributedDataParallel: unless it exchanges by itself"
    assert done.returncode == 0 and (done.stdout + done.stderr).count(said) == 1, done


# The shapes of torchtitan's parallel layouts: copies, divided weights, divided layers, and stages of a pipeline.
LAYOUTS = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("all",))

def trained(layout):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    stage = None
    if layout == "replicate":
        replicate(model, device_mesh=mesh)
    elif layout == "fully_shard":
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    elif layout == "divided layers":
        for part in model:
            parallelize_module(part, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    else:
        model = model[rank]
        stage = Schedule1F1B(
            PipelineStage(model, rank, 2, torch.device("cpu")), 4, loss_fn=lambda y, x: (y - x).square().mean()
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    generator = torch.Generator().manual_seed(0 if layout in ("divided layers", "pipeline") else rank)
    for _ in range(3):
        x = torch.randn(8, 8, generator=generator)
        if stage is None:
            model(x).square().mean().backward()
        else:
            stage.step(*([] if rank else [x]), **({"target": x} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

names = ("replicate", "fully_shard", "divided layers", "pipeline")
torch.save([dist.get_backend(), {name: trained(name) for name in names}], f"{sys.argv[1]}{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_layouts_of_pytorch_over_shm_give_the_weights_that_they_give_over_gloo(tmp_path: Path) -> None:
    script = write(tmp_path, LAYOUTS)
    for words in ((script, "theirs"), ("--replace-ddp", script, "ours")):
        done = guozhuang("run", "-np", 2, *words, folder=tmp_path, forks_ranks=False)
        assert done.returncode == 0, done
    for rank in range(2):
        (backend, theirs), (other, ours) = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("theirs", "ours"))
        assert (backend, other) == ("gloo", "shm")
        for layout, weights in theirs.items():
            for found, expected in zip(ours[layout], weights, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-7, msg=layout)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("gloo", "shm"),
        ("GLOO", "shm"),
        ("cpu:gloo,cuda:nccl", "cpu:shm,cuda:nccl"),
        ("nccl", "nccl"),
        ("mpi", "mpi"),
        (None, None if torch.accelerator.is_available() else "shm"),
    ],
)
def test_gloo_is_replaced_wherever_it_stands_and_nothing_else(asked: str | None, found: str | None) -> None:
    assert _with("shm", asked) == found


def test_replace_ddp_refuses_what_would_leave_it_without_effect(tmp_path: Path) -> None:
    script = write(tmp_path, "")
    for words, more, text in (
        (("--strategy", "sharded"), {}, "others need the optimizer too"),
        ((), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "unset that variable"),
    ):
        done = guozhuang("run", "-np", 2, "--replace-ddp", *words, script, folder=tmp_path, **more)
        assert done.returncode == 2 and text in done.stderr, done
