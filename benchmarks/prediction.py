"""Judge `guozhuang predict` on this machine: predictions are written to a file first, then the same cells are measured.

    python -m benchmarks.prediction predict --out predictions.json    # profiles one process; prints the hash
    python -m benchmarks.prediction measure --out measured.json [--rounds 3] [--links shm,1gbit] [--ranks 2,3,4]
    python -m benchmarks.prediction judge predictions.json measured.json [--hash SHA256] [--before earlier.json]

A cell is a strategy, a link, a number of ranks and a model: BERT-tiny, mini and small with fused AdamW on 8 x 64 random tokens
a rank. On `shm` and `gloo` all ranks are on one host; else each is a host of its own (a network namespace; needs root) behind
a link of that rate, and all hosts share the processors of this machine. Ranks have one thread. Only one process, the transport
between two ranks of one host, and one rank in a fake world are profiled: no cell is measured before its prediction stands in
the file whose hash is printed.

`measure` makes rounds over all cells; in a round the strategies of a link take turns in the same processes (links.py), and the
order of links and of strategies rotates. `judge` prints the mean absolute percentage error, median, p95, worst and bias by
strategy, link, model and ranks, how often the stated interval holds what was measured, the null models beside it (perfect
scaling: the step of one process; what CPU time and wire add up to without overlap), and the regret of the strategy that the
predictions choose among the exact ones and among all. With `--before`, an earlier file of `measure`, its steps are judged as
predictions are, cell by cell: how well one measurement foretells the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.links import LOCAL, run
from benchmarks.links_rank import Plan
from tests.hosts.network import missing

STRATEGIES = ("ddp", "torch-ddp", "sharded", "fp16", "quantize8", "local-sgd", "pipeline", "tensor")
EXACT = ("ddp", "torch-ddp", "sharded", "pipeline", "tensor")
LINKS = ("shm", "gloo", "10gbit", "1gbit", "100mbit")
MODELS = ("tiny", "mini", "small")
BATCH, TOKENS = 8, 64
_OTHERS = 0.1  # cores that other programs may have used during a turn that counts


class Cell(NamedTuple):
    """What is predicted, and measured."""

    link: str
    ranks: int
    model: str
    strategy: str

    @property
    def key(self) -> str:
        return " ".join(map(str, self))


def cells(links: Iterable[str], ranks: Iterable[int], models: Iterable[str], names: Iterable[str]) -> list[Cell]:
    return [Cell(link, n, model, name) for link in links for n in ranks for model in models for name in names]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def measure(asked: argparse.Namespace) -> None:
    """Measure all cells in rounds; what is there so far is written after each link."""
    found: dict[str, list[dict[str, Any]]] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    places = [(link, n) for link in asked.links for n in asked.ranks]
    for number in range(asked.rounds):
        names = ["none", *asked.strategies]
        names = names[number % len(names) :] + names[: number % len(names)]
        for link, n in places[number % len(places) :] + places[: number % len(places)]:
            models = [m for m in asked.models if not (link == "100mbit" and m == "small")]
            plan = Plan(
                models=models, contestants=names, rounds=1, turn_s=asked.turn_s, max_steps=60, warmup_s=0.3, warmups={},
                periods={}, budget_s=asked.budget_s, batch=BATCH, tokens=TOKENS, fused=True,
            )  # fmt: skip
            began = time.monotonic()
            for model, turns in run(link, plan, n).items():
                for name, each in turns.items():
                    for turn in each:
                        turn.pop("losses")
                        found.setdefault(Cell(link, n, model, name).key, []).append({**turn, "round": number})
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"round {number + 1}: {link}, {n} ranks: {time.monotonic() - began:.0f} s", flush=True)


def predict(asked: argparse.Namespace) -> None:
    """Profile one process of each model, by backend, and write what is predicted for all cells; print the hash of the file."""
    asked.profiles.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for model in asked.models:
        for link in asked.links:
            profile = asked.profiles / f"{model}-{link if link in LOCAL else 'hosts'}.json"
            on = f"here,{link}" if link in LOCAL else f"{max(asked.ranks)}xhere,{link},shared"
            names = [f"{name}@{link if link in LOCAL else 'gloo'}" for name in asked.strategies]
            command = [
                sys.executable, "-m", "guozhuang", "predict", "--json", "--on", on, "--profile", str(profile),
                "--ranks", ",".join(map(str, asked.ranks)), "--strategies", ",".join(names),
                "--threads-per-rank", "1", "--workload", "synthetic", "--model", f"bert-{model}", "--fused",
                "--batch-size", str(BATCH), "--seq-len", str(TOKENS), "--dropout", "0",
            ]  # fmt: skip
            began = time.monotonic()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if not done.stdout:
                sys.exit(f"{shlex.join(command)} ended with {done.returncode}")
            for row in json.loads(done.stdout)["rows"]:
                cell = Cell(link, row["num_ranks"], model, row["name"].partition("@")[0])
                if row["prediction"] is None:
                    print(f"{cell.key}: {row['problem']}", file=sys.stderr)
                else:
                    found[cell.key] = row["prediction"]
            print(f"{link}, {model}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    asked.out.write_text(json.dumps({"created": created, "cells": found}, indent=1) + "\n")
    print(f"{len(found)} cells predicted; SHA-256 of {asked.out}: {digest(asked.out)}")


def step_s(turns: list[dict[str, Any]], num_ranks: int) -> float | None:
    """The median over the turns in which nothing else computed on the machine; None if there was no such turn."""
    steps = []
    for turn in turns:
        each_s = turn["seconds"] / turn["steps"]
        others_s = turn["machine_cpu_s_per_step"] - num_ranks * turn["cpu_s_per_step"]
        if others_s < _OTHERS * each_s:
            steps.append(each_s)
    return statistics.median(steps) if steps else None


@dataclasses.dataclass(frozen=True)
class Judged:
    """A cell, what was predicted for it and what was measured, in seconds a step."""

    cell: Cell
    predicted_s: float
    interval_s: tuple[float, float]
    perfect_s: float
    sum_s: float
    measured_s: float
    before_s: float | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def line(name: str, some: list[Judged], of: Callable[[Judged], float]) -> str:
    errors = sorted(abs(of(each) / each.measured_s - 1) for each in some)
    bias = statistics.fmean(of(each) / each.measured_s - 1 for each in some)
    p95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
    cells_ = f"{100 * statistics.fmean(errors):.1f} | {100 * statistics.median(errors):.1f} | {100 * p95:.1f}"
    return f"| {name} | {len(some)} | {cells_} | {100 * errors[-1]:.1f} | {100 * bias:+.1f} |"


def regrets(judged: list[Judged], names: Iterable[str]) -> list[float]:
    """For each link, model and number of ranks: how much slower than the best is what the predictions choose."""
    groups: dict[tuple[str, int, str], list[Judged]] = {}
    for each in judged:
        if each.cell.strategy in set(names):
            groups.setdefault(each.cell[:3], []).append(each)
    return [
        min(group, key=lambda one: one.predicted_s).measured_s / min(one.measured_s for one in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]


def judge(asked: argparse.Namespace) -> None:
    """Print how far the predictions are from what was measured."""
    told = digest(asked.predictions)
    if asked.hash and asked.hash != told:
        sys.exit(f"{asked.predictions} has the hash {told}, and not {asked.hash}: it was changed after it was written")
    predicted, measured = (json.loads(path.read_text()) for path in (asked.predictions, asked.measured))
    before = json.loads(asked.before.read_text()) if asked.before else {}
    judged = []
    for key, turns in measured.items():
        one = predicted["cells"].get(key)
        measured_s, before_s = (step_s(each, int(key.split()[1])) for each in (turns, before.get(key, [])))
        if one is not None and measured_s is not None:
            link, ranks, model, name = key.split()
            cell = Cell(link, int(ranks), model, name)
            numbers = one["step_s"], tuple(one["interval_s"]), one["perfect_s"], one["bounds"][1], measured_s, before_s
            judged.append(Judged(cell, *numbers))
    if not judged:
        sys.exit("no cell was both predicted and measured while nothing else computed on the machine")
    print(f"{len(judged)} cells; predictions of {predicted['created']}, SHA-256 {told}\n")
    print("| | cells | mean error % | median | p95 | worst | bias |\n|---|---|---|---|---|---|---|")
    print(line("**all**", judged, lambda one: one.predicted_s))
    print(line("null model: perfect scaling", judged, lambda one: one.perfect_s))
    print(line("null model: everything one after another", judged, lambda one: one.sum_s))
    if again := [each for each in judged if each.before_s is not None]:
        print(line("of these measured before, the predictions", again, lambda one: one.predicted_s))
        print(line("null model: what was measured before", again, lambda one: one.before_s or math.nan))
    for position, what in enumerate(("link", "ranks", "model", "strategy")):
        for value in dict.fromkeys(each.cell[position] for each in judged):
            some = [each for each in judged if each.cell[position] == value]
            print(line(f"{what} {value}", some, lambda one: one.predicted_s))
    held = [one.interval_s[0] <= one.measured_s <= one.interval_s[1] for one in judged]
    print(f"\nthe 90 % interval holds {100 * statistics.fmean(held):.0f} % of what was measured")
    for what, names in (("exact", EXACT), ("all", STRATEGIES)):
        found = regrets(judged, names)
        if found:
            mean, worst = 100 * statistics.fmean(found), 100 * max(found)
            print(
                f"regret of the choice among {what} strategies: {mean:.1f} % mean, {worst:.1f} % worst of {len(found)}"
            )
    worst_cells = sorted(judged, key=lambda one: -abs(one.error))[:12]
    print("\nfarthest: " + "; ".join(f"{one.cell.key} {100 * one.error:+.0f} %" for one in worst_cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    predicting, measuring, judging = (actions.add_parser(name) for name in ("predict", "measure", "judge"))
    for each in (predicting, measuring):
        each.add_argument("--out", type=Path, required=True)
        each.add_argument("--links", type=lambda text: text.split(","), default=list(LINKS))
        each.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 3, 4])
        each.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
        each.add_argument("--strategies", type=lambda text: text.split(","), default=list(STRATEGIES))
    predicting.add_argument("--profiles", type=Path, default=Path("profiles"), help="folder; those there are used")
    measuring.add_argument("--rounds", type=int, default=3)
    measuring.add_argument("--turn-s", type=float, default=1.5, help="seconds of timed steps in a turn")
    measuring.add_argument("--budget-s", type=float, default=300.0, help="of one link in one round")
    judging.add_argument("predictions", type=Path)
    judging.add_argument("measured", type=Path)
    judging.add_argument("--before", type=Path, help="an earlier file of `measure`")
    judging.add_argument("--hash", help="what `predict` printed")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    if asked.action == "judge":
        judge(asked)
        return
    if asked.action == "measure":
        if told := missing():
            sys.exit(f"hosts cannot be made: {told}")
        measure(asked)
        return
    predict(asked)


if __name__ == "__main__":
    main()
