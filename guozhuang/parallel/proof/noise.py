"""How much of a difference is rounding: what becomes of a step whose weights are changed in their last bit.

[Note: rounding] Ranks add in another order than one process. Most results then differ by some units in the last place, but some
by any factor more: gradients that cancel out (of what a norm divides away, of biases before a norm) are nothing but rounding.
So where something differs, the step of one process is computed once more, with each weight changed by the precision of its
numbers. What that changes is what no order of additions promises; a difference below some times as much is none.
One number may stay by chance what it was. So a loss, where there is only one, may also differ by what the rounding of the
outputs makes of it, to the first order: the sum of a LayerNorm's outputs is nothing but that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...gradients.forwards import leaves_of
from . import reference
from .reference import Reference, ReferenceReport, fork_reference

#: The norm of what rounding changes, by kind and name of what was compared.
Noise: TypeAlias = dict[tuple[str, str], float]
#: A difference below so many times that is none: more operations round than weights were changed.
TIMES = 32.0


def tremble(models: Iterable[nn.Module]) -> None:
    """Change each weight by the precision of its numbers, or of those that autocast computes with; up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in {id(p): p for model in models for p in model.parameters()}.values():
            if parameter.is_floating_point() or parameter.is_complex():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + signs.to(parameter.dtype) * epsilon(parameter.dtype))


class ReferencePair:
    """The step of one process, and the same with weights that tremble, as the process that has forked both sees them.

    Args:
        plain: tells what one process computes.
        trembling: waits until it is needed.
    """

    def __init__(self, plain: Reference, trembling: Reference) -> None:
        self._plain, self._trembling = plain, trembling
        self._last: ReferenceReport | None = None
        self._num_told = self._num_of_trembling = 0

    def next(self) -> ReferenceReport:
        """Return the next report of what one process computes; see :meth:`Reference.next`."""
        self._last = self._plain.next()
        self._num_told += 1
        return self._last

    def noise(self) -> Noise:
        """Return how much what the last report tells depends on rounding; nothing, if that cannot be known."""
        assert self._last is not None and self._num_of_trembling < self._num_told
        self._trembling.begin()
        for _ in range(self._num_of_trembling, self._num_told):  # up to the one of the same event
            report = self._trembling.next()
        self._num_of_trembling = self._num_told
        return noise_of(self._last, report)

    def end(self) -> None:
        """End both, if they still run."""
        self._plain.end()
        self._trembling.end()


def fork_pair(become: Callable[[int], Iterable[nn.Module]]) -> ReferencePair | None:
    """Fork a reference, and one whose weights tremble: return both here, and None in each of them.

    Args:
        become: makes the models those of one process, in the reference of this number, 0 or 1 for the one that trembles;
            returns them.
    """
    plain = fork_reference()
    if plain is not None and (trembling := fork_reference(waits=True)) is not None:
        return ReferencePair(plain, trembling)
    try:
        models = become(0 if plain is None else 1)
        if plain is not None:
            tremble(models)
    except BaseException as error:
        assert reference.here is not None
        reference.here.leave(f"the model cannot be made that of one process: {error}")
    return None


def epsilon(dtype: torch.dtype) -> float:
    """Return the precision of numbers, or of those that autocast computes with, if that is less."""
    lower = [torch.get_autocast_dtype(each) for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)]
    return max(torch.finfo(each).eps for each in (dtype, *lower))


class LossRounding:
    """By how much a loss may differ because the outputs of a model are rounded; known when its backward has ended."""

    def __init__(self) -> None:
        self._squares = 0.0

    def watch(self, outputs: Any) -> None:
        """Take what a forward has returned, before its backward."""
        for leaf in leaves_of(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(functools.partial(self._take, leaf.detach()))

    def _take(self, output: Tensor, gradient: Tensor) -> None:
        self._squares += float((output * gradient).abs().double().norm() * epsilon(output.dtype)) ** 2

    @property
    def norm(self) -> float:
        """Return it, as the roundings of all elements add up by chance."""
        return math.sqrt(self._squares)


def dense(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, detached, also of a sparse one."""
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def noise_of(report: ReferenceReport, trembling: ReferenceReport) -> Noise:
    """Return how far apart two reports of one event are; nothing, if the second is of another one."""
    found: Noise = {}
    if report.event != trembling.event:
        return found
    if report.loss is not None and trembling.loss is not None:
        found["loss", ""] = max(abs(report.loss - trembling.loss), report.rounding)
    if report.record is not None and trembling.record is not None:
        pairs = zip(report.record.outputs, trembling.record.outputs, strict=False)
        for i, (one, other) in enumerate(pairs):
            _note(found, ("output", str(i)), one, other)
        for name, one in report.record.buffers.items():
            _note(found, ("buffer", name), one, trembling.record.buffers.get(name))
    for kind, table, others in (
        ("gradient", report.gradients, trembling.gradients),
        ("value", report.values, trembling.values),
    ):
        for key, one in table.items():
            _note(found, (kind, f"{key[0]}.{key[1]}"), one, others.get(key))
    return found


def _note(found: Noise, key: tuple[str, str], one: object, other: object) -> None:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return
    if one.is_floating_point() or one.is_complex():
        found[key] = float(torch.nan_to_num(dense(one).double() - dense(other).double()).norm())
