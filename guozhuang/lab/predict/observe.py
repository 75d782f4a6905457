"""What the processes of a profile measure of themselves; ``lab/worker.py`` calls this in place of a run of counted steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from guozhuang import world
from guozhuang.cost.prediction.profile import BatchTime, CollectiveTime, GradientTime
from guozhuang.cost.trace import PARTS
from guozhuang.lab import measure
from guozhuang.lab.results import PHASES

#: Sizes of the collectives that are timed, in bytes.
SIZES = tuple(4 << (10 + 2 * n) for n in range(8))
_WARMUP_STEPS, _FEWEST_STEPS = 4, 5
_HOOKED_STEPS = 6  # steps in which every gradient has a hook


@dataclass(frozen=True)
class Observed:
    """What one process of a profile has found.

    Attributes:
        rank: its rank.
        steps: seconds of every part of every step: ``steps[number][part]``, parts in the order of ``results.PHASES``.
        batches: the step at other batch sizes.
        gradients: see ``Profile``.
        collectives: see ``Profile``.
    """

    rank: int
    steps: tuple[tuple[float, ...], ...] = ()
    batches: tuple[BatchTime, ...] = ()
    gradients: tuple[GradientTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    device: str = ""


class ProfiledTraining(Protocol):
    """What is needed of the training of ``lab/worker.py``."""

    clock: measure.Clock
    bare: nn.Module
    batch_size: int
    marks: list[tuple[Any, ...]]
    last_gradient: measure.LastGradient
    here: world.World

    def step(self, number: int) -> None:
        """Train on one batch."""

    def use_batch_size(self, batch_size: int) -> None:
        """Train on batches of so many samples from now on."""


def observe(trained: ProfiledTraining, seconds: float, batch_sizes: Sequence[int]) -> Observed:
    """Train for so many seconds, and measure.

    Args:
        trained: a training that has begun.
        seconds: how long to train at the workload's batch size.
        batch_sizes: other batch sizes to train with for half as long each; with any, ready times of gradients are measured too.
    """
    for number in range(_WARMUP_STEPS):
        trained.step(number)
    trained.last_gradient.keep_last()
    own, found, gradients = trained.batch_size, list[BatchTime](), tuple[GradientTime, ...]()
    for batch_size in sorted(size for size in batch_sizes if size < own):
        found.append(_at(trained, batch_size, seconds / 2))
    trained.use_batch_size(own)
    measure.reset_peak_memory(trained.here.device)
    steps = _steps(trained, seconds)
    found.append(_batch_time(trained, own, steps))
    if batch_sizes:
        gradients = _ready_times(trained)
    for batch_size in sorted(size for size in batch_sizes if size > own):
        found.append(_at(trained, batch_size, seconds / 2))
    return Observed(trained.here.rank, tuple(steps), tuple(found), gradients, device=_device(trained.here.device))


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _at(trained: ProfiledTraining, batch_size: int, seconds: float) -> BatchTime:
    trained.use_batch_size(batch_size)
    trained.step(0)
    measure.reset_peak_memory(trained.here.device)
    return _batch_time(trained, batch_size, _steps(trained, seconds))


def _batch_time(trained: ProfiledTraining, batch_size: int, steps: Sequence[Sequence[float]]) -> BatchTime:
    on_device = trained.here.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(trained.here.device) if on_device else measure.peak_memory_bytes()
    return BatchTime(batch_size, median_parts(steps), peak, len(steps))


def median_parts(steps: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median seconds of each part; what autograd does after the last gradient belongs to "backward".

    The medians are scaled so that they add up to the median of whole steps.
    """
    medians = dict(zip(PHASES, (statistics.median(column) for column in zip(*steps, strict=True)), strict=True))
    medians["backward"] += medians.pop("exchange")
    scale = statistics.median(sum(step) for step in steps) / sum(medians.values())
    return {part: medians.get(part, 0.0) * scale for part in PARTS if part in medians}


def _steps(trained: ProfiledTraining, seconds: float) -> list[tuple[float, ...]]:
    """Train until the time is over, at least some steps; return the seconds of the parts of each."""
    trained.clock.wait()
    first, end, number = len(trained.marks), time.monotonic() + seconds, 0
    while number < _FEWEST_STEPS or time.monotonic() < end:
        number += 1
        trained.step(number)
    trained.clock.wait()
    return [
        tuple(trained.clock.seconds(start, stop) for start, stop in pairwise(step)) for step in trained.marks[first:]
    ]


def _ready_times(trained: ProfiledTraining) -> tuple[GradientTime, ...]:
    """Return when each gradient is there, the earliest first: the median over some steps with a hook on every parameter."""
    marks: dict[str, list[Any]] = {}
    handles: list[RemovableHandle] = []

    def note(name: str) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            found[name] = trained.clock.now()

        return ready

    trainable = {name: each for name, each in trained.bare.named_parameters() if each.requires_grad}
    found: dict[str, Any] = {}
    for name, parameter in trainable.items():
        handles.append(parameter.register_post_accumulate_grad_hook(note(name)))
    for number in range(_HOOKED_STEPS):
        found.clear()
        trained.step(number)
        trained.clock.wait()
        began = trained.marks[-1][2]
        for name, mark in found.items():
            marks.setdefault(name, []).append(trained.clock.seconds(began, mark))
    for handle in handles:
        handle.remove()
    never = float("inf")
    times = [
        GradientTime(
            name, each.numel() * each.element_size(), statistics.median(marks[name]) if name in marks else never
        )
        for name, each in trainable.items()
    ]
    return tuple(sorted(times, key=lambda each: each.ready_s))


def time_collectives(here: world.World, seconds: float) -> Observed:
    """Time all_reduce and all_gather at the sizes of :data:`SIZES`; every rank must call this.

    A call's time counts on the rank on which it was the shortest, because the others have waited for a late peer.

    Args:
        here: the world.
        seconds: the time for all of them together; each is called three times at least.
    """
    backend = str(torch.distributed.get_backend())
    cases = [(operation, size) for operation in ("all_reduce", "all_gather") for size in SIZES]
    found = list(_timed(here, backend, cases, seconds / len(cases)))
    return Observed(here.rank, collectives=tuple(found), device=_device(here.device))


def _timed(
    here: world.World, backend: str, cases: Sequence[tuple[str, int]], seconds: float
) -> Iterator[CollectiveTime]:
    for operation, size in cases:
        whole = torch.zeros(size // 4, device=here.device)
        part = torch.zeros(size // 4 // here.size, device=here.device)
        into = whole[: part.numel() * here.size]

        def call(operation: str = operation, whole: Tensor = whole, into: Tensor = into, part: Tensor = part) -> None:
            if operation == "all_reduce":
                torch.distributed.all_reduce(whole)
            else:
                torch.distributed.all_gather_into_tensor(into, part)
            if here.device.type == "cuda":
                torch.cuda.synchronize()

        call()
        began = time.perf_counter()
        call()
        # All ranks must call it equally often: rank 0 says how often.
        count = torch.tensor(
            [max(3, min(2000, int(seconds / (time.perf_counter() - began + 1e-7))))], device=here.device
        )
        torch.distributed.broadcast(count, 0)
        times = list[float]()
        torch.distributed.barrier()
        processor = time.process_time()
        for _ in range(int(count)):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        processor_s = (time.process_time() - processor) / int(count)
        least = torch.tensor(times, device=here.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        yield CollectiveTime(backend, here.size, size, float(least.median()), processor_s, operation)
