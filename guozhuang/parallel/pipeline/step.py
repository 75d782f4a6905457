"""``loss = model.step(x, y)``: forward, loss and backward of a batch under schedules that need the loss of each microbatch.

The last stage computes the loss of a microbatch as soon as it has the model's output for it, and begins its backward, so that
the activations of few microbatches are held at a time. What the losses add up to is the loss of the batch: see
[Note: the share of a microbatch] in shares.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain
from .forwards.stage import Microbatch
from .shares import PartLoss, Shares, cut_rows, find_shares, value_of

if TYPE_CHECKING:
    from .gpipe import GPipe


class _BatchLoss:
    """The loss of one batch, microbatch by microbatch, on the rank of the last stage.

    Attributes:
        total: the loss of the batch, as far as microbatches were computed.
        dtype: of the loss.
    """

    def __init__(self, loss: PartLoss, targets: Any, microbatches: Sequence[Microbatch], is_first: bool) -> None:
        self._loss, self._targets, self._is_first = loss, targets, is_first
        self._rows = [each.rows for each in microbatches]
        self._num_rows = microbatches[0].num_rows
        self._shares: Shares | None = None
        self.total, self.dtype = torch.zeros((), dtype=torch.float64), torch.get_default_dtype()

    def seeds(self, number: int, output: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the loss of a microbatch, and its factor in the loss of the batch, as its gradient."""
        if self._shares is None:
            self._shares = find_shares(
                self._loss, output, self._targets, self._rows, self._num_rows, twice=self._is_first
            )
        part = cut_rows(self._targets, self._rows[number], self._num_rows, "the targets")
        with torch.enable_grad():
            value, count = value_of(self._loss(output, part))
        factor = self._shares.factors[number]
        if count is not None:
            told = self._shares.counts
            if told is None:  # there is one microbatch
                factor = 1 / float(count)
            elif float(count) != told[number]:
                what = (
                    f"the loss counted {float(count):g} in microbatch {number}, and {told[number]:g} with other outputs"
                )
                fix = "let the count depend on the targets only, or use the schedule gpipe"
                raise UsageError(explain(what, value=float(count), fix=fix))
        if factor == 0:  # nothing counts here, and the mean over nothing is no number
            return [], []
        if not value.requires_grad:
            what = "the loss does not depend on the model's output"
            raise UsageError(explain(what, value=float(value), fix="compute it from the output that it is given"))
        self.dtype = value.dtype
        self.total += value.detach().cpu().double().reshape(()) * factor
        return [value], [torch.full_like(value, factor)]


def train_batch(pipe: GPipe, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, loss: PartLoss) -> Tensor:
    """Run forward, loss and backward of a batch. Every rank of the pipeline must call it, with equal arguments.

    Gradients are added to ``p.grad``, as backward does.

    Args:
        pipe: the model in stages.
        args: its positional inputs.
        kwargs: its keyword inputs.
        targets: for the loss: tensors with samples along the first dimension, or tuples, lists or dicts of them.
        loss: ``loss(output, targets)``, for some rows of the batch: a mean or a sum over them, or a sum and a count.

    Returns:
        The loss of the batch, detached; the same on all ranks of the pipeline.

    Raises:
        UsageError: the loss cannot be computed by microbatches; the model or the batch cannot be cut.
    """
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            what = "an input of model.step requires a gradient, which it does not compute"
            raise UsageError(explain(what, value=tuple(leaf.shape), fix="detach it, or use the schedule gpipe"))
    with pipe.caches.off(), torch.enable_grad():
        is_first = pipe.num_steps == 0
        pipe.num_steps += 1
        plan, microbatches = pipe.plans.cut_batch(args, kwargs, runs_tail=True)
        run = plan.runtime.begin(microbatches)
        batch = _BatchLoss(loss, targets, microbatches, is_first)
        draws = list(pipe.plans.draws.values())[-1]
        with pipe.gathering_gradients(), pipe.statistics.collecting(len(microbatches)):
            run.execute(
                "FBIW",
                batch.seeds,
                lambda _: [batch.total.to(batch.dtype), draws.state()],
                around_backwards=pipe.statistics.discarding,
            )
        total, state = run.conclusions[-1]
        assert total is not None and state is not None
        draws.end(state)
    pipe.end_backward()
    return total
