"""Choose the samples of a rank in a stream, which every rank reads whole (``StridedStream``) or which shares itself."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from guozhuang.data.progress import EpochPass, Progress, check_state
from guozhuang.data.sampler import Ends, length_of, share_size
from guozhuang.errors import UsageError, explain


class StreamShare(IterableDataset[Any], abc.ABC):
    """The base of a rank's share of an ``IterableDataset``: the position in its epoch, also for the process that reads it.

    Epochs follow the rules of ``DistributedSampler``, except that a pass is full only if it ran out. If the dataset has
    ``set_epoch``, it is called with the epoch before each pass, in the process that reads the stream (the worker).

    Args:
        dataset: the stream.
        num_replicas: number of ranks that share.
        rank: number of this rank.
        ends: as in ``DistributedSampler``.
    """

    def __init__(self, dataset: IterableDataset[Any], num_replicas: int, rank: int, ends: Ends) -> None:
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.ends: Ends = ends
        self.progress = Progress(num_replicas)
        # Epoch and start of the pass. In shared memory, because persistent workers have an old copy of this object.
        self._where = torch.zeros(2, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one chosen for the next pass."""
        return self.progress.epoch

    @property
    def num_skipped(self) -> int:
        """How many batches of this rank's share the loader has to drop in the newest pass."""
        return 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples of a whole epoch on this rank.

        Raises:
            TypeError: the dataset has no length.
        """

    def smallest_share(self) -> None:
        """Return None: a stream does not know the smallest share of the ranks."""
        return None

    def begin(self, full_at: int | None) -> EpochPass:
        """Begin a pass through the stream and return the ``EpochPass`` that counts its samples."""
        run = self.progress.begin(full_at)
        self._where[0], self._where[1] = self.progress.epoch, self.progress.start
        return run

    def _begin_reading(self) -> int:
        """Tell the dataset the epoch, in the process that reads it; return how many samples were consumed before this pass."""
        epoch, start = self._where.tolist()
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        return int(start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; every rank must choose the same."""
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: plain values, equal on ranks in step. With ``ends="uneven"`` save rank 0's."""
        progress = self.progress
        where = {"epoch": progress.epoch, "consumed": progress.consumed(), "finished": progress.ended}
        return {**where, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; every rank loads the same state.

        Raises:
            UsageError: the state is not from such a stream, or the stream cannot be divided otherwise than when it was saved.
        """
        self.progress.load(*check_state(state, self._identity(), self.rank))

    @abc.abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the entries of a state that must be equal when it is loaded."""


class StridedStream(StreamShare):
    """A rank's share of an ``IterableDataset`` that yields its whole stream on every rank and worker.

    Rank r of n keeps samples r, r + n, r + 2n, ... of the stream. They form batches, of which worker w of W makes every
    W-th, so that the batches and their order do not depend on the number of workers. Each rank and each worker
    therefore reads the whole stream: that repeats the reading, not the training. The stream must be the same, in the
    same order, for all of them, and must not split itself by rank or worker, which would lose samples.

    A resumed pass reads and drops the consumed samples, on any number of ranks.

    Args:
        dataset: the stream.
        num_replicas: number of ranks that share.
        rank: number of this rank.
        batch_size: number of samples that a worker puts in one batch.
        ends: as in ``DistributedSampler``; "pad" keeps the first ``num_replicas`` samples of the pass in memory.
    """

    def __init__(
        self, dataset: IterableDataset[Any], num_replicas: int, rank: int, batch_size: int, ends: Ends
    ) -> None:
        super().__init__(dataset, num_replicas, rank, ends)
        self._batch_size = batch_size

    @override
    def __len__(self) -> int:
        try:
            length = length_of(self.dataset)
        except UsageError:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its share has none") from None
        return share_size(length, self.num_replicas, self.rank, self.ends)

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's samples of the newest pass."""
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        for turn, sample in self._share(self._begin_reading()):
            if turn // self._batch_size % num_workers == worker_id:
                yield sample

    @override
    def _identity(self) -> dict[str, Any]:
        return {"stream": True}

    def _share(self, start: int) -> Iterator[tuple[int, Any]]:
        """Yield this rank's samples as (turn, sample): ``turn`` is how many samples it got before in this pass."""
        first: list[Any] = []  # the samples that "pad" repeats at the end
        held: list[Any] = []  # this rank's sample of the current turn, until it is yielded; at most one
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
            # With "drop" a sample is yielded only when every rank has one in this turn.
            if held and (self.ends != "drop" or owner == self.num_replicas - 1):
                yield turn, held.pop()
        turn, over = divmod(num_read - start, self.num_replicas)
        if self.ends == "pad" and num_read > start and 0 < over <= self.rank:
            yield turn, first[(start + turn * self.num_replicas + self.rank) % num_read]


class SelfSharded(StreamShare):
    """A stream that yields this rank's (and this worker's) share of the samples itself.

    The loader does not know how such a stream divides itself. So a resumed pass reads and drops the batches that were trained
    on, and is right only with the same numbers of ranks and workers and the same batch size, which ``load_state_dict`` checks.
    Ranks may get different numbers of batches.

    Args:
        dataset: the stream.
        num_replicas: number of ranks.
        rank: number of this rank.
        batch_size: samples in a batch, or 1 where the stream yields batches.
        num_workers: number of processes that read.
    """

    def __init__(
        self, dataset: IterableDataset[Any], num_replicas: int, rank: int, batch_size: int, num_workers: int
    ) -> None:
        super().__init__(dataset, num_replicas, rank, "uneven")
        self._sizes = {"num_replicas": num_replicas, "num_workers": num_workers, "batch_size": batch_size}

    @property
    @override
    def num_skipped(self) -> int:
        return -(-self.progress.start // (self.num_replicas * self._sizes["batch_size"]))

    @override
    def __len__(self) -> int:
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its share has none")
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the stream yields in this process."""
        self._begin_reading()
        yield from self.dataset

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._sizes.items():
            saved = state.get(name, mine) if isinstance(state, Mapping) else mine
            if saved != mine:
                what = f"The stream divides itself, so its position holds only with {name}={saved}, as it was saved"
                fix = "resume with that number, or use stride_stream=True for a stream that is whole on every rank"
                raise UsageError(explain(what, value=mine, rank=self.rank, fix=fix))
        super().load_state_dict(state)

    @override
    def _identity(self) -> dict[str, Any]:
        return {"stream": "shares itself", **self._sizes}


def check_stream(stride_stream: bool, sharded_stream: bool, shuffle: bool, dataset: IterableDataset[Any]) -> None:
    """Raise ``UsageError`` unless an ``IterableDataset`` is declared to be whole or a share, or if it is to be shuffled."""
    name = type(dataset).__name__
    if stride_stream == sharded_stream:
        what = "An IterableDataset does not say whether each rank and worker gets the whole stream or a part of it"
        fix = (
            "if iterating it gives the whole stream to everyone, pass stride_stream=True and each rank keeps every "
            "n-th sample; if it cuts itself in shares, pass sharded_stream=True"
        )
        raise UsageError(explain(what, value=name, fix=fix))
    if shuffle:
        what = "An IterableDataset cannot be shuffled by index"
        raise UsageError(explain(what, value=name, fix="pass shuffle=False and shuffle inside the dataset"))
