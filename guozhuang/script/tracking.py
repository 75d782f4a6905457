"""``Tracker``: writes a training's speed and the script's own metrics to a file or to a library for tracking experiments."""

from __future__ import annotations

import csv
import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UsageError, explain
from ..net.sent import tcp_sent_bytes
from ..registry import registry
from ..strategies.steps import record_steps
from ..timeline import Instant, Span, Timeline
from ..world import current
from .rank_zero import rank_zero
from .reduce import reduce

#: Writes metrics of one step: called with names and values, and the number of the step.
Write = Callable[[Mapping[str, float], int], None]


class Tracker:
    """Writes metrics every few steps, from rank 0: the means of the script's own over the ranks, and the speed::

        tracker = gz.Tracker("runs/gpt.csv", model)
        for x, y in batches:
            ...
            tracker.step(len(x), loss=loss)

    Speed is these numbers: ``samples_per_s``, of all ranks together; ``exposed_exchange_ms``, the part of a step in which
    backward waits for the exchange of gradients after autograd has ended (mean over ranks; under strategies of this project's
    DistributedDataParallel that average gradients); and ``sent_bytes``, what a rank sends through TCP sockets in a step (mean
    over ranks, on Linux; neither shared memory nor NCCL is counted). Where the own time of ranks is measured (see
    docs/slow-ranks.md) there are two more: ``own_ms``, a step without the waits for other ranks (mean over ranks), and
    ``own_ms_max``, that of the slowest rank.

    Args:
        to: "FILE.csv" (rows: step, name, value; appended), "tensorboard:FOLDER", "wandb:PROJECT" (``WANDB_MODE=offline`` is
            honoured), "mlflow:EXPERIMENT", or a function ``write(metrics, step)``. The library is imported on rank 0 alone, at
            the first row.
        model: what ``prepare`` returned, for ``exposed_exchange_ms``; None: without it.
        every: steps between rows.

    Raises:
        UsageError: ``to`` is none of these, its library is not installed, or ``every`` is no count.
    """

    def __init__(self, to: str | Write, model: nn.Module | None = None, *, every: int = 10) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(explain("`every` is a number of steps, at least 1", value=every, fix="leave it out"))
        self._open = _opener(to)
        self._every, self._steps = every, 0
        self._write: Write | None = None
        self._close: Callable[[], object] | None = None
        self._num_samples, self._sums = 0.0, dict[str, Any]()
        self._timeline = None if model is None else _timeline_of(model)
        self._restart()

    def step(self, num_samples: int, **metrics: float | torch.Tensor) -> None:
        """Count a step of this rank's ``num_samples`` samples, and write a row if it is time to. Every rank must call.

        Args:
            num_samples: samples of this rank in this step.
            **metrics: means over these samples, the same names in every step: ``loss=loss``. They are not read before a row is
                written, so that an accelerator need not be waited for.
        """
        self._steps += 1
        self._num_samples += num_samples
        for name, value in metrics.items():
            mine = value.detach() if isinstance(value, torch.Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + mine * num_samples
        if self._steps % self._every == 0:
            self._report()

    def log(self, **metrics: float) -> None:
        """Write values that are equal on all ranks, such as an accuracy after ``gz.reduce``. Nothing is communicated."""
        self._put({name: float(value) for name, value in metrics.items()})

    def close(self) -> None:
        """End the file or the run of the library."""
        if self._close is not None:
            self._close()
        self._write = self._close = None

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps, so that a resumed training goes on counting: ``gz.epochs(n, tracker=tracker)``."""
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on counting from a saved number of steps."""
        self._steps = int(state_dict["steps"])
        self._restart()

    def _restart(self) -> None:
        self._began_s, self._num_samples, self._sums = time.perf_counter(), 0.0, {}
        self._sent = tcp_sent_bytes()
        self._first_event = 0 if self._timeline is None else len(self._timeline.events)

    def _report(self) -> None:
        seconds, count = time.perf_counter() - self._began_s, max(self._num_samples, 1e-9)
        sent, size = tcp_sent_bytes(), reduce(1, "sum")
        means = {name: value / count for name, value in self._sums.items()}
        found = reduce({name: float(value) for name, value in means.items()}, weight=self._num_samples)
        speed = {"samples_per_s": self._num_samples / seconds * size}
        if (
            self._timeline is not None
            and (exposed := _exposed_s(self._timeline.events[self._first_event :])) is not None
        ):
            speed["exposed_exchange_ms"] = exposed * 1e3 / self._every
        if sent is not None and self._sent is not None:
            speed["sent_bytes"] = max(sent - self._sent, 0) / self._every
        slowest = {}
        if registry.own_time is not None and (own_s := list(registry.own_time.timer.last_own_s)[-self._every :]):
            speed["own_ms"] = sum(own_s) / len(own_s) * 1e3
            slowest["own_ms_max"] = reduce(speed["own_ms"], "max")
        self._put({**found, **reduce(speed), **slowest})
        if isinstance(self._timeline, _OwnTimeline):
            self._timeline.events.clear()
        self._restart()

    def _put(self, metrics: Mapping[str, float]) -> None:
        if rank_zero():
            if self._write is None:
                self._write, self._close = self._open()
            self._write(metrics, self._steps)


class _OwnTimeline(Timeline):
    """A timeline that is read and emptied by a tracker."""


def _timeline_of(model: nn.Module) -> Timeline | None:
    """Return the timeline on which the steps of a prepared model are recorded, from now on if they were not."""
    found = registry.trained_with(model)
    if found is None:
        what = "the tracker takes the model that prepare() returned"
        raise UsageError(explain(what, value=type(model).__name__, fix="prepare the model first, or leave it out"))
    if not hasattr(type(found.model), "timeline") or found.model.reducer is None:  # there are no buckets to wait for
        return None
    if found.model.timeline is None:
        world = current()
        record_steps(found.model, found.optimizer, _OwnTimeline(0 if world is None else world.rank))
    timeline: Timeline | None = found.model.timeline
    return timeline


def _exposed_s(events: list[Span | Instant]) -> float | None:
    """Return the seconds between the end of autograd's work and the return of backward; None if no backward was recorded."""
    total, ended_ns = None, None
    for event in events:
        if isinstance(event, Instant) and event.name == "backward ended":
            ended_ns = event.at_ns
        elif isinstance(event, Span) and event.name == "backward" and ended_ns is not None:
            total, ended_ns = (total or 0.0) + max(event.end_ns - ended_ns, 0) / 1e9, None
    return total


# ---- where metrics are written ----------------------------------------------------------------------------------------------


def _opener(to: str | Write) -> Callable[[], tuple[Write, Callable[[], object] | None]]:
    """Return a function that opens what ``to`` names, and returns how to write to it and how to close it."""
    if callable(to):
        return lambda: (to, None)
    kind, _, name = to.partition(":")
    if to.endswith(".csv"):
        return lambda: _csv(to)
    if kind not in _LIBRARIES or not name:
        what = "there is nothing of that name to write metrics to"
        fix = 'use "FILE.csv", "tensorboard:FOLDER", "wandb:PROJECT", "mlflow:EXPERIMENT" or a function'
        raise UsageError(explain(what, value=to, fix=fix))

    def open_library() -> tuple[Write, Callable[[], object] | None]:
        module, package, begin = _LIBRARIES[kind]
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                explain(f"{package} cannot be imported: {error}", value=to, fix=f"pip install {package}")
            ) from error
        return begin(library, name)

    return open_library


def _csv(path: str) -> tuple[Write, Callable[[], object]]:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    file = open(path, "a", newline="")  # noqa: SIM115 - as long as the tracker
    rows = csv.writer(file)
    if file.tell() == 0:
        rows.writerow(("step", "name", "value"))

    def write(metrics: Mapping[str, float], step: int) -> None:
        rows.writerows((step, name, repr(value)) for name, value in metrics.items())
        file.flush()

    return write, file.close


def _tensorboard(library: Any, name: str) -> tuple[Write, Callable[[], object]]:
    writer = library.SummaryWriter(name)

    def write(metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return write, writer.close


def _wandb(library: Any, name: str) -> tuple[Write, Callable[[], object]]:
    run = library.init(project=name)
    return lambda metrics, step: run.log(dict(metrics), step=step), run.finish


def _mlflow(library: Any, name: str) -> tuple[Write, Callable[[], object]]:
    library.set_experiment(name)
    library.start_run()
    return lambda metrics, step: library.log_metrics(dict(metrics), step=step), library.end_run


# By the word before the colon: the module, its package, and the function that begins a run.
_LIBRARIES: dict[str, tuple[str, str, Callable[[Any, str], tuple[Write, Callable[[], object]]]]] = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", _tensorboard),
    "wandb": ("wandb", "wandb", _wandb),
    "mlflow": ("mlflow", "mlflow", _mlflow),
}
