"""Says why ``torch.autograd.grad`` finds no gradients of divided weights, in place of PyTorch's advice to allow that."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UsageError, explain

if TYPE_CHECKING:
    from .units import Units

#: What to do to get gradients of divided weights.
CALL_BACKWARD = (
    "call loss.backward() on what the model returned; torch.autograd.grad(loss, model.parameters()) finds no gradients where "
    "weights are divided, so take it with the strategy sharded"
)
_alive: weakref.WeakSet[Units] = weakref.WeakSet()


def explain_own_gradients(units: Units) -> None:
    """Raise a UsageError where ``torch.autograd.grad`` is asked for gradients of the divided weights of these units.

    The graph is of whole weights, which exist for a while, and so has no path to the parameters. PyTorch's function looks up
    the one that is replaced here when it is called, so that scripts which have imported it before are served too.
    """
    _alive.add(units)
    places: Any = torch.autograd
    if hasattr(places._engine_run_backward, "_explains"):
        return
    runs = places._engine_run_backward

    def explaining(*args: Any, **options: Any) -> Any:
        try:
            return runs(*args, **options)
        except RuntimeError as error:
            if "allow_unused" in str(error) and _asks_for_divided(args):
                what = "torch.autograd.grad was asked for gradients of weights that are divided among ranks"
                raise UsageError(explain(what, fix=CALL_BACKWARD)) from error
            raise

    vars(explaining)["_explains"] = True
    places._engine_run_backward = explaining


def _asks_for_divided(arguments: tuple[Any, ...]) -> bool:
    asked = [each for some in arguments if isinstance(some, tuple) for each in some]
    return any(units.holds(each) for units in list(_alive) for each in asked)
