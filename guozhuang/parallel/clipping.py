"""Norms of gradients where ranks hold parts: what PyTorch's own clipping computes of a divided model.

[Note: clipping by parts] A script clips all parameters, those of a part, or one after the other; and it may leave out those
without a gradient, which on each stage of a pipeline are those of all others. So a list of one stage's parameters stands on
that stage for themselves or for the whole model. On the other stages it is that list, or one of their own parameters, or
nothing: so all stages tell each other. A parameter that is given by itself, not in a list, stands for itself, and no other
stage takes part. Lists of one parameter each, another one on each stage, may be either, and are refused.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..errors import UsageError, explain
from ..world.devices import device_of
from .calls import tell_of_norm
from .division import checked_norm, division_of, norm_of, norm_of_parts, over_ranks, stages_of
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
    alone_or_list = _clipped(sys._getframe(1))
    clipped = [alone_or_list] if isinstance(alone_or_list, Tensor) else alone_or_list
    # What was left out here has gradients on other stages.
    if alone_or_list is not None and is_of_one_stage(alone_or_list, None if clipped else _idle(held)):
        return _norm_on_stage(clipped or (), norm_type, error_if_nonfinite)
    chosen = [p for p in held if p.grad is not None and id(p.grad) in wanted]
    divided = {id(p.grad): p for p in chosen}
    parameters = [divided.get(id(each), each) for each in given] or _without_gradients(clipped or (), held)
    if not chosen and (given or not parameters):
        return _torchs_total_norm(given, norm_type, error_if_nonfinite, foreach)
    if clipped is None and (group := _told_in(parameters)) is not None:
        tell_of_norm((), group, device_of(parameters))
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


def _clipped(frame: FrameType) -> Tensor | list[Tensor] | None:
    """Return what PyTorch's ``clip_grad_norm_`` was given, which tells us of gradients only; None: it does not call."""
    if frame.f_code.co_name != "clip_grad_norm_" or frame.f_globals.get("__name__") != clip_grad.__name__:
        return None
    known = frame.f_locals
    given = [each for each in known.get("parameters", ()) if isinstance(each, Tensor)]
    return given if "is_generator" in known or len(given) != 1 else given[0]  # which it asks of what is no tensor


def is_of_one_stage(given: Tensor | Sequence[Tensor], idle: Tensor | None = None) -> bool:
    """Tell whether a script that clips these parameters together means those of one stage of a pipeline.

    Args:
        given: what is clipped together, as the script gave it; see [Note: clipping by parts]. Every rank that holds a part of
            the model must call it, unless it is one parameter by itself.
        idle: any parameter of the pipeline, by which this stage takes part if all were left out here.

    Raises:
        MismatchError: other ranks have gone on to another call.
        UsageError: each stage gave a list of one parameter of its own.
    """
    is_alone = isinstance(given, Tensor)
    parameters = [given] if isinstance(given, Tensor) else list(given)
    known = parameters if parameters or idle is None else [idle]
    stages, group = stages_of(known), _told_in(known)
    owners = _owners(parameters, stages)
    only = next(iter(owners)) if len(owners) == 1 else ()
    if is_alone or group is None:
        return stages is not None and len(only) == 1
    is_of_another = stages is not None and len(only) == 1 and stages.rank() not in only
    num_given = len({id(each) for each in parameters}) if len(only) == 1 else 0
    here = 0 if stages is None else stages.rank()
    rows = tell_of_norm([int(is_of_another), num_given, here], group, device_of(known))
    if all((said, number) == (0, 1) for said, number, _ in rows) and len({stage for *_, stage in rows}) > 1:
        what = "each stage clips a list of one parameter, which may stand for the whole model or for itself"
        fix = "clip the whole model by gz.clip_grad_norm_(model.parameters(), ...), one parameter by clip_grad_norm_(p, ...)"
        raise UsageError(explain(what, rank=dist.get_rank(), fix=fix))
    return len(only) == 1 and any(said for said, *_ in rows)


def _owners(parameters: Sequence[Tensor], stages: dist.ProcessGroup | None) -> set[tuple[int, ...]]:
    """Return the stages that hold parameters, each once."""
    if stages is None:
        return set()
    everyone = tuple(range(stages.size()))
    found = [division_of(each) for each in parameters]
    return {everyone if each is None or each.stages is None else each.owners or everyone for each in found}


def _told_in(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """Return the ranks that tell each other of a norm; None: these parameters are not divided."""
    found = [division for each in parameters if (division := division_of(each)) is not None]
    of_pipeline = next((d.copy or d.stages for d in found if d.stages is not None), None)
    return of_pipeline or next((d.group for d in found if d.group is not None), None)


def norm_of_blocks(
    parameters: Sequence[Tensor],
    carriers: Sequence[Any],
    wanted: Sequence[set[int]],
    norm_type: float,
    *,
    given: Tensor | Sequence[Tensor],
) -> Tensor:
    """Return the norm over the averaged gradients of parameters that a sharded optimizer divides further.

    Args:
        parameters: those that are wanted, in the order of the carriers and their parameters.
        carriers: those of the sharded optimizers (``guozhuang.sharding.carrier``), which have collected the gradients.
        wanted: for each carrier, the indices of its parameters that are wanted.
        norm_type: the p of the p-norm.
        given: what the script clips together, as it gave it; other ranks may hold some.
    """
    is_of_stage = is_of_one_stage(given)
    found: list[Tensor] = []
    for carrier, only in zip(carriers, wanted, strict=True):
        powers = torch.zeros(len(carrier.parameters), dtype=torch.float64, device=carrier.parameters[0].device)
        for block, weight in zip(carrier.blocks, carrier.weights, strict=True):
            for piece in block.pieces if weight.grad is not None else ():
                start = piece.offset - block.start
                values = weight.grad.reshape(-1)[start : start + piece.end - piece.start]
                norm = torch.linalg.vector_norm(values, norm_type, dtype=torch.float64)
                place = powers[piece.parameter]
                place.copy_(torch.maximum(place, norm) if math.isinf(norm_type) else place + norm**norm_type)
        found.append(over_ranks(powers, carrier.group, norm_type)[sorted(only)])
    return norm_of_parts(parameters, torch.cat(found), norm_type, is_of_stage=is_of_stage)


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
