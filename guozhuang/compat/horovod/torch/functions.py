"""Send parameters, optimizer state and objects from one rank to all; the names are those of ``horovod.torch.functions``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import DTYPES

from .handles import synchronize_all
from .objects import allgather_object, broadcast_object
from .optimizer_state import broadcast_optimizer_state
from .verbs import broadcast_async_

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Tensor | None] | list[Tensor] | list[tuple[str | None, Tensor]], root_rank: int
) -> None:
    """Overwrite tensors with root's. Every rank must call with tensors of the same names, shapes and dtypes.

    Args:
        params: a dictionary (``model.state_dict()``), or a list of tensors or of (name, tensor)
            (``list(model.named_parameters())``). Values that are None are skipped. Tensors need not be contiguous.
        root_rank: the rank whose values all ranks get.

    Raises:
        ValueError: ``params`` is of another type, as the generator ``model.named_parameters()``; a name comes twice; a tensor
            cannot be sent.
        HorovodInternalError: ranks differ, or one is lost. No operation is left running, and it may be called again; some
            tensors may hold root's values already.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        fix = "give model.state_dict(), or list(model.named_parameters())"
        raise ValueError(explain("invalid params", value=type(params).__name__, fix=fix))
    wrong = [(name, type(each).__name__) for name, each in named if each is not None and not isinstance(each, Tensor)]
    if wrong:
        fix = "broadcast_object brings other things"
        raise ValueError(explain("invalid params: not all of them are tensors", value=wrong[:5], fix=fix))
    # Check all tensors before the first one is sent, so that an error leaves no operation running.
    names = Counter(name for name, _ in named if name is not None)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(explain("invalid params: these names come twice", value=twice[:5]))
    unsent = [(name, _kind(each)) for name, each in named if each is not None and not _can_be_sent(each)]
    if unsent:
        fix = "leave them out; broadcast_object brings other things"
        raise ValueError(explain("invalid params: no such tensors can be sent", value=unsent[:5], fix=fix))
    started = []
    for name, tensor in named:
        if tensor is not None:
            contiguous = tensor.detach().contiguous()  # no copy if the tensor is contiguous
            started.append((broadcast_async_(contiguous, root_rank, name), tensor.detach(), contiguous))
    synchronize_all(handle for handle, _, _ in started)
    for _, tensor, received in started:
        if received.data_ptr() != tensor.data_ptr():
            tensor.copy_(received)


def _can_be_sent(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in DTYPES


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}, {tensor.layout}"
