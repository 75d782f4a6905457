"""``save_checkpoint`` and ``load_checkpoint`` in the files of Bagua; every expert of a ``MoE`` layer has a file of its own.

A folder ``iter_0001000`` holds ``mp_rank_00_model_states.pt`` (iteration, model, optimizer, lr_scheduler); with experts also
``expert_<number>_mp_rank_00_model_states.pt`` and each rank's ``expert_parallel_rank_<rank>_mp_rank_00_optim_states.pt``. The
file ``latest_checkpointed_iteration.txt`` beside the folders, which is written last, names the one to load.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from guozhuang.errors import UsageError, explain

from .communicators import _get_default_group, place

_log = logging.getLogger("guozhuang")
_TRACKER = "latest_checkpointed_iteration.txt"
_MODEL = "mp_rank_00_model_states.pt"
_STEPS = "expert_parallel_rank_{}_mp_rank_00_optim_states.pt"
_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?bagua_moe\.experts\.bagua_experts)\.(?P<number>\d+)\.(?P<rest>.+)")


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Save a model and what trains it. Every rank must call it, and may go on when all files are there.

    Each file appears complete or not at all, and a checkpoint counts once all its files do.

    Args:
        iteration: the number of the step, at least 0.
        checkpoints_path: the folder of the checkpoints, seen by all ranks; it is made if it is missing.
        model: the model; without experts it is rank 0's that is saved.
        optimizer: its optimizer; None: none is saved.
        lr_scheduler: the schedule of its learning rate; None: none is saved.

    Raises:
        UsageError: ``iteration`` is no such number.
        RuntimeError: ``init_process_group`` was not called; nothing is written then.
    """
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        what, fix = "iteration is a whole number, at least 0", "give the number of steps made"
        raise UsageError(explain(what, value=iteration, rank=place()[0], fix=fix))
    everyone = _get_default_group().torch_group  # serves also when its communicator was aborted
    top = Path(checkpoints_path)
    folder = top / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    shared, experts = _divided(model)
    steps = None if optimizer is None else optimizer.state_dict()
    for number, tensors in experts.items():
        _write(folder / f"expert_{number}_{_MODEL}", tensors)
    if experts:
        _write(folder / _STEPS.format(place()[0]), {"optimizer": steps})
    if place()[0] == 0:
        whole = {"iteration": iteration, "model": shared, "optimizer": None if experts else steps}
        whole["lr_scheduler"] = None if lr_scheduler is None else lr_scheduler.state_dict()
        _write(folder / _MODEL, whole)
    dist.barrier(group=everyone)
    if place()[0] == 0:
        _put(top / _TRACKER, lambda path: path.write_text(str(iteration)))
    dist.barrier(group=everyone)


def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Load what :meth:`save_checkpoint` saved last, and return its iteration. Every rank must call it.

    Args:
        checkpoints_path: the folder of the checkpoints. Without one in it nothing is loaded, a warning says so, and 0 is
            returned.
        model: a model like the saved one; experts may be on other ranks than they were.
        optimizer: gets the saved state; None: it is not loaded.
        lr_scheduler: gets the saved state; None: it is not loaded.
        strict: whether the names in the file and those of the model must be the same.

    Raises:
        UsageError: a file is missing or names no iteration; the checkpoint holds no optimizer or scheduler, and one was given.
        RuntimeError: the names or shapes of ``model`` are others.
    """
    top = Path(checkpoints_path)
    tracker = top / _TRACKER
    if not tracker.exists():
        what = f"there is no {_TRACKER}, so nothing is loaded"
        _log.warning("%s", explain(what, value=str(top), rank=place()[0], fix="give the folder of the checkpoints"))
        return 0
    word = tracker.read_text().strip()
    if word != "release" and not (word.isascii() and word.isdigit()):
        fix = "write the number of a step into it, or `release`"
        raise UsageError(explain(f"{tracker} names no iteration", value=word[:80], rank=place()[0], fix=fix))
    folder = top / (word if word == "release" else f"iter_{int(word):07d}")
    whole = _read(folder / _MODEL)
    tensors = dict(whole["model"])
    _, experts = _divided(model)
    for number in experts:
        tensors |= _renumbered(_read(folder / f"expert_{number}_{_MODEL}"), -min(experts))
    model.load_state_dict(tensors, strict=strict)
    steps = (
        _read(folder / _STEPS.format(place()[0]))["optimizer"]
        if experts and optimizer is not None
        else whole["optimizer"]
    )
    for name, target, saved in (("optimizer", optimizer, steps), ("lr_scheduler", lr_scheduler, whole["lr_scheduler"])):
        if target is None:
            continue
        if saved is None:
            fix = f"leave out {name}, or save it too"
            raise UsageError(explain(f"the checkpoint holds no {name}", value=str(folder), rank=place()[0], fix=fix))
        target.load_state_dict(saved)
    return int(whole["iteration"] or 0)


def _divided(model: nn.Module) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the state that is equal on all ranks, and that of this rank's experts by their number among those of all ranks."""
    shared: dict[str, Any] = {}
    local: dict[int, dict[str, Any]] = {}
    for name, value in model.state_dict().items():
        if (found := _EXPERT.fullmatch(name)) is None:
            shared[name] = value
        else:
            local.setdefault(int(found["number"]), {})[name] = value
    first = place()[0] * len(local)
    return shared, {first + number: _renumbered(tensors, first) for number, tensors in sorted(local.items())}


def _renumbered(tensors: dict[str, Any], by: int) -> dict[str, Any]:
    """Return the tensors under names with the numbers of experts raised."""
    raised = lambda found: f"{found['layer']}.{int(found['number']) + by}.{found['rest']}"  # noqa: E731
    return {_EXPERT.sub(raised, name): value for name, value in tensors.items()}


def _write(path: Path, content: Any) -> None:
    _put(path, lambda partial: torch.save(content, partial))


def _put(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    if not path.exists():
        fix = "load with as many ranks and experts as it was saved with, from the same folder"
        raise UsageError(explain("a file of the checkpoint is missing", value=str(path), rank=place()[0], fix=fix))
    return torch.load(path, map_location="cpu", weights_only=True)
