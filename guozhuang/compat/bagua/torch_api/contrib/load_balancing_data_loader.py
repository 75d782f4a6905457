"""Samplers that give the ranks samples of like complexity in each step, such as sentences of like length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from guozhuang.errors import UsageError, explain

from ..communicators import place


class LoadBalancingDistributedSampler(Sampler[int]):
    """Sorts samples by complexity, cuts them into chunks of one sample per rank, and takes this rank's place of each chunk.

    All ranks have equally many samples: the last chunk is filled up from the beginning, or left out.

    Args:
        dataset: has a length, and is indexed from 0.
        complexity_fn: returns the complexity of a sample, a number.
        num_replicas: number of ranks; None: that of the default group, or of the launcher before it is there.
        rank: this rank; None: that in the default group, or of the launcher.
        shuffle: order the chunks at random, by seed and epoch, and add noise of ``random_level`` to the complexities.
        seed: equal on all ranks.
        drop_last: leave out the last chunk if it is not full.
        random_level: 0 for no noise, 1 for noise as large as the range of complexities.

    Raises:
        UsageError: (a ValueError) ``rank`` or ``random_level`` is out of range, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.num_replicas = place()[1] if num_replicas is None else num_replicas
        self.rank = place()[0] if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            what = f"rank is a number from 0 to {self.num_replicas - 1}, below num_replicas"
            raise UsageError(explain(what, value=self.rank, fix="give both, or none"))
        if not 0 <= random_level <= 1:
            fix = "give 0 for no noise"
            raise UsageError(explain("random_level is a number from 0 to 1", value=random_level, fix=fix))
        num = len(dataset)
        if num == 0:
            raise UsageError(explain("the dataset is empty", value=dataset, fix="give one with samples"))
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        cuts = drop_last and num % self.num_replicas
        self.num_samples = math.ceil((num - self.num_replicas) / self.num_replicas if cuts else num / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._complexities = torch.tensor([complexity_fn(dataset[i]) for i in range(num)])
        spread = float(self._complexities.max() - self._complexities.min())
        self._noise = int(spread * random_level + 1)

    def shuffle_chunks(self) -> tuple[list[list[int]], list[int]]:
        """Return the chunks of indices, in rising order of complexity, and the order in which chunks are taken."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        complexities = self._complexities
        if self.shuffle:
            complexities = complexities + torch.randint(self._noise, complexities.shape, generator=generator)
        indices = torch.sort(complexities, stable=True).indices.tolist()
        whole = [indices[i % len(indices)] for i in range(self.total_size)]
        chunks = [whole[i : i + self.num_replicas] for i in range(0, self.total_size, self.num_replicas)]
        order = torch.randperm(len(chunks), generator=generator).tolist() if self.shuffle else list(range(len(chunks)))
        return chunks, order

    def of_rank(self, rank: int) -> list[int]:
        """Return the indices that a rank draws in this epoch, in order."""
        chunks, order = self.shuffle_chunks()
        return [chunks[i][rank] for i in order]

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_rank(self.rank))

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which changes the order under ``shuffle``."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of any sizes from a :class:`LoadBalancingDistributedSampler`, equally many on all ranks.

    Args:
        sampler: each rank computes the batches of all ranks from it; it does not drop samples.
        batch_fn: makes a list of batches from a list of indices.
        drop_last: ranks with more batches leave out the last ones; else the others repeat theirs from the first one on.

    Raises:
        UsageError: (a ValueError) another sampler, one with ``drop_last``, or a ``batch_fn`` that makes no batch.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            fix = "make one of the dataset"
            raise UsageError(explain("sampler is a LoadBalancingDistributedSampler", value=sampler, fix=fix))
        if sampler.drop_last:
            raise UsageError(
                explain("the sampler drops samples", value="drop_last=True", fix="give it drop_last=False")
            )
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._make()

    def _make(self) -> None:
        of_ranks = [list(self.batch_fn(self.sampler.of_rank(rank))) for rank in range(self.sampler.num_replicas)]
        counts = [len(batches) for batches in of_ranks]
        if not min(counts):
            what = "batch_fn makes no batch of a rank's indices"
            raise UsageError(explain(what, value=counts, rank=self.sampler.rank, fix="return at least one batch"))
        self.total_batch = min(counts) if self.drop_last else max(counts)
        mine = of_ranks[self.sampler.rank]
        self._batches = [mine[i % len(mine)] for i in range(self.total_batch)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; batches of all ranks are computed again."""
        self.sampler.set_epoch(epoch)
        self._make()
