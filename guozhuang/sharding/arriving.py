"""Weights that are still on their way: whoever reads one waits for it.

[Note: reading waits] After a step each rank holds new values of its own part only; the rest arrives by an all-gather that
writes into the memory of the parameters. Until it is done no reader may see that memory, and readers are many: the next
forward, but also a moving average, a norm that is printed, ``state_dict``, ``copy.deepcopy``, ``torch.save``. Hooks on
modules would miss most of them, and also forwards that read the weights of another module. So the parameters themselves
change their class while they wait: to one whose ``__torch_function__`` PyTorch calls before any operation on it, in eager
Python. That call waits for the all-gather, gives the class back to every parameter that came with it, and goes on. What
only asks for the gradient, the shape and the like does not wait.

Two kinds of code read a parameter past Python: compiled graphs (``torch.compile``, ScriptModules), and C++ extensions that
are given the parameter itself and are not called through ``torch.ops``. Where a graph was compiled in this process, or the
model has a ScriptModule, :func:`reads_past_python` says so, and the step waits itself. For extensions of that kind there is
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


#: Operations that read no element.
FREE = _free()


class Gathering:
    """Parameters whose values an all-gather brings.

    Args:
        work: the all-gather.
        parameters: of the class ``nn.Parameter`` itself; from now on whoever reads one waits.
    """

    def __init__(self, work: dist.Work, parameters: Sequence[nn.Parameter]) -> None:
        self._work = work
        self._parameters = parameters
        for parameter in parameters:
            parameter.__dict__["_gathering"] = self
            parameter.__class__ = Arriving

    def finish(self) -> None:
        """Wait, and give the parameters back. A second call does nothing."""
        self._work.wait()
        for parameter in self._parameters:
            if type(parameter) is Arriving:
                cast(Any, parameter).__class__ = nn.Parameter
            parameter.__dict__.pop("_gathering", None)


class Arriving(nn.Parameter):
    """A parameter in the meantime. See [Note: reading waits]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for every such parameter among the arguments, then do what was asked."""
        if func in FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if type(leaf) is cls:
                _finish(leaf)
        return func(*args, **(kwargs or {}))

    # These two look at the class before they read.
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy what it is when it is here."""
        _finish(self)
        return cast(nn.Parameter, cast(Any, nn.Parameter).__deepcopy__(self, memo))

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        """Pickle what it is when it is here."""
        _finish(self)
        return cast(Any, nn.Parameter).__reduce_ex__(self, proto)


def _finish(parameter: nn.Parameter) -> None:
    gathering = parameter.__dict__.get("_gathering")
    if gathering is not None:
        gathering.finish()
    elif type(parameter) is Arriving:  # another thread was faster, or it is a shallow copy
        cast(Any, parameter).__class__ = nn.Parameter


def can_wait_in_readers(parameter: nn.Parameter) -> bool:
    """Tell whether every reader of this parameter would notice that it has to wait, as far as its class says."""
    return type(parameter) is nn.Parameter


def reads_past_python(model: nn.Module) -> bool:
    """Tell whether compiled code may read the model's parameters. See [Note: reading waits]."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # PyTorch itself marks functions that are not to be compiled, with the backend None.
    if compiler is not None and any(backend is not None for backend in compiler.cached_backends.values()):
        return True
    return any(isinstance(part, torch.jit.ScriptModule) for part in model.modules())
