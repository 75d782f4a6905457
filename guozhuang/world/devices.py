"""Which device a rank computes on, and which backend carries its collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, explain


def choose(
    backend: str | None, device: str | torch.device | None, local_rank: int, num_cuda: int
) -> tuple[str, torch.device]:
    """Fill in what the user left open.

    Args:
        backend: "gloo", "nccl", another registered name, one per device type as in "cpu:gloo,cuda:nccl", or None:
            nccl where the device is CUDA, gloo where it is the CPU.
        device: None: CUDA where there is any and the backend allows it, else the CPU. "cuda": the one of ``local_rank``.
        local_rank: this process among those of its node.
        num_cuda: how many CUDA devices this process can see.

    Returns:
        The backend as ``torch.distributed.init_process_group`` wants it, and the device, with its index if it is CUDA.

    Raises:
        UsageError: an unknown name, a device that is not there, or a backend that cannot serve the device.
    """
    serves = None if backend is None else _served_types(backend)
    if device is None:
        chosen = torch.device(_default_type(backend, serves, num_cuda))
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            fix = 'give "cpu", "cuda", "cuda:1" or a torch.device'
            raise UsageError(explain("device is not known to PyTorch", value=device, fix=fix)) from None
    if chosen.type == "cuda":
        chosen = _with_index(chosen, local_rank, num_cuda)
    if backend is None:
        defaults = {"cpu": "gloo", "cuda": "nccl"}
        if chosen.type not in defaults:
            fix = "give gz.init(backend=...) too"
            raise UsageError(explain("no backend is known for this type of device", value=chosen.type, fix=fix))
        backend = defaults[chosen.type]
        _served_types(backend)
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


def _served_types(backend: str) -> set[str]:
    """The device types that a backend, or each part of "type:name,type:name", serves; checks that it is there."""
    types: set[str] = set()
    for part in backend.split(","):
        device_type, _, name = part.rpartition(":")
        name = name.strip().lower()
        if name not in dist.Backend.backend_list or name == dist.Backend.UNDEFINED:
            known = ", ".join(n for n in dist.Backend.backend_list if n != dist.Backend.UNDEFINED)
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
