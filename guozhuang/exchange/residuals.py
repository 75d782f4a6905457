"""What a lossy code lost, kept by parameter until it can be sent: error feedback that outlives a change of the buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..gradients.buckets import Bucket
from ..world import versions
from .numbers import is_finite, num_numbers


class Residuals:
    """One float32 number for each number of the buckets, padded to equal rows for all ranks.

    Args:
        buckets: the layout.
        group: the ranks.
        owned: this rank keeps its own row of each bucket only; else it keeps all rows, which are its own errors.
    """

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, owned: bool) -> None:
        self._group, self._owned = group, owned
        self._spans: dict[str, tuple[int, int, int]] = {}
        self._kept: dict[int, Tensor] = {}
        self._padding: dict[int, Tensor] = {}
        self._first: dict[int, int] = {}  # which number of a bucket is the first of those that are kept
        size = group.size()
        for bucket in buckets:
            length = -(-num_numbers(bucket) // size)
            self._kept[bucket.index] = torch.zeros(1 if owned else size, length, device=bucket.flat.device)
            begin = 0
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                count = parameter.numel() * (2 if parameter.is_complex() else 1)
                self._spans[name] = (bucket.index, begin, begin + count)
                begin += count
            self._first[bucket.index] = first = group.rank() * length if owned else 0
            self._padding[bucket.index] = self._kept[bucket.index].view(-1)[max(0, num_numbers(bucket) - first) :]

    def clear_padding(self, index: int) -> None:
        """Forget what was lost of the padding: it belongs to no parameter, and would be lost in a checkpoint."""
        self._padding[index].zero_()

    def rows(self, index: int) -> Tensor:
        """Return what is kept for a bucket, to be changed in place: (ranks, row) or, where only the own is kept, (1, row).

        Whoever writes there calls :meth:`clear_padding`.
        """
        return self._kept[index]

    def forget_not_finite(self, index: int) -> list[str]:
        """Zero the rows of a bucket that hold NaN or infinity; return the names of the parameters that did."""
        kept = self._kept[index]
        if is_finite(kept):
            return []
        broken, first = ~kept.isfinite(), self._first[index]
        places = broken.view(-1)
        names = [
            name
            for name, (of, begin, end) in self._spans.items()
            if of == index and bool(places[max(0, begin - first) : max(0, end - first)].any())
        ]
        kept[broken.any(dim=1)] = 0.0
        return names

    def by_name(self) -> dict[str, Tensor]:
        """Return copies by parameter, each 1-dimensional. Every rank must call it where ranks own rows: they are gathered."""
        whole = {index: self._gathered(kept) for index, kept in self._kept.items()}
        return {name: whole[index][begin:end].clone() for name, (index, begin, end) in self._spans.items()}

    def _gathered(self, kept: Tensor) -> Tensor:
        if not self._owned or self._group.size() == 1:
            return kept.view(-1)
        whole = kept.new_empty(self._group.size() * kept.numel())
        versions.all_gather_single(whole, kept.view(-1), group=self._group)
        return whole

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over what ``by_name`` returned, also of another layout; parameters that are not in it keep zeros."""
        size, rank = self._group.size(), self._group.rank()
        for index, kept in self._kept.items():
            whole = kept.new_zeros(size * kept.shape[1])
            for name, (of, begin, end) in self._spans.items():
                if of == index and name in values:
                    whole[begin:end] = values[name].to(whole.device)
            rows = whole.view(size, -1)
            kept.copy_(rows[rank : rank + 1] if self._owned else rows)
