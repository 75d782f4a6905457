"""Race the strategies of other systems against those of ours that have the same bits: samples/s of a training step.

    python -m benchmarks.other_systems [--sizes tiny,mini] [--ranks 2] [--backends shm,gloo] [--rounds 7] [--json FILE]

`byteps` against `horovod`, `bagua-gradient-allreduce` against `ddp`, `bagua-bytegrad` against `quantize8`. The set-up is that
of benchmarks/horovod.py: both contenders of a pair live in the same processes, and take turns. At least 0.97 is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import guozhuang as gz
from benchmarks.horovod import free_port, race, ratio

PAIRS = (("byteps", "horovod"), ("bagua-gradient-allreduce", "ddp"), ("bagua-bytegrad", "quantize8"))
ASKED = 0.97


def measure(rank: int, num_ranks: int, port: int, backend: str, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    told = {**places, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in told.items()})
    gz.init(backend=backend, device="cpu")
    peer = dist.new_group(backend="gloo")
    found = {}
    for size in options.sizes:
        for pair in PAIRS:
            options.names = pair
            found[f"{size} {pair[0]}"] = race(rank, num_ranks, size, peer, options)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    gz.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=["tiny", "mini"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["shm", "gloo"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'backend':9}{'size':6}{'strategy':26}{'samples/s':>10}   {'against':10}{'ratio':>7}  of the rounds")
    results = {}
    for backend in options.backends:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.ranks, free_port(), backend, options, folder)
            mp.start_processes(measure, arguments, nprocs=options.ranks, start_method="spawn")
            results[backend] = found = json.loads(Path(folder, "result.json").read_text())
        for size in options.sizes:
            for theirs, ours in PAIRS:
                speeds = found[f"{size} {theirs}"]
                median, low, high = ratio(speeds[theirs], speeds[ours])
                row = f"{backend:9}{size:6}{theirs:26}{statistics.median(speeds[theirs]):>10.1f}   {ours:10}{median:>7.3f}"
                print(f"{row}  {low:.3f} to {high:.3f}  {'>=' if median >= ASKED else 'below'} {ASKED}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
