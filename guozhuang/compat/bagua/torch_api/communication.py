"""Groups, communicators, and collectives that wait; arguments come in the order (send, recv), the reverse of PyTorch's.

All members of the communicator ``comm`` must call each collective, in one order (None: all ranks); a rank that has the sentinel
in its place returns at once. ``src`` and ``dst`` are ranks in the communicator, others than this one for ``send`` and ``recv``.
Tensors are dense, of float32, float16, int64 or uint8, on any device that the group serves; sparse ones raise AssertionError,
other dtypes RuntimeError, and sizes or ranks that do not fit UsageError, before anything is sent. In a communicator that was
aborted they return at once. An in-place tensor of n parts has this rank's part at its own place.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang import world
from guozhuang.errors import UsageError, explain

from .bucket import get_backend as get_backend
from .communicators import VERBS, BaguaCommunicator, communicator
from .communicators import BaguaProcessGroup as BaguaProcessGroup
from .communicators import CommMember as CommMember
from .communicators import _get_default_group as _get_default_group
from .communicators import _rank_not_in_group as _rank_not_in_group
from .communicators import _torch_to_bagua_pg_map as _torch_to_bagua_pg_map
from .communicators import from_torch_group as from_torch_group
from .communicators import init_process_group as init_process_group
from .communicators import is_initialized as is_initialized
from .communicators import new_group as new_group
from .utils import apply_flattened_call

_DTYPES = (torch.float32, torch.float16, torch.int64, torch.uint8)


class ReduceOp(enum.IntEnum):
    """How an all-reduce combines tensors. AVG is SUM, divided by the number of ranks then."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def _verb(function: Callable[..., None]) -> Any:
    """Let a function be called with any ``comm``, and be a method of communicators; itself it gets a communicator that works.

    A rank that is no member, or whose communicator was aborted, returns at once, also where a call fails by that. Tensors, the
    operation, and ranks ``src`` and ``dst``, are checked before it is called.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        here = given["comm"] = communicator(given["comm"])
        if here is None or here.check_abort():
            return
        for tensor in given.values():
            if isinstance(tensor, Tensor):
                _check_tensor(tensor)
        for name in ("src", "dst"):
            if name in given:
                _check_member(here, given[name])
        if "op" in given:
            given["op"] = _named(given["op"])
        try:
            function(*bound.args, **bound.kwargs)
        except RuntimeError:
            if not here.ended_by_abort():
                raise

    VERBS[function.__name__] = call
    return call


@_verb
def send(tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Send a tensor to a rank, which must call :func:`recv`."""
    _check_other(comm, dst)
    dist.send(tensor.detach().contiguous(), group=comm.torch_group, group_dst=dst)


@_verb
def recv(tensor: Tensor, src: int, comm: Any = None) -> None:
    """Receive a tensor that a rank sends with :func:`send`."""
    _check_other(comm, src)
    flat = _flat(tensor)
    dist.recv(flat, group=comm.torch_group, group_src=src)
    _write(tensor, flat)


@_verb
def broadcast(tensor: Tensor, src: int = 0, comm: Any = None) -> None:
    """Copy the tensor of rank ``src`` to all ranks, in place."""
    flat = _flat(tensor)
    dist.broadcast(flat, group=comm.torch_group, group_src=src)
    _write(tensor, flat)


@_verb
def reduce(send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks in ``recv_tensor`` of rank ``dst``; that of other ranks stays as it is."""
    _check_sizes(send_tensor, recv_tensor)
    flat = _flat(send_tensor).clone()
    dist.reduce(flat, op=_of_torch(op), group=comm.torch_group, group_dst=dst)
    if comm.rank() == dst:
        _write(recv_tensor, _divided(flat, op, comm))


@_verb
def reduce_inplace(tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks in that of rank ``dst``."""
    reduce(tensor, tensor, dst, op, comm)


@_verb
def allreduce(send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks in ``recv_tensor``, which may be ``send_tensor``, on every rank."""
    _check_sizes(send_tensor, recv_tensor)
    flat = _flat(recv_tensor)
    if send_tensor is not recv_tensor:
        flat.copy_(_flat(send_tensor))
    dist.all_reduce(flat, op=_of_torch(op), group=comm.torch_group)
    _write(recv_tensor, _divided(flat, op, comm))


@_verb
def allreduce_inplace(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks, in place."""
    allreduce(tensor, tensor, op, comm)


@_verb
def allgather(send_tensor: Tensor, recv_tensor: Tensor, comm: Any = None) -> None:
    """Join the tensors of all ranks in ``recv_tensor``, of any shape with n times the elements."""
    _check_sizes(send_tensor, recv_tensor, comm.nranks())
    flat = _flat(recv_tensor)
    world.versions.all_gather_single(flat, _flat(send_tensor).clone(), group=comm.torch_group)
    _write(recv_tensor, flat)


@_verb
def allgather_inplace(tensor: Tensor, comm: Any = None) -> None:
    """Fill a tensor of n parts, of which each rank has its own."""
    allgather(_parts(tensor, comm)[comm.rank()], tensor, comm)


@_verb
def gather(send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: Any = None) -> None:
    """Join the tensors of all ranks in ``recv_tensor`` of rank ``dst``; that of other ranks is not used."""
    sent, parts = _flat(send_tensor), None
    if comm.rank() == dst:
        _check_sizes(send_tensor, recv_tensor, comm.nranks())
        parts = [torch.empty_like(sent) for _ in range(comm.nranks())]
    dist.gather(sent, parts, group=comm.torch_group, group_dst=dst)
    if parts is not None:
        _write(recv_tensor, torch.cat(parts))


@_verb
def gather_inplace(tensor: Tensor, count: int, dst: int, comm: Any = None) -> None:
    """Join parts of ``count`` elements in the tensor of rank ``dst``; a tensor of ``count`` elements is the part itself."""
    gather(_own_part(tensor, count, comm, dst), tensor, dst, comm)


@_verb
def scatter(send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: Any = None) -> None:
    """Give each rank its part of ``send_tensor`` of rank ``src``; that of other ranks is not used."""
    flat, parts = _flat(recv_tensor), None
    if comm.rank() == src:
        _check_sizes(recv_tensor, send_tensor, comm.nranks())
        parts = [part.clone() for part in _parts(send_tensor, comm)]
    dist.scatter(flat, parts, group=comm.torch_group, group_src=src)
    _write(recv_tensor, flat)


@_verb
def scatter_inplace(tensor: Tensor, count: int, src: int, comm: Any = None) -> None:
    """Give each rank its part, of ``count`` elements; a tensor of ``count`` elements is the part itself."""
    flat = _flat(tensor)
    scatter(flat, _own_part(flat, count, comm, src), src, comm)
    _write(tensor, flat)


@_verb
def reduce_scatter(send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks, and give each rank its part; ``send_tensor`` has n times the elements."""
    _check_sizes(recv_tensor, send_tensor, comm.nranks())
    flat = _flat(recv_tensor)
    world.versions.reduce_scatter_single(flat, _flat(send_tensor).clone(), op=_of_torch(op), group=comm.torch_group)
    _write(recv_tensor, _divided(flat, op, comm))


@_verb
def reduce_scatter_inplace(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine the tensors of all ranks; the result is in this rank's part, other parts stay as they are."""
    flat = _flat(tensor)
    reduce_scatter(flat, _parts(flat, comm)[comm.rank()], op, comm)
    _write(tensor, flat)


@_verb
def alltoall(send_tensor: Tensor, recv_tensor: Tensor, comm: Any = None) -> None:
    """Give part r of ``send_tensor`` to rank r; ``recv_tensor`` gets the parts of ranks 0, 1, ... for this one."""
    _check_sizes(send_tensor, recv_tensor)
    _parts(send_tensor, comm)
    flat = _flat(recv_tensor)
    dist.all_to_all_single(flat, _flat(send_tensor).clone(), group=comm.torch_group)
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
    n = comm.nranks()
    _check_places(send_tensor, send_counts, send_displs, n)
    _check_places(recv_tensor, recv_counts, recv_displs, n)
    flat, sent, counts = _flat(recv_tensor), _flat(send_tensor), [int(each) for each in recv_counts[:n]]
    parts = [sent[begin:][:count] for count, begin in zip(send_counts[:n], send_displs[:n], strict=True)]
    arrived = flat.new_empty(sum(counts))
    dist.all_to_all_single(arrived, torch.cat(parts), counts, [p.numel() for p in parts], group=comm.torch_group)
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
    dist.barrier(group=comm.torch_group)


@_verb
def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, comm: Any = None) -> None:
    """Overwrite tensors, of any dtypes, with those of one rank, in few messages; shapes are equal on all ranks."""
    for some in _by_dtype(tensors):
        apply_flattened_call(some, lambda flat: dist.broadcast(flat, group=comm.torch_group, group_src=src))


@_verb
def allreduce_coalesced_inplace(tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine tensors, of any dtypes, over ranks, in place, in few messages; shapes are equal on all ranks."""

    def combine(flat: Tensor) -> None:
        dist.all_reduce(flat, op=_of_torch(op), group=comm.torch_group)
        _divided(flat, op, comm)

    for some in _by_dtype(tensors):
        apply_flattened_call(some, combine)


@_verb
def _broadcast_objects(objects: list[Any], src: int, comm: Any) -> None:
    dist.broadcast_object_list(objects, group=comm.torch_group, group_src=src)


def broadcast_object(obj: Any, src: int = 0, comm: Any = None) -> Any:
    """Return the object of one rank, which can be pickled, on every rank; a rank that is no member gets ``obj`` back."""
    sent = [obj]
    _broadcast_objects(sent, src, comm)
    return sent[0]


def _named(op: Any) -> ReduceOp:
    """Return Bagua's operation, also for one of PyTorch's, whose numbers are others, and for a number of Bagua's."""
    try:
        return ReduceOp[op.name] if hasattr(op, "name") else ReduceOp(op)
    except (KeyError, ValueError):
        fix = f"give one of bagua.torch_api.ReduceOp: {', '.join(ReduceOp.__members__)}"
        raise UsageError(explain("op is a ReduceOp", value=op, fix=fix)) from None


def _of_torch(op: ReduceOp) -> Any:
    """Return PyTorch's operation; AVG is summed, because not every backend averages, and :func:`_divided` then."""
    return dist.ReduceOp.SUM if op is ReduceOp.AVG else getattr(dist.ReduceOp, op.name)


def _divided(total: Tensor, op: ReduceOp, here: BaguaCommunicator) -> Tensor:
    """Divide the sum for AVG by the number of ranks, in place; whole numbers are cut towards zero."""
    if op is not ReduceOp.AVG:
        return total
    return total.div_(here.nranks(), rounding_mode=None if total.is_floating_point() else "trunc")


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
    return [[t for t in tensors if (t.dtype, t.device) == kind] for kind in kinds]


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in a row: the tensor's own memory if it is contiguous, else a copy, to be written back."""
    return tensor.detach().reshape(-1)


def _write(tensor: Tensor, flat: Tensor) -> None:
    """Write elements into a tensor, unless they are its own memory."""
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _parts(tensor: Tensor, here: BaguaCommunicator) -> tuple[Tensor, ...]:
    if tensor.numel() % here.nranks():
        what = f"{tensor.numel()} elements cannot be divided into parts for {here.nranks()} ranks"
        raise UsageError(explain(what, value=tuple(tensor.shape), rank=here.rank(), fix="pad the tensor"))
    return _flat(tensor).chunk(here.nranks())


def _own_part(tensor: Tensor, count: int, here: BaguaCommunicator, root: int) -> Tensor:
    whole = count * here.nranks()
    if tensor.numel() != whole and (tensor.numel() != count or here.rank() == root):
        what = f"the tensor has {tensor.numel()} elements, and the parts of {here.nranks()} ranks have {count} each"
        raise UsageError(
            explain(what, value=tuple(tensor.shape), rank=here.rank(), fix=f"give one of {whole} elements")
        )
    return _flat(tensor) if tensor.numel() == count else _parts(tensor, here)[here.rank()]


def _check_tensor(tensor: Tensor) -> None:
    assert tensor.layout is torch.strided, f"tensors must be dense, not of layout {tensor.layout}"
    if tensor.dtype not in _DTYPES:
        raise RuntimeError(f"unsupported tensor dtype {str(tensor.dtype).removeprefix('torch.')}")


def _check_member(here: BaguaCommunicator, rank: int) -> None:
    if not 0 <= rank < here.nranks():
        what = f"src and dst are ranks of the communicator, from 0 to {here.nranks() - 1}"
        fix = "give the place of that rank among the ranks of the group, which may not be its rank in the world"
        raise UsageError(explain(what, value=rank, rank=here.rank(), fix=fix))


def _check_other(here: BaguaCommunicator, rank: int) -> None:
    if rank == here.rank():
        what = "a rank sends to another one, not to itself"
        raise UsageError(explain(what, value=rank, rank=here.rank(), fix="copy the tensor"))


def _check_sizes(small: Tensor, large: Tensor, times: int = 1) -> None:
    if small.numel() * times != large.numel() or small.dtype != large.dtype:
        what = (
            f"one tensor has {small.numel()} elements of {small.dtype}, the other one {large.numel()} of {large.dtype}"
        )
        fix = f"give tensors of one dtype, one with {times} times the elements of the other"
        raise UsageError(explain(what, value=(tuple(small.shape), tuple(large.shape)), fix=fix))


def _check_places(tensor: Tensor, counts: Sequence[int], begins: Sequence[int], n: int) -> None:
    fits = len(counts) >= n and len(begins) >= n
    fits = fits and all(0 <= b <= b + c <= tensor.numel() for c, b in zip(counts[:n], begins[:n], strict=True))
    if not fits or any(count < 0 for count in counts[:n]):
        what = f"counts and displs name for each of {n} ranks a part inside the tensor's {tensor.numel()} elements"
        raise UsageError(
            explain(what, value=(list(counts), list(begins)), fix="count in elements, not in rows or bytes")
        )
