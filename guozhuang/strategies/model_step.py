"""Steps of scripts that hand their loss over: ``model.step(x, y)`` where no schedule is needed, and the step of a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, explain
from .ways import update

if TYPE_CHECKING:
    from ..parallel.prepare import Divided


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
    return _backward_of(loss(model(*args[:-1], **kwargs), args[-1]))


def _backward_of(loss: Any) -> Tensor:
    """Run the backward of a loss, a mean or a sum and a count, and return its value."""
    from ..parallel.pipeline.shares import value_of  # imported only when needed

    found, count = value_of(loss)
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
        return type(None), ()


class _Inputs(Exception):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_and_kwargs = args, kwargs


def inputs_of(loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the loss function gives to the model."""

    def called(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Inputs(args, kwargs)

    try:
        loss_fn(called, batch)
    except _Inputs as found:
        return found.args_and_kwargs
    raise UsageError(explain("the loss function did not call the model", fix="call model(...) in it, once"))


def answering_once(output: Any) -> Callable[..., Any]:
    """Return what stands for the model in a loss function: its first call returns ``output``, another one raises."""
    outputs = [output]

    def called(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            what = "the loss function calls the model twice, and this schedule runs one forward for a microbatch"
            raise UsageError(explain(what, fix="call model(...) once, or use the schedule gpipe"))
        return outputs.pop()

    return called


class PipelineStep:
    """The step of a pipeline whose schedule computes the loss of each microbatch. See [Note: who owns the step] in ways.py.

    Args:
        divided: the model in stages.
        optimizers: what is stepped.
    """

    def __init__(self, divided: Divided, optimizers: Sequence[Optimizer]) -> None:
        self._divided, self._optimizers = divided, optimizers

    def __call__(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        passed: Callable[[str], object] = lambda part: None,
    ) -> Tensor:
        """Train on one batch; see ``Step``."""
        args, kwargs = inputs_of(loss_fn, batch)

        def loss(output: Any, part: Any) -> Any:
            return loss_fn(answering_once(output), part)

        pipe = self._divided.pipe
        assert pipe is not None
        divided = self._divided
        found = divided.batch(
            (batch,),
            lambda: pipe.train(args, kwargs, batch, loss),
            lambda: _backward_of(loss_fn(divided.model, batch)),
        )
        passed("forward")
        passed("backward")
        update(self._optimizers, passed)
        return found
