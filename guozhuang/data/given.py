"""A rank's share of data whose order is the user's own: a sampler's or a batch sampler's."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler as TorchSampler
from typing_extensions import override

from guozhuang.data.sampler import DistributedSampler, Ends, share_size
from guozhuang.errors import UsageError, explain
from guozhuang.generators import kept


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


@contextlib.contextmanager
def _seeded(seed: int, sampler: Any) -> Iterator[None]:
    """Seed every generator from which a sampler usually draws; restore all afterwards. See [Note: an order that repeats]."""
    chain = [sampler]
    for name in ("sampler", "batch_sampler"):
        chain += [getattr(each, name) for each in chain if hasattr(each, name)]
    owners = [each for each in chain if isinstance(getattr(each, "generator", None), torch.Generator)]
    before = [each.generator for each in owners]
    with kept():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for each in owners:
            each.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            for each, generator in zip(owners, before, strict=True):
                each.generator = generator
