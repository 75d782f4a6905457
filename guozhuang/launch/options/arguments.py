"""The parser of ``guozhuang run``: torchrun's options, and our own. Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.launch.job import Policy
from guozhuang.launch.options import script
from guozhuang.launch.options import torchrun as torchrun_options
from guozhuang.launch.options.plan_file import apply_plan

DEFAULT_START_TIMEOUT_S = 60.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of torchrun with the options that ``guozhuang run`` adds."""
    found = torchrun_options.parser(os.environ)
    found.prog = "guozhuang run"
    found.description = (
        "Start the ranks of a training script on this node. Takes all of torchrun's options. On one node no "
        "rendezvous option is needed, and two runs never meet by accident."
    )
    ours = found.add_argument_group("guozhuang")
    add = functools.partial(_add, ours)
    add("-np", dest="num_ranks", metavar="N", help="How many ranks: of this node, or with -H of all hosts together.")
    add("--plan", metavar="FILE", help="Start the ranks as a plan says that `guozhuang plan --out FILE` wrote.")
    add(
        "--strategy",
        metavar="NAME",
        help="How gz.prepare spreads the training; see the README. auto: raced in the first minute.",
    )
    add(
        "--layout",
        metavar="AXES",
        help="How ranks divide the model and the batch under gz.prepare, as in pp=2,tp=2,dp=auto; axes: pp (layers), tp "
        "(matrices), space, sequence, dp (batch).",
    )
    add("--microbatches", type=int, metavar="M", help="Into how many parts a pipeline cuts a batch (default: chosen).")
    add("--schedule", metavar="NAME", help="Order of a pipeline: gpipe, 1f1b, interleaved, zero-bubble; see the docs.")
    add("--attention", metavar="WAY", help="How sequences are divided in attention: auto, ulysses (by heads), ring.")
    add(
        "--no-proof",
        action="store_true",
        help="Do not compare the first batches of a divided model (pipeline, tensor, space, sequence) with one process.",
    )
    add(
        "--audit",
        type=int,
        metavar="N",
        help="Compare the gradients of every N-th step with those of one process on the batches of all ranks, under every "
        "exact strategy; end the run where they differ. See the docs.",
    )
    add(
        "--replace-ddp",
        action="store_true",
        help="For scripts that use PyTorch alone: its DistributedDataParallel is ours, and gloo on one node is shm.",
    )
    add("--backend", metavar="NAME", help="What carries collectives, where the script leaves it to gz.init.")
    add(
        "--groups",
        type=int,
        metavar="K",
        help="Process groups that take buckets in turn under gz.prepare (default: 1).",
    )
    add(
        "--bucket-cap-mb",
        type=float,
        metavar="MIB",
        help="Cap of a bucket of gradients, in MiB, for strategies under which gz.prepare wraps the model in "
        "DistributedDataParallel (default: 25).",
    )
    add(
        "--batch-by",
        choices=["equal", "speed"],
        metavar="WHAT",
        help="How ranks divide a batch of gz.loader: equal (the default), or speed, so that each gets samples in proportion to "
        "its measured speed.",
    )
    add(
        "--threads-per-rank",
        type=int,
        metavar="N",
        help="Threads that each rank computes with (default: OMP_NUM_THREADS if it is set, else the node's cores divided by "
        "its ranks).",
    )
    add(
        "--bind",
        choices=["auto", "cores", "numa", "off"],
        metavar="WHAT",
        help="What ranks that compute on CPUs are bound to: cores of their own, numa (the NUMA nodes of these), off, or auto "
        "(the default: numa where there are several nodes, else off).",
    )
    add(
        "--servers",
        type=int,
        metavar="K",
        help="Parameter servers to start beside the ranks of this node, for the exchange ParameterServer (default: 0). With -H "
        "they are spread over its hosts.",
    )
    add(
        "--server-hosts",
        action="append",
        metavar="H:N,...",
        help="With -H: start N parameter servers on each of these hosts instead, which get no ranks (default N: 1).",
    )
    add("--timeline", metavar="FILE", help="Write what every rank did, as a Chrome trace for Perfetto.")
    add(
        "--checkpoint",
        metavar="DIR",
        help="Save checkpoints into DIR, and go on from the newest one there; the script loops over gz.epochs(n).",
    )
    add("--every", metavar="WHEN", help="How often a checkpoint is saved: 500steps, 30s, 5min, 2h (default: 5min).")
    add("--keep", type=int, metavar="K", help="How many checkpoints stay in DIR (default: 3).")
    add(
        "--hang-timeout",
        metavar="S",
        help="End the run, with the Python stacks of all ranks, when a rank has not moved for S seconds; off: do not watch "
        "the ranks at all.",
    )
    add(
        "--slow-rank",
        choices=["warn", "off"],
        help="warn: log a table of the own time of all ranks at the end, besides the line that names a slow rank as soon as it "
        "is known; off: do not measure.",
    )
    add(
        "--stop-on-nan",
        action="store_true",
        help="End the run when a gradient of a rank becomes NaN. Without it, that is said once.",
    )
    add(
        "--pass-local-rank",
        choices=["local-rank", "local_rank"],
        help="Pass --local-rank=N (or --local_rank=N) to the script, as torch.distributed.launch did.",
    )
    add(
        "--use-env",
        dest="by_variables",  # not `use_env`: torch reads an attribute of that name, and would pass --local-rank if it is false
        action="store_true",
        help="Tell the script its rank by variables only. That is the default; accepted from torch.distributed.launch.",
    )
    add(
        "--copy-output",
        metavar="FOLDER",
        help="Write what each rank prints into FOLDER/rank.N/stdout and stderr too, on the rank's host.",
    )
    add(
        "--on-failure",
        choices=[policy.value for policy in Policy],
        default=Policy.RESTART_ALL.value,
        help="What --max-restarts starts again: all ranks, or only the one that failed while the others go on.",
    )
    add(
        "--no-warm",
        action="store_true",
        help="Start ranks again in a new interpreter, not as forks of a process that has imported torch.",
    )
    add("--timestamps", action="store_true", help="Put the time before each line that ranks print.")
    add_host_arguments(ours)
    found.set_defaults(planned_nodes=None)
    for name in ("nproc_per_node", "master_addr"):
        if f"PET_{name.upper()}" not in os.environ:
            found.set_defaults(**{name: None})
    return found


def read(
    arguments: Sequence[str], prepare: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None
) -> argparse.Namespace:
    """Parse the command line after ``guozhuang run``; options that are not given take their values from PET_ variables.

    Args:
        arguments: the words after ``guozhuang run``.
        prepare: called with the parser before it is used; it returns the parser.

    Raises:
        UsageError: an option or a PET_ variable has a value that cannot work, options exclude each other, or the plan that
            is named cannot be read or is contradicted.
        SystemExit: an unknown option, or no script; the parser has printed the error.
    """
    made = parser()
    found = script.read(made if prepare is None else prepare(made), arguments)
    if found.plan is not None:
        apply_plan(found, os.environ)
    if found.num_ranks is not None:
        if found.nproc_per_node not in (None, os.environ.get("PET_NPROC_PER_NODE")):
            what = "-np counts the ranks of all hosts, --nproc-per-node those of each: they exclude each other"
            raise UsageError(explain(what, fix="leave one out"))
        found.nproc_per_node = None
    if found.servers is not None and found.servers < 0:
        what = "--servers is a count of parameter servers, at least 0"
        raise UsageError(explain(what, value=found.servers, fix="give 0 or more"))
    return found


def add_host_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options for several hosts."""
    add = functools.partial(_add, parser)
    add(
        "-H",
        dest="hosts",
        action="append",
        metavar="H:N,...",
        help="Start N ranks on each host, over ssh (default N: 1).",
    )
    add(
        "--hostfile",
        metavar="FILE",
        help="Hosts from a file: lines like 'host slots=2' or 'host:2'; # begins a comment.",
    )
    add(
        "-x",
        dest="exported",
        action="append",
        metavar="NAME[=VALUE]",
        help="Give every host this environment variable.",
    )
    add("--ssh-port", type=int, metavar="PORT", help="Port of ssh on the hosts.")
    add("--ssh-identity", metavar="FILE", help="Private key for ssh.")
    add("--ssh-config", metavar="FILE", help="Configuration file for ssh, instead of ~/.ssh/config.")
    add(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help=f"How long hosts may take to be reached, and again to be ready (default: {DEFAULT_START_TIMEOUT_S:g}).",
    )
    add(
        "--interface",
        metavar="NAME",
        help="Network interface for gloo and NCCL, and with -H for the meeting point (default: the one that leads to the "
        "master).",
    )


def _add(parser: argparse._ActionsContainer, *names: str, **more: Any) -> None:
    """Add an option; as torchrun's options do, it has its name with underscores too."""
    underscored = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    parser.add_argument(*names, *underscored, **more)
