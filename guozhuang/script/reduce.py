"""``reduce``: combines a metric of all ranks, whatever it is made of, by one collective, or two where it is large."""

from __future__ import annotations

import math
import numbers
import zlib
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from ..errors import MismatchError, UsageError, explain
from ..world import current

Operation = Literal["mean", "sum", "min", "max"]
_FIRST = 64  # elements of the first collective, which is the only one for most metrics


def reduce(metric: Any, op: Operation = "mean", *, weight: float | Tensor = 1.0) -> Any:
    """Combine a metric over all ranks. Every rank must call it, with the same structure; every rank gets the same result.

    Args:
        metric: a number, a tensor (of any shape, equal on all ranks), or dicts, lists and tuples of them. It is not changed.
        op: "mean", "sum", "min" or "max", element by element. NaN on any rank gives NaN.
        weight: for "mean": how much this rank counts, for example the number of samples that its mean is over; at least 0.
            A rank of weight 0 does not count, whatever its values are.

    Returns:
        The same structure, computed in float64: of a number a number (of an int an int, but for "mean" a float), of a tensor a
        new one on its device, of its dtype and without a graph (of integers and booleans, "mean" gives float32, "sum" int64).

    Raises:
        UsageError: the operation or the weight cannot work, all weights are 0, or a leaf is no real number or tensor.
        MismatchError: ranks gave metrics of different structures, names or shapes; on every rank.
    """
    if op not in get_args(Operation):
        raise UsageError(explain("there is no such operation", value=op, fix='use "mean", "sum", "min" or "max"'))
    leaves, structure = _pytree.tree_flatten(metric)
    for leaf in leaves:
        if not isinstance(leaf, numbers.Real | Tensor) or (isinstance(leaf, Tensor) and leaf.is_complex()):
            what = "a metric is made of real numbers and tensors of them"
            raise UsageError(explain(what, value=leaf, fix="leave out what is neither, or turn it into numbers"))
    mine = float(weight)
    if not (math.isfinite(mine) and mine >= 0) or (op != "mean" and mine != 1.0):
        what = 'a weight is a finite number of at least 0, for "mean" alone'
        raise UsageError(explain(what, value=mine, fix='give the number of samples, and leave it out for "sum"'))
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
    device = _device()
    wide = torch.float32 if device.type == "mps" else torch.float64
    parts = [
        leaf.detach().to(device, wide).reshape(-1)
        if isinstance(leaf, Tensor)
        else torch.tensor([leaf], dtype=wide).to(device)
        for leaf in leaves
    ]
    flat = torch.cat([torch.zeros(0, dtype=wide, device=device), *parts])
    combined = _combine(flat, op, mine, _sign(structure, shapes))
    found = []
    for leaf, part in zip(leaves, combined.split([part.numel() for part in parts]), strict=True):
        if isinstance(leaf, Tensor):
            dtype = leaf.dtype
            if not dtype.is_floating_point and op in ("mean", "sum"):
                dtype = torch.float32 if op == "mean" else torch.int64
            found.append(part.reshape(leaf.shape).to(leaf.device, dtype))
        else:
            value = float(part.item())
            is_whole = isinstance(leaf, numbers.Integral) and op != "mean" and math.isfinite(value)
            found.append(int(value) if is_whole else value)
    return _pytree.tree_unflatten(found, structure)


def _combine(flat: Tensor, op: Operation, weight: float, sign: float) -> Tensor:
    """Combine a 1-dimensional tensor over the ranks; ``sign`` is a number below 2**20 that must be equal on all of them."""
    if op in ("mean", "sum"):
        if op == "mean":
            flat = flat * weight if weight > 0 else torch.zeros_like(flat)
        found = _reduced(torch.cat([flat.new_tensor([sign, sign * sign, weight]), flat]), dist.ReduceOp.SUM)
        if op == "sum":
            return found[3:]
        total = float(found[2])
        if not total > 0:
            what = "the weights of all ranks are 0, so there is nothing to take the mean of"
            raise UsageError(explain(what, value=total, fix="give the number of samples of at least one rank"))
        return found[3:].div_(total)
    # A MAX reduction may lose a NaN, so NaN is sent as a flag. A minimum is sent as the maximum of the negative.
    values = (flat if op == "max" else -flat).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    sent = torch.cat([flat.new_tensor([sign, -sign]), values, flat.isnan().to(flat.dtype)])
    found = _reduced(sent, dist.ReduceOp.MAX)
    values, flags = found[2:].chunk(2) if flat.numel() else (found[2:], found[2:])
    return torch.where(flags > 0, math.nan, values if op == "max" else -values)


def _reduced(sent: Tensor, op: Any) -> Tensor:
    """Return the reduction of a tensor that begins with the sign and its check, after comparing the signs of all ranks.

    The first collective has the same size on all ranks, whatever they send: backends other than "shm" end the process, or wait
    for ever, where sizes differ. What does not fit into it follows when the signs are known to be equal.
    """
    if not (dist.is_available() and dist.is_initialized()) or (count := dist.get_world_size()) == 1:
        return sent
    first = torch.nn.functional.pad(sent[:_FIRST], (0, max(0, _FIRST - sent.numel())))
    dist.all_reduce(first, op)
    one, two = first[:2].tolist()
    # By Cauchy and Schwarz the square of the sum is the number of ranks times the sum of squares only for equal signs.
    _check_signs(one * one == count * two if op == dist.ReduceOp.SUM else one == -two)
    rest = sent[_FIRST:].clone()
    if rest.numel():
        dist.all_reduce(rest, op)
    return torch.cat([first[: sent.numel()], rest])


def _check_signs(are_equal: bool) -> None:
    if not are_equal:
        what = "ranks gave reduce() metrics of different structures, names or shapes"
        world = current()
        fix = "give the same on every rank, in the same order of calls"
        raise MismatchError(explain(what, rank=None if world is None else world.rank, fix=fix))


def _sign(structure: Any, shapes: list[tuple[int, ...]]) -> float:
    return float(zlib.crc32(f"{structure}{shapes}".encode()) % 2**20)


def _device() -> torch.device:
    world = current()
    if world is not None:
        return world.device
    if dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
