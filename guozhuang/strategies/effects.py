"""Options that would have no effect with a strategy and a layout: refused by the launcher, and where a script names these."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..errors import UsageError, explain
from ..world.requests import requested_servers, requested_strategy
from .table import Strategy
from .ways import Lazy

_log = logging.getLogger("guozhuang")
# By option: the axis that it is about, in words what it is about, and what has it.
_OF_AXES = {
    "--attention": ("sequence", "divided sequences", "--strategy sequence or a --layout with sequence"),
    "--microbatches": ("pp", "the stages of a pipeline", "--strategy pipeline or a --layout with pp"),
    "--schedule": ("pp", "the stages of a pipeline", "--strategy pipeline or a --layout with pp"),
}


def check_axes(
    where: str, axes: Collection[str], *, attention: str | None, microbatches: int | None, schedule: str | None
) -> None:
    """Raise where an option about an axis would have no effect.

    Args:
        where: what has, or may have, these axes: words for the error.
        axes: those along which there are, or may be, several ranks.
        attention, microbatches, schedule: as the options give them; None: not given.

    Raises:
        UsageError: the text names the option.
    """
    given = {"--attention": attention, "--microbatches": microbatches, "--schedule": schedule}
    for option, value in given.items():
        axis, about, what_has_it = _OF_AXES[option]
        if value is not None and axis not in axes:
            what = f"{option} {value} is about {about}, and {where} has none"
            raise UsageError(explain(what, fix=f"leave it out, or choose {what_has_it}"))


def check_comparisons(chosen: Strategy, is_divided: bool, is_proved: bool, audit_every: int | None) -> None:
    """Raise where an option about comparisons with one process would have no effect.

    Args:
        chosen: the strategy.
        is_divided: whether it, or the layout, divides the model, in a way of this package.
        is_proved: False with ``--no-proof``.
        audit_every: N of ``--audit N``; None: not given.

    Raises:
        UsageError: the text names the option.
    """
    if not is_proved and not is_divided:
        what = f"--no-proof is about models that are divided, and strategy {chosen.name} divides none here"
        raise UsageError(explain(what, fix="leave it out (or unset GUOZHUANG_PROOF), or choose pipeline or tensor"))
    if audit_every is None:
        return
    if not is_proved:
        what = f"--audit {audit_every} repeats the comparison that --no-proof leaves out"
        raise UsageError(explain(what, fix="leave one of them out"))
    if is_divided:
        return
    fix = "audit the script under ddp, where it is the same, or leave --audit out"
    if chosen.one_process:
        why = f"strategy {chosen.name} is one process"
    elif not chosen.trains:
        why = f"under strategy {chosen.name} each rank trains a model of its own"
    elif chosen.divides_itself:
        why = f"strategy {chosen.name} divides the model by PyTorch's own means"
    elif not chosen.exact:
        why = f"strategy {chosen.name} ({chosen.summary}) differs from one process on purpose"
    else:
        return
    what = f"--audit {audit_every} compares gradients with those of one process, and {why}"
    raise UsageError(explain(what, fix=fix))


def check_servers(chosen: Strategy, count: int | None) -> None:
    """Raise where parameter servers were started that a strategy does not use.

    Args:
        chosen: the strategy.
        count: K of ``--servers K``; None: not given.

    Raises:
        UsageError: the text names the option.
    """
    exchange, prepare = getattr(chosen.prepare, "exchange", None), chosen.prepare
    serves = isinstance(exchange, Lazy) and exchange.uses("exchange.parameter_server")
    is_ours = prepare.__module__.startswith("guozhuang.strategies.")  # of others it is not known
    if count and is_ours and not serves:
        what = f"--servers starts parameter servers, and strategy {chosen.name} uses none"
        fix = "leave it out, or choose --strategy parameter-server or async-parameter-server"
        raise UsageError(explain(what, value=count, fix=fix))


def check_own(chosen: Strategy, named: str | None, rank: int) -> None:
    """Raise, or say, where options of the launcher have no effect because of the strategy that a script has chosen.

    Args:
        chosen: the strategy.
        named: as the script names it; None: it takes that of the launcher, or the default.
        rank: of this process.

    Raises:
        UsageError: parameter servers were started that the strategy does not use.
    """
    check_servers(chosen, (requested_servers() or (None,))[0])
    asked = requested_strategy()
    if named is not None and asked not in (None, chosen.name) and rank == 0:
        # It is no error: the option may be for another model of the script.
        what = f"--strategy {asked} has no effect on a model that the script prepares with strategy {chosen.name}"
        _log.warning("%s", explain(what, fix="leave one of them out"))


# Strategies under which no rank waits for another one in each step.
_NOBODY_WAITS = ("async-parameter-server", "async-model-average")


def unmeasured(chosen: Strategy, is_divided: bool) -> str:
    """Return why the own time of ranks is not measured under a strategy, a clause; "" if it is.

    Args:
        chosen: the strategy.
        is_divided: whether it, or the layout, divides the model, so that ranks do different work.
    """
    if chosen.one_process:
        return f"strategy {chosen.name} is one process"
    if not chosen.trains:
        return f"under strategy {chosen.name} each rank trains a model of its own"
    if is_divided or chosen.divides_itself:
        return "ranks of a divided model do different work"
    return f"under strategy {chosen.name} no rank waits for another" if chosen.name in _NOBODY_WAITS else ""
