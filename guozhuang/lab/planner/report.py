"""Prints a plan: what fits, what is chosen, why the others lost, what to type; or the same as plain records for JSON."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from guozhuang import units
from guozhuang.cost.memory import USABLE
from guozhuang.lab.planner import asked, reasons
from guozhuang.lab.planner.prices import Prices
from guozhuang.lab.planner.reasons import INEXACT, mark, obstacle
from guozhuang.lab.planner.search import ALIKE, Candidate, SearchResult, pareto, product_type
from guozhuang.lab.planner.training import Failures, Phase, Searched
from guozhuang.launch.options.plan_file import TrainingPlan


def front_of(searched: Sequence[Searched], number: int) -> list[tuple[Candidate, float | None]]:
    """Return the candidates of a phase that none beats in time, memory and rent; with the rent of a sample.

    Those of all clusters; inexact ones are left out.
    """
    rents = {
        id(candidate): None if one.money_per_second is None else one.money_per_second / candidate.samples_per_s
        for one in searched
        for candidate in one.founds[number].fitting
    }
    candidates = [
        candidate
        for one in searched
        for candidate in one.founds[number].fitting
        if mark(candidate.arrangement) != INEXACT
    ]
    front = pareto(candidates, [rents[id(one)] or 0.0 for one in candidates])
    of_layouts: dict[Any, Candidate] = {}  # of those that differ in the cap of a bucket alone the fastest
    for one in front:
        of_layouts.setdefault((one.arrangement._replace(cap_mb=0.0), one.cluster.name), one)
    return [(one, rents[id(one)]) for one in of_layouts.values()]


def document(
    chosen: Searched,
    searched: Sequence[Searched],
    phases: Sequence[Phase],
    plans: Sequence[TrainingPlan],
    prices: Prices | None,
) -> dict[str, Any]:
    """Return the answer as plain records: the chosen cluster, for each phase its plan, Pareto front and why others lost."""
    return {
        "cluster": chosen.cluster.name,
        "num_ranks": chosen.cluster.num_ranks,
        "seconds": chosen.seconds,
        "money": chosen.money,
        "prices": None if prices is None else {"date": prices.date, "currency": prices.currency, "file": prices.source},
        "clusters": [
            {
                "cluster": one.cluster.name,
                "num_ranks": one.cluster.num_ranks,
                "fits": one.fits,
                "seconds": one.seconds,
                "money": one.money,
                "samples_per_s": [best.samples_per_s if best else None for best in one.best],
            }
            for one in searched
        ],
        "phases": [
            {
                "model": phase.name,
                "parameters": phase.model.parameters,
                "num_points": found.num_points,
                "num_fitting": len(found.fitting),
                "limit_bytes": found.limit_bytes,
                "command": plan.command(),
                "in_the_script": plan.in_the_script,
                "chosen": reasons.table_of([best])[0],
                "front": [
                    {**row, "cluster": one.cluster.name, "money_per_sample": rent}
                    for (one, rent) in front_of(searched, number)
                    for row in reasons.table_of([one])
                ],
                "why_not": reasons.why_not(found, best, phase.model, phase.batch),
            }
            for number, (phase, found, best, plan) in enumerate(
                zip(phases, chosen.founds, chosen.best, plans, strict=True)
            )
            if best is not None
        ],
    }


def show(
    chosen: Searched,
    searched: Sequence[Searched],
    phases: Sequence[Phase],
    plans: Sequence[TrainingPlan],
    files: Sequence[Path],
    prices: Prices | None,
    budget: float | None,
    found: argparse.Namespace,
) -> None:
    """Print the answer to a command line."""
    console = Console(highlight=False, soft_wrap=True, width=max(160, Console().width))
    if len(searched) > 1:
        _show_clusters(console, chosen, searched, prices, budget)
    for number, (phase, best, plan) in enumerate(zip(phases, chosen.best, plans, strict=True)):
        assert best is not None
        _show_front(console, phase, number, chosen, searched, best, prices, found)
        show_phase(console, phase, chosen.founds[number], best)
        console.print(f"\nTo run it: {_command(plan, files, number)}")
        if plan.num_nodes > 1:
            hosts = ",".join(f"host{number}:{plan.ranks_per_node}" for number in (1, 2))
            console.print(f"  with -H {hosts},... after `run`; or on each node under srun --ntasks-per-node=1")
        console.print("  in the script: " + "; ".join(plan.in_the_script))
    show_training(console, chosen, prices, asked.failures_of(found))


def _command(plan: TrainingPlan, files: Sequence[Path], number: int) -> str:
    return shlex.join(["guozhuang", "run", "--plan", str(files[number]), "train.py"]) if files else plan.command()


def _show_clusters(
    console: Console, chosen: Searched, searched: Sequence[Searched], prices: Prices | None, budget: float | None
) -> None:
    money = "" if prices is None else f"rent, {prices.currency}"
    table = units.terminal_table("Where", ("cluster", "ranks", "samples/s", "training", money, ""), 1, no_wrap=True)
    for one in sorted(searched, key=lambda each: (not each.fits, each.seconds or each.seconds_of_samples)):
        note = "chosen" if one is chosen else "does not fit" if not one.fits else ""
        if not note and budget is not None and one.money is not None and one.money > budget:
            note = f"{one.money - budget:,.0f} over the budget"
        rate = units.ABSENT if not one.fits else "; ".join(units.rate(best.samples_per_s) for best in one.best if best)
        table.add_row(one.cluster.name, str(one.cluster.num_ranks), rate, days(one.seconds), _money(one.money), note)
    console.print(table)


def _show_front(
    console: Console, phase: Phase, number: int, chosen: Searched, searched: Sequence[Searched], best: Candidate,
    prices: Prices | None, asked_for: argparse.Namespace,
) -> None:  # fmt: skip
    """Print the Pareto front of a phase over time, memory and, with prices, money."""
    of_phase = [one.founds[number] for one in searched]
    console.print(
        f"{phase.name}: {phase.model.parameters / 1e6:,.4g} M parameters, {phase.batch:,} samples a step, "
        f"{chosen.cluster.num_ranks} ranks of {chosen.cluster.name}\n{sum(one.num_points for one in of_phase):,} layouts, "
        f"{sum(len(one.fitting) for one in of_phase):,} fit into {units.size(chosen.founds[number].limit_bytes)} a rank "
        f"({USABLE:.0%} of its memory{'' if len(searched) == 1 else '; other clusters have their own'})"
    )
    front = front_of(searched, number)
    top = asked_for.top
    if all(one is not best for one, _ in front[:top]):
        rent_of_best = None if chosen.money_per_second is None else chosen.money_per_second / best.samples_per_s
        alike = (best.arrangement._replace(cap_mb=0.0), best.cluster.name)
        others = (row for row in front if (row[0].arrangement._replace(cap_mb=0.0), row[0].cluster.name) != alike)
        front = [(best, rent_of_best), *others]
    rent = "" if prices is None or not prices.rents else f"{prices.currency} a million"
    headings = ("", "layout", "micro-batches", "step", "samples/s", rent, "MFU", "memory", "idle", "ranks", "")
    title = f"Fastest for their memory{' and money' if rent else ''} (Pareto)"
    table = units.terminal_table(title, headings, 3, no_wrap=True)
    for one, money in front[:top]:
        peak = (one.cluster.device.flops if one.cluster.device else {}).get(
            product_type(one.cluster, asked_for.precision)
        )
        ranks = one.arrangement.num_ranks
        mfu = None if peak is None else phase.model.mfu(one.samples_per_s, ranks, peak)
        table.add_row(
            "*" if one is best else "", reasons.described(one.arrangement), reasons.settings(one.arrangement),
            units.duration(one.step_s), units.rate(one.samples_per_s), "" if money is None else f"{1e6 * money:,.2f}",
            units.percent(mfu), units.size(one.memory_bytes),
            units.percent(max(0.0, one.parts.get("bubble", 0.0)) / one.step_s),
            f"{ranks} of {one.cluster.name}" if len(searched) > 1 else str(ranks), mark(one.arrangement),
        )  # fmt: skip
    console.print(table)


def show_phase(console: Console, phase: Phase, found: SearchResult, best: Candidate) -> None:
    """Print of the chosen layout of a phase where time and memory go, and why the other kinds of layout lost."""
    console.print("Where its step goes: " + _parts(best.parts, units.duration))
    console.print("What fills its memory: " + _parts(best.memory, units.size))
    if best.widened:
        console.print("Outside of what the cost model was calibrated on, so less certain: " + "; ".join(best.widened))
    limit_s = best.step_s / best.arrangement.batch / (1 + ALIKE)
    faster = [one for one in found.fitting if mark(one.arrangement) and one.step_s / one.arrangement.batch < limit_s]
    for each in {mark(one.arrangement): one for one in reversed(faster)}.values():
        other = each.arrangement
        console.print(
            f"Faster, but {mark(other)}: {reasons.described(other)}; micro-batches {reasons.settings(other)}; "
            f"{units.duration(each.step_s)}: {obstacle(other).removeprefix(INEXACT + ': ')}"
        )
    console.print("Why not")
    for family, text in reasons.why_not(found, best, phase.model, phase.batch).items():
        console.print(f"  {family}: {text}")
    for text, number in found.impossible.items():
        console.print(f"  {number:,} layouts are refused by the cost model: {text}")


def _parts(parts: Mapping[str, float], written: Any) -> str:
    rising = sorted(parts.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {written(value)}" for name, value in rising if value > 0.001 * sum(parts.values()))


def show_training(console: Console, chosen: Searched, prices: Prices | None, failures: Failures) -> None:
    """Print the time and money of the whole training, and how often to save a checkpoint."""
    ranks = chosen.cluster.num_ranks
    every_s = failures.interval_s(ranks)
    if chosen.seconds is not None:
        useful = failures.useful(ranks)
        console.print(
            f"\nThe whole training: {days(chosen.seconds)}"
            + (f", {_money(chosen.money)} {prices.currency}" if prices is not None and chosen.money is not None else "")
            + f"; in it {1 - useful:.1%} for checkpoints and failures"
        )
    console.print(
        f"A failure every {units.duration(failures.of_one_s / ranks)} is expected; save a checkpoint every "
        f"{units.duration(every_s)}: --checkpoint DIR --every {max(1, round(every_s / 60))}min"
    )
    if prices is not None:
        console.print(f"Prices are those of {prices.date} in {prices.source}.")


def days(seconds: float | None) -> str:
    """Format the time of a training: in days from two on, else as other times."""
    if seconds is None or seconds < 2 * 86400:
        return units.duration(seconds)
    return f"{seconds / 86400:,.1f} days" if seconds < float("inf") else "never ends"


def _money(value: float | None) -> str:
    return units.ABSENT if value is None else f"{value:,.0f}"
