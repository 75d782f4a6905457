"""The parser of ``guozhuang plan``. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from guozhuang.workloads.arguments import add_arguments as add_workload_arguments

#: Hours until one device fails, on average: a training on 1,024 of them was interrupted every 7.9 hours.
DEFAULT_DEVICE_HOURS = 7.9 * 1024
DEFAULT_CHECKPOINT_S, DEFAULT_RESTART_S = 30.0, 300.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``guozhuang plan``."""
    made = argparse.ArgumentParser(
        prog="guozhuang plan",
        description="Find the way to train that is fastest within memory and money, before anything is started: all layouts "
        "are enumerated, and it is said why the others lost. With a script, one rank of a large world runs for real, and "
        "nothing else is started.",
        conflict_handler="resolve",  # --model is also a workload's, and ours replaces that
    )
    what = made.add_argument_group("what is trained")
    what.add_argument(
        "--workload", metavar="NAME", help="text, synthetic, or module:function, which is profiled in one process"
    )
    what.add_argument("--profile", metavar="FILE", help="a profile that `guozhuang predict --profile FILE` has kept")
    what.add_argument("--batch", action="append", metavar="B", help="samples of a step, on all ranks together")
    what.add_argument(
        "--noise-batch", type=float, metavar="B", help="the critical batch: then batches up to twice as large are tried"
    )
    what.add_argument("--samples", action="append", metavar="N", help="of the whole training (of each phase): 461M")
    what.add_argument("--tokens", action="append", metavar="N", help="in place of --samples: 300B")
    what.add_argument(
        "--rate",
        action="append",
        metavar="R[@DEVICE]",
        help="samples/s that one device was measured to reach with this model (in each phase), as in 580@A100-80; "
        "it calibrates the prediction",
    )
    what.add_argument(
        "--measured-peak",
        action="append",
        metavar="SIZE@B",
        help="peak of the memory that one process was measured to reach with micro-batches of B samples, as in 31GiB@16; it "
        "corrects the formula",
    )
    what.add_argument(
        "--precision",
        choices=("autocast", "fp32"),
        default="autocast",
        help="of products: 16 bits under torch.autocast, or 32; weights have 32 (default: autocast)",
    )
    what.add_argument("--flash", action="store_true", help="attention keeps no scores, as FlashAttention does")
    where = made.add_argument_group("where")
    where.add_argument(
        "--on",
        action="append",
        metavar="CLUSTER",
        help="such as 4x8xA100-80,ib=200gbit; 2x4cores,10gbit; here; may be given several times",
    )
    where.add_argument("--ranks", metavar="N,...", help="how many ranks are tried (default: all; with rent, fewer too)")
    where.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="memory of a rank, 40GiB (default: its device's, or its part of the node's)",
    )
    where.add_argument("--mtbf", type=float, default=DEFAULT_DEVICE_HOURS, metavar="HOURS",
                       help=f"between failures of one device (default: {DEFAULT_DEVICE_HOURS:.0f})")  # fmt: skip
    where.add_argument("--checkpoint-time", type=float, default=DEFAULT_CHECKPOINT_S, metavar="S",
                       help=f"for which a checkpoint stops the training (default: {DEFAULT_CHECKPOINT_S:g})")  # fmt: skip
    where.add_argument("--restart-time", type=float, default=DEFAULT_RESTART_S, metavar="S",
                       help=f"from a failure to the next step (default: {DEFAULT_RESTART_S:g})")  # fmt: skip
    money = made.add_argument_group("money")
    money.add_argument("--budget", metavar="AMOUNT", help="that may be spent, with its currency: 1000000CNY, 5000USD")
    money.add_argument("--prices", metavar="FILE", help="TOML or CSV with a date: rents, parts to buy (docs/plan.md)")
    out = made.add_argument_group("what comes out")
    out.add_argument(
        "--out", type=Path, metavar="FILE", help="write the plan, for `guozhuang run --plan FILE train.py`"
    )
    out.add_argument("--json", action="store_true", help="print one JSON document in place of the tables")
    out.add_argument("--top", type=int, default=8, metavar="N", help="layouts that are shown (default: 8)")
    fake = made.add_argument_group("one rank of a large world, for real")
    fake.add_argument("--strategy", metavar="NAME", help="of the script's run, as for `guozhuang run`")
    fake.add_argument("--layout", metavar="AXES", help="of the script's run, as for `guozhuang run`")
    fake.add_argument("--rank", metavar="R", default="0", help="the rank that runs the script (default: 0)")
    add_workload_arguments(made)
    what.add_argument(
        "--model",
        action="append",
        metavar="NAME|SHAPE",
        help="a transformer: bert-large, gpt3-175b, ..., L24,h1024,a16,s512,V30522, or a name with what differs, "
        "bert-large,s128; may be given several times, for phases of one training. With --workload: the workload's model",
    )
    made.add_argument("training_script", nargs="?", help="a script of which one rank runs; its arguments follow")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made
