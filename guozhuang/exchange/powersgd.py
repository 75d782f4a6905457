"""Low-rank mean of the gradients: each matrix M is sent as two thin matrices P and Q.

Formula, for a parameter seen as a matrix of m rows (its first dim) and n columns (all others), with n_r ranks:
M_r = gradient + e_r; P = orthogonal basis of mean_r(M_r Q); Q = mean_r(M_r^T P); every rank gets P Q^T, and keeps
e_r = M_r - P Q^T. Q starts random and is kept for the next step, so the basis follows the gradients (warm start). Vectors, and
matrices that would not shrink enough, are sent whole, together with the P. All sums are in float32, also of float64 gradients.
Error: P Q^T is the projection of the mean onto the columns of P; the rest stays in the e_r and is sent later.
Source: Vogels et al. 2019, arXiv:1905.13727.

[Note: the basis] PyTorch's hook orthogonalises column after column, which takes longer than the rest of its work. Here the
basis is P V D^(-1/2), where V D V^T = P^T P is the eigendecomposition of a matrix of rank x rank, for all matrices of one shape
at once. Directions with almost no weight in P are left out (zero columns), so matrices of lower rank, or of zeros, are no
special case. All ranks compute the basis from equal bits, so it is equal everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..groups.serial import Lane
from .base import Done, GradientExchange, Work, check_saved
from .numbers import check_floating_point, in_float32, is_finite, warn_unless_finite

_LEAST = 1e-6  # directions with singular values of P below this share of the greatest one are rounding error


@dataclass
class _Matrices:
    """The parameters of one bucket that share a matrix shape, stacked.

    Attributes:
        members: the positions of the parameters in the bucket.
        error: the errors e_r, which were not sent yet, (members, m, n), float32.
        basis: Q, (members, n, rank), float32; equal on all ranks.
        wanted: buffer for M, (members, m, n), float32; allocating it in each step would take longer than the sum.
    """

    members: list[int]
    error: Tensor
    basis: Tensor
    wanted: Tensor


@dataclass
class PowerState:
    """The state of :class:`PowerSGD`.

    Attributes:
        group: the ranks.
        lane: the thread, with a group of its own, in which the collectives run; None for one rank.
        matrices: by bucket index, one entry per shape.
        whole: by bucket index, the positions of the parameters that are sent whole.
        names: by bucket index, the names of all its parameters.
    """

    group: dist.ProcessGroup
    lane: Lane | None
    matrices: dict[int, list[_Matrices]] = field(default_factory=dict)
    whole: dict[int, list[int]] = field(default_factory=dict)
    names: dict[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class PowerSGD(GradientExchange[PowerState]):
    """Averages gradients as products of thin matrices, with error feedback.

    Args:
        rank: columns of P and Q.
        min_compression_rate: a matrix is sent as two thin ones only if they have at least this many times fewer elements.
        seed: the seed of the first Q.

    Raises:
        UsageError: ``rank`` is below 1, or ``min_compression_rate`` is not above 0.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(explain("rank must be at least 1", value=self.rank))
        if not self.min_compression_rate > 0:
            raise UsageError(explain("min_compression_rate must be above 0", value=self.min_compression_rate))

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: PowerState | None = None
    ) -> PowerState:
        check_floating_point(buckets, "PowerSGD", takes_complex=False)
        lane = before.lane if before is not None else Lane(group) if group.size() > 1 else None
        state = PowerState(group, lane)
        for bucket in buckets:
            self._place(bucket, state)
        if before is not None:
            self.load_state_dict(state, self.state_dict(before))
        return state

    def _place(self, bucket: Bucket, state: PowerState) -> None:
        by_shape: dict[tuple[int, int], list[int]] = {}
        whole = []
        for i, parameter in enumerate(bucket.parameters):
            m, n = (parameter.shape[0], parameter[0].numel()) if parameter.dim() > 1 and parameter.numel() else (1, 1)
            rank = min(self.rank, m, n)
            if parameter.dim() > 1 and m * n >= self.min_compression_rate * (m + n) * rank:
                by_shape.setdefault((m, n), []).append(i)
            else:
                whole.append(i)
        device = bucket.flat.device
        found = []
        for (m, n), members in by_shape.items():
            rank = min(self.rank, m, n)
            basis = torch.empty(len(members), n, rank)
            for number, i in enumerate(members):
                # The seed depends on the parameter's name, so that its first matrix Q is the same in every bucket layout.
                random = torch.Generator().manual_seed(self.seed + sum(bucket.names[i].encode()))
                basis[number] = torch.randn(n, rank, generator=random)
            error, wanted = (torch.zeros(len(members), m, n, device=device) for _ in range(2))
            found.append(_Matrices(members, error, basis.to(device), wanted))
        state.matrices[bucket.index], state.whole[bucket.index] = found, whole
        state.names[bucket.index] = bucket.names

    @override
    def state_dict(self, state: PowerState) -> dict[str, Any]:
        """Return, by parameter, "error", which is this rank's own, and "basis", which is the same on all ranks."""
        saved: dict[str, Any] = {"error": {}, "basis": {}}
        for index, found in state.matrices.items():
            for matrices in found:
                for number, i in enumerate(matrices.members):
                    saved["error"][state.names[index][i]] = matrices.error[number].clone()
                    saved["basis"][state.names[index][i]] = matrices.basis[number].clone()
        return saved

    @override
    def load_state_dict(self, state: PowerState, saved: Mapping[str, Any]) -> None:
        check_saved(saved, {"error", "basis"}, "PowerSGD")
        for index, found in state.matrices.items():
            for matrices in found:
                for number, i in enumerate(matrices.members):
                    name = state.names[index][i]
                    for kind, kept in (("error", matrices.error), ("basis", matrices.basis)):
                        value = saved[kind].get(name)
                        if value is None:
                            continue
                        if value.shape != kept[number].shape:
                            what = f"the saved {kind} of {name!r} has another shape than {tuple(kept[number].shape)}"
                            fix = "give PowerSGD the rank that the checkpoint was saved with"
                            raise UsageError(explain(what, value=tuple(value.shape), fix=fix))
                        kept[number].copy_(value)

    @override
    def start(self, bucket: Bucket, state: PowerState, step: int) -> Work:
        if state.lane is None or not bucket.flat.numel():
            return Done()
        lane = state.lane
        return lane.run(lambda: self._exchange(bucket, state, lane.group, step), [bucket.flat.device])

    def _exchange(self, bucket: Bucket, state: PowerState, group: dist.ProcessGroup, step: int) -> None:
        found, size = state.matrices[bucket.index], group.size()
        then = "with it all matrices of its bucket become NaN on all ranks"
        warn_unless_finite(bucket, in_float32(bucket.flat), step, group.rank(), then)
        whole = [bucket.views[i] for i in state.whole[bucket.index]]
        for matrices in found:
            for view, error, wanted in zip(_views(bucket, matrices), matrices.error, matrices.wanted, strict=True):
                torch.add(_matrix(view), error, out=wanted)
        narrow = [torch.bmm(matrices.wanted, matrices.basis) for matrices in found]
        parts = [*narrow, *(view.to(torch.float32) for view in whole)]
        self._mean(parts, group, size)
        for view, part in zip(whole, parts[len(narrow) :], strict=True):
            view.copy_(part)
        if not found:
            return
        if not all(is_finite(part) for part in narrow):  # all ranks decide alike, because they hold equal bits
            self._spoil(bucket, found)
            return
        bases, kept = zip(*(_orthogonal(part) for part in narrow), strict=True)
        back = [torch.bmm(matrices.wanted.mT, basis) for matrices, basis in zip(found, bases, strict=True)]
        self._mean(back, group, size)
        if not all(is_finite(thin * (2 * self.rank)) for thin in back):  # then products and errors would overflow
            self._spoil(bucket, found)
            return
        for matrices, basis, has_weight, thin in zip(found, bases, kept, back, strict=True):
            matrices.basis.copy_(self._next_basis(thin, has_weight, (bucket.index, step)))
            for number, view in enumerate(_views(bucket, matrices)):
                result = _product(basis[number], thin[number].mT, view)
                torch.sub(matrices.wanted[number], result, out=matrices.error[number])

    def _spoil(self, bucket: Bucket, found: Sequence[_Matrices]) -> None:
        """Set the gradients of all matrices to NaN, because the result is not finite; errors and bases stay unchanged."""
        for matrices in found:
            for i in matrices.members:
                bucket.views[i].fill_(math.nan)

    def _next_basis(self, thin: Tensor, has_weight: Tensor, place: tuple[int, int]) -> Tensor:
        """Return M^T P with columns scaled to length 1; zero columns are replaced by random ones.

        Otherwise one step with a gradient of zeros, or of lower rank, would leave zero columns and so lower the rank for ever.
        """
        lengths = thin.norm(dim=1, keepdim=True)
        follows = has_weight.unsqueeze(1) & (lengths > 0)
        if not bool(follows.all()):
            random = torch.Generator().manual_seed(hash((self.seed, *place)) & (2**63 - 1))
            new = torch.randn(thin.shape, generator=random).to(thin.device)
            thin, lengths = (
                torch.where(follows, thin, new),
                torch.where(follows, lengths, new.norm(dim=1, keepdim=True)),
            )
        return torch.div(thin, lengths)

    def _mean(self, parts: list[Tensor], group: dist.ProcessGroup, size: int) -> None:
        """Average these tensors over the ranks in place, with one collective."""
        flat = torch.cat([part.reshape(-1) for part in parts]).div_(size)
        dist.all_reduce(flat, group=group)
        begin = 0
        for part in parts:
            part.copy_(flat[begin : begin + part.numel()].view(part.shape))
            begin += part.numel()

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> None:
        """Return None: the bytes depend on the shapes. A matrix of m x n is sent as ``rank`` (m + n) float32."""


def _views(bucket: Bucket, matrices: _Matrices) -> list[Tensor]:
    return [bucket.views[i] for i in matrices.members]


def _matrix(view: Tensor) -> Tensor:
    return view.reshape(view.shape[0], -1)


def _product(left: Tensor, right: Tensor, view: Tensor) -> Tensor:
    """Write the product of two matrices to a gradient; return the product in float32."""
    if view.is_contiguous() and view.dtype == torch.float32:
        return torch.mm(left, right, out=view.view(view.shape[0], -1))
    result = torch.mm(left, right)
    view.copy_(result.view(view.shape))
    return result


def _orthogonal(narrow: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis of the columns of each matrix, (matrices, m, rank), and which columns are not zeros.

    See [Note: the basis].
    """
    scale = narrow.abs().amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    narrow = (narrow / scale).to(torch.float64)
    weights, directions = torch.linalg.eigh(torch.bmm(narrow.mT, narrow))
    kept = weights > _LEAST**2 * weights[:, -1:].clamp(min=1e-300)
    lengths = torch.where(kept, weights, 1.0).rsqrt() * kept
    return torch.bmm(narrow, directions * lengths.unsqueeze(1)).to(torch.float32), kept
