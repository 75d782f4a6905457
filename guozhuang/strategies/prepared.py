"""What ``prepare`` returns in the place of the user's module: wrappers that stand for it under its own names.

[Note: a wrapper that stands for its module] A script reads attributes of its model, calls its methods and saves its state.
Under some strategies the model is the user's own object, under others a wrapper with the module inside. So these wrappers pass
on to the module what they do not have themselves, and hide the level ``module`` in names of parameters, buffers and states:
the script is the same under every strategy. Copies and pickles are of the module alone, because a copy of a model (an average
of weights, the best one so far) is not trained. The public class ``DistributedDataParallel`` keeps PyTorch's names.

A method of the module that is called through the wrapper may compute a loss without a call of the wrapper. Then what the
wrapper does around a forward is done around the module's own forward, or for the tensors that the method returns. Parts that
the script calls itself (``model.head(model.body(x))``) do not pass through the wrapper, so nothing averages their gradients:
the optimizer's step finds that out.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils import _pytree
from typing_extensions import override

from ..data_parallel import DataParallel
from ..distributed import DistributedDataParallel
from ..errors import UsageError, explain
from ..registry import registry
from ..sharding.whole import is_divided

_log = logging.getLogger("guozhuang")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module, without the wrapper that ``prepare`` or a trainer put around it, and without ``torch.compile``.

    Calling it trains nothing together: no rank waits for another, and gradients stay on this rank. Under ``sharded-gradients``
    and ``sharded-weights`` the module itself is divided, so its forward needs every rank as before. Functions that look for
    PyTorch's wrapper classes in a model, as those of ``torch.distributed.checkpoint.state_dict`` do, take what this returns.

    Raises:
        UsageError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        what = "unwrap() takes a module"
        raise UsageError(explain(what, value=type(model).__name__, fix="give the model that prepare() returned"))
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this question
    if compiler is not None and isinstance(model, compiler.OptimizedModule):
        return unwrap(model._orig_mod)
    return unwrap(model.module) if isinstance(model, _WRAPPERS) else model


class StandsForModule(nn.Module):
    """The part of the wrappers below that passes on to ``module``. See [Note: a wrapper that stands for its module].

    An attribute that the wrapper lacks is set on the module, unless its name begins with an underscore and the module lacks it
    too. Attributes that both have are the wrapper's; :func:`unwrap` gives access to the module's.
    """

    module: nn.Module
    _stands = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_load_state_dict_pre_hook(_add_level)  # type: ignore[no-untyped-call]
        self._stands = True

    # ---- attributes -----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            # Python and libraries ask for such names to learn about the object itself, not about the model.
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        found: Any = getattr(module, name)
        if inspect.ismethod(found) and found.__self__ is module and hasattr(type(self), "_post_forward"):
            return functools.wraps(found)(functools.partial(_call, self, found))
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if self._stands and not self._has(name) and (not name.startswith("_") or hasattr(self.module, name)):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._stands and not self._has(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def __getitem__(self, key: Any) -> Any:
        """Return a part of the module, as ``nn.Sequential`` and similar modules do."""
        inside: Any = self.module
        return inside[key]

    def __len__(self) -> int:
        """Return the number of parts of the module, if it has a length."""
        inside: Any = self.module
        return len(inside)

    def __bool__(self) -> bool:
        return True  # also of a module without a length

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def _has(self, name: str) -> bool:
        own = self.__dict__
        tensors_and_parts = (own["_parameters"], own["_buffers"], own["_modules"])
        return name in own or hasattr(type(self), name) or any(name in some for some in tensors_and_parts)

    # ---- names and states -----------------------------------------------------------------------------------------------

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the module and its parts under the module's own names; so do ``named_parameters`` and ``named_buffers``."""
        yield from self.module.named_modules(*args, **options)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the parts of the module; so does ``children``."""
        yield from self.module.named_children()

    @override
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.module.train(mode)  # of which the line above reaches the parts alone
        return self

    @override
    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        self.module.apply(fn)
        return self

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.module._apply(fn, recurse)
        return super()._apply(fn, recurse=False)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the module's state. Under a strategy that exchanges weights every rank must call."""
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load the module's state; see ``torch.nn.Module.load_state_dict``. Every rank must call."""
        return self.module.load_state_dict(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # cast returns the module: [Note: pickles without this package] in registry.py.
        return cast, (None, self.module)


# What unwrap() looks through.
_WRAPPERS = (StandsForModule, nn.parallel.DistributedDataParallel, DataParallel, nn.DataParallel)


class AveragesGradients(StandsForModule):
    """The part of the wrappers below that finds steps of the optimizer whose gradients nothing has averaged."""

    _was_called = False

    def look_at_steps(self, optimizer: Optimizer) -> None:
        """Let the optimizer's step raise if there are gradients and nothing went through this wrapper since the last step.

        A closure's loss becomes the mean over ranks for optimizers that may decide by it: [Note: losses of closures].
        """
        this = weakref.ref(self)

        def look(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (wrapper := this()) is None:
                return None
            wrapper._check_step()
            return wrapper._with_mean_loss(args, kwargs) if _may_decide_by_loss(stepped) else None

        optimizer.register_step_pre_hook(look)

    def _with_mean_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of an optimizer's step with a closure that returns the mean loss; None if there is none."""
        if getattr(self, "around", None) is not None:  # an exchange of weights: each rank trains alone
            return None
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._mean_of(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._mean_of(args[1]), *args[2:]), kwargs
        return None

    def _mean_of(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        group: dist.ProcessGroup = cast(Any, self).process_group

        @functools.wraps(closure)
        def averaging() -> Any:
            loss = closure()
            if loss is None or group.size() == 1:
                return loss
            wide = torch.as_tensor(loss).detach()
            mean = wide.to(torch.float64 if wide.device.type == "cpu" else torch.float32, copy=True)
            mean.mul_(registry.weight.among(group.size(), group.rank()) / group.size())
            dist.all_reduce(mean, group=group)
            return mean.to(wide.dtype) if isinstance(loss, torch.Tensor) else mean.item()

        return averaging

    def _check_step(self) -> None:
        was_called = self._was_called
        self.__dict__["_was_called"] = False
        if was_called or getattr(self, "keeps_gradients", False) or all(p.grad is None for p in self.parameters()):
            return
        what = "optimizer.step() came with gradients of no forward of the prepared model, so they are this rank's own"
        fix = (
            "call the model, or one method of it that computes the loss, and not its parts: model(x), not model.head(x)"
        )
        raise UsageError(explain(what, value=type(self.module).__name__, fix=fix))

    @_disable_dynamo
    def _post_forward(self, outputs: Any) -> Any:
        if torch.is_grad_enabled():
            self.__dict__["_was_called"] = True
        inside: Any = super()
        return inside._post_forward(outputs)


def _may_decide_by_loss(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may compare the losses that a closure returns.

    [Note: losses of closures] LBFGS searches along a line for a small enough loss. By its own loss each rank would take another
    step, with averaged gradients all the same. Of PyTorch's optimizers it is the only one; one of another author may do so.
    """
    module = type(optimizer).__module__
    return isinstance(optimizer, torch.optim.LBFGS) or not module.startswith(("torch.optim.", "guozhuang."))


class PreparedDDP(AveragesGradients, DistributedDataParallel):  # type: ignore[override]
    """This project's DistributedDataParallel, standing for its module."""

    _warns = False


class PreparedTorchDDP(AveragesGradients, nn.parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel, standing for its module."""


class PreparedDataParallel(StandsForModule, DataParallel[nn.Module]):
    """This project's DataParallel, standing for its module."""


def warn_of_differences(model: nn.Module) -> None:
    """Log a warning if the module's states are divided, or its public attributes are hidden by those of the wrapper."""
    if is_divided(model):
        _log.warning(
            "model.state_dict() and optimizer.state_dict() hold this rank's part alone from now on (DTensors): save whole ones "
            "with gz.save(folder), or torch.distributed.checkpoint.state_dict.get_model_state_dict(..., "
            "StateDictOptions(full_state_dict=True))"
        )
    if not isinstance(model, StandsForModule):
        return
    theirs = _public(model.module, nn.Module)
    hidden = sorted(name for name in theirs & _public(model, nn.Module) if _differ(model, name))
    if hidden:
        what = "the prepared model has attributes of its own that hide your model's"
        _log.warning("%s", explain(what, value=hidden, fix=f"reach yours by gz.unwrap(model).{hidden[0]}"))


def _public(module: nn.Module, base: type) -> set[str]:
    classes = [each for each in type(module).__mro__ if not issubclass(base, each)]
    own = module.__dict__
    names = {*own, *own["_parameters"], *own["_buffers"], *own["_modules"]}.union(*(vars(each) for each in classes))
    return {name for name in names if not name.startswith("_") and not hasattr(base, name) and name != "training"}


def _differ(model: StandsForModule, name: str) -> bool:
    try:
        here, inside = getattr(model, name), getattr(model.module, name)
        return here is not inside and (callable(here) or callable(inside) or bool(here != inside))
    except Exception:  # a property that cannot be read now, or values that cannot be compared
        return True


def _call(wrapper: Any, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method of the module, and let the wrapper prepare the backward through what it computes."""
    module: nn.Module = wrapper.module
    if not torch.is_grad_enabled():
        return method(*args, **options)
    if not module.training:  # one rank alone may call it, to sample, so no buffers are sent before its forwards
        return _prepared_backward(wrapper, method(*args, **options))
    num_forwards = 0

    def before(_: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        return wrapper._pre_forward(*inputs, **given) if torch.is_grad_enabled() else None

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        nonlocal num_forwards
        if torch.is_grad_enabled():
            num_forwards += 1
            return wrapper._post_forward(output)
        return None

    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]
    try:
        found = method(*args, **options)
    finally:
        for handle in handles:
            handle.remove()
    return found if num_forwards else _prepared_backward(wrapper, found)


def _prepared_backward(wrapper: Any, found: Any) -> Any:
    """Let the wrapper prepare the backward through what a method has returned, if there is one."""
    return wrapper._post_forward(found) if has_graph(found) else found


def has_graph(found: Any) -> bool:
    """Return whether a backward can go through some tensor of what a method has returned."""
    leaves = _pytree.tree_leaves(found)
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves)


def _add_level(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Rename the entries of a state that is loaded into a module of which the wrapper is a part."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
