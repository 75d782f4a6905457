"""What this machine is: hardware and versions, and the cores and the memory that its control groups leave to this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from guozhuang.watch.processes import PROC, path_of

_GROUPS = "/sys/fs/cgroup"
_OWN_GROUPS = path_of("cgroup")
_MEMORY = f"{PROC}/meminfo"
_NOT_TOLD = 1 << 62
_DEVICES = "/sys/devices/system"


class Core(NamedTuple):
    """A core: its NUMA node, its processor package, and the first of the CPUs (hardware threads) that it consists of."""

    node: int
    package: int
    first: int


@dataclass(frozen=True)
class Machine:
    """A machine and the versions on it, as reports show them and as what was measured on it names them.

    Attributes:
        cpu: the model of the processor.
        num_cores: the cores that a process can keep busy.
        memory_bytes: its main memory.
        accelerators: the models of its CUDA devices.
        system: name and release of the operating system.
        python: the version, and so for the next ones.
    """

    cpu: str
    num_cores: int
    memory_bytes: int
    accelerators: tuple[str, ...]
    system: str
    python: str
    torch: str
    guozhuang: str

    @property
    def conditions(self) -> dict[str, str]:
        """What must be the same for something that was measured on a machine to hold on another one, by its name."""
        same = {name: str(value) for name, value in asdict(self).items() if name != "memory_bytes"}
        return same | {"accelerators": ", ".join(self.accelerators) or "none"}


def describe() -> Machine:
    """Return the hardware and the versions of this machine."""
    try:
        own = metadata.version("guozhuang")
    except metadata.PackageNotFoundError:
        own = "not installed (run from its sources)"
    return Machine(
        cpu=processor_name(),
        num_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        accelerators=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        guozhuang=own,
    )


def own_cpus(pid: int = 0) -> list[int]:
    """Return the CPUs (hardware threads) on which the kernel may run a process; 0: this one.

    Raises:
        OSError: there is no such process.
    """
    return sorted(os.sched_getaffinity(pid) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def cores_of(cpus: Sequence[int], root: str = _DEVICES) -> dict[int, Core]:
    """Return the core of each of some CPUs; where the system does not tell, each is a core of its own on node 0.

    Args:
        cpus: their numbers.
        root: the folder in which the kernel shows processors and NUMA nodes.
    """
    node_of: dict[int, int] = {}
    for folder in sorted(Path(root, "node").glob("node[0-9]*")):
        node_of |= dict.fromkeys(_numbers(_read(folder / "cpulist")), int(folder.name[4:]))
    found = {}
    for cpu in cpus:
        folder = Path(root, f"cpu/cpu{cpu}/topology")
        package = _read(folder / "physical_package_id").strip()
        first = min(_numbers(_read(folder / "thread_siblings_list")), default=cpu)
        found[cpu] = Core(node_of.get(cpu, 0), int(package) if package.isdecimal() else 0, first)
    return found


def num_cores() -> int:
    """Return the number of cores on which the kernel may run this process; a core counts once, whatever its threads."""
    return len(set(cores_of(own_cpus()).values()))


def quota_cores(root: str = _GROUPS, own: str = _OWN_GROUPS) -> float | None:
    """Return the processor time that the control groups of this process and their parents allow, in cores; None: no limit.

    In a container the visible root is the container's own group, which holds its limit.

    Args:
        root: the folder where control groups of version 2 are mounted, and below it the controllers of version 1.
        own: the file that names the control groups of this process.
    """
    found = [quota for folder in _folders(Path(root), Path(own), "cpu") if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def usable_cores() -> int:
    """Return how many whole cores this process can keep busy; at least 1."""
    quota = quota_cores()
    return num_cores() if quota is None else max(1, min(num_cores(), int(quota)))


def available_bytes(root: str = _GROUPS, own: str = _OWN_GROUPS, memory: str = _MEMORY) -> int:
    """Return the bytes of memory that machine and control groups still have for this process; 2**62 if nothing is known.

    Args:
        root: see ``quota_cores``.
        own: see ``quota_cores``.
        memory: the kernel's file with the memory of the machine.
    """
    found = [limit - used for limit, used in _memory_limits(root, own)]
    for line in _read(Path(memory)).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    return min(found, default=_NOT_TOLD)


def memory_limit_bytes() -> int | None:
    """Return the memory limit of this process's control groups, in bytes; None: no limit."""
    return min((limit for limit, _ in _memory_limits(_GROUPS, _OWN_GROUPS)), default=None)


def overcommits() -> bool:
    """Return whether the kernel may promise more memory than it has; if not, the first write to a page may end in SIGBUS."""
    return _read(Path(PROC, "sys/vm/overcommit_memory")).strip() != "2"


def processor_name() -> str:
    """Return the model of the processor; its architecture if the system does not report a model."""
    lines = _read(Path(PROC, "cpuinfo")).splitlines()
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def nvidia_driver() -> str:
    """Return the version of NVIDIA's kernel driver; "" without a driver, "?" if its file cannot be parsed."""
    words = (_read(Path(PROC, "driver/nvidia/version")).splitlines() or [""])[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "?") if words else ""


def _folders(root: Path, own: Path, wanted: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups with the controller ``wanted``, and of all their parents."""
    yield from (root, root / wanted)
    for line in _read(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and wanted not in controllers.split(","):
            continue
        folder = root / wanted if controllers else root
        for name in Path(path).parts[1:]:
            folder /= name
            yield folder


def _quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota.isdecimal() and period.isdecimal() and int(period):
        return int(quota) / int(period)
    return None


def _memory_limits(root: str, own: str) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for each control group that has a memory limit."""
    found = (_memory_limit(folder) for folder in _folders(Path(root), Path(own), "memory"))
    return [each for each in found if each is not None]


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    """Return (limit, used without cached files) of one control group in bytes; None: no limit."""
    for limit_file, used_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        # Version 1 writes "no limit" as a huge number.
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NOT_TOLD:
            fields = (line.split() for line in _read(folder / "memory.stat").splitlines())
            return int(limit), int(used) - sum(int(words[1]) for words in fields if words[:1] == [cached])
    return None


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list of the kernel, such as ``0-3,8``; [] for a text of another form."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return []
        found += range(int(first), int(last or first) + 1)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
