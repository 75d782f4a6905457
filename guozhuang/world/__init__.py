"""The world of this process: its rank, the number of ranks, its node and device, as its environment gives them.

Read in this order: ``identity`` (values from a launcher), ``torchrun``, ``slurm``, ``mpi`` (launchers), ``discovery`` (the
list of launchers), ``guozhuang.net.meet`` (how ranks find each other), ``session`` (``init`` and ``shutdown``).
"""

# This module is imported first, because it raises if PyTorch is too old or was built without torch.distributed.
from guozhuang.world import versions

# isort: split
from guozhuang.world.devices import backend_of_cpu_ranks
from guozhuang.world.identity import World
from guozhuang.world.layout import Layout
from guozhuang.world.requests import (
    requested_attention,
    requested_audit,
    requested_backend,
    requested_bucket_cap_mb,
    requested_checkpoint,
    requested_gloo_interface,
    requested_groups,
    requested_hang_timeout,
    requested_layout,
    requested_microbatches,
    requested_nccl_interface,
    requested_proof,
    requested_schedule,
    requested_slow_rank,
    requested_stop_on_nan,
    requested_strategy,
    requested_timeline,
)
from guozhuang.world.session import FAKE, before_leaving, current, enter_made, init, lay_out, shutdown

__all__ = [
    "FAKE",
    "Layout",
    "World",
    "backend_of_cpu_ranks",
    "before_leaving",
    "current",
    "enter_made",
    "init",
    "lay_out",
    "requested_attention",
    "requested_audit",
    "requested_backend",
    "requested_bucket_cap_mb",
    "requested_checkpoint",
    "requested_gloo_interface",
    "requested_groups",
    "requested_hang_timeout",
    "requested_layout",
    "requested_microbatches",
    "requested_nccl_interface",
    "requested_proof",
    "requested_schedule",
    "requested_slow_rank",
    "requested_stop_on_nan",
    "requested_strategy",
    "requested_timeline",
    "shutdown",
    "versions",
]
