"""A tensor of which this rank holds some rows, and what each operation of PyTorch does with it.

To the model's code it is the whole tensor: ``shape``, ``size()`` and ``dim()`` answer for the whole. Each operation comes to
``__torch_function__``, where a handler that is registered for its name computes this rank's rows of the result from its rows of
the arguments, and from those of other ranks where it needs them. Autograd sees the local tensors only. An operation without
a handler is computed on the gathered, whole tensor by every rank, which is right and costs the memory that the division saved;
the log names it once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map
from typing_extensions import override

from ...errors import UsageError, explain
from .exchange import Region, output, whole

_log = logging.getLogger("guozhuang")

Handler = Callable[..., Any]
#: By the name of an operation: what takes the operation and its arguments, and returns the result, or NotImplemented for
#: arguments that it is not for.
HANDLERS: dict[str, Handler] = {}

# What is the same for the whole tensor and for its description: answered without any data.
_DESCRIBES = {
    *(
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "itemsize",
    ),
    *("nbytes", "names", "is_mkldnn", "is_xpu", "is_mps", "is_nested", "is_sparse_csr", "is_leaf"),
    *("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *(
        "storage_offset",
        "ndimension",
        "get_device",
        "__len__",
        "__hash__",
        "is_signed",
        "is_inference",
        "is_conj",
        "is_neg",
    ),
}
# What to do instead of functions of PyTorch's own that the model may get to by its modules.
_INSTEAD = {
    "CheckpointFunction": "call torch.utils.checkpoint with use_reentrant=False",
    "BackwardHookFunction": "remove the backward hooks of modules inside of the model",
}
_REFUSED = {
    "register_hook": "the gradient of some rows would reach the hook",
    "retain_grad": "the gradient of some rows would be kept",
    "register_post_accumulate_grad_hook": "it is no parameter",
    "requires_grad_": "it is an activation inside the model",
    "data_ptr": "its rows lie on several ranks",
    "untyped_storage": "its rows lie on several ranks",
    "set_": "its rows lie on several ranks",
    "resize_": "its rows lie on several ranks",
}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler, ``handler(operation, *args, **kwargs)``, for operations of these names."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class SpaceTensor(Tensor):
    """Rows of a tensor that the ranks of a region hold together.

    Attributes:
        local: this rank's rows; an ordinary tensor with autograd's graph.
        at: the divided dimension, counted from the front.
        region: the ranks.
    """

    local: Tensor
    at: int
    region: Region

    @staticmethod
    @override
    def __new__(cls, local: Tensor, at: int, size: int, region: Region) -> SpaceTensor:
        shape = list(local.shape)
        shape[at] = size
        made: SpaceTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.at, made.region = local, at, region
        return made

    @property
    def rows(self) -> int:
        """The number of rows on all ranks together."""
        return self.shape[self.at]

    @property
    def span(self) -> tuple[int, int]:
        """(start, stop) of this rank's rows."""
        return self.region.span(self.rows)

    def like(self, local: Tensor, at: int | None = None, size: int | None = None) -> SpaceTensor:
        """Return a divided tensor with these rows; with the same divided dimension and number of rows, unless given."""
        return SpaceTensor(local, self.at if at is None else at, self.rows if size is None else size, self.region)

    def gathered(self) -> Tensor:
        """Return all rows on every rank, as an ordinary tensor. Every rank must call it."""
        return whole(self.region, self.local, self.at, self.rows)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpaceTensor(shape={tuple(self.shape)}, rows {self.span} of dimension {self.at}, local={self.local!r})"

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = _name(func), kwargs or {}
        if name in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(divided_among((args, kwargs)))
        _check(first, name, func, kwargs)
        handler: Handler | None = HANDLERS.get(name)
        if handler is None and is_elementwise(name):
            handler = _elementwise
        found = NotImplemented if handler is None else handler(func, *args, **kwargs)
        return _on_whole(first, name, func, args, kwargs) if found is NotImplemented else found

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UsageError(
            explain(
                "an operation that PyTorch's functions do not announce got an activation whose rows lie on several ranks",
                value=str(func),
                fix="call it through a function of torch, or train this model with another strategy than space",
            )
        )


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "attribute")
        return attribute if name == "__get__" else f"{attribute} ="
    return name


def divided_among(arguments: Any) -> Iterator[SpaceTensor]:
    """Yield the divided tensors among (nested) arguments."""
    return (each for each in tree_iter(arguments) if isinstance(each, SpaceTensor))


def _check(first: SpaceTensor, name: str, func: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be right."""
    why = _REFUSED.get(name) or ("it is an activation inside the model" if name.endswith(" =") else None)
    if kwargs.get("out") is not None:
        why = "the result of out= would be rows of several ranks"
    if func is torch.autograd.grad:
        why = "the gradient of this rank's rows would be taken for the whole one"
    if why is not None:
        raise UsageError(
            explain(
                f"{name} of an activation that space divides cannot be right: {why}",
                value=tuple(first.shape),
                fix="leave it out, or train with another strategy than space",
            )
        )
    if first.region.with_gradients and not torch.is_grad_enabled() and (function := _running_function()):
        raise UsageError(
            explain(
                "a torch.autograd.Function of the model got an activation whose rows lie on several ranks; its backward "
                "would see some rows as all",
                value=function,
                fix=_INSTEAD.get(
                    function, "write it with functions of torch, or train with another strategy than space"
                ),
            )
        )


def _running_function() -> str | None:
    """Return the name of the innermost ``torch.autograd.Function`` of the model whose forward is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return type(first).__name__.removesuffix("Backward")
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _on_whole(
    first: SpaceTensor, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compute the operation on whole tensors; divide results that are images of the same height again."""
    region = first.region
    if changes_in_place(name) and isinstance(args[0], SpaceTensor):
        raise UsageError(
            explain(
                f"{name} changes an activation in place whose rows lie on several ranks",
                value=tuple(first.shape),
                fix="use an operation that returns its result, or train with another strategy than space",
            )
        )
    if name not in region.named:
        region.named.add(name)
        if region.index == 0:
            _log.warning(
                "space: %s of shape %s is computed on the whole tensor by every rank: right, but its memory is not divided",
                name,
                tuple(first.shape),
            )
    args, kwargs = tree_map(lambda each: each.gathered() if isinstance(each, SpaceTensor) else each, (args, kwargs))
    found = func(*args, **kwargs)
    if name in _PICKS:
        region.picked += [(each, each._version) for each in tree_iter(found) if region.is_running and _is_watched(each)]

    def divided(result: Any) -> Any:
        is_image = isinstance(result, Tensor) and result.dim() == first.dim() and result.shape[first.at] == first.rows
        return first.like(result.narrow(first.at, *_start_and_length(first))) if is_image else result

    return tree_map(divided, found)


def mark_lost(copy: Tensor, why: str) -> Tensor:
    """Say of rows why a change in place of them would be lost, because PyTorch's own result would be a view. Returns them."""
    for each in (copy, copy._base):
        if each is not None:
            each.__dict__["change_is_lost"] = why
    return copy


def why_lost(local: Tensor) -> str | None:
    """Return why a change in place of these rows would be lost; None if it would not."""
    if local.is_inference():
        return None
    return getattr(local if local._base is None else local._base, "change_is_lost", None)


def refuse_change(divided: SpaceTensor) -> NoReturn:
    """Raise the error for a change in place that would be lost."""
    raise UsageError(
        explain(
            f"a change in place of {why_lost(divided.local)} would be lost",
            value=tuple(divided.shape),
            rank=divided.region.index,
            fix="use an operation that returns its result, or train with another strategy than space",
        )
    )


def _start_and_length(divided: SpaceTensor) -> tuple[int, int]:
    start, stop = divided.span
    return start, stop - start


# Operations whose result is a view in PyTorch, so that a model may change the activation by changing the result.
_PICKS = {"__getitem__", "select", "unbind", "narrow", "chunk", "split", "tensor_split", "split_with_sizes", "diagonal"}


def _is_watched(found: Any) -> bool:
    return isinstance(found, Tensor) and not found.is_inference() and found._is_view()


def check_picked(region: Region) -> None:
    """Raise if the model has changed in place what it picked from whole copies of activations in this forward."""
    picked, region.picked, region.is_running = region.picked, [], False
    for each, version in picked:
        if each._version != version:
            raise UsageError(
                explain(
                    "the model has changed in place what it picked from an activation; the activation did not change with it",
                    value=tuple(each.shape),
                    rank=region.index,
                    fix="use an operation that returns its result, or train with another strategy than space",
                )
            )


def whole_output(result: Any) -> Any:
    """Return the model's output with each divided tensor whole, for a loss that every rank computes alike."""

    def joined(each: Any) -> Any:
        return output(each.region, each.local, each.at, each.rows) if isinstance(each, SpaceTensor) else each

    return tree_map(joined, result)


# Operations on each element that have another name than PyTorch's own, or are composed of some.
_ALIASES = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "pos": "positive", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
_COMPOSED = {
    *(
        "to",
        "float",
        "half",
        "bfloat16",
        "double",
        "long",
        "int",
        "bool",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
    ),
    *("cpu", "cuda", "zeros_like", "ones_like", "empty_like", "full_like", "data", "alias", "zero", "fill"),
    *("relu6", "hardswish", "hardsigmoid", "hardtanh", "elu", "selu", "celu", "silu", "mish", "logsigmoid", "softsign"),
    *("tanhshrink", "hardshrink", "softshrink", "threshold", "nan_to_num", "isnan", "isfinite", "isinf", "positive"),
    *("float_power", "softplus", "log_sigmoid", "where", "bitwise_not", "masked_fill", "copy", "real", "pin_memory"),
}
_NOT_IN_PLACE = {"invert", "index", "int", "iter"}
# PyTorch marks or names these like operations on each element, but they answer for all elements, or draw a number for each.
_OF_ALL = {"equal", "rrelu", "rrelu_", "__bool__", "__float__", "__int__", "__long__"}
_ELEMENTWISE: dict[str, bool] = {}


def changes_in_place(name: str) -> bool:
    """Return whether an operation of this name changes its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name in ("__setitem__", "__delitem__") or (name.startswith("__i") and name[2:-2] not in _NOT_IN_PLACE)
    return name.endswith("_")


def is_elementwise(name: str) -> bool:
    """Return whether an operation computes each element of its result from the elements in the same place."""
    if name not in _ELEMENTWISE:
        is_one = any(each in _COMPOSED or _is_pointwise(each) for each in _base_names(name))
        _ELEMENTWISE[name] = is_one and name not in _OF_ALL
    return _ELEMENTWISE[name]


def _base_names(name: str) -> list[str]:
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        names = [bare, bare[1:]] if bare[:1] in "ri" else [bare]
    else:
        names = [name.removesuffix("_")]
    return [_ALIASES.get(each, each) for each in names]


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def _elementwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute this rank's rows of an operation on each element, with broadcasting."""
    ours = list(divided_among((args, kwargs)))
    first = max(ours, key=lambda each: each.dim())
    behind, rows = first.at - first.dim(), first.rows  # broadcasting counts dimensions from the end
    if any(each.at - each.dim() != behind or each.rows != rows for each in ours):
        return NotImplemented
    others = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
    if any(each.dim() >= -behind and each.shape[behind] not in (1, rows) for each in others):
        return NotImplemented  # PyTorch says what is wrong with the shapes
    changed = args[0] if args and isinstance(args[0], Tensor) else None
    name = _name(func)
    in_place = changed is not None and changes_in_place(name)
    if (in_place and not isinstance(changed, SpaceTensor)) or (name == "where" and len(args) + len(kwargs) < 3):
        return NotImplemented
    if name in ("to", "type_as") and not isinstance(changed, SpaceTensor):  # the divided one says only which type
        return func(*[each.local if isinstance(each, SpaceTensor) else each for each in args], **kwargs)
    copies = [(each, each.local._version) for each in ours if why_lost(each.local)]

    def part(each: Any) -> Any:
        if isinstance(each, SpaceTensor):
            return each.local
        if isinstance(each, Tensor) and each.dim() >= -behind and each.shape[behind] == rows:
            return each.narrow(behind, *_start_and_length(first))
        return each

    args, kwargs = tree_map(part, (args, kwargs))
    found = func(*args, **kwargs)
    for each, version in copies:
        if each.local._version != version:
            refuse_change(each)
    if in_place:
        return changed
    return tree_map(lambda e: first.like(e, e.dim() + behind) if isinstance(e, Tensor) else e, found)


@handles("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def _new(func: Callable[..., Any], tensor: SpaceTensor, *args: Any, **kwargs: Any) -> Any:
    """Make a whole tensor, equal on all ranks, of the divided one's type and device."""
    return func(tensor.local, *args, **kwargs)


@handles("requires_grad", "grad_fn", "grad", "_version", "output_nr")
def _of_local(func: Callable[..., Any], tensor: SpaceTensor) -> Any:
    return func(tensor.local)
