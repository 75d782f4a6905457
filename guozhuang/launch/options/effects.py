"""Check that each option of ``guozhuang run`` can have its effect in this run, also those given as environment variables.

[Note: variables are options] What an option tells the ranks travels in an environment variable, so a user can set the variable
itself. A value that cannot work would then be noticed by each rank, late and in as many tracebacks. So the launcher takes the
variables for the options that were not given, and checks both in the same way.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.launch.job import Policy
from guozhuang.world.layout import AXES, HYBRID, OWN_AXIS, sizes_of
from guozhuang.world.requests import BIND, requested_servers

MOST_RANKS = 10_000  # of a node: more than any machine has cores, and fewer than its process ids
MOST_THREADS = 1_024  # of a rank


def _one_of(*words: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return check


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _switch(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


# By the name of the variable: the option's attribute, and what reads its text; a ValueError says what the text must be.
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "STRATEGY": ("strategy", str),
    "LAYOUT": ("layout", str),
    "MICROBATCHES": ("microbatches", _count),
    "SCHEDULE": ("schedule", str),
    "ATTENTION": ("attention", str),
    "BACKEND": ("backend", str),
    "GROUPS": ("groups", _count),
    "BUCKET_CAP_MB": ("bucket_cap_mb", _number),
    "AUDIT": ("audit", _count),
    "PROOF": ("no_proof", lambda text: not _switch(text)),
    "STOP_ON_NAN": ("stop_on_nan", _switch),
    "REPLACE_DDP": ("replace_ddp", _switch),
    "BIND": ("bind", lambda text: _one_of(*BIND)(text.lower())),
    "TIMELINE": ("timeline", str),
    "HANG_TIMEOUT": ("hang_timeout", str),
    "SLOW_RANK": ("slow_rank", _one_of("warn", "off")),
    "BATCH_BY": ("batch_by", _one_of("equal", "speed")),
    "CHECKPOINT": ("checkpoint", str),
    "CHECKPOINT_EVERY": ("every", str),
    "CHECKPOINT_KEEP": ("keep", _count),
}


def take_variables(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Take environment variables for the options that were not given. See [Note: variables are options].

    Their names are kept in ``found.of_variables``: a variable may be there for other runs, and need have no effect in this one.

    Raises:
        UsageError: a variable has a value that its option could not have; the text names it.
    """
    found.of_variables = set()
    requested_servers(environ)  # of servers that were started by hand
    for name, (option, read) in _VARIABLES.items():
        text = environ.get(f"GUOZHUANG_{name}", "").strip()
        if text and getattr(found, option, None) in (None, False):
            try:
                setattr(found, option, read(text))
                found.of_variables.add(option)
            except ValueError as error:
                what = f"environment variable GUOZHUANG_{name} must be {error}"
                raise UsageError(explain(what, value=text, fix="unset it, or give the option")) from None


def check(found: argparse.Namespace, num_local_ranks: int, most_nodes: int, is_torchruns: bool) -> None:
    """Raise for options that make no sense, or that have no effect with the others.

    Args:
        found: the options.
        num_local_ranks: number of ranks of this node.
        most_nodes: the greatest number of nodes.
        is_torchruns: whether torch elastic's agent starts the ranks.

    Raises:
        UsageError: the text names the option.
    """
    if num_local_ranks > MOST_RANKS:
        what = f"more ranks were asked for than a node can have, {MOST_RANKS:,}"
        raise UsageError(explain(what, value=num_local_ranks, fix="give -np about as many as the node has cores"))
    if found.threads_per_rank is not None and found.threads_per_rank > MOST_THREADS:
        what = f"--threads-per-rank is more than a process can use, {MOST_THREADS:,}"
        raise UsageError(explain(what, value=found.threads_per_rank, fix="give at most the cores of the node"))
    interval_s = found.monitor_interval
    if not 0 < interval_s < math.inf:
        what = "--monitor-interval is a number of seconds above 0"
        raise UsageError(explain(what, value=interval_s, fix="leave it out"))
    if found.layout is not None and not found.layout.strip(" ,"):
        fix = "write sizes by axis, such as pp=2,dp=auto, or leave it out"
        raise UsageError(explain("--layout names no axis", value=found.layout, fix=fix))
    if found.checkpoint is not None:
        _check_checkpoint(found.checkpoint)
    if found.audit is not None and found.audit < 1:
        what = "--audit is a number of optimizer steps, at least 1"
        raise UsageError(explain(what, value=found.audit, fix="give 1 or more"))
    if found.audit is not None and found.replace_ddp:
        what = (
            "--audit compares what gz.prepare has prepared, and under --replace-ddp the script wraps its model itself"
        )
        raise UsageError(explain(what, fix="leave it out, or call gz.prepare in the script"))
    for what, fix in _without_effect(found, num_local_ranks * most_nodes, is_torchruns):
        raise UsageError(explain(what, fix=fix))
    if found.strategy is None:
        return  # the script may name one
    _check_strategys_own(found)


# What acts by gz.init or gz.prepare, by the attribute of the command line.
_OF_WORLDS = (
    *("strategy", "layout", "microbatches", "schedule", "attention", "no_proof", "audit", "replace_ddp", "backend"),
    *("groups", "bucket_cap_mb", "batch_by", "servers", "timeline", "checkpoint", "hang_timeout", "slow_rank"),
    "stop_on_nan",
)


def _without_effect(found: argparse.Namespace, num_ranks: int, is_torchruns: bool) -> Iterator[tuple[str, str]]:
    """Yield options that were given and have no effect in this run: a sentence that says why, and the advice."""
    leave_out, given = "leave it out", vars(found).keys() - found.of_variables
    is_watched = found.hang_timeout is not None and "hang_timeout" in given
    is_watched = is_watched and found.hang_timeout.strip().lower() != "off"
    tells_slow = found.slow_rank == "warn" and "slow_rank" in given
    if num_ranks == 1:
        for is_asked, what in (
            (is_watched, f"--hang-timeout {found.hang_timeout} is about ranks that wait for each other"),
            (tells_slow, "--slow-rank warn compares ranks"),
            (found.batch_by == "speed" and "batch_by" in given, "--batch-by speed divides batches among ranks"),
        ):
            if is_asked:
                yield f"{what}, and this run has one", f"{leave_out}, or start more ranks"
    if tells_slow and found.hang_timeout is not None and found.hang_timeout.strip().lower() == "off":
        yield "--slow-rank warn reads the heartbeat, which --hang-timeout off switches off", "leave one of them out"
    if found.start_method != "spawn":
        yield f"--start-method {found.start_method} has no effect: each rank is a program of its own", leave_out
    if found.no_warm:
        is_cold = "by torch elastic's agent, in new interpreters" if is_torchruns else ""
        is_cold = is_cold or ("as programs" if found.no_python or found.run_path else "")
        if is_cold:
            yield f"--no-warm has no effect: ranks are started {is_cold}", leave_out
        elif not found.max_restarts:
            what = "--no-warm says how the agent of a node starts ranks again, and here it starts none again"
            yield what, "give --max-restarts N too, and with -H --on-failure keep-survivors"
    if found.on_failure == Policy.KEEP_SURVIVORS.value:
        for option in (each for each in _OF_WORLDS if each in given and getattr(found, each) not in (None, False, 0)):
            what = f"--{option.replace('_', '-')} acts on a world of gz.init, which takes no rank back"
            why = "--on-failure keep-survivors starts one rank again while the others go on"
            yield f"{what}, and {why}", "leave --on-failure out: all ranks are started again"


def _check_strategys_own(found: argparse.Namespace) -> None:
    from guozhuang import strategies  # imported only when needed
    from guozhuang.strategies.effects import check_axes, check_comparisons, check_servers, unmeasured

    chosen, axes = strategies.get(found.strategy), _axes(found)
    why = unmeasured(chosen, is_divided=bool(axes - {"dp"}))
    if why and found.slow_rank == "warn" and "slow_rank" not in found.of_variables:
        what = f"--slow-rank warn tells the own time of each rank in a step, and {why}"
        raise UsageError(explain(what, fix="leave it out"))
    where = f"strategy {chosen.name}" + (f" with the layout {found.layout}" if found.layout else "")
    check_axes(where, axes, attention=found.attention, microbatches=found.microbatches, schedule=found.schedule)
    is_divided = bool(axes - {"dp"}) and not chosen.divides_itself
    check_comparisons(chosen, is_divided, not found.no_proof, found.audit)
    check_servers(chosen, found.servers)


def _axes(found: argparse.Namespace) -> set[str]:
    """Return the axes along which there may be several ranks."""
    if found.strategy == HYBRID and found.layout is None:  # a script may give it its layout
        return set(AXES)
    named = {axis for axis, size in sizes_of(found.layout or "").items() if size != 1}
    return named | ({OWN_AXIS[found.strategy]} if found.strategy in OWN_AXIS else set())


def _check_checkpoint(path: str) -> None:
    fix = "give --checkpoint a folder, which need not exist yet"
    if not path.strip():
        raise UsageError(explain("--checkpoint names no folder", value=path, fix=fix))
    if os.path.lexists(path) and not os.path.isdir(path):
        raise UsageError(explain("--checkpoint names something that is no folder", value=path, fix=fix))
