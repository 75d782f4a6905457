"""Race bucket caps of `ddp` against each other: samples/s, in alternating rounds in one run.

    python benchmarks/bucket_cap.py [--size mini] [--caps 1,5,10,25,50,100,1000] [--rounds 7]

Same set-up as step.py: two ranks with one thread each, over gloo. Ratios are to torch-ddp with its default cap of 25 MiB.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import step
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from guozhuang import DistributedDataParallel


def measure(rank: int, port: int, label: str, caps: list[float], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=step.RANKS)
    size = step.SIZES[label]
    base = step.make_model(size)
    variants = {"torch-ddp": step.Variant("torch-ddp", copy.deepcopy(base), size, rank)}
    for cap in caps:
        variant = variants[f"{cap:g} MiB"] = step.Variant("none", copy.deepcopy(base), size, rank)
        variant.model = DistributedDataParallel(variant.model, bucket_cap_mb=cap)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for r in range(-1, rounds):
        for name, variant in list(variants.items())[:: 1 if r % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(size.steps):
                variant.step()
            dist.barrier()
            if r >= 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="mini", choices=step.SIZES)
    parser.add_argument("--caps", default="1,5,10,25,50,100,1000")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    caps = [float(cap) for cap in options.caps.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (step.free_port(), options.size, caps, options.rounds, folder)
        mp.spawn(measure, arguments, nprocs=step.RANKS)
        seconds = json.loads(Path(folder, "result.json").read_text())
    size = step.SIZES[options.size]
    print(f"{options.size}: medians of {options.rounds} rounds")
    for name, taken in seconds.items():
        speed = statistics.median(size.steps * size.batch * step.RANKS / t for t in taken)
        median, low, high = step.ratio(seconds["torch-ddp"], taken)
        print(f"{name:>10}  {speed:8.1f} samples/s   {median:.3f} ({low:.3f} .. {high:.3f}) x torch-ddp")


if __name__ == "__main__":
    main()
