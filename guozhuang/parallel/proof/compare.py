"""Where a divided run differs from the undivided one by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..division import division_of, part
from .noise import TIMES, Noise, dense, epsilon
from .records import ForwardRecord, Sums, attribute

#: What can differ, the most telling first: of several differences the first one is shown.
KINDS = ("generator", "attribute", "output", "buffer", "loss", "gradient", "value")


class Deviation(NamedTuple):
    """Something that is not as in one process.

    Attributes:
        kind: one of :data:`KINDS`.
        name: of the generator, attribute, output, buffer or parameter.
        found: what was found, in words.
    """

    kind: str
    name: str
    found: str


def token_of(tensor: Tensor | None) -> tuple[float, float] | None:
    """Return what tells whether a tensor has changed since, also by way of ``.data``, which no version shows."""
    if tensor is None:
        return None
    values = dense(tensor)
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.double()
    return float(values.sum()), float(values.square().sum())


def precision(dtype: torch.dtype) -> float:
    """Return how far apart results may be, relative to their norm, that differ by the order of additions alone."""
    return math.sqrt(epsilon(dtype))


def difference_of(found: Tensor, wanted: Tensor, floor: float = 0.0) -> str | None:
    """Return in words how two tensors differ; None if they do not.

    Args:
        found: the divided run's.
        wanted: the reference's, on any device.
        floor: the norm of a difference that counts for nothing.
    """
    if found.shape != wanted.shape:
        return f"it has the shape {tuple(found.shape)}, and in one process {tuple(wanted.shape)}"
    wanted = wanted.to(found.device)
    if not (found.is_floating_point() or found.is_complex()):
        num = int((found != wanted).sum())
        return f"{num} of {found.numel()} elements are others than in one process" if num else None
    limit = precision(found.dtype if not found.is_complex() else found.real.dtype)
    ours, theirs = dense(found), dense(wanted)
    is_fine, was_fine = torch.isfinite(ours), torch.isfinite(theirs)
    if bool((is_fine != was_fine).any()):
        return "it is not finite where one process has a number, or the other way round"
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(wide)[is_fine], theirs.to(wide)[is_fine]
    apart, size = float((ours - theirs).norm()), float(theirs.norm())
    if apart <= limit * size + floor:
        return None
    if size == 0:
        return f"its norm is {float(ours.norm()):.3g}, and in one process 0"
    text = f"it is {apart / size:.2g} of its norm away from that of one process"
    factor = float((ours * theirs.conj()).sum().real) / size**2
    if abs(factor) > limit and float((ours - factor * theirs).norm()) <= limit * size * abs(factor):
        text = f"it is {factor:.6g} times that of one process"
    return "it is 0, and not in one process" if not ours.any() else text


def differences_of_forward(
    model: nn.Module, ours: ForwardRecord, theirs: ForwardRecord, is_first: bool, noise: Noise
) -> Iterator[Deviation]:
    """Yield where a forward differs on this rank, other than in the outputs of modules.

    Args:
        model: divided.
        ours: this rank's.
        theirs: the reference's.
        is_first: whether this is the rank that the reference is a copy of.
        noise: what rounding changes.
    """
    for name, (before, after) in theirs.generators.items():
        mine_before, mine_after = ours.generators.get(name, ("", ""))
        if before == mine_before and after != mine_after:
            yield Deviation("generator", name, "its state after the forward is not that of one process")
        elif before != mine_before and (before != after or mine_before != mine_after) and name != "torch":
            yield Deviation("generator", name, "the forward draws from it, and ranks have other states of it")
    for key in sorted(theirs.changed.keys() | ours.changed.keys()):
        if key in theirs.changed:
            found = _attribute_differs(attribute(model, key), theirs.changed[key], key in ours.changed)
        else:
            found = "it is changed by the divided forward, and not in one process"
        if found is not None:
            yield Deviation("attribute", key, found)
    if is_first:
        yield from _differences_of_outputs(ours.outputs, theirs.outputs, noise)
    buffers = dict(model.named_buffers())
    for name, wanted in theirs.buffers.items():
        mine = buffers.get(name)
        division = division_of(mine) if mine is not None else None
        if mine is None or (division is not None and not division.is_owned):
            continue
        whole_or_part = wanted if division is None else part(wanted, division)
        floor = TIMES * noise.get(("buffer", name), 0.0)
        if (found := difference_of(mine, whole_or_part, floor)) is not None:
            yield Deviation("buffer", name, found)


def _differences_of_outputs(ours: Sequence[Any], theirs: Sequence[Any], noise: Noise) -> Iterator[Deviation]:
    if len(ours) != len(theirs):
        yield Deviation("output", "", f"it has {len(ours)} parts, and in one process {len(theirs)}")
        return
    for i, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(mine, Tensor) and isinstance(wanted, Tensor):
            found = difference_of(mine, wanted, TIMES * noise.get(("output", str(i)), 0.0))
        else:
            found = None if _same(mine, wanted) else f"it is {mine!r}, and in one process {wanted!r}"
        if found is not None:
            yield Deviation("output", str(i) if len(ours) > 1 else "", found)


def _attribute_differs(mine: Any, wanted: Any, is_changed: bool) -> str | None:
    if isinstance(wanted, Tensor):
        has_graph = wanted.requires_grad or not wanted.is_leaf
        if not isinstance(mine, Tensor) or not is_changed:
            # A stage that does not run the module may lack what the module keeps for itself, but not what a loss may take.
            return "a forward sets it, on some ranks only" if has_graph else None
        return difference_of(mine, wanted)
    return None if _same(mine, wanted) else f"it is {mine!r}, and in one process {wanted!r}"


def _same(mine: Any, wanted: Any) -> bool:
    if isinstance(mine, float) and isinstance(wanted, float):
        return math.isclose(mine, wanted, rel_tol=1e-5) or (mine != mine and wanted != wanted)
    return type(mine) is type(wanted) and bool(mine == wanted)


def first_part(theirs: Mapping[str, Sums], of_ranks: Sequence[Mapping[str, Sums]]) -> str | None:
    """Return the first module whose outputs differ: neither a rank's, nor those of all ranks together, are the reference's."""
    tolerance = max(precision(torch.get_default_dtype()), 1e-4)
    for name, wanted in theirs.items():
        mine = [each[name] for each in of_ranks if name in each]
        together = Sums(sum(s.count for s in mine), sum(s.total for s in mine), sum(s.squares for s in mine))
        if mine and not any(_alike(each, wanted, tolerance) for each in (*mine, together)):
            return name
    return None


def _alike(found: Sums, wanted: Sums, tolerance: float) -> bool:
    scale = math.sqrt(max(wanted.count * wanted.squares, 0.0))
    return (
        found.count == wanted.count
        and abs(found.squares - wanted.squares) <= tolerance * max(wanted.squares, 1e-300)
        and abs(found.total - wanted.total) <= tolerance * max(scale, 1e-300)
    )


def differences_of_loss(loss: float | None, wanted: float | None, noise: Noise) -> Iterator[Deviation]:
    """Yield how a loss differs, where both are numbers; ``noise`` tells what rounding changes."""
    if loss is None or wanted is None or loss == wanted or (math.isnan(loss) and math.isnan(wanted)):
        return
    limit = precision(torch.get_default_dtype()) * max(abs(wanted), 1e-6) + TIMES * noise.get(("loss", ""), 0.0)
    if not abs(loss - wanted) <= limit:
        yield Deviation("loss", "", f"it is {loss:.7g}, and in one process {wanted:.7g}")


def differences_of_parameter(
    kind: str, name: str, parameter: Tensor, mine: Tensor | None, wanted: Tensor | None, floor: float
) -> list[Deviation]:
    """Return how this rank's part of a parameter's gradient or value differs: nothing, or one deviation.

    Args:
        kind: "gradient" or "value".
        name: of the parameter.
        parameter: says how it is divided.
        mine: this rank's part.
        wanted: the whole one of the reference.
        floor: the norm of a difference that counts for nothing.
    """
    division = division_of(parameter)
    if division is not None and not division.is_owned:
        return []
    if wanted is None:
        is_zero = mine is None or not bool(mine.any())
        return [] if is_zero else [Deviation(kind, name, "there is one, and in one process there is none")]
    if division is not None:
        wanted = part(wanted, division)
    if mine is None:
        is_zero = not bool(wanted.any())
        return [] if is_zero else [Deviation(kind, name, "there is none, and in one process there is one")]
    text = difference_of(mine, wanted, floor)
    return [] if text is None else [Deviation(kind, name, text)]
