"""BytePS's ``DistributedDataParallel``: Guozhuang's, with BytePS's arguments, ``synchronize`` and moments of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from guozhuang import distributed
from guozhuang.compat.horovod.torch.compression import Compression, check_compression, compressed_mean
from guozhuang.errors import explain

from ..optimizer import begin_with_zeros
from ..session import declared, here


class BytePSDataParallel(distributed.DistributedDataParallel):
    """Averages gradients over all ranks while backward runs. Every rank must construct it, after ``bps.init()``.

    The constructor gives all trainable parameters gradients of zeros, and broadcasts parameters and buffers of rank 0. Each
    forward, also in evaluation, begins with a broadcast of rank 0's buffers. ``no_sync()`` lets gradients add up on this rank;
    the first backward outside averages the total. Parameters that get no gradient cost nothing more than a small agreement.

    Args:
        module: equal on all ranks.
        device_ids: one device; a module on the CPU stays there.
        broadcast_buffers: whether buffers are broadcast before each forward; at the start they are in any case.
        compression: the compressor of gradients that are sent.

    Raises:
        AssertionError: ``device_ids`` has not exactly one entry.
        ValueError: not initialised, or the compressor is none.
        MismatchError: (a ValueError) ranks hold different models.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: Any = Compression.none,
    ) -> None:
        world = here()
        if device_ids is None or len(device_ids) != 1:
            what = "DistributedDataParallel of BytePS needs device_ids of exactly one device"
            raise AssertionError(explain(what, value=device_ids, fix="give device_ids=[bps.local_rank()]"))
        check_compression(compression)
        declared.of_training([name for name, p in module.named_parameters() if p.requires_grad])
        if world.size > 1:
            begin_with_zeros(module.parameters())
        is_on_cpu = all(p.device.type == "cpu" for p in module.parameters())
        chosen = None if is_on_cpu else list(device_ids)
        super().__init__(module, chosen, forward_sync_buffers=broadcast_buffers, find_unused_parameters=True)
        self.device_ids = list(device_ids)
        self.broadcast_buffers = broadcast_buffers
        if compression is not Compression.none:
            self.register_comm_hook(compression, compressed_mean)

    def synchronize(self) -> None:
        """Give parameters that no rank used in the last backward gradients of zeros; the others are averaged already."""
        begin_with_zeros(p for p in self.module.parameters() if p.grad is None)

    @override
    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next forward begins with a broadcast of the buffers: always, where that was asked for."""
        return bool(self.forward_sync_buffers) and next(self.module.buffers(), None) is not None


DistributedDataParallel = BytePSDataParallel
