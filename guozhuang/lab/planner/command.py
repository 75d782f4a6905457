"""Carries out ``guozhuang plan``: reads what is asked, searches, writes the plan file, prints the answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from guozhuang.cost.cluster import Cluster
from guozhuang.cost.describe import parse_cluster
from guozhuang.errors import UsageError, explain
from guozhuang.lab.planner import arguments, asked, buying, report
from guozhuang.lab.planner.prices import Prices, read_prices
from guozhuang.lab.planner.training import Phase, Searched, check_rates, phases_of, rank_counts, search_cluster
from guozhuang.launch.options.plan_file import replaced_plan
from guozhuang.records import to_json

# Options that a model which is only described is planned by.
_USED = {
    "model", "on", "batch", "noise_batch", "samples", "tokens", "rate", "measured_peak", "precision", "flash", "ranks",
    "memory_limit", "mtbf", "checkpoint_time", "restart_time", "budget", "prices", "out", "json", "top",
}  # fmt: skip


def execute(found: argparse.Namespace, python_path: Sequence[str] = ()) -> int:
    """Carry out a parsed command line of ``guozhuang plan``; return the exit code.

    Args:
        found: the parsed command line.
        python_path: the folders that ``guozhuang run`` adds to the ranks' PYTHONPATH.

    Raises:
        UsageError: it cannot be understood, or nothing fits; the text says what would.
    """
    if found.out is not None:
        replaced_plan(found.out, is_tuned=False)  # before anything is measured or computed
    if found.training_script is not None:
        from guozhuang.lab.planner import fake

        return fake.run(found)
    if found.workload is not None or found.profile is not None:
        from guozhuang.lab.planner import workload  # imported only when needed: it imports torch

        return workload.run(found, python_path)
    if not found.model:
        what = "nothing says what is to be trained"
        fix = "give --model bert-large, --workload text, or a script with --ranks N"
        raise UsageError(explain(what, fix=fix))
    _check_options(found)
    phases = phases_of(found.model, found.batch or (), found.samples, found.tokens, found.rate, found.measured_peak)
    if found.top < 1:
        raise UsageError(explain("--top is a number of layouts, at least 1", value=found.top, fix="leave it out"))
    prices = None if found.prices is None else read_prices(found.prices)
    budget = asked.budget_of(found, prices)
    if not found.on:
        if prices is None or not prices.parts:
            fix = "give --on 4x8xA100-80,ib=200gbit, or --prices FILE with parts to buy"
            raise UsageError(explain("nothing says where it is to be trained", fix=fix))
        return buying.run(found, phases, prices, budget)
    clusters = [_devices(text) for text in found.on]
    check_rates(phases, (each.device.name for each in clusters if each.device is not None))
    searched = [
        search_cluster(
            cluster,
            phases,
            asked.memory_of(found, cluster),
            asked.failures_of(found),
            **asked.options_of(found, prices, cluster),
        )
        for each in clusters
        for cluster in rank_counts(each, found.ranks, prices is not None)
    ]
    chosen = choose(searched, phases, found, budget, prices)
    plans = asked.plans_of(chosen, searched, found)
    files = asked.write(plans, found.out)
    document = report.document(chosen, searched, phases, plans, prices)
    if found.json:
        print(to_json(document))
    else:
        report.show(chosen, searched, phases, plans, files, prices, budget, found)
    return 0


def _check_options(found: argparse.Namespace) -> None:
    """Raise if an option is given that says nothing of a model that is only described."""
    plain = arguments.parser().parse_args([])
    used = _USED if found.on else _USED - {"ranks"}
    for name, value in vars(found).items():
        if value != getattr(plain, name) and name not in used:
            what = (
                f"--{name.replace('_', '-')} says nothing where --model is planned{'' if found.on else ' without --on'}"
            )
            raise UsageError(explain(what, value=value, fix="leave it out, or plan a --workload"))


def _devices(text: str) -> Cluster:
    cluster = parse_cluster(text, read=lambda name: Path(name).read_text(encoding="utf-8"))
    if cluster.device is None:
        what = "a model that is only described is planned on devices of the hardware table, and these hosts have cores"
        fix = "give --workload or --profile, which are measured on one; or name devices: 4x8xA100-80,ib=200gbit"
        raise UsageError(explain(what, value=text, fix=fix))
    if cluster.num_nodes > 1 and cluster.between.bytes_per_s <= 0:
        fix = f"add it: {text},ib=200gbit"
        raise UsageError(
            explain("sends between stages need the rate of the network beside all-reduces", value=text, fix=fix)
        )
    return cluster


def choose(
    searched: Sequence[Searched],
    phases: Sequence[Phase],
    found: argparse.Namespace,
    budget: float | None,
    prices: Prices | None,
) -> Searched:
    """Return the cluster on which the training is fastest, within the budget if there is one.

    Raises:
        UsageError: the model fits on none, or the training costs more than the budget on each.
    """
    fitting = [one for one in searched if one.fits]
    if not fitting:
        raise UsageError(asked.nothing_fits(searched, phases, found))
    if budget is not None:
        if not any(one.money is not None for one in fitting):
            what = "--budget limits the rent of a training, and that is not known"
            fix = "give --samples or --tokens, and [[rent]] for the device in --prices; leave --on out to buy a machine"
            raise UsageError(explain(what, value=found.budget, fix=fix))
        affordable = [one for one in fitting if one.money is not None and one.money <= budget]
        if not affordable:
            least = min((one for one in fitting if one.money is not None), key=lambda one: one.money or 0.0)
            what = f"the training costs {least.money:,.0f} at least, on {least.cluster.num_ranks} ranks of {least.cluster.name}"
            currency = prices.currency if prices is not None else ""
            enough = f"{math.ceil(least.money or 0):,}{currency}"
            fix = f"raise the budget to {enough}, train on fewer samples, or give cheaper devices with --on"
            raise UsageError(explain(what, value=found.budget, fix=fix))
        fitting = affordable
    return min(fitting, key=lambda one: one.seconds_of_samples if one.seconds is None else one.seconds)
