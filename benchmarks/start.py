"""How long until the first collective: `guozhuang run` against torchrun, from the command to the end of an all_reduce.

Alternating rounds; the ratio of the medians is what counts, because the machine's load comes and goes for both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    with open(os.environ["OUT"], "w") as file:
        file.write(str(time.time()))
dist.destroy_process_group()
"""
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node"],
    "guozhuang run": ["-m", "guozhuang", "run", "--nproc-per-node"],
}


def measure(command: list[str], num_ranks: int, folder: Path) -> tuple[float, float]:
    """Seconds to the first collective, and to the end of the command."""
    script, out = folder / "train.py", folder / "out"
    script.write_text(SCRIPT)
    out.unlink(missing_ok=True)
    # The same threads for both: torchrun says one per rank.
    env = os.environ | {"OUT": str(out), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    begin = time.time()
    subprocess.run(
        [sys.executable, *command, str(num_ranks), str(script)], env=env, cwd=folder, check=True, capture_output=True
    )
    return float(out.read_text()) - begin, time.time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    print("ranks  launcher        first collective (s)      whole (s)     medians of", asked.rounds, "rounds")
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in asked.ranks:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in LAUNCHERS}
            for turn in range(asked.rounds):
                for name in sorted(LAUNCHERS, reverse=bool(turn % 2)):
                    found[name].append(measure(LAUNCHERS[name], num_ranks, Path(folder)))
            medians = {
                name: [statistics.median(each[i] for each in runs) for i in (0, 1)] for name, runs in found.items()
            }
            for name, (first, whole) in medians.items():
                least = min(each[0] for each in found[name])
                print(f"{num_ranks:5}  {name:14}  {first:6.2f} (least {least:.2f})       {whole:6.2f}")
            ratios = [medians["guozhuang run"][i] / medians["torchrun"][i] for i in (0, 1)]
            print(
                f"{num_ranks:5}  ratio           {ratios[0]:6.2f} x                    {ratios[1]:6.2f} x   (at most 1.10 x)"
            )


if __name__ == "__main__":
    main()
