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
    init_process_group("gloo")
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
    )
    done = [guozhuang("run", "-np", 2, *words, folder=tmp_path) for words in cases]
    assert [each.returncode for each in done] == [0] * 4, done
    assert torch.load(tmp_path / "named.pt")[1:3] == ["torch", "shm"]  # the backend alone, by its name
    theirs, ours, mesh = (torch.load(tmp_path / name) for name in ("theirs.pt", "ours.pt", "m.pt"))
    assert theirs[1:3] == ["torch", "gloo"] and "guozhuang" not in theirs[3]
    assert ours[1:3] == mesh[1:3] == ["guozhuang", "shm"]
    assert list(ours[0]) == list(theirs[0]) and all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
    assert "guozhuang:" not in done[0].stderr
    said = [line for line in done[1].stderr.splitlines() if "guozhuang: the script" in line]
    assert len(said) == 2 and "gloo is one of shm" in said[0] and "DistributedDataParallel is Guozhuang's" in said[1]


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
