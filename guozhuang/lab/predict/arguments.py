"""The parser of ``guozhuang predict``. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from guozhuang.errors import UsageError, explain
from guozhuang.lab.options import add_device, add_threads, add_workload
from guozhuang.workloads.arguments import add_arguments as add_workload_arguments

MOST_RANKS = 1_000_000


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``guozhuang predict``."""
    made = argparse.ArgumentParser(
        prog="guozhuang predict",
        description="Measure one process of a training for a minute, and predict its step on many ranks.",
    )
    what = made.add_argument_group("what is predicted")
    what.add_argument(
        "--on",
        default="here",
        metavar="CLUSTER",
        help="where it will train: here, hosts such as 4x8cores,10gbit/0.1ms or 4xhere,1gbit, or the FILE.json of "
        "guozhuang check --json, with ,shm or ,gloo for the backend, and ,FILE.csv for measured all-reduces "
        "(default: here)",
    )
    what.add_argument(
        "--strategies", metavar="A,B,C", help="which, as guozhuang compare takes them (default: those that suit --on)"
    )
    what.add_argument(
        "--ranks", metavar="N,M", help="numbers of ranks, 1,2,4 or 2-8 (default: 1, 2, 4 ... as --on has)"
    )
    add_threads(what)
    add_workload(what)
    add_device(what)
    what.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples of a step of all ranks, for the strong-scaling curve (default: --batch-size times the most ranks)",
    )
    what.add_argument(
        "--samples", type=float, metavar="N", help="also say how long, and with --price at what cost, so many take"
    )
    what.add_argument("--price", type=float, metavar="P", help="of one rank for an hour, in any currency")
    what.add_argument(
        "--noise-scale",
        type=float,
        metavar="N",
        help="the gradient noise scale in samples, as guozhuang compare shows it, for the critical batch",
    )
    out = made.add_argument_group("what is kept")
    out.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="where the measurements are kept: written if it is not there, else used, if machine, versions and workload "
        "are the same",
    )
    what.add_argument(
        "--measured",
        type=Path,
        action="append",
        metavar="DIR",
        help="a report of guozhuang compare about this training on this machine: steps that it has measured are not predicted; "
        "may be repeated",
    )
    out.add_argument("--json", action="store_true", help="print the predictions as JSON in place of the table")
    out.add_argument("--out", type=Path, metavar="DIR", help="also write a report with the scaling curves there")
    add_workload_arguments(made)
    return made


def numbers(text: str, option: str = "--ranks") -> tuple[int, ...]:
    """Return the numbers that ``1,2,4`` or ``2-8`` means, each once, in ascending order.

    Raises:
        UsageError: something in it is no number of ranks.
    """
    found: set[int] = set()
    for word in filter(None, (each.strip() for each in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if not 1 <= first <= last <= MOST_RANKS or last - first > 10_000:
            what = f"{option} takes numbers of at least 1, as in 1,2,4 or 2-8"
            raise UsageError(explain(what, value=word))
        found.update(range(first, last + 1))
    if not found:
        raise UsageError(explain(f"{option} names no number", value=text, fix="say for example 1,2,4"))
    return tuple(sorted(found))
