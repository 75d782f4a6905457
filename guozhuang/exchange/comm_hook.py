"""PyTorch's DDP communication hooks, ``hook(state, bucket) -> Future``, as an exchange.

A hook may issue later collectives from the callbacks of earlier ones (PowerSGD does). Callbacks run at different times on
different ranks, so no other collective may be issued meanwhile: unless a hook is known to issue all its collectives when it is
called, ``one_round`` is False and the reducer waits for it. See https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
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

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from .base import GradientExchange, Work

# The module and the names of PyTorch's hooks that issue a single collective; names, so that it need not be imported here.
_ONE_ROUND_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_ONE_ROUND_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"}

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class HookBucket:
    """The bucket that is passed to a hook, with the methods of ``torch.distributed.GradBucket``, which Python cannot create."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat

    def index(self) -> int:
        """Return the bucket's place in the order of exchanges; it may change once, after the first synchronized backward."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket as a flat tensor, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer, so that a hook can pass other values to a hook that it wraps."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return one tensor per parameter, sharing memory with the buffer."""
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        return [self._buffer.as_strided(v.shape, v.stride(), v.storage_offset()) for v in self._bucket.views]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the bucket."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._bucket.is_last


class _HookWork:
    def __init__(self, future: torch.futures.Future[Any], bucket: Bucket, name: str) -> None:
        self._future: torch.futures.Future[Any] | None = future
        self._bucket, self._name = bucket, name

    def is_completed(self) -> bool:
        return self._future is None or self._future.done()

    def wait(self) -> None:
        if self._future is None:
            return
        value = self._future.wait()
        self._future = None  # drop the future, which may hold a copy of the bucket's gradients
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        flat = self._bucket.flat
        if not isinstance(value, Tensor) or value.numel() != flat.numel():
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            what = f"the future of communication hook {self._name!r} must hold one tensor of {flat.numel()} elements"
            fix = "return a future of a tensor shaped like bucket.buffer()"
            raise ValueError(explain(what, value=shape, fix=fix))
        if value.data_ptr() != flat.data_ptr() or value.dtype != flat.dtype:
            flat.copy_(value.reshape(flat.shape))


@dataclass(frozen=True)
class CommHook(GradientExchange[None]):
    """Exchanges each bucket by calling a PyTorch communication hook with the user's state.

    Args:
        hook: ``hook(state, bucket) -> Future[Tensor]``.
        state: passed to the hook unchanged.
    """

    hook: Hook
    state: object

    @property
    def one_round(self) -> bool:
        """True for PyTorch's hooks that issue one collective, and for hooks with an attribute ``one_round`` that is True."""
        known = getattr(self.hook, "__module__", "") == _ONE_ROUND_MODULE
        known = known and getattr(self.hook, "__qualname__", "") in _ONE_ROUND_HOOKS
        return known or getattr(self.hook, "one_round", False) is True

    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: None = None) -> None:
        """Do nothing: a hook keeps its own state."""

    def start(self, bucket: Bucket, state: None, step: int) -> Work:
        """Call the hook with the bucket; the returned work waits for the hook's future.

        Raises:
            TypeError: the hook did not return a future.
        """
        name = getattr(self.hook, "__qualname__", type(self.hook).__name__)
        future = self.hook(self.state, HookBucket(bucket))
        if not isinstance(future, torch._C.Future):  # also accepts this base class, which Work.get_future() returns
            what = f"communication hook {name!r} must return a torch.futures.Future"
            fix = "return work.get_future(), or a Future with its result set"
            raise TypeError(explain(what, value=type(future).__name__, fix=fix))
        return _HookWork(future, bucket, name)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> None:
        """Return None: the bytes depend on what the hook sends."""


def check_hook(hook: Hook) -> None:
    """Raise unless ``hook`` looks like a communication hook; PyTorch's checks, except that bf16 is allowed on the CPU.

    Raises:
        TypeError: ``hook`` is not callable, or has no parameter ``bucket``.
        UsageError: the annotations of ``hook`` do not fit.
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
