"""The variables DMLC_* and BYTEPS_*: what ``bpslaunch`` reads of them, which are refused, and which mean nothing here.

The place of a process that was started without ``bpslaunch`` is read from them in ``guozhuang/world/dmlc.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain

ROLES = ("worker", "server", "scheduler")
# ``bpslaunch`` sets it in its ranks: it has said already what means nothing.
SAID = "GUOZHUANG_BPSLAUNCH"
# Variables by which a launcher tells one process its place.
OF_A_PROCESS = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "BYTEPS_GLOBAL_RANK", SAID)

_RDMA = ("DMLC_ENABLE_RDMA", "BYTEPS_ENABLE_IPC", "BYTEPS_RDMA_")
# Beginnings of names: of the transport and its threads, of NUMA and PCIe, of servers, and of what the core logs.
_NOTHING_HERE = (
    *("BYTEPS_PCIE_SWITCH_SIZE", "BYTEPS_NCCL_NUM_RINGS", "BYTEPS_NCCL_GROUP_SIZE", "BYTEPS_REDUCE_ROOTS"),
    *("BYTEPS_KEY_HASH_FN", "BYTEPS_BUILT_IN_HASH_COEF", "BYTEPS_ENABLE_MIXED_MODE", "BYTEPS_MIXED_MODE_BOUND"),
    *("BYTEPS_THREADPOOL_SIZE", "BYTEPS_OMP_THREAD_PER_GPU", "BYTEPS_SERVER_", "BYTEPS_MULTITHREADED_CPU"),
    *("BYTEPS_NUMA_", "BYTEPS_VISIBLE_CPU_CORES", "BYTEPS_CPU_BLACKLIST", "DMLC_NODE_HOST"),
    *("BYTEPS_PARTITION_BYTES", "BYTEPS_MIN_COMPRESS_BYTES", "BYTEPS_SCHEDULING_CREDIT", "BYTEPS_SOCKET_PATH"),
    *("BYTEPS_TRACE_", "BYTEPS_TELEMETRY_ON", "BYTEPS_LOG_", "BYTEPS_DEBUG_SAMPLE_TENSOR"),
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


@dataclass(frozen=True)
class LaunchedRole:
    """What one ``bpslaunch`` is to start, by its variables.

    Attributes:
        role: worker, server or scheduler.
        num_workers, num_servers: of the run. A worker is a machine, not a process. Without the second there are no servers.
        worker: the number of this worker, from 0; 0 for other roles.
        num_ranks: how many processes this worker starts.
        host, port: where the scheduler keeps the store; "" and 0 where one worker needs neither.
        interface: the network interface that DMLC_INTERFACE names; None without it.
        meets: whether several ``bpslaunch`` meet at the scheduler: more than one worker, or BYTEPS_FORCE_DISTRIBUTED.
    """

    role: str
    num_workers: int
    num_servers: int
    worker: int
    num_ranks: int
    host: str
    port: int
    interface: str | None
    meets: bool


def role_of(environ: Mapping[str, str]) -> LaunchedRole:
    """Read what ``bpslaunch`` is to start.

    Raises:
        UsageError: a variable is missing or cannot be; the text names it.
    """
    role = environ.get("DMLC_ROLE", "").strip()
    if role not in ROLES:
        what = "environment variable DMLC_ROLE says what bpslaunch starts"
        raise UsageError(explain(what, value=role or "not set", fix=f"export one of {', '.join(ROLES)}"))
    num_workers = _number(environ, "DMLC_NUM_WORKER", 1, role)
    worker = _number(environ, "DMLC_WORKER_ID", 0, role) if role == "worker" else 0
    if worker >= num_workers:
        what = f"DMLC_WORKER_ID counts the {num_workers} workers of DMLC_NUM_WORKER from 0"
        raise UsageError(explain(what, value=worker, fix=f"export 0 to {num_workers - 1}, another one for each worker"))
    num_ranks = _num_ranks(environ)
    given = environ.get("BYTEPS_GLOBAL_RANK", "").strip()
    if role == "worker" and given and given != str(worker * num_ranks):
        what = f"BYTEPS_GLOBAL_RANK says another rank than DMLC_WORKER_ID={worker} with {num_ranks} processes a worker"
        raise UsageError(explain(what, value=given, fix="leave it out: bpslaunch numbers the ranks by DMLC_WORKER_ID"))
    is_forced = environ.get("BYTEPS_FORCE_DISTRIBUTED", "").strip() not in ("", "0")
    found = LaunchedRole(role, num_workers, 0, worker, num_ranks, "", 0, None, meets=num_workers > 1 or is_forced)
    if not found.meets:
        return found
    host = environ.get("DMLC_PS_ROOT_URI", "").strip()
    if not host:
        raise _is_missing("DMLC_PS_ROOT_URI", role)
    return LaunchedRole(
        role,
        num_workers,
        _number(environ, "DMLC_NUM_SERVER", 0, role),
        worker,
        num_ranks,
        host,
        _number(environ, "DMLC_PS_ROOT_PORT", 1, role),
        environ.get("DMLC_INTERFACE", "").strip() or None,
        meets=True,
    )


def _num_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of devices that NVIDIA_VISIBLE_DEVICES names: 1 if it names none, those of PyTorch for "all"."""
    text = environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if text == "all":
        import torch

        return max(1, torch.cuda.device_count())
    return 1 if text in ("", "none", "void") else len([each for each in text.split(",") if each.strip()])


def _is_missing(name: str, role: str) -> UsageError:
    fix = "export it: the same on all machines, but for DMLC_ROLE and DMLC_WORKER_ID"
    return UsageError(explain(f"environment variable {name} is not set, which a {role} needs", fix=fix))


def _number(environ: Mapping[str, str], name: str, least: int, role: str) -> int:
    text = environ.get(name, "").strip()
    if not text:
        raise _is_missing(name, role)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        what = f"environment variable {name} must be a whole number of at least {least}"
        raise UsageError(explain(what, value=text, fix="export the same number on all machines"))
    return int(text)
