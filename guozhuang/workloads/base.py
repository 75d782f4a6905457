"""``Workload``: the interface between a training task and the code that trains it, such as ``guozhuang compare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from guozhuang.errors import UsageError, explain


@dataclass(frozen=True)
class Workload:
    """Model, data, loss, metric and optimizer of a training task, independent of how it is spread over processes.

    Every rank builds its own from the same options, and gets an equal one. None of the callables communicates.
    The joined batch of all ranks at a step is the batch that one process would see at that step: rank ``r`` of ``n`` takes
    every ``n``-th index of the epoch's permutation, starting at ``r``.

    Attributes:
        name: the name in the report.
        model: builds the bare model on the CPU, in training mode. It is called right after ``torch.manual_seed`` and
            gives the same weights for the same seed.
        optimizer: builds the optimizer over the bare model's parameters, before a strategy wraps either.
        train: map-style data set, indexed by 0 .. length - 1.
        collate: turns a list of samples into a batch: a tensor, or tuples and dicts of tensors, on the CPU.
        loss: runs the forward of the (wrapped) model on a batch and returns a scalar: the mean over its samples. The
            batch is on the device where the model expects it; the caller moves it there.
        evaluate: returns metrics by name for the bare model, over a held-out part that is the same in every call; it keeps the
            model's weights and its training mode. None if only speed is to be measured.
        batch_size: samples per rank and step.
        details: lines that the report prints about the workload, in this order.

    Raises:
        UsageError: from the constructor, if a field cannot work.
    """

    name: str
    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    train: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None
    batch_size: int
    details: Mapping[str, str | int | float]

    def __post_init__(self) -> None:
        for field in ("model", "optimizer", "collate", "loss"):
            if not callable(getattr(self, field)):
                what = f"{field} of the workload {self.name!r} cannot be called"
                fix = f"give a function; guozhuang.workloads.Workload says what {field} takes and returns"
                raise UsageError(explain(what, value=getattr(self, field), fix=fix))
        if self.evaluate is not None and not callable(self.evaluate):
            what = f"evaluate of the workload {self.name!r} is neither a function nor None"
            fix = "give a function of the bare model, or None"
            raise UsageError(explain(what, value=self.evaluate, fix=fix))
        if isinstance(self.train, IterableDataset) or not isinstance(self.train, Sized):
            what = f"the training data of the workload {self.name!r} has no length and cannot be shared out by index"
            fix = "give a map-style torch Dataset: __len__ and __getitem__"
            raise UsageError(explain(what, value=type(self.train).__name__, fix=fix))
        if len(self.train) == 0:
            raise UsageError(
                explain(f"the training data of the workload {self.name!r} is empty", fix="give at least one sample")
            )
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            what = f"the batch size of the workload {self.name!r} is not a whole number of at least 1"
            fix = "give the number of samples one rank takes in one step"
            raise UsageError(explain(what, value=self.batch_size, fix=fix))


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch whose tensors are on a device: one tensor, or tuples, lists and dicts of them."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update all parameters in one kernel, as if it had been made with ``fused=True``.

    Raises:
        UsageError: the optimizer has no such form.
    """
    if "fused" not in optimizer.defaults:
        what = "this optimizer has no fused form"
        raise UsageError(explain(what, value=type(optimizer).__name__, fix="leave the knob `fused` out"))
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=None)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
