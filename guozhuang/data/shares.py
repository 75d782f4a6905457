"""How many samples of each global batch a rank gets where the parts are unequal: by fixed shares, or by measured speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from guozhuang.data.batches import SeededIndices, seed_of
from guozhuang.data.sampler import DistributedSampler
from guozhuang.errors import UsageError, explain
from guozhuang.registry import registry


def divide(num_samples: int, shares: Sequence[float], least: int = 0) -> list[int]:
    """Divide samples among ranks in proportion to their shares, by the method of the largest remainder.

    Args:
        num_samples: at least ``least`` for each rank.
        shares: a number above 0 for each rank.
        least: what each rank gets in any case; the ranks with the most give it.

    Returns:
        A number of samples for each rank; together ``num_samples``.
    """
    whole = math.fsum(shares)
    quotas = [num_samples * (share / whole) for share in shares]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda r: (parts[r] - quotas[r], r))
    for rank in by_remainder[: num_samples - sum(parts)]:
        parts[rank] += 1
    while min(parts) < least:
        parts[parts.index(min(parts))] += 1
        parts[parts.index(max(parts))] -= 1
    return parts


class BatchParts:
    """How the ranks divide each global batch into contiguous parts of unequal sizes, in the order of ranks. Fixed here.

    Args:
        parts: samples of each rank in a global batch, at least 1.
        rank: this rank.
        least: a rest of an epoch with fewer samples makes no batch.

    Attributes:
        total: samples of a global batch.
        sizes: the parts of the next batch that no rank has begun to fetch.
    """

    def __init__(self, parts: Sequence[int], rank: int, least: int) -> None:
        self.total, self.sizes, self.rank, self.least = sum(parts), tuple(parts), rank, max(least, 1)
        self._from = [(0, self.sizes)]  # of this pass: from which batch on which parts hold

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.sizes)

    def begin_pass(self) -> None:
        """Count batches from 0 again.

        Raises:
            UsageError: a model is trained in a way that needs equal parts of a batch.
        """
        for each in registry.trained:
            if each.why_equal:
                what = f"the batch is divided into unequal parts, and {each.why_equal}"
                fix = (
                    "leave `shares` and --batch-by out, or choose a strategy that averages gradients, as ddp or sharded"
                )
                raise UsageError(explain(what, value=each.strategy, rank=self.rank, fix=fix))
        self._from = [(0, self.sizes)]

    def num_batches(self, num_samples: int) -> int:
        """Return into how many global batches so many samples of an epoch are cut."""
        return num_samples // self.total + (num_samples % self.total >= self.least)

    def of(self, number: int, num_samples: int) -> Sequence[int]:
        """Return the parts of a batch.

        Args:
            number: which batch of the pass; that of the last change or a later one.
            num_samples: at most ``total``; fewer in the last batch of an epoch, but one for each rank.
        """
        sizes = next(sizes for first, sizes in reversed(self._from) if first <= number)
        return sizes if num_samples == self.total else divide(num_samples, sizes, least=1)

    def size_of(self, number: int, num_left: int) -> int:
        """Return how many samples a batch has, of which ``num_left`` of the epoch are left: at least one for each rank."""
        return max(min(num_left, self.total), self.num_ranks)

    def weight(self, number: int, num_left: int) -> float:
        """Return the weight of this rank's gradient of a batch; see [Note: unequal parts] in registry.py."""
        num_samples = self.size_of(number, num_left)
        return self.of(number, num_samples)[self.rank] * self.num_ranks / num_samples

    def begins(self, number: int) -> None:
        """Do what comes before a batch is fetched and handed out: nothing here."""

    def ends(self, number: int, num_left: int) -> None:
        """Do what comes when the script asks for the next batch: nothing here."""

    def state(self) -> dict[str, list[int]]:
        """Return what a saved state holds of the parts: nothing here, where the script gives them again."""
        return {}

    def load(self, sizes: object) -> None:
        """Go on with the parts of a saved state: nothing here."""


class DividedBatches:
    """An iterable over this rank's parts of the global batches of the current pass, as lists of indices; it changes no state.

    The places of a global batch in the order of the epoch are those that it has for one process: ranks take them one after
    another, each as many as its part. If the last batch has fewer samples than there are ranks, samples from the beginning
    of the order fill it up.

    Args:
        sampler: gives the whole order of an epoch.
        parts: how the ranks divide a batch.
    """

    def __init__(self, sampler: DistributedSampler, parts: BatchParts) -> None:
        self.sampler, self.parts = sampler, parts

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on all ranks."""
        return self.parts.num_batches(len(self.sampler))

    def __iter__(self) -> Iterator[SeededIndices]:
        """Return an iterator over lists of sample indices, one per batch; this call fixes the epoch, not the first list."""
        return self._batches(self.sampler.epoch, self.sampler.progress.start)

    def _batches(self, epoch: int, start: int) -> Iterator[SeededIndices]:
        order, parts = self.sampler.indices(epoch, start), self.parts
        for number in itertools.count():
            whole = list(itertools.islice(order, parts.total))
            if len(whole) < parts.least:
                return
            if (missing := parts.num_ranks - len(whole)) > 0:
                whole += itertools.islice(itertools.cycle(self.sampler.indices(epoch)), missing)
            sizes = parts.of(number, len(whole))
            first = sum(sizes[: parts.rank])
            batch = SeededIndices(whole[first : first + sizes[parts.rank]])
            batch.seed = seed_of(self.sampler.seed, epoch, start + number * parts.total, parts.rank)
            yield batch


def check_shares(shares: Sequence[float] | str, num_ranks: int, rank: int, total: int) -> list[int]:
    """Return the parts of a global batch of ``total`` samples.

    Raises:
        UsageError: the shares are no numbers above 0, one for each rank, or the part of a rank would be 0.
    """
    fix = f'pass a number above 0 for each of the {num_ranks} ranks, as in shares=[3, 1], or shares="speed"'
    try:
        found = [] if isinstance(shares, str) else [float(share) for share in shares]
    except (TypeError, ValueError):
        found = []
    if not found:
        what = '`shares` is neither "speed" nor a list of numbers'
        raise UsageError(explain(what, value=shares, rank=rank, fix=fix))
    if len(found) != num_ranks:
        what = f"`shares` holds {len(found)} numbers, and {num_ranks} ranks share the data"
        raise UsageError(explain(what, value=shares, rank=rank, fix=fix))
    if not all(math.isfinite(share) and share > 0 for share in found):
        raise UsageError(
            explain("`shares` holds a number that is not above 0 and finite", value=shares, rank=rank, fix=fix)
        )
    parts = divide(total, found)
    if 0 in parts:
        enough = math.ceil(math.fsum(found) / min(found))
        what = f"with these shares rank {parts.index(0)} would get no sample of a global batch of {total}"
        fix = f"a global batch of {enough} samples is enough; or give that rank a greater share"
        raise UsageError(explain(what, value=shares, rank=rank, fix=fix))
    return parts


#: The share of a step's time that a change of the parts must save: at once, and where two decisions in succession say so.
CLEAR, SLIGHT = 0.10, 0.03


def choose(sizes: Sequence[int], sample_s: Sequence[float], was_near: bool = False) -> tuple[list[int], bool]:
    """Decide how the ranks divide the next global batches.

    A rank's part follows its speed, as if its time were in proportion to its samples. Where a part of it is not, the parts
    come closer to equal times with each decision. What a change saves must be clear, or be seen twice, so that noise does not
    change the parts to and fro.

    Args:
        sizes: the present parts.
        sample_s: seconds that each rank has needed for one of its samples, without waits for others.
        was_near: whether the last decision saw that a change would save a little.

    Returns:
        The new parts, at least 1 each, or the present ones; and whether a change would have saved a little. A pure function:
        equal arguments give equal results on all ranks.
    """
    if not all(math.isfinite(each) and each > 0 for each in sample_s):
        return list(sizes), False

    def step_s(parts: Sequence[int]) -> float:
        return max(part * each for part, each in zip(parts, sample_s, strict=True))

    found = divide(sum(sizes), [1 / each for each in sample_s], least=1)
    saved = 1 - step_s(found) / step_s(sizes)
    if saved > (SLIGHT if was_near else CLEAR):
        return found, False
    return list(sizes), saved > SLIGHT
