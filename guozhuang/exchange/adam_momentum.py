"""Sends Adam's momentum in a lossy code instead of gradients; each rank updates it with its own gradient before sending.

Formula, with n ranks, m Adam's momentum (equal on all ranks), b1 its decay and C the coded exchange of ``compressed.py``:
rank r sends m_r = b1 m + (1 - b1) g_r; M = mean_r C(m_r), and each rank gets g = (M - b1 m) / (1 - b1) as its gradient, from
which Adam's own next step computes M again. Momentum is a mean of many gradients and changes slowly, so a code that is too
coarse for gradients suffices for it. A rank without data sends nothing (its m may be out of date); the others use m for it.
Error: that of the code on M, relative to the size of momentum, not of gradients; in g it is 1 / (1 - b1) times as large.
Traffic: that of the code.
Source: 1-bit Adam, Tang et al. 2021, arXiv:2102.02888; QAdam of Bagua, Gan et al. 2021, arXiv:2107.01499.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from .around import AroundGradients
from .base import Work, check_saved
from .compressed import Compressed, CompressedState
from .numbers import check_floating_point


class HasMomenta(Protocol):
    """The methods of an optimizer that the exchange calls while backward runs; :class:`guozhuang.optim.QAdam` has them."""

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler whose scale the gradients are multiplied by; None if none is known."""
        ...

    def momenta(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor | None, float]]:
        """Return for each parameter its momentum (None if all zeros) and the momentum's decay b1 (0.0 without momentum)."""
        ...

    def loss_scale(self) -> float:
        """Return the factor by which the loss, and so the gradients, are multiplied."""
        ...


@dataclass
class MomentumState:
    """The state of the coded exchange, and whether a loaded checkpoint was saved while a GradScaler scaled the gradients."""

    compressed: CompressedState
    was_scaled: bool = False


@dataclass(frozen=True)
class AdamMomentum(AroundGradients[MomentumState], inner="compressed"):
    """Exchanges Adam's momentum in place of gradients; each rank computes the mean gradients from the mean momentum.

    Args:
        optimizer: holds m, which is equal on all ranks that have data.
        compressed: the coded exchange.

    Raises:
        UsageError: ``compressed`` has a momentum of its own.
    """

    optimizer: HasMomenta
    compressed: Compressed

    def __post_init__(self) -> None:
        if self.compressed.momentum:
            what = "momentum is Adam's here, and the code has another one"
            raise UsageError(explain(what, value=self.compressed.momentum, fix="leave the momentum of Compressed out"))

    @override
    def inner_state(self, state: MomentumState) -> CompressedState:
        return state.compressed

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: MomentumState | None = None
    ) -> MomentumState:
        check_floating_point(buckets, "an exchange of Adam's momentum", takes_complex=False)
        was = (None, False) if before is None else (before.compressed, before.was_scaled)
        return MomentumState(self.compressed.prepare(buckets, group, was[0]), was[1])

    @override
    def state_dict(self, state: MomentumState) -> dict[str, Any]:
        """Return the state of the coded exchange, and whether gradients are scaled. The optimizer saves the momentum."""
        is_scaled = state.was_scaled or self.optimizer.grad_scaler is not None
        return {"compressed": super().state_dict(state), "is_scaled": is_scaled}

    @override
    def load_state_dict(self, state: MomentumState, saved: Mapping[str, Any]) -> None:
        check_saved(saved, {"compressed", "is_scaled"}, "an exchange of Adam's momentum")
        super().load_state_dict(state, saved["compressed"])
        state.was_scaled = bool(saved["is_scaled"])

    @override
    def start(self, bucket: Bucket, state: MomentumState, step: int) -> Work:
        """Start the coded exchange of the bucket, with the current momenta.

        Raises:
            UsageError: the resumed run used a GradScaler, and ``optimizer.grad_scaler`` was not set here.
        """
        optimizer = self.optimizer
        if state.was_scaled and optimizer.grad_scaler is None:
            what = "the run that is resumed scaled its loss, and the scaler is not known here"
            fix = "set `optimizer.grad_scaler = scaler` before the first backward"
            raise UsageError(explain(what, rank=state.compressed.group.rank(), fix=fix))
        around = _Momenta(bucket, optimizer.momenta(bucket.parameters), optimizer.loss_scale())
        return self.compressed.start_around(bucket, state.compressed, step, around)


class _Momenta:
    """Converts a bucket to momenta before coding and back after decoding. The momenta are fixed until the optimizer's step."""

    def __init__(self, bucket: Bucket, momenta: Sequence[tuple[Tensor | None, float]], scale: float) -> None:
        self._places = [(view.shape, view.stride(), view.storage_offset()) for view in bucket.views]
        self._first = bucket.flat.storage_offset()
        self._momenta, self._scale = momenta, scale

    def enter(self, values: Tensor) -> bool:
        """Replace gradients by updated momenta, divided by the loss scale; return False if all gradients are zero."""
        if not bool(values.any()):
            return False
        own = [(1 - beta) / self._scale for _, beta in self._momenta]
        views = self._views(values)
        torch._foreach_mul_(views, own)
        self._add(views, 1.0)
        return True

    def leave(self, values: Tensor, share: float) -> None:
        """Replace the mean momenta by mean gradients, multiplied by the loss scale."""
        views = self._views(values)
        self._add(views, -share)
        torch._foreach_mul_(views, [self._scale / (1 - beta) for _, beta in self._momenta])

    def _views(self, values: Tensor) -> list[Tensor]:
        """Return views of ``values`` by parameter, with the same shapes and strides as the views of the bucket."""
        shift = values.storage_offset() - self._first
        return [values.as_strided(shape, stride, offset + shift) for shape, stride, offset in self._places]

    def _add(self, views: Sequence[Tensor], factor: float) -> None:
        for view, (moment, beta) in zip(views, self._momenta, strict=True):
            if moment is not None:
                view.add_(moment, alpha=factor * beta)
