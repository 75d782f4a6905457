"""Shares of data whose order or division is the user's own: a sampler's, a batch sampler's, or that of a stream."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import IterableDataset
from typing_extensions import override

from guozhuang.data.progress import EpochPass, Progress, check_state
from guozhuang.data.sampler import DistributedSampler, Ends, share_size
from guozhuang.errors import UsageError, explain


class FollowedSampler(DistributedSampler):
    """A rank's share of the order that another sampler gives: every n-th of its indices, or of its batches.

    [Note: an order that repeats] Every rank draws the whole order of an epoch, and a resumed run draws it again, so the order
    must depend on the epoch alone. Therefore the sampler is iterated at one go, while torch's, numpy's and Python's global
    generators and the sampler's attribute ``generator`` are seeded by ``seed + epoch``; its ``set_epoch``, if any, is called.
    A sampler with other random numbers of its own is found out at a resume: the state holds a checksum of the epoch's order.

    Args:
        sampler: an iterable with a length, of indices or of lists of indices; it must yield that many in every epoch.
        num_replicas: number of ranks that share.
        rank: number of this rank.
        seed: must be equal on all ranks.
        ends: as in ``DistributedSampler``.

    Raises:
        UsageError: the sampler has no length, or shares its data between ranks itself.
    """

    def __init__(self, sampler: Any, num_replicas: int, rank: int, seed: int, ends: Ends) -> None:
        if isinstance(sampler, TorchSampler | DistributedSampler):
            what = "The sampler divides the data among ranks itself, and the loader would divide its share again"
            fix = "leave it out: the loader shares, shuffles and resumes by itself"
            raise UsageError(explain(what, value=type(sampler).__name__, rank=rank, fix=fix))
        if not isinstance(sampler, Sized) or not isinstance(sampler, Iterable):
            what = "The sampler must be an iterable with a length, so that ranks can share what it yields"
            raise UsageError(explain(what, value=type(sampler).__name__, fix="give it __iter__ and __len__"))
        super().__init__(sampler, num_replicas, rank, shuffle=False, seed=seed, ends=ends)
        self.given: Any = sampler
        self._order: tuple[int, int] | None = None  # the epoch whose order was drawn last, and its checksum
        self._expected: tuple[int, int] | None = None  # the same, from a loaded state

    @override
    def indices(self, epoch: int, start: int = 0) -> Iterator[Any]:
        order = self._draw(epoch)
        num_mine = share_size(self._length - start, self.num_replicas, self.rank, self.ends)
        first = start + self.rank
        return iter([order[(first + i * self.num_replicas) % len(order)] for i in range(num_mine)])

    def _draw(self, epoch: int) -> list[Any]:
        with _seeded((self.seed + epoch) % 2**63, self.given):
            if callable(set_epoch := getattr(self.given, "set_epoch", None)):
                set_epoch(epoch)
            order = list(self.given)
        if len(order) != self._own_length:
            what = f"The sampler's length was {self._own_length} when the loader was made, and it yielded {len(order)}"
            fix = "make its length what it yields, the same in every epoch"
            raise UsageError(explain(what, value=type(self.given).__name__, rank=self.rank, fix=fix))
        self._order = epoch, zlib.crc32(repr(order).encode())
        if self._expected is not None and self._expected[0] == epoch and self._expected != self._order:
            what = f"The sampler gives epoch {epoch} another order than in the run that was saved, so its place is lost"
            fix = "let it draw from torch's generator or have set_epoch(epoch) seed it; or begin the epoch anew by set_epoch"
            raise UsageError(explain(what, value=type(self.given).__name__, rank=self.rank, fix=fix))
        return order

    @override
    def state_dict(self, *, num_taken: int | None = None) -> dict[str, Any]:
        state = super().state_dict(num_taken=num_taken)
        drawn = self._order is not None and self._order[0] == state["epoch"]
        return {**state, "order": self._order[1] if drawn and self._order is not None else None}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = {key: value for key, value in state.items() if key != "order"} if isinstance(state, Mapping) else state
        super().load_state_dict(rest)
        order = state.get("order")
        self._expected = (self.progress.epoch, order) if order is not None and not self.progress.ended else None

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if not self.progress.start:
            self._expected = None

    @override
    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "length": self._length, "sampler": type(self.given).__name__}


class SelfSharded(IterableDataset[Any]):
    """A stream that yields this rank's (and this worker's) share of the samples itself.

    The loader does not know how such a stream divides itself. So a resumed pass reads and drops the batches that were trained
    on, and is right only with the same numbers of ranks and workers and the same batch size, which ``load_state_dict`` checks.
    Ranks may get different numbers of batches. If the dataset has ``set_epoch``, it is called with the epoch before each pass.

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
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.ends: Ends = "uneven"
        self.progress = Progress(num_replicas)
        self._sizes = {"num_replicas": num_replicas, "num_workers": num_workers, "batch_size": batch_size}
        # In shared memory, because persistent workers have an old copy of this object.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one chosen for the next pass."""
        return self.progress.epoch

    @property
    def num_skipped(self) -> int:
        """How many of this rank's batches the newest pass has to drop, because they were trained on before a resume."""
        return -(-self.progress.start // (self.num_replicas * self._sizes["batch_size"]))

    def __len__(self) -> int:
        """Return the length that the stream states, which is taken as this rank's number of samples.

        Raises:
            TypeError: the stream has no length.
        """
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its share has none")
        return len(self.dataset)

    def smallest_share(self) -> None:
        """Return None: nobody knows the smallest share of the ranks."""
        return None

    def begin(self, full_at: int | None) -> EpochPass:
        """Begin a pass through the stream and return the ``EpochPass`` that counts its samples."""
        run = self.progress.begin(full_at)
        self._epoch[0] = self.progress.epoch
        return run

    def __iter__(self) -> Iterator[Any]:
        """Yield what the stream yields in this process."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(int(self._epoch[0]))
        yield from self.dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; every rank must choose the same."""
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: plain values, equal on ranks in step."""
        progress = self.progress
        return {
            "epoch": progress.epoch,
            "consumed": progress.consumed(),
            "finished": progress.ended,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with the same numbers of ranks and workers and the same batch size.

        Raises:
            UsageError: one of these numbers differs, or the state is not from a stream that shares itself.
        """
        for name, mine in self._sizes.items():
            saved = state.get(name, mine) if isinstance(state, Mapping) else mine
            if saved != mine:
                what = f"The stream divides itself, so its position holds only with {name}={saved}, as it was saved"
                fix = "resume with that number, or use stride_stream=True for a stream that is whole on every rank"
                raise UsageError(explain(what, value=mine, rank=self.rank, fix=fix))
        self.progress.load(*check_state(state, self._identity(), self.rank))

    def _identity(self) -> dict[str, Any]:
        return {"stream": "shares itself", **self._sizes}


@contextlib.contextmanager
def _seeded(seed: int, sampler: Any) -> Iterator[None]:
    """Seed every generator from which a sampler usually draws; restore all afterwards. See [Note: an order that repeats]."""
    chain = [sampler]
    for name in ("sampler", "batch_sampler"):
        chain += [getattr(each, name) for each in chain if hasattr(each, name)]
    owners = [each for each in chain if isinstance(getattr(each, "generator", None), torch.Generator)]
    before = [each.generator for each in owners]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for each in owners:
            each.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            for each, generator in zip(owners, before, strict=True):
                each.generator = generator
