"""Stages 2 and 3: gradients, or gradients and weights, divided among ranks by PyTorch's ``fully_shard``.

Each repeated block of the model (a transformer layer) is gathered and reduced as a unit, the rest with the root module.
Stage 2 keeps a block's weights from its forward to its backward; stage 3 drops them after use and gathers them again.

Source: Rajbhandari et al., arXiv:1910.02054; Zhao et al., PyTorch FSDP, VLDB 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from ...errors import UsageError, explain
from ...exchange.nan_watch import NanWatch
from ...gradients.script_hooks import is_own
from ...sync_batch_norm import use_on_cpu
from ...weights.equal_start import start_equal
from ..elementwise import WHY_NOT
from ..prepared import EqualBuffers
from ..state import is_elementwise
from ..whole import is_dtensor
from .copies import make_copyable, materialize
from .own_gradients import explain_own_gradients
from .together import History, Together
from .units import Units

# These optimizers keep parameters, or their shapes, in attributes, so parameters cannot be replaced by DTensors.
_CANNOT_FOLLOW = {**WHY_NOT, "Adafactor": "it keeps a sum per row and column of each weight matrix"}


def shard_fully(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None = None, *, keep_weights: bool
) -> tuple[nn.Module, Optimizer]:
    """Divide gradients and optimizer state, and weights unless ``keep_weights``, by ``fully_shard``. Every rank must call it.

    Parameters become DTensors, new objects; the optimizer, the same instance, holds these from now on, with its groups,
    defaults and state. Its ``state_dict()`` then holds DTensors; whole ordinary tensors, for any number of ranks, are saved and
    loaded by ``torch.distributed.checkpoint.state_dict`` (``get_model_state_dict``, ``get_optimizer_state_dict``, ``set_...``,
    with ``StateDictOptions(full_state_dict=True)``).

    Args:
        model: equal on all ranks in names, shapes and dtypes; all ranks get rank 0's weights.
        optimizer: holds its parameters; an optimizer that acts element by element gives the same result as on one process.
        group: the ranks; all by default.
        keep_weights: True: stage 2, a block's weights stay gathered from its forward to its backward; False: stage 3.

    Returns:
        The model (its class is now PyTorch's FSDP subclass of it) and the optimizer.

    Raises:
        UsageError: the optimizer cannot follow its parameters (LBFGS, SparseAdam), its state has neither one value
            per element nor one per parameter, or a parameter is complex or has no dimension, no elements or hooks.
        MismatchError: ranks hold different models.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise UsageError(explain("there is no process group", fix="call gz.init() first, on every rank"))
    who = type(optimizer).__name__
    if who in _CANNOT_FOLLOW:
        what = f"{who} cannot step divided weights: {_CANNOT_FOLLOW[who]}"
        raise UsageError(explain(what, fix=f"train with the strategy {'ddp' if who in WHY_NOT else 'sharded'}"))
    _check_parameters(model)
    if all(p.device.type == "cpu" for p in model.parameters()):
        model = use_on_cpu(model)
    for p in model.parameters():
        if not p.is_contiguous():  # as of a model in channels_last; fully_shard divides contiguous memory
            p.data = p.data.contiguous()
    start_equal(model, group)
    name_of = {id(p): name for name, p in model.named_parameters()}
    kept = {name_of[id(p)]: optimizer.state.pop(p) for p in list(optimizer.state) if isinstance(p, Tensor)}
    elementwise = {
        (name, key): is_elementwise(key, value, model.get_parameter(name), who)
        for name, values in kept.items()
        for key, value in values.items()
    }
    named = [[name_of[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    units = _Division(group, mesh, keep_weights).divide(model, [*repeated_blocks(model), model])
    new = dict(model.named_parameters(remove_duplicate=False))
    for param_group, names in zip(optimizer.param_groups, named, strict=True):
        param_group["params"] = [new[name] for name in names]
    rest = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    optimizer.state = defaultdict(dict, rest)
    for name, values in kept.items():
        optimizer.state[new[name]] = {
            key: _like(new[name], value) if elementwise[name, key] else value for key, value in values.items()
        }
    watch, numbers = NanWatch(group, are_averaged=True), itertools.count()
    new_names, new_parameters = list(new), list(new.values())

    if isinstance(units.compare, Together):
        from ...gradients.alike import Alike  # imported only when needed

        # A batch that was left out is found by what comes after its forward.
        units.compare.alike = Alike(group, new_parameters, lambda: (0, 0))
        units.compare.alike.compares_weights = False

    def check() -> None:
        for param_group in optimizer.param_groups:
            param_group["params"] = [p if is_dtensor(p) else units.divided(p) for p in param_group["params"]]
        units.before_step()
        watch.look_at(new_names, new_parameters, next(numbers))

    def before_step(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if _closure_of(args, options) is None:
            check()

    def before_closure(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A closure computes the gradients of the step when it is called; others may be there before."""
        closure = _closure_of(args, options)
        if closure is None:
            return None
        if units.have_gradients:
            units.before_step()

        @functools.wraps(closure)
        def checked() -> Any:
            found = closure()
            check()
            return found

        of_step = (args[0], checked, *args[2:]) if len(args) > 1 else args
        return of_step, options | ({"closure": checked} if "closure" in options else {})

    def at_first_forward(*_: Any) -> None:
        handle.remove()  # what the script does before it may check steps too, and says more of its cause
        optimizer.register_step_pre_hook(before_step)

    handle = model.register_forward_pre_hook(at_first_forward)
    optimizer.register_step_pre_hook(before_closure)
    return model, optimizer


def _closure_of(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the closure among the arguments of ``step``, of which the optimizer is the first; None if there is none."""
    return args[1] if len(args) > 1 else options.get("closure")


@dataclass(frozen=True)
class _Division:
    """How a model is divided, and copies of it too.

    Args:
        group: the ranks.
        mesh: the same ranks, in order.
        keep_weights: as for :func:`shard_fully`.
    """

    group: dist.ProcessGroup
    mesh: DeviceMesh
    keep_weights: bool

    def divide(self, model: nn.Module, blocks: Sequence[nn.Module], is_copy: bool = False) -> Units:
        """Divide a model, and keep the ranks in step in what they do with its units. Every rank must call it.

        Args:
            model: the model.
            blocks: the modules that become units, the model itself last.
            is_copy: whether the parameters have no memory yet.
        """
        from torch.distributed.fsdp import fully_shard

        device = torch.device(self.mesh.device_type)
        for block in blocks:
            if is_copy:
                materialize(block, device)
            fully_shard(block, mesh=self.mesh, reshard_after_forward=not self.keep_weights)
        name_of = {id(part): name for name, part in model.named_modules()}
        names = [name_of[id(block)] for block in blocks]
        # The last of these hooks is called first, and all before that of fully_shard, which gathers weights.
        if not is_copy:
            model.register_forward_pre_hook(EqualBuffers(model, self.group), prepend=True)
        compare: Together | History | None = None
        if self.group.size() > 1 and device.type == "cpu":
            of_units = [name or "the rest of the model" for name in names]
            compare = Together(self.group, of_units, len(list(model.parameters())))
            model.register_forward_pre_hook(compare, prepend=True)
            model.register_state_dict_pre_hook(compare.before_state_dict)
        elif self.group.size() > 1:
            compare = History(self.group, device)
        units = Units(dict(zip(names, blocks, strict=True)), compare)
        explain_own_gradients(units)
        make_copyable(model, blocks, functools.partial(self.divide, is_copy=True), units.free)
        return units


def _check_parameters(model: nn.Module) -> None:
    """Raise UsageError for parameters that fully_shard cannot divide, or whose hooks would be lost."""
    named = dict(model.named_parameters())
    if flat := [name for name, p in named.items() if p.dim() == 0]:
        what = "fully_shard divides along the first dimension, and some parameters have none"
        raise UsageError(explain(what, value=flat, fix="give them shape (1,), or train with the strategy sharded"))
    if empty := [name for name, p in named.items() if p.numel() == 0]:
        what = "fully_shard cannot reduce gradients without elements"
        raise UsageError(
            explain(what, value=empty, fix="leave these parameters out, or train with the strategy sharded")
        )
    if of_complex := [name for name, p in named.items() if p.is_complex()]:
        what = "fully_shard cannot sum complex gradients"
        raise UsageError(explain(what, value=of_complex, fix="train with the strategy ddp"))
    if hooked := [name for name, p in named.items() if _has_hooks(p)]:
        what = "fully_shard replaces parameters by new ones, which do not have the hooks that the script has registered on them"
        fix = (
            "call register_post_accumulate_grad_hook of the prepared model's parameters, which see parts of the mean gradient; "
            "or train with the strategy ddp"
        )
        raise UsageError(explain(what, value=hooked, fix=fix))


def _has_hooks(parameter: Tensor) -> bool:
    """Return whether the script has registered hooks on a parameter; those of this package follow the new parameters."""
    hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    return not all(is_own(hook) for hook in hooks)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model repeats: members of a ModuleList, and composite members of one class in a Sequential.

    Only the outermost ones that have parameters, none of which another part of the model uses. A block must be called as
    a module: a model that reads a block's weights outside its forward cannot be divided this way.
    """
    uses = Counter(id(p) for part in model.modules() for p in part._parameters.values() if p is not None)

    def alone(block: nn.Module) -> bool:
        inside = Counter(id(p) for part in block.modules() for p in part._parameters.values() if p is not None)
        return bool(inside) and all(uses[key] == count for key, count in inside.items())

    return [block for block in _repeated(model) if alone(block)]


def _repeated(part: nn.Module) -> Iterator[nn.Module]:
    children = list(part.children())
    kinds = Counter(type(child) for child in children)
    for child in children:
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        repeats = isinstance(part, nn.ModuleList) or (
            isinstance(part, nn.Sequential) and kinds[type(child)] > 1 and any(True for _ in child.children())
        )
        if repeats and not is_container:
            yield child
        else:
            yield from _repeated(child)


def _like(parameter: Any, value: Tensor) -> Tensor:
    """Return a whole tensor as a DTensor that is divided among ranks as ``parameter`` is. Not collective."""
    with torch.no_grad():
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
