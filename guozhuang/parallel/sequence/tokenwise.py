"""Rules for functions that compute each token from the same token of all operands, and for what a tensor says of itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..random import divided as draws_part
from .divided import Place, by_gathering, cut_where_it_meets, divided, each_divided, place_of, refuse, rule, whole_of

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_ONE_HOT = ("input", "num_classes")


@rule("shape", "size")
def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, place = args[0], args[0].place
    sizes = torch.Size([*tensor.shape[: place.dim], place.size, *tensor.shape[place.dim + 1 :]])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return sizes if dim is None else sizes[dim]


@rule("numel", "nelement")
def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    place = args[0].place
    return math.prod([*args[0].shape[: place.dim], place.size, *args[0].shape[place.dim + 1 :]])


@rule("__len__")
def _len(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    place: Place = args[0].place
    return place.size if place.dim == 0 else len(args[0])


@rule(
    *(
        "dtype",
        "device",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "ndim",
        "dim",
        "ndimension",
        "layout",
        "is_cuda",
        "is_cpu",
    ),
    *(
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_xla",
        "is_mkldnn",
        "names",
        "itemsize",
    ),
    *(
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_signed",
        "element_size",
        "get_device",
        "_version",
        "stride",
    ),
    *("requires_grad_", "__hash__", "type", "result_type", "can_cast", "is_inference"),
    *("enter", "summed", "gathered"),  # between ranks of tensor parallelism
    *("is_same_size", "data_ptr", "_backward_hooks", "output_nr", "retains_grad", "is_sparse_csr", "is_conj", "is_neg"),
)
def _as_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What does not depend on the number of tokens, or is only asked to be handed on."""
    result = func(*args, **kwargs)
    return divided(result, args[0].place) if isinstance(result, Tensor) else result


@rule(
    *("*", "add", "sub", "mul", "div", "true_divide", "floor_divide", "pow", "rsub", "where", "masked_fill"),
    *("__rsub__", "__rdiv__", "__rpow__", "__rmod__", "__rfloordiv__", "__floordiv__", "__rlshift__", "__rrshift__"),
    *("__pow__", "__rtruediv__", "__and__", "__or__", "__xor__", "__rand__", "__ror__", "__rxor__", "__invert__"),
    *("contiguous", "clone", "zeros_like", "ones_like", "full_like", "empty_like", "data", "real", "imag", "alias"),
    *(
        "subtract",
        "multiply",
        "divide",
        "negative",
        "absolute",
        "greater",
        "less",
        "clip",
        "resolve_conj",
        "resolve_neg",
    ),
)
def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = str(getattr(func, "__name__", ""))
    operands = list(each_divided((args, kwargs)))
    # Of operands that are divided in several dimensions, as positions that are compared with each other, one stays divided.
    lead = min(operands, key=lambda each: each.place.dim - each.dim())
    if (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__"):
        if place_of(args[0]) is None:  # a whole tensor is changed
            return func(args[0], *[whole_of(each) for each in args[1:]], **{k: whole_of(v) for k, v in kwargs.items()})
        lead = args[0]
    place, position = lead.place, lead.place.dim - lead.dim()
    if name == "where" and len(args) + len(kwargs) < 3:  # where the condition holds
        return by_gathering(func, args, kwargs)

    def fit(value: Any) -> Any:
        here = place_of(value)
        if here is not None:
            if here.dim - value.dim() == position and here.is_like(place):
                return value
            value = whole_of(value)
        return cut_where_it_meets(value, place, position)

    result = func(*[fit(each) for each in args], **{key: fit(each) for key, each in kwargs.items()})
    if isinstance(result, tuple):
        return type(result)([divided(each, place.at(each.dim() + position)) for each in result])
    return divided(result, place.at(result.dim() + position))


@rule(
    "to",
    "type_as",
    "float",
    "half",
    "bfloat16",
    "double",
    "long",
    "int",
    "short",
    "bool",
    "cpu",
    "cuda",
    "detach",
    "detach_",
)
def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of another type or device; a second tensor says only which."""
    place = place_of(args[0])
    result = func(*args, **kwargs)
    return divided(result, place) if place is not None else result


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A whole tensor of the sizes that are given."""
    return func(*args, **kwargs)


@rule("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__")
def _value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return by_gathering(func, args, kwargs)


@rule(
    *("dropout", "dropout_", "alpha_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like"),
    *("normal_", "uniform_", "random_", "exponential_"),
)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place: Place = args[0].place
    with draws_part(place.dim, place.own_ranges, place.size):
        result = func(*args, **kwargs)
    return divided(result, place)


@rule(
    *(
        "sum",
        "mean",
        "var",
        "std",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "softmax",
        "log_softmax",
        "logsumexp",
    ),
    *(
        "norm",
        "linalg_norm",
        "linalg_vector_norm",
        "cumsum",
        "cumprod",
        "sort",
        "argsort",
        "topk",
        "any",
        "all",
        "prod",
    ),
    *("var_mean", "std_mean", "median", "glu", "flip", "roll", "nansum", "nanmean", "count_nonzero", "aminmax"),
)
def _along_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions along given dimensions, none of which is the divided one."""
    tensor = args[0]
    place: Place = tensor.place
    name = str(func.__name__)
    if name in ("max", "min") and any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):
        return _pointwise(func, args, kwargs)
    position = {"topk": 2, "norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "roll": 2}.get(name, 1)
    dims = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis", args[position] if len(args) > position else None)))
    if name == "flip" and len(args) > 2:
        dims = args[1:]
    if dims is None and name in ("sort", "argsort", "topk", "glu"):
        dims = -1
    if not isinstance(dims, int | tuple | list) or isinstance(dims, bool):
        return by_gathering(func, args, kwargs)
    dims = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    if place.dim in dims or not dims:
        return by_gathering(func, args, kwargs)
    result = func(*args, **kwargs)

    def placed(value: Tensor) -> Tensor:
        return divided(
            value, place.at(place.dim - (sum(d < place.dim for d in dims) if value.dim() < tensor.dim() else 0))
        )

    return placed(result) if isinstance(result, Tensor) else type(result)([placed(each) for each in result])


@rule("layer_norm", "rms_norm", "native_layer_norm")
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, shape = args[0], args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if tensor.place.dim >= tensor.dim() - (1 if isinstance(shape, int) else len(shape)):
        return by_gathering(func, args, kwargs)
    return divided(func(*args, **kwargs), tensor.place)


@rule("linear")
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = place_of(args[0])
    if place is None or place.dim == args[0].dim() - 1:
        return by_gathering(func, args, kwargs)
    return divided(func(*args, **kwargs), place)


@rule("equal", "rrelu", "rrelu_")
def _of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What PyTorch marks as elementwise, and is not: an answer for all elements, and numbers drawn for each."""
    return by_gathering(func, args, kwargs)


@rule("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
def _hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse what would see some tokens' gradient, scaled. See [Note: scale of gradients] in parallel/sequence/team.py."""
    refuse(args[0].place.team, f"{func.__name__} of an activation, which sees the gradient of some tokens alone,")


@rule("grad")
def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse ``torch.autograd.grad``; an activation's own ``grad`` is None."""
    if func is torch.autograd.grad:
        refuse(next(each_divided((args, kwargs))).place.team, "a gradient that is taken inside of the model")
    return func(*args, **kwargs)


@rule("embedding", "one_hot")
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look up each token; what depends on all tokens (the largest one, how often each occurs) needs the whole."""
    given = dict(zip(_EMBEDDING if func.__name__ == "embedding" else _ONE_HOT, args, strict=False)) | kwargs
    is_of_all = given.get("max_norm") is not None or given.get("scale_grad_by_freq")
    if is_of_all or (func.__name__ == "one_hot" and given.get("num_classes", -1) == -1):
        return by_gathering(func, args, kwargs)
    at = next((i for i, each in enumerate(args) if place_of(each) is not None), None)
    indices = args[at] if at is not None else kwargs.get("input")
    place = place_of(indices)
    if place is None:
        return by_gathering(func, args, kwargs)
    return divided(func(*args, **kwargs), place)


@rule("conv1d")
def _conv1d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A convolution with a kernel of one token is a linear layer."""
    place, weight = place_of(args[0]), args[1]
    plain_one = {"stride": 1, "padding": 0, "dilation": 1}
    given = dict(zip(("stride", "padding", "dilation"), args[3:6], strict=False)) | kwargs
    is_one = all(given.get(name, one) in (one, (one,), [one]) for name, one in plain_one.items())
    if place is None or place.dim != args[0].dim() - 1 or weight.shape[-1] != 1 or not is_one:
        return by_gathering(func, args, kwargs)
    return divided(func(*args, **kwargs), place)
