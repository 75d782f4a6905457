"""Running statistics of BatchNorm where a batch goes through in microbatches: one update for the batch, as without a pipeline.

BatchNorm normalizes each microbatch by itself, as one process does that accumulates gradients over them. Its running statistics
would then take a small step for each microbatch. Here they take one step with the mean and variance of the whole batch, which
are computed of those of the microbatches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class BatchStatistics:
    """Collects what the BatchNorm modules of some modules see. Their hooks stay; they do nothing outside of the two contexts.

    Args:
        modules: BatchNorm modules are looked for in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._seen: dict[_BatchNorm, list[tuple[int, Tensor, Tensor]]] = {}
        self._is_collecting = self._is_discarding = False
        self._saved: dict[_BatchNorm, tuple[Any, ...]] = {}
        found = {each for module in modules for each in module.modules() if isinstance(each, _BatchNorm)}
        for each in found:
            if each.track_running_stats and each.running_mean is not None:
                each.register_forward_pre_hook(self._before)
                each.register_forward_hook(self._after, always_call=True)

    @contextlib.contextmanager
    def collecting(self, num_microbatches: int) -> Iterator[None]:
        """Update the running statistics once, when the block that computes all microbatches of a batch has ended."""
        self._is_collecting = True
        try:
            yield
            for module, seen in self._seen.items():
                calls = max(1, len(seen) // num_microbatches)  # of the module in each microbatch
                for i in range(calls):
                    _update(module, seen[i::calls])
        finally:
            self._is_collecting = False
            self._seen.clear()

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Update nothing in this block: what it computes was computed before, and is now for activation checkpointing."""
        self._is_discarding = True
        try:
            yield
        finally:
            self._is_discarding = False

    def _before(self, module: Any, inputs: Any) -> None:
        is_passed_over = isinstance(inputs[0], Tensor) and inputs[0].is_meta
        if is_passed_over or not module.training or not (self._is_collecting or self._is_discarding):
            return
        self._saved[module] = (*(getattr(module, name) for name in _BUFFERS), module.momentum)
        # With a momentum of 1 the module leaves the mean and the unbiased variance of what it normalizes.
        module.running_mean = torch.zeros_like(module.running_mean)
        module.running_var = torch.zeros_like(module.running_var)
        module.num_batches_tracked, module.momentum = torch.zeros_like(module.num_batches_tracked), 1.0

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        if module not in self._saved:
            return
        mean, variance = module.running_mean, module.running_var
        *buffers, module.momentum = self._saved.pop(module)
        for name, buffer in zip(_BUFFERS, buffers, strict=True):
            setattr(module, name, buffer)
        if self._is_collecting and not self._is_discarding and isinstance(output, Tensor):
            count = inputs[0].numel() // max(1, mean.numel())
            self._seen.setdefault(module, []).append((count, mean.double(), variance.double()))


@torch.no_grad()
def _update(module: _BatchNorm, seen: list[tuple[int, Tensor, Tensor]]) -> None:
    """Take the step of the whole batch, from the counts, means and unbiased variances of its parts."""
    mean_was, variance_was, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean_was is not None and variance_was is not None and tracked is not None
    total = sum(count for count, _, _ in seen)
    mean = torch.stack([count * each for count, each, _ in seen]).sum(0) / total
    squares = [(count - 1) * variance + count * (each - mean) ** 2 for count, each, variance in seen]
    variance = torch.stack(squares).sum(0) / max(1, total - 1)
    tracked.add_(1)
    momentum = 1.0 / float(tracked) if module.momentum is None else module.momentum
    mean_was.copy_((1 - momentum) * mean_was.double() + momentum * mean)
    variance_was.copy_((1 - momentum) * variance_was.double() + momentum * variance)
