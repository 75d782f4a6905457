"""Choice of the device on which a rank computes, and of the backend of its process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, explain
from guozhuang.units import ranks_text
from guozhuang.world import torchrun
from guozhuang.world.identity import Identity

if TYPE_CHECKING:
    from guozhuang.net.meet import RankCard

# The backend of guozhuang.groups for ranks that share memory; `import guozhuang` registers the name.
SHARED_MEMORY = "shm"
# Used as the UUID of a device that has none of its own: all parts of a GPU (MIG) may report the UUID of the whole GPU.
UNKNOWN = "?"
#: Launchers that may give each process a device of its own, so that it sees no other device.
BIND_DEVICES = ("slurm", "openmpi", "hydra")


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of the first of some tensors, such as a model's parameters; the CPU if there is none."""
    return next((each.device for each in tensors), torch.device("cpu"))


def backend_of_cpu_ranks(hosts: Sequence[str], platform: str = sys.platform) -> tuple[str, str]:
    """Return the default backend for ranks that compute on CPUs, and the reason for it, for the log.

    Args:
        hosts: the host identity of every rank, equal for ranks of one node.
        platform: in the form of ``sys.platform``.
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
    launcher: str = "environment",
) -> tuple[str, torch.device]:
    """Return the backend and the device of this rank: as the user gave them, with defaults for those left open.

    Args:
        backend: "gloo", "nccl", another registered name, one per device type as in "cpu:gloo,cuda:nccl", or None:
            nccl where the device is CUDA, ``cpu_backend`` where it is the CPU.
        device: None: CUDA if there is a device and the backend allows it, else the CPU. "cuda": the one of ``local_rank``.
        local_rank: rank of this process on its node; or the index of its device, if that is known (``own_indices``).
        num_cuda: how many CUDA devices this process can see.
        cpu_backend: the default backend if the device is the CPU.
        is_bound: the launcher may have given this process devices of its own (Slurm and MPI can): if it sees exactly one,
            it takes that device, whatever its local rank.
        launcher: name of the launcher, for the remedy in an error's text.

    Returns:
        The backend in the form of ``torch.distributed.init_process_group``, and the device, with its index if it is CUDA.

    Raises:
        UsageError: an unknown name, a device that does not exist, or a backend that cannot serve the device.
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
        chosen = _with_index(chosen, 0 if is_bound and num_cuda == 1 else local_rank, num_cuda, launcher)
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


def uuids(device: torch.device) -> list[str]:
    """Return the UUIDs of the CUDA devices that this process may take: ``device`` if it has an index, else all it sees.

    Empty if ``device`` is not a CUDA device; otherwise starts CUDA in this process.
    """
    if device.type != "cuda":
        return []
    found = []
    for index in range(torch.cuda.device_count()) if device.index is None else [device.index]:
        properties = torch.cuda.get_device_properties(index)
        is_part = "MIG" in str(properties.name).split()
        found.append(UNKNOWN if is_part else str(getattr(properties, "uuid", "") or UNKNOWN))
    return found


def own_indices(hosts: Sequence[str], seen: Sequence[Sequence[str]]) -> list[int | None] | None:
    """Choose a device for every rank: in rank order on each node, the first device it sees that no earlier rank has taken.

    So ranks that see the same devices take them by local rank; ranks that have one or more devices of their own take the
    first of these; ranks of one CPU socket that see the devices of that socket divide them among themselves.

    Args:
        hosts: the host identity of every rank.
        seen: for every rank the UUIDs of its visible devices (``uuids``).

    Returns:
        For each rank the position in its list; None for a rank that sees no device, or only taken ones. None instead of
        the list if any UUID is unknown.
    """
    if any(UNKNOWN in each for each in seen):
        return None
    taken: set[tuple[str, str]] = set()
    found: list[int | None] = []
    for host, mine in zip(hosts, seen, strict=True):
        index = next((i for i, uuid in enumerate(mine) if (host, uuid) not in taken), None)
        if index is not None:
            taken.add((host, mine[index]))
        found.append(index)
    return found


def own_index(rank: int, local_rank: int, hosts: Sequence[str], seen: Sequence[Sequence[str]]) -> int | None:
    """Return the index of this rank's device among the devices it sees; None if the UUIDs do not determine it.

    If all ranks of the node see the same devices, the position is the launcher's ``local_rank``.
    """
    found = own_indices(hosts, seen)
    if len({tuple(each) for host, each in zip(hosts, seen, strict=True) if host == hosts[rank]}) == 1:
        return local_rank if local_rank < len(seen[rank]) and UNKNOWN not in seen[rank] else None
    return None if found is None else found[rank]


def check_own(hosts: Sequence[str], seen: Sequence[Sequence[str]], launcher: str) -> None:
    """Raise if two ranks would have to share a CUDA device, which NCCL does not allow. The result is equal on all ranks.

    Raises:
        UsageError: two ranks share a device; the text names the first rank without one, and the ranks that have its devices.
    """
    found = own_indices(hosts, seen)
    for rank, index in enumerate(found or ()):
        if index is not None or not seen[rank]:
            continue
        node = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        rivals = [other for other in node if other < rank and set(seen[other]) & set(seen[rank])]
        num = len({uuid for other in node for uuid in seen[other]})
        what = (
            f"rank {rank} has no CUDA device of its own: it sees {_devices(seen[rank])}, "
            f"which {ranks_text(rivals)} of the same node {'has' if len(rivals) == 1 else 'have'}; NCCL needs one for each rank"
        )
        raise UsageError(explain(what, fix=f"{_fix(launcher, num)}, or share them with the backend gloo"))


def _devices(found: Sequence[str]) -> str:
    return f"{found[0]} alone" if len(found) == 1 else f"{len(found)} devices ({', '.join(found[:8])})"


def _fix(launcher: str, num: int) -> str:
    """Return a remedy for errors: how this launcher gives each rank of a node with ``num`` devices one of its own."""
    at_most = f"start at most {num}"
    ways = {
        "slurm": f"ask for a GPU per task (srun --gpus-per-task=1), or {at_most} on a node (--ntasks-per-node={num})",
        "openmpi": f"{at_most} on a node (mpirun --map-by ppr:{num}:node)",
        "hydra": f"{at_most} on a node (mpiexec -ppn {num})",
        "torchrun": f"{at_most} on this node (--nproc-per-node={num}), or look at CUDA_VISIBLE_DEVICES",
    }
    return ways.get(launcher, f"{at_most} on this node, or look at CUDA_VISIBLE_DEVICES of each")


def devices_seen(backend: str | None, device: str | torch.device | None) -> str:
    """Return the UUIDs of the CUDA devices that this rank may take, joined by commas, for the roll call; "" for the CPU."""
    _, chosen = choose(backend, device, 0, num_cuda())
    is_named = device is not None and torch.device(device).index is not None
    return ",".join(uuids(chosen if is_named else torch.device(chosen.type)))


def choose_own(
    backend: str | None,
    device: str | torch.device | None,
    identity: Identity,
    hosts: Sequence[str],
    notes: Sequence[str],
    environ: Mapping[str, str],
    cpu_backend: str = dist.Backend.GLOO,
) -> tuple[str, torch.device]:
    """Return backend and device as ``choose`` does, with the device index that the UUIDs of all ranks (``notes``) determine.

    If these are not known the index is the local rank.
    """
    assert identity.local_rank is not None
    num, launcher, index = num_cuda(), identity.launcher, None
    wanted = choose(backend, device, 0, num, cpu_backend, launcher=launcher)
    if len(notes) == identity.size:
        seen = [note.split(",") if note else [] for note in notes]
        if device_to_bind(*wanted) is not None:
            check_own(hosts, seen, launcher)
        index = own_index(identity.rank, identity.local_rank, hosts, seen)
    if index is not None:
        return choose(backend, device, index, num, cpu_backend, launcher=launcher)
    is_bound = launcher in BIND_DEVICES or torchrun.has_virtual_local_rank(environ)
    return choose(backend, device, identity.local_rank, num, cpu_backend, is_bound, launcher)


def take(device: torch.device, rank: int, cards: Sequence[RankCard]) -> Callable[[], None]:
    """Make a CUDA device the current one; on the CPU, settle threads and cores. Return a function that undoes the latter.

    Args:
        device: the device of this rank.
        rank: this rank.
        cards: the cards of all ranks from the roll call.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type != "cpu":
        return lambda: None
    from guozhuang.world.threads.settle import settle  # imported only when needed

    return settle(rank, {r: card.cpus for r, card in enumerate(cards) if card.host == cards[rank].host and card.cpus})


def device_to_bind(backend: str, device: torch.device) -> torch.device | None:
    """Return the device that ``init_process_group`` is to bind the group to: a CUDA device that NCCL serves, else None."""
    for part in backend.lower().split(","):
        device_type, _, name = part.rpartition(":")
        if name.strip() == dist.Backend.NCCL and device_type.strip() in ("", "cuda") and device.type == "cuda":
            return device
    return None


def served_types(backend: str) -> set[str]:
    """Return the device types that a backend, or all parts of "type:name,type:name", serve; check that the backend exists.

    Raises:
        UsageError: a name is unknown, or this build of PyTorch lacks the backend.
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
    # Gloo serves CPU and CUDA; "gloo" alone selects the CPU, also on a machine with GPUs. "cpu:gloo,cuda:nccl" selects the GPU.
    if "cuda" in serves and num_cuda and (":" in backend or "cpu" not in serves):
        return "cuda"
    return "cpu" if "cpu" in serves else sorted(serves)[0]


def _with_index(device: torch.device, local_rank: int, num_cuda: int, launcher: str) -> torch.device:
    index = local_rank if device.index is None else device.index
    if num_cuda == 0:
        fix = 'give device="cpu", or look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and the build of PyTorch'
        raise UsageError(explain("no CUDA device is visible to this process", value=str(device), fix=fix))
    if index >= num_cuda:
        if device.index is None:
            what = f"local rank {local_rank} has no CUDA device: {num_cuda} visible to this process"
            fix = f'{_fix(launcher, num_cuda)}; or give device="cuda:0" if every rank was given a GPU of its own'
            raise UsageError(explain(what, fix=fix))
        what = f"there is no such CUDA device: {num_cuda} visible to this process"
        raise UsageError(explain(what, value=str(device), fix=f"choose an index below {num_cuda}"))
    return torch.device("cuda", index)


def num_cuda() -> int:
    """Return how many CUDA devices this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
