"""Collects the facts about one rank from its own system, without other ranks: host, versions, network, resources."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from guozhuang.check.results import SOURCE, Facts, Network, NetworkInterface, Resources
from guozhuang.errors import UsageError, WorldError
from guozhuang.groups.shared_memory import engine
from guozhuang.net.client import OverdueError, attempt
from guozhuang.net.interfaces import addresses, look_up, towards
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.watch.processes import node_identity
from guozhuang.world import machine, requested_backend, requested_gloo_interface, requested_nccl_interface
from guozhuang.world.devices import BIND_DEVICES, SHARED_MEMORY, choose, num_cuda
from guozhuang.world.identity import Identity
from guozhuang.world.threads import settle
from guozhuang.world.threads.choice import CoresOfRank
from guozhuang.world.threads.choice import choose as choose_threads

_RESOLVE_S = 3.0  # seconds after which the look-up of a name is abandoned; if a name server is down, it takes 30 s
_PACKAGES = ("torch", "guozhuang", "numpy")


def collect(identity: Identity) -> Facts:
    """Return the facts about this process. Takes up to a few seconds if names do not resolve; never longer."""
    device, device_name = _device(identity, num_cuda())
    return Facts(
        rank=identity.rank,
        host=socket.gethostname(),
        node=node_identity(),
        pid=os.getpid(),
        launcher=identity.launcher,
        device=device,
        device_name=device_name,
        num_devices=num_cuda(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=versions(),
        c_engine=engine.native_built(),
        shm_known=platform.system() == "Linux" and dist.is_backend_available(SHARED_MEMORY),
        network=network(meeting_host(identity)),
        resources=resources(),
    )


def meeting_host(identity: Identity) -> str:
    """Return the name or address at which ranks meet, if the launcher gives one; else ""."""
    point = identity.meeting_point
    if point is None:
        return ""
    if isinstance(point, MeetingPoint):
        return point.host
    return "localhost" if point.is_one_node else next(iter(point.hosts), "")


def versions() -> dict[str, str]:
    """Return the versions that must agree on all hosts, with a digest of our source: a checkout may be stale unnoticed."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["torch"] = torch.__version__
    found[SOURCE] = _source_digest()
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.version.hip:
        found["ROCm"] = torch.version.hip
    if torch.cuda.is_available() and dist.is_nccl_available():
        with contextlib.suppress(RuntimeError, ValueError):
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if driver := machine.nvidia_driver():
        found["NVIDIA driver"] = driver
    return found


def network(meeting_host: str) -> Network:
    """Return the addresses and interfaces of this host, and the interface that leads to the host where the ranks meet."""
    interfaces = _interfaces()
    met, meeting_error = _resolve(meeting_host) if meeting_host else ((), "")
    named, name_error = _resolve(socket.gethostname())
    routed = next(filter(None, map(_interface_to, met)), None)
    requested = requested_gloo_interface()
    # Gloo takes a list of interfaces and uses them in turn; the first one carries the first connections.
    in_use = requested.split(",")[0].strip() if requested else routed
    found = Network(
        meeting_host=meeting_host,
        meeting_addresses=met,
        meeting_error=meeting_error,
        name_addresses=named,
        name_error=name_error,
        requested=requested,
        routed=routed,
        in_use=in_use,
        address="",
        interfaces=interfaces,
        nccl_requested=requested_nccl_interface(),
    )
    return replace(found, address=address_on(found, in_use))


def address_on(here: Network, name: str | None) -> str:
    """Return an address of an interface, preferably of the same family as the meeting host's; "" if it has none."""
    found = here.interface(name)
    usable = [each for each in found.addresses if not each.startswith("fe80")] if found else []
    wants_six = bool(here.meeting_addresses) and ":" in here.meeting_addresses[0]
    return min(usable, key=lambda each: (":" in each) != wants_six, default="")


def resources() -> Resources:
    """Return the cores, memory and limits that this process has on its node, and how much of the memory is free."""
    memory = psutil.virtual_memory()
    shm = shm_free = None
    with contextlib.suppress(OSError):
        there = os.statvfs("/dev/shm")
        shm, shm_free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    return Resources(
        cores=tuple(sorted({core.first for core in machine.cores_of(settle.available_cpus()).values()})),
        quota_cores=machine.quota_cores(),
        num_threads=torch.get_num_threads(),
        memory_bytes=min(int(memory.total), machine.memory_limit_bytes() or int(memory.total)),
        available_bytes=max(min(int(memory.available), machine.available_bytes()), 0),
        swap_used_bytes=_swap_used(),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        num_open_files=_limit(resource.RLIMIT_NOFILE),
        rdma_devices=tuple(sorted(_names("/sys/class/infiniband"))),
        threads_by=settle.chosen_by(),
        step_cpus=settle.cpus_of_step(),
    )


def with_threads(ranks: Sequence[Facts]) -> tuple[Facts, ...]:
    """Return the facts of the ranks with the numbers of threads that ``gz.init`` chooses, on CPUs, where no user did."""
    found = []
    for each in ranks:
        here = each.resources
        if each.device == "cpu" and not here.threads_by:
            cores_of = {other.rank: other.resources.cores for other in ranks if other.node == each.node}
            cores = {first: machine.Core(0, 0, first) for cores in cores_of.values() for first in cores}
            known = CoresOfRank(each.rank, cores_of, cores, here.num_threads, "", here.quota_cores, here.step_cpus)
            here = replace(here, num_threads=choose_threads(known).num_threads)
        found.append(replace(each, resources=here))
    return tuple(found)


def _device(identity: Identity, num_devices: int) -> tuple[str, str]:
    """Return the device that gz.init would choose, and its model. The local rank may be unknown before ranks have met."""
    if not num_devices:
        return "cpu", machine.processor_name()
    local_rank = identity.local_rank or 0
    is_bound = identity.launcher in BIND_DEVICES
    try:
        _, chosen = choose(requested_backend(), None, local_rank, num_devices, is_bound=is_bound)
    except UsageError:
        if is_bound:  # gz.init then takes the first device that no lower rank of this node has
            return f"one of {num_devices} CUDA devices of its own", torch.cuda.get_device_name(0)
        return f"cuda:{local_rank} (not there)", ""
    return str(chosen), torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else ""


def _source_digest() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        with contextlib.suppress(OSError):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _interfaces() -> tuple[NetworkInterface, ...]:
    states = psutil.net_if_stats()
    found = []
    for name, known in addresses().items():
        state = states.get(name)
        found.append(
            NetworkInterface(
                name=name,
                addresses=tuple(known),
                is_up=bool(state and state.isup),
                mtu_bytes=state.mtu if state and state.mtu else None,
                speed_mbit_per_s=state.speed if state and 0 < state.speed < 65535 * 100 else None,
                is_card=os.path.exists(f"/sys/class/net/{name}/device"),
            )
        )
    return tuple(found)


def _resolve(host: str) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a host, IPv4 first, or the reason why there are none."""
    nothing: tuple[str, ...] = ()

    def ask() -> tuple[tuple[str, ...], str]:
        try:
            return tuple(look_up(host)), ""
        except OSError as error:
            return nothing, str(error.strerror or error)

    try:  # the system's resolver has no time limit of its own, so it runs in a thread
        return attempt(_RESOLVE_S, ask)
    except OverdueError:
        return nothing, f"no answer from the name service within {_RESOLVE_S:g} s"


def _interface_to(address: str) -> str | None:
    """Return the interface through which the system would send to an address. Sends nothing."""
    with contextlib.suppress(WorldError):
        return towards(address).name
    return None


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _swap_used() -> int | None:
    with contextlib.suppress(OSError, RuntimeError):
        return int(psutil.swap_memory().used)
    return None


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []
