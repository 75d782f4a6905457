"""``push_pull`` in every form, with the names of ``byteps.torch.ops``, on the operations of the layer for Horovod.

[Note: one name, several operations] BytePS lets operations of one name be under way at once; the engine below takes a name once
at a time. So the operations of one name take turns under ``_NUM_TURNS`` names, "byteps.x", "byteps.x#1" and so on. All ranks
submit equally many operations of a name, so they agree on the turn. An operation whose turn is still taken waits for that one.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from guozhuang.compat.horovod.common.process_sets import global_process_set
from guozhuang.compat.horovod.torch.compression import Compression
from guozhuang.compat.horovod.torch.handles import poll, synchronize, table
from guozhuang.compat.horovod.torch.submitting import Sum, reducing
from guozhuang.errors import explain
from guozhuang.gradients.named import DuplicateNameError, Kind

from .session import declared, here, init, local_rank, local_size, rank, resume, shutdown, size, suspend

__all__ = [
    "byteps_push_pull",
    "byteps_torch_set_num_grads",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]

_NUM_TURNS: Final = 4
_DTYPES: Final = (
    *(torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
)


class _Turns:
    """The turn of each name, and the counts of grouped operations, in one world. See [Note: one name, several operations].

    Attributes:
        num_grads: how many grouped operations make a round; 0: not told yet.
    """

    def __init__(self) -> None:
        self.num_grads = 0
        self._world: Any = None
        self._last: dict[str, list[int]] = {}  # the handles of a name's operations, the newest last
        self._num_begun: dict[str, int] = {}
        self._num_grouped = 0

    def begin(self, tensor: Tensor, average: bool, name: str, in_place: bool) -> int:
        """Submit an operation in the next turn of its name, and return its handle."""
        world = here(RuntimeError)
        self._look(world)
        turn = self._num_begun.get(name, 0) % _NUM_TURNS
        called = f"{name}#{turn}" if turn else name
        divisor = world.size if average else 1  # after the sum, so that equal tensors average to themselves
        call = reducing(
            Kind.ALLREDUCE, Sum, 1.0, 1.0, global_process_set, name=called, in_place=in_place, divisor=divisor
        )
        handles = self._last.setdefault(name, [])
        try:
            handle = call.begin([tensor])
        except DuplicateNameError:
            for earlier in handles[:1]:  # the one that had this turn before
                table.settle(earlier)
            handle = call.begin([tensor])
        self._num_begun[name] = self._num_begun.get(name, 0) + 1
        self._last[name] = [*handles[1 - _NUM_TURNS :], handle]
        return handle

    def count(self) -> int:
        """Return the number of the next grouped operation in its round, from 1."""
        self._look(here(RuntimeError))
        self._num_grouped = 1 if self._num_grouped >= self.num_grads > 0 else self._num_grouped + 1
        return self._num_grouped

    def _look(self, world: Any) -> None:
        """Count from the beginning in a new world, as all its ranks do."""
        if world is not self._world:
            self._world, self._num_grouped = world, 0
            self._last.clear()
            self._num_begun.clear()


_turns = _Turns()


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
        ValueError: the tensor cannot be sent.
    """
    name = _named(name)
    _check(tensor)
    sent, ctx = compression.compress(tensor)
    result: Tensor = _PushPull.apply(sent, average, name)  # type: ignore[no-untyped-call]
    received: Tensor = compression.decompress(result, ctx)
    return received


def push_pull_async(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    """Begin ``push_pull`` and return a handle for ``synchronize``. Do not change the tensor before that. Not differentiable."""
    name = _named(name)
    _check(tensor)
    return _turns.begin(tensor, average, name, in_place=False)


def push_pull_async_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    """Begin to sum or average a tensor over all ranks in place; return a handle for ``synchronize``, which gives the tensor."""
    name = _named(name)
    _check(tensor)
    return _turns.begin(tensor, average, name, in_place=True)


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
    return push_pull_async_inplace(tensor, average, name, version, priority), _turns.count()


def byteps_torch_set_num_grads(num_grads: int) -> int:
    """Tell how many calls of ``push_pull_group_sync_inplace`` make a round; return 0.

    Raises:
        ValueError: the number is less than one.
    """
    if num_grads < 1:
        raise ValueError(explain("the number of gradients of a round is at least 1", value=num_grads))
    _turns.num_grads = num_grads
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
        result: Tensor = synchronize(_turns.begin(tensor, average, name, in_place=False))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        name = f"{ctx.name}.gradient"
        return _PushPull.apply(gradients[0].contiguous(), ctx.average, name), None, None  # type: ignore[no-untyped-call]


def _named(name: str | None) -> str:
    """Return the full name of an operation, which is declared; AssertionError if there is none."""
    if name is None:
        raise AssertionError("To manually call push_pull, you must specify a name by name=...")
    declare(name)
    return f"byteps.{name}"


def _check(tensor: Tensor) -> None:
    """Raise ValueError unless the tensor can be sent."""
    if not isinstance(tensor, Tensor):
        raise ValueError(explain("push_pull takes a tensor", value=type(tensor).__name__, fix="use torch.tensor"))
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
