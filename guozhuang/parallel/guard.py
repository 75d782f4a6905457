"""What the script may do with a parameter of which its rank holds a part: it never answers as if it were whole.

[Note: guarded parameters] Between the model's forwards, a divided parameter and its gradient are of a subclass that sees each
operation. What computes element by element is carried out: on the parts it gives what one process has. Anything else that the
script's own code asks for (a norm, an element, a product with another tensor) would be computed from a part, so it raises. Code
of this package and of PyTorch that knows of parts (optimizers, gradient scalers, states of modules, clipping) is told by the
frame that calls. Within forwards, backwards and steps nothing is looked at, and operations cost what they cost without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UsageError, explain
from .activations.names import DESCRIBES, is_elementwise, name_of
from .division import Division, division_of, whole

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Parts of PyTorch that work on the parameters they are given, each by itself, or through functions that know of parts.
_KNOWING = tuple(
    _TORCH + path.replace("/", os.sep)
    for path in (
        "optim/",
        "amp/",
        "nn/modules/module.py",
        "nn/utils/clip_grad.py",
        "distributed/",
        "_dynamo/",
        "_inductor/",
    )
)
_PASSED_ON = (_TORCH, os.path.join(os.path.dirname(os.__file__), "copy.py"))
_ALLOWED = {
    *("requires_grad", "requires_grad =", "requires_grad_", "grad =", "grad_fn", "_version", "output_nr", "is_shared"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__repr__", "_post_accumulate_grad_hooks"),
    *("_backward_hooks =", "_post_accumulate_grad_hooks =", "data_ptr", "_is_view", "_base", "T", "mT", "names"),
}
_PART_OF, _NAME = "_guozhuang_part_of", "_guozhuang_name"


def _torch_function(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    name = name_of(func)
    if name in DESCRIBES or torch._C._current_graph_task_id() != -1:
        return _run(func, args, kwargs)
    given = args[0] if args else None
    if name in ("grad", "data") and isinstance(given, Tensor):
        found = _run(func, args, kwargs)
        return found if found is None or _is_known(sys._getframe(1)) else _guarded(found, given)
    if name in _ALLOWED or _is_known(sys._getframe(1)):
        return _run(func, args, kwargs)
    tensors = [each for each in pytree.tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
    source = next(each for each in tensors if isinstance(each, _KINDS))
    division = part_of(source)
    does_each = is_elementwise(name.removeprefix("_foreach_"))
    if division is None or not does_each or not all(_goes_with(each, division) for each in tensors):
        raise _refusal(name, source)
    return pytree.tree_map_only(Tensor, lambda each: _guarded(each, source), _run(func, args, kwargs))


class GuardedParameter(nn.Parameter):
    """A divided parameter outside of the model's forward. See [Note: guarded parameters]."""

    __torch_function__: Any = classmethod(_torch_function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if _is_known(sys._getframe(1)):
            return _run(nn.Parameter.__deepcopy__, (self, memo), None)
        raise _refusal("a copy", self)


class GuardedPart(Tensor):
    """The gradient of a divided parameter, or what was computed from a part element by element."""

    __torch_function__: Any = classmethod(_torch_function)


_KINDS = (GuardedParameter, GuardedPart)


def part_of(tensor: Tensor) -> Division | None:
    """Return how the parameter is divided of whose shape a guarded tensor is; None if it is of none."""
    found: Division | None = vars(tensor).get(_PART_OF)
    return found if found is not None else division_of(tensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a parameter of a divided model, or of its gradient, detached. Every rank must call it.

    What is computed from these element by element is taken, too, and parts under ``sharded-gradients`` and ``sharded-weights``.
    A tensor that is not divided is returned as it is, detached.

    Args:
        tensor: a parameter, ``p.grad``, or something of the parameter's shape that was computed from them.

    Raises:
        UsageError: there is no gradient.
    """
    if not isinstance(tensor, Tensor):
        what = "full_tensor takes a parameter, its gradient, or what was computed from them element by element"
        raise UsageError(
            explain(what, value=tensor, fix="a gradient is None before the backward, and on stages that have none")
        )
    make_whole = getattr(tensor, "full_tensor", None)  # of a DTensor: of PyTorch's own division, and of fully_shard
    if make_whole is not None:
        whole_tensor: Tensor = make_whole()
        return whole_tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        division = part_of(tensor)
        found = tensor.detach() if division is None else whole(tensor, division)
        return found.as_subclass(Tensor) if type(found) is not Tensor else found


@contextlib.contextmanager
def as_plain(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters be what they are without a guard in this block, and gradients that the script has read too."""
    changed = [each for each in parameters if type(each) is GuardedParameter]
    for each in changed:
        plain: Any = each
        plain.__class__ = nn.Parameter
        gradient: Any = plain.grad
        if type(gradient) is GuardedPart:  # until the script reads it again
            gradient.__class__ = Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for each in changed:
            each.__class__ = GuardedParameter


def guard(model: nn.Module) -> list[nn.Parameter]:
    """Guard the divided parameters of a model from now on, and return them."""
    found = []
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and division_of(parameter) is not None:
            parameter.__class__ = GuardedParameter
            setattr(parameter, _NAME, name)
            found.append(parameter)
    return found


def unreadable(parameter: Tensor) -> Tensor:
    """Return what stands here for a number that another stage computes of a parameter: NaN that raises if it is read."""
    return _guarded(torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device), parameter)


def _run(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _guarded(found: Tensor, source: Tensor) -> Tensor:
    """Let a tensor of the shape of a part be one of the guarded ones."""
    if type(found) is Tensor:
        found.__class__ = GuardedPart
    if type(found) is GuardedPart and _PART_OF not in vars(found):
        setattr(found, _PART_OF, part_of(source))
        setattr(found, _NAME, vars(source).get(_NAME, ""))
    return found


def _goes_with(tensor: Tensor, division: Division) -> bool:
    if isinstance(tensor, _KINDS):
        return part_of(tensor) == division
    return tensor.dim() == 0


def _is_known(frame: FrameType | None) -> bool:
    """Return whether the code that asks knows of parts: this package's, or such of PyTorch's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and file != __file__:
            return True
        if file.startswith(_KNOWING):
            return True
        if not file.startswith(_PASSED_ON) and file != __file__:
            return False
        frame = frame.f_back
    return False


def _refusal(name: str, tensor: Tensor) -> UsageError:
    of = vars(tensor).get(_NAME) or "a parameter"
    subject = (
        f"the parameter {of!r}"
        if type(tensor) is GuardedParameter
        else f"the gradient of {of!r}, or what was computed from it,"
    )
    what = f"{subject} is divided among ranks, and {name} would be computed from the part of this rank"
    fix = "take gz.full_tensor(p) or gz.full_tensor(p.grad) on every rank, and clip by gz.clip_grad_norm_(model, ...)"
    return UsageError(explain(what, fix=fix))
