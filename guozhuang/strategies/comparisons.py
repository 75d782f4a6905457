"""Whether a training can be compared with one process, where ``--audit`` asks for it or ``--no-proof`` forbids it."""

from __future__ import annotations

from ..errors import UsageError, explain
from .table import Strategy


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
