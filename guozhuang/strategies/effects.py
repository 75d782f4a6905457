"""Options that would have no effect with a strategy and a layout: refused by the launcher, and where a script names these."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import UsageError, explain
from .table import Strategy

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
