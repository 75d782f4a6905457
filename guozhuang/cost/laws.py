"""The laws of parallel training: speed-up, efficiency, batches, failures, money. Plain functions of numbers.

A speed-up compares one training on one rank with the same training on n. Two kinds of efficiency exist, and no column of a
table may hold both: the *weak* one keeps the batch of a rank, the *strong* one keeps the batch of all ranks together.
Source of the formulas: the papers that the functions name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain


def _at_least(name: str, value: float, least: float) -> float:
    if not value >= least or math.isinf(value):
        raise UsageError(explain(f"{name} is {least:g} or more", value=value, fix="give such a number"))
    return value


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise UsageError(explain(f"{name} is a share, from 0 to 1", value=value, fix="divide a percentage by 100"))
    return value


def amdahl(parallel_share: float, num_ranks: float) -> float:
    """Return Amdahl's speed-up of a fixed amount of work: 1/((1-f) + f/n); at ``math.inf`` ranks its limit, 1/(1-f).

    Args:
        parallel_share: f, the part of the time *on one rank* that ranks can share (0 to 1).
        num_ranks: n.
    """
    serial = 1 - _share("the parallel share", parallel_share)
    parallel = parallel_share / (num_ranks if math.isinf(num_ranks) else _at_least("the number of ranks", num_ranks, 1))
    return math.inf if serial + parallel == 0 else 1 / (serial + parallel)


def gustafson(parallel_share_on_n: float, num_ranks: float) -> float:
    """Return Gustafson's speed-up of work that grows with the ranks: (1-f) + f·n.

    Args:
        parallel_share_on_n: f, the part of the time *on n ranks* that is spent in parallel; not Amdahl's, which is
            measured on one rank. :func:`share_on_n` converts one into the other.
        num_ranks: n.
    """
    share = _share("the parallel share", parallel_share_on_n)
    return (1 - share) + share * _at_least("the number of ranks", num_ranks, 1)


def share_on_n(parallel_share: float, num_ranks: float) -> float:
    """Return Gustafson's share, of the time on n ranks, for Amdahl's share, of the time on one.

    With it, :func:`amdahl` and :func:`gustafson` give the same speed-up.
    """
    return parallel_share / _at_least("the number of ranks", num_ranks, 1) * amdahl(parallel_share, num_ranks)


def share_on_one(parallel_share_on_n: float, num_ranks: float) -> float:
    """Return Amdahl's share, of the time on one rank, for Gustafson's share, of the time on n."""
    return parallel_share_on_n * num_ranks / gustafson(parallel_share_on_n, num_ranks)


def karp_flatt(speed_up: float, num_ranks: float) -> float:
    """Return the serial share that a measured speed-up S on n ranks stands for: (1/S - 1/n)/(1 - 1/n).

    If it is the same for all n, the program has serial work (Amdahl). If it grows with n, communication costs the time.
    It is negative if the speed-up is larger than n.
    """
    if not num_ranks > 1:
        raise UsageError(explain("the serial share is measured on two ranks or more", value=num_ranks, fix="add ranks"))
    if not speed_up > 0:
        raise UsageError(explain("a speed-up is larger than 0", value=speed_up, fix="give time on one / time on n"))
    return (1 / speed_up - 1 / num_ranks) / (1 - 1 / num_ranks)


def universal_scalability(num_ranks: float, contention: float, coherence: float) -> float:
    """Return the speed-up of Gunther's universal scalability law: n/(1 + σ(n-1) + κn(n-1)).

    It is here to be compared with, and no prediction uses it: its two free numbers, fitted to three points, predict worse
    than one number on the cost of a ring (docs/scaling.md has the figures).
    """
    n = _at_least("the number of ranks", num_ranks, 1)
    return n / (1 + contention * (n - 1) + coherence * n * (n - 1))


def weak_efficiency(one_rank_s: float, step_s: float) -> float:
    """Return t(1, b)/t(n, b): the batch of *a rank* is the same in both times."""
    return one_rank_s / step_s


def strong_efficiency(one_rank_s: float, step_s: float, num_ranks: int) -> float:
    """Return t(1, B)/(n·t(n, B/n)): the batch of *all ranks together* is the same in both times."""
    return one_rank_s / (num_ranks * step_s)


def isoefficiency_batch(efficiency: float, exposed_s: float, sample_s: float, fixed_s: float = 0.0) -> float:
    """Return the batch of a rank at which data parallelism has a given weak efficiency, if what is exposed is fixed.

    A rank needs ``fixed_s + b·sample_s`` alone and ``exposed_s`` more among n ranks, so E is kept from
    b = (E/(1-E)·exposed - fixed)/sample on. A ring's exposed time has a part that hardly grows with n (bandwidth) and a
    part that grows like n (latency): the batch that is needed does the same.

    Args:
        efficiency: E, between 0 and 1, both excluded.
        exposed_s: seconds of communication that no computation hides, at this number of ranks.
        sample_s: seconds of one more sample on one rank.
        fixed_s: seconds of a step that do not depend on the batch.

    Returns:
        Samples a rank, as a real number, 0 or more.
    """
    if not 0 < efficiency < 1:
        raise UsageError(explain("an efficiency to keep is between 0 and 1", value=efficiency, fix="give 0.8 or 0.9"))
    return max(0.0, (efficiency / (1 - efficiency) * exposed_s - fixed_s) / sample_s)


def smallest_batch(
    efficiency: float, alone_s: Callable[[int], float], step_s: Callable[[int], float], largest: int = 1 << 20
) -> int | None:
    """Return the smallest batch of a rank that keeps a weak efficiency, for any two models of the step.

    Args:
        efficiency: the least t(1, b)/t(n, b).
        alone_s: seconds of a step of one rank alone, for a batch.
        step_s: seconds of a step among n ranks, for the same batch of each; the efficiency must not fall with the batch.
        largest: the largest batch that is tried.

    Returns:
        The batch, or None if ``largest`` is not enough.
    """

    def enough(batch: int) -> bool:
        return weak_efficiency(alone_s(batch), step_s(batch)) >= efficiency

    low, high = 0, 1
    while not enough(high):
        if high >= largest:
            return None
        low, high = high, min(2 * high, largest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class CriticalBatch:
    """How steps and samples to one loss depend on the batch (McCandlish and others, 2018).

    Below ``noise_batch`` a batch twice as large needs nearly half as many steps; above it, hardly fewer.

    Attributes:
        noise_batch: the noise scale, in samples. It grows while a model trains: say at which step it was measured.
        least_steps: steps to the loss with a batch of any size.
    """

    noise_batch: float
    least_steps: float = 1.0

    def steps(self, batch: float) -> float:
        """Return the steps to the loss with a batch of ``batch`` samples (of all ranks together)."""
        return self.least_steps * (1 + self.noise_batch / batch)

    def samples(self, batch: float) -> float:
        """Return the samples to the loss; at least ``least_steps * noise_batch`` of them, with tiny batches."""
        return batch * self.steps(batch)

    def seconds(self, batch: float, step_s: float) -> float:
        """Return the time to the loss if a step of this batch takes ``step_s``: the time to minimise, unlike samples/s."""
        return self.steps(batch) * step_s


def noise_scale_of(own: float, averaged: float, num_ranks: int, batch_size: float) -> float | None:
    """Return the gradient noise scale tr Σ/|G|² in samples: the ``noise_batch`` of :class:`CriticalBatch`.

    The squared norms are means over steps and ranks: numerator and denominator have no bias, and their ratio in a single
    step is useless (McCandlish and others, 2018, appendix A.1).

    Args:
        own: mean squared norm of the gradient of ``batch_size`` samples.
        averaged: mean squared norm of the average of ``num_ranks`` such gradients, of which there are at least two.
        num_ranks: how many gradients are averaged.
        batch_size: samples behind each.

    Returns:
        The noise scale; infinity where the noise hides the gradient, None if a norm is not finite.
    """
    if not (math.isfinite(own) and math.isfinite(averaged)):
        return None
    gradient = (num_ranks * averaged - own) / (num_ranks - 1)
    noise = (own - averaged) * batch_size / (1.0 - 1.0 / num_ranks)
    if noise <= 0.0:
        return 0.0
    return noise / gradient if gradient > 0.0 else math.inf


def training_seconds(
    num_samples: float, batch: float, step_s: float, useful: float = 1.0, other_s: float = 0.0
) -> float:
    """Return the time of a training: steps of ``batch`` samples, then what else it does.

    Args:
        num_samples: samples of the whole training.
        batch: samples of all ranks together in a step.
        step_s: seconds of a step.
        useful: the part of the time in which steps are made that last (:func:`useful_share`).
        other_s: evaluations and whatever is not a step.
    """
    return math.ceil(num_samples / batch) * step_s / useful + other_s


def mean_time_between_failures(of_one_s: float, num_ranks: int) -> float:
    """Return the mean time between failures of n ranks, any of which ends a step of all: it falls like 1/n."""
    return of_one_s / num_ranks


def young_interval(checkpoint_s: float, mean_time_s: float) -> float:
    """Return the seconds between two checkpoints that lose least: √(2·cost·MTBF) (Young, 1974).

    Args:
        checkpoint_s: seconds for which a checkpoint stops the training.
        mean_time_s: mean time between failures of all ranks together.
    """
    return math.sqrt(2 * checkpoint_s * mean_time_s)


def useful_share(checkpoint_s: float, interval_s: float, mean_time_s: float, restart_s: float = 0.0) -> float:
    """Return the part of the time that is neither checkpoint nor repeated nor restart: 1 - c/τ - τ/(2·MTBF) - r/MTBF.

    An approximation for intervals well below the mean time between failures; 0 where it would be negative.
    """
    return max(0.0, 1 - checkpoint_s / interval_s - interval_s / (2 * mean_time_s) - restart_s / mean_time_s)


def rental(seconds: float, num_devices: int, price_per_hour: float) -> float:
    """Return the price of a training, in the currency of ``price_per_hour``, which is that of one device."""
    return seconds / 3600 * num_devices * price_per_hour
