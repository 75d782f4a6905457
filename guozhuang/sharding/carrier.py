"""The interface between the optimizer's facade and what moves gradients and weights between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError, explain
from .parts import Block, Layout


class Carrier(Protocol):
    """Moves gradients to the ranks that own them, and new weights back. All methods: every rank must call.

    ``CarrierClass(model, names, parameters, layout, group)`` makes one, on all ranks, which hold equal weights already.
    It puts the parameters' data where it needs it, and registers on each parameter, by
    ``register_post_accumulate_grad_hook``, an :class:`Arrival`, through which :func:`arrival_of` finds it. The facade sees to
    everything else: buffers, closures, hooks, the optimizer's state, checkpoints, agreement about the layout.

    Attributes:
        layout: who owns what.
        parameters: the user's, by their index in the layout.
        group: the ranks.
        blocks: of this rank, in the order of :meth:`Layout.blocks_of`. ``collect`` and ``split`` may replace the list by one of
            finer blocks over the same elements; then ``weights`` is replaced too, and the facade carries the state over.
        weights: one 1-dimensional leaf per block over this rank's part of the flat weights, padding included (its values and
            gradients stay zeros). What the user's optimizer steps.
    """

    layout: Layout
    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    blocks: Sequence[Block]
    weights: Sequence[nn.Parameter]

    def collect(self) -> None:
        """After backward, before the step: ``weights[i].grad`` becomes the mean over ranks of the block's gradient.

        It is None where no rank has a gradient for the block's parameters; a parameter with a gradient on some ranks counts as
        zero on the others. If a block holds both kinds, it is split first. Gradients count as they stand in ``p.grad`` now,
        whoever put them there (no hook has fired for those that the user assigned). A second call before ``publish`` or
        ``skip`` does nothing: what was done to ``weights[i].grad`` in between (clipping, unscaling) stays.

        Raises:
            UsageError: a gradient is sparse or of another dtype; a parameter was moved to another device or dtype; a
                backward has added to gradients that were collected already.
        """

    def stretches(self) -> Iterator[Sequence[int]]:
        """In place of ``collect``: hand out the blocks in parts, each as soon as its gradients are there.

        Every rank must go through all of it, and then call ``publish``. ``blocks`` and ``weights`` may be replaced before the
        first part, not later. After ``collect`` all blocks come as one part.

        Yields:
            Indices of blocks whose ``weights[i].grad`` is what ``collect`` would make it. The optimizer must have stepped them
            when the next part is asked for: the gradients may be gone then, and the new weights on their way.
        """
        ...

    def publish(self) -> None:
        """After the inner step: every rank sees all new weights before anything reads them. Drops the blocks' gradients."""

    def skip(self) -> None:
        """Drop what was collected without a step: gradients of blocks become None. Does nothing if nothing was collected."""

    def split(self, separate: frozenset[int]) -> None:
        """Give each of these parameters blocks of its own (besides those that have them), on all ranks. Not while collected."""

    def synchronize(self) -> None:
        """Wait until this rank can read every weight. Not collective."""

    def close(self) -> None:
        """Remove the hooks. Parameters and gradients keep their values and stay usable; the weights of blocks do not."""


class Arrival:
    """What a carrier registers on each parameter, called when its gradient has been accumulated.

    It is not taken along by copies and pickles of the model: PyTorch leaves hooks of tensors out.
    """

    carrier: Carrier
    parameter: int

    def __call__(self, parameter: Tensor) -> None:
        """Take note of the gradient in ``parameter.grad``."""
        raise AssertionError("carriers derive from this")  # pragma: no cover


def arrival_of(parameter: Tensor) -> Arrival | None:
    """Return the hook by which a carrier watches this parameter; None if none does."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return next((hook for hook in (hooks or {}).values() if isinstance(hook, Arrival)), None)


def check_gradient(gradient: Tensor, place: Tensor, name: str, rank: int) -> None:
    """Raise a UsageError unless a parameter's gradient can be copied to its place in a flat tensor."""
    if gradient.layout != torch.strided or gradient.dtype != place.dtype or gradient.device != place.device:
        what = (
            f"the gradient of {name} is {gradient.layout} {gradient.dtype} on {gradient.device}, "
            f"the parameter {place.dtype} on {place.device}"
        )
        fix = "use dense gradients of the parameter's dtype, or the strategy ddp"
        raise UsageError(explain(what, rank=rank, fix=fix))


def check_nothing_came(came_late: bool, rank: int) -> None:
    """Raise a UsageError if a backward has added to gradients between ``collect`` and the step."""
    if came_late:
        what = "a backward has added to gradients that were averaged already, by clip_grad_norm_"
        fix = "clip after the last backward of a step, or call zero_grad() between"
        raise UsageError(explain(what, rank=rank, fix=fix))
