"""The parser of ``guozhuang check``. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse

from guozhuang.launch.options.arguments import add_host_arguments

DEFAULT_TIMEOUT_S = 20.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``guozhuang check``; its options for several hosts are those of ``guozhuang run``."""
    made = argparse.ArgumentParser(
        prog="guozhuang check",
        description="Measure the links between ranks, compare their hosts, and say what is wrong. Starts ranks on this node, "
        "or over -H; or takes part where a launcher has started it: `srun guozhuang check`, `torchrun -m guozhuang check`.",
        epilog="Exit code: 0 nothing that breaks training; 1 something that does; 2 the command line cannot work.",
    )
    made.add_argument(
        "-np", type=int, metavar="N", help="Ranks: on this node (default: one per CUDA device, else 2), or of all -H."
    )
    made.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"Limit in seconds of each step: meeting, links, all_reduce (default: {DEFAULT_TIMEOUT_S:g}).",
    )
    made.add_argument("--json", action="store_true", help="Print one JSON document instead of tables.")
    add_host_arguments(made.add_argument_group("several hosts, over ssh"))
    return made
