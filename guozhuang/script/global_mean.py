"""``global_mean``: a loss that is the mean over all tokens of all ranks and micro-batches, not a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from ..errors import UsageError, explain
from ..registry import registry
from .reduce import reduce

_TOLERANCE = 1e-6  # relative: of sums of counts, which may be fractions


def global_mean(loss_sum: Tensor, count: float | Tensor) -> Tensor:
    """Return a loss whose gradient is that of the mean over all ranks' tokens (samples, pixels). Every rank must call it.

    Strategies average gradients over ranks. So a mean over a rank's own tokens becomes a mean of means, in which a rank with
    few tokens counts as much as one with many; a sum becomes a mean of sums. This gives what one process computes::

        loss_sum = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        gz.global_mean(loss_sum, (y != -100).sum()).backward()

    With several micro-batches the tokens of the whole step have to be known first: ``gz.accumulate(model, steps, weight=...)``.
    Then the losses of a step add up to the mean, so do not divide them by the number of micro-batches.

    Args:
        loss_sum: the sum of the loss over this rank's tokens, a tensor of one element.
        count: how many tokens that is; 0 on a rank that has none.

    Returns:
        ``loss_sum`` over the mean count of the ranks; ``gz.reduce`` of it is the mean over all tokens.

    Raises:
        UsageError: ``loss_sum`` is no tensor of one element, a count is negative or not finite, all ranks have none, or this is
            a micro-batch of ``gz.accumulate`` without ``weight``.
    """
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        what = "global_mean takes the sum of the loss, a tensor of one element"
        raise UsageError(explain(what, value=loss_sum, fix='compute the loss with reduction="sum"'))
    mine, window = checked_count(count), _window.get()
    if window is None:
        mean = mean_count(mine)
    elif window.mean is not None:
        mean = window.mean
        window.num_counted += mine
        window.num_losses += 1
    else:
        what = "a mean over the tokens of one micro-batch is not that of the step, where micro-batches differ"
        fix = "give gz.accumulate the number of this rank's tokens in all micro-batches of the step: weight=num_tokens"
        raise UsageError(explain(what, value=f"{window.steps} micro-batches", fix=fix))
    return loss_sum / (mean * registry.weight.value)


def checked_count(count: float | Tensor) -> float:
    """Return a number of tokens as a float.

    Raises:
        UsageError: it is negative or not finite.
    """
    found = float(count)
    if not (math.isfinite(found) and found >= 0):
        raise UsageError(
            explain("a number of tokens is finite and at least 0", value=found, fix="count what the loss sums")
        )
    return found


def mean_count(count: float) -> float:
    """Return the mean over ranks of a number of tokens. Every rank must call it.

    Raises:
        UsageError: it is 0 on all ranks; on every rank.
    """
    mean = float(reduce(count))
    if not mean > 0:
        what = "no rank has a token in this step, so that there is no mean of the loss"
        raise UsageError(explain(what, value=mean, fix="leave the step out, on every rank"))
    return mean


class TokensOfStep:
    """What :func:`global_mean` knows of the micro-batches of one step.

    Attributes:
        steps: how many there are.
        weight: the number of this rank's tokens in all of them; None: not given.
        mean: the mean of that over ranks.
        num_counted: how many of them losses were made of.
        num_losses: how many losses were made.
    """

    def __init__(self, steps: int, weight: float | None) -> None:
        self.steps, self.weight = steps, weight
        self.mean = None if weight is None else mean_count(weight)
        self.num_counted, self.num_losses = 0.0, 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let losses in this block be of this step."""
        token = _window.set(self)
        try:
            yield
        finally:
            _window.reset(token)

    def check(self) -> None:
        """Raise unless the losses of the step were made of all its tokens.

        Raises:
            UsageError: they were not.
        """
        if self.weight is None:
            return
        if self.num_losses and math.isclose(self.num_counted, self.weight, rel_tol=_TOLERANCE):
            return
        what = f"`weight` is {self.weight:g} tokens, and gz.global_mean was given {self.num_counted:g} in the micro-batches"
        fix = "make each loss by gz.global_mean(loss_sum, count), and let `weight` be the sum of this rank's counts"
        raise UsageError(explain(what, fix=fix))


_window: ContextVar[TokensOfStep | None] = ContextVar("window", default=None)
