"""Bagua's interface for PyTorch: ranks, communicators, collectives, and ``model.with_bagua``, which any module has with it."""

from . import algorithms, bucket, checkpoint, communication, contrib, data_parallel, env, moe, tensor, utils
from .communication import (
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from .communicators import add_to_groups
from .distributed import BaguaModule, add_to_modules
from .env import get_local_rank, get_local_size, get_rank, get_world_size
from .tensor import BaguaTensor, add_to_tensors

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "bucket",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "env",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "moe",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
    "tensor",
    "utils",
]

add_to_groups()
add_to_modules()
add_to_tensors()
