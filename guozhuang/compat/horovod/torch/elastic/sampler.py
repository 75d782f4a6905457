"""Which samples each rank gets, when ranks come and go in the middle of an epoch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from ..mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Share out the samples of an epoch that have not been seen yet; each rank gets equally many.

    After the ranks have changed (``reset``) what is left is shared out anew. Give it to ``TorchState``, which does that, and
    tell it what was seen::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)

        for number, batch in enumerate(loader):
            ...                                   # one training step
            sampler.record_batch(number, 32)
            state.commit()
        sampler.set_epoch(sampler.epoch + 1)      # at the end of an epoch

    Each sample comes once in an epoch, on one rank, whatever comes and goes; only where what is left does not divide by the
    number of ranks, some come once more at the end, so that all ranks have equally many. It differs from Horovod's in that
    ``processed_num`` never counts beyond the end of the data, also where the last batch is smaller than it was said to be or
    partly made of such repeats, and in that fewer samples than ranks may be left. With other data it behaves the same.

    The order is that of Python's ``random.Random(seed + epoch).shuffle``.

    Args:
        dataset: what is sampled; only its length counts, which must be the same on all ranks.
        shuffle: samples come in a random order, another one in each epoch.
        seed: of the order; the same on all ranks.

    Attributes:
        epoch: as told by ``set_epoch``.
        processed_num: how many samples of the epoch all ranks together have seen.
        num_replicas, rank: how many ranks there are, and which one this is.
        remaining_indices: the samples that have not been seen, of all ranks, in their order.
        num_samples: how many this rank gets of them.
        total_size: how many all ranks get, with those that come once more.

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
        """Begin an epoch: nothing of it has been seen. Call it at the end of the one before, on every rank.

        Args:
            epoch: its number.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has seen a further batch. Call it after each step, on every rank, before ``state.commit()``.

        Args:
            batch_idx: which one; it does not matter.
            batch_size: how many samples it has on each rank; of the last one, the size of the others will do too.
        """
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes: how far the epoch is. The same on every rank."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the ranks there are now."""
        self.epoch, self.processed_num = int(state_dict["epoch"]), int(state_dict["processed_num"])
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the ranks there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """The samples of this rank that are left, by their indices."""
        shared = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(shared, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        """How many those are."""
        return self.num_samples
