"""Prints a plan: what fits, what is chosen, why the others lost, what to type; or the same as plain records for JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from guozhuang import units
from guozhuang.lab.planner import reasons
from guozhuang.lab.planner.prices import Prices
from guozhuang.lab.planner.running import obstacle
from guozhuang.lab.planner.search import ALIKE, USABLE, Candidate, SearchResult, pareto, product_type
from guozhuang.lab.planner.training import Failures, Phase, Searched
from guozhuang.launch.options.plan_file import TrainingPlan


def front_of(found: SearchResult, per_rank_second: float = 0.0) -> list[Candidate]:
    """Return the candidates of a search that no other one beats in time, memory and money."""
    prices = [one.step_s * one.arrangement.num_ranks * per_rank_second / one.arrangement.batch for one in found.fitting]
    return pareto(found.fitting, prices)


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
                "front": reasons.table_of(front_of(found)),
                "why_not": reasons.why_not(found, best, phase.model, phase.batch),
            }
            for phase, found, best, plan in zip(phases, chosen.founds, chosen.best, plans, strict=True)
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
    top: int,
    failures: Failures,
    precision: str,
) -> None:
    """Print the answer."""
    console = Console(highlight=False, soft_wrap=True, width=max(150, Console().width))
    if len(searched) > 1:
        _show_clusters(console, chosen, searched, prices, budget)
    for number, (phase, found, best, plan) in enumerate(zip(phases, chosen.founds, chosen.best, plans, strict=True)):
        assert best is not None
        show_phase(console, phase, chosen, found, best, top, precision)
        console.print(f"\nTo run it: {_command(plan, files, number)}")
        if plan.num_nodes > 1:
            hosts = ",".join(f"host{number}:{plan.ranks_per_node}" for number in (1, 2))
            console.print(f"  with -H {hosts},... after `run`; or on each node under srun --ntasks-per-node=1")
        console.print("  in the script: " + "; ".join(plan.in_the_script))
    show_training(console, chosen, prices, failures)


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


def show_phase(
    console: Console, phase: Phase, searched: Searched, found: SearchResult, best: Candidate, top: int, precision: str
) -> None:
    """Print the Pareto front of a phase, and why the other kinds of layout lost."""
    cluster, flops = searched.cluster, searched.cluster.device.flops if searched.cluster.device else {}
    console.print(
        f"{phase.name}: {phase.model.parameters / 1e6:,.4g} M parameters, {phase.batch:,} samples a step, {cluster.num_ranks} "
        f"ranks of {cluster.name}\n{found.num_points:,} layouts, {len(found.fitting):,} fit into "
        f"{units.size(found.limit_bytes)} a rank ({USABLE:.0%} of its memory)"
    )
    front = front_of(found)
    rows = [best, *(one for one in front if one is not best)][:top] if best not in front[:top] else front[:top]
    headings = ("", "layout", "micro-batches", "step", "samples/s", "MFU", "memory", "idle", "")
    table = units.terminal_table("Fastest for their memory (Pareto)", headings, 3, no_wrap=True)
    peak = flops.get(product_type(cluster, precision))
    for one in rows:
        mfu = None if peak is None else phase.model.mfu(one.samples_per_s, cluster.num_ranks, peak)
        idle = max(0.0, one.parts.get("bubble", 0.0) / one.step_s)
        table.add_row(
            "*" if one is best else "", reasons.described(one.arrangement), reasons.settings(one.arrangement),
            units.duration(one.step_s), units.rate(one.samples_per_s), units.percent(mfu), units.size(one.memory_bytes),
            units.percent(idle),
            "not by `guozhuang run`" if obstacle(one.arrangement) else "",
        )  # fmt: skip
    console.print(table)
    console.print("Where its step goes: " + _parts(best.parts, units.duration))
    console.print("What fills its memory: " + _parts(best.memory, units.size))
    if best.widened:
        console.print("Outside of what the cost model was calibrated on, so less certain: " + "; ".join(best.widened))
    faster = [one for one in found.fitting if obstacle(one.arrangement) and one.step_s < best.step_s / (1 + ALIKE)]
    if faster:
        other = faster[0].arrangement
        console.print(
            f"Faster, but not by `guozhuang run`: {reasons.described(other)}; micro-batches {reasons.settings(other)}; "
            f"{units.duration(faster[0].step_s)}: {obstacle(other)}"
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
