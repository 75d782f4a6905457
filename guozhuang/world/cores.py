"""How many cores this process may use: those that the kernel gives it, and how much of them its control group allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def num_cores() -> int:
    """The cores that the kernel may run this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float | None:
    """Processor time that the control group allows, and those around it, in cores; None without a limit.

    In a container the control groups are those of the container, and its limit stands at their root.

    Args:
        root: where the control groups of version 2 are mounted, and the controllers of version 1 below it.
        own: the file that names the groups of this process.
    """
    found = [quota for folder in _folders(Path(root), _read(Path(own))) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def usable_cores() -> int:
    """Whole cores that this process can keep busy; at least 1."""
    quota = quota_cores()
    return num_cores() if quota is None else max(1, min(num_cores(), int(quota)))


def _folders(root: Path, own: str) -> Iterator[Path]:
    """The folders of this process's control groups that speak of processors, with those of all groups around them."""
    yield from (root, root / "cpu")
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "cpu" if controllers else root
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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
