"""Plans a training that can be measured: the predicted strategies and numbers of ranks, which fit, and why the others lost."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from guozhuang import strategies, units
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.describe import parse_size
from guozhuang.cost.memory import fit
from guozhuang.cost.prediction import Prediction
from guozhuang.errors import UsageError, explain
from guozhuang.lab.contender import Contender, contenders
from guozhuang.lab.planner import arguments
from guozhuang.lab.planner.running import versions
from guozhuang.lab.planner.search import ALIKE
from guozhuang.lab.planner.training import count
from guozhuang.lab.predict import arguments as predict_arguments
from guozhuang.lab.predict.command import perform
from guozhuang.lab.predict.table import Row
from guozhuang.lab.runs import ended_by_signals
from guozhuang.launch.options.plan_file import TrainingPlan, write_plan
from guozhuang.records import to_json

_INTERRUPTED = 130
# Options of the command line that say something of a training that is only described.
_NOT_HERE = (
    "tokens", "batch", "budget", "prices", "rate", "measured_peak", "noise_batch", "precision", "flash", "layout", "mtbf",
    "checkpoint_time", "restart_time",
)  # fmt: skip


def run(found: argparse.Namespace, python_path: Sequence[str] = ()) -> int:
    """Answer ``guozhuang plan --workload``: profile one process, predict, choose; return the exit code.

    Raises:
        UsageError: an option cannot work, nothing could be predicted, or nothing fits into the memory.
    """
    namespace = _as_predict_has_it(found)
    if found.top < 1:
        raise UsageError(explain("--top is a number of rows, at least 1", value=found.top, fix="leave it out"))
    limit = None if found.memory_limit is None else parse_size(found.memory_limit, "--memory-limit ")
    try:
        with ended_by_signals(), tempfile.TemporaryDirectory(prefix="guozhuang-") as scratch:
            predictions, _, cluster = perform(namespace, Path(scratch), Console(stderr=True), python_path)
    except KeyboardInterrupt:
        return _INTERRUPTED
    rows = sorted((row for row in predictions.rows if row.prediction is not None), key=_slowness)
    if not rows:
        why = predictions.rows[0].problem if predictions.rows else "no strategy was asked for"
        raise UsageError(explain(f"nothing could be predicted: {why}", fix="give --strategies others, or another --on"))
    fitting = [row for row in rows if overflow(row, cluster, limit) <= 0]
    if not fitting:
        least = min(rows, key=lambda row: overflow(row, cluster, limit))
        what = f"{predictions.workload} fits nowhere: {least.name} on {least.num_ranks} ranks misses by least"
        more = units.size(overflow(least, cluster, limit))
        whose = _whose(limit)
        raise UsageError(explain(what, value=f"{more} too much", fix=f"allow {more} more {whose}, or take more nodes"))
    chosen = choose(fitting)
    assert chosen.prediction is not None
    plan = plan_of(chosen, cluster, namespace.threads_per_rank)
    if found.out is not None:
        write_plan(plan, found.out)
    reasons = {
        f"{row.name} on {row.num_ranks}": why_not(row, chosen, cluster, limit) for row in rows if row is not chosen
    }
    if found.json:
        print(to_json({"plan": asdict(plan), "predictions": asdict(predictions), "why_not": reasons}))
        return 0
    _show(
        Console(highlight=False, soft_wrap=True, width=max(120, Console().width)),
        predictions.workload,
        rows,
        chosen,
        reasons,
        plan,
        found,
        predictions.rows,
    )
    return 0


def _as_predict_has_it(found: argparse.Namespace) -> argparse.Namespace:
    """Return the options of ``guozhuang predict`` that this command line means."""
    namespace = predict_arguments.parser().parse_args([])
    shared = {name: value for name, value in vars(found).items() if name in vars(namespace) and value is not None}
    shared.pop("out", None)  # ours is a plan, not the folder of a report
    shared |= {"model": found.model[0]} if found.model else {}
    shared |= {"on": found.on[0]} if found.on else {}
    shared |= {"samples": count("--samples", found.samples[0])} if found.samples else {}
    shared |= {"profile": Path(found.profile)} if found.profile is not None else {}
    for option, value in (("--on", found.on), ("--model", found.model), ("--samples", found.samples)):
        if value is not None and len(value) > 1:
            raise UsageError(
                explain(f"with --workload {option} is given once", value=", ".join(value), fix="plan each alone")
            )
    plain = arguments.parser().parse_args([])
    for name in _NOT_HERE:
        if getattr(found, name) != getattr(plain, name):
            what = f"--{name.replace('_', '-')} is for --model without --workload"
            fix = "leave it out; --batch-size gives the samples of a rank's step"
            raise UsageError(explain(what, value=getattr(found, name), fix=fix))
    if found.strategy is not None:
        shared["strategies"] = found.strategy
    vars(namespace).update(shared)
    return namespace


def _slowness(row: Row) -> float:
    assert row.prediction is not None
    return -row.prediction.samples_per_s


def overflow(row: Row, cluster: Cluster, limit: float | None) -> float:
    """Return by how many bytes a row may need more than may be filled; at most 0 if it fits, or that is unknown.

    Args:
        row: what was predicted.
        cluster: where.
        limit: memory of a rank; None: the memory of a device, or of a node, which its ranks share.
    """
    memory = row.prediction.memory_bytes if row.prediction is not None else None
    part = cluster.with_ranks(row.num_ranks)
    on_one = row.num_ranks if part.shares_host else part.ranks_per_node
    if limit is None:
        limit = part.device.memory_bytes if part.device is not None else part.node_memory_bytes
        memory = memory and memory * (1 if part.device is not None else on_one)
    if limit is None or memory is None:
        return 0.0
    found = fit(memory, limit)
    return found.high_bytes - found.usable_bytes


def _whose(limit: float | None) -> str:
    return "a node" if limit is None else "a rank"


def choose(fitting: Sequence[Row]) -> Row:
    """Return the fastest exact strategy that trains; of those that are alike the first of the table, on the fewest ranks."""
    order = list(strategies.STRATEGIES)
    usable = [row for row in fitting if _entry(row).trains and _entry(row).exact]
    if not usable:
        usable = [row for row in fitting if _entry(row).trains]
    if not usable:
        what = "no strategy that trains was predicted"
        raise UsageError(
            explain(what, value=", ".join(row.name for row in fitting), fix="give ddp or sharded among them")
        )
    limit = _slowness(usable[0]) / (1 + ALIKE)
    alike = [row for row in usable if _slowness(row) <= limit]
    return min(alike, key=lambda row: (row.num_ranks, order.index(_entry(row).name)))


def _contender(row: Row) -> Contender:
    return contenders(row.name, None, 1, True, row.num_ranks)[0]


def _entry(row: Row) -> strategies.Strategy:
    return _contender(row).entry


def plan_of(row: Row, cluster: Cluster, threads: int | None) -> TrainingPlan:
    """Return the plan file of a predicted row."""
    assert row.prediction is not None
    part, one = cluster.with_ranks(row.num_ranks), _contender(row)
    num_nodes = 1 if one.entry.one_process else part.num_nodes
    return TrainingPlan(
        num_nodes,
        1 if one.entry.one_process else part.ranks_per_node,
        strategy=one.strategy,
        layout=one.layout,
        schedule=one.schedule,
        backend=one.backend,
        threads_per_rank=threads
        or (max(1, part.cores_per_node // part.ranks_per_node) if part.cores_per_node else None),
        in_the_script=(f"batches of {row.prediction.batch_size} samples (gz.loader's batch_size)",),
        why=f"the fastest exact strategy that fits: {units.rate(row.prediction.samples_per_s)} samples/s predicted",
        date=datetime.date.today().isoformat(),
        versions=versions(),
        prediction={
            "step_s": row.prediction.step_s,
            "interval_s": row.prediction.interval_s,
            "largest_term": row.prediction.largest_term,
        },
    )


def why_not(row: Row, chosen: Row, cluster: Cluster, limit: float | None) -> str:
    """Return why a row was not chosen."""
    assert row.prediction is not None and chosen.prediction is not None
    missing = overflow(row, cluster, limit)
    if missing > 0:
        return f"runs out of memory by {units.size(missing)} {_whose(limit)}"
    if not _entry(row).trains:
        return "a bound on speed, not a way to train"
    ratio = chosen.prediction.samples_per_s / row.prediction.samples_per_s
    if not _entry(row).exact and ratio < 1:
        return f"{units.times(1 / ratio)} the speed, but inexact: try it on your own loss curve"
    if ratio < 1 + ALIKE:
        return "as fast, on as many ranks or more"
    close = " (the 90 % intervals overlap)" if _overlaps(row.prediction, chosen.prediction) else ""
    return f"{units.times(ratio)} the time of a sample: {_excess(row.prediction, chosen.prediction)}{close}"


def _overlaps(loser: Prediction, winner: Prediction) -> bool:
    """Return whether a prediction's interval of a sample's time reaches into that of a faster one."""
    samples = loser.batch_size * loser.num_ranks / (winner.batch_size * winner.num_ranks)
    return loser.interval_s[0] < winner.interval_s[1] * samples


def _excess(loser: Prediction, winner: Prediction) -> str:
    per_sample = {name: seconds / loser.batch_size / loser.num_ranks for name, seconds in loser.parts.items()}
    for name, seconds in winner.parts.items():
        per_sample[name] = per_sample.get(name, 0.0) - seconds / winner.batch_size / winner.num_ranks
    name, seconds = max(per_sample.items(), key=lambda one: one[1])
    return f"{name}: {units.duration(seconds)} more a sample"


def _show(
    console: Console, title: str, rows: Sequence[Row], chosen: Row, reasons: dict[str, str], plan: TrainingPlan,
    found: argparse.Namespace, all_rows: Sequence[Any],
) -> None:  # fmt: skip
    headings = ("", "strategy", "ranks", "samples/s", "step", "90 % of steps", "memory a rank", "largest term")
    table = units.terminal_table(title, headings, 2, no_wrap=True)
    for row in rows[: found.top] if chosen in rows[: found.top] else [chosen, *rows[: found.top - 1]]:
        one = row.prediction
        assert one is not None
        interval = f"{units.duration(one.interval_s[0])} {units.DASH} {units.duration(one.interval_s[1])}"
        table.add_row(
            "*" if row is chosen else "", row.name, str(row.num_ranks), units.rate(one.samples_per_s),
            units.duration(one.step_s), interval, units.size(one.memory_bytes), one.largest_term,
        )  # fmt: skip
    console.print(table)
    console.print("Why not")
    for name, text in reasons.items():
        console.print(f"  {name}: {text}")
    for row in all_rows:
        if row.prediction is None:
            console.print(f"  {row.name} on {row.num_ranks}: not predicted: {row.problem}")
    assert chosen.prediction is not None
    close = [
        row.name for row in rows
        if row.num_ranks == chosen.num_ranks and row is not chosen and row.prediction is not None and _entry(row).trains
        and _overlaps(row.prediction, chosen.prediction)
    ]  # fmt: skip
    if close:
        names = ",".join([chosen.name, *close])
        compare = (
            f"guozhuang compare --workload {found.workload or title} --strategies {names} --ranks {chosen.num_ranks}"
        )
        console.print(f"To tell these apart: {compare}")
    for text in chosen.prediction.widened:
        console.print(f"Less certain, because {text}")
    if found.samples:
        seconds = count("--samples", found.samples[0]) / chosen.prediction.samples_per_s
        console.print(f"The whole training: {units.duration(seconds)}")
    command = plan.command() if found.out is None else f"guozhuang run --plan {found.out} train.py"
    console.print(f"\nTo run it: {command}")
    console.print("  in the script: " + "; ".join(plan.in_the_script))
