"""Measure time, bytes and memory of one process, and the difference of two sets of weights. Nothing here communicates.

Times on the CPU come from ``time.perf_counter``. On CUDA, where a call only launches work, they come from events that
the device records when it reaches them: reading them later costs no synchronization inside the measured steps.
"""

from __future__ import annotations

import hashlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from guozhuang.lab.results import Difference
from guozhuang.net.sent import tcp_sent_bytes as tcp_sent_bytes
from guozhuang.watch.processes import path_of


class Clock:
    """Marks points in time on one device, and measures the seconds between two marks.

    Args:
        device: the device that runs the timed work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return a mark of this point in time, which only :meth:`seconds` can interpret."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has finished all its work so far. It must be called outside the timed part."""
        if self._on_cuda:
            torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; :meth:`wait` must have been called since they were taken."""
        return float(start.elapsed_time(end) / 1e3 if self._on_cuda else end - start)


class LastGradient:
    """Marks the moment at which this rank has computed its last gradient of a backward pass.

    During the search every parameter has a hook, and the parameter whose gradient was computed last is remembered. Then only
    that parameter keeps its hook, so that the measured steps include the cost of a single call. A step in which that parameter
    gets no gradient has no mark, and restarts the search.

    It must be created on the bare model, before a strategy wraps it: hooks run in the order of their registration, so the mark
    is taken before the strategy's own work on the last gradient begins, and that work counts as exchange. Hooks of a second
    search run after the strategy's: from then on the backward phase includes the start of the last bucket's exchange.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.mark: Any = None
        self.name = ""
        self._clock = clock
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._handles: dict[str, RemovableHandle] = {}
        self._search()

    def take(self) -> Any:
        """Return the mark of the backward pass that has just ended; without a mark begin a new search, and return None."""
        mark, self.mark = self.mark, None
        if mark is None:
            self._search()
        return mark

    def keep_last(self) -> None:
        """End the search: from now on watch only the parameter whose gradient was the last one in the latest backward.

        Raises:
            RuntimeError: no gradient was seen yet.
        """
        if not self.name:
            raise RuntimeError(
                "no parameter received a gradient in the warm-up steps: the loss does not depend on the model"
            )
        for name in [name for name in self._handles if name != self.name]:
            self._handles.pop(name).remove()

    def stop(self) -> None:
        """Watch nothing any more: no parameter keeps a hook, and no later step restarts the search."""
        self._parameters = {}
        while self._handles:
            self._handles.popitem()[1].remove()

    def _search(self) -> None:
        for name, parameter in self._parameters.items():
            if name not in self._handles:
                self._handles[name] = parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.mark = self._clock.now()
            self.name = name

        return note


def own_steps_s(trainer: Any) -> tuple[float, ...]:
    """Return of each measured step of a trainer the time without the exchange that backward does not hide, in seconds."""
    if trainer.divided:
        return ()
    marks, seconds = trainer.marks[trainer.spec.num_warmup_steps :], trainer.clock.seconds
    return tuple(seconds(began, ready) + seconds(returned, ended) for began, _, _, ready, returned, ended in marks)


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the counters of peak memory; return False if the kernel does not allow that for the counter of main memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path(path_of("clear_refs")).write_text("5")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int | None:
    """Return the peak main memory of this process, in bytes, since the counter was reset (else since the process started)."""
    high = _kib_field(Path(path_of("status")), "VmHWM:")
    if high is not None:
        return high
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * 1024 if os.uname().sysname == "Linux" else peak  # Linux counts in KiB, macOS in bytes


def pss_bytes() -> int | None:
    """Return this process's proportional share of main memory (a page of n processes counts 1/n); None if unknown.

    Its anonymous memory counts whole: a process shares that at most with the warm parent that it was forked from.
    """
    path = Path(path_of("smaps_rollup"))
    share, anonymous, share_of_anonymous = (_kib_field(path, f"{key}:") for key in ("Pss", "Anonymous", "Pss_Anon"))
    if share is None or anonymous is None or share_of_anonymous is None:
        return share
    return share - share_of_anonymous + anonymous


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the tensors' bytes, to test whether tensors are bit-identical."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def difference(reference: Path, other: Path) -> Difference:
    """Compare the weights in two files written by ``torch.save({name: tensor})``.

    Args:
        reference: file of the weights to compare with.
        other: file of weights with the same names and shapes.
    """
    expected = torch.load(reference, weights_only=True)
    found = torch.load(other, weights_only=True)
    assert expected.keys() == found.keys(), "both runs trained the same model"
    largest, tensor, relative, squares, norm_squares = 0.0, "", 0.0, 0.0, 0.0
    for name, weight in expected.items():
        wide = torch.complex128 if weight.is_complex() else torch.float64
        weight = weight.to(wide)
        apart = (found[name].to(wide) - weight).abs()
        if apart.numel() == 0:
            continue
        here = _number(apart.max())
        if not tensor or not here <= largest:  # "not <=" is true for a NaN too, which is then kept as the largest
            largest, tensor = (here, name) if not math.isnan(largest) else (largest, tensor)
        scale = _number(weight.abs().max())
        relative = max(relative, here / scale if scale > 0 else (0.0 if here == 0 else math.inf))
        squares += _number((apart**2).sum())
        norm_squares += _number((weight.abs() ** 2).sum())
    distance = math.sqrt(squares / norm_squares) if norm_squares > 0 else (0.0 if squares == 0 else math.inf)
    return Difference(largest, tensor, relative, distance)


def _number(value: torch.Tensor) -> float:
    return float(value.item())


def _kib_field(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)
