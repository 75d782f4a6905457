"""Norms of gradients where ranks hold parts: what PyTorch's own clipping computes of a divided model."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..errors import UsageError, explain
from .division import checked_norm, division_of, is_of_one_stage, norm_of
from .guard import unreadable

_divided_models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


def watch_norms(model: nn.Module) -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` clip by the norm of whole gradients, as the script's own line asks for.

    PyTorch's function looks this one up when it is called, so it is replaced for all who have imported that function before.
    ``get_total_norm`` is the one itself under its public name.
    """
    _divided_models[model] = None
    clip_grad._get_total_norm = nn.utils.get_total_norm = _total_norm


def _total_norm(
    tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """Do what PyTorch's does, for whole gradients where ranks hold parts. See [Note: divided parameters] in division.py."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    wanted = {id(each) for each in given}
    held = _divided_parameters()
    clipped = _clipped(sys._getframe(1))
    # What was left out here has gradients on other stages.
    if clipped is not None and is_of_one_stage(clipped, None if clipped else _idle(held)):
        return _norm_on_stage(clipped, norm_type, error_if_nonfinite)
    chosen = [p for p in held if p.grad is not None and id(p.grad) in wanted]
    divided = {id(p.grad): p for p in chosen}
    parameters = [divided.get(id(each), each) for each in given] or _without_gradients(clipped or (), held)
    if not chosen and (given or not parameters):
        return _torchs_total_norm(given, norm_type, error_if_nonfinite, foreach)
    total = norm_of(parameters, given or [None] * len(parameters), float(norm_type))
    total = checked_norm(total, norm_type, error_if_nonfinite)
    known = given or clipped or ()
    return total.to(known[0].dtype.to_real() if known else torch.get_default_dtype())


def _norm_on_stage(clipped: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Return the norm of the gradients of parameters of one stage; on other stages something that nobody can read."""
    total = norm_of(clipped, [p.grad for p in clipped], float(norm_type), is_of_stage=True).to(clipped[0].dtype)
    division = division_of(clipped[0])
    if division is not None and not division.is_owned:
        return unreadable(clipped[0])
    return checked_norm(total, norm_type, error_if_nonfinite)


def _divided_parameters() -> list[nn.Parameter]:
    return [p for model in list(_divided_models) for p in model.parameters() if division_of(p) is not None]


def _clipped(frame: FrameType) -> list[Tensor] | None:
    """Return the parameters that PyTorch's ``clip_grad_norm_`` was given, which tells us of gradients only; else None."""
    if frame.f_code.co_name != "clip_grad_norm_" or frame.f_globals.get("__name__") != clip_grad.__name__:
        return None
    return [each for each in frame.f_locals.get("parameters", ()) if isinstance(each, Tensor)]


def _without_gradients(clipped: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters by which this rank takes part in a norm of which it has no gradients; none, if it does not."""
    if any(division_of(each) is not None for each in clipped):
        return list(clipped)
    idle = _idle(held)
    return [] if idle is None else [idle]


def _idle(held: Sequence[Tensor]) -> Tensor | None:
    """Return a parameter by which a stage that holds none of the gradients takes part for the others; None without a pipeline.

    Models of one layout share their groups, so it may be of another model.
    """
    among = {d.stages: p for p in held if (d := division_of(p)) is not None and d.stages is not None}
    if len(among) > 1:
        what = "this stage holds none of the gradients that are clipped, and models of several layouts could be meant"
        fix = "give all models that are alive at once one layout"
        raise UsageError(explain(what, value=f"{len(among)} pipelines of different ranks", fix=fix))
    return next(iter(among.values()), None)


_torchs_total_norm = clip_grad._get_total_norm
