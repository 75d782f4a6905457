"""``push_pull`` in every form, with the names of ``byteps.torch.ops``, on the operations of the layer for Horovod."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from guozhuang.compat.horovod.common.process_sets import global_process_set
from guozhuang.compat.horovod.torch.compression import Compression, check_compression
from guozhuang.compat.horovod.torch.handles import poll, synchronize
from guozhuang.compat.horovod.torch.submitting import Sum, reducing
from guozhuang.compat.horovod.torch.turns import NameTurns
from guozhuang.errors import explain
from guozhuang.gradients.named import Kind

from .session import declared, here, init, local_rank, local_size, rank, resume, shutdown, size, suspend

__all__ = [
    "byteps_push_pull", "byteps_torch_set_num_grads", "declare", "init", "local_rank", "local_size", "poll",
    "push_pull", "push_pull_async", "push_pull_async_inplace", "push_pull_group_sync_inplace", "push_pull_inplace",
    "rank", "resume", "shutdown", "size", "suspend", "synchronize",
]  # fmt: skip

_DTYPES: Final = (
    *(torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
)


class _Rounds:
    """Counts grouped operations: each round has as many as were told."""

    num_grads = 0  # 0: not told yet
    _num_counted = 0
    _world: Any = None

    def count(self, world: Any) -> int:
        """Return the number of the next operation in its round, from 1; a new world begins a round."""
        has_ended = world is not self._world or self._num_counted >= self.num_grads > 0
        self._world, self._num_counted = world, 1 if has_ended else self._num_counted + 1
        return self._num_counted


_turns, _rounds = NameTurns(), _Rounds()


def push_pull(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Any = Compression.none,
) -> Tensor:
    """Sum or average a tensor over all ranks into a new one, and wait for it. Every rank must call this with the same name.

    Differentiable: the gradient is the ``push_pull`` of the gradients with the same ``average``.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks: uint8, int32, int64, or floating-point numbers. The mean
            of integers is cut towards zero.
        average: whether the sum is divided by the number of ranks.
        name: the name by which ranks match their calls, in any order. It is declared.
        version, priority: without meaning, as in BytePS, whose interface for PyTorch does not use them.
        compression: compressor that is applied before the exchange and undone after it.

    Raises:
        AssertionError: there is no name.
        RuntimeError: not initialised; ranks differ, or one is lost.
        ValueError: the tensor cannot be sent, or the compressor is none.
    """
    name = _checked(tensor, name)
    check_compression(compression)
    sent, ctx = compression.compress(tensor)
    result: Tensor = _PushPull.apply(sent, average, name)  # type: ignore[no-untyped-call]
    received: Tensor = compression.decompress(result, ctx)
    return received


def push_pull_async(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    """Begin ``push_pull`` and return a handle for ``synchronize``. Do not change the tensor before that. Not differentiable."""
    return _begin(tensor, average, _checked(tensor, name), in_place=False)


def push_pull_async_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    """Begin to sum or average a tensor over all ranks in place; return a handle for ``synchronize``, which gives the tensor."""
    return _begin(tensor, average, _checked(tensor, name), in_place=True)


byteps_push_pull = push_pull_async_inplace


def push_pull_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Tensor:
    """Do the same as ``push_pull``, but write the result into the tensor itself and return it. Not differentiable."""
    result: Tensor = synchronize(push_pull_async_inplace(tensor, average, name, version, priority))
    return result


def push_pull_group_sync_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> tuple[int, int]:
    """Do the same as ``push_pull_async_inplace``, and count.

    Returns:
        The handle, and the number of this call in its round: 1 for the first, up to what ``byteps_torch_set_num_grads`` told.
    """
    return push_pull_async_inplace(tensor, average, name, version, priority), _rounds.count(here(RuntimeError))


def byteps_torch_set_num_grads(num_grads: int) -> int:
    """Tell how many calls of ``push_pull_group_sync_inplace`` make a round; return 0.

    Raises:
        ValueError: the number is less than one.
    """
    if num_grads < 1:
        raise ValueError(explain("the number of gradients of a round is at least 1", value=num_grads))
    _rounds.num_grads = num_grads
    return 0


def declare(name: str) -> int:
    """Give "byteps.<name>" the next key, unless it has one; return 0. It may be called before ``init``.

    Keys are the order of names. Nothing here depends on it, as operations are sent when they are ready.
    """
    return declared.declare(f"byteps.{name}")


class _PushPull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, average: bool, name: str) -> Tensor:
        ctx.average, ctx.name = average, name
        result: Tensor = synchronize(_begin(tensor, average, name, in_place=False))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        name = f"{ctx.name}.gradient"
        return _PushPull.apply(gradients[0].contiguous(), ctx.average, name), None, None  # type: ignore[no-untyped-call]


def _begin(tensor: Tensor, average: bool, name: str, in_place: bool) -> int:
    world = here(RuntimeError)
    divisor = world.size if average else 1  # after the sum, so that equal tensors average to themselves
    call = reducing(Kind.ALLREDUCE, Sum, 1.0, 1.0, global_process_set, name=name, in_place=in_place, divisor=divisor)
    return _turns.begin(world, call, tensor)


def _checked(tensor: Tensor, name: str | None) -> str:
    """Return the full name of an operation, declared; AssertionError without one, ValueError for what cannot be sent."""
    if name is None:
        raise AssertionError("To manually call push_pull, you must specify a name by name=...")
    if not isinstance(tensor, Tensor):
        raise ValueError(explain("push_pull takes a tensor", value=type(tensor).__name__, fix="use torch.tensor"))
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    declare(name)
    return f"byteps.{name}"
