"""``averaged_gradients``: lets a script read and change the mean gradient under every strategy, as in one process.

[Note: PyTorch's clipping] ``torch.nn.utils.clip_grad_norm_`` and its neighbours read and change ``p.grad``, which is the rank's
own gradient under ``sharded``. Each is a wrapper that calls a function through a cell of its closure. The function in that cell
is replaced, so that scripts which have imported the wrapper before are served too. The replacement averages first.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..weights.points import points_of
from .carrier import Carrier
from .clip import carriers_of, check_held, check_same_ranks, follow_groups

_OF_PARAMETERS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")
_OF_GRADIENTS = ("_get_total_norm",)


@contextmanager
def averaged_gradients(model: nn.Module) -> Iterator[None]:
    """Let ``p.grad`` be the mean over ranks in this context; the step uses what it is at the end. Every rank must enter it.

    For all that reads or changes gradients between the last backward and the step: adaptive clipping, signs, noise, norms to
    log. Every rank must change them equally. ::

        loss.backward()
        with gz.averaged_gradients(model):
            for p in model.parameters():
                p.grad.clamp_(-0.1, 0.1)
        optimizer.step()

    Under ``sharded`` this is one more all-reduce of all gradients; ``gz.clip_grad_norm_`` does without. Where gradients are
    averaged in the backward they are the mean already, and nothing is sent. Under an exchange of weights there is no mean:
    ``p.grad`` is what this rank's own step uses.

    Args:
        model: what ``prepare`` returned.

    Raises:
        UsageError: a gradient was changed before, or ``gz.clip_grad_norm_`` has averaged gradients in this step already.
    """
    _average(model.parameters())
    yield


def watch_clipping() -> None:
    """Let PyTorch's functions that clip gradients average them first. See [Note: PyTorch's clipping]."""
    for name in (*_OF_PARAMETERS, *_OF_GRADIENTS):
        wrapper: Any = getattr(clip_grad, name)
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        if "func" in cells and not hasattr(cells["func"].cell_contents, "_averages"):
            make = _after_averages if name in _OF_PARAMETERS else _after_averages_of_gradients
            cells["func"].cell_contents = make(cells["func"].cell_contents)


def _average(parameters: Iterable[Tensor], scales: bool = False) -> None:
    """Average the gradients of all that is divided together with these parameters.

    Args:
        parameters: of any models.
        scales: whether all these gradients are multiplied by one factor then, so that the same ranks must hold them.
    """
    given = list(parameters)
    carriers = carriers_of(given)
    if scales:
        check_same_ranks(carriers)
        check_held(given, carriers)
    for carrier in carriers:
        with points_of(carrier.group).inside("an average of gradients"):
            carrier.average()


def _after_averages(function: Callable[..., Any]) -> Callable[..., Any]:
    scales = function.__name__ != "clip_grad_value_"

    @functools.wraps(function)
    def averaging(parameters: Any, *args: Any, **options: Any) -> Any:
        if isinstance(parameters, Tensor):
            _average([parameters], scales)
            return function(parameters, *args, **options)
        given = list(parameters)
        _average(given, scales)
        # PyTorch's warns of an empty generator only.
        again = (each for each in given) if isinstance(parameters, types.GeneratorType) else given
        return function(again, *args, **options)

    vars(averaging)["_averages"] = True
    return averaging


def _after_averages_of_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def averaging(tensors: Any, *args: Any, **options: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        wanted = {id(each) for each in given}
        follow_groups(wanted)
        for carrier in Carrier.alive():
            if any(id(p.grad) in wanted for p in carrier.parameters if p.grad is not None):
                _average(carrier.parameters[:1])
        return function(given, *args, **options)

    vars(averaging)["_averages"] = True
    return averaging
