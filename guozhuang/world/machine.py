"""What this machine, and the control groups around this process, let a process use: cores and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from guozhuang.watch.processes import PROC, path_of

_GROUPS = "/sys/fs/cgroup"
_OWN_GROUPS = path_of("cgroup")
_MEMORY = f"{PROC}/meminfo"
_NOT_TOLD = 1 << 62


def num_cores() -> int:
    """The cores that the kernel may run this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores(root: str = _GROUPS, own: str = _OWN_GROUPS) -> float | None:
    """Processor time that the control group allows, and those around it, in cores; None without a limit.

    In a container the control groups are those of the container, and its limit stands at their root.

    Args:
        root: where the control groups of version 2 are mounted, and the controllers of version 1 below it.
        own: the file that names the groups of this process.
    """
    found = [quota for folder in _folders(Path(root), Path(own), "cpu") if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def usable_cores() -> int:
    """Whole cores that this process can keep busy; at least 1."""
    quota = quota_cores()
    return num_cores() if quota is None else max(1, min(num_cores(), int(quota)))


def available_bytes(root: str = _GROUPS, own: str = _OWN_GROUPS, memory: str = _MEMORY) -> int:
    """Memory that the machine, and each control group around this process, can still give; very much where nothing is told.

    Args:
        root: see ``quota_cores``.
        own: see ``quota_cores``.
        memory: the kernel's file on the memory of the machine.
    """
    found = [limit - used for limit, used in _memory_limits(root, own)]
    for line in _read(Path(memory)).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    return min(found, default=_NOT_TOLD)


def memory_limit_bytes(root: str = _GROUPS, own: str = _OWN_GROUPS) -> int | None:
    """The memory that the control groups around this process allow; None without a limit. Arguments as ``quota_cores``."""
    return min((limit for limit, _ in _memory_limits(root, own)), default=None)


def overcommits() -> bool:
    """Whether the kernel gives more memory than it could back; where not, an uncommitted page may end a process (SIGBUS)."""
    return _read(Path(PROC, "sys/vm/overcommit_memory")).strip() != "2"


def processor_name() -> str:
    """The model of the processor; "" where the system does not tell."""
    lines = _read(Path(PROC, "cpuinfo")).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def nvidia_driver() -> str:
    """The version of NVIDIA's kernel driver; "" without one, "?" if it cannot be read out."""
    words = (_read(Path(PROC, "driver/nvidia/version")).splitlines() or [""])[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "?") if words else ""


def _folders(root: Path, own: Path, wanted: str) -> Iterator[Path]:
    """The folders of this process's control groups with this controller, with those of all groups around them."""
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
    """The limit of each control group that has one, and the memory used of it."""
    found = (_memory_limit(folder) for folder in _folders(Path(root), Path(own), "memory"))
    return [each for each in found if each is not None]


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    """The limit of one control group and the memory used of it; None without a limit. Cached files can be given back."""
    for limit_file, used_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        if (
            limit.isdecimal() and used.isdecimal() and int(limit) < _NOT_TOLD
        ):  # version 1 writes "no limit" as a huge one
            fields = (line.split() for line in _read(folder / "memory.stat").splitlines())
            return int(limit), int(used) - sum(int(words[1]) for words in fields if words[:1] == [cached])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
