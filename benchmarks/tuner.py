"""Does a race of equals end without a winner, and does one of different settings find the best? On real times of this machine.

    python benchmarks/tuner.py [--steps 8000] [--rounds 16] [--size tiny] [--keep FILE]

A/A: two ranks train under ddp all along, and the steps are handed out in blocks, as `--strategy auto` does it, to two and to
four contenders that are all the same; as soon as a race ends, the next one begins with the following block.
Regret: single, ddp (twice, under two names), torch-ddp and sharded are run in every round as `guozhuang tune` runs them; then
the races that would have been are replayed from each round on, with each of the settings as the default: what they choose is
compared with the lowest mean over all rounds, and their runs with all runs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import step
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from guozhuang.cost.race import Race, RaceOutcome, Rules
from guozhuang.lab.predict.profile import subject
from guozhuang.lab.runs import Runs
from guozhuang.lab.tune import command
from guozhuang.lab.tune.arguments import parser as tune_parser
from guozhuang.lab.tune.knobs import Choices
from guozhuang.strategies.auto import _AFTER_CHANGE, _MOST_STEPS
from guozhuang.world.machine import usable_cores


def train(rank: int, port: int, label: str, num_steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=step.RANKS)
    size = step.SIZES[label]
    variant = step.Variant("ddp", copy.deepcopy(step.make_model(size)), size, rank)
    lasted, last = [], time.perf_counter()
    for _ in range(num_steps):
        variant.step()
        now = time.perf_counter()
        lasted.append(now - last)
        last = now
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(lasted[10:]))
    dist.destroy_process_group()


def blocks(lasted: Sequence[float]) -> Iterator[float]:
    """Yield what `--strategy auto` would take for the step's time in each block of the steps."""
    length = _AFTER_CHANGE + _MOST_STEPS
    for end in range(length, len(lasted) + 1, length):
        yield statistics.median(lasted[end - _MOST_STEPS : end])


def races_of_equals(lasted: Sequence[float], num_contenders: int) -> list[RaceOutcome]:
    found, each = list[RaceOutcome](), blocks(lasted)
    while True:
        race = Race([str(i) for i in range(num_contenders)])
        while not race.is_over:
            times = dict(zip(race.turn(), each, strict=False))
            if len(times) < len(race.alive):
                return found
            race.add(times)
        found.append(race.outcome())


def exhaustive(rounds: int) -> list[dict[str, float]]:
    """Run all settings in every round, in rotating order; return the seconds of a step of each."""
    namespace = tune_parser().parse_args(["--model", "bert-tiny", "--steps", "20"])
    asked = "ddp,ddp@shm,torch-ddp,sharded"  # the second is the first under another name
    choices = Choices(True, usable_cores(), 2, 0, "shm", asked=asked)
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder), 1, [], ()) as runs:
        what = subject(namespace, Path(folder), Console(stderr=True))
        choices = Choices(True, usable_cores(), 2, 2 * what.workload.batch_size, "shm", asked=asked)
        settings = [*choices._settings(asked, 2), *choices._settings("single", 1)]
        made = command._Tuning(namespace, what, choices, runs, Rules(), Console(stderr=True))
        found = []
        for number in range(rounds):
            first = number % len(settings)
            taken = {s.name: made._run(s, number + 1) for s in (*settings[first:], *settings[:first])}
            found.append({name: took for name, took in taken.items() if not isinstance(took, str)})
        return found


def replay(rounds: Sequence[Mapping[str, float]], names: Sequence[str], start: int) -> tuple[RaceOutcome, float]:
    """Race over recorded rounds from one of them on, cyclically; return the outcome, and its seconds of those of all rounds."""
    race, spent = Race(names, Rules(most_rounds=len(rounds))), 0.0
    for number in range(start, start + len(rounds)):
        if race.is_over:
            break
        times = {name: rounds[number % len(rounds)][name] for name in race.alive}
        spent += sum(times.values())
        race.add(times)
    return race.outcome(), spent / sum(each[name] for each in rounds for name in names)


def report(lasted: Sequence[float], rounds: Sequence[Mapping[str, float]]) -> None:
    logs = [abs(a / b - 1) for a, b in itertools.pairwise(blocks(lasted))]
    print(f"{len(lasted)} steps of ddp; two blocks in turn differ by {100 * statistics.median(logs):.1f} % (median)")
    for number in (2, 4):
        found = races_of_equals(lasted, number)
        wins = sum(each.is_win for each in found)
        mean = statistics.fmean(each.num_rounds for each in found) if found else 0
        print(f"A/A, {number} contenders: {wins} of {len(found)} races had a winner; {mean:.1f} rounds each")
    if not rounds:
        return
    names = list(rounds[0])
    means = {name: statistics.geometric_mean(each[name] for each in rounds) for name in names}
    print(
        f"{len(rounds)} rounds of runs: " + "; ".join(f"{name} {1e3 * value:.1f} ms" for name, value in means.items())
    )
    equal = [name for name in names if name.startswith("ddp")]
    wins = sum(replay(rounds, order, start)[0].is_win for order in (equal, equal[::-1]) for start in range(len(rounds)))
    print(f"A/A of runs, from each round on: {wins} of {2 * len(rounds)} replays had a winner")
    regrets, shares = [], []
    for first in names:
        order = [first, *(name for name in names if name != first)]
        for start in range(len(rounds)):
            outcome, share = replay(rounds, order, start)
            regrets.append(means[outcome.chosen] / min(means.values()) - 1)
            shares.append(share)
    print(
        f"regret {100 * statistics.fmean(regrets):.2f} % (worst {100 * max(regrets):.1f} %) in "
        f"{100 * statistics.fmean(shares):.0f} % of the time of all rounds; {len(regrets)} replays"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--size", default="tiny", choices=step.SIZES)
    parser.add_argument("--keep", type=Path, help="write the measured times to this file, or take them from it")
    options: Any = parser.parse_args(namespace=SimpleNamespace())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.keep is not None and options.keep.exists():
        kept = json.loads(options.keep.read_text())
        report(kept["steps"], kept["rounds"])
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (step.free_port(), options.size, options.steps, folder)
        mp.spawn(train, arguments, nprocs=step.RANKS)
        lasted = json.loads(Path(folder, "result.json").read_text())
    rounds = exhaustive(options.rounds) if options.rounds else []
    if options.keep is not None:
        options.keep.write_text(json.dumps({"steps": lasted, "rounds": rounds}))
    report(lasted, rounds)


if __name__ == "__main__":
    main()
