"""Ranks begin equal: the same parameters by name, shape and dtype, then the same values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import _broadcast_coalesced

from ..groups import agree

_BROADCAST_BYTES = 250 << 20  # how much memory the flattened copies of one broadcast may take


def describe(named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return one line per tensor: name, shape, dtype, and whether it requires a gradient."""
    return [
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}{' trained' if t.requires_grad else ''}"
        for name, t in named_tensors
    ]


def verify_equal_layout(group: dist.ProcessGroup, lines: Sequence[str]) -> None:
    """Raise on every rank, with a table, unless all ranks describe the same model. Every rank must call it.

    Raises:
        MismatchError: names, shapes, dtypes, counts or options differ.
        WorldError: a rank did not come within the group's time-out.
    """
    fix = "build the same model with the same options on every rank"
    agree(group, "the parameters of the model", lines, timeout_s(group), fix)


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return the time-out of the group's operations in seconds."""
    for name in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(name)).options
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return float(dist.constants.default_pg_timeout.total_seconds())


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Copy the tensors' values from one rank of the group to all, in place, flattened into few messages.

    Every rank must call it, with equal shapes and dtypes.

    Args:
        tensors: dense tensors of any dtype; autograd's version counters are left as they are.
        group: the ranks.
        source: rank within the group.
    """
    whole = [tensor.detach() for tensor in tensors]
    if not whole or group.size() == 1:
        return
    plain = [torch.view_as_real(t) if t.is_complex() else t for t in whole]
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(plain)):
        _broadcast_coalesced(group, plain, _BROADCAST_BYTES, source)


def state_of(module: nn.Module, ignored: frozenset[str], buffers: bool) -> list[tuple[str, Tensor]]:
    """Return the parameters and, if asked, the buffers that ranks hold in common, by name."""
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    if buffers:
        named += list(module.named_buffers())
    return [(name, tensor) for name, tensor in named if name not in ignored]
