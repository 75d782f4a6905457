"""Turns a call's tensors into ranges of bytes: checks them, copies those that are not contiguous, copies results back."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import explain

from ..verbs import UnsupportedTensor, check_memory
from .collectives import Combining, MemoryRange
from .endpoint import refuse
from .program import DTYPE_OF, Op

_OPS: Final = MappingProxyType(
    {
        dist.ReduceOp.SUM: Op.SUM,
        dist.ReduceOp.PRODUCT: Op.PROD,
        dist.ReduceOp.MIN: Op.MIN,
        dist.ReduceOp.MAX: Op.MAX,
        dist.ReduceOp.BAND: Op.BAND,
        dist.ReduceOp.BOR: Op.BOR,
        dist.ReduceOp.BXOR: Op.BXOR,
        dist.ReduceOp.AVG: Op.SUM,
    }
)

_COMBININGS: Final[dict[tuple[int, torch.dtype, int], Combining]] = {}  # cache, by kind, dtype and number of ranks


def one(tensors: Sequence[Tensor] | Tensor, what: str, rank: int) -> Tensor:
    """Return the single tensor of an argument that torch.distributed wraps in a list."""
    if type(tensors) is not list and isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        refuse(f"{what} takes one tensor a rank", len(tensors), rank, "pass a list of one tensor")
    return tensors[0]


def check(tensors: Sequence[Tensor], what: str, rank: int) -> None:
    """Refuse tensors that are not dense CPU tensors or have no memory, and mixed dtypes."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout != torch.strided:
            text = f"{what}: tensors of one call must be alike, dense CPU tensors"
            value, fix = f"{tensor.layout} on {tensor.device}", "use .to_dense(), .cpu()"
            raise UnsupportedTensor(explain(text, value=value, rank=rank, fix=fix))
        if type(tensor) is not Tensor or not tensor.data_ptr():
            check_memory(tensor, what, rank)
        if tensor.dtype != tensors[0].dtype:
            refuse(f"{what}: tensors of one call must have one dtype", f"{tensors[0].dtype}, {tensor.dtype}", rank)


def expect(tensors: Sequence[object], num: int, what: str, rank: int) -> None:
    """Refuse a list whose length is not the number of ranks."""
    if len(tensors) != num:
        refuse(f"{what} takes a list with a tensor for each of the {num} ranks", len(tensors), rank)


def check_list(one: Tensor, many: Sequence[Tensor], num: int, what: str, rank: int) -> None:
    """Check one tensor and a list with a tensor per rank: ``check`` and ``expect``."""
    check([one, *many], what, rank)
    expect(many, num, what, rank)


def rows_per_rank(tensor: Tensor, splits: Sequence[int], num_ranks: int, rank: int) -> list[int]:
    """Return each rank's number of elements when a tensor is split along its first dim: evenly, or into ``splits`` rows."""
    num_rows = tensor.size(0) if tensor.ndim else 1
    if not splits:
        if num_rows % num_ranks:
            refuse(
                f"all_to_all_single: the first dim does not divide by {num_ranks} ranks",
                num_rows,
                rank,
                "pass split sizes",
            )
        splits = [num_rows // num_ranks] * num_ranks
    if len(splits) != num_ranks or sum(splits) != num_rows or min(splits) < 0:
        fix = f"give {num_ranks} sizes that add up to the first dim, {num_rows}"
        refuse("all_to_all_single: split sizes do not fit the tensor", list(splits), rank, fix)
    per_row = tensor.numel() // num_rows if num_rows else 0
    return [split * per_row for split in splits]


def root(rank_of_root: int, num_ranks: int, rank: int) -> int:
    """Return the root, if it is a rank of the group; else refuse it."""
    if not 0 <= rank_of_root < num_ranks:
        fix = f"choose one of 0 to {num_ranks - 1}"
        refuse("there is no such root rank in the group", rank_of_root, rank, fix)
    return rank_of_root


def combining(reduce_op: Any, dtype: torch.dtype, num_ranks: int, rank: int) -> Combining:
    """Return how a torch ``ReduceOp`` combines elements of a dtype; refuse impossible combinations."""
    kind: Any = reduce_op.op if type(reduce_op) is dist.ReduceOp else reduce_op  # type: ignore[attr-defined]
    key = kind.value, dtype, num_ranks  # ``kind.value`` is an int; the hash of ``kind`` is slow
    if (known := _COMBININGS.get(key) or _combining(kind, dtype, num_ranks, rank)) is not None:
        _COMBININGS[key] = known
        return known
    factor = reduce_op.factor  # the only other kind: premultiplied sum
    if isinstance(factor, Tensor):
        refuse("a premultiplied sum takes a number here, not a tensor", factor, rank, "pass float(factor)")
    plain = _combining(dist.ReduceOp.SUM, dtype, num_ranks, rank)
    assert plain is not None
    how = plain._replace(scale=float(factor), name=f"sum times {factor}")
    return _check_scale(how, dtype, rank)


def _combining(kind: Any, dtype: torch.dtype, num_ranks: int, rank: int) -> Combining | None:
    if kind not in _OPS:
        return None
    op, is_average = _OPS[kind], kind == dist.ReduceOp.AVG
    what = f"{str(dtype).removeprefix('torch.')}, {op.name.lower()}"
    if dtype not in DTYPE_OF:
        known = ", ".join(str(each).removeprefix("torch.") for each in DTYPE_OF)
        refuse("this dtype cannot be combined", what, rank, f"use one of {known}")
    if op in (Op.BAND, Op.BOR, Op.BXOR) and dtype.is_floating_point:
        refuse("bit-wise operations need integers or bool", what, rank)
    scale, name = (1.0 / num_ranks, "avg") if is_average else (1.0, op.name.lower())
    return _check_scale(Combining(int(DTYPE_OF[dtype]), int(op), scale, name), dtype, rank)  # ints: enums hash slowly


def _check_scale(how: Combining, dtype: torch.dtype, rank: int) -> Combining:
    if (how.scale != 1.0 or how.name == "avg") and not dtype.is_floating_point:
        what = f"{str(dtype).removeprefix('torch.')}, {how.name}"
        refuse("the result would not be whole numbers", what, rank, "convert to float")
    return how


class Bytes:
    """The contiguous tensors of one call while it runs: the tensors themselves, or copies."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # copies, kept alive while their addresses are in use
        self._back: list[tuple[Tensor, Tensor]] = []

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a contiguous, aligned tensor with the same values, for reading."""
        if is_plain(tensor):
            return tensor
        return self._copy(tensor)

    def apart(self, tensor: Tensor, others: Sequence[MemoryRange], own: int | None = None) -> Tensor:
        """Return ``plain(tensor)``, or a copy if it overlaps an output in ``others``; it may be identical to the ``own``-th."""
        plain = self.plain(tensor)
        return self._copy(plain) if is_mixed(piece(plain), others, own) else plain

    def target_apart(self, tensor: Tensor, others: Sequence[MemoryRange], own: int) -> Tensor:
        """Return ``target(tensor)``, or a copy if it overlaps an input in ``others``; it may be identical to the ``own``-th."""
        plain = self.target(tensor)
        if not is_mixed(piece(plain), others, own):
            return plain
        self._back.append((tensor, self._copy(plain)))
        return self._back[-1][1]

    def _copy(self, tensor: Tensor) -> Tensor:
        copied = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        self._kept.append(copied)
        return copied

    def target(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor to write the result to: the call's own, or one that ``put_back`` copies to it."""
        plain = self.plain(tensor)
        if plain is not tensor:
            self._back.append((tensor, plain))
        return plain

    def give(self, tensor: Tensor) -> MemoryRange:
        """Return the memory of ``plain(tensor)``, from which the values are read."""
        return piece(self.plain(tensor))

    def take(self, tensor: Tensor) -> MemoryRange:
        """Return the memory of ``target(tensor)``, to which the result is written."""
        return piece(self.target(tensor))

    def put_back(self) -> None:
        """Copy results from temporary tensors to the call's own, where these are not contiguous or overlap inputs."""
        for tensor, plain in self._back:
            tensor.detach().copy_(plain)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes are its values: in memory of its own, contiguous and aligned, not lazily negated or
    conjugated."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return False
    is_aligned = address != 0 and address % tensor.itemsize == 0
    return is_aligned and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def is_mixed(one: MemoryRange, others: Sequence[MemoryRange], own: int | None) -> bool:
    """Return whether a range overlaps any of ``others``, not counting the ``own``-th if that is identical to the range."""
    if own is not None and one == others[own]:
        others = [other for rank, other in enumerate(others) if rank != own]
    return any(
        one.address < other.address + other.num_bytes and other.address < one.address + one.num_bytes
        for other in others
    )


def piece(tensor: Tensor) -> MemoryRange:
    """Return the memory of a contiguous tensor."""
    return MemoryRange(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


def cut(whole: MemoryRange, sizes_bytes: Sequence[int]) -> list[MemoryRange]:
    """Cut a range into consecutive ranges of these sizes."""
    address, pieces = whole.address, []
    for num_bytes in sizes_bytes:
        pieces.append(MemoryRange(address, num_bytes))
        address += num_bytes
    return pieces
