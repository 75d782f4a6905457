"""Which device a rank computes on, and which backend carries its collectives."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, explain

# The backend of guozhuang.groups for ranks that share memory; `import guozhuang` registers the name.
SHARED_MEMORY = "shm"


def backend_of_cpu_ranks(hosts: Sequence[str], platform: str = sys.platform) -> tuple[str, str]:
    """The default backend for ranks that compute on CPUs, and why it is that one, for the log.

    Args:
        hosts: the host identity of every rank, equal for ranks of one node.
        platform: as ``sys.platform`` has it.
    """
    size, num_nodes = len(hosts), len(set(hosts))
    if size == 1:
        return dist.Backend.GLOO, "a world of one rank exchanges nothing"
    if num_nodes > 1:
        return dist.Backend.GLOO, f"{size} ranks on {num_nodes} nodes; {SHARED_MEMORY!r} would share memory inside each"
    if platform != "linux":
        return dist.Backend.GLOO, f"the backend {SHARED_MEMORY!r} needs Linux"
    if not dist.is_backend_available(SHARED_MEMORY):
        return dist.Backend.GLOO, f"the backend {SHARED_MEMORY!r} is not registered in this process"
    return SHARED_MEMORY, f"{size} ranks on one node exchange through its memory"


def choose(
    backend: str | None,
    device: str | torch.device | None,
    local_rank: int,
    num_cuda: int,
    cpu_backend: str = "gloo",
    is_bound: bool = False,
) -> tuple[str, torch.device]:
    """Fill in what the user left open.

    Args:
        backend: "gloo", "nccl", another registered name, one per device type as in "cpu:gloo,cuda:nccl", or None:
            nccl where the device is CUDA, ``cpu_backend`` where it is the CPU.
        device: None: CUDA where there is any and the backend allows it, else the CPU. "cuda": the one of ``local_rank``.
        local_rank: this process among those of its node.
        num_cuda: how many CUDA devices this process can see.
        cpu_backend: the default where the device is the CPU.
        is_bound: the launcher may have given this process devices of its own (Slurm and MPI do): where it sees exactly one,
            that is the device, whatever its local rank.

    Returns:
        The backend as ``torch.distributed.init_process_group`` wants it, and the device, with its index if it is CUDA.

    Raises:
        UsageError: an unknown name, a device that is not there, or a backend that cannot serve the device.
    """
    serves = None if backend is None else served_types(backend)
    if device is None:
        chosen = torch.device(_default_type(backend, serves, num_cuda))
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            fix = 'give "cpu", "cuda", "cuda:1" or a torch.device'
            raise UsageError(explain("device is not known to PyTorch", value=device, fix=fix)) from None
    if chosen.type == "cuda":
        chosen = _with_index(chosen, 0 if is_bound and num_cuda == 1 else local_rank, num_cuda)
    if backend is None:
        defaults = {"cpu": cpu_backend, "cuda": "nccl"}
        if chosen.type not in defaults:
            fix = "give gz.init(backend=...) too"
            raise UsageError(explain("no backend is known for this type of device", value=chosen.type, fix=fix))
        backend = defaults[chosen.type]
        served_types(backend)
    elif serves is not None and chosen.type not in serves:
        fix = f"choose a device of type {' or '.join(sorted(serves))}, or another backend"
        raise UsageError(explain(f"backend {backend!r} cannot serve device {chosen}", fix=fix))
    return backend, chosen


def device_to_bind(backend: str, device: torch.device) -> torch.device | None:
    """Return the device that ``init_process_group`` is to bind the group to: a CUDA device that NCCL serves, else None."""
    for part in backend.lower().split(","):
        device_type, _, name = part.rpartition(":")
        if name.strip() == dist.Backend.NCCL and device_type.strip() in ("", "cuda") and device.type == "cuda":
            return device
    return None


def served_types(backend: str) -> set[str]:
    """The device types that a backend, or each part of "type:name,type:name", serves; checks that it is there.

    Raises:
        UsageError: a name that is unknown, or that this build of PyTorch lacks.
    """
    types: set[str] = set()
    for part in backend.split(","):
        device_type, _, name = part.rpartition(":")
        name = name.strip().lower()
        if name not in dist.Backend.backend_list or name == dist.Backend.UNDEFINED:
            known = ", ".join(
                n for n in dist.Backend.backend_list if n not in (dist.Backend.UNDEFINED, dist.Backend.FAKE)
            )
            raise UsageError(explain("backend is not known", value=backend, fix=f"choose one of {known}"))
        if not dist.is_backend_available(name):
            fix = "choose gloo, or install a build of PyTorch that has it"
            raise UsageError(explain(f"this build of PyTorch lacks the backend {name!r}", value=backend, fix=fix))
        types |= {device_type.strip()} if device_type else set(dist.Backend.backend_capability.get(name, ["cpu"]))
    return types


def _default_type(backend: str | None, serves: set[str] | None, num_cuda: int) -> str:
    if backend is None or serves is None:
        return "cuda" if num_cuda else "cpu"
    # Gloo serves both; who asks for it by name on a machine with GPUs means the CPU. "cpu:gloo,cuda:nccl" means the GPU.
    if "cuda" in serves and num_cuda and (":" in backend or "cpu" not in serves):
        return "cuda"
    return "cpu" if "cpu" in serves else sorted(serves)[0]


def _with_index(device: torch.device, local_rank: int, num_cuda: int) -> torch.device:
    index = local_rank if device.index is None else device.index
    if num_cuda == 0:
        fix = 'give device="cpu", or look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and the build of PyTorch'
        raise UsageError(explain("no CUDA device is visible to this process", value=str(device), fix=fix))
    if index >= num_cuda:
        if device.index is None:
            what = f"LOCAL_RANK={local_rank} has no CUDA device: {num_cuda} visible to this process"
            fix = (
                f"start at most {num_cuda} ranks on this node (--nproc-per-node={num_cuda}), look at "
                'CUDA_VISIBLE_DEVICES, or give device="cuda:0" if every rank was given a GPU of its own'
            )
            raise UsageError(explain(what, fix=fix))
        what = f"there is no such CUDA device: {num_cuda} visible to this process"
        raise UsageError(explain(what, value=str(device), fix=f"choose an index below {num_cuda}"))
    return torch.device("cuda", index)
