"""What a model was before it was divided, so that a process that has whole weights can make it that again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...gradients.script_hooks import is_own
from ..division import ATTRIBUTE, division_of, whole
from ..guard import GuardedParameter
from ..state import divided_tensors

_ABSENT = object()
# Of a tensor and of a module: dictionaries of hooks, which change in place.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Form(NamedTuple):
    """A module's class and attributes, and the keys of its hooks by the name of their dictionary."""

    kind: type
    attributes: dict[str, Any]
    hooks: dict[str, set[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Form:
        held = vars(module)
        hooks = {name: set(value) for name, value in held.items() if isinstance(value, dict) and name.endswith(_HOOKS)}
        return cls(type(module), {name: value for name, value in held.items() if name not in hooks}, hooks)


_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class UndividedForm:
    """The classes, attributes and hooks that a division changes; made before it, and told when it has been done.

    What the script changes afterwards, such as hooks and attributes of its own, stays.

    Args:
        model: whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {module: _Form.of(module) for module in model.modules()}
        self._of_tensors = {id(each): _keys(each) for each in model.parameters()}
        self._after: dict[nn.Module, _Form] = {}
        self._added: list[tuple[Tensor, str, set[Any]]] = []

    def was_divided(self) -> None:
        """Note what the division has changed."""
        self._after = {module: _Form.of(module) for module in self._before}
        for parameter in self._model.parameters():
            known = self._of_tensors.get(id(parameter), {})
            for name, keys in _keys(parameter).items():
                self._added.append((parameter, name, keys - known.get(name, set())))

    def restore(self, wholes: Mapping[int, Tensor]) -> None:
        """Make the model what it was, with memory of its own, and without gradients.

        Args:
            wholes: the whole values of what is divided, by identity of the parameter or buffer.
        """
        for module, after in self._after.items():
            before = self._before[module]
            for name in after.attributes.keys() | before.attributes.keys():
                was, then = before.attributes.get(name, _ABSENT), after.attributes.get(name, _ABSENT)
                if was is not then and vars(module).get(name, _ABSENT) is then:
                    vars(module).pop(name, None)
                    if was is not _ABSENT:
                        vars(module)[name] = was
            if type(module) is after.kind:
                object.__setattr__(module, "__class__", before.kind)
            for name, keys in after.hooks.items():
                for key in keys - before.hooks.get(name, set()):
                    vars(module)[name].pop(key, None)
        for parameter, name, keys in self._added:
            for key in keys:
                (getattr(parameter, name) or {}).pop(key, None)
        for parameter in self._model.parameters():
            for name in _TENSOR_HOOKS:
                hooks = getattr(parameter, name) or {}
                for key in [key for key, hook in hooks.items() if is_own(hook)]:
                    del hooks[key]
        seen: set[int] = set()
        with torch.no_grad():
            tensor: Any
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if isinstance(tensor, GuardedParameter):
                    made: Any = tensor
                    made.__class__ = nn.Parameter
                tensor.grad = None
                tensor.data = wholes[id(tensor)] if id(tensor) in wholes else tensor.data.clone()
                if division_of(tensor) is not None:
                    delattr(tensor, ATTRIBUTE)


def _keys(parameter: Tensor) -> dict[str, set[Any]]:
    return {name: set(getattr(parameter, name) or ()) for name in _TENSOR_HOOKS}


def gathered(model: nn.Module, keeps: bool) -> dict[int, Tensor]:
    """Return the whole values of what is divided, by identity. Every rank that holds a part of the model must call it.

    Args:
        model: divided.
        keeps: whether this rank is to have them; others get none.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    for _, tensor, division in divided_tensors(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            value = whole(tensor, division)
            if keeps:
                found[id(tensor)] = value.clone() if value.data_ptr() == tensor.data_ptr() else value
    return found
