"""The collectives of Horovod's interface for PyTorch: synchronous or asynchronous, in place or not, of one or more tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Kind

from ..common.exceptions import HorovodInternalError
from ..common.process_sets import ProcessSet, global_process_set, member_of
from ..common.util import get_average_backwards_compatibility_fun
from . import submitting
from .compression import Compression, Compressor
from .handles import synchronize
from .submitting import Average, Call, Splits, Sum, broadcasting, check_group, exchanging, reducing

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(submitting)
_allreducing = functools.partial(reducing, Kind.ALLREDUCE)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine a tensor over all ranks into a new one. Every member of the process set must call this; all get the same.

    Differentiable: the gradient is the all-reduce of the gradients with the same ``op`` and factors.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks. Integers are averaged and scaled in float64 and cut
            towards zero; float16 and bfloat16 are scaled in float32.
        average: deprecated; True for ``op=Average``, False for ``op=Sum``.
        name: the name by which ranks match their calls, in any order; None: unnamed calls match by their order.
        compression: compressor that is applied before the exchange and undone after it.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: factor that multiplies each tensor before the reduction.
        postscale_factor: factor that multiplies the result.
        process_set: the process set whose members take part.

    Raises:
        ValueError: the tensor cannot be sent, see ``submitting.Call.begin``; both ``op`` and ``average`` are given.
        HorovodInternalError: ranks differ, or one is lost.
        NotImplementedError: Adasum in a process set other than the global one.
    """
    op = handle_average_backwards_compatibility(op, average)
    sent, ctx = compression.compress(tensor)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name)
    return compression.decompress(call.differentiable(sent)[0], ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``allreduce`` and return a handle for ``synchronize``. Do not change the tensor before that. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name)
    return call.begin([tensor])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Do the same as ``allreduce``, but write the result into the tensor itself and return it. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name, in_place=True)
    return call.wait([tensor])  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``allreduce_`` and return a handle for ``synchronize``."""
    op = handle_average_backwards_compatibility(op, average)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name, in_place=True)
    return call.begin([tensor])


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduce several tensors as one unit: all succeed or none. Return a list; otherwise the same as ``allreduce``."""
    op = handle_average_backwards_compatibility(op, average)
    check_group(tensors)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name, is_group=True)
    return _compressed(call, compression, tensors)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``grouped_allreduce`` and return a handle for ``synchronize``, which gives a list. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name, is_group=True)
    return call.begin(tensors)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Do the same as ``grouped_allreduce``, but write results into the tensors themselves. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name, is_group=True, in_place=True)
    return call.wait(tensors)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``grouped_allreduce_`` and return a handle for ``synchronize``, which gives a list."""
    op = handle_average_backwards_compatibility(op, average)
    call = _allreducing(op, prescale_factor, postscale_factor, process_set, name=name, is_group=True, in_place=True)
    return call.begin(tensors)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to sum or average sparse COO tensors of all ranks, by gathering their indices and values.

    Args:
        tensor: sparse; the number of its values may differ between ranks, its shape may not.
        name: see ``allreduce``.
        op: Average or Sum.
        process_set: the process set whose members take part.

    Returns:
        A function that waits, and returns the sum or the mean as a sparse tensor, not coalesced. For the mean of integers each
        value is divided in float64 and cut towards zero. It raises HorovodInternalError where ranks differ, or one is lost or
        has joined.

    Raises:
        ValueError: another ``op``; a dense tensor, or one of a layout other than COO.
    """
    if op not in (Average, Sum):
        raise ValueError(explain("sparse tensors are combined by Average or Sum", value=op))
    if not tensor.is_sparse:
        raise ValueError(explain("a sparse COO tensor is needed", value=str(tensor.layout), fix="use allreduce_async"))
    ranks = member_of(process_set).ranks
    # All-gather joins tensors along dim 0, which counts stored elements in the values and in the transposed indices. Shapes,
    # each after its number of dims, are gathered to be compared: indices of a larger tensor could lie outside a smaller one.
    shape = torch.tensor([tensor.dim(), *tensor.shape], device=tensor.device)
    parts = [shape, tensor._indices().t().contiguous(), tensor._values().contiguous()]
    handle = grouped_allgather_async(parts, None if name is None else f"sparse.{name}", process_set)

    def finish() -> Tensor:
        shapes, indices, values = synchronize(handle)
        _check_shapes(shapes.tolist(), ranks)
        if op == Average:
            mean = values / len(ranks) if values.is_floating_point() else (values.double() / len(ranks)).trunc()
            values = mean.to(values.dtype)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)

    return finish


def _check_shapes(gathered: list[int], ranks: Sequence[int]) -> None:
    shapes = []
    while gathered:
        num_dims = gathered[0]
        shapes.append(tuple(gathered[1 : 1 + num_dims]))
        gathered = gathered[1 + num_dims :]
    for rank, shape in zip(ranks, shapes, strict=True):
        if shape != shapes[0]:
            what = f"rank {ranks[0]} has {shapes[0]}, and rank {rank} has {shape}"
            fix = "give sparse tensors of one shape on all ranks"
            raise HorovodInternalError(explain(f"Mismatched allreduce tensor shapes: {what}", fix=fix))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Join the tensors of all ranks along their first dimension, in rank order. Every member of the set must call this.

    Differentiable: the gradient is this rank's part of the *mean* of the gradients over the ranks.

    Args:
        tensor: contiguous; the first dimension may differ between ranks, the others and the dtype may not.
        name: the name by which ranks match their calls; None: unnamed calls match by their order.
        process_set: the process set whose members take part.

    Raises:
        ValueError: the tensor cannot be sent.
        HorovodInternalError: ranks differ, or one is lost; a tensor has no dimension; a rank has joined.
    """
    return Call(Kind.ALLGATHER, process_set, name).differentiable(tensor)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin ``allgather`` and return a handle for ``synchronize``. Not differentiable."""
    return Call(Kind.ALLGATHER, process_set, name).begin([tensor])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """All-gather several tensors as one unit: all succeed or none. Return a list; otherwise the same as ``allgather``."""
    check_group(tensors)
    return list(Call(Kind.ALLGATHER, process_set, name, is_group=True).differentiable(*tensors))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``grouped_allgather`` and return a handle for ``synchronize``, which gives a list. Not differentiable."""
    return Call(Kind.ALLGATHER, process_set, name, is_group=True).begin(tensors)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine a tensor over all ranks, and return this rank's rows of the result. Every member of the set must call this.

    The first dimension is cut into consecutive parts, one for each rank; where it cannot be divided evenly the first ranks
    have a row more. Differentiable: the gradient is the all-gather of the gradients, for Sum times the number of ranks,
    times both factors.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks, with a dimension at least.
        name: the name by which ranks match their calls; None: unnamed calls match by their order.
        compression: compressor that is applied before the exchange and undone after it.
        op: Average or Sum.
        process_set: the process set whose members take part.
        prescale_factor: factor that multiplies each tensor before the reduction.
        postscale_factor: factor that multiplies the result.

    Raises:
        ValueError: the tensor cannot be sent.
        NotImplementedError: another ``op``.
        HorovodInternalError: ranks differ, or one is lost; a tensor has no dimension; a rank has joined.
    """
    sent, ctx = compression.compress(tensor)
    call = reducing(Kind.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, name=name)
    return compression.decompress(call.differentiable(sent)[0], ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin ``reducescatter`` and return a handle for ``synchronize``. Not differentiable."""
    call = reducing(Kind.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, name=name)
    return call.begin([tensor])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce-scatter several tensors as one unit: all or none. Return a list; otherwise the same as ``reducescatter``."""
    check_group(tensors)
    call = reducing(Kind.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, name=name, is_group=True)
    return _compressed(call, compression, tensors)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin ``grouped_reducescatter`` and return a handle for ``synchronize``, which gives a list. Not differentiable."""
    call = reducing(Kind.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, name=name, is_group=True)
    return call.begin(tensors)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return root's tensor, as a new one on every rank. Every member of the process set must call this.

    Differentiable: the gradient on root is the *mean* of the gradients over the ranks, elsewhere it is zero.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks.
        root_rank: rank in the global process set, also if another set is given, of which it must be a member.
        name: the name by which ranks match their calls; None: unnamed calls match by their order.
        process_set: the process set whose members take part.

    Raises:
        ValueError: the tensor cannot be sent; root is no member.
        HorovodInternalError: ranks differ, or one is lost; a rank has joined.
    """
    return broadcasting(root_rank, process_set, name=name).differentiable(tensor)[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast`` and return a handle for ``synchronize``. Not differentiable."""
    return broadcasting(root_rank, process_set, name=name).begin([tensor])


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Do the same as ``broadcast``, but write the result into the tensor itself and return it. Not differentiable."""
    call = broadcasting(root_rank, process_set, name=name, in_place=True)
    return call.wait([tensor])  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast_`` and return a handle for ``synchronize``."""
    return broadcasting(root_rank, process_set, name=name, in_place=True).begin([tensor])


def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of the first dimension to each rank, and join the received rows in rank order.

    Every member of the process set must call this. Differentiable: the gradient goes back the way the rows came; rows that were
    not sent have none.

    Args:
        tensor: contiguous; the first dimension may differ between ranks, the others and the dtype may not.
        splits: how many rows go to each member, as integers; further rows are not sent. None: equally many.
        name: the name by which ranks match their calls; None: unnamed calls match by their order.
        process_set: the process set whose members take part.

    Returns:
        The received rows; if ``splits`` is given, a pair of them and an int32 tensor: how many rows came from each rank.

    Raises:
        ValueError: the tensor cannot be sent; ``splits`` are no integers, not one per member, negative, or more than there are
            rows; without them, the rows cannot be divided evenly.
        HorovodInternalError: ranks differ, or one is lost; a tensor has no dimension; a rank has joined.
    """
    output, received = exchanging(splits, process_set, name).differentiable(tensor)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``alltoall`` and return a handle for ``synchronize``, which gives (output, received_splits). Not differentiable."""
    return exchanging(splits, process_set, name).begin([tensor])


def _compressed(call: Call, compression: type[Compressor], tensors: Sequence[Tensor]) -> list[Tensor]:
    sent = [compression.compress(tensor) for tensor in tensors]
    results = call.differentiable(*(tensor for tensor, _ in sent))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(results, sent, strict=True)]
