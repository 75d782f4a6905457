"""Which samples of a stream does this rank train on? ``StridedStream``: every rank reads all and keeps every n-th."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from guozhuang.data.progress import EpochPass, Progress, check_state
from guozhuang.data.sampler import Ends, length_of, share_size
from guozhuang.errors import UsageError, explain


class StridedStream(IterableDataset[Any]):
    """A rank's share of an ``IterableDataset`` that yields its whole stream to whoever iterates it.

    Rank r of n keeps samples r, r + n, r + 2n, ... of the stream; of the batches these make, worker w of W makes every
    W-th, so that the batches and their order do not depend on the number of workers. Each rank and each worker
    therefore reads the whole stream: that repeats the reading, not the training. The stream must be the same, in the
    same order, for all of them, and must not cut itself in shares by rank or worker, which would lose samples.

    If the dataset has ``set_epoch``, it is called with the epoch where the stream is read (in the worker) before each
    pass. A resumed pass reads and drops what was consumed. Epochs follow the rules of ``DistributedSampler``, except
    that a pass is full only when it ran out.

    Args:
        dataset: the stream.
        num_replicas: number of ranks that share.
        rank: this one.
        batch_size: samples that a worker puts in one batch.
        ends: as in ``DistributedSampler``; "pad" keeps the first ``num_replicas`` samples of the pass in memory.
    """

    def __init__(
        self, dataset: IterableDataset[Any], num_replicas: int, rank: int, batch_size: int, ends: Ends
    ) -> None:
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.ends: Ends = ends
        self.progress = Progress(num_replicas)
        self._batch_size = batch_size
        # Epoch and start of the pass, in shared memory: persistent workers hold an old copy of all the rest.
        self._where = torch.zeros(2, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one chosen for the next."""
        return self.progress.epoch

    def __len__(self) -> int:
        """Samples of a whole epoch on this rank.

        Raises:
            TypeError: the dataset does not tell its length.
        """
        try:
            length = length_of(self.dataset)
        except UsageError:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its share has none") from None
        return share_size(length, self.num_replicas, self.rank, self.ends)

    def smallest_share(self) -> None:
        """Not known of a stream."""
        return None

    def begin(self, full_at: int | None) -> EpochPass:
        """Begin a pass and return its counter."""
        run = self.progress.begin(full_at)
        self._where[0], self._where[1] = self.progress.epoch, self.progress.start
        return run

    def __iter__(self) -> Iterator[Any]:
        """This worker's samples of the pass that was begun last."""
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        epoch, start = self._where.tolist()
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        for turn, sample in self._share(start):
            if turn // self._batch_size % num_workers == worker_id:
                yield sample

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; every rank must choose the same."""
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: plain values, equal on ranks that are in step; of "uneven" ends save rank 0's."""
        return {
            "epoch": self.progress.epoch,
            "consumed": self.progress.consumed(),
            "finished": self.progress.ended,
            **_IDENTITY,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved on any number of ranks; every rank loads the same state.

        Raises:
            UsageError: the state is not that of a stream.
        """
        self.progress.load(*check_state(state, _IDENTITY, self.rank))

    def _share(self, start: int) -> Iterator[tuple[int, Any]]:
        """Yield (how many this rank got before, sample)."""
        first: list[Any] = []  # what "pad" repeats
        held: list[Any] = []  # this rank's sample of a group of num_replicas that is not complete yet
        num_read = 0
        for num_read, sample in enumerate(self.dataset, 1):
            place = num_read - 1
            if self.ends == "pad" and len(first) < self.num_replicas:
                first.append(sample)
            if place < start:
                continue
            turn, owner = divmod(place - start, self.num_replicas)
            if owner == self.rank:
                held.append(sample)
            # With "drop" a sample is given once every rank has one.
            if held and (self.ends != "drop" or owner == self.num_replicas - 1):
                yield turn, held.pop()
        turn, over = divmod(num_read - start, self.num_replicas)
        if self.ends == "pad" and num_read > start and 0 < over <= self.rank:
            yield turn, first[(start + turn * self.num_replicas + self.rank) % num_read]


_IDENTITY: Mapping[str, Any] = {"stream": True}


def check_stream(stride_stream: bool, shuffle: bool, dataset: IterableDataset[Any]) -> None:
    """Raise ``UsageError`` unless the user has said that the stream may be strided, and does not ask to shuffle it."""
    name = type(dataset).__name__
    if not stride_stream:
        what = "An IterableDataset does not say whether each rank and worker gets the whole stream or a part of it"
        fix = (
            "if iterating it gives the whole stream to everyone, pass stride_stream=True and each rank keeps every "
            "n-th sample; if it cuts itself in shares, use torch.utils.data.DataLoader for it"
        )
        raise UsageError(explain(what, value=name, fix=fix))
    if shuffle:
        what = "An IterableDataset cannot be shuffled by index"
        raise UsageError(explain(what, value=name, fix="pass shuffle=False and shuffle inside the dataset"))
