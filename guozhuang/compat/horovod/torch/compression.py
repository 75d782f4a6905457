"""Compressors, which turn a tensor into a smaller one before an all-reduce, and turn the result back after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import explain


class Compressor:
    """The interface of a compressor: two static methods. Subclass it for a compressor of your own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for ``decompress``."""
        raise TypeError("a Compressor defines compress(tensor) and decompress(tensor, ctx) as static methods")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the result of the exchange in the dtype and shape of the tensor that was compressed."""
        raise TypeError("a Compressor defines compress(tensor) and decompress(tensor, ctx) as static methods")


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor itself, without a context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16; integers stay as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor in float16, and its former dtype as the context."""
        dtype = tensor.dtype
        return (tensor.to(torch.float16) if dtype.is_floating_point else tensor), dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return the tensor converted back to the dtype ``ctx``."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors to choose from: ``none`` and ``fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(compression: Any) -> None:
    """Raise ValueError unless an object can compress and decompress."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        fix = "give Compression.none, Compression.fp16, or an object with both"
        raise ValueError(explain("compression has no compress and decompress", value=compression, fix=fix))


def compressed_mean(compression: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Be a hook of ``DistributedDataParallel``: compress a bucket, sum it over the ranks, divide it by their number."""
    wire, context = compression.compress(bucket.buffer())
    work = dist.all_reduce(wire, async_op=True)
    size = dist.get_world_size()

    def finish(_: Any) -> torch.Tensor:
        received: torch.Tensor = compression.decompress(wire.div_(size), context)
        return received

    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
    return summed
