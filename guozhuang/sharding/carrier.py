"""The interface between the sharded optimizer and the objects that move gradients and weights between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError, explain
from .parts import Block, Layout


class Carrier(Protocol):
    """Moves gradients to the ranks that own them, and new weights back. All methods are collective unless they say otherwise.

    ``CarrierClass(model, names, parameters, layout, group)`` is called on all ranks, which hold equal weights already.
    It moves the parameters' data to its own memory, and registers on each parameter, by
    ``register_post_accumulate_grad_hook``, an :class:`Arrival`, which :func:`arrival_of` returns. ``ShardedOptimizer`` does
    the rest: buffers, closures, hooks, the optimizer's state, checkpoints, agreement about the layout.

    Attributes:
        layout: which rank owns which elements.
        parameters: the user's parameters, by their index in the layout.
        group: the ranks.
        blocks: this rank's blocks, in the order of :meth:`Layout.blocks_of`. ``collect`` and ``split`` may replace the list by
            finer blocks over the same elements; then ``weights`` is replaced too, and the sharded optimizer converts the state.
        weights: the tensors that the user's optimizer steps: one 1-dimensional leaf per block over this rank's part of the flat
            weights, padding included (its values and gradients stay zeros).
    """

    layout: Layout
    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    blocks: Sequence[Block]
    weights: Sequence[nn.Parameter]

    def collect(self) -> None:
        """After backward and before the step, set ``weights[i].grad`` to the mean over ranks of the block's gradient.

        It is None if no rank has a gradient for the block's parameters; a parameter with a gradient on some ranks counts as
        zero on the others. If a block holds both kinds of parameters, it is split first. Gradients are read from ``p.grad``
        now, also those that the user assigned (no hook has fired for them). A second call before ``publish`` or
        ``skip`` does nothing: changes made to ``weights[i].grad`` in between (clipping, unscaling) stay.

        Raises:
            UsageError: a gradient is sparse or of another dtype; a parameter was moved to another device or dtype; a
                backward has added to gradients that were collected already.
        """

    def stretches(self) -> Iterator[Sequence[int]]:
        """Yield the blocks in parts, each as soon as its gradients have arrived; call it in place of ``collect``.

        Every rank must iterate to the end, and then call ``publish``. ``blocks`` and ``weights`` may be replaced before the
        first part, not later. After ``collect`` all blocks come as one part.

        Yields:
            Indices of blocks whose ``weights[i].grad`` is what ``collect`` would make it. The optimizer must have stepped them
            when the next part is asked for: then the gradients may be gone, and the new weights are being sent.
        """
        ...

    def publish(self) -> None:
        """After the step, let every rank see all new weights before it reads any. Drops the blocks' gradients."""

    def skip(self) -> None:
        """Drop collected gradients without a step: those of blocks become None. Does nothing if nothing was collected."""

    def split(self, separate: frozenset[int]) -> None:
        """Give each of these parameters blocks of its own, as earlier ones keep theirs, on all ranks. Not after ``collect``."""

    def synchronize(self) -> None:
        """Wait until this rank can read every weight. Not collective."""

    def close(self) -> None:
        """Remove the hooks. Parameters and gradients keep their values and stay usable; ``weights`` does not."""


class Arrival:
    """The hook that a carrier registers on each parameter; autograd calls it when the gradient has been accumulated.

    Copies and pickles of the model do not contain it: PyTorch leaves hooks of tensors out.
    """

    carrier: Carrier
    parameter: int

    def __call__(self, parameter: Tensor) -> None:
        """Handle the gradient in ``parameter.grad``."""
        raise AssertionError("carriers derive from this")  # pragma: no cover


def arrival_of(parameter: Tensor) -> Arrival | None:
    """Return the hook by which a carrier watches this parameter; None if it belongs to no carrier."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return next((hook for hook in (hooks or {}).values() if isinstance(hook, Arrival)), None)


def check_gradient(gradient: Tensor, place: Tensor, name: str, rank: int) -> None:
    """Raise a UsageError unless a parameter's gradient can be copied to ``place``, its part of a flat tensor."""
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
