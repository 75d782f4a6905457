"""Resampling of divided images: ``interpolate``, which takes the rows of each output by the arithmetic of PyTorch's kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations.tensor import DividedTensor
from ..spans import Span, parts
from .exchange import fetch
from .ranges import ranges_plan
from .region import handles_rows, made_of_rows

_LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}


@handles_rows("interpolate", "upsample")
def _interpolate(
    func: Any, input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Any:  # fmt: skip
    num = input.dim() - 2
    i = input.at - 2 if isinstance(input, DividedTensor) else -1
    known = mode in ("nearest", "nearest-exact") or _LINEAR.get(mode) == num
    if i < 0 or antialias or not known or (size is None) == (scale_factor is None):
        return NotImplemented
    sizes: list[int] = list(input.shape[2:])
    scales: list[float | None] = [None] * num
    if size is not None:
        outputs = [size] * num if isinstance(size, int) else [int(each) for each in size]
    else:
        factors = [scale_factor] * num if isinstance(scale_factor, int | float) else list(scale_factor)
        outputs = [int(s * float(f)) for s, f in zip(sizes, factors, strict=True)]
        scales = [None] * num if recompute_scale_factor else list(factors)
    if len(outputs) != num or outputs[i] < input.place.ranks.size:
        return NotImplemented
    exact = torch.float64 if input.dtype == torch.float64 and mode in _LINEAR else torch.float32
    rows = _Resampling(sizes[i], outputs[i], scales[i], mode, bool(align_corners), exact)
    region = input.place.ranks
    spans = parts(outputs[i], region.size)
    plan = ranges_plan(sizes[i], tuple(rows.needed(span) for span in spans), region.rank)
    local = fetch(region, input.local, input.at, plan)
    start = rows.needed(spans[region.rank])[0]
    local_sizes, by_size = list(outputs), all(each is None for each in scales)
    local_sizes[i] = local.shape[input.at] * (rows.factor or 1)
    if not by_size or local_sizes != list(local.shape[2:]):
        # The dimensions that are not divided are resampled as the whole image's, and the divided one by a factor.
        scales[i] = rows.factor or 1
        given = {"size": tuple(local_sizes)} if by_size else {"scale_factor": tuple(map(float, scales))}  # type: ignore[arg-type]
        local = F.interpolate(local, **given, mode=mode, align_corners=align_corners)
    if rows.factor:
        first, behind = spans[region.rank]
        if local.shape[input.at] != behind - first:  # not a view of more: a view of the result changes with it
            local = local.narrow(input.at, first - start * rows.factor, behind - first).clone()
    else:
        local = rows.picked(local, input.at, spans[region.rank], start)
    return made_of_rows(input, local.clone() if local is input.local else local, outputs[i])


class _Resampling:
    """Which rows of the image each row of the resampled one is made of, in the arithmetic of PyTorch's kernels.

    Attributes:
        factor: the factor, if each row becomes a power of two of rows, in the same way everywhere; else 0. Then the kernel
            itself may run on some rows with the same result: all its numbers are exact.
    """

    def __init__(
        self, size: int, num_outputs: int, scale: float | None, mode: str, align_corners: bool, dtype: torch.dtype
    ) -> None:
        self._size, self._mode, self._aligned, self._dtype = size, mode, align_corners, dtype
        one = torch.tensor(1.0, dtype=dtype)
        if align_corners:
            self._scale = one * (size - 1) / (num_outputs - 1) if num_outputs > 1 else one * 0
        else:
            self._scale = one / scale if scale else one * size / num_outputs
        times = num_outputs // size
        exact = times * size == num_outputs and times & (times - 1) == 0 and (not scale or scale == times)
        self.factor = times if exact and not align_corners else 0

    def _sources(self, outputs: range) -> tuple[Tensor, Tensor, Tensor]:
        """Return the two rows that each output is made of, and the share of the second."""
        j = torch.tensor(list(outputs), dtype=self._dtype)
        if self._mode == "nearest":
            first = (j * self._scale).floor().long().clamp(max=self._size - 1)
            return first, first, torch.zeros_like(j)
        if self._mode == "nearest-exact":
            first = ((j + 0.5) * self._scale).floor().long().clamp(max=self._size - 1)
            return first, first, torch.zeros_like(j)
        place = j * self._scale if self._aligned else ((j + 0.5) * self._scale - 0.5).clamp(min=0)
        first = place.floor().long().clamp(max=self._size - 1)
        second = (first + 1).clamp(max=self._size - 1)
        return first, second, (place - first).clamp(0, 1)

    def needed(self, outputs: Span) -> Span:
        """Return (start, stop) of the image's rows that the outputs are made of, and one more on each side for a factor."""
        first, second, _ = self._sources(range(*outputs))
        more = 1 if self.factor and self._mode in _LINEAR else 0
        return max(int(first[0]) - more, 0), min(int(second[-1]) + 1 + more, self._size)

    def picked(self, local: Tensor, dim: int, outputs: Span, start: int) -> Tensor:
        """Return the outputs, made of the rows from ``start`` on."""
        first, second, share = (each.to(local.device) for each in self._sources(range(*outputs)))
        above = local.index_select(dim, first - start)
        if self._mode not in _LINEAR:
            return above
        shape = [1] * local.dim()
        shape[dim] = len(share)
        share = share.to(local.dtype).view(shape)
        return above * (1 - share) + local.index_select(dim, second - start) * share
