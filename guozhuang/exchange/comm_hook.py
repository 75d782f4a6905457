"""PyTorch's DDP communication hooks, ``hook(state, bucket) -> Future``, as an exchange.

A hook may issue later collectives from the callbacks of earlier ones (PowerSGD does). Which callback runs first differs
between ranks, so two such buckets must never be under way at once: ``one_round`` is False and the reducer lets one end
before it starts the next. See https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html for what a hook is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket

from ..buckets import Bucket
from ..errors import UsageError, explain
from .base import GradientExchange, Work

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class HookBucket:
    """What a hook sees: the methods of ``torch.distributed.GradBucket``, which cannot be made from Python."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat

    def index(self) -> int:
        """Place in the order of exchanges; buckets are laid out anew once, after the first synchronized backward."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients of the bucket, flat, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Put another tensor in the buffer's place, for a hook that this one wraps."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """One tensor per parameter, sharing memory with the buffer."""
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        return [self._buffer.as_strided(v.shape, v.stride(), v.storage_offset()) for v in self._bucket.views]

    def parameters(self) -> list[Tensor]:
        """The parameters of the bucket."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""
        return self._bucket.is_last


@dataclass(frozen=True)
class _HookWork:
    future: torch.futures.Future[Any]
    bucket: Bucket
    name: str

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        value = self.future.wait()
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        flat = self.bucket.flat
        if not isinstance(value, Tensor) or value.numel() != flat.numel():
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                explain(
                    f"the future of communication hook {self.name!r} must hold one tensor of {flat.numel()} elements",
                    value=shape,
                    fix="return a future of a tensor shaped like bucket.buffer()",
                )
            )
        if value.data_ptr() != flat.data_ptr() or value.dtype != flat.dtype:
            flat.copy_(value.reshape(flat.shape))


@dataclass(frozen=True)
class CommHook(GradientExchange[None]):
    """A PyTorch hook with the user's state. What it computes, sends and loses is the hook's own.

    Args:
        hook: ``hook(state, bucket) -> Future[Tensor]``.
        state: handed to the hook unchanged.
    """

    hook: Hook
    state: object

    @property
    def one_round(self) -> bool:
        """False: a hook may chain collectives."""
        return False

    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Do nothing: a hook keeps its own state."""

    def start(self, bucket: Bucket, state: None, step: int) -> Work:
        """Call the hook.

        Raises:
            TypeError: it returned something that is no future.
        """
        name = getattr(self.hook, "__qualname__", type(self.hook).__name__)
        future = self.hook(self.state, HookBucket(bucket))
        if not isinstance(future, torch._C.Future):  # the base class: what a Work's get_future() gives
            raise TypeError(
                explain(
                    f"communication hook {name!r} must return a torch.futures.Future",
                    value=type(future).__name__,
                    fix="return work.get_future(), or a Future with its result set",
                )
            )
        return _HookWork(future, bucket, name)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> None:
        """Return None: only the hook knows."""


def check_hook(hook: Hook) -> None:
    """Raise unless ``hook`` looks like a communication hook; the same checks as PyTorch's, but for bf16 on CPU, which works.

    Raises:
        TypeError: it cannot be called, or has no parameter ``bucket``.
        UsageError: its annotations are not a hook's.
    """
    if not callable(hook):
        raise TypeError(explain("a communication hook must be callable", value=hook))
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise TypeError(explain("a communication hook takes (state, bucket)", value=str(signature)))
    annotation = signature.parameters["bucket"].annotation
    if annotation not in (inspect.Parameter.empty, GradBucket, "dist.GradBucket", "GradBucket"):
        raise UsageError(
            explain("the parameter bucket of a communication hook must be a dist.GradBucket", value=annotation)
        )
    returned = signature.return_annotation
    futures = (torch.futures.Future[Tensor], "torch.futures.Future[torch.Tensor]", "Future[Tensor]")
    if returned is not inspect.Signature.empty and returned not in futures and "Future" not in str(returned):
        raise UsageError(explain("a communication hook must return torch.futures.Future[torch.Tensor]", value=returned))
