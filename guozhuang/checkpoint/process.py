"""What of a process a checkpoint holds: its generators of random numbers, and what decides which kernels compute."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from guozhuang import generators


def _device() -> Any:
    """Return the module of this process's accelerator, if it was used; None on the CPU."""
    if not torch.accelerator.is_available():
        return None
    module: Any = getattr(torch, torch.accelerator.current_accelerator(check_available=True).type, None)  # type: ignore[union-attr]
    return module if module is not None and getattr(module, "is_initialized", lambda: True)() else None


def states_of_generators() -> dict[str, Any]:
    """Return the states of the process's generators of random numbers, that of its accelerator among them."""
    found, device = generators.states(), _device()
    return found if device is None else {**found, "device": device.get_rng_state()}


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the generators of this process to the states that :func:`states_of_generators` returned."""
    generators.set_states(states)
    device = _device()
    if device is not None and "device" in states:
        device.set_rng_state(states["device"].clone())


def machine() -> dict[str, Any]:
    """Return what decides which kernels compute, and in which order they add."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "libraries": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
    }
    device = _device()
    if device is not None:
        found["device"] = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        found["device name"] = getattr(device, "get_device_name", lambda: "")()
    return found
