"""What PyTorch's random operations draw: their shape, how to run them on a whole shape, and what of it a rank returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]

# Operations in place whose draw depends on the shape alone, not on values of tensors.
_IN_PLACE = (
    "bernoulli_.float", "uniform_", "normal_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
)  # fmt: skip
# Operations whose first tensor gives the shape alone.
_LIKE = ("rand_like", "randn_like", "randint_like", "bernoulli.p")
# Operations whose argument ``size`` is the shape.
_SIZED = ("rand", "randn", "randint", "normal.float_float")
# Operations that depend on values, but take as many numbers from the generator whatever the values are; each with a value
# that is allowed everywhere.
_VALUED = {"bernoulli": 0.5, "bernoulli_.Tensor": 0.5, "multinomial": 1.0}
# Kernels of accelerators that draw by themselves, in an order of their own.
_KERNELS = (
    "_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_rnn", "miopen_rnn", "_cudnn_attention",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One of PyTorch's random operations.

    Attributes:
        name: as errors show it: "bernoulli_.float".
        kind: "in place", "like", "sized", "valued", "normal", "dropout" (fused), "permutation", "kernel" or "unknown".
    """

    name: str
    kind: str

    def shape(self, func: Any, args: Arguments, kwargs: Keywords) -> torch.Size:
        """Return the shape of what is drawn."""
        if self.kind == "sized":
            return torch.Size(_argument(func, args, kwargs, "size"))
        if self.kind == "permutation":
            return torch.Size([_argument(func, args, kwargs, "n")])
        if self.kind == "normal":
            return _broadcast(args)
        tensor: Tensor = args[0]
        return tensor.shape

    def draw(self, func: Any, args: Arguments, kwargs: Keywords, shape: torch.Size, fill: Fill) -> Tensor:
        """Run the operation on a whole shape, and return what it drew: all that is needed to answer for any part of it.

        Args:
            shape: the whole shape.
            fill: copies this rank's part into a whole tensor, for operations that depend on values.
        """
        if self.kind == "in place":
            drawn: Tensor = func(like(args[0], shape), *args[1:], **kwargs)
            return drawn.to(torch.bool) if self.name == "bernoulli_.float" else drawn
        if self.kind == "like":
            return func(like(args[0], shape), *args[1:], **kwargs)  # type: ignore[no-any-return]
        if self.kind == "sized":
            position = _position(func, "size")
            return func(*args[:position], list(shape), *args[position + 1 :], **kwargs)  # type: ignore[no-any-return]
        if self.kind == "normal":
            first = next(each for each in args if isinstance(each, Tensor))
            return like(first.expand(_broadcast(args)), shape).normal_(generator=kwargs.get("generator"))
        if self.kind == "dropout":
            return func(torch.ones_like(like(args[0], shape)), *args[1:], **kwargs)[1]  # type: ignore[no-any-return]
        if self.kind == "valued":
            given = [a.expand(args[0].shape) if isinstance(a, Tensor) else a for a in args]
            whole = [fill(like(a, shape).fill_(_VALUED[self.name]), a) if isinstance(a, Tensor) else a for a in given]
            return func(*whole, **kwargs)  # type: ignore[no-any-return]
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def answer(self, part: Tensor, args: Arguments) -> Any:
        """Return what the operation returns on this rank, given its part of what was drawn."""
        if self.name.partition(".")[0].endswith("_"):
            return args[0].copy_(part)
        if self.kind == "normal":
            mean, std = args[:2]
            return part * std + mean
        if self.kind == "dropout":
            return args[0] * part * (1.0 / (1.0 - args[1]) if args[1] < 1 else 0.0), part.clone()
        return part.clone(memory_format=torch.contiguous_format)


Fill = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def operation(func: Any) -> Operation | None:
    """Return what is known of an operator of PyTorch as a random operation; None if it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    base, _, overload = str(func).removeprefix("aten.").partition(".")
    name = base if overload in ("default", "") else f"{base}.{overload}"
    first = func._schema.arguments[0].name if func._schema.arguments else ""
    kind = "unknown"
    if name in _IN_PLACE or (base in _IN_PLACE and first == "self"):
        kind = "in place"
    elif name in _LIKE or (base in _LIKE and "Tensor" not in overload):
        kind = "like"
    elif name in _SIZED or (base in _SIZED and any(each.name == "size" for each in func._schema.arguments)):
        kind = "sized"
    elif name in _VALUED:
        kind = "valued"
    elif base == "normal" and "Tensor" in overload:
        kind = "normal"
    elif base == "native_dropout":
        kind = "dropout"
    elif base == "randperm":
        kind = "permutation"
    elif base.startswith(_KERNELS):
        kind = "kernel"
    return Operation(name, kind)


def is_meta(args: Arguments, kwargs: Keywords) -> bool:
    """Return whether an operation runs on the meta device, where nothing is drawn."""
    device = kwargs.get("device")
    return (device is not None and torch.device(device).type == "meta") or any(
        isinstance(each, Tensor) and each.is_meta for each in args
    )


def generator_of(func: Any, args: Arguments, kwargs: Keywords) -> torch.Generator:
    """Return the generator from which an operation draws."""
    given = kwargs.get("generator")
    if given is None:
        given = next((each for each in args if isinstance(each, torch.Generator)), None)
    if given is not None:
        return given
    tensor = next((each for each in args if isinstance(each, Tensor)), None)
    return default_generator(torch.device(kwargs.get("device") or "cpu") if tensor is None else tensor.device)


def default_generator(device: torch.device) -> torch.Generator:
    """Return PyTorch's own generator of a device."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def align(group: dist.ProcessGroup, device: torch.device) -> None:
    """Set the generators to the states of the group's first rank. Every rank of the group must call it.

    A script may seed by rank, or draw on one rank only: masks of what is whole on all ranks would then differ silently.
    """
    generators = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        generators.append(default_generator(device))
    states = [each.get_state() for each in generators]
    sent = torch.cat(states).to("cpu" if device.type == "meta" else device)
    dist.broadcast(sent, group=group, group_src=0)
    for generator, state in zip(generators, sent.cpu().split([len(each) for each in states]), strict=True):
        generator.set_state(state.clone())


def zeros(args: Arguments, shape: torch.Size) -> Tensor:
    """Return zeros in the place of a draw that nobody needs."""
    first = next((each for each in args if isinstance(each, Tensor)), None)
    return torch.zeros(shape) if first is None else first.new_zeros(shape)


def like(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return an uninitialised tensor of another shape whose dims lie in memory in the order of the given one's.

    PyTorch draws in the order of memory, so a mask of a channels-last activation has its numbers in another order.
    """
    strides = tensor.stride()
    if 0 in strides:  # an expanded tensor, of which PyTorch makes a dense one
        strides = torch.empty_like(tensor, device="meta").stride()
    # Of two dims with one stride, that of one element lies further inside.
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1, dim))
    if order == list(range(tensor.dim())):
        return tensor.new_empty(shape)
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


def _broadcast(args: Arguments) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in args if isinstance(each, Tensor)))
    return shape


def _position(func: Any, name: str) -> int:
    return next(i for i, each in enumerate(func._schema.arguments) if each.name == name)


def _argument(func: Any, args: Arguments, kwargs: Keywords, name: str) -> Any:
    position = _position(func, name)
    return args[position] if position < len(args) else kwargs[name]
