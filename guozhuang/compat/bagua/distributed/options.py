"""What the three launchers share: Bagua's own options, and the call of ``guozhuang run``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from guozhuang import compat
from guozhuang.compat.fronts import ended
from guozhuang.errors import UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.console.say import say
from guozhuang.launch.request import Request

# These, with their defaults, tell Bagua's search for the size of buckets what to do.
_SEARCH: dict[str, tuple[Callable[[str], Any], Any]] = {
    "bagua_service_port": (int, None),
    "autotune_level": (int, 0),
    "autotune_max_samples": (int, 60),
    "autotune_sampling_confidence_time": (float, 5.0),
    "autotune_warmup_time": (float, 30.0),
}
_NO_SEARCH = "buckets are not searched for; BAGUA_DEFAULT_BUCKET_SIZE is taken, and no port is opened"
_ONE_NODE = (
    "--host_list and --ssh_port are options of baguarun; bagua.distributed.launch starts the ranks of this node only"
)
_COPY = "node_{GROUP_RANK}_local_rank_{LOCAL_RANK}_"  # before stdout and stderr in the folder of --logdir
_NO_NET = "Bagua-Net is a plug-in of NCCL and is not used"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add Bagua's own options to a parser."""
    for name, (kind, default) in _SEARCH.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    for name in ("is_output_autotune_log", "report_metrics"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--default_bucket_size", type=int, help="bytes of a bucket (default: 10485760)")
    parser.add_argument("--enable_bagua_net", action="store_true", help=_NO_NET)


def launch(
    words_for: Callable[[Sequence[str]], tuple[list[str], argparse.Namespace]], argv: Sequence[str] | None
) -> int:
    """Translate a command line, and run it.

    Args:
        words_for: returns the command line of ``guozhuang run``, and the parsed options.
        argv: the command line; None: that of this process.

    Returns:
        0 if every rank ended with 0; the code of the rank that failed first, 128 + its number for a signal; 1 if nodes
        did not meet; 2 for options that cannot work.
    """
    return ended(lambda: _launch(*words_for(sys.argv[1:] if argv is None else argv)))


def _launch(words: list[str], found: argparse.Namespace) -> int:
    variables = {"PYTHONUNBUFFERED": "1"}
    if found.default_bucket_size is not None:
        if found.default_bucket_size < 1:
            raise UsageError(explain("--default_bucket_size is a number of bytes", value=found.default_bucket_size))
        variables["BAGUA_DEFAULT_BUCKET_SIZE"] = str(found.default_bucket_size)
    for note in _notes(found):
        say(note)
    extension = dataclasses.replace(compat.extension(), rank_variables={"NODE_RANK": "{cross_rank}"})
    return agent.main(words, Request(extension, variables=variables, copy_prefix=_COPY))


def _notes(found: argparse.Namespace) -> list[str]:
    searches = any(getattr(found, name) != default for name, (_, default) in _SEARCH.items())
    searches = (
        searches
        or found.report_metrics
        or found.is_output_autotune_log
        or os.environ.get("BAGUA_AUTOTUNE", "0") not in ("", "0")
    )
    # Of the two options of baguarun, the launcher of one node has no use.
    here_only = _launches_one_node(found) and (found.host_list or found.ssh_port)
    notes = ((_NO_SEARCH, searches), (_NO_NET, found.enable_bagua_net), (_ONE_NODE, here_only))
    return [note for note, holds in notes if holds]


def _launches_one_node(found: argparse.Namespace) -> bool:
    return hasattr(found, "set_additional_flag")
