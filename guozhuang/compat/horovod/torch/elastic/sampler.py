"""A sampler that divides an epoch's samples among ranks, also when ranks are added or lost in the middle of the epoch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from ..mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the samples of an epoch that have not been processed yet among the ranks; each rank gets equally many.

    After the ranks have changed (``reset``) the remaining samples are divided again. Pass the sampler to ``TorchState``, which
    calls ``reset``, and record each batch that was processed::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)

        for number, batch in enumerate(loader):
            ...                                   # one training step
            sampler.record_batch(number, 32)
            state.commit()
        sampler.set_epoch(sampler.epoch + 1)      # at the end of an epoch

    Each sample comes once in an epoch, on one rank, also when ranks change; only if the remaining samples do not divide by the
    number of ranks, some are repeated at the end, so that all ranks have equally many. It differs from Horovod's sampler in
    that ``processed_num`` never exceeds the number of samples, even if the last batch is smaller than was recorded or contains
    repeats, and in that fewer samples than ranks may remain. In all other cases it behaves the same.

    The order is that of Python's ``random.Random(seed + epoch).shuffle``.

    Args:
        dataset: the data set; only its length is used, which must be the same on all ranks.
        shuffle: whether samples come in a random order, another one in each epoch.
        seed: seed of the random order; the same on all ranks.

    Attributes:
        epoch: number of the epoch, see ``set_epoch``.
        processed_num: number of samples of the epoch that all ranks together have processed.
        num_replicas, rank: number of ranks, and rank of this process.
        remaining_indices: indices of all samples that were not processed at the last ``reset``, in their order.
        num_samples: number of these samples that this rank gets.
        total_size: number of samples that all ranks get, including repeats.

    Raises:
        ValueError: Horovod has not been initialized.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas, self.rank = 1, 0
        self.remaining_indices: list[int] = []
        self.num_samples = self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no sample has been processed. Call it at the end of the epoch before, on every rank.

        Args:
            epoch: number of the epoch.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch. Call it after each step, on every rank, before ``state.commit()``.

        Args:
            batch_idx: number of the batch; not used.
            batch_size: number of samples of the batch on each rank; for a smaller last batch the usual size may be given, too.
        """
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch for ``load_state_dict``; it is the same on every rank."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position that ``state_dict`` returned, with the present ranks."""
        self.epoch, self.processed_num = int(state_dict["epoch"]), int(state_dict["processed_num"])
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the indices of this rank's samples."""
        shared = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(shared, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self.num_samples
