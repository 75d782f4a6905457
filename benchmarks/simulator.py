"""Seconds and peak memory of simulating a step of many ranks, each of which takes a time of its own in each step.

The trace is a forward, a backward in as many pieces as there are buckets, and an optimizer. It is first simulated for one rank
with the sharing of cores and links, then for all ranks with their spread.

    python -m benchmarks.simulator --ranks 4096 --buckets 300 --steps 20
"""

from __future__ import annotations

import argparse
import resource
import time

from guozhuang.cost.cluster import Cluster, LinkSpeed, Transport
from guozhuang.cost.collectives import CollectiveCost
from guozhuang.cost.simulate import simulate
from guozhuang.cost.spread import Spread, simulate_spread
from guozhuang.cost.trace import Compute, Event, Start, Trace, Wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--buckets", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    def costs(operation: str, num_bytes: float, ranks: object, cluster: Cluster) -> CollectiveCost:
        seconds = 2 * num_bytes / 50e9 + 20e-6
        return CollectiveCost(seconds, 2 * num_bytes, 2 * num_bytes, 0.1 * seconds, 1)

    begun, ranks = time.perf_counter(), tuple(range(options.ranks))
    events: list[Event] = [Compute("forward", 0.1)]
    for call in range(options.buckets):
        events += [Compute("backward", 0.2 / options.buckets), Start(call, "all_reduce", 25 << 20, ranks)]
    events += [*(Wait(call) for call in range(options.buckets)), Compute("optimizer", 0.01)]
    trace = Trace(0, options.ranks, tuple(events))
    links = LinkSpeed(1e-6, 300e9), LinkSpeed(1e-5, 200e9)
    cluster = Cluster(options.ranks // 8, 8, 64, *links, Transport("nccl", lanes=1))
    spread = Spread(tuple(1 + 0.01 * at for at in range(10)))
    alone = simulate(trace, cluster, costs=costs)
    found = simulate_spread(trace, cluster, spread, costs=costs, num_repetitions=1 + options.steps, alone=alone)
    took, peak = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{options.ranks} ranks, {options.buckets} buckets, {options.steps} steps: a step of {found * 1e3:.1f} ms")
    print(f"({alone.step_s * 1e3:.1f} ms without the spread), simulated in {took:.2f} s with {peak:.0f} MiB at most")


if __name__ == "__main__":
    main()
