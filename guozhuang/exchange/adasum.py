"""Adaptive sum of the gradients: components in the same direction are averaged, orthogonal ones are added.

Formula, for two gradients of one parameter: A(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, and A(a, 0) = a.
For n ranks, a tree of pairs: ranks 0 and 1, 2 and 3, and so on; then pairs of these results. A result without a partner moves
up one level unchanged. So n orthogonal gradients give their sum, and n equal gradients give that gradient, for any n.
Error: rounding only: scalar products and the factors are in float64, the sum in float32 (float64 for float64 gradients). All
ranks get equal bits.
Traffic: 2 (n-1)/n of the bucket, as an all-reduce, and n (n+1) / 2 float64 for each parameter in it, all-reduced.
Source: Maleki et al. 2021, MLSys, arXiv:2006.02924.

[Note: all pairs at once] Every node of the tree is a linear combination of the n gradients, so all scalar products in the tree
follow from those of the gradients themselves: the Gram matrix, one for each parameter. The bucket is cut into n rows. Rank i
gets row i of all ranks (all-to-all); the Gram matrices of the rows are added up (one all-reduce); then each rank computes the n
factors of each parameter, sums its row with them, and sends the sum to all (all-gather). These are three rounds for any n,
while recursive halving and doubling needs 2 log2 n rounds and an n that is a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..gradients.buckets import Bucket
from ..groups.serial import Lane
from ..world import versions
from .base import Done, GradientExchange, Work
from .numbers import check_floating_point, num_numbers, numbers, warn_unless_finite

_NUM_LANES = 2  # background threads with a group each: one computes while the other sends
_NUM_COLUMNS = 1 << 18  # this many columns of the gradients are converted to float64 at a time, to limit memory
_LEAST = 1e-12  # a squared norm below this share of its greatest possible value is rounding error and counts as 0


@dataclass
class _AdasumRows:
    """The buffers with which :class:`Adasum` exchanges one bucket.

    Attributes:
        sent: this rank's gradients, cut into n equal rows, the last one padded.
        got: row i of every rank, where i is this rank.
        pieces: (parameter index, begin, end) of each parameter that lies in row i, in columns of the row.
    """

    sent: Tensor
    got: Tensor
    pieces: Sequence[tuple[int, int, int]]


@dataclass
class AdasumState:
    """The state of :class:`Adasum` for one bucket layout: the group, the background threads, and buffers by bucket index."""

    group: dist.ProcessGroup
    lanes: Sequence[Lane]
    rows: Mapping[int, _AdasumRows]


@dataclass(frozen=True)
class Adasum(GradientExchange[AdasumState]):
    """The adaptive sum, per parameter. A step is 1 to n times as long as one rank's, so keep the learning rate of one rank."""

    @property
    @override
    def averages(self) -> bool:
        """False: no rescaling is needed, because the zero gradients of ranks without data do not change an adaptive sum."""
        return False

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: AdasumState | None = None
    ) -> AdasumState:
        check_floating_point(buckets, "Adasum")
        size, rank = group.size(), group.rank()
        lanes = before.lanes if before is not None else [Lane(group) for _ in range(_NUM_LANES if size > 1 else 0)]
        rows = {}
        for bucket in buckets:
            length = -(-num_numbers(bucket) // size)
            sent = torch.zeros(size, length, dtype=numbers(bucket).dtype, device=bucket.flat.device)
            pieces, begin = [], -rank * length
            for i, parameter in enumerate(bucket.parameters):
                end = begin + parameter.numel() * (2 if parameter.is_complex() else 1)
                if max(begin, 0) < min(end, length):
                    pieces.append((i, max(begin, 0), min(end, length)))
                begin = end
            rows[bucket.index] = _AdasumRows(sent, torch.empty_like(sent), pieces)
        return AdasumState(group, lanes, rows)

    @override
    def start(self, bucket: Bucket, state: AdasumState, step: int) -> Work:
        if state.group.size() == 1 or not bucket.flat.numel():
            return Done()
        lane = state.lanes[bucket.index % len(state.lanes)]
        return lane.run(
            lambda: self._exchange(bucket, state.rows[bucket.index], lane.group, step), [bucket.flat.device]
        )

    def _exchange(self, bucket: Bucket, rows: _AdasumRows, group: dist.ProcessGroup, step: int) -> None:
        flat, size = numbers(bucket), group.size()
        warn_unless_finite(bucket, flat, step, group.rank(), "its adaptive sum becomes NaN on all ranks")
        rows.sent.view(-1)[: flat.numel()].copy_(flat)
        dist.all_to_all_single(rows.got, rows.sent, group=group)
        grams = flat.new_zeros(len(bucket.parameters), size, size, dtype=torch.float64)
        for i, begin, end in rows.pieces:
            for part in rows.got[:, begin:end].split(_NUM_COLUMNS, dim=1):
                part = part.to(torch.float64)
                grams[i].addmm_(part, part.mT)
        upper = torch.triu_indices(size, size, device=grams.device)
        packed = grams[:, upper[0], upper[1]]
        dist.all_reduce(packed, group=group)
        grams[:, upper[0], upper[1]] = packed
        grams[:, upper[1], upper[0]] = packed
        by = factors(grams)
        own = rows.sent.new_zeros(rows.sent.shape[1])
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        for i, begin, end in rows.pieces:
            own[begin:end] = by[i].to(wide) @ rows.got[:, begin:end].to(wide)
        versions.all_gather_single(rows.got.view(-1), own, group=group)
        flat.copy_(rows.got.view(-1)[: flat.numel()])

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        """Return the bytes that one rank sends for a bucket of one parameter; each further parameter adds a Gram matrix."""
        row_bytes = -(-num_elements // world_size) * element_bytes
        return 2 * (world_size - 1) * row_bytes + self.gram_bytes(1, world_size)

    def gram_bytes(self, num_parameters: int, world_size: int) -> int:
        """Return the bytes that one rank sends for the Gram matrices of a bucket of ``num_parameters`` parameters."""
        if world_size == 1:
            return 0
        num_products = num_parameters * world_size * (world_size + 1) // 2
        return 2 * (world_size - 1) * num_products * 8 // world_size


def factors(grams: Tensor) -> Tensor:
    """Return the factor by which each gradient is multiplied in the adaptive sum. See [Note: all pairs at once].

    Args:
        grams: (parameters, n, n), float64: the scalar products of the n gradients.

    Returns:
        (parameters, n), float64. NaN for all n where a gradient holds NaN or infinity.
    """
    size = grams.shape[-1]
    identity = torch.eye(size, dtype=grams.dtype, device=grams.device).expand_as(grams)
    nodes = list(identity.unbind(1))  # a node of the tree of sums: factors of all n gradients, (parameters, n)
    while len(nodes) > 1:
        pairs = [_pair(a, b, grams) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[2 * len(pairs) :]
    return nodes[0]


def _pair(a: Tensor, b: Tensor, grams: Tensor) -> Tensor:
    both = torch.einsum("pi,pij,pj->p", a, grams, b).unsqueeze(1)
    return _less(a, both, grams) + _less(b, both, grams)


def _less(a: Tensor, both: Tensor, grams: Tensor) -> Tensor:
    """Return (1 - a.b / (2 |a|^2)) a, where ``both`` is a.b; return a itself where it is zero. NaN stays NaN."""
    square = torch.einsum("pi,pij,pj->p", a, grams, a).unsqueeze(1)
    greatest = (a.abs() * grams.diagonal(dim1=1, dim2=2).sqrt()).sum(1, keepdim=True).square()
    return (1 - torch.where(square <= _LEAST * greatest, 0.0, both / (2 * square))) * a
