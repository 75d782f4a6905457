"""Scaling curves of a strategy over numbers of ranks, and what follows from them: batches, time and money."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from guozhuang.cost.laws import (
    CriticalBatch,
    amdahl,
    gustafson,
    karp_flatt,
    rental,
    share_on_n,
    smallest_batch,
    strong_efficiency,
    weak_efficiency,
)
from guozhuang.cost.prediction.predict import Prediction

#: ``step(num_ranks, batch_size)``: the prediction for so many samples of a rank's step.
Step = Callable[[int, int], Prediction]
KEPT = (0.8, 0.9)
_LARGEST_BATCH = 1 << 14


@dataclass(frozen=True)
class CurvePoint:
    """A strategy on a number of ranks.

    Attributes:
        num_ranks: n.
        weak_s: a step with the same batch of each rank as on one; weak_efficiency = t(1, b) / t(n, b).
        strong_s: a step with the same batch of all ranks together; strong_efficiency = t(1, B) / (n t(n, B/n)); None where the
            ranks do not divide that batch.
        bounds: the weak step if everything overlapped, and if nothing did.
        serial_share: Karp and Flatt's, of the strong speed-up: the same for all n if work is serial, growing if it is
            communication; None for one rank, and where there is no ``strong_s``.
        amdahl: the speed-up by Amdahl's law, with the serial share of the fewest ranks above one.
        gustafson: by Gustafson's law, with the share measured on n that belongs to the same work.
        smallest_batches: samples that a rank needs to keep each share in :data:`KEPT` of its speed; None if no batch is enough.
        seconds: how long ``samples`` take, weak; None if it was not asked.
        money: what they cost; None if no price was given.
        seconds_to_loss: the time to one loss, in steps of the smallest number of steps that any batch needs; None without noise
            scale.
    """

    num_ranks: int
    weak_s: float
    weak_efficiency: float
    bounds: tuple[float, float]
    strong_s: float | None
    strong_efficiency: float | None
    serial_share: float | None
    amdahl: float | None
    gustafson: float | None
    smallest_batches: tuple[int | None, ...]
    seconds: float | None
    money: float | None
    seconds_to_loss: float | None


@dataclass(frozen=True)
class Curve:
    """The points of a strategy; ``batch_size`` is that of a rank (weak), ``global_batch`` that of all ranks (strong)."""

    name: str
    batch_size: int
    global_batch: int
    points: tuple[CurvePoint, ...]


def curve(
    name: str,
    ranks: tuple[int, ...],
    batch_size: int,
    global_batch: int,
    step: Step,
    *,
    samples: float | None = None,
    price: float | None = None,
    noise_scale: float | None = None,
) -> Curve:
    """Return the curves of a strategy.

    Args:
        name: of its row.
        ranks: the numbers of ranks, in ascending order.
        batch_size: samples of a rank, for weak scaling.
        global_batch: samples of all ranks, for strong scaling.
        step: predicts.
        samples: a number of samples to train on; None: no time and money.
        price: of a rank for an hour.
        noise_scale: the gradient noise scale in samples.
    """
    alone_s, alone_strong_s = step(1, batch_size).step_s, step(1, global_batch).step_s
    strong = {n: step(n, global_batch // n).step_s for n in ranks if global_batch % n == 0}
    serial = {n: karp_flatt(alone_strong_s / each, n) for n, each in strong.items() if n > 1}
    share = min(1.0, max(0.0, 1 - serial[min(serial)])) if serial else None
    points = []
    for n in ranks:
        weak = step(n, batch_size)
        weak_s = weak.step_s
        seconds = None if samples is None else samples / (n * batch_size) * weak_s
        points.append(
            CurvePoint(
                num_ranks=n,
                weak_s=weak_s,
                weak_efficiency=weak_efficiency(alone_s, weak_s),
                bounds=weak.bounds,
                strong_s=strong.get(n),
                strong_efficiency=strong_efficiency(alone_strong_s, strong[n], n) if n in strong else None,
                serial_share=serial.get(n),
                amdahl=None if share is None else amdahl(share, n),
                gustafson=None if share is None else gustafson(share_on_n(share, n), n),
                smallest_batches=tuple(_smallest(kept, n, step) for kept in KEPT),
                seconds=seconds,
                money=None if seconds is None or price is None else rental(seconds, n, price),
                seconds_to_loss=None
                if noise_scale is None
                else CriticalBatch(noise_scale).seconds(n * batch_size, weak_s),
            )
        )
    return Curve(name, batch_size, global_batch, tuple(points))


def _smallest(kept: float, num_ranks: int, step: Step) -> int | None:
    """Return the smallest batch of a rank that keeps an efficiency; the null model of each batch is one rank alone."""
    return smallest_batch(
        kept, lambda batch: step(1, batch).step_s, lambda batch: step(num_ranks, batch).step_s, _LARGEST_BATCH
    )
