"""What a difference from one process may come from, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...world.layout import Layout
from .compare import Deviation

_ELSE = "or choose ddp, sharded or space, or give --no-proof (prepare(..., proof=False)) if you know that it is meant"


class Explanation(NamedTuple):
    """The text of an error: what is wrong, and what to do."""

    what: str
    fix: str


def explained(
    difference: Deviation, part: str | None, layout: Layout, model: nn.Module | None, models: Collection[nn.Module]
) -> Explanation:
    """Return the words for a difference.

    Args:
        difference: what differs.
        part: the first module whose output differs; None if none is known.
        layout: of the run.
        model: whose forward it was; None: it was in a backward or before a step.
        models: all that are compared.
    """
    is_training = None if model is None else model.training
    kind, name, found = difference
    if kind == "generator":
        what = f"under layout {layout} the forward draws other random numbers than one process: {name}: {found}"
        fix = f"draw by torch (torch.rand_like, nn.Dropout) inside the model's parts, {_ELSE}"
    elif kind == "attribute":
        what = (
            f"under layout {layout} the model's forward leaves another attribute {name!r} than in one process: {found}"
        )
        fix = f"return it from forward, keep it in a buffer of a part, or change it outside of forward, {_ELSE}"
    elif kind in ("output", "buffer"):
        where = f"; the first part whose output differs is {part!r}" if part else ""
        when = "" if is_training is None or is_training else " in evaluation"
        subject = "the model's output" if kind == "output" else f"the buffer {name!r}"
        if kind == "output" and name:
            subject += f" number {name}"
        what = f"under layout {layout} {subject} is not that of one process{when}: {found}{where}"
        fix = cure(layout, model)
    elif kind == "loss":
        what = f"under layout {layout} the script's loss is not that of one process: {found}"
        fix = f"compute it from what the model returns; take whole parameters by gz.full_tensor(p), {_ELSE}"
    elif kind == "gradient":
        subject = f"the gradient of {name!r}" if name else "gradients"
        what = f"under layout {layout} {subject} is not that of one process: {found}"
        fix = f"call loss.backward() once on what the model returns, and clip by gz.clip_grad_norm_, {_ELSE}"
    else:
        what = f"under layout {layout} the script has made {name!r} another one before the step than in one process: {found}"
        fix = f"compute with gz.full_tensor(p), {_ELSE}"
    if kind in ("loss", "gradient"):  # a pipeline's own step returns no output, so that the loss is what differs first
        fix = next((cure(layout, each) for each in models if _norm_sees_parts(layout, each)), fix)
    return Explanation(what, fix)


def cure(layout: Layout, model: nn.Module | None) -> str:
    """Return what to do where a forward is not that of one process; ``model`` is the one whose forward it was."""
    is_training = None if model is None else model.training
    sees_parts = model is not None and _norm_sees_parts(layout, model)
    return f"{_of_layout(layout, is_training, sees_parts)}, {_ELSE}"


def _norm_sees_parts(layout: Layout, model: nn.Module) -> bool:
    return layout.pp > 1 and any(isinstance(each, _BatchNorm) and each.training for each in model.modules())


def _of_layout(layout: Layout, is_training: bool | None, sees_parts: bool) -> str:
    causes = []
    if sees_parts:
        causes.append(
            "BatchNorm takes the statistics of each microbatch: use GroupNorm or LayerNorm, freeze it by eval(), or give "
            "--microbatches 1"
        )
    elif layout.pp > 1:
        causes.append(
            "a pipeline cuts the batch along dim 0: let rows not depend on each other (statistics of the batch by hand, "
            "attention between samples, states kept in attributes), and let samples come first"
        )
    if layout.tp > 1:
        causes.append(
            "tensor parallelism divides features: let nothing between two divided layers look at all of them, or leave the "
            "layers out by plan="
        )
    if is_training is False:
        causes.append("let evaluation take the way that training takes")
    return "; ".join(causes) or "let the model compute from its inputs alone"
