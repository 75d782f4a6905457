"""Race the threads and cores that ``gz.init`` chooses against what launchers leave: samples/s of a training step, in one run.

    python -m benchmarks.threads [--size mini] [--rounds 7] [--window-s 2] [--json FILE]

One rank on all cores: "settled" as ``gz.init`` leaves it where torchrun set OMP_NUM_THREADS=1; "1 thread" where that number is
the user's, so that it stays; "one core" where mpirun bound the rank to a core, as it does by default, and nobody undoes that.
Then two ranks with ``ddp``, bound to cores of their own and not: by themselves, and beside a process that only counts and may
run anywhere.

All contenders live at the same time, in processes of their own that block while they have no turn, and take turns in another
order in each round. A ratio is taken within a round; medians over rounds are printed (min .. max). Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import guozhuang as gz
from benchmarks.step import SIZES, Variant, free_port, make_model

RANKS = 2
#: Name, number of ranks, what differs in the environment, and whether the rank is bound to one core.
CONTENDERS: dict[str, tuple[int, dict[str, str | None], bool]] = {
    "settled": (1, {}, False),
    "1 thread": (1, {"TORCHELASTIC_RUN_ID": None}, False),
    "one core": (1, {"TORCHELASTIC_RUN_ID": None, "OMP_NUM_THREADS": None}, True),
    "off": (RANKS, {"GUOZHUANG_BIND": "off"}, False),
    "cores": (RANKS, {"GUOZHUANG_BIND": "cores"}, False),
}
#: Contender over contender, and whether a busy process runs beside them.
RATIOS = (("settled", "1 thread"), ("settled", "one core"), ("cores", "off"), ("cores, busy", "off, busy"))
TURNS = ("settled", "1 thread", "one core", "off", "cores", "off, busy", "cores, busy")
WARM_STEPS = 10


class Contender:
    """The ranks of one contender, each a process that waits for its turns."""

    def __init__(self, name: str, size: str) -> None:
        num_ranks, changes, is_one_core = CONTENDERS[name]
        environ = dict(os.environ) | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        environ |= {"TORCHELASTIC_RUN_ID": "race", "OMP_NUM_THREADS": "1"}  # as torchrun sets them
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for variable, value in changes.items():
            environ.pop(variable, None)
            environ |= {} if value is None else {variable: value}
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if is_one_core else []
        command += [sys.executable, "-m", "benchmarks.threads", "--rank-of", name, "--size", size]
        self.ranks = [
            subprocess.Popen(
                command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self.holds = self._answers()[0]  # its threads and cores

    def run(self, num_steps: int) -> float:
        """Train so many steps; return samples/s of all ranks together."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(num_steps, file=rank.stdin, flush=True)
        return float(self._answers()[0]["samples_per_s"])

    def _answers(self) -> list[dict[str, Any]]:
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank of this benchmark ended; its error stands above")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def be_rank(label: str) -> None:
    """Be a rank: take turns as standard input says."""
    world = gz.init(device="cpu")
    size = SIZES[label]
    variant = Variant("ddp" if world.size > 1 else "none", make_model(size), size, world.rank)
    holds = {"threads": torch.get_num_threads(), "cpus": sorted(os.sched_getaffinity(0))}
    print(json.dumps(holds), flush=True)
    for line in sys.stdin:
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(int(line)):
            variant.step()
        dist.barrier()
        took_s = time.perf_counter() - began_s
        print(json.dumps({"samples_per_s": int(line) * size.batch * world.size / took_s}), flush=True)


def race(options: argparse.Namespace) -> dict[str, Any]:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    busy.send_signal(signal.SIGSTOP)
    contenders: dict[str, Contender] = {}
    try:
        for name in CONTENDERS:
            contenders[name] = Contender(name, options.size)
        steps = {}
        for name, contender in contenders.items():
            contender.run(WARM_STEPS)
            samples = SIZES[options.size].batch * len(contender.ranks)
            steps[name] = max(5, int(options.window_s * contender.run(WARM_STEPS) / samples))
        rounds = []
        for number in range(options.rounds):
            found = {}
            at = number % len(TURNS)
            for turn in TURNS[at:] + TURNS[:at]:
                name, _, beside = turn.partition(", ")
                busy.send_signal(signal.SIGCONT if beside else signal.SIGSTOP)
                found[turn] = contenders[name].run(steps[name])
                busy.send_signal(signal.SIGSTOP)
            rounds.append(found)
        return {"holds": {name: each.holds for name, each in contenders.items()}, "rounds": rounds}
    finally:
        for contender in contenders.values():
            contender.end()
        busy.kill()
        busy.wait()


def show(found: dict[str, Any]) -> None:
    rounds = found["rounds"]
    print(f"samples/s of all ranks together, medians of {len(rounds)} rounds; ratios within a round (min .. max)")
    for turn in TURNS:
        holds = found["holds"][turn.partition(",")[0]]
        speed = statistics.median(each[turn] for each in rounds)
        print(f"{turn:12}{speed:9.1f}   threads of rank 0: {holds['threads']}, on CPUs {holds['cpus']}")
    for over, under in RATIOS:
        ratios = [each[over] / each[under] for each in rounds]
        print(f"{over} / {under}: {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="mini", choices=["tiny", "mini", "base"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window-s", type=float, default=2.0, help="Seconds of a turn.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        be_rank(options.size)
        return
    if "OMP_NUM_THREADS" in os.environ:  # an agent that has it would mean that the user chose the number
        left = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.threads", *sys.argv[1:]], left)
    found = race(options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
