"""What units return, without running them: outputs of the right structure, shapes and dtypes, from the meta device."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ....errors import UsageError, explain
from ....generators import kept

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True)
class UnitOutput:
    """What one call of a unit returns, taken apart.

    Attributes:
        spec: its structure.
        leaves: its tensors, on the meta device, and whatever else it holds, as it is.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


class UnitOutputs:
    """The outputs of a model's units by the shapes of their inputs.

    Args:
        units: by name, with whole parameters; afterwards these may be freed.

    Attributes:
        opaque: what units returned that do not run on the meta device: their later outputs are not known in advance.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._tensors = {
            name: {
                key: torch.empty_like(tensor, device="meta", requires_grad=False)
                for found in (unit.named_parameters(remove_duplicate=False), unit.named_buffers(remove_duplicate=False))
                for key, tensor in found
            }
            for name, unit in units.items()
        }
        self.opaque: dict[str, UnitOutput] = {}
        self._known: dict[Any, UnitOutput] = {}

    def of(self, name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> UnitOutput:
        """Return the output for these arguments, of which only the shapes and the values that are no tensors count.

        Args: see :class:`guozhuang.parallel.pipeline.forwards.intercept.OnCall`.
        """
        if name in self.opaque:
            return self.opaque[name]
        leaves: list[Any] = [*args, *kwargs.values()]
        spec: Any = len(args), *kwargs
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        try:
            key = (name, unit.training, spec, tuple(map(_signature, leaves)))
            known = self._known.get(key)
        except TypeError:  # a structure with keys that cannot be compared
            return self.run(name, unit, proceed, args, kwargs)
        if known is None:
            known = self._known[key] = self.run(name, unit, proceed, args, kwargs)
        return known

    def run(self, name: str, unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> UnitOutput:
        """Run a unit on the meta device, or, if it has parameters of its own still and does not run there, on zeros.

        Raises:
            UsageError: what the unit does cannot be known on other ranks.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN)) and not callable(leaf)]
        before = [_fingerprint(each) for each in objects]
        state = _state_of(unit)
        unit_hooks = unit._forward_hooks
        unit.__dict__["_forward_hooks"] = (
            collections.OrderedDict()
        )  # they see what the unit's caller gets: see with_hooks()
        for module in unit.modules():
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 0.1  # without a momentum it reads a value, of which the meta device has none
        first = name.partition("#")[0]
        try:
            with kept("python", "numpy"), torch.no_grad():  # PyTorch's draws nothing on the meta device
                try:
                    given = _as_without_autocast(leaves, self._tensors[first].values())
                    meta_args, meta_kwargs = pytree.tree_unflatten([_to_meta(leaf) for leaf in given], spec)
                    with torch.device("meta"):
                        found = functional_call(unit, self._tensors[first], meta_args, meta_kwargs, tie_weights=False)
                except UsageError:
                    raise
                except Exception as error:
                    for number in unit_hooks.keys() & unit._forward_hooks_always_called.keys():
                        unit_hooks[number](unit, args, None)  # what its hooks before the call have begun ends
                    if any(p.numel() == 0 != self._tensors[first][key].numel() for key, p in unit.named_parameters()):
                        what = f"{name} was given inputs of a new kind, and what it returns for them is not known here"
                        fix = "use inputs of one kind from the first step on, or put the module on the first stage by cut=[...]"
                        raise UsageError(explain(what, value=_first_line(error), fix=fix)) from error
                    found = proceed(*args, **kwargs)
                    leaves, spec = pytree.tree_flatten(found)
                    self.opaque[name] = UnitOutput(spec, tuple(map(_to_meta, leaves)))
        finally:
            for module, attributes, parts in state:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                for key, value in parts.items():
                    attributes[key].clear()
                    attributes[key].update(value)
        for each, was in zip(objects, before, strict=True):
            if _fingerprint(each) != was:
                what = (
                    f"{name} changes an object that it was given, and other stages of the pipeline would not see that"
                )
                fix = "let it return what changes (in Hugging Face models: use_cache=False)"
                raise UsageError(explain(what, value=type(each).__name__, fix=fix))
        leaves, spec = pytree.tree_flatten(found)
        _check(name, leaves, name in self.opaque)
        return UnitOutput(spec, tuple(map(_to_meta, leaves)))


def filled(output: UnitOutput, given: Mapping[int, Tensor], value: float, device: torch.device) -> Any:
    """Return an output with these tensors in their places among its leaves; others hold one value, and use no memory.

    Args:
        output: what a unit returns.
        given: real tensors, by place.
        value: that floating-point tensors in all other places show; others show zeros.
        device: of those.
    """
    leaves = [
        given[i] if i in given else _constant(leaf, value, device) if isinstance(leaf, Tensor) else leaf
        for i, leaf in enumerate(output.leaves)
    ]
    return pytree.tree_unflatten(leaves, output.spec)


def with_hooks(unit: nn.Module, args: Any, kwargs: Any, found: Any) -> Any:
    """Return an output of a unit as the forward hooks of the unit leave it, which have not seen it yet."""
    for key, hook in list(unit._forward_hooks.items()):
        takes_kwargs = key in unit._forward_hooks_with_kwargs
        changed = hook(unit, args, kwargs, found) if takes_kwargs else hook(unit, args, found)
        found = found if changed is None else changed
    return found


def without_hooks(unit: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Call a unit, and return its output, positional and keyword arguments as its forward hooks would find them."""
    if not unit._forward_hooks:
        return proceed(*args, **kwargs), args, kwargs
    hooks, seen = unit._forward_hooks, [(args, kwargs)]  # hooks before the call may change what it is called with
    unit.__dict__["_forward_hooks"] = own = collections.OrderedDict({-1: lambda _, *given: seen.append(given[:2])})
    unit._forward_hooks_with_kwargs[-1] = True
    try:
        return proceed(*args, **kwargs), *seen[-1]
    finally:
        unit.__dict__["_forward_hooks"] = hooks
        del unit._forward_hooks_with_kwargs[-1], own[-1]
        hooks.update(own)  # of a call in which they were added


def _constant(like: Tensor, value: float, device: torch.device) -> Tensor:
    is_floating = like.dtype.is_floating_point or like.dtype.is_complex
    return torch.full((), value if is_floating else 0, dtype=like.dtype, device=device).expand(like.shape)


def tensors_in(found: Any) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, directly or in the objects that it holds."""
    seen: set[int] = set()

    def walk(each: Any, depth: int) -> Iterator[Tensor]:
        if isinstance(each, Tensor):
            yield each
        elif not isinstance(each, (*PLAIN, nn.Module)) and depth and id(each) not in seen:
            seen.add(id(each))
            inside = each.values() if isinstance(each, Mapping) else each
            if not isinstance(each, Mapping | list | tuple | set | frozenset):
                inside = getattr(each, "__dict__", {}).values()
            for one in list(inside):
                yield from walk(one, depth - 1)

    return walk(found, 8)


def _check(name: str, leaves: list[Any], is_opaque: bool) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor | None | bool | str):
            continue
        if next(tensors_in(leaf), None) is not None:
            what = f"{name} returns an object with tensors in it that cannot be sent to other stages"
            fix = "return a tensor, a tuple, a list or a dict of tensors"
        elif is_opaque:
            what = f"{name} returns a value that depends on data and is no tensor, so other stages cannot know it"
            fix = "return it as a tensor"
        else:
            continue
        raise UsageError(explain(what, value=type(leaf).__name__, fix=fix))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def _as_without_autocast(leaves: list[Any], weights: Iterable[Tensor]) -> list[Any]:
    """Under autocast, which the meta device does not have: give floating-point inputs the dtype of the unit's weights."""
    dtype = next((each.dtype for each in weights if each.is_floating_point()), None)
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    if dtype is None or not any(torch.is_autocast_enabled(each) for each in devices - {"meta"}):
        return leaves
    return [
        torch.empty_like(leaf, dtype=dtype, device="meta")
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
        else leaf
        for leaf in leaves
    ]


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) in (Tensor, nn.Parameter):
        return torch.empty_like(leaf, device="meta", requires_grad=False)
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")  # of a part this is the whole


def _state_of(unit: nn.Module) -> list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    """Return all that a forward may set on the unit's modules, so that a run of no consequence leaves no trace."""
    kinds = ("_parameters", "_buffers", "_modules")
    return [
        (module, dict(module.__dict__), {kind: dict(module.__dict__[kind]) for kind in kinds})
        for module in unit.modules()
    ]


def _fingerprint(each: Any, depth: int = 4) -> Any:
    if isinstance(each, Tensor):
        return id(each), None if each.is_inference() else each._version
    if isinstance(each, list | tuple):
        return tuple(_fingerprint(one, depth - 1) for one in each) if depth else len(each)
    held = each if isinstance(each, Mapping) else getattr(each, "__dict__", None)
    if isinstance(each, PLAIN) or held is None or not depth:
        return each if isinstance(each, PLAIN) else id(each)
    return tuple((str(key), _fingerprint(value, depth - 1)) for key, value in held.items())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
