"""The units in which ``fully_shard`` gathers weights and sums gradients: ranks stay in step, and no gradient is left behind.

[Note: graphs past the outputs] PyTorch finds out by hooks that a backward reaches a unit. These are on tensors in tuples, dicts
and dataclasses that the unit returns. A backward may come by others: by tensors in an object of the model's own class, by a
loss that a module keeps in an attribute. It would find weights that were freed, or leave gradients that nobody sums. So those
tensors get the same hook, and each parameter one that has PyTorch finish the backward at its end.

[Note: a backward through a backward] With ``create_graph=True`` a second backward reads weights that PyTorch frees at the end
of the first, and its gradients come in no order that would tell when a unit has all of them. So from such a backward to the
optimizer's step gathered weights stay, and gradients are summed when a backward has ended. What the script reads between these
backwards and the step are the divided parameters all the same, for they have the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree

from ...errors import UsageError, explain
from ...gradients.forwards import current_number, tensors_with_graph
from ...gradients.output_hooks import OutputHook
from ...gradients.passes import weakly
from ...units import listed
from .own_gradients import CALL_BACKWARD
from .together import History, Together

_OF_MODULES = frozenset(vars(nn.Module()))  # the attributes that every module has


class Units:
    """All units of a model that ``fully_shard`` has divided.

    Args:
        modules: the modules that are units, by name, the whole model last.
        compare: compares what ranks do; None: there is one rank.

    Attributes:
        is_kept: whether gathered weights stay until the next step. See [Note: a backward through a backward].
        had_forward: whether a forward with gradients came since the last step.
    """

    def __init__(self, modules: Mapping[str, nn.Module], compare: Together | History | None) -> None:
        self.compare, self.is_kept, self._is_ending, self.had_forward = compare, False, False, False
        self._units = [_Unit(self, i, name, module) for i, (name, module) in enumerate(modules.items())]
        inside = {id(part) for unit in self._units[:-1] for part in unit.module.modules()}
        self._units[-1].parts = [part for part in self._units[-1].parts if id(part) not in inside]
        for unit in self._units:
            unit.follow()

    @property
    def sums_now(self) -> bool:
        """Whether the gradients of a unit are summed when PyTorch says that the unit has them all."""
        return not self.is_kept or self._is_ending

    @property
    def have_gradients(self) -> bool:
        """Whether a parameter has a gradient for the step."""
        return any(unit.has_gradients for unit in self._units)

    @property
    def run(self) -> bool:
        """Whether one of the units is in a forward or a backward."""
        return any(unit.runs for unit in self._units)

    def end_backward(self, end: Callable[[], None]) -> None:
        """Sum the gradients that are not summed yet, then do what PyTorch does at the end of a backward."""
        self._is_ending = True
        try:
            for unit in self._units:
                unit.reopen()
            end()
        finally:
            self._is_ending = False
        if self.is_kept:
            self.free()

    def before_step(self) -> None:
        """Check that gradients and hooks are where the optimizer's step needs them. Every rank must call.

        Raises:
            UsageError: the script has registered hooks that PyTorch would not call; gradients were not summed.
        """
        hooked = [name for unit in self._units for name in unit.hooked()]
        if hooked:
            what = (
                f"gradients arrive in parts that the hooks of register_hook do not see, which are on {listed(hooked)}"
            )
            fix = (
                "register_post_accumulate_grad_hook gets the mean gradient, this rank's part of it; or train with the strategy "
                "ddp"
            )
            raise UsageError(explain(what, fix=fix))
        left = [name for unit in self._units for name in unit.left()]
        if left:
            what = f"the step would miss gradients that are not averaged, of {listed(left)}"
            fix = (
                "call set_requires_gradient_sync(True) before the last backward of a step, or use gz.accumulate; set no "
                "gradient by hand between forward and backward"
            )
            raise UsageError(explain(what, fix=fix))
        if self.had_forward and not self.have_gradients:
            if isinstance(self.compare, Together):
                self.compare.before_empty_step()
            what = "no parameter of the model has a gradient in this step, after a forward with gradients"
            raise UsageError(explain(what, fix=CALL_BACKWARD))
        self.had_forward = False
        if isinstance(self.compare, History):
            self.compare.end_step()
        if self.is_kept:
            self.is_kept = False
            self.free()

    def holds(self, given: object) -> bool:
        """Return whether this is a divided parameter of these units."""
        return any(unit.holds(given) for unit in self._units)

    def free(self) -> None:
        """Free the whole weights of all units, unless a forward or a backward runs, or one is to come that needs them.

        Then modules have the divided parameters at least.
        """
        if self.run:
            return
        for unit in self._units:
            if self.is_kept:
                unit.show(whole=False)
            else:
                unit.free()

    def divided(self, given: Any) -> Any:
        """Return the divided parameter, if a whole one of these units was given, and anything else as it is.

        Between a forward and its backward the model's parameters are whole ones, which a script may hand to an optimizer.
        """
        return next((found for unit in self._units if (found := unit.divided(given)) is not None), given)


class _Unit:
    """One unit: the names that PyTorch keeps to itself are used here alone.

    Args:
        units: all of them.
        number: the index of this one.
        name: the module's name in the model, "" for the model.
        module: the module, to which ``fully_shard`` was applied.
    """

    def __init__(self, units: Units, number: int, name: str, module: Any) -> None:
        self._units, self._number, self._prefix, self.module = units, number, f"{name}." if name else "", module
        self._state = module._get_fsdp_state()
        self._group = self._state._fsdp_param_group  # None: all parameters are in other units
        self._start, self._watched = 0, 0
        self._versions: dict[int, int] = {}
        self.parts = list(module.modules())

    def follow(self) -> None:
        """Begin to act around what PyTorch does for this unit."""
        vars(self.module)["named_parameters"] = functools.partial(self._named_parameters, self.module.named_parameters)
        self.module.register_forward_pre_hook(self._begin)
        self.module.register_forward_hook(self._end)
        end = self._state._root_post_backward_final_callback
        self._state._root_post_backward_final_callback = lambda: self._units.end_backward(end)
        if self._group is None:
            return
        self._sum, self._free = self._group.post_backward, self._group.reshard
        self._group.post_backward, self._group.reshard = self._sum_together, self._free_unless_kept
        gathers = self._group.unshard, self._group.wait_for_unshard
        self._group.unshard, self._group.wait_for_unshard = map(_not_in_inference_mode, gathers)
        for each in self._group.fsdp_params:
            if each.sharded_param.requires_grad:
                each.sharded_param.register_hook(_Placed(each.sharded_param))
        if self._units.compare is not None:
            self.module.set_custom_all_gather(
                _Compared(self._group._all_gather_comm, self._units.compare, self._number)
            )

    def holds(self, given: object) -> bool:
        """Return whether this is a divided parameter of this unit."""
        return self._group is not None and any(each.sharded_param is given for each in self._group.fsdp_params)

    def divided(self, given: object) -> Any:
        """Return the divided parameter of which this is the whole one; None if it is no whole one of this unit."""
        parameters = () if self._group is None else self._group.fsdp_params
        return next((p.sharded_param for p in parameters if getattr(p, "_unsharded_param", None) is given), None)

    def _named_parameters(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # changes and averages are of divided ones; a penalty may be of whole ones
            self._units.free()
        return method(*args, **options)

    # ---- around a forward ------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._units.is_kept:
            self.show(whole=True)
        if torch.is_grad_enabled():
            self._start = current_number()
            self._watch()

    def _watch(self) -> None:
        """Have PyTorch finish each backward that reaches a parameter of this unit.

        Hooks of tensors do not keep this object alive: Python's garbage collector does not see them, and would free no model.
        """
        parameters = () if self._group is None else self._group.fsdp_params
        if self._watched == len(parameters):
            return
        self._watched = 0
        for each in parameters:
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and not whole._post_accumulate_grad_hooks:
                whole.register_post_accumulate_grad_hook(weakly(self._on_gradient))
            self._watched += whole is not None and bool(whole._post_accumulate_grad_hooks)

    @_disable_dynamo
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._units.had_forward |= module.training
            for tensor in (*tensors_with_graph(output), *self._kept_in_attributes()):
                if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._start:
                    tensor.register_hook(weakly(self._before_backward))
        else:
            # No backward will free them. Parameters would be whole ones, and changes of them be lost.
            self._units.free()

    def _kept_in_attributes(self) -> Iterator[Tensor]:
        for part in self.parts:
            for name, value in vars(part).items():
                if name in _OF_MODULES:
                    continue
                if isinstance(value, Tensor):
                    yield value
                elif isinstance(value, (list, tuple, dict)):
                    yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))

    # ---- around a backward -----------------------------------------------------------------------------------------------

    def _before_backward(self) -> None:
        if torch.is_grad_enabled():  # this backward makes a graph of its own
            self._units.is_kept = True
        if self._units.is_kept:
            self.show(whole=True)
        self._state._pre_backward(None)  # which returns what it is given

    def _on_gradient(self) -> None:
        self._state._register_root_post_backward_final_callback()

    @_disable_dynamo
    def _sum_together(self, *unused: Any) -> None:
        if not self._units.sums_now:
            return
        if self._units.compare is not None and self._group.reduce_grads:
            self._agree(self._units.compare)
        self._sum()

    def _agree(self, compare: Together | History) -> None:
        """Compare with the other ranks whose turn it is, and give zeros for gradients that only others have."""
        parameters = self._group.fsdp_params
        if not all(hasattr(each, "_unsharded_param") for each in parameters):
            return  # the unit was never gathered, on no rank
        flags = [_has_gradient(each) for each in parameters]
        for each, is_here, is_anywhere in zip(parameters, flags, compare.before_sum(self._number, flags), strict=True):
            if is_anywhere and not is_here:
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param)

    def _free_unless_kept(self) -> None:
        if not self._units.is_kept:
            self._check_unchanged()
            self._free()

    def _check_unchanged(self) -> None:
        """Raise if whole weights were changed in place, for what is freed now is lost."""
        for each in self._group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            version = 0 if whole is None else whole._version
            if version == self._versions.get(id(each), 0):  # PyTorch gathers without a new version
                continue
            self._versions[id(each)] = version
            what = f"{self._name(each)} was changed while it was gathered for a forward, and this change would be lost"
            fix = (
                "change model.parameters() between a step and the next forward, under torch.no_grad() and on every rank; and "
                "do not change weights in a forward, as an embedding with max_norm does"
            )
            raise UsageError(explain(what, fix=fix))

    def reopen(self) -> None:
        """Let PyTorch sum the gradients of this unit at the end of a backward if some came after it had done so."""
        kinds = type(self._state._training_state)
        if self.left() and self._group._training_state == kinds.POST_BACKWARD:
            self._group._training_state = kinds.IDLE

    # ---- at a step -------------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Return the names of parameters whose gradients are not summed yet."""
        parameters = () if self._group is None else self._group.fsdp_params
        return [self._name(each) for each in parameters if _has_gradient(each)]

    def hooked(self) -> list[str]:
        """Return the names of parameters with hooks that nobody calls."""
        parameters = () if self._group is None else self._group.fsdp_params
        hooks = ((each, (each.sharded_param._backward_hooks or {}).values()) for each in parameters)
        return [self._name(each) for each, some in hooks if any(not isinstance(hook, _Placed) for hook in some)]

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient for the step."""
        return self._group is not None and any(each.sharded_param.grad is not None for each in self._group.fsdp_params)

    @property
    def runs(self) -> bool:
        """Whether this unit is in a forward or a backward."""
        state = self._state._training_state
        return bool(state != type(state).IDLE)

    def free(self) -> None:
        """Free the whole weights."""
        if self._group is not None and self._group.is_unsharded:
            self._free_unless_kept()

    def show(self, *, whole: bool) -> None:
        """Let the modules have their whole parameters, if these are gathered, or the divided ones, while memory stays."""
        if self._group is not None and self._group.is_unsharded:
            for each in self._group.fsdp_params:
                each._setattr_on_modules(each._unsharded_param if whole else each.sharded_param)

    def _name(self, parameter: Any) -> str:
        module, name = parameter._module_info.module, parameter._module_info.param_name
        paths = [path for path, part in self.module.named_modules() if part is module]
        return self._prefix + (f"{paths[0]}.{name}" if paths and paths[0] else name)


def _not_in_inference_mode(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather of weights into ordinary tensors, of which a forward with gradients may be the next user."""

    def gathering(*args: Any, **options: Any) -> Any:
        is_enabled = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
            return gather(*args, **options)

    return gathering


def _has_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None)


class _Placed(OutputHook):
    """A hook that divides a gradient as its parameter is divided, where the script has computed with the divided parameter.

    Args:
        parameter: the divided parameter.
    """

    def __init__(self, parameter: Any) -> None:
        self._mesh, self._placements = parameter.device_mesh, parameter.placements

    def __call__(self, gradient: Any, *unused: Any) -> Any:
        """Return the gradient, divided. Every rank must call."""
        return gradient.redistribute(self._mesh, self._placements)


class _Compared:
    """An all-gather before which the ranks compare whose weights it is for.

    Args:
        gather: the all-gather.
        compare: compares.
        number: the number of the unit.
    """

    def __init__(self, gather: Any, compare: Together | History, number: int) -> None:
        self._gather, self._compare, self._number = gather, compare, number

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        """Return the memory for the whole weights."""
        memory: Tensor = self._gather.allocate(*args, **options)
        return memory

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Gather the weights of the unit. Every rank must call."""
        self._compare.before_gather(self._number)
        return self._gather(*args, **options)
