"""What of a process a checkpoint holds: its generators of random numbers, and what decides which kernels compute."""

from __future__ import annotations

import hashlib
import platform
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def _device() -> Any:
    """Return the module of this process's accelerator, if it was used; None on the CPU."""
    if not torch.accelerator.is_available():
        return None
    module: Any = getattr(torch, torch.accelerator.current_accelerator(check_available=True).type, None)  # type: ignore[union-attr]
    return module if module is not None and getattr(module, "is_initialized", lambda: True)() else None


def generators() -> dict[str, Any]:
    """Return the states of the process's generators of random numbers."""
    found = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    device = _device()
    return found if device is None else {**found, "device": device.get_rng_state()}


def check_generators(states: Mapping[str, Any]) -> None:
    """Raise unless :func:`set_generators` can set these states; new generators take them.

    Raises:
        ValueError, TypeError, RuntimeError: a state is not that of a generator.
    """
    torch.Generator().set_state(states["torch"].clone())
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the generators of this process to the states that :func:`generators` returned."""
    torch.set_rng_state(states["torch"].clone())
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
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
