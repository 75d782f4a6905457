"""Choose the samples of a rank: ``DistributedSampler`` gives the same as torch's, and can resume on any number of ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

from guozhuang.data.progress import EpochPass, Progress, check_state, whole_number
from guozhuang.errors import MismatchError, UsageError, explain, rank_table
from guozhuang.net import client
from guozhuang.net.store import next_part
from guozhuang.registry import registry
from guozhuang.units import merged, ranks_text

Ends = Literal["pad", "drop", "uneven"]
_LENGTHS_S = 20.0  # how long a rank waits until the others have made a loader that it has made
_log = logging.getLogger("guozhuang")
_CHUNK = 4096  # indices turned into Python ints at a time


class DistributedSampler(Sampler[int]):
    """A rank's share of a map-style dataset; a drop-in for ``torch.utils.data.DistributedSampler``.

    In each epoch all samples have one order, equal on all ranks (``torch.randperm`` seeded by ``seed + epoch``, or
    0, 1, 2, ... without shuffle). Rank r of n takes places r, r + n, r + 2n, ... of it, so the k-th batches of n ranks
    together are the k-th batch of one process with an n-fold batch size. Indices equal those of torch's sampler.

    **Epochs.** The epoch of a pass is fixed when ``iter()`` is called. The first pass is epoch 0. Unlike torch's, the
    next ``iter()`` takes the next epoch by itself when ``set_epoch`` was not called in between, provided the last pass
    was *full*: it ran out, or gave as many samples as the smallest share of any rank. A pass left midway is repeated
    (same epoch, same order, same start), with one warning. Only the newest iterator counts. After
    ``set_epoch(e)`` the next pass is epoch e from its beginning, as in torch, with one exception: after
    ``load_state_dict`` of a state of that same epoch e, it is the rest of e (possibly empty) until that rest has run
    out. Without ``set_epoch``, a loaded state continues its epoch, or begins the next if it was saved after the pass
    ran out. All ranks must make the same calls; nothing is communicated.

    **Counting.** ``state_dict`` counts the samples taken from the newest iterator of this sampler. Under a torch
    ``DataLoader`` with workers that is more than training has seen, because workers fetch ahead: use ``gz.loader``,
    which counts the batches it handed out, or give the number as ``state_dict(num_taken=...)``.

    **Memory.** An iterator holds its share as 4-byte indices (8-byte from 2**31 samples on), and the whole order only
    while it selects the share; without shuffle it holds no indices. The sampler holds a few numbers.

    Args:
        dataset: anything with a length, which must not change.
        num_replicas: number of ranks that share. Default: of ``torch.distributed`` if it is initialised, else 1.
        rank: 0 to ``num_replicas - 1``. Default: of ``torch.distributed`` if it is initialised, else 0.
        shuffle: use a different order in each epoch.
        seed: must be equal on all ranks.
        drop_last: torch's name for ``ends="drop"``.
        ends: how to share if the number of samples (after a resume, of the rest) is no multiple of the number of ranks.
            ``"pad"``: at the end of the epoch, samples from the beginning of its order are repeated, so that no rank gets
            fewer. ``"drop"``: surplus samples are left out. ``"uneven"``: each sample is used exactly once; the first ranks
            get one more than the others, so train inside ``join()`` of the wrapped model. Default: "drop" if
            ``drop_last``, else "pad".

    Attributes:
        num_samples: number of samples of a whole epoch on this rank; equals ``len()``, also in a resumed epoch.
        total_size: number of samples of a whole epoch on all ranks together, repeated ones included.

    Raises:
        UsageError: a rank not below ``num_replicas``, a dataset without length, or ``drop_last`` with other ``ends``.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        ends: Ends | None = None,
    ) -> None:
        self.num_replicas, self.rank = replica(num_replicas, rank)
        self.ends: Ends = check_ends(ends, drop_last)
        self.dataset = dataset
        self.drop_last = self.ends == "drop"
        self.shuffle = bool(shuffle)
        self.seed = whole_number("seed", seed)
        self.progress = Progress(self.num_replicas)
        self._own_length = length_of(dataset)
        self.count(self._own_length)

    def count(self, length: int) -> None:
        """Share ``length`` samples from now on, which is not this rank's own number where ranks have different datasets.

        Where that is more than this rank has, its first samples come again. Every rank must call this, between epochs.
        """
        self._length = length
        self.num_samples = share_size(length, self.num_replicas, self.rank, self.ends)
        evenly = self.ends != "uneven"
        self.total_size = self.num_samples * self.num_replicas if evenly else length

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one chosen for the next pass. Setting it calls ``set_epoch``."""
        return self.progress.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch on this rank."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Begin a pass over this rank's indices; for the rules of its epoch see ``DistributedSampler``."""
        run = self.begin(self.smallest_share())
        return _counted(run, self.indices(self.epoch, self.progress.start))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; every rank must choose the same. See ``DistributedSampler``."""
        self.progress.set_epoch(epoch)

    def smallest_share(self) -> int:
        """Return the number of samples of the newest pass on the rank that gets the fewest."""
        return share_size(self._length - self.progress.start, self.num_replicas, self.num_replicas - 1, self.ends)

    def begin(self, full_at: int | None) -> EpochPass:
        """Begin a pass and return its counter, for a loader that itself counts the samples it hands out.

        Args:
            full_at: number of samples on this rank with which the last pass counts as full; None: only if it ran out.
        """
        return self.progress.begin(full_at)

    def indices(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Iterate over this rank's indices of an epoch after its first ``start`` samples; changes no state.

        Raises:
            UsageError: the dataset's length has changed since the sampler was made.
        """
        if (found := length_of(self.dataset)) != self._own_length:
            what = f"The dataset had {self._own_length} samples when the sampler was made"
            raise UsageError(explain(what, value=found, rank=self.rank, fix="make a new sampler for the changed data"))
        given = self._counted_indices(epoch, start)
        return given if self._length <= found else (index % found for index in given)

    def _counted_indices(self, epoch: int, start: int) -> Iterator[int]:
        length = self._length
        num_mine = share_size(length - start, self.num_replicas, self.rank, self.ends)
        places = range(start + self.rank, start + self.rank + num_mine * self.num_replicas, self.num_replicas)
        # Only the last place of a share can be beyond the order's end, and only with "pad": it wraps around, as in torch.
        wraps = bool(places) and places[-1] >= length
        if not self.shuffle:
            return _walk_range(places[:-1], places[-1] % length) if wraps else iter(places)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        dtype = torch.int32 if length < 2**31 else torch.int64  # the order does not depend on the type
        order = torch.randperm(length, generator=generator, dtype=dtype)
        # This rank's indices are copied, so that the whole order is freed at the end of this method.
        mine = order[places.start :: self.num_replicas][:num_mine].clone()
        if wraps:
            mine = torch.cat([mine, order[places[-1] % length].reshape(1)])
        assert len(mine) == num_mine
        return _walk(mine)

    def state_dict(self, *, num_taken: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch: six plain values that fit JSON and any checkpoint; equal on ranks that are in step.

        With ``ends="uneven"`` save the state of rank 0: ranks without a sample in the last step do not count that step.

        Args:
            num_taken: how many samples of this pass *this rank's* training has used, if samples are fetched ahead.
                Default: the number taken from the newest iterator.
        """
        progress = self.progress
        consumed, finished = progress.consumed(), progress.ended
        if num_taken is not None:
            # If samples are fetched ahead, the iterator ends before training has used them all, so its end does not count.
            consumed = progress.start + self.num_replicas * whole_number("num_taken", num_taken, least=0)
            finished = False
        # ``consumed`` may exceed the length, as a smaller last batch counts as full: cap it. The surplus samples of "drop"
        # count as consumed only when the pass has run out.
        left_over = (self._length - progress.start) % self.num_replicas if self.ends == "drop" else 0
        consumed = self._length if finished else min(consumed, self._length - left_over)
        return {"epoch": progress.epoch, "consumed": consumed, "finished": finished, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved on any number of ranks, with any ``ends``; every rank loads the same state.

        Raises:
            UsageError: the state has another dataset length, seed or shuffle, or is not from ``state_dict``.
        """
        self.progress.load(*check_state(state, self._identity(), self.rank))

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "length": self._length}


class CommonLength:
    """How many samples the ranks of the world share where their datasets have different lengths.

    [Note: different lengths] Ranks that read files of their own may find different numbers of samples. They would make
    different numbers of steps, and some would wait for the others for ever. So each rank puts its number into the store of
    the world when it makes a loader, and reads those of the others when it first needs one. The n-th loaders of all ranks
    belong together. If they differ, rank 0 says so, and all count as ``ends`` asks: "pad" up to the longest, "drop" down to
    the shortest, "uneven" each its own. A rank that made a loader alone waits for a while, and goes on with its own number;
    what the first rank decides holds for all.

    Args:
        sampler: the share of this rank, or the order of all samples in which it is cut.
        num_replicas: number of ranks that share.
        rank: number of this rank.
        shares: how ranks divide batches unequally, as text that is compared too; "": equally.
    """

    def __init__(self, sampler: DistributedSampler, num_replicas: int, rank: int, shares: str = "") -> None:
        self._sampler = sampler
        self._store: dist.Store | None = None
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        if (num_replicas, rank) == replica(None, None):
            rank = dist.get_rank()
            self._store = next_part(dist.distributed_c10d._get_default_store(), "loaders", rank)
            self._store.set(f"length/{rank}", f"{length_of(sampler.dataset)} {shares}")

    def agree(self) -> None:
        """Have the sampler count as many samples as those of the other ranks. A second call does nothing."""
        store, self._store = self._store, None
        if store is None:
            return
        sampler, own = self._sampler, dist.get_rank()
        keys = [f"length/{rank}" for rank in range(dist.get_world_size())]
        began = time.monotonic()
        while not (are_here := store.check(keys)) and time.monotonic() - began < _LENGTHS_S:
            if store.check(["decided"]):
                break
            time.sleep(client.look_s(time.monotonic() - began, len(keys)))
        if store.compare_set("decided", "", "together" if are_here else "alone") != b"together":
            if missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
                what = f"{ranks_text(missing)} made no loader like this one, so the lengths of their data were not compared"
                fix = "make it on every rank, or for this one alone with rank=0, num_replicas=1"
                _log.warning("%s", explain(what, rank=own, fix=fix))
            return
        texts = [bytes(text).decode().partition(" ") for text in store.multi_get(keys)]
        lengths, shares = [int(length) for length, _, _ in texts], [text or "equal" for _, _, text in texts]
        if len(set(shares)) > 1:
            table = rank_table(("ranks", "shares"), [(ranks_text(r), s) for r, s in merged(dict(enumerate(shares)))])
            fix = "make the loader with the same `shares` on every rank"
            raise MismatchError(
                explain("ranks divide the batches by different shares", rank=own, fix=fix) + "\n" + table
            )
        if len(set(lengths)) == 1:
            return
        length = {"pad": max(lengths), "drop": min(lengths), "uneven": lengths[own]}[sampler.ends]
        sampler.count(length)
        if own == 0:
            then = {
                "pad": f"all count {length}, and the shorter ones give samples again",
                "drop": f"all count {length}, and the longer ones leave samples out",
                "uneven": "each counts its own, so train inside of join()",
            }[sampler.ends]
            rows = [(ranks_text(ranks), number) for ranks, number in merged(dict(enumerate(map(str, lengths))))]
            table = rank_table(("ranks", "samples"), rows)
            _log.warning('the datasets of the ranks differ in length; with ends="%s" %s\n%s', sampler.ends, then, table)


def share_size(num_samples: int, num_replicas: int, rank: int, ends: Ends) -> int:
    """Return how many of ``num_samples`` samples a rank gets; the last rank has the smallest share."""
    if num_samples <= 0:
        return 0
    if ends == "pad":
        return -(-num_samples // num_replicas)
    if ends == "drop":
        return num_samples // num_replicas
    return -(-max(num_samples - rank, 0) // num_replicas)


def replica(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return (num_replicas, rank), taking values that are None from the world, or without one from ``torch.distributed``.

    Raises:
        UsageError: the rank is not below the number of ranks.
    """
    known = dist.is_available() and dist.is_initialized()
    own, shares = (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
    if known and registry.data_share is not None:
        own, shares = registry.data_share
    num_replicas = shares if num_replicas is None else num_replicas
    rank = own if rank is None else rank
    num_replicas = whole_number("num_replicas", num_replicas, least=1)
    rank = whole_number("rank", rank)
    if not 0 <= rank < num_replicas:
        what = f"`rank` is not within 0 to {num_replicas - 1} (num_replicas={num_replicas})"
        fix = "count ranks from 0 and pass both rank and num_replicas, or initialise torch.distributed and pass neither"
        raise UsageError(explain(what, value=rank, fix=fix))
    return num_replicas, rank


def check_ends(ends: str | None, drop_last: bool) -> Ends:
    """Return the value of the option ``ends``; raise ``UsageError`` if it is unknown or contradicts ``drop_last``."""
    if ends is None:
        return "drop" if drop_last else "pad"
    if ends not in get_args(Ends):
        raise UsageError(explain("`ends` is not known", value=ends, fix='pass "pad", "drop" or "uneven"'))
    if drop_last and ends != "drop":
        raise UsageError(explain('`drop_last=True` means ends="drop"', value=ends, fix="pass one of the two"))
    return cast(Ends, ends)


def length_of(dataset: object) -> int:
    """Return the dataset's length, or raise ``UsageError`` if it has none."""
    try:
        return len(cast(Sized, dataset))
    except (TypeError, NotImplementedError):
        what = "The dataset has no length, so it cannot be cut in shares by index"
        fix = "give it __len__, or for an IterableDataset see `stride_stream` of guozhuang.loader"
        raise UsageError(explain(what, value=type(dataset).__name__, fix=fix)) from None


def _counted(run: EpochPass, indices: Iterator[int]) -> Iterator[int]:
    for index in indices:
        run.took(1)
        yield index
    run.ran_out()


def _walk(mine: torch.Tensor) -> Iterator[int]:
    for first in range(0, len(mine), _CHUNK):
        yield from mine[first : first + _CHUNK].tolist()


def _walk_range(places: range, last: int) -> Iterator[int]:
    yield from places
    yield last
