"""Prints a check to the terminal: hosts, differences, links and all_reduce, in 80 columns if possible, then the findings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from guozhuang import units
from guozhuang.check.results import SOURCE, CheckResults, Facts, Finding, MeasuredLink, NetworkInterface, exit_code
from guozhuang.check.verdict import differing, headline
from guozhuang.units import card_speed, listed, ranks_text, short_time, speed, terminal_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: If there are more links than this, the table shows only the slowest ones and the median.
MAX_LINKS = 16
_STYLES = {"fail": "bold red", "warn": "yellow", "note": "dim"}
_LABELS = {"fail": "breaks training", "warn": "look at this", "note": "note"}


def show(console: Console, results: CheckResults, findings: Sequence[Finding]) -> None:
    """Print the tables and findings of a check; tables without data are left out."""
    from rich.padding import Padding
    from rich.text import Text

    def write(renderable: Text, indent: int = 0) -> None:
        console.print(Padding(renderable, (0, 0, 0, indent), expand=False) if indent else renderable)

    write(_title(results))
    console.print()
    if results.facts:
        console.print(_nodes(results))
        console.print(_networks(results))
        write(_versions(results))
        for name, by_value in differing(results).items():
            for value, where in by_value.items():
                write(Text(f"{name} {value or 'absent'} on {where}", style="bold red"), 2)
        console.print()
    if results.links:
        console.print(_links(results))
    if any(each.median_s is not None for each in results.reductions):
        console.print(_reductions(results))
    for note in results.notes:
        write(Text(f"Note: {note}.", style="dim"))
    write(Text(headline(findings, results), style="bold red" if exit_code(findings) else "bold green"))
    for finding in findings:
        label = Text(f"{_LABELS[finding.level]}: ", style=_STYLES[finding.level])
        write(label.append(Text(finding.text, style="default")), 2)
        if finding.fix:
            write(Text(f"{finding.fix[0].upper()}{finding.fix[1:]}.", style="dim"), 4)


def _title(results: CheckResults) -> Text:
    from rich.text import Text

    there, nodes = len(results.facts), len(results.nodes)
    ranks = f"{results.num_ranks} rank{'s' * (results.num_ranks > 1)}"
    if not there:
        return Text.assemble((f"0 of {ranks} came", "bold"), f", launcher {results.launcher}")
    came = ranks if there == results.num_ranks else f"{there} of {ranks}"
    return Text.assemble(
        (came, "bold"),
        f" on {nodes} node{'s' * (nodes != 1)}, launcher {results.launcher}; took {units.duration(results.duration_s)}",
    )


def _nodes(results: CheckResults) -> Table:
    table = terminal_table(
        "Nodes", ["host", "ranks", "device", "cores", "threads\na rank", "memory\nleft", "/dev/shm", "clock"], 3
    )
    clocks = {next(f.node for f in results.facts if f.rank == each.rank): each for each in results.clocks}
    for number, (node, ranks) in enumerate(results.nodes.items()):
        first, here = ranks[0], ranks[0].resources
        cores = len({core for each in ranks for core in each.resources.cores})
        clock = clocks.get(node)
        table.add_row(
            first.host,
            ranks_text([each.rank for each in ranks]).partition(" ")[2],
            _device(ranks),
            f"{here.quota_cores:g} of {cores}" if here.quota_cores and here.quota_cores < cores else str(cores),
            str(here.num_threads),
            f"{units.size(here.available_bytes)}",
            units.size(here.shm_bytes),
            "rank 0's"
            if number == 0 and first.rank == 0
            else units.ABSENT
            if clock is None
            else _offset(clock.offset_s, clock.uncertainty_s),
        )
    return table


def _device(ranks: Sequence[Facts]) -> str:
    if ranks[0].device == "cpu":
        return "cpu"
    names = listed(each.device_name or each.device for each in ranks)
    return f"{len(ranks)} {units.TIMES} {names}"


def _offset(offset_s: float, uncertainty_s: float) -> str:
    sign = units.MINUS if offset_s < 0 else "+"
    return f"{sign}{_milli(abs(offset_s))} ± {_milli(uncertainty_s)} ms"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.2g}"


def _networks(results: CheckResults) -> Table:
    table = terminal_table("Interfaces in use", ["host", "interface", "address", "MTU", "speed", "leads to rank 0"], 3)
    for ranks in results.nodes.values():
        here = ranks[0].network
        used = here.interface(here.in_use)
        table.add_row(
            ranks[0].host,
            here.in_use or "none needed",
            here.address or units.ABSENT,
            str(used.mtu_bytes) if used and used.mtu_bytes else units.ABSENT,
            _speed(used),
            "" if not here.in_use else "yes" if here.routed == here.in_use else f"no: {here.routed or 'nothing'}",
            style="" if here.in_use is None or here.routed == here.in_use else "yellow",
        )
    return table


def _speed(used: NetworkInterface | None) -> str:
    if used is None or not used.speed_mbit_per_s:
        return units.ABSENT
    return card_speed(used.speed_mbit_per_s) + ("" if used.is_card else " (virtual)")


def _versions(results: CheckResults) -> Text:
    from rich.text import Text

    differ = differing(results)
    same = {name: version for name, version in results.facts[0].versions.items() if name not in differ}
    versions = ", ".join(f"{name} {version}" for name, version in same.items() if name != SOURCE)
    engine = "with its C engine" if all(each.c_engine for each in results.facts) else "without its C engine everywhere"
    return Text(
        f"Same everywhere: {versions}; guozhuang {engine}"
        if len(results.facts) > 1
        else f"{versions}; guozhuang {engine}",
        style="dim",
    )


def _links(results: CheckResults) -> Table:
    known = [each for each in results.links if not each.failure]
    shown = [
        *(each for each in results.links if each.failure),
        *sorted(known, key=lambda each: each.slower_bytes_per_s or 0.0),
    ]
    title = "Links"
    if len(results.links) > MAX_LINKS:
        shown, title = shown[: MAX_LINKS - 4], f"Links: the slowest of {len(results.links)}"
    else:
        shown = list(results.links)
    table = terminal_table(
        title, ["ranks", "hosts", "latency", "repeats", "to the\nsecond", "to the\nfirst", "repeats"], 2
    )
    for link in shown:
        names = listed([results.host_of(link.a), results.host_of(link.b)]).replace(" and ", f" {units.DASH} ")
        pair = f"{link.a} {units.DASH} {link.b}"
        if link.failure:
            table.add_row(pair, names, "failed", style="bold red")
            continue
        table.add_row(
            pair,
            names,
            short_time(link.latency_s),
            str(link.latency_repeats),
            speed(link.forward_bytes_per_s),
            speed(link.backward_bytes_per_s),
            str(min(link.forward_repeats, link.backward_repeats)),
        )
    for between, where in ((False, "inside nodes"), (True, "between nodes")):
        same = [each for each in known if each.between_nodes is between]
        if len(same) > 1:
            _median_row(table, same, where)
    return table


def _median_row(table: Table, links: Sequence[MeasuredLink], where: str) -> None:
    table.add_row(
        "median",
        where,
        short_time(statistics.median(each.latency_s or 0.0 for each in links)),
        "",
        speed(statistics.median(each.forward_bytes_per_s or 0.0 for each in links)),
        speed(statistics.median(each.backward_bytes_per_s or 0.0 for each in links)),
        "",
        style="bold",
    )


def _reductions(results: CheckResults) -> Table:
    table = terminal_table(
        "all_reduce of all ranks", ["backend", "tensor on", "size", "median", "bytes / time", "repeats"], 2
    )
    for each in results.reductions:
        if each.median_s is None:
            continue
        table.add_row(
            f"{each.backend}{' (default here)' * each.is_default}",
            each.device_type,
            units.size(each.num_bytes),
            short_time(each.median_s),
            speed(each.num_bytes / each.median_s) if each.num_bytes >= 1 << 16 else units.ABSENT,
            str(each.num_repeats),
        )
    return table
