"""Parameters whose new values are still being all-gathered: code that reads one waits for it.

[Note: reading waits] After a step each rank holds new values of its own part only; the rest arrives by an all-gather that
writes into the memory of the parameters. Until it is done nothing may read that memory, and there are many readers: the next
forward, but also a moving average, a norm that is printed, ``state_dict``, ``copy.deepcopy``, ``torch.save``. Hooks on
modules would miss most of them, and also forwards that read the weights of another module. So the parameters themselves
change their class until then: to one whose ``__torch_function__`` PyTorch calls before any operation on them, in eager
Python. That call waits for the all-gather, restores the class of every parameter of that all-gather, and runs the operation.
Operations that only ask for the gradient, the shape and the like do not wait.

Two kinds of code read a parameter without Python: compiled graphs (``torch.compile``, ScriptModules), and C++ extensions that
are given the parameter itself and are not called through ``torch.ops``. If a graph was compiled in this process, or the
model has a ScriptModule, :func:`reads_past_python` returns True, and the step itself waits. For such extensions there is
``overlap_gather=False``. The backward pass, which also runs in C++, reads only what a forward has read before it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree

_FREE = (
    *("shape", "dtype", "device", "layout", "ndim", "grad", "requires_grad", "is_leaf", "grad_fn"),
    *("is_sparse", "is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes", "is_quantized"),
)
_FREE_CALLS = ("size", "numel", "dim", "stride", "is_floating_point", "is_contiguous", "register_hook", "__hash__")


def _free() -> frozenset[Any]:
    tensor: Any = torch.Tensor
    getters = [getattr(tensor, name).__get__ for name in _FREE]
    setters = [tensor.grad.__set__, tensor.requires_grad.__set__, tensor.grad.__delete__]
    return frozenset([*getters, *setters, *(getattr(tensor, name) for name in _FREE_CALLS)])


#: Operations that read no element, and therefore do not wait.
FREE = _free()


class Gathering:
    """Parameters whose new values arrive by one all-gather.

    Args:
        work: the running all-gather.
        parameters: of the class ``nn.Parameter`` itself; they become :class:`Arriving` until the all-gather has ended.
    """

    def __init__(self, work: dist.Work, parameters: Sequence[nn.Parameter]) -> None:
        self._work = work
        self._parameters = parameters
        for parameter in parameters:
            parameter.__dict__["_gathering"] = self
            parameter.__class__ = Arriving

    def finish(self) -> None:
        """Wait for the all-gather, and restore the parameters' class. A second call does nothing."""
        self._work.wait()
        for parameter in self._parameters:
            if type(parameter) is Arriving:
                cast(Any, parameter).__class__ = nn.Parameter
            parameter.__dict__.pop("_gathering", None)


class Arriving(nn.Parameter):
    """The class of a parameter while its new values are being gathered. See [Note: reading waits]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for every such parameter among the arguments, then run the operation."""
        if func in FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if type(leaf) is cls:
                _finish(leaf)
        return func(*args, **(kwargs or {}))

    # Copying and pickling test the parameter's class before they read it, so these two wait themselves.
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Wait for the values, then copy the parameter."""
        _finish(self)
        return cast(nn.Parameter, cast(Any, nn.Parameter).__deepcopy__(self, memo))

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        """Wait for the values, then pickle the parameter."""
        _finish(self)
        return cast(Any, nn.Parameter).__reduce_ex__(self, proto)


def _finish(parameter: nn.Parameter) -> None:
    gathering = parameter.__dict__.get("_gathering")
    if gathering is not None:
        gathering.finish()
    elif type(parameter) is Arriving:  # another thread has restored it meanwhile, or this is a shallow copy
        cast(Any, parameter).__class__ = nn.Parameter


def can_wait_in_readers(parameter: nn.Parameter) -> bool:
    """Tell whether readers of this parameter can be made to wait: its class is ``nn.Parameter``, not a subclass."""
    return type(parameter) is nn.Parameter


def reads_past_python(model: nn.Module) -> bool:
    """Tell whether compiled code may read the model's parameters. See [Note: reading waits]."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # PyTorch marks its own functions that are not to be compiled with the backend None.
    if compiler is not None and any(backend is not None for backend in compiler.cached_backends.values()):
        return True
    return any(isinstance(part, torch.jit.ScriptModule) for part in model.modules())
