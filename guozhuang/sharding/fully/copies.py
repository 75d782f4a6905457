"""Copies of a model that ``fully_shard`` has divided: an average of its weights, or the best ones so far.

[Note: a copy is divided as well] A script copies a model to average its weights or to keep the best ones, and computes with the
copy and the model together: ``zip(copy.parameters(), model.parameters())``. So a copy is divided in the same way, each rank
copies its own part, nothing is sent, and no rank holds the whole. A forward of the copy gathers weights like one of the model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import Parameter

from ...errors import UsageError, explain
from ...gradients.script_hooks import is_own

#: Attributes that this module and PyTorch have put on the modules of a divided model.
_ADDED = ("__deepcopy__", "__reduce_ex__", "named_parameters", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)

Divide = Callable[[nn.Module, Sequence[nn.Module]], object]


def make_copyable(model: nn.Module, blocks: Sequence[nn.Module], divide: Divide, free: Callable[[], None]) -> None:
    """Let ``copy.deepcopy`` make a divided copy of a divided model; parts alone, and pickling, are refused by name.

    Args:
        model: the model.
        blocks: its units, the model itself last.
        divide: divides a copy with these units, as the model was divided.
        free: frees weights that are gathered now.
    """
    for block in blocks:
        vars(block)["__deepcopy__"] = _refuse_part
    vars(model)["__deepcopy__"] = functools.partial(_copied, model, blocks, divide, free)
    vars(model)["__reduce_ex__"] = _refuse_pickling


def _refuse_part(memo: Any) -> NoReturn:
    what = "each rank has a part of this module's weights, and it cannot be copied without the model that it belongs to"
    raise UsageError(
        explain(what, fix="copy.deepcopy(model), of the whole prepared model, or copy parts before prepare()")
    )


def _refuse_pickling(protocol: Any) -> NoReturn:
    what = "each rank has a part of this model's weights, and a pickle of the module would not hold them"
    fix = (
        "save by gz.save(folder) on every rank, or the whole weights by "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
    )
    raise UsageError(explain(what, fix=fix))


def _copied(
    model: nn.Module, blocks: Sequence[nn.Module], divide: Divide, free: Callable[[], None], memo: dict[int, Any]
) -> nn.Module:
    free()
    parts = list(model.modules())
    before: dict[str, Any] = dict(model.named_parameters())
    for part in parts:
        kind = _kind(part)
        memo[id(part)] = kind.__new__(kind)
    for parameter in before.values():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = Parameter(whole, parameter.requires_grad)
    for part in parts:
        vars(memo[id(part)]).update(
            {
                name: copy.deepcopy(_without_ours(name, value), memo)
                for name, value in vars(part).items()
                if _is_kept(name)
            }
        )
    made: nn.Module = memo[id(model)]
    divide(made, [memo[id(block)] for block in blocks])
    with torch.no_grad():
        copied: dict[str, Any] = dict(made.named_parameters())
        for name, parameter in copied.items():
            parameter.to_local().copy_(before[name].to_local())
    return made


def materialize(block: nn.Module, device: torch.device) -> None:
    """Give a copy's parameters memory, for a moment whole, before they are divided; what was divided before is left out."""
    made: dict[int, Parameter] = {}
    for part in block.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                part._parameters[name] = made[id(parameter)]


def _kind(part: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard`` replaced it."""
    from torch.distributed.fsdp import FSDPModule

    return type(part).__mro__[2] if isinstance(part, FSDPModule) else type(part)


def _is_kept(name: str) -> bool:
    return name not in _ADDED and not name.startswith("__composable_api")


def _without_ours(name: str, value: Any) -> Any:
    """Return a module's attribute, without the hooks that this package and PyTorch have registered."""
    if name not in _HOOKS:
        return value
    return type(value)((key, hook) for key, hook in value.items() if not is_own(hook, "torch.distributed."))
