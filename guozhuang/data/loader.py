"""Make the batches of a rank's share of a dataset: ``loader`` wraps torch's DataLoader, and can resume in mid-epoch."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from guozhuang.data.arguments import check_given, check_options, whole_batch, why_equal
from guozhuang.data.batches import BatchSampler, num_batches, seed_of
from guozhuang.data.given import FollowedSampler
from guozhuang.data.progress import EpochPass, whole_number
from guozhuang.data.sampler import CommonLength, DistributedSampler, Ends, check_ends, replica
from guozhuang.data.stream import SelfSharded, StreamShare, StridedStream, check_stream
from guozhuang.data.waiting import WaitsForWorld, has_world, settle_all
from guozhuang.errors import UsageError, explain
from guozhuang.registry import registry

if TYPE_CHECKING:
    from guozhuang.data.shares import BatchParts

#: How ranks divide batches: a number for each, or by their measured speed.
Shares = Sequence[float] | Literal["speed"]
_WORKER_TIMEOUT_S = 1800.0
_log = logging.getLogger("guozhuang")


class _Ranked(Protocol):
    """The attributes of a ``World`` that ``loader`` reads."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


def loader(
    dataset: Dataset[Any] | Sized,
    batch_size: int | None = 1,
    *,
    global_batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    ends: Ends | None = None,
    shares: Shares | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    rank: int | None = None,
    num_replicas: int | None = None,
    world: _Ranked | None = None,
    drop_last: bool = False,
    stride_stream: bool = False,
    sharded_stream: bool = False,
    **options: Any,
) -> Loader:
    """Return an iterable over the batches of this rank's share of a dataset.

    Every rank must make the same loaders in the same order, before or after ``init`` and ``prepare``: one that was made before
    takes this rank's share at its first use, which is to come after them. If their datasets have different lengths, rank 0 says
    so, and the epoch ends as ``ends`` asks; see [Note: different lengths] in sampler.py.

    The k-th batches of n ranks together are the k-th batch of one process with ``n * batch_size``, which is
    ``global_batch_size``: a script that states that one trains on the same batches whatever the number of ranks.

    Worker processes are seeded before each batch from ``seed``, epoch, rank and the batch's place in the epoch (torch, numpy's
    global generator, ``random``), so what they draw is the same in every run, with any number of workers, and after a resume.
    Of a stream, and of items that are batches, workers are seeded once for each pass, or with ``persistent_workers`` once.
    Without workers the dataset draws from the process's own generators, which the loader does not seed: seed them
    differently on each rank if augmentations shall differ.

    Args:
        dataset: a map-style dataset with a length, or a list; an ``IterableDataset`` only with ``stride_stream`` or
            ``sharded_stream``.
        batch_size: samples per batch and rank. None: the dataset's items are batches already; ranks share the items.
        global_batch_size: given instead: samples per batch of all ranks together, a multiple of their number.
        shuffle: use a different order in each epoch, equal on all ranks; by default True, unless ``sampler`` or
            ``batch_sampler`` gives the order.
        seed: must be equal on all ranks.
        ends: "pad" (default), "drop" or "uneven": how to share if the number of samples is no multiple of the number of
            ranks, as in ``DistributedSampler``. With "uneven", ranks may differ by one sample and so by one batch: train
            inside ``with model.join():`` of the wrapped model, or the ranks with one more wait for the others.
        shares: how ranks divide each global batch where they are not equally fast: a number above 0 for each rank, in whose
            proportion they get whole samples; or "speed": in proportion to their measured speed. The same on all ranks. The
            global batch stays as large, and gradients are weighted by samples; take one batch at a time, because the weight is
            that of the last one. None: equal parts, unless ``guozhuang run --batch-by speed`` was given.
        num_workers: number of processes that load data; 0 loads in this process.
        collate_fn: makes a batch of a list of samples. Default: torch's ``default_collate``.
        sampler: an iterable of indices with a length, over the whole dataset and equal on all ranks (torch's
            ``WeightedRandomSampler``, for example); each rank takes every n-th index. See :class:`FollowedSampler` for what
            it must keep to, so that a resume at any place and on any number of ranks finds its order again.
        batch_sampler: the same for an iterable of lists of indices; each list is the batch of one rank, and a step of n
            ranks takes n of them.
        rank: default as in ``DistributedSampler``.
        num_replicas: number of ranks that share; default as in ``DistributedSampler``.
        world: given instead of both: the return value of ``init()``, of which ranks that hold one copy of a divided model
            together get the same batches; or any object with ``rank`` and ``size``.
        drop_last: drop this rank's last batch if it is smaller than ``batch_size``. It is independent of ``ends``.
        stride_stream: declares that the ``IterableDataset`` yields its whole stream on each rank and worker, so that each
            rank keeps every n-th sample; see ``StridedStream``. Needs ``shuffle=False``.
        sharded_stream: declares that the ``IterableDataset`` yields this rank's and worker's share itself; see
            :class:`SelfSharded`. Needs ``shuffle=False``. It resumes on the same numbers of ranks and workers only, and
            ranks may get different numbers of batches, as with ``ends="uneven"``.
        options: further arguments of ``torch.utils.data.DataLoader``. ``timeout`` (seconds to wait for a worker's
            batch; when 0, torch waits for ever) is 1800 by default with workers. ``generator`` and ``in_order=False`` are
            refused, because resume and seeds would no longer hold.

    Raises:
        UsageError: one of these values cannot work; the text names it.
    """
    given = locals()
    make = functools.partial(_make, **given.pop("options"), **given)
    waits = not has_world() and rank is None and num_replicas is None and world is None
    if has_world():
        settle_all()
    made = Loader.__new__(Loader) if waits and (shares or registry.shares) is not None else make()  # those are of ranks
    if waits:
        made.wait_for_world(make)
    registry.add_loader(made)
    return made


def _make(
    dataset: Dataset[Any] | Sized,
    batch_size: int | None,
    *,
    global_batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    ends: Ends | None,
    shares: Shares | None,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    sampler: Any,
    batch_sampler: Any,
    rank: int | None,
    num_replicas: int | None,
    world: _Ranked | None,
    drop_last: bool,
    stride_stream: bool,
    sharded_stream: bool,
    **options: Any,
) -> Loader:
    """Make a loader of the share that this rank has now; see :func:`loader`."""
    num_workers = whole_number("num_workers", num_workers, least=0)
    seed = whole_number("seed", seed)
    chosen_ends = check_ends(ends, drop_last=False)
    check_options(options)
    if world is not None:
        if rank is not None or num_replicas is not None:
            what = "`world` and rank or num_replicas were both given"
            raise UsageError(explain(what, fix="pass either `world` or rank and num_replicas"))
        rank, num_replicas = getattr(world, "data_rank", world.rank), getattr(world, "data_size", world.size)
    is_alone = world is None and num_replicas == 1
    num_replicas, rank = replica(num_replicas, rank)
    whole = whole_batch(batch_size, global_batch_size, num_replicas, is_divided=shares is not None)
    if shares is None and registry.shares is not None and not is_alone:
        why = why_equal(dataset, whole, batch_sampler, chosen_ends)
        shares = None if why else registry.shares  # type: ignore[assignment]
        if why and rank == 0:
            _log.warning("--batch-by %s: a loader keeps equal parts, because %s", registry.shares, why)
    elif shares is not None and (why := why_equal(dataset, whole, batch_sampler, chosen_ends)):
        fix = "leave `shares` out, or give the loader a dataset with a length and a batch size"
        raise UsageError(
            explain(f"`shares` needs batches that can be divided, and {why}", value=shares, rank=rank, fix=fix)
        )
    batch_size = None if whole is None else max(whole // num_replicas, 1)
    if batch_size is None and drop_last:
        what = "`drop_last` drops a batch that is too small, and with batch_size=None the dataset makes the batches"
        raise UsageError(explain(what, fix='leave it out, or see ends="drop"'))
    if num_workers and "timeout" not in options:
        options["timeout"] = _WORKER_TIMEOUT_S
    source: Any = dataset
    share: DistributedSampler | StreamShare
    parts: BatchParts | None = None
    places = num_replicas, rank
    if shares is not None and whole is not None:
        from guozhuang.data.shares import DividedBatches  # imported only when needed
        from guozhuang.data.speed import make_parts

        places = 1, 0  # the sampler gives the order of all samples, in which a rank's part of each batch is cut
        least = whole if drop_last else num_replicas if chosen_ends == "drop" else 1
        num_ahead = num_workers * int(options.get("prefetch_factor") or 2)
        parts = make_parts(shares, whole, num_replicas, rank, least, num_ahead)
    if isinstance(dataset, IterableDataset):
        if sampler is not None or batch_sampler is not None:
            what = "A sampler chooses by index, and an IterableDataset has none"
            raise UsageError(explain(what, value=type(dataset).__name__, fix="leave the sampler out"))
        check_stream(stride_stream, sharded_stream, shuffle is None or shuffle, dataset)
        if stride_stream:
            share = StridedStream(dataset, num_replicas, rank, batch_size or 1, chosen_ends)
        elif ends in (None, "uneven"):
            share = SelfSharded(dataset, num_replicas, rank, batch_size or 1, num_workers)
        else:
            what = "With `sharded_stream` the stream decides how many samples each rank gets"
            raise UsageError(explain(what, value=ends, fix="leave `ends` out"))
        source = share
        options.update(batch_size=batch_size, drop_last=drop_last)
    elif stride_stream or sharded_stream:
        name = "stride_stream" if stride_stream else "sharded_stream"
        what = f"`{name}` is for an IterableDataset"
        raise UsageError(explain(what, value=type(dataset).__name__, fix="leave it out: this dataset is cut by index"))
    elif sampler is not None or batch_sampler is not None:
        check_given(sampler, batch_sampler, shuffle, batch_size, drop_last)
        given = sampler if batch_sampler is None else batch_sampler
        share = FollowedSampler(given, *places, seed, chosen_ends)
        if batch_sampler is not None:
            batch_size = None
    else:
        share = DistributedSampler(dataset, *places, shuffle is None or shuffle, seed, ends=chosen_ends)
    if isinstance(share, DistributedSampler):
        batches = BatchSampler(share, batch_size, drop_last) if parts is None else DividedBatches(share, parts)
        if batch_size is None and batch_sampler is None:
            options.update(batch_size=None, sampler=batches)
        else:
            options["batch_sampler"] = batches
    generator = torch.Generator()
    fetched: DataLoader[Any] = DataLoader(
        source, num_workers=num_workers, collate_fn=collate_fn, generator=generator, **options
    )
    lengths = None
    if isinstance(share, DistributedSampler) and not is_alone:
        asked = shares if shares is None or isinstance(shares, str) else list(map(float, shares))
        lengths = CommonLength(share, num_replicas, rank, str(asked or ""))
    return Loader(share, fetched, batch_size, drop_last, seed, is_alone, (num_replicas, rank), lengths, parts)


class Loader(WaitsForWorld):
    """An iterable over the batches of a rank's share, one pass per ``iter()``; made by ``loader``.

    Epochs advance by the rules of ``DistributedSampler``. Only batches that the training loop has received count as taken,
    not those that workers have fetched ahead, so ``state_dict`` may be called between any two steps.

    Attributes:
        sampler: the share of this rank, with ``parts`` the order of all samples: a ``DistributedSampler``, or a
            ``StridedStream`` or ``SelfSharded`` of an ``IterableDataset``. Its ``state_dict`` is the loader's.
        batch_sampler: iterable of the index lists of the current pass; None for a stream, and for items that are batches.
        dataset: the dataset given to ``loader``.
        batch_size: samples per batch of this rank, with ``shares`` of the mean rank; None where the dataset or the batch
            sampler makes the batches.
        num_replicas: number of ranks that share.
        parts: how ranks divide each global batch unequally; None: the parts are equal.
        is_open: whether a pass goes on: it was neither left nor ran out.
        is_alone: whether it was made for this rank alone, with ``num_replicas=1``.
    """

    def __init__(
        self,
        share: DistributedSampler | StreamShare,
        batches: DataLoader[Any],
        batch_size: int | None,
        drop_last: bool,
        seed: int,
        is_alone: bool,
        place: tuple[int, int],
        lengths: CommonLength | None,
        parts: BatchParts | None,
    ) -> None:
        self.sampler, self.is_alone = share, is_alone
        self.dataset: Any = batches.dataset if isinstance(share, DistributedSampler) else share.dataset
        self.batch_size = batch_size
        # What a batch adds to the position: its samples, or itself if it was given.
        self._num_counted = parts.total if parts is not None else batch_size or 1
        self.parts, (self.num_replicas, self._rank) = parts, place
        self.drop_last, self.seed = drop_last, seed
        self.num_workers: int = batches.num_workers
        self.persistent_workers: bool = batches.persistent_workers
        self.collate_fn: Callable[[list[Any]], Any] = batches.collate_fn
        self.batch_sampler = batches.batch_sampler if isinstance(share, DistributedSampler) else None
        self._batches = batches
        self._lengths = lengths
        self._run: EpochPass | None = None
        self.is_open = False
        self._trains = False  # whether an optimizer has ever stepped after a batch of this loader
        self._num_weights = 0 if parts is None else parts.num_ranks

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank, also in a resumed epoch.

        Raises:
            TypeError: the dataset is a stream without a length.
        """
        if self._lengths is not None:
            self._lengths.agree()
        if self.parts is not None:
            return self.parts.num_batches(len(self.sampler))
        return num_batches(len(self.sampler), self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over this rank's batches; for the rules of its epoch see ``DistributedSampler``.

        Raises, in the iterator:
            UsageError: a newer pass has taken over its persistent workers; or a model is trained in a way that needs equal
                parts of a batch.
            RuntimeError: a worker died or took longer than ``timeout`` seconds.
        """
        if self._lengths is not None:
            self._lengths.agree()
        if self._run is not None and self._is_over():
            self._run.ran_out()
        run = self._run = self.sampler.begin(None)
        if self.parts is not None:
            self.parts.begin_pass()
        assert self._batches.generator is not None
        progress = self.sampler.progress  # the seed is distinct for each rank of a pass
        self._batches.generator.manual_seed(seed_of(self.seed, progress.epoch, progress.start, self._rank))
        source: Iterator[Any] = iter(self._batches)
        if isinstance(self.sampler, StreamShare):
            source = itertools.islice(source, self.sampler.num_skipped, None)
        return self._hand_out(run, source, progress.start)

    def _is_over(self) -> bool:
        """Tell whether the next pass takes the next epoch; a rest without batches is over once a pass has begun."""
        smallest = self.sampler.smallest_share()
        full_at = smallest - smallest % self._num_counted if smallest is not None and self.drop_last else smallest
        if self.parts is not None and smallest is not None:
            full_at = min(self.parts.num_batches(smallest) * self.parts.total, smallest)
        is_begun = self._run is not None and self._run.newest
        return self.sampler.progress.is_full(full_at) or (is_begun and full_at == 0)

    def _hand_out(self, run: EpochPass, source: Iterator[Any], start: int) -> Iterator[Any]:
        shared = self.persistent_workers and self.num_workers > 0
        # With "uneven" some ranks ask for a batch more than others, so they would not pause together.
        pauses = self.sampler.ends != "uneven"
        num_steps = registry.num_steps  # when the last batch was handed out
        parts = self.parts
        try:
            for number in itertools.count():
                if self._run is run:
                    self.is_open = True
                self._trains |= registry.num_steps > num_steps
                is_led = registry.may_lead(self)  # of several loaders with open passes, the first one tells the weight
                if pauses and registry.leads(self):
                    registry.pause()
                if parts is not None and is_led:
                    parts.begins(number)
                if shared and self._run is not run:
                    what = "This iterator ended: a newer one has taken its persistent workers"
                    raise UsageError(explain(what, fix="run one pass at a time, or pass persistent_workers=False"))
                if registry.own_time is not None:
                    registry.own_time.timer.begin("data")
                try:
                    batch = next(source)
                except StopIteration:
                    break
                # A smaller last batch counts as a full one, so that ranks whose last batches differ save the same state.
                run.took(self._num_counted)
                num_steps = registry.num_steps
                num_left = len(self.sampler) - start - number * parts.total if parts is not None else 0
                if is_led:
                    registry.weight.set(1.0 if parts is None else parts.weight(number, num_left), self._num_weights)
                yield batch
                if parts is not None and is_led:
                    parts.ends(number, num_left)
            run.ran_out()
        finally:
            self.is_open &= self._run is not run

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; every rank must choose the same. See ``DistributedSampler``."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: a few plain values, equal on all ranks that have made equally many steps.

        Save it after a step, from rank 0 or every rank; with ``ends="uneven"`` from rank 0. Batch size, numbers of ranks
        and workers and ``ends`` may differ when it is loaded, but not for a stream that shares itself.
        """
        if self._lengths is not None:
            self._lengths.agree()
        return {**self.sampler.state_dict(), **({} if self.parts is None else self.parts.state())}

    def state_to_go_on(self, epoch_comes_again: bool) -> dict[str, Any]:
        """Return the position from which a training that ends now has to go on to get the batches that come next here.

        Args:
            epoch_comes_again: whether the script will run its present epoch again from the top: what it trained on must not
                come again, and what it evaluated on must. False: its next epoch begins.
        """
        state, progress = self.state_dict(), self.sampler.progress
        if epoch_comes_again and self._trains:
            return {**state, "finished": False}
        if self._is_over():
            return {**state, "finished": True}
        return state if self.is_open else {**state, "consumed": progress.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last sample that was trained on; every rank must load the same state.

        Raises:
            UsageError: the state has another dataset length, seed or shuffle, or is not from ``state_dict``.
        """
        if self._lengths is not None:
            self._lengths.agree()
        if isinstance(state, Mapping) and "shares" in state:
            if self.parts is not None:
                self.parts.load(state["shares"])
            state = {key: value for key, value in state.items() if key != "shares"}
        self.sampler.load_state_dict(state)
