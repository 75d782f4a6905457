"""The parser of ``guozhuang compare``. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from guozhuang.workloads.arguments import add_arguments as add_workload_arguments

DEFAULT_STEPS = 50
DEFAULT_ROUNDS = 3
DEFAULT_CPU_RANKS = 2


def add_workload(group: argparse._ArgumentGroup) -> None:
    """Add ``--workload`` to a group of options; the options of the workloads themselves are added to the parser."""
    group.add_argument(
        "--workload",
        default="text",
        metavar="NAME",
        help="text, synthetic, or module:function of your own that returns a Workload (default: text)",
    )


def add_threads(group: argparse._ArgumentGroup) -> None:
    """Add ``--threads-per-rank`` to a group of options."""
    group.add_argument("--threads-per-rank", type=int, metavar="N", help="default: the cores divided by the ranks")


def add_device(group: argparse._ArgumentGroup) -> None:
    """Add ``--device`` to a group of options."""
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is any")


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``guozhuang compare``."""
    made = argparse.ArgumentParser(
        prog="guozhuang compare", description="Train the same workload under several strategies, side by side."
    )
    what = made.add_argument_group("what is compared")
    what.add_argument(
        "--strategies",
        metavar="A,B@BACKEND,C",
        help="which, and in which order; name@backend sets one's backend, hybrid:pp=2:tp=2 its layout, "
        "pipeline:schedule=1f1b the schedule of its stages (default: about six that "
        "suit the machine)",
    )
    what.add_argument("--all", action="store_true", help="compare all strategies there are, which takes long")
    what.add_argument(
        "--backend",
        metavar="NAME",
        help="carries the collectives of strategies that name none; torch-ddp on CPUs is on gloo unless it names another "
        "(default: shm on CPUs of one Linux node, gloo on others, nccl on CUDA)",
    )
    what.add_argument(
        "--groups", type=int, default=1, metavar="K", help="process groups that take buckets in turn (default: 1)"
    )
    add_workload(what)
    what.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"ranks that share the global batch (default: one for each CUDA device, {DEFAULT_CPU_RANKS} on CPUs)",
    )
    add_threads(what)
    add_device(what)
    how = made.add_argument_group("how it is measured")
    how.add_argument("--steps", type=int, metavar="N", help=f"measured steps of a run (default: {DEFAULT_STEPS})")
    how.add_argument(
        "--epochs", type=int, metavar="N", help="instead: whole epochs, of which the warm-up steps are not timed"
    )
    how.add_argument(
        "--warmup-steps", type=int, default=5, metavar="N", help="steps before the measured ones (default: 5)"
    )
    how.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="runs of each strategy, in turn (default: 3, or 2 where those tell enough)",
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data order (default: 0)")
    how.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="limit of one run (default: 1800)"
    )
    how.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file with any of these options by name, such as steps = 100; the command line outranks it",
    )
    out = made.add_argument_group("what comes out")
    out.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the report (default: ./report)"
    )
    out.add_argument(
        "--timeline", type=Path, metavar="FILE", help="also trace one short run of each; FILE-strategy.json"
    )
    out.add_argument(
        "--fresh", action="store_true", help="make all runs, also those that an interrupted comparison has finished"
    )
    out.add_argument("--json", action="store_true", help="print results.json in place of the tables")
    add_workload_arguments(made)
    return made
