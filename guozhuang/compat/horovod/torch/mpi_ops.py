"""The functions of Horovod's ``horovod.torch.mpi_ops``: start and end, ranks, collectives, join and barrier.

The collectives are defined in ``verbs``. ``horovod.torch`` exports the names in ``__all__``; ``is_homogeneous`` and ``_basics``
are found only in this module, as in Horovod.
"""

from __future__ import annotations

import torch

from guozhuang.errors import explain
from guozhuang.gradients.named import Kind, NegotiationError

from ..common.basics import HorovodBasics
from ..common.exceptions import HorovodInternalError
from ..common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ..common.state import required
from .compression import Compression
from .handles import poll, synchronize, table
from .submitting import Adasum, Average, Call, Max, Min, Product, Sum
from .verbs import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from .verbs import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


class _TorchBasics(HorovodBasics):
    """Starts and ends the Horovod world, as ``HorovodBasics`` does, and keeps results of unfinished handles at its end."""

    def shutdown(self) -> None:
        """Leave the Horovod world; ``synchronize`` still works for the newest 1000 handles that were not synchronized yet."""
        super().shutdown()
        table.left()


_basics = _TorchBasics()

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built


def join(device: int = -1) -> int:
    """Report that this rank has no more data, and wait until all ranks have reported this.

    Until then this rank feeds zeros to the other ranks' all-reduces (an average still divides by all ranks); other collectives
    of those ranks fail. Works among all ranks, not in process sets.

    Args:
        device: index of the accelerator on which zeros are made for other ranks' tensors on accelerators, if this rank never
            submitted any there; -1: the current one. It is ignored without an accelerator.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: not initialised; a device that does not exist.
        HorovodInternalError: a rank is lost.
    """
    here = required()
    num_devices = torch.accelerator.device_count()
    if device < -1 or (0 < num_devices <= device):
        what = f"device is -1 or the index of a device; there are {num_devices}"
        raise ValueError(explain(what, value=device, rank=here.rank))
    try:
        handle = here.engine.world.join(device if device >= 0 and num_devices else None)
        handle.wait()
    except NegotiationError as error:
        raise HorovodInternalError(str(error)) from error
    assert handle.last_joined is not None
    here.sets[0].count_again()
    return handle.last_joined


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of the process set has called ``barrier``.

    Raises:
        ValueError: not initialised; this process is no member.
        HorovodInternalError: a rank is lost.
    """
    Call(Kind.BARRIER, process_set).wait([])
