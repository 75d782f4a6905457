"""The parser of ``guozhuang tune``. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from guozhuang.lab.options import add_device, add_workload
from guozhuang.workloads.arguments import add_arguments as add_workload_arguments

#: The knobs, in the order in which they are raced; the first decide most.
KNOBS = ("ranks", "fused", "strategy", "cap", "groups")

#: The options on which the result depends, by their attributes; those of the workload come beside them.
OF_THE_RESULT = (
    "knobs", "strategies", "backend", "ranks", "device", "steps", "warmup_steps", "rounds", "margin", "seed", "timeout"
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``guozhuang tune``."""
    made = argparse.ArgumentParser(
        prog="guozhuang tune",
        description="Race settings of a training on this machine, one knob after the other, and write a plan of the fastest "
        "that `guozhuang run --plan FILE` starts. The default stays where nothing is shown to be faster.",
    )
    what = made.add_argument_group("what is tuned")
    add_workload(what)
    what.add_argument(
        "--knobs",
        default=",".join(KNOBS),
        metavar="A,B",
        help=f"which knobs, of {', '.join(KNOBS)} (default: all, in this order)",
    )
    what.add_argument(
        "--strategies",
        metavar="A,B@BACKEND",
        help="which strategies the knob `strategy` tries, written as for `guozhuang compare`; inexact ones only if they are "
        "named here (default: the exact ones that suit the machine)",
    )
    what.add_argument("--backend", metavar="NAME", help="carries the collectives (default: as for `guozhuang compare`)")
    what.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the default setting; the batches of N ranks are the global batch of every setting (default: one for "
        "each CUDA device, 2 on CPUs)",
    )
    add_device(what)
    how = made.add_argument_group("how it is measured")
    how.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps of a run (default: 20)")
    how.add_argument("--warmup-steps", type=int, default=3, metavar="N", help="steps before these (default: 3)")
    how.add_argument(
        "--rounds", type=int, default=12, metavar="N", help="the most runs of a setting for one knob (default: 12)"
    )
    how.add_argument(
        "--margin", type=float, default=2.0, metavar="PERCENT", help="a smaller difference counts as none (default: 2)"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data order (default: 0)")
    how.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit of one run, which fails then (default: 600)",
    )
    out = made.add_argument_group("what comes out")
    out.add_argument(
        "--out", type=Path, default=Path("tuned.json"), metavar="FILE", help="file of the plan (default: ./tuned.json)"
    )
    out.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="the profile of guozhuang predict, from which settings are predicted, so that those that are far behind need no "
        "run: used if it is there, else written (default: one is measured where the runs that it may save take longer)",
    )
    out.add_argument("--fresh", action="store_true", help="tune also where FILE holds the plan of the same training")
    out.add_argument("--json", action="store_true", help="print the plan in place of the table")
    add_workload_arguments(made)
    return made
