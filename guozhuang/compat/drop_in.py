"""``guozhuang run --replace-ddp``: scripts that know PyTorch alone get this project's class and backend.

``_guozhuang_start`` calls the functions below in place of PyTorch's class and of ``init_process_group``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from guozhuang.compat.prepared import is_gone, is_one_of_several, say_once
from guozhuang.distributed import DistributedDataParallel
from guozhuang.sharding import is_dtensor
from guozhuang.world import backend_of_cpu_ranks

_has_wrapped = False


def at_first_step(optimizer: torch.optim.Optimizer) -> None:
    """Say that ranks may train apart, if a script steps an optimizer on several ranks and neither wraps nor divides a model."""
    if _has_wrapped or not is_one_of_several():
        return
    if not any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        say_once(
            "an optimizer steps, and the script has made no DistributedDataParallel: unless it exchanges by itself, each rank "
            "trains a model of its own. Fix: let it wrap the model on this device too, or prepare it by gz.prepare"
        )


def wrapper_for(asked: type) -> type:
    """Return this project's class where PyTorch's own is asked for, and any subclass of it as it is."""
    global _has_wrapped
    _has_wrapped = True
    if asked is not nn.parallel.DistributedDataParallel:
        return asked
    say_once("the script's DistributedDataParallel is Guozhuang's")
    return DistributedDataParallel


def init_process_group(theirs: Callable[..., None], *args: Any, **options: Any) -> None:
    """Make the default group as ``theirs`` does, with "shm" in the place of gloo where all ranks are on this node.

    A backend for CPUs that is no more is taken for gloo.
    """
    given = args[0] if args else options.get("backend")
    asked = "gloo" if is_gone(given) else given
    size, local_size = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    ours, why = "", "the ranks are on several nodes"
    if size == local_size and size.isdigit():
        ours, why = backend_of_cpu_ranks(["this node"] * int(size))
    backend = asked if ours in ("", dist.Backend.GLOO) else _with(ours, asked)
    if args:
        args = (backend, *args[1:])
    else:
        options["backend"] = backend
    if backend != given:
        said = why if asked == given else f"{given} is not installed; {why}"
        say_once(f"the script's group of backend {given or 'gloo'} is one of {backend}: {said}")
    elif _with("shm", asked) != asked:
        say_once(f"the script's group keeps its backend {asked or 'gloo'}: {why}")
    theirs(*args, **options)


def _with(ours: str, asked: Any) -> Any:
    """Return the name of a backend with ``ours`` in gloo's place; anything else as it is."""
    if asked is None:
        return None if torch.accelerator.is_available() else ours
    parts = [part.strip() for part in str(asked).lower().split(",")]
    replaced = [ours if part == dist.Backend.GLOO else "cpu:" + ours if part == "cpu:gloo" else part for part in parts]
    return asked if replaced == parts else ",".join(replaced)
