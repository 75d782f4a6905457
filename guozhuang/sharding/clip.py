"""``clip_grad_norm_`` for every strategy: clips by the norm of the whole gradient, also if ranks hold parts of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError, explain
from ..parallel.division import checked_norm
from ..weights.points import points_of
from .arrivals import arrival_of
from .carrier import Carrier
from .whole import division_if_any, is_dtensor


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` would in one process.

    Call it after the last backward of a step and before ``optimizer.step()``. Under ``sharded`` it averages the gradients
    over ranks first; ``p.grad`` stays what this rank computed, and the step uses the clipped average. PyTorch's function gives
    the same, but sends the averages to all ranks. Under every other strategy it is PyTorch's function.
    Every rank must call it where gradients are divided (``sharded`` and its stages), with the same parameters.

    Args:
        parameters: parameters whose gradients are clipped; other gradients stay.
        max_norm: upper bound of the norm afterwards.
        norm_type: the p of the p-norm, also ``inf``.
        error_if_nonfinite: raise where the norm is not finite.
        foreach: as in PyTorch.

    Returns:
        The norm before clipping, the same on all ranks: a 0-dimensional tensor of the gradients' dtype.

    Raises:
        UsageError: ``norm_type`` is 0 or negative, which parts cannot give, several optimizers hold one parameter, the
            parameters are sharded over different ranks, or no optimizer holds one of them that has a gradient.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on every rank.
    """
    given = parameters if isinstance(parameters, Tensor) else list(parameters)
    chosen = [given] if isinstance(given, Tensor) else given
    if carriers := carriers_of(chosen):
        return _clip_parts(given, carriers, max_norm, float(norm_type), error_if_nonfinite)
    if any(is_dtensor(p) for p in chosen):
        return _clip_distributed(chosen, max_norm, float(norm_type), error_if_nonfinite, foreach)
    return nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)


def carriers_of(parameters: Iterable[Tensor]) -> list[Carrier]:
    """Return what carries gradients of these parameters, each once. Every rank must call it.

    Optimizers take up parameters first that the script has frozen, thawed or added since the last step. A thawed one has no
    carrier before.
    """
    given = list(parameters)
    if Carrier.alive() and (strangers := {id(p) for p in given if p.requires_grad and arrival_of(p) is None}):
        follow_groups(strangers)
    for carrier in _known(given):
        carrier.follow(None)
    return _known(given)


def follow_groups(wanted: Collection[int]) -> None:
    """Let optimizers take up other groups that hold parameters or gradients with these ids."""
    for carrier in Carrier.alive():
        carrier.follow(wanted)


def _known(parameters: Iterable[Tensor]) -> list[Carrier]:
    hooks = [hook for p in parameters if (hook := arrival_of(p)) is not None]
    return list({id(hook.carrier): hook.carrier for hook in hooks}.values())


def _clip_parts(
    given: Tensor | Sequence[Tensor],
    carriers: Sequence[Carrier],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    if not norm_type > 0:
        raise UsageError(
            explain("norm_type must be above 0 where gradients are divided among ranks", value=norm_type, fix="use 2.0")
        )
    check_same_ranks(carriers)
    chosen = [given] if isinstance(given, Tensor) else given
    check_held(chosen, carriers)
    hooks = [hook for p in chosen if (hook := arrival_of(p)) is not None]
    wanted = [{hook.parameter for hook in hooks if hook.carrier is carrier} for carrier in carriers]
    for carrier in carriers:
        with points_of(carrier.group).inside("gz.clip_grad_norm_()"):
            carrier.collect()
    parts = [_parts(carrier, only) for carrier, only in zip(carriers, wanted, strict=True)]
    held = [p for c, only in zip(carriers, wanted, strict=True) for i, p in enumerate(c.parameters) if i in only]
    if any(division_if_any(p) is not None for p in held):
        from ..parallel.clipping import norm_of_blocks  # imported only when needed

        total = norm_of_blocks(held, carriers, wanted, norm_type, given=given).to(held[0].dtype)
    else:
        total = _total([part for some in parts for part in some], carriers, norm_type)
    checked_norm(total, norm_type, error_if_nonfinite)
    by = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in (part for some in parts for part in some):
        part.mul_(by.to(device=part.device, dtype=part.dtype) if part.dtype != by.dtype else by.to(part.device))
    return total


def check_same_ranks(carriers: Sequence[Carrier]) -> None:
    """Raise unless the parameters of these carriers can be clipped together. Not collective.

    Ranks that hold one of the models alone know nothing of the others' norm, and would scale its gradients by another factor.
    Under a layout a norm is computed over the ranks of its groups as well, and is the same everywhere.

    Raises:
        UsageError: the carriers are of different ranks.
    """
    ranks = {tuple(sorted(dist.get_process_group_ranks(carrier.group))) for carrier in carriers}
    if len(ranks) > 1 and all(division_if_any(p) is None for carrier in carriers for p in carrier.parameters):
        what = "the norm is of parameters that are sharded over different ranks, so that not all ranks would scale them alike"
        fix = "clip the parameters of each model by a call of its own"
        raise UsageError(explain(what, value=sorted(map(list, ranks)), rank=carriers[0].group.rank(), fix=fix))


def check_held(parameters: Iterable[Tensor], carriers: Sequence[Carrier]) -> None:
    """Raise UsageError if a parameter that is clipped with those of carriers has a gradient, and is in no optimizer."""
    for i, parameter in enumerate(parameters if carriers else ()):
        left = parameter.grad
        if left is None or arrival_of(parameter) is not None:
            continue
        if parameter.requires_grad or left.any():  # zeros of a frozen one are nothing
            what = f"the norm is of averages and of one rank's own gradient: no prepared optimizer holds parameter {i} of them"
            fix = "add it to the optimizer before its first backward, clip what the optimizer holds, or freeze it until then"
            raise UsageError(explain(what, value=tuple(parameter.shape), rank=carriers[0].group.rank(), fix=fix))


def _parts(carrier: Carrier, only: set[int]) -> list[Tensor]:
    """Return this rank's gradients of the chosen parameters: whole blocks if all parameters of a block were chosen."""
    found: list[Tensor] = []
    for block, weight in zip(carrier.blocks, carrier.weights, strict=True):
        gradient = weight.grad
        if gradient is None or not (block.parameters & only):
            continue
        if block.parameters <= only:
            found.append(gradient)
            continue
        for piece in block.pieces:
            if piece.parameter in only:
                start = piece.offset - block.start
                found.append(gradient[start : start + piece.end - piece.start])
    return found


def _total(parts: Sequence[Tensor], carriers: Sequence[Carrier], norm_type: float) -> Tensor:
    """Return the norm of order ``norm_type`` over the gradients in ``parts`` of all ranks. Every rank must call."""
    devices = {p.device for c in carriers for p in c.parameters}
    dtypes = [p.dtype for c in carriers for p in c.parameters]
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    device = next(iter(devices))
    # Norms are computed in float64, because many of them are summed, and their powers could overflow.
    norms = (
        [n.to(device=device, dtype=torch.float64) for n in torch._foreach_norm(list(parts), norm_type)] if parts else []
    )
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        # A MAX reduction may lose a NaN, so NaN is sent as a flag.
        largest = torch.stack([stacked.nan_to_num(posinf=math.inf).max(), stacked.isnan().any().to(torch.float64)])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=carriers[0].group)
        return torch.where(largest[1] > 0, math.nan, largest[0]).to(dtype)
    summed = (stacked**norm_type).sum().reshape(1)
    dist.all_reduce(summed, dist.ReduceOp.SUM, group=carriers[0].group)
    return (summed.reshape(()) ** (1.0 / norm_type)).to(dtype)


def _clip_distributed(
    chosen: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """Clip the norm of DTensor gradients and of ordinary gradients together."""
    gradients = [p.grad for p in chosen if p.grad is not None]
    divided = [g for g in gradients if is_dtensor(g)]
    rest = [g for g in gradients if not is_dtensor(g)]
    norms: list[Tensor] = []
    if divided:
        norm: Any = nn.utils.get_total_norm(divided, norm_type, False, foreach)
        norms.append(cast(Tensor, norm.full_tensor() if is_dtensor(norm) else norm))
    if rest:
        norms.append(nn.utils.get_total_norm(rest, norm_type, False, foreach))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    checked_norm(total, norm_type, error_if_nonfinite)
    for some in (divided, rest):
        if some:
            by = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for gradient in some:
                local: Tensor = cast(Any, gradient).to_local() if is_dtensor(gradient) else gradient
                local.mul_(by.to(local.device))
    return total
