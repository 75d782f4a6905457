"""Tensors as flat memory for collectives, buffers for pieces in flight, and the description of a call in words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_NUM_LISTED = 4  # how many sizes of a call's tensors are written out


class Flat:
    """The elements of a tensor as a contiguous 1-d tensor of real numbers, inside a ``with`` block.

    For a non-contiguous tensor it is a copy, which is copied back at the end of the block if ``writes`` is true.
    """

    def __init__(self, tensor: Tensor, writes: bool = True) -> None:
        self._tensor, self._writes = tensor.detach(), writes
        plain = self._tensor.is_contiguous() and not self._tensor.is_conj() and not self._tensor.is_neg()
        self._copy = None if plain else self._tensor.resolve_conj().resolve_neg().contiguous()

    def __enter__(self) -> Tensor:
        whole = self._tensor if self._copy is None else self._copy
        return (torch.view_as_real(whole) if whole.is_complex() else whole).view(-1)

    def __exit__(self, *failed: object) -> None:
        if self._copy is not None and self._writes and failed[0] is None:
            self._tensor.copy_(self._copy)


class Pool:
    """Reusable buffers of one size.

    Args:
        empty: allocates ``num_elements`` of a dtype.
        buffer_bytes: the size of each buffer.
    """

    def __init__(self, empty: Callable[[int, torch.dtype], Tensor], buffer_bytes: int) -> None:
        self._empty, self._buffer_bytes = empty, buffer_bytes
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return a buffer, as bytes."""
        return self._free.pop() if self._free else self._empty(self._buffer_bytes, torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


def begin_of(buffer: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return the first bytes of a buffer as elements."""
    return buffer[: num_elements * dtype.itemsize].view(dtype)


def listed(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Return the tensors of an argument that may be a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def words(collective: str, tensors: Sequence[Tensor], op: Any = None, root: int | None = None) -> str:
    """Describe a call in words, for errors and for the comparison among ranks: ``all_reduce of 1024 float32, sum``.

    Args:
        collective: its name.
        tensors: the tensors whose sizes and dtypes must be equal on all ranks.
        op: the ReduceOp of a reduction.
        root: the rank that sends or receives.
    """
    text = collective
    if tensors:
        sizes = [tensor.numel() for tensor in tensors]
        kinds = [_kind_of(tensor) for tensor in tensors]
        one_kind = len(set(kinds)) == 1
        listed = [str(size) if one_kind else f"{size} {kind}" for size, kind in zip(sizes, kinds, strict=True)]
        text = f"{collective} of {_in_short(listed)}{' ' + kinds[0] if one_kind else ''}"
    if op is not None:
        text += f", {getattr(op, 'op', op).name.lower()}"
    return text if root is None else f"{text}, root {root}"


def _kind_of(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        kind += " sparse"
    return kind if tensor.is_cpu else f"{kind} on {tensor.device.type}"


def _in_short(listed: list[str]) -> str:
    whole = " + ".join(listed)
    if len(listed) <= _NUM_LISTED:
        return whole
    rest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
    return f"{' + '.join(listed[:_NUM_LISTED])} + ... ({len(listed)} tensors, sizes {rest})"
