"""What to buy for a budget: the parts list with its contradictions, the days to train on it, and the next better machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from guozhuang import units
from guozhuang.cost.describe import parse_cluster
from guozhuang.errors import UsageError, explain
from guozhuang.lab.planner import asked, report
from guozhuang.lab.planner.prices import Prices, Purchase, limits_of, listed_machine, purchases
from guozhuang.lab.planner.training import Phase, Searched, check_rates, search_cluster
from guozhuang.records import to_json

_BEYOND = 2.0  # machines of up to so many times the budget are looked at, for the next better one


@dataclass(frozen=True)
class MachineOffer:
    """A machine that can be bought, and the training on it.

    Attributes:
        machine: the parts.
        searched: the best layouts on it.
        is_listed: whether it is the machine that the file of prices lists.
    """

    machine: Purchase
    searched: Searched
    is_listed: bool = False

    @property
    def seconds(self) -> float:
        """The time of the training; without a number of samples, of one sample."""
        found = self.searched.seconds
        return self.searched.seconds_of_samples if found is None else found


def run(found: argparse.Namespace, phases: Sequence[Phase], prices: Prices, budget: float | None) -> int:
    """Answer ``guozhuang plan --budget AMOUNT --prices FILE`` without a cluster; return the exit code.

    Raises:
        UsageError: no machine of the parts can be bought for the budget, or none of them can train the model.
    """
    listed, findings = listed_machine(prices, budget) if prices.listed else (None, [])
    most = budget if budget is not None else listed.price if listed is not None else 0.0
    if not most:
        fix = "give --budget 1000000CNY, or a count for each part of a machine in --prices"
        raise UsageError(
            explain("--prices has parts, and nothing says how much may be spent", value=prices.source, fix=fix)
        )
    machines = [
        *([(listed, True)] if listed is not None and listed.device_name else []),
        *((one, False) for one in purchases(prices, _BEYOND * most)),
    ]
    if not any(machine.price <= most for machine, _ in machines):
        least = min((one.price for one in purchases(prices, float("inf")) or []), default=None)
        cheapest = "no machine can be made of them" if least is None else f"the cheapest machine costs {least:,.0f}"
        what = f"the budget buys nothing of the parts of {prices.source}: {cheapest} {prices.currency}"
        raise UsageError(explain(what, value=found.budget, fix="raise the budget, or add cheaper parts"))
    check_rates(phases, (machine.device_name for machine, _ in machines))
    offers = []
    for machine, is_listed in machines:
        cluster = parse_cluster(machine.description)
        options = asked.options_of(found, replace(prices, rents={}), cluster)
        memory = asked.memory_of(found, cluster)
        offers.append(
            MachineOffer(
                machine, search_cluster(cluster, phases, memory, asked.failures_of(found), **options), is_listed
            )
        )
    fitting = sorted((one for one in offers if one.searched.fits), key=lambda one: (one.seconds, one.machine.price))
    inside = [one for one in fitting if one.machine.price <= most]
    if not inside:
        text = asked.nothing_fits([one.searched for one in offers if one.machine.price <= most], phases, found)
        more = (
            f" {fitting[-1].machine.price:,.0f} {prices.currency} would buy a machine that it fits." if fitting else ""
        )
        raise UsageError(text + more)
    chosen = inside[0]
    better = next_better(chosen, fitting, most)
    plans = asked.plans_of(chosen.searched, [one.searched for one in inside], found)
    files = asked.write(plans, found.out)
    if found.json:
        print(to_json(document(chosen, inside, better, listed, findings, prices, budget, phases, plans)))
        return 0
    console = Console(highlight=False, soft_wrap=True, width=max(160, Console().width))
    if listed is not None:
        _show_list(console, "The machine that the file lists", listed, findings, most, prices)
    _show_list(console, "The fastest machine for the money", chosen.machine, limits_of(chosen.machine), most, prices)
    _show_optima(console, inside, better, chosen, prices, phases)
    report.show(chosen.searched, [chosen.searched], phases, plans, files, None, None, found)
    console.print(f"Prices are those of {prices.date} in {prices.source}.")
    return 0


def next_better(chosen: MachineOffer, fitting: Sequence[MachineOffer], most: float) -> MachineOffer | None:
    """Return the machine beyond the budget that is faster than the chosen one and costs least for the time that it saves."""
    faster = [one for one in fitting if one.machine.price > most and one.seconds < chosen.seconds]
    return min(
        faster,
        key=lambda one: (one.machine.price - chosen.machine.price) / (chosen.seconds - one.seconds),
        default=None,
    )


def optima(inside: Sequence[MachineOffer]) -> dict[str, MachineOffer]:
    """Return the machines that are best in one respect: time, price of a training, price."""
    return {
        "fastest": inside[0],
        "cheapest per training": min(inside, key=lambda one: one.machine.price * one.seconds),
        "cheapest that fits": min(inside, key=lambda one: (one.machine.price, one.seconds)),
    }


def document(
    chosen: MachineOffer,
    inside: Sequence[MachineOffer],
    better: MachineOffer | None,
    listed: Purchase | None,
    findings: Sequence[str],
    prices: Prices,
    budget: float | None,
    phases: Sequence[Phase],
    plans: Sequence[Any],
) -> dict[str, Any]:
    """Return the answer as plain records."""

    def plain(one: MachineOffer) -> dict[str, Any]:
        parts = [{"name": part.name, "count": count, "price": part.price} for part, count in one.machine.parts]
        return {
            "price": one.machine.price,
            "num_nodes": one.machine.num_nodes,
            "parts": parts,
            "seconds": one.seconds,
            "is_listed": one.is_listed,
        }

    return {
        "budget": budget,
        "listed": None if listed is None else {"price": listed.price, "findings": [*findings]},
        "optima": {name: plain(one) for name, one in optima(inside).items()},
        "next_better": None if better is None else plain(better),
        "training": report.document(chosen.searched, [chosen.searched], phases, plans, prices),
    }


def _show_list(
    console: Console, title: str, machine: Purchase, findings: Sequence[str], most: float, prices: Prices
) -> None:
    table = units.terminal_table(title, ("part", "count", f"each, {prices.currency}", "together"), 1, no_wrap=True)
    for part, count in machine.parts:
        number = count * machine.num_nodes
        table.add_row(part.name, str(number), f"{part.price:,.0f}", f"{number * part.price:,.0f}")
    rest = most - machine.price
    table.add_row("sum", "", "", f"{machine.price:,.0f}")
    table.add_row("left of the budget" if rest >= 0 else "over the budget", "", "", f"{abs(rest):,.0f}")
    console.print(table)
    if machine.device_name:
        cluster = parse_cluster(machine.description)
        assert cluster.device is not None
        peak = cluster.device.flops.get("bf16", cluster.device.flops.get("fp16", 0.0)) * cluster.num_ranks
        memory = f"{cluster.device.memory_bytes * cluster.num_ranks / 2**30:,.0f} GiB of device memory"
        console.print(f"{cluster.num_ranks} devices, {peak / 1e12:,.0f} TFLOP/s in 16 bits, {memory}")
    for text in findings:
        console.print(f"  found: {text}")
    console.print()


def _show_optima(
    console: Console,
    inside: Sequence[MachineOffer],
    better: MachineOffer | None,
    chosen: MachineOffer,
    prices: Prices,
    phases: Sequence[Phase],
) -> None:
    is_whole = chosen.searched.seconds is not None
    time = "training" if is_whole else "a sample"
    table = units.terminal_table("Best in what", ("", "machine", f"price, {prices.currency}", time), 2)
    for name, one in optima(inside).items():
        parts = f"{one.machine.description} (the listed one)" if one.is_listed else one.machine.description
        table.add_row(name, parts, f"{one.machine.price:,.0f}", report.days(one.seconds))
    if better is not None:
        table.add_row(
            "next better", better.machine.description, f"{better.machine.price:,.0f}", report.days(better.seconds)
        )
    console.print(table)
    if better is None:
        console.print(f"No machine of these parts for up to {_BEYOND:g} times the budget is faster.")
    elif is_whole:
        more, saved = better.machine.price - chosen.machine.price, (chosen.seconds - better.seconds) / 86400
        console.print(
            f"The next better machine costs {more:,.0f} {prices.currency} more and saves {saved:.2f} days of each training: "
            f"{more / saved:,.0f} {prices.currency} per day saved."
        )
    console.print()
