"""Check that each option of ``guozhuang run`` can have its effect in this run, also those given as environment variables.

[Note: variables are options] What an option tells the ranks travels in an environment variable, so a user can set the variable
itself. A value that cannot work would then be noticed by each rank, late and in as many tracebacks. So the launcher takes the
variables for the options that were not given, and checks both in the same way.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.world.layout import AXES, HYBRID, OWN_AXIS, sizes_of

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
    "PROOF": ("no_proof", lambda text: _one_of("0", "1")(text) == "0"),
    "HANG_TIMEOUT": ("hang_timeout", str),
    "SLOW_RANK": ("slow_rank", _one_of("warn", "off")),
    "BATCH_BY": ("batch_by", _one_of("equal", "speed")),
    "CHECKPOINT": ("checkpoint", str),
    "CHECKPOINT_EVERY": ("every", str),
    "CHECKPOINT_KEEP": ("keep", _count),
}


def take_variables(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Take environment variables for the options that were not given. See [Note: variables are options].

    Raises:
        UsageError: a variable has a value that its option could not have; the text names it.
    """
    for name, (option, read) in _VARIABLES.items():
        text = environ.get(f"GUOZHUANG_{name}", "").strip()
        if text and getattr(found, option, None) in (None, False):
            try:
                setattr(found, option, read(text))
            except ValueError as error:
                what = f"environment variable GUOZHUANG_{name} must be {error}"
                raise UsageError(explain(what, value=text, fix="unset it, or give the option")) from None


def check(found: argparse.Namespace, num_local_ranks: int) -> None:
    """Raise for options that make no sense, or that have no effect with the others.

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
    if found.strategy is None:
        return  # the script may name one
    _check_strategys_own(found)


def _check_strategys_own(found: argparse.Namespace) -> None:
    from guozhuang import strategies  # imported only when needed
    from guozhuang.strategies.effects import check_axes, check_comparisons
    from guozhuang.strategies.ways import Lazy

    chosen, axes = strategies.get(found.strategy), _axes(found)
    where = f"strategy {chosen.name}" + (f" with the layout {found.layout}" if found.layout else "")
    check_axes(where, axes, attention=found.attention, microbatches=found.microbatches, schedule=found.schedule)
    is_divided = bool(axes - {"dp"}) and not chosen.divides_itself
    check_comparisons(chosen, is_divided, not found.no_proof, found.audit)
    exchange, prepare = getattr(chosen.prepare, "exchange", None), chosen.prepare
    serves = isinstance(exchange, Lazy) and exchange.uses("exchange.parameter_server")
    is_ours = prepare.__module__.startswith("guozhuang.strategies.")  # of others it is not known
    if found.servers and is_ours and not serves:
        what = f"--servers starts parameter servers, and strategy {chosen.name} uses none"
        fix = "leave it out, or choose --strategy parameter-server or async-parameter-server"
        raise UsageError(explain(what, value=found.servers, fix=fix))


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
