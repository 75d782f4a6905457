"""What a command line of ``guozhuang plan`` asks for, and its answer as plan files: shared by clusters and machines to buy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guozhuang import units
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.describe import parse_size
from guozhuang.cost.memory import USABLE
from guozhuang.errors import UsageError, explain
from guozhuang.lab.planner import reasons
from guozhuang.lab.planner.prices import Prices, amount
from guozhuang.lab.planner.running import training_plan
from guozhuang.lab.planner.training import Failures, Phase, Searched
from guozhuang.launch.options.plan_file import TrainingPlan, write_plan


def options_of(found: argparse.Namespace, prices: Prices | None, cluster: Cluster) -> dict[str, Any]:
    """Return what the command line says about a search, as ``search_cluster`` takes it."""
    rent = prices.rent(cluster.device.name) if prices is not None and prices.rents and cluster.device else None
    return {
        "rent_per_hour": rent, "precision": found.precision, "flash": found.flash, "noise_batch": found.noise_batch,
    }  # fmt: skip


def memory_of(found: argparse.Namespace, cluster: Cluster) -> float:
    """Return the memory of a rank: that of ``--memory-limit``, else of its device."""
    if found.memory_limit is not None:
        return parse_size(found.memory_limit, "--memory-limit ")
    memory = cluster.rank_memory_bytes
    if memory is None:
        fix = "give --memory-limit, as in --memory-limit 16GiB"
        raise UsageError(explain("the memory of a rank is not known", value=cluster.name, fix=fix))
    return memory


def failures_of(found: argparse.Namespace) -> Failures:
    """Return what the command line says about failures.

    Raises:
        UsageError: a time is below 0, or none.
    """
    for option, value in (("--mtbf", found.mtbf), ("--checkpoint-time", found.checkpoint_time)):
        if not 0 < value < math.inf:
            raise UsageError(explain(f"{option} is a time above 0", value=value, fix="leave it out"))
    if not 0 <= found.restart_time < math.inf:
        raise UsageError(explain("--restart-time is a time", value=found.restart_time, fix="leave it out"))
    return Failures(found.mtbf * 3600, found.checkpoint_time, found.restart_time)


def budget_of(found: argparse.Namespace, prices: Prices | None) -> float | None:
    """Return the amount of ``--budget``; None without one.

    Raises:
        UsageError: it cannot be read, there are no prices, or they are in another currency.
    """
    if found.budget is None:
        return None
    value, currency = amount(found.budget)
    if prices is None:
        fix = "give --prices FILE with today's prices and their date (docs/plan.md has a sample)"
        raise UsageError(explain("--budget needs prices, which are yours", value=found.budget, fix=fix))
    if currency != prices.currency:
        what = f"--budget is in {currency}, and the prices of {prices.source} are in {prices.currency}"
        raise UsageError(explain(what, fix="give both in one currency"))
    return value


def nothing_fits(searched: Sequence[Searched], phases: Sequence[Phase], found: argparse.Namespace) -> str:
    """Return the text of an error: the model fits nowhere, and what is the smallest change that would let it fit."""
    one = max(searched, key=lambda each: each.cluster.num_ranks * memory_of(found, each.cluster))
    number = next(index for index, best in enumerate(one.best) if best is None)
    phase, limit = phases[number], memory_of(found, one.cluster)
    of_phase = one.founds[number]
    if of_phase.fitting:
        what = f"{phase.name} fits {one.cluster.name} only in layouts that `guozhuang run` cannot start"
        fix = "take another number of ranks, or another batch"
        return explain(what, value=reasons.described(of_phase.fitting[0].arrangement), fix=fix)
    _, change = reasons.smallest_change(
        phase.model, one.cluster, phase.batch, limit, found.precision, found.flash, phase.peak
    )
    least = min(of_phase.overflows.values(), key=lambda each: each.memory_bytes, default=None)
    what = f"{phase.name} fits into no layout of {one.cluster.num_ranks} ranks of {one.cluster.name}"
    if least is not None:
        what += f": the smallest {reasons.overflowing(of_phase, least)}"
    return explain(what, value=f"{units.size(limit)} a rank, of which {USABLE:.0%} may be filled", fix=change)


def plans_of(chosen: Searched, searched: Sequence[Searched], asked: argparse.Namespace) -> list[TrainingPlan]:
    """Return the plan of each phase."""
    found = []
    for number, best in enumerate(chosen.best):
        assert best is not None
        num_fitting = sum(len(one.founds[number].fitting) for one in searched)
        more = {} if chosen.seconds is None else {"seconds": chosen.seconds}
        more |= {} if chosen.money is None else {"money": chosen.money}
        why = f"the fastest of {num_fitting:,} layouts that fit"
        found.append(training_plan(best, asked.precision, asked.flash, why, **more))
    return found


def write(plans: Sequence[TrainingPlan], out: Path | None) -> list[Path]:
    """Write the plan files, numbered from the second phase on; return their paths."""
    if out is None:
        return []
    files = [
        out if not number else out.with_name(f"{out.stem}-{number + 1}{out.suffix}") for number in range(len(plans))
    ]
    for plan, file in zip(plans, files, strict=True):
        write_plan(plan, file)
    return files
