"""Describes the machine of a comparison for the report."""

from __future__ import annotations

import platform
from importlib import metadata

import psutil
import torch

from guozhuang.lab.results import Machine
from guozhuang.world.machine import processor_name, usable_cores


def describe() -> Machine:
    """Return the hardware and software facts of this machine that the report shows."""
    return Machine(
        cpu=_cpu(),
        num_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        accelerators=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        guozhuang=_version(),
    )


def busy_share(watch_s: float = 0.5) -> float:
    """Measure for ``watch_s`` seconds which share of the cores is busy; return it as a number between 0 and 1."""
    return float(psutil.cpu_percent(watch_s)) / 100


def _cpu() -> str:
    return processor_name() or platform.processor() or platform.machine()


def _version() -> str:
    try:
        return metadata.version("guozhuang")
    except metadata.PackageNotFoundError:
        return "not installed (run from its sources)"
