"""How long ranks of a group take to leave and to join by torch.distributed's own interface: "shm" against gloo.

Three ranks of a reconfigurable group (PyTorch 2.14 or later): the last one is left out, then it joins again. The time is that
of the slowest rank, from the call of `_reconfigure` on ranks that have just met to its return ("call"), and to the end of the
first all_reduce (4 KB) of the new ranks ("with the first all_reduce"): gloo makes connections when they are first used.
Alternating rounds; the ratio of the medians is what counts.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

BACKENDS = ("shm", "gloo")
CHANGES = ("leave", "join")
Times = dict[str, list[tuple[float, float]]]


def rank_main(rank: int, num_ranks: int, port: int, rounds: int, results: Any) -> None:
    """One rank: its times in ms for each backend and change."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0)
    groups: dict[str, Any] = {}
    limit = datetime.timedelta(seconds=60)
    found: dict[str, Times] = {name: {change: [] for change in CHANGES} for name in BACKENDS}

    def handles(topic: str, group: Any) -> list[str]:
        store.set(f"{topic}/{rank}", group.get_reconfigure_handle())
        store.wait([f"{topic}/{each}" for each in range(num_ranks)])
        texts = [store.get(f"{topic}/{each}").decode() for each in range(num_ranks)]
        store.set(f"{topic}/ready/{rank}", "")
        store.wait([f"{topic}/ready/{each}" for each in range(num_ranks)])
        return texts

    def change(uuid: int, texts: list[str], group: Any) -> tuple[float, float]:
        began = time.perf_counter()
        dist._reconfigure(uuid, texts, group=group).wait()
        made = time.perf_counter()
        group.allreduce([torch.ones(1000)]).wait()
        return (made - began) * 1e3, (time.perf_counter() - began) * 1e3

    for turn in range(rounds):
        for name in sorted(BACKENDS, reverse=bool(turn % 2)):
            if dist.is_initialized():
                dist.destroy_process_group()
            mine = dist.PrefixStore(f"{name}/{turn}", store)
            dist.init_process_group(
                name, rank=rank, world_size=num_ranks, store=mine, timeout=limit, enable_reconfigure=True
            )
            groups[name] = dist.group.WORLD
            change(1, handles(f"{name}/{turn}/first", groups[name]), groups[name])
            for times in range(5):
                topic = f"{name}/{turn}/{times}"
                texts = handles(f"{topic}/leave", groups[name])
                if rank < num_ranks - 1:
                    found[name]["leave"].append(change(10 * times + 2, texts[:-1], groups[name]))
                texts = handles(f"{topic}/join", groups[name])
                found[name]["join"].append(change(10 * times + 3, texts, groups[name]))
    handles("end", groups[BACKENDS[0]]) if dist.get_backend() == BACKENDS[0] else None
    dist.destroy_process_group()
    results.put((rank, found))
    store.set(f"done/{rank}", "")
    store.wait([f"done/{each}" for each in range(num_ranks)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="number of ranks before one leaves (default: 3)")
    parser.add_argument("--rounds", type=int, default=6, help="alternating rounds of 5 changes each (default: 6)")
    asked = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(f"PyTorch 2.14 or later is needed (this is {torch.__version__})")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (asked.ranks, port, asked.rounds, results)
    processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(asked.ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    print(
        f"PyTorch {torch.__version__}, {asked.ranks} ranks; ms, slowest rank, medians of {5 * asked.rounds} (largest)"
    )
    for change in CHANGES:
        for at, what in enumerate(("call", "with the first all_reduce")):
            slowest = {
                name: [
                    max(each[at] for each in ranks)
                    for ranks in zip(
                        *(times[name][change] for times in found.values() if times[name][change]), strict=True
                    )
                ]
                for name in BACKENDS
            }
            medians = {name: statistics.median(times) for name, times in slowest.items()}
            texts = [f"{name} {medians[name]:6.2f} ({max(slowest[name]):6.1f})" for name in BACKENDS]
            print(f"{change:5}  {what:26}  {'   '.join(texts)}   ratio {medians['shm'] / medians['gloo']:.2f}")


if __name__ == "__main__":
    main()
