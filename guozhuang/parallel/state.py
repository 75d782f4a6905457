"""States of a divided model and its optimizer, whole and under the whole model's names: any layout loads any other's.

The hooks here act on the module and the optimizer themselves, so every way to save or load them is served: the prepared model's
``state_dict``, that of a module around it, ``torch.distributed.checkpoint``, and this package's own checkpoints. What they call
is collective: every rank that holds a part of the model must save or load, even if one alone writes the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from ..errors import UsageError, explain
from ..gradients.buckets import dense_stride
from ..world.devices import device_of
from .division import Division, division_of, part, whole

#: Waits until all ranks that hold one copy of the model make a call, which it is given as the script writes it.
Meet: TypeAlias = Callable[[str], None]


def gather_states(module: nn.Module, meet: Meet = lambda _: None) -> None:
    """Let ``module.state_dict()`` return whole tensors, and ``load_state_dict`` take them. Both are collective from now on.

    So are those of the modules inside of it, when they are saved or loaded by themselves.

    Args:
        module: the whole model.
        meet: called before the collectives of a ``state_dict()``.
    """
    for each in module.modules():
        gather = _gather if each is module else _gather_alone
        each.register_state_dict_post_hook(functools.partial(gather, meet))
        each.register_load_state_dict_pre_hook(_divide if each is module else _divide_alone)


def gather_optimizer_states(optimizer: Optimizer, meet: Meet = lambda _: None) -> None:
    """Do for an optimizer what :func:`gather_states` does for a module; its present state is divided like its parameters."""

    def gather(saved: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if any(division_of(p) is not None for group in saved.param_groups for p in group["params"]):
            meet("optimizer.state_dict()")
        return whole_state(saved, state)

    fit(optimizer.state)
    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(_divided_state)


def divided_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, Division]]:
    """Yield the name, the tensor and the division of each divided parameter and buffer; one with several names comes again."""
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if (division := division_of(tensor)) is not None:
                yield name, tensor, division


def _gather(meet: Meet, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    found: dict[int, Tensor] = {}
    for name, tensor, division in divided_tensors(module):
        if prefix + name in state:  # which leaves out some buffers, the same on every rank
            if not found:
                meet("model.state_dict()")
            if id(tensor) not in found:
                found[id(tensor)] = whole(tensor, division)
            state[prefix + name] = found[id(tensor)]


def _gather_alone(meet: Meet, module: nn.Module, state: dict[str, Any], prefix: str, told: Any) -> None:
    if not prefix:  # else it is a part of the state of a module around it, which gathers
        _gather(meet, module, state, prefix, told)


def _divide_alone(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not prefix:
        _divide(module, state, prefix)


def _divide(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _tensor, division in divided_tensors(module):
        given = state.get(prefix + name)
        if not isinstance(given, Tensor):
            continue
        if given.shape != division.shape:
            # PyTorch would compare with this rank's part.
            what = f"Error(s) in loading state_dict for {type(module).__name__}:\n\tsize mismatch for {name}: copying a param"
            shapes = f"with shape {given.shape} from checkpoint, the shape in current model is {division.shape}."
            raise RuntimeError(f"{what} {shapes}")
        state[prefix + name] = part(given, division)


def fit(state: MutableMapping[Any, Any]) -> None:
    """Divide the state that an optimizer has of whole parameters like the parameters; drop that of other stages.

    Args:
        state: by parameter; changed in place.
    """
    for parameter in [key for key in state if isinstance(key, Tensor)]:
        division = division_of(parameter)
        if division is not None and division.has_state:
            state[parameter].update(_parts_of(state[parameter], division))
        elif division is not None:
            del state[parameter]


def _parts_of(values: Mapping[str, Any], division: Division) -> dict[str, Any]:
    if division.keeper is not None:
        return dict(values)
    return {
        key: part(value, division).clone() if isinstance(value, Tensor) and _is_like(value, division.shape) else value
        for key, value in values.items()
    }


def _is_like(value: Tensor, shape: torch.Size) -> bool:
    return value.dim() > 0 and value.shape == shape


def _divided_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return of a whole state what this rank loads."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    of_key = dict(zip(keys, parameters, strict=False))  # PyTorch says it if their numbers differ
    found = {}
    for key, values in state["state"].items():
        division = division_of(of_key[key]) if key in of_key else None
        if division is None or not isinstance(values, Mapping):
            found[key] = values
        elif division.has_state:
            found[key] = _parts_of(values, division)
    return {**state, "state": found}


def whole_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state of which ``state`` is this rank's part. Every rank that holds a part of the model must call it.

    Raises:
        UsageError: a state of a divided parameter has another shape than the parameter, so no whole one can be made of it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    found = dict(state["state"])
    stages, mine = None, {}
    tensors, kept = None, {}
    device = device_of(parameters)
    for key, parameter in zip(keys, parameters, strict=True):
        division = division_of(parameter)
        if division is not None and division.keeper is not None and division.is_owned:
            tensors = division.group
            if (values := found.pop(key, None)) and division.has_state:
                kept[key] = values
    if tensors is not None:
        found.update(of_owners(kept, device, tensors))
    for key, parameter in zip(keys, parameters, strict=True):
        division = division_of(parameter)
        if division is None:
            continue
        values = found.get(key, {})
        if division.group is not None and division.is_owned and division.keeper is None:
            values = found[key] = _joined_state(values, division) if key in found else values
            if not values:
                del found[key]
        if division.stages is not None:
            stages = division.stages
            found.pop(key, None)
            if division.is_first_owner and values:
                mine[key] = values
    if stages is not None:
        found.update(of_owners(mine, device, stages))
    order = {key: i for i, key in enumerate(keys)}
    return {**state, "state": dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))}


def _joined_state(values: Mapping[str, Any], division: Division) -> dict[str, Any]:
    here = replace(division, owners=None, stages=None)
    found = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != division.part_shape:
                what = f"the optimizer's state {name!r} of a divided parameter has a shape of its own, so it has no whole form"
                fix = "use an optimizer whose state has the parameters' shapes, or a layout without tp"
                raise UsageError(explain(what, value=tuple(value.shape), fix=fix))
            value = whole(value, here)
        found[name] = value
    return found


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor in a state; its owner sends the elements."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return a new tensor without values, on the CPU or the given device."""
        where = torch.device("cpu") if self.is_on_cpu else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=where)


def of_owners(mine: Mapping[Any, Any], device: torch.device, group: dist.ProcessGroup) -> dict[Any, Any]:
    """Return the states that all ranks of a group have, each of which has those of other parameters. Every rank must call it.

    Args:
        mine: this rank's, by any key: tensors and other values in dicts, lists and tuples of any depth.
        device: that of the parameters, which the group serves.
        group: the ranks.
    """
    tensors: dict[Any, list[Tensor]] = {}
    forms: dict[Any, Any] = {}
    for key, values in mine.items():
        leaves, form = _pytree.tree_flatten(values)
        sent = [_form(leaf) for leaf in leaves]
        tensors[key] = [leaf.detach() for leaf, each in zip(leaves, sent, strict=True) if isinstance(each, _Sent)]
        forms[key] = _pytree.tree_unflatten(sent, form)
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, forms, group=group)
    found: dict[Any, Any] = {}
    for owner, theirs in enumerate(everyones):
        for key in sorted(theirs):
            leaves, form = _pytree.tree_flatten(theirs[key])
            own = iter(tensors.get(key, ()))
            for k, leaf in enumerate(leaves):
                if isinstance(leaf, _Sent):
                    leaves[k] = leaf.empty(device)
                    if owner == group.rank():
                        leaves[k].copy_(next(own))
                    _broadcast(leaves[k], owner, device, group)
            found[key] = _pytree.tree_unflatten(leaves, form)
    return found


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.numel() <= 1 and leaf.device.type == "cpu":
        return leaf.detach().clone()
    return _Sent(leaf.shape, dense_stride(leaf), leaf.dtype, leaf.device.type == "cpu")


def _broadcast(tensor: Tensor, owner: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Send a tensor without gaps from its owner to all ranks, on the device that the group serves."""
    if not tensor.numel():
        return
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    moved = flat.to(device)
    dist.broadcast(moved, group=group, group_src=owner)
    if moved is not flat:
        flat.copy_(moved)
