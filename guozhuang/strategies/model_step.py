"""``model.step(x, y)`` of scripts that hand their loss to ``prepare``, where the strategy leaves the step to the script."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError, explain


def plain_step(model: nn.Module, loss: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Do what ``model.step`` does where nothing but the script's own loop owns the step: forward, loss, backward.

    Args:
        model: the prepared model.
        loss: ``loss(outputs, targets)``: a mean, or a sum and a count.
        args: the model's arguments, and last the targets.
        kwargs: the model's keyword arguments.
    """
    if not args:
        what = "model.step() takes the model's inputs, and last the targets"
        raise UsageError(explain(what, value=args, fix="call model.step(x, y)"))
    from ..parallel.pipeline.shares import value_of  # imported only when needed

    found, count = value_of(loss(model(*args[:-1], **kwargs), args[-1]))
    if count is not None:
        found = found / count
    found.backward()
    return found.detach()


class StepOf:
    """``model.step`` of a prepared model whose strategy leaves the step to the script. Copies of the model get none.

    Args:
        model: the prepared model.
        loss: ``loss(outputs, targets)``.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._model, self._loss = weakref.ref(model), loss

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the mean loss and the gradients of one batch: the model's arguments, and last the targets."""
        model = self._model()
        assert model is not None
        return plain_step(model, self._loss, args, kwargs)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    return None
