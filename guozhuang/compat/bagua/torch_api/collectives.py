"""Collectives that wait and return nothing; arguments come in the order (send, recv), the reverse of PyTorch's.

All members of the communicator ``comm`` must call each of them, in one order (None: all ranks); a rank that has the sentinel
in its place returns at once. ``src`` and ``dst`` are ranks in the communicator, others than this one for ``send`` and ``recv``.
Tensors are dense, of float32, float16, int64 or uint8, on any device that the group serves; sparse ones raise AssertionError,
other dtypes RuntimeError, and sizes or ranks that do not fit UsageError, before anything is sent. In a communicator that was
aborted they return at once. An in-place tensor of n parts has this rank's part at its own place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang import world
from guozhuang.errors import UsageError, WorldError, explain

from .communication import ReduceOp, communicator, divided, of_torch
from .communicators import VERBS, BaguaCommunicator

_DTYPES = (torch.float32, torch.float16, torch.int64, torch.uint8)


def _verb(function: Callable[..., None]) -> Any:
    """Let a verb return, as one whose work is done, where it fails because a rank has aborted its communicator."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (RuntimeError, WorldError):
            here = communicator(signature.bind(*args, **kwargs).arguments.get("comm"))
            if here is None or not here.ended_by_abort():
                raise

    VERBS[function.__name__] = call
    return call


@_verb
def send(tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Send a tensor to a rank, which must call :func:`recv`."""
    if (here := _checked(comm, tensor)) is not None:
        dist.send(tensor.detach().contiguous(), group=here.torch_group, group_dst=_other(here, dst))


@_verb
def recv(tensor: Tensor, src: int, comm: Any = None) -> None:
    """Receive a tensor that a rank sends with :func:`send`."""
    if (here := _checked(comm, tensor)) is not None:
        flat = _flat(tensor)
        dist.recv(flat, group=here.torch_group, group_src=_other(here, src))
        _write(tensor, flat)


@_verb
def broadcast(tensor: Tensor, src: int = 0, comm: Any = None) -> None:
    """Copy the tensor of rank ``src`` to all ranks, in place."""
    if (here := _checked(comm, tensor)) is not None:
        flat = _flat(tensor)
        dist.broadcast(flat, group=here.torch_group, group_src=_member(here, src))
        _write(tensor, flat)


@_verb
def reduce(send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks in ``recv_tensor`` of rank ``dst``; that of other ranks stays as it is."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        _same_size(send_tensor, recv_tensor)
        flat = _flat(send_tensor).clone()
        dist.reduce(flat, op=of_torch(op), group=here.torch_group, group_dst=_member(here, dst))
        if here.rank() == dst:
            _write(recv_tensor, divided(flat, op, here))


@_verb
def reduce_inplace(tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks in that of rank ``dst``."""
    reduce(tensor, tensor, dst, op, comm)


@_verb
def allreduce(send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks in ``recv_tensor``, which may be ``send_tensor``, on every rank."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        _same_size(send_tensor, recv_tensor)
        flat = _flat(recv_tensor)
        if send_tensor is not recv_tensor:
            flat.copy_(send_tensor.detach().reshape(-1))
        dist.all_reduce(flat, op=of_torch(op), group=here.torch_group)
        _write(recv_tensor, divided(flat, op, here))


@_verb
def allreduce_inplace(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks, in place."""
    allreduce(tensor, tensor, op, comm)


@_verb
def allgather(send_tensor: Tensor, recv_tensor: Tensor, comm: Any = None) -> None:
    """Join the tensors of all ranks in ``recv_tensor``, of any shape with n times the elements."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        _same_size(send_tensor, recv_tensor, here.nranks())
        flat = _flat(recv_tensor)
        world.versions.all_gather_single(flat, _flat(send_tensor).clone(), group=here.torch_group)
        _write(recv_tensor, flat)


@_verb
def allgather_inplace(tensor: Tensor, comm: Any = None) -> None:
    """Fill a tensor of n parts, of which each rank has its own."""
    if (here := _checked(comm, tensor)) is not None:
        allgather(_parts(tensor, here)[here.rank()].clone(), tensor, comm)


@_verb
def gather(send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Join the tensors of all ranks in ``recv_tensor`` of rank ``dst``; that of other ranks is not used."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        dst = _member(here, dst)
        parts: list[Tensor] | None = None
        if here.rank() == dst:
            _same_size(send_tensor, recv_tensor, here.nranks())
            parts = [torch.empty_like(_flat(send_tensor)) for _ in range(here.nranks())]
        dist.gather(_flat(send_tensor), parts, group=here.torch_group, group_dst=dst)
        if parts is not None:
            _write(recv_tensor, torch.cat(parts))


@_verb
def gather_inplace(tensor: Tensor, count: int, dst: int, comm: Any = None) -> None:
    """Join parts of ``count`` elements in the tensor of rank ``dst``; a tensor of ``count`` elements is the part itself."""
    if (here := _checked(comm, tensor)) is not None:
        gather(_own_part(tensor, count, here, dst).clone(), tensor, dst, comm)


@_verb
def scatter(send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: Any = None) -> None:
    """Give each rank its part of ``send_tensor`` of rank ``src``; that of other ranks is not used."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        src, parts, flat = _member(here, src), None, _flat(recv_tensor)
        if here.rank() == src:
            _same_size(recv_tensor, send_tensor, here.nranks())
            parts = [part.clone() for part in _flat(send_tensor).chunk(here.nranks())]
        dist.scatter(flat, parts, group=here.torch_group, group_src=src)
        _write(recv_tensor, flat)


@_verb
def scatter_inplace(tensor: Tensor, count: int, src: int, comm: Any = None) -> None:
    """Give each rank its part, of ``count`` elements; a tensor of ``count`` elements is the part itself."""
    if (here := _checked(comm, tensor)) is not None:
        part = _own_part(tensor, count, here, src).clone()
        scatter(tensor, part, src, comm)
        if tensor.numel() == count:
            _write(tensor, part)
        else:
            flat = _flat(tensor)
            flat[here.rank() * count :][:count] = part
            _write(tensor, flat)


@_verb
def reduce_scatter(send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks, and give each rank its part; ``send_tensor`` has n times the elements."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        _same_size(recv_tensor, send_tensor, here.nranks())
        flat = _flat(recv_tensor)
        world.versions.reduce_scatter_single(flat, _flat(send_tensor).clone(), op=of_torch(op), group=here.torch_group)
        _write(recv_tensor, divided(flat, op, here))


@_verb
def reduce_scatter_inplace(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks; the result is in this rank's part, other parts stay as they are."""
    if (here := _checked(comm, tensor)) is not None:
        part = _parts(tensor, here)[here.rank()].clone()
        reduce_scatter(tensor, part, op, comm)
        flat = _flat(tensor)
        flat[here.rank() * part.numel() :][: part.numel()] = part
        _write(tensor, flat)


@_verb
def alltoall(send_tensor: Tensor, recv_tensor: Tensor, comm: Any = None) -> None:
    """Give part r of ``send_tensor`` to rank r; ``recv_tensor`` gets the parts of ranks 0, 1, ... for this one."""
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        _same_size(send_tensor, recv_tensor)
        _parts(send_tensor, here)
        flat = _flat(recv_tensor)
        dist.all_to_all_single(flat, _flat(send_tensor).clone(), group=here.torch_group)
        _write(recv_tensor, flat)


@_verb
def alltoall_inplace(tensor: Tensor, comm: Any = None) -> None:
    """Exchange part r of the tensor with rank r's part for this rank."""
    alltoall(tensor, tensor, comm)


@_verb
def alltoall_v(
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Any = None,
) -> None:
    """Exchange parts of any sizes: to and from rank r so many elements, counted from so far in the flat tensors.

    Args:
        send_tensor: what is sent.
        send_counts: numbers of elements for rank 0, 1, ...
        send_displs: where each part begins; further entries than ranks are not used.
        recv_tensor: what is written; elements outside of all parts stay as they are.
        recv_counts: numbers of elements that rank 0, 1, ... sends to this one.
        recv_displs: where each part begins.
        comm: the communicator.
    """
    if (here := _checked(comm, send_tensor, recv_tensor)) is not None:
        n = here.nranks()
        _check_places(send_tensor, send_counts, send_displs, n)
        _check_places(recv_tensor, recv_counts, recv_displs, n)
        flat, sent, counts = _flat(recv_tensor), _flat(send_tensor), [int(each) for each in recv_counts[:n]]
        parts = [sent[begin:][:count] for count, begin in zip(send_counts[:n], send_displs[:n], strict=True)]
        arrived = flat.new_empty(sum(counts))
        dist.all_to_all_single(arrived, torch.cat(parts), counts, [p.numel() for p in parts], group=here.torch_group)
        for part, begin in zip(arrived.split(counts), recv_displs, strict=False):
            flat[begin:][: part.numel()] = part
        _write(recv_tensor, flat)


@_verb
def alltoall_v_inplace(tensor: Tensor, counts: Sequence[int], displs: Sequence[int], comm: Any = None) -> None:
    """Exchange parts of any sizes in place; each pair of ranks gives each other equally many elements."""
    alltoall_v(tensor, counts, displs, tensor, counts, displs, comm)


@_verb
def barrier(comm: Any = None) -> None:
    """Wait until every member has called it."""
    if (here := _at_work(comm)) is not None:
        dist.barrier(group=here.torch_group)


def _checked(comm: Any, *tensors: Tensor) -> BaguaCommunicator | None:
    """Return the communicator, None if there is nothing to do in it; raise if a tensor is of a kind that is not carried."""
    here = _at_work(comm)
    for tensor in tensors if here is not None else ():
        assert tensor.layout is torch.strided, f"tensors must be dense, not of layout {tensor.layout}"
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"unsupported tensor dtype {str(tensor.dtype).removeprefix('torch.')}")
    return here


def _at_work(comm: Any) -> BaguaCommunicator | None:
    """Return the communicator; None if this rank is no member, or it was aborted."""
    here = communicator(comm)
    return None if here is None or here.check_abort() else here


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in a row: the tensor's own memory if it is contiguous, else a copy, to be written back."""
    return tensor.detach().reshape(-1)


def _write(tensor: Tensor, flat: Tensor) -> None:
    """Write elements into a tensor, unless they are its own memory."""
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _member(here: BaguaCommunicator, rank: int) -> int:
    if not 0 <= rank < here.nranks():
        what = f"src and dst are ranks of the communicator, from 0 to {here.nranks() - 1}"
        raise UsageError(explain(what, value=rank, rank=here.rank()))
    return rank


def _other(here: BaguaCommunicator, rank: int) -> int:
    if _member(here, rank) == here.rank():
        what = "a rank sends to another one, not to itself"
        raise UsageError(explain(what, value=rank, rank=here.rank(), fix="copy the tensor"))
    return rank


def _same_size(small: Tensor, large: Tensor, times: int = 1) -> None:
    if small.numel() * times != large.numel() or small.dtype != large.dtype:
        what = (
            f"one tensor has {small.numel()} elements of {small.dtype}, the other one {large.numel()} of {large.dtype}"
        )
        fix = f"give tensors of one dtype, one with {times} times the elements of the other"
        raise UsageError(explain(what, value=(tuple(small.shape), tuple(large.shape)), fix=fix))


def _parts(tensor: Tensor, here: BaguaCommunicator) -> tuple[Tensor, ...]:
    if tensor.numel() % here.nranks():
        what = f"{tensor.numel()} elements cannot be divided into parts for {here.nranks()} ranks"
        raise UsageError(explain(what, value=tuple(tensor.shape), rank=here.rank(), fix="pad the tensor"))
    return _flat(tensor).view(here.nranks(), -1).unbind()


def _own_part(tensor: Tensor, count: int, here: BaguaCommunicator, root: int) -> Tensor:
    whole = count * here.nranks()
    if tensor.numel() != whole and (tensor.numel() != count or here.rank() == root):
        what = f"the tensor has {tensor.numel()} elements, and the parts of {here.nranks()} ranks have {count} each"
        raise UsageError(
            explain(what, value=tuple(tensor.shape), rank=here.rank(), fix=f"give one of {whole} elements")
        )
    return _flat(tensor) if tensor.numel() == count else _parts(tensor, here)[here.rank()]


def _check_places(tensor: Tensor, counts: Sequence[int], begins: Sequence[int], n: int) -> None:
    fits = len(counts) >= n and len(begins) >= n
    fits = fits and all(0 <= b <= b + c <= tensor.numel() for c, b in zip(counts[:n], begins[:n], strict=True))
    if not fits or any(count < 0 for count in counts[:n]):
        what = f"counts and displs name for each of {n} ranks a part inside the tensor's {tensor.numel()} elements"
        raise UsageError(explain(what, value=(list(counts), list(begins))))
