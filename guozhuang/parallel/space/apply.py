"""``divide_space``: one sample of a model divided along its height over the ranks of the axis "space"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ...errors import UsageError, explain
from ..activations.elementwise import mark_lost
from ..activations.outputs import whole_output
from ..activations.tensor import DividedTensor, Place, divided_among
from ..axes import Around, Axes, with_mean_gradient
from . import convolutions, norms, pooling, resample, rows
from .region import Region

_OPERATIONS = (convolutions, norms, pooling, resample, rows)  # importing them registers what they know
_CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}


def divide_space(model: nn.Module, axes: Axes) -> Around:
    """Return what to do around the model's forward so that each rank of the axis "space" computes some rows of each sample.

    The model itself and its parameters stay as they are. Inputs that are images, that is floating-point tensors with the
    spatial dimensions of the model's convolutions behind samples and channels (or behind channels), are divided along the
    first spatial dimension; other inputs stay whole. Every rank must be given equal inputs, and gets the whole output.
    Gradients of parameters are this rank's share: their mean over the ranks of the axis is the whole model's.

    Raises:
        UsageError: the model has no convolution, or a ``SyncBatchNorm``; or the layout has divided sequences too.
    """
    group = axes.group("space")
    assert group is not None, axes.layout
    if axes.size("sequence") > 1:
        what = "space divides activations by rows of images and sequence by tokens, so they cannot divide one model together"
        fix = "leave one of the two out of the layout; pp, dp and tp go with either"
        raise UsageError(explain(what, value=str(axes.layout), fix=fix))
    region = Region(group, _num_dims(model))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        what = "under space a BatchNorm normalizes over the whole image already; SyncBatchNorm would exchange rows as samples"
        raise UsageError(explain(what, value=names[0], fix="leave nn.BatchNorm as it is"))

    def inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        region.begin()
        found = tree_map(lambda each: _divided(each, region), (args, dict(kwargs)))
        if next(divided_among(found), None) is None:
            _refuse_inputs(args, kwargs, region)
        return found  # type: ignore[no-any-return]

    def outputs(result: Any) -> Any:
        result = whole_output(result)
        region.begin(is_running=False)
        return result

    # Before whoever wraps the model sees its outputs, such as data parallelism around it.
    model.register_forward_hook(_whole_after)
    return Around(inputs, outputs, region)


def _whole_after(module: nn.Module, args: Any, result: Any) -> Any:
    return whole_output(result)


def _num_dims(model: nn.Module) -> int:
    for num, kinds in reversed(_CONVOLUTIONS.items()):
        if any(isinstance(module, kinds) for module in model.modules()):
            return num  # a convolution of fewer dimensions, among channels for instance, gets other tensors than images
    what = "space divides images among convolutions, and the model has none"
    fix = "choose pipeline, tensor or sequence, or data parallelism"
    raise UsageError(explain(what, value=type(model).__name__, fix=fix))


def _divided(each: Any, region: Region) -> Any:
    if not isinstance(each, Tensor) or isinstance(each, DividedTensor) or not each.is_floating_point():
        return each
    at = each.dim() - region.num_dims
    each = with_mean_gradient(each, region.group)
    if at not in (1, 2) or each.shape[at] < region.size:
        return each
    place = Place(at, region.spans(each.shape[at]), region)
    rows = place.cut(each, at).clone() if each.requires_grad and torch.is_grad_enabled() else place.cut(each.data, at)
    return DividedTensor(mark_lost(rows, "the model's input, of which each rank has its rows,"), place)


def _refuse_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], region: Region) -> NoReturn:
    """Raise the error for inputs none of which can be divided."""
    tensors = [each for each in tree_iter((args, dict(kwargs))) if isinstance(each, Tensor)]
    dims = (region.num_dims + 1, region.num_dims + 2)
    rows = max((t.shape[-region.num_dims] for t in tensors if t.is_floating_point() and t.dim() in dims), default=None)
    what = f"none of the model's inputs is an image: a floating-point tensor of {dims[0]} or {dims[1]} dimensions"
    fix = "convert images to floating point before the model is called, or take another strategy than space"
    if rows is not None:
        what, fix = f"an input has {rows} rows for {region.size} ranks", f"use at most {max(rows, 1)} ranks along space"
    value = ", ".join(f"{tuple(each.shape)} of {str(each.dtype).removeprefix('torch.')}" for each in tensors)
    raise UsageError(explain(what, value=value or "no tensor", rank=region.rank, fix=fix))
