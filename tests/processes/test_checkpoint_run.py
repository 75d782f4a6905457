"""``guozhuang run --checkpoint``: runs whose ranks are killed at random end as if nobody had disturbed them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal

import pytest
import torch

import guozhuang as gz
from guozhuang.checkpoint.folder import CheckpointFolder, verify
from guozhuang.errors import UsageError
from tests.launching import Launched, guozhuang, write
from tests.ranks import free_port, run_ranks
from tests.waiting import LIMIT_S

# Where the variable GO is set, a process tells after some of its steps that it trains, and waits after step 25 for that file.
SCRIPT = """
import hashlib, os, random, time
import numpy as np
import torch
from torch import nn
import guozhuang as gz

world = gz.init(timeout_s=150)
torch.manual_seed(0)
x = torch.randn(160, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(world.rank)
model, optimizer = gz.prepare(model, optimizer)
kept = gz.keep(scheduler=scheduler, sums=0.0)
num_steps = 0
batches = gz.loader(torch.utils.data.TensorDataset(x, x.sum(1) > 0), batch_size=2)
for epoch in gz.epochs(int(os.environ.get("EPOCHS", 4))):
    for a, b in batches:
        loss = nn.functional.cross_entropy(model(a + random.random() * np.random.rand()), b.long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        kept.sums += a.double().sum().item()
        num_steps += 1
        if num_steps == (1 if "STUCK" in os.environ else 4 + os.getpid() % 12) and "GO" in os.environ:
            open(os.environ["BEGAN"] + f"/{os.getpid()}", "w").close()
            if "STUCK" in os.environ:
                time.sleep(3600)
        while num_steps == 25 and "GO" in os.environ and not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
model.eval()
found = hashlib.sha256()
for tensor in (*model.parameters(), *model.buffers()):
    found.update(tensor.detach().numpy().tobytes())
print(f"rank {world.rank} ends with {found.hexdigest()[:16]} {kept.sums!r} {torch.rand(1).item()!r} {random.random()!r}")
"""


def results(printed: str) -> list[str]:
    return sorted(re.findall(r"rank \d ends with .*", printed))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_kills"), [("ddp", 3), ("sharded", 1), ("diloco", 1), ("auto", 1)])
def test_killed_again_and_again_it_ends_with_the_same_bits(tmp_path, strategy, num_kills) -> None:
    script = write(tmp_path, SCRIPT)
    options = ("run", "-np", 2, "--strategy", strategy, "--every", "3steps")
    undisturbed = guozhuang(*options, "--checkpoint", tmp_path / "a", script, folder=tmp_path)
    expected = results(undisturbed.stdout)
    assert len(expected) == 2, undisturbed
    draw, began, go, folder = random.Random(5), tmp_path / "began", tmp_path / "go", CheckpointFolder(tmp_path / "b")
    began.mkdir()
    command = (*options, "--checkpoint", tmp_path / "b", "--max-restarts", num_kills, script)
    seen: set[str] = set()
    with Launched(*command, folder=tmp_path, BEGAN=str(began), GO=str(go)) as launched:

        def new_ranks() -> set[str]:
            return {path.name for path in began.iterdir()} - seen

        for _ in range(num_kills):
            launched.until(lambda: len(new_ranks()) == 2 and folder.steps())
            new = new_ranks()
            seen |= new
            os.kill(int(draw.choice(sorted(new))), signal.SIGKILL)
        go.touch()
        done = launched.wait()
        assert not launched.left()
    assert done.returncode == 0, done
    resumed = done.stderr.count("goes on from")
    assert resumed >= 1, done.stderr
    assert results(done.stdout) == expected
    assert len(folder.steps()) == 3 and not list(folder.path.glob("*.partial"))
    for step in folder.steps():
        verify(folder.of(step))


@pytest.mark.slow
def test_a_launcher_that_gets_sigterm_lets_all_ranks_save_and_the_same_command_goes_on(tmp_path) -> None:
    script, began, go = write(tmp_path, SCRIPT), tmp_path / "began", tmp_path / "go"
    began.mkdir()
    options = ("--every", "1000steps", "--checkpoint")
    more = {"folder": tmp_path, "EPOCHS": "8"}
    expected = results(guozhuang("run", "-np", 2, *options, tmp_path / "a", script, **more).stdout)  # type: ignore[arg-type]

    def ended_by_sigterm(folder: str, num_ranks: int, num_signals: int, **env: str) -> None:
        for path in (*began.iterdir(), go):
            path.unlink(missing_ok=True)
        words = ("run", "-np", num_ranks, *options, tmp_path / folder, script)
        with Launched(*words, **more, **env, BEGAN=str(began), GO=str(go)) as launched:  # type: ignore[arg-type]
            launched.until(lambda: len(list(began.iterdir())) == num_ranks)
            launched.send(signal.SIGTERM)
            launched.until(lambda: "all ranks save a checkpoint after the same step" in launched.printed)
            go.touch()
            for _ in range(num_signals - 1):
                launched.send(signal.SIGTERM)
            done = launched.wait(LIMIT_S)  # and not after the 30 s that ranks have
            assert not launched.left()
        assert done.returncode == 128 + signal.SIGTERM, done
        assert ("was asked to end, and" in done.stderr) == (num_signals == 1), done

    ended_by_sigterm("b", 2, 1)
    (step,) = CheckpointFolder(tmp_path / "b").steps()
    assert 0 < step < 320
    done = guozhuang("run", "-np", 2, *options, tmp_path / "b", script, **more)  # type: ignore[arg-type]
    assert f"step-{step}, saved" in done.stderr and results(done.stdout) == expected and len(expected) == 2
    ended_by_sigterm("c", 1, 2, STUCK="1")
    assert CheckpointFolder(tmp_path / "c").steps() == []


# A rank says something at its end, after the process of the rank before it has ended.
LAST = """
import atexit, os, time
def is_over(path: str) -> bool:
    pid = open(path).read() if os.path.exists(path) else ""
    try:
        return pid.endswith(".") and open(f"/proc/{pid[:-1]}/stat").read().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
def last() -> None:
    rank = int(os.environ["RANK"])
    while rank and not is_over(os.environ["ENDS"] + f"/{rank - 1}"):
        time.sleep(0.01)
    print("the last of rank", rank, flush=True)
    with open(os.environ["ENDS"] + f"/{rank}", "w") as file:
        file.write(f"{os.getpid()}.")
atexit.register(last)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_node_that_gets_sigterm_asks_the_ranks_of_all_nodes(tmp_path, is_killed) -> None:
    script, began, port, go = write(tmp_path, LAST + SCRIPT), tmp_path / "began", free_port(), tmp_path / "go"
    began.mkdir()
    (tmp_path / "ends").mkdir()
    env = {"EPOCHS": "50", "BEGAN": str(began), "ENDS": str(tmp_path / "ends"), "GO": str(go)}
    env |= {"STUCK": "1"} if is_killed else {}
    meeting = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--max-restarts", 2)
    words = ("run", *meeting, "--every", "1000steps", "--checkpoint", tmp_path / "c", "-np", 2, "--node-rank")
    folders = [tmp_path / f"node {node}" for node in range(2)]  # of their own: a node's processes are known by it
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Launched(*words, i, script, folder=at, **env)) for i, at in enumerate(folders)]
        nodes[0].until(lambda: len(list(began.iterdir())) == 4)
        nodes[1].send(signal.SIGTERM)
        nodes[1].until(lambda: "all ranks save a checkpoint after the same step" in nodes[1].printed)
        go.touch()
        if is_killed:
            ours = {process.pid for process in nodes[1].processes()} & {int(path.name) for path in began.iterdir()}
            os.kill(min(ours), signal.SIGKILL)
        done = [node.wait(LIMIT_S) for node in nodes]
        assert not any(node.left() for node in nodes)
    assert [each.returncode for each in done] == [143, 143], done
    assert "node 1: its agent got SIGTERM" in done[0].stderr and "started anew" not in done[0].stderr, done
    assert ("; the others get SIGTERM" in done[1].stderr) == is_killed, done
    assert len(re.findall("the last of rank", done[0].stdout + done[1].stdout)) == (0 if is_killed else 4), done
    assert len(CheckpointFolder(tmp_path / "c").steps()) == (not is_killed)


@pytest.mark.slow
def test_a_disk_that_fills_up_changes_nothing(tmp_path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    script = write(tmp_path, SCRIPT)
    options = ("run", "-np", 2, "--every", "9steps", "--keep", 2)
    expected = results(guozhuang(*options, "--checkpoint", tmp_path / "a", script, folder=tmp_path).stdout)
    small = tmp_path / "small"
    small.mkdir()
    assert os.system(f"mount -t tmpfs -o size=100k none {small}") == 0
    try:
        done = guozhuang(*options, "--checkpoint", small / "b", script, folder=tmp_path)
    finally:
        assert os.system(f"umount {small}") == 0
    assert results(done.stdout) == expected and len(expected) == 2
    assert "was given up: " in done.stderr and "No space left on device" in done.stderr


def without_the_folder_of_rank_0(rank: int, size: int, folder: str) -> str:
    os.environ["GUOZHUANG_CHECKPOINT"] = f"{folder}/{rank}"
    model = torch.nn.Linear(2, 1)
    gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        UsageError, match=r"rank 1 on .* does not see rank 0's.*a folder that all nodes share"
    ) as caught:
        next(gz.epochs(1))
    return str(caught.value)


@pytest.mark.slow
def test_a_folder_that_nodes_do_not_share_is_said_at_the_beginning(tmp_path) -> None:
    assert len({*run_ranks(without_the_folder_of_rank_0, 2, str(tmp_path))}) == 2  # they name the folders they look at
