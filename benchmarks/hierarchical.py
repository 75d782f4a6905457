"""Race the group over several nodes against gloo over all ranks: 2 hosts x 2 ranks, a link of 1 Gbit/s, alternating rounds.

    python -m benchmarks.hierarchical [--rate 1gbit] [--layout 2,2] [--rounds 7] [--kib 4,1024,25600,102400]

Needs root: the hosts are network namespaces of this machine (tests/hosts/network.py). For each size it prints the time of an
all_reduce on both, the ratio within each round (median, smallest, largest), and what one host puts on its link, counted by the
interface, in buckets: 2 (n - 1) / n of n nodes is what the link must carry. One time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.hosts.network import Hosts, missing, run_everywhere

_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
_FLAT, _OURS = "gloo", "hierarchical"


def repeats(num_bytes: int) -> int:
    """Calls of one measurement: enough to outlast the barrier around them."""
    return 50 if num_bytes < 1 << 18 else 10 if num_bytes < 1 << 22 else 2


def measure(sizes_bytes: list[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """One rank: seconds and bytes on this host's link per call, by size and group, a value per round."""
    import guozhuang  # noqa: F401 - registers "shm"

    torch.set_num_threads(1)
    dist.init_process_group("shm")
    groups = {_OURS: dist.group.WORLD, _FLAT: dist.new_group(backend="gloo")}
    assert type(groups[_OURS]).__name__ == "HierarchicalGroup"
    found: dict[str, dict[str, list[float]]] = {}
    for num_bytes in sizes_bytes:
        # As the reducer does: memory of the group, where it has some.
        buckets = {_FLAT: torch.ones(num_bytes // 4), _OURS: groups[_OURS].empty(num_bytes // 4).fill_(1)}
        for number in range(-1, rounds):
            for name in list(groups)[:: 1 if number % 2 else -1]:
                seconds, sent = one(groups[name], buckets[name], repeats(num_bytes))
                if number >= 0:  # the first round warms up
                    found.setdefault(f"{num_bytes} {name} s", {}).setdefault("values", []).append(seconds)
                    found.setdefault(f"{num_bytes} {name} bytes", {}).setdefault("values", []).append(sent)
            buckets = {name: bucket.fill_(1) for name, bucket in buckets.items()}
    dist.destroy_process_group()
    return found


def one(group: dist.ProcessGroup, bucket: torch.Tensor, num_calls: int) -> tuple[float, float]:
    """Seconds per call, the slowest rank's, and bytes per call that this host put on its link."""
    dist.barrier()
    before = int(_COUNTER.read_text())
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=group)
    taken = torch.tensor([(time.perf_counter() - start) / num_calls], dtype=torch.float64)
    dist.barrier()
    sent = int(_COUNTER.read_text()) - before
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item(), sent / num_calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--layout", default="2,2", help="ranks of each host")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kib", default="4,1024,25600,102400", help="sizes of the bucket")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes_bytes = [1024 * int(kib) for kib in options.kib.split(",")]
    if options.rank:
        print("FOUND " + json.dumps(measure(sizes_bytes, options.rounds)), flush=True)
        os._exit(0)
    if missing():
        sys.exit(f"hosts cannot be made: {missing()}")
    layout = [int(num) for num in options.layout.split(",")]
    root = Path(__file__).resolve().parents[1]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(root)}
    command = [
        sys.executable,
        "-m",
        "benchmarks.hierarchical",
        "--rank",
        "--rounds",
        str(options.rounds),
        "--kib",
        options.kib,
    ]
    with Hosts(len(layout), options.rate) as hosts:
        printed = run_everywhere(hosts, layout, command, env, timeout_s=1800)
    answers = [
        json.loads(line.removeprefix("FOUND ")) for out in printed for line in out.splitlines() if line[:6] == "FOUND "
    ]
    must = 2 * (len(layout) - 1) / len(layout)
    print(
        f"{options.rate}, ranks {options.layout}: medians of {options.rounds} rounds; the link must carry {must:g} buckets"
    )
    for num_bytes in sizes_bytes:
        seconds = {name: answers[0][f"{num_bytes} {name} s"]["values"] for name in (_FLAT, _OURS)}
        sent = {name: statistics.median(answers[0][f"{num_bytes} {name} bytes"]["values"]) for name in (_FLAT, _OURS)}
        ratios = [flat / ours for flat, ours in zip(seconds[_FLAT], seconds[_OURS], strict=True)]
        print(
            f"{num_bytes // 1024:>8} KiB  gloo {1e3 * statistics.median(seconds[_FLAT]):8.2f} ms  "
            f"hierarchical {1e3 * statistics.median(seconds[_OURS]):8.2f} ms  "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) x   "
            f"on the link: {sent[_FLAT] / num_bytes:.3f} and {sent[_OURS] / num_bytes:.3f} buckets"
        )


if __name__ == "__main__":
    main()
