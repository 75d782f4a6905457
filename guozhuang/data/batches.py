"""The indices of each batch of a rank that has an equal part of the order of an epoch; and the seeds of batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from guozhuang.data.sampler import DistributedSampler


class BatchSampler:
    """An iterable over the batches of a sampler's current pass, each a list of sample indices; iterating changes no state.

    Args:
        sampler: gives indices, or whole batches.
        batch_size: indices in a batch; None: what the sampler gives is handed on as it is.
        drop_last: leave out a last batch that is smaller.
    """

    def __init__(self, sampler: DistributedSampler, batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return num_batches(len(self.sampler), self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over lists of sample indices, one per batch; this call fixes the epoch, not the first list."""
        return self._batches(self.sampler.epoch, self.sampler.progress.start)

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        # As a generator it makes indices at the first ``next`` only: with workers torch calls iter() twice, and uses one.
        if self.batch_size is None:
            yield from self.sampler.indices(epoch, start)
            return
        place, rank = start, self.sampler.rank
        batch = SeededIndices()
        for index in self.sampler.indices(epoch, start):
            batch.append(index)
            if len(batch) == self.batch_size:
                batch.seed = seed_of(self.sampler.seed, epoch, place, rank)
                yield batch
                batch = SeededIndices()
                place += self.batch_size * self.sampler.num_replicas
        if batch and not self.drop_last:
            batch.seed = seed_of(self.sampler.seed, epoch, place, rank)
            yield batch


class SeededIndices(list[int]):
    """The indices of a batch. A worker process that iterates over them seeds its generators first.

    [Note: seeds of batches] What a worker draws for a batch must not depend on which worker it is, on how many batches it
    made before, or on whether the run was resumed in between. So its generators are seeded anew for each batch, from the
    loader's seed, the epoch, the batch's place in it, and the rank. The list of indices is the one thing of a batch that
    reaches the worker before the dataset does; torch's fetcher iterates over it, and so does a dataset's ``__getitems__``.
    Outside of workers nothing is seeded: there, the generators are the script's own, and a checkpoint holds them.

    Attributes:
        seed: the seed of the batch.
    """

    seed = 0

    def __iter__(self) -> Iterator[int]:
        """Seed the generators of torch, numpy and ``random`` if this is a worker process; iterate over the indices."""
        if get_worker_info() is not None:
            torch.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed)
        return super().__iter__()


def num_batches(num_samples: int, batch_size: int | None, drop_last: bool) -> int:
    """Return into how many batches a rank's samples are cut; with ``batch_size=None`` each makes one."""
    batch_size = batch_size or 1
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def seed_of(seed: int, epoch: int, place: int, rank: int) -> int:
    """Return the seed that a place in an epoch has on a rank, for a loader with the seed ``seed``."""
    entropy = [seed % 2**64, epoch % 2**64, place]
    # torch's CPU generator uses 32 bits of a seed; the rank is added after mixing, so that two ranks never have the same.
    return (int(np.random.SeedSequence(entropy).generate_state(1)[0]) + rank) % 2**32
