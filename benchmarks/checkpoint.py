"""What a checkpoint costs a training: `gz.save` in the background against torch.save and torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--rounds 5] [--steps 12] [--width 1024] [--folder FOLDER] [--json FILE]

Two ranks under `ddp`, a model of linear layers with AdamW. All contenders live in the same processes and take turns, round
after round. A window is so many steps, with one checkpoint after the third; it ends when its last step does. Printed are
medians over rounds: how long the call that saves held the training up; how much longer the whole window took than the same
window without a checkpoint in the same round, which counts what the background steals from the steps; the time from the
call until all files were flushed to the disk (of `gz.save`: when it begins to write the manifest); and until it was complete.

Two contenders are measures. "copy" copies the state in memory on each rank, to pages that are there already. "write" has a
thread of rank 0 write as many bytes to one file and flush it, which is the rate of the disk beside this training. The medians
of the ratios to them in the same round are "/ copy" and "of the disk's rate", until flushed and until complete.

Only `gz.save` flushes its files and folders to the disk before it calls a checkpoint complete, writes hashes, compares the
replicas, and reads back; `torch.save` does none of that, and `torch.distributed.checkpoint` flushes its files. Both are
given a new folder each time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import guozhuang as gz
from guozhuang.checkpoint import run as of_run

RANKS, BATCH, NUM_LAYERS, SAVES_AFTER = 2, 32, 16, 3
CONTENDERS = ("nothing", "copy", "write", "gz.save", "torch.save", "dcp.save", "dcp.async_save")
PIECE_BYTES = 1 << 20


class Training:
    """The model of one rank, and the ways to save it."""

    def __init__(self, rank: int, width: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.bare = nn.Sequential(*[nn.Linear(width, width) for _ in range(NUM_LAYERS)])
        optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = gz.prepare(self.bare, optimizer, "ddp")
        self.x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank))
        self.rank, self.folder, self.number = rank, folder, 0
        self.group = dist.new_group(backend="gloo")  # async_save's collectives run in a thread
        self.waits: Callable[[], Any] = lambda: None
        self.copies: list[Tensor] = []

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, how: str) -> None:
        """Save, or begin to; ``waits`` then waits until the checkpoint is complete."""
        self.number += 1
        path, self.waits = self.folder / f"{how}-{self.number}", lambda: None
        if how == "copy":
            self.copy()
        elif how == "write":
            if self.rank == 0:
                writes = threading.Thread(target=self.write, args=(path,))
                writes.start()
                self.waits = writes.join
        elif how == "gz.save":
            path = self.folder.parent / how  # one folder for all, as in a training
            gz.save(path, wait=False)
            self.waits = of_run._saving.savers[path.absolute()].wait
        elif how == "torch.save":
            if self.rank == 0:
                path.mkdir()
                torch.save(
                    {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}, path / "state.pt"
                )
            dist.barrier()
        elif how.startswith("dcp"):
            model, optimizer = get_state_dict(self.bare, self.optimizer)
            state = {"model": model, "optimizer": optimizer}
            if how == "dcp.save":
                dcp.save(state, checkpoint_id=path, process_group=self.group)
            else:
                self.waits = dcp.async_save(state, checkpoint_id=path, process_group=self.group).result

    def window(self, how: str, num_steps: int) -> dict[str, float]:
        """Train for a window with one checkpoint; every rank must call."""
        dist.barrier()
        began_s, blocked_s, saved_s, saved_at = time.perf_counter(), 0.0, 0.0, 0.0
        for number in range(num_steps):
            self.step()
            if number + 1 == SAVES_AFTER and how != "nothing":
                saved_s, saved_at = time.perf_counter(), time.time()
                self.save(how)
                blocked_s = time.perf_counter() - saved_s
        took_s = time.perf_counter() - began_s
        self.waits()
        complete_s = time.perf_counter() - saved_s if how != "nothing" else 0.0
        flushed_s = complete_s
        dist.barrier()
        if self.rank == 0:
            for manifest in self.folder.parent.glob("gz.save/step-*/manifest.json"):
                flushed_s = manifest.stat().st_mtime - saved_at
            for each in [*self.folder.iterdir(), *self.folder.parent.glob("gz.save/step-*")]:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        return {"took_s": took_s, "blocked_s": blocked_s, "flushed_s": flushed_s, "complete_s": complete_s}

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the state in memory."""
        tensors: list[Tensor] = list(self.bare.parameters())
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        self.copies = self.copies or [torch.empty_like(t) for t in tensors]
        for place, tensor in zip(self.copies, tensors, strict=True):
            place.copy_(tensor)

    def write(self, path: Path) -> None:
        """Write the copy of the state to a file, and flush it to the disk."""
        with open(path, "xb", buffering=0) as file:
            for tensor in self.copies:
                data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                for first in range(0, len(data), PIECE_BYTES):
                    file.write(data[first : first + PIECE_BYTES])
            os.fsync(file.fileno())


def measure(rank: int, port: int, rounds: int, num_steps: int, width: int, folder: str, result: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    gz.init()
    training = Training(rank, width, Path(folder))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        for name in CONTENDERS:
            one = training.window(name, num_steps)
            if number:  # the first round warms up
                found[name].append(one)
    if rank == 0:
        num_bytes = 12 * sum(p.numel() for p in training.bare.parameters())
        Path(result).write_text(json.dumps({"windows": found, "state_bytes": num_bytes}))
    gz.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result, saves = Path(folder) / "result.json", Path(folder) / "saves"
        saves.mkdir()
        arguments = (port, options.rounds, options.steps, options.width, str(saves), str(result))
        mp.spawn(measure, arguments, RANKS)
        found = json.loads(result.read_text())
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    windows = found["windows"]

    def seconds(name: str, key: str) -> list[float]:
        return [one[key] for one in windows[name]]

    def ratio(above: list[float], below: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(above, below, strict=True))

    median = statistics.median
    copied_s, alone = seconds("copy", "blocked_s"), seconds("nothing", "took_s")
    written_s, size = seconds("write", "complete_s"), found["state_bytes"] / 2**20
    print(f"state of {size:.0f} MiB, copied in memory in {1e3 * median(copied_s):.0f} ms; ", end="")
    print(
        f"a step takes {1e3 * median(alone) / options.steps:.0f} ms; the disk takes {size / median(written_s):.0f} MiB/s"
    )
    print(
        f"{'':16}{'blocked':>10}{'/ copy':>8}{'window longer by':>18}{'flushed':>12}{'complete':>12}   of the disk's rate"
    )
    for name in CONTENDERS[1:]:
        blocked, flushed, complete = (seconds(name, key) for key in ("blocked_s", "flushed_s", "complete_s"))
        longer = median(a - b for a, b in zip(seconds(name, "took_s"), alone, strict=True))
        print(f"{name:16}{1e3 * median(blocked):7.0f} ms{ratio(blocked, copied_s):8.2f}{1e3 * longer:15.0f} ms", end="")
        print(f"{1e3 * median(flushed):9.0f} ms{1e3 * median(complete):9.0f} ms", end="")
        print(f"{100 * ratio(written_s, flushed):6.0f} % / {100 * ratio(written_s, complete):.0f} %")


if __name__ == "__main__":
    main()
