"""The options of ``guozhuang run``: torchrun's own, and a few more; what is left open is filled in here."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain


@dataclass(frozen=True)
class Plan:
    """What is to be started.

    Attributes:
        elastic: the options as ``torch.distributed.run.run`` takes them.
        num_local_ranks: how many ranks this node gets.
        variables: what the ranks find in their environment besides what torch elastic puts there.
        timeline: where the timeline of all ranks goes; None without one.
        chosen: what the user left open and how it was decided, for the log.
    """

    elastic: argparse.Namespace
    num_local_ranks: int
    variables: Mapping[str, str]
    timeline: str | None
    chosen: Sequence[str]


def parser() -> argparse.ArgumentParser:
    """The parser of torchrun with the options that ``guozhuang run`` adds."""
    from torch.distributed.run import get_args_parser

    found = get_args_parser()
    found.prog = "guozhuang run"
    found.description = (
        "Start the ranks of a training script on this node. Takes all of torchrun's options. On one node no "
        "rendezvous option is needed, and two runs never meet by accident."
    )
    ours = found.add_argument_group("guozhuang")
    ours.add_argument("-np", dest="nproc_per_node", type=str, metavar="N", help="Short for --nproc-per-node.")
    ours.add_argument("--strategy", metavar="NAME", help="How gz.prepare spreads the training; see the README.")
    ours.add_argument(
        "--backend", metavar="NAME", help="What carries collectives, where the script leaves it to gz.init."
    )
    ours.add_argument(
        "--groups",
        type=int,
        metavar="K",
        help="Process groups that take buckets in turn under gz.prepare (default: 1).",
    )
    ours.add_argument("--timeline", metavar="FILE", help="Write what every rank did, as a Chrome trace for Perfetto.")
    if "PET_NPROC_PER_NODE" not in os.environ:
        found.set_defaults(nproc_per_node=None)
    return found


def plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read the command line; check what can be checked before anything is started.

    Raises:
        UsageError: a script that is not there, a strategy or backend that is unknown, a strategy that cannot run on so
            many ranks or groups, or a number of ranks or groups that makes no sense.
    """
    found = parser().parse_args(list(arguments))
    chosen: list[str] = []
    _check_script(found)
    if found.nproc_per_node is None:
        found.nproc_per_node, why = _default_ranks()
        chosen.append(f"{found.nproc_per_node} ranks per node ({why})")
    num_local_ranks = _num_local_ranks(found.nproc_per_node)
    found.nproc_per_node = str(num_local_ranks)
    if _stands_alone(found):
        found.standalone = True
        # Torch would use the host name, which need not resolve; nobody else has to reach this node.
        found.local_addr = found.local_addr or "localhost"
    variables = {}
    if "OMP_NUM_THREADS" not in environ:
        num_threads = max(1, _num_cores() // num_local_ranks)
        variables["OMP_NUM_THREADS"] = str(num_threads)
        chosen.append(f"OMP_NUM_THREADS={num_threads} ({_num_cores()} cores / {num_local_ranks} ranks)")
    if found.strategy is not None:
        _check_strategy(found.strategy, num_local_ranks, found.nnodes)
        variables["GUOZHUANG_STRATEGY"] = found.strategy
    if found.backend is not None:
        _check_backend(found.backend)
        variables["GUOZHUANG_BACKEND"] = found.backend
    if found.groups is not None:
        _check_groups(found.groups, found.strategy)
        variables["GUOZHUANG_GROUPS"] = str(found.groups)
    timeline = None
    if found.timeline is not None:
        timeline = os.path.abspath(found.timeline)
        if not os.path.isdir(os.path.dirname(timeline)) or os.path.isdir(timeline):
            what = "the timeline cannot be written: its folder does not exist, or the name is a folder"
            raise UsageError(explain(what, value=found.timeline, fix="give --timeline the path of a file"))
        variables["GUOZHUANG_TIMELINE"] = timeline
    return Plan(found, num_local_ranks, variables, timeline, chosen)


def _check_script(found: argparse.Namespace) -> None:
    script = found.training_script
    if found.module and found.no_python:
        raise UsageError(explain("-m and --no-python exclude each other", fix="leave one out"))
    if found.no_python:
        if shutil.which(script) is None:
            fix = "check the path, and that the file may be executed"
            raise UsageError(explain("there is no such program", value=script, fix=fix))
    elif not found.module and not os.path.exists(script):
        fix = "check the path; options of `guozhuang run` stand before the script, the script's own after it"
        raise UsageError(explain("there is no such script", value=script, fix=fix))


def _default_ranks() -> tuple[str, str]:
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.device_count()), "one per CUDA device"
    return "1", "no CUDA device; -np N starts more"


def _num_local_ranks(text: str) -> int:
    from torch.distributed.run import determine_local_world_size

    fix = "give a number of ranks, or one of cpu, gpu, auto"
    try:
        number = int(determine_local_world_size(text))
    except ValueError as error:
        raise UsageError(explain(f"--nproc-per-node cannot be used: {error}", value=text, fix=fix)) from error
    if number < 1:
        raise UsageError(explain("--nproc-per-node must be at least 1", value=text, fix=fix))
    return number


def _stands_alone(found: argparse.Namespace) -> bool:
    """One node, and nothing said about where ranks meet."""
    untouched = parser().parse_args(["script"])
    said = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank")
    is_untouched = all(getattr(found, name) == getattr(untouched, name) for name in said)
    return bool(found.standalone or (found.nnodes in ("1", "1:1") and is_untouched))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_strategy(name: str, num_local_ranks: int, nnodes: str) -> None:
    from guozhuang import strategies

    strategy = strategies.get(name)
    if strategy.one_process and (num_local_ranks > 1 or nnodes not in ("1", "1:1")):
        what = f"strategy {name!r} runs in one process, but more than one rank was asked for"
        raise UsageError(explain(what, value=f"{num_local_ranks} per node, {nnodes} nodes", fix="give -np 1"))


def _check_backend(name: str) -> None:
    from guozhuang.world.devices import served_types

    served_types(name)


def _check_groups(number: int, strategy: str | None) -> None:
    from guozhuang import strategies

    if number < 1:
        raise UsageError(
            explain("--groups is a count of process groups, at least 1", value=number, fix="give 1 or more")
        )
    strategies.check_groups(strategies.get(strategy or strategies.DEFAULT), number)
