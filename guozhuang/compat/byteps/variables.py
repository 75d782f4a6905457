"""The variables DMLC_* and BYTEPS_*: which are refused, and which mean nothing here. The launcher reads the others."""

from __future__ import annotations

from collections.abc import Mapping

from guozhuang.errors import UsageError, explain

_RDMA = ("DMLC_ENABLE_RDMA", "BYTEPS_ENABLE_IPC", "BYTEPS_RDMA_")
# Beginnings of names: of the transport and its threads, of NUMA and PCIe, of servers, and of what the core logs.
_NOTHING_HERE = (
    *("BYTEPS_PCIE_SWITCH_SIZE", "BYTEPS_NCCL_NUM_RINGS", "BYTEPS_NCCL_GROUP_SIZE", "BYTEPS_REDUCE_ROOTS"),
    *("BYTEPS_KEY_HASH_FN", "BYTEPS_BUILT_IN_HASH_COEF", "BYTEPS_ENABLE_MIXED_MODE", "BYTEPS_MIXED_MODE_BOUND"),
    *("BYTEPS_THREADPOOL_SIZE", "BYTEPS_OMP_THREAD_PER_GPU", "BYTEPS_SERVER_", "BYTEPS_MULTITHREADED_CPU"),
    *("BYTEPS_NUMA_", "BYTEPS_VISIBLE_CPU_CORES", "BYTEPS_CPU_BLACKLIST", "DMLC_NODE_HOST"),
    *("BYTEPS_PARTITION_BYTES", "BYTEPS_MIN_COMPRESS_BYTES", "BYTEPS_SCHEDULING_CREDIT", "BYTEPS_SOCKET_PATH"),
    *("BYTEPS_TRACE_", "BYTEPS_LOG_", "BYTEPS_DEBUG_SAMPLE_TENSOR"),
    *("BYTEPS_ZMQ_", "PS_KEY_LOG", "PS_VERBOSE", "UCX_HANDLE_ERRORS"),
)


def without_meaning(environ: Mapping[str, str]) -> list[str]:
    """Return sentences about variables that are set and have no effect; none about those that hold 0 or nothing.

    Raises:
        UsageError: BYTEPS_ENABLE_GDB asks for what is refused.
    """
    asked = sorted(name for name, value in environ.items() if value.strip() not in ("", "0"))
    if "BYTEPS_ENABLE_GDB" in asked:
        what = "start the script under gdb yourself; the launcher shows tracebacks and stacks"
        raise UsageError(explain(what, value="BYTEPS_ENABLE_GDB", fix="unset it"))
    found = []
    if rdma := [name for name in asked if name.startswith(_RDMA)]:
        what = "bytes travel by gloo, shared memory or NCCL; RDMA is NCCL's own choice (NCCL_IB_DISABLE)"
        found.append(f"{', '.join(rdma)}: {what}")
    if nothing := [name for name in asked if name.startswith(_NOTHING_HERE)]:
        found.append(f"these variables are set, and mean nothing to Guozhuang (docs/byteps.md): {', '.join(nothing)}")
    return found
