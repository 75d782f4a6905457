"""What the names of PyTorch's operations tell of them."""

from __future__ import annotations

from typing import Any

import torch


def words(text: str) -> list[str]:
    """Return the words of a text: a list of names that reads like one."""
    return text.split()


#: What is the same for the whole tensor and for its description: answered without any data.
DESCRIBES = {
    *words(
        "shape dtype device layout ndim is_cuda is_cpu is_meta is_sparse is_quantized itemsize nbytes names is_mkldnn"
    ),
    *words(
        "is_xpu is_mps is_nested is_sparse_csr is_leaf size dim numel nelement element_size stride is_floating_point"
    ),
    *words(
        "is_complex is_contiguous storage_offset ndimension get_device __len__ __hash__ is_signed is_inference is_conj"
    ),
    *words("is_neg is_xla is_same_size result_type can_cast _backward_hooks retains_grad"),
}
# Operations on each element that have another name than PyTorch's own, or are composed of some.
_ALIASES = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "pos": "positive", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
_COMPOSED = {
    *words(
        "to float half bfloat16 double long int short bool type type_as contiguous clone detach cpu cuda data alias"
    ),
    *words("zeros_like ones_like empty_like full_like zero fill copy real imag pin_memory where masked_fill rsub"),
    *words("relu6 hardswish hardsigmoid hardtanh elu selu celu silu mish logsigmoid log_sigmoid softsign softplus"),
    *words(
        "tanhshrink hardshrink softshrink threshold nan_to_num isnan isfinite isinf positive float_power bitwise_not"
    ),
    *words("true_divide subtract multiply divide negative absolute greater less clip resolve_conj resolve_neg"),
    *words("enter summed gathered"),  # between ranks of tensor parallelism
}
_NOT_IN_PLACE = {"invert", "index", "int", "iter"}
# PyTorch marks or names these like operations on each element, but they answer for all elements, or draw a number for each.
_OF_ALL = {"equal", "rrelu", "rrelu_", "__bool__", "__float__", "__int__", "__long__"}


def name_of(func: Any) -> str:
    """Return the name of an operation; that of an attribute, with " =" where it is set."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))
        return attribute if name == "__get__" else f"{attribute} ="
    return name.partition(".")[0]


def changes_in_place(name: str) -> bool:
    """Return whether an operation of this name changes its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name in ("__setitem__", "__delitem__") or (name.startswith("__i") and name[2:-2] not in _NOT_IN_PLACE)
    return name.endswith("_")


def is_elementwise(name: str) -> bool:
    """Return whether an operation computes each element of its result from the elements in the same place."""
    return name not in _OF_ALL and any(each in _COMPOSED or _is_pointwise(each) for each in _base_names(name))


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
