"""Parts of a global batch that follow the measured speeds of the ranks: ``shares="speed"`` of the loader.

[Note: how parts follow speeds] A rank measures its own time: from the moment at which it begins to fetch a batch until the
script asks for the next one, without the time in which it waited for other ranks. After ``EVERY`` steps each rank puts the
median of its seconds per sample into the store of the world, and it reads those of the others when it has made one more step:
then all have put theirs, because ranks that exchange gradients make their steps together. Nothing waits, and no collective
comes between those of the script. From equal numbers all ranks make the same decision, for the same batch: the first one
that no rank has given to its workers yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from typing_extensions import override

from guozhuang.data.shares import BatchParts, check_shares, choose, divide
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import client
from guozhuang.net.store import next_part
from guozhuang.registry import registry
from guozhuang.units import ranks_text
from guozhuang.watch.waits import waits

#: Steps between two measurements of speed.
EVERY = 5
_LIMIT_S = 300.0  # how long a rank waits for the speeds of the others
_log = logging.getLogger("guozhuang")


class SpeedParts(BatchParts):
    """Parts that follow the speeds of the ranks; equal at first. Every rank must make them, and train in step.

    Args:
        total: samples of a global batch.
        num_ranks: the number of ranks, which is that of the world.
        rank: this rank.
        least: as in ``BatchParts``.
        num_ahead: how many batches this rank's workers are given ahead.
        waited_ns: returns how long this process has waited for other ranks since it began, in nanoseconds.
    """

    def __init__(
        self,
        total: int,
        num_ranks: int,
        rank: int,
        least: int,
        num_ahead: int,
        waited_ns: Callable[[], int] = lambda: waits.total_ns,
    ) -> None:
        super().__init__(divide(total, [1] * num_ranks), rank, least)
        self._num_ahead, self._waited_ns = num_ahead, waited_ns
        self._store: dist.Store | None = None
        if num_ranks > 1:
            self._store = next_part(dist.distributed_c10d._get_default_store(), "shares", rank)
        self._began = 0, 0  # when the batch was asked for: the clock, and the waits by then
        self._own_ns, self._num_samples = 0, 0  # of the running step
        self._sample_s: list[float] = []  # of each step since the last decision: own seconds per sample
        self._num_means = registry.num_means
        self._round, self._is_told, self._was_near, self._has_chosen = 0, False, False, False

    @override
    def begin_pass(self) -> None:
        """Count batches from 0 again.

        Raises:
            UsageError: as in the base class; or a model is on an accelerator, whose own time the host does not see.
        """
        super().begin_pass()
        for each in registry.trained:
            if any(parameter.device.type != "cpu" for parameter in each.module.parameters()):
                what = "the speed of a rank is measured where it computes on the CPU"
                fix = "give a share for each rank, as in shares=[3, 1]"
                raise UsageError(explain(what, value=each.strategy, rank=self.rank, fix=fix))
        waits.measure()

    @override
    def begins(self, number: int) -> None:
        if registry.num_means > self._num_means and self._num_samples:
            self._num_means = registry.num_means
            self._sample_s.append(self._own_ns / 1e9 / self._num_samples)
            self._own_ns = self._num_samples = 0
            if self._store is not None and self._is_told:
                self._decide(self._store, number)
            elif self._store is not None and len(self._sample_s) >= EVERY:
                self._tell(self._store)
        self._began = time.perf_counter_ns(), self._waited_ns()

    @override
    def ends(self, number: int, num_left: int) -> None:
        began_ns, waited_ns = self._began
        self._own_ns += time.perf_counter_ns() - began_ns - (self._waited_ns() - waited_ns)
        self._num_samples += self.of(number, self.size_of(number, num_left))[self.rank]

    def _tell(self, store: dist.Store) -> None:
        store.set(
            f"{self._round}/{self.rank}", f"{sorted(self._sample_s)[len(self._sample_s) // 2]!r} {self._num_ahead}"
        )
        if self._round > 1:
            store.delete_key(f"{self._round - 2}/{self.rank}")
        self._is_told = True

    def _decide(self, store: dist.Store, number: int) -> None:
        keys = [f"{self._round}/{rank}" for rank in range(self.num_ranks)]
        began_s = time.monotonic()
        while not store.check(keys):
            waited_s = time.monotonic() - began_s
            if waited_s > _LIMIT_S:
                missing = ranks_text([rank for rank, key in enumerate(keys) if not store.check([key])])
                what = f"{missing} told no speed within {_LIMIT_S:g} s, by which the ranks divide a batch"
                fix = "take batches from this loader on every rank, and make the optimizer's steps together"
                raise WorldError(explain(what, rank=self.rank, fix=fix))
            time.sleep(client.look_s(waited_s, self.num_ranks))
        told = [text.split() for text in store.multi_get(keys)]
        sample_s = [float(each) for each, _ in told]
        self._round, self._is_told, self._sample_s = self._round + 1, False, []
        sizes, self._was_near = choose(self.sizes, sample_s, self._was_near)
        self._change(sizes, number + max(int(each) for _, each in told), sample_s)

    def _change(self, sizes: Sequence[int], first: int, sample_s: Sequence[float]) -> None:
        if tuple(sizes) == self.sizes and self._has_chosen:
            return
        self._has_chosen, self.sizes = True, tuple(sizes)
        self._from.append((first, self.sizes))
        if self.rank == 0:
            own = ", ".join(f"{each * 1e3:.3g}" for each in sample_s)
            _log.warning(
                'shares="speed": the ranks take %s of %d samples (own time of a sample: %s ms)',
                *(", ".join(map(str, sizes)), self.total, own),
            )

    @override
    def state(self) -> dict[str, list[int]]:
        return {"shares": list(self.sizes)}

    @override
    def load(self, sizes: object) -> None:
        if isinstance(sizes, list) and len(sizes) == self.num_ranks:
            self.sizes = tuple(divide(self.total, sizes, least=1))


def make_parts(
    shares: Sequence[float] | str, total: int, num_ranks: int, rank: int, least: int, num_ahead: int
) -> BatchParts:
    """Return how the ranks divide each global batch of ``total`` samples; see :class:`BatchParts` and ``SpeedParts``.

    Raises:
        UsageError: the shares do not fit, or speeds cannot be compared because the ranks are not those of the world.
    """
    if shares != "speed":
        return BatchParts(check_shares(shares, num_ranks, rank, total), rank, least)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks != world:
        what = f"{num_ranks} ranks share the data, and the speeds of {world} can be compared"
        fix = "call gz.init() first, and divide the data among all ranks of the world; or give a share for each rank"
        raise UsageError(explain(what, value=shares, rank=rank, fix=fix))
    return SpeedParts(total, num_ranks, rank, least, num_ahead)
