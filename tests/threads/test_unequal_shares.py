"""Ranks with unequal parts of a batch train as one process on the whole batch does, under all that averages gradients."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from guozhuang import DistributedDataParallel, SyncBatchNorm, accumulate, clip_grad_norm_
from guozhuang.data import Loader, loader, speed
from guozhuang.errors import UsageError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.sparse_rows import SparseRows
from guozhuang.exchange.warmup import Warmup
from guozhuang.registry import BatchWeight, Registry, registry
from guozhuang.sharding import shard
from guozhuang.watch import waits as waiting
from guozhuang.watch.waits import Waits
from tests.threads import ranks
from tests.threads.ranks import run_threads

NUM_SAMPLES, WIDTH, BATCH = 30, 5, 8  # 3 whole batches and a rest of 6 in an epoch
SHARES = {1: None, 2: [3, 1], 3: [1, 4, 2]}


class OfRank:
    """An attribute of the registry that each rank has for itself, as it has where ranks are processes."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name, self._make = name, make
        self._elsewhere: dict[str, Any] = {}

    def _values(self) -> dict[str, Any]:
        rank = ranks.this_rank()  # the same for all threads of a rank
        return self._elsewhere if rank is None else vars(rank).setdefault("registry", {})

    def __get__(self, instance: object, owner: object) -> Any:
        return self._values().setdefault(self._name, self._make())

    def __set__(self, instance: object, value: Any) -> None:
        self._values()[self._name] = value


@pytest.fixture(autouse=True)
def _registry_of_each_rank() -> Iterator[None]:
    parts = {"weight": BatchWeight, "_leader": lambda: None, "num_means": int}
    of_waits = {n: OfRank(n, int) for n in ("thread", "total_ns", "_is_inside")}
    with (
        mock.patch.multiple(Registry, create=True, **{n: OfRank(n, make) for n, make in parts.items()}),
        mock.patch.multiple(Waits, create=True, **of_waits),
    ):
        yield


class Data:
    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        draw = torch.Generator().manual_seed(3)
        self.words = torch.randint(0, 9, (num_samples,), generator=draw)
        self.rows = torch.randn(num_samples, WIDTH, generator=draw, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.rows[index], self.words[index], index % 3


class Net(nn.Module):
    def __init__(self, sparse: bool = False, norm: bool = False) -> None:
        super().__init__()
        with ranks.GENERATOR, torch.random.fork_rng():
            torch.manual_seed(1)
            self.table = nn.Embedding(9, WIDTH, sparse=sparse)
            self.body = nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7) if norm else nn.Tanh(), nn.Linear(7, 3))
        self.double()

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.body(rows + self.table(words))
        return found


def ddp(exchange: Any = None, **options: Any) -> Callable[..., tuple[nn.Module, Any]]:
    def prepare(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(model, **options)
        if exchange is not None:
            wrapped.use_exchange(exchange)
        return wrapped, optimizer

    return prepare


def sharded(**options: Any) -> Callable[..., tuple[nn.Module, Any]]:
    return lambda model, optimizer: shard(model, optimizer, **options)


METHODS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "ddp": ddp(),
    "small-buckets": ddp(bucket_cap_mb=0.0001, batched_grad_copy=True),
    "unused": ddp(find_unused_parameters=True, lazy_bucket_allocation=True),
    "sparse-rows": ddp(SparseRows(AllReduce())),
    "warmup": ddp(Warmup(100, AllReduce(), Compressed(MinMax8()))),
    "sharded": sharded(),
    "sharded-exchange": sharded(exchange=AllReduce()),
}


def train(
    size: int,
    prepare: Callable[..., tuple[nn.Module, Any]] | None,
    shares: Any,
    *,
    micro: int = 1,
    clip: float | None = None,
    num_epochs: int = 2,
    **options: Any,
) -> Tensor:
    """Train, and return all weights."""
    model: Any = Net(**options)
    if options.get("norm") and prepare is not None:
        model = SyncBatchNorm.convert_sync_batchnorm(model)
    # Adam divides by the gradient's size, and that of a bias before a normalization is rounding error.
    kind: Any = torch.optim.SGD if options.get("sparse") or options.get("norm") else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.05)
    trained, stepped = (model, optimizer) if prepare is None else prepare(model, optimizer)
    one = {"rank": 0, "num_replicas": 1} if prepare is None else {}
    batches = loader(Data(), global_batch_size=BATCH, shares=shares, **one)
    for _ in range(num_epochs):
        for rows, words, targets in batches:
            if micro == 1:
                F.cross_entropy(trained(rows, words), targets).backward()
            else:
                with accumulate(trained, steps=micro) as is_last:
                    (F.cross_entropy(trained(rows, words), targets) / micro).backward()
                if not is_last:
                    continue
            if clip is not None:
                assert clip_grad_norm_(trained.parameters(), clip) > clip  # it does clip
            stepped.step()
            stepped.zero_grad()
    return torch.cat([each.detach().reshape(-1).clone() for each in [*model.parameters(), *model.buffers()]])


def assert_as_one(num_ranks: int, prepare: Callable[..., tuple[nn.Module, Any]], **how: Any) -> None:
    single = train(1, None, None, **how)
    for found in run_threads(lambda rank, size: train(size, prepare, SHARES[size], **how), num_ranks):
        torch.testing.assert_close(found, single, rtol=0, atol=1e-10)


ALL = {"micro": 2, "clip": 0.1, "norm": True}
CASES = [(method, num_ranks, ALL) for method in METHODS for num_ranks in (2, 3)]
CASES += [(method, 2, {}) for method in METHODS]
CASES += [(method, 2, how) for method in ("ddp", "sharded") for how in ({"micro": 4}, {"clip": 0.1}, {"norm": True})]


@pytest.mark.parametrize(("method", "num_ranks", "how"), CASES)
def test_unequal_ranks_train_as_one_process(method: str, num_ranks: int, how: dict[str, Any]) -> None:
    """In float64, so that what is equal is seen; four micro-batches end with the smaller rest of an epoch."""
    assert_as_one(num_ranks, METHODS[method], **how)


def test_sparse_gradients_are_weighted() -> None:
    assert_as_one(2, METHODS["ddp"], sparse=True)


def test_without_weights_the_result_would_differ() -> None:
    """The tests above see a missing weight."""

    with mock.patch.object(BatchWeight, "among", lambda self, *_: 1.0):
        found = run_threads(lambda rank, size: train(size, METHODS["ddp"], SHARES[size]), 2)[0]
    assert (found - train(1, None, None)).abs().max() > 1e-3


# ---- the loader: epochs, resume, speed -------------------------------------------------------------------------------------


def indices_of(num_samples: int, num_epochs: int, **options: Any) -> list[list[list[int]]]:
    """The batches of each epoch of a loader over 0, 1, 2, ..."""
    made = loader(list(range(num_samples)), **options)
    return [[batch.tolist() for batch in made] for _ in range(num_epochs)]


@pytest.mark.parametrize("how", [{}, {"shuffle": False}, {"num_workers": 2}], ids=["shuffled", "in order", "workers"])
def test_parts_of_each_batch_are_those_of_one_process(how: dict[str, Any]) -> None:
    one = indices_of(31, 2, global_batch_size=7, rank=0, num_replicas=1, **how)
    of_ranks = [
        indices_of(31, 2, global_batch_size=7, rank=r, num_replicas=3, shares=[1, 4, 2], **how) for r in range(3)
    ]
    for epochs, whole in zip(zip(*of_ranks, strict=True), one, strict=True):
        assert [[index for part in parts for index in part] for parts in zip(*epochs, strict=True)] == whole
    assert [len(part) for part in (of_ranks[r][0][0] for r in range(3))] == [1, 4, 2]


def test_a_given_sampler_is_divided_too() -> None:
    options: dict[str, Any] = {"global_batch_size": 4, "num_replicas": 2, "shares": [3, 1], "sampler": range(8, 0, -1)}
    parts = [indices_of(9, 1, rank=rank, **options) for rank in range(2)]
    assert parts == [[[[8, 7, 6], [4, 3, 2]]], [[[5], [1]]]]


@pytest.mark.parametrize(
    ("ends", "drop_last", "rest"), [("pad", False, [[8], [0]]), ("drop", False, []), ("pad", True, [])]
)
def test_a_rest_that_is_too_small_for_all_ranks_ends_as_asked(
    ends: Any, drop_last: bool, rest: list[list[int]]
) -> None:
    options = {"global_batch_size": 4, "shuffle": False, "shares": [3, 1], "ends": ends, "drop_last": drop_last}
    for rank in range(2):
        made = loader(list(range(9)), rank=rank, num_replicas=2, **options)
        for epoch in range(2):
            found = [batch.tolist() for batch in made]
            assert made.sampler.epoch == epoch and len(found) == len(made) and found[2:] == rest[rank:][:1]


@pytest.mark.parametrize("method", ["ddp", "sharded"])
def test_a_resumed_training_has_the_same_bits(method: str) -> None:
    """Saved after two of four batches, and gone on with by new objects."""

    def through(rank: int, size: int) -> tuple[Tensor, Tensor]:
        saved: list[Any] = []

        def run(batches: Loader, model: Any, optimizer: Any) -> None:
            for step, (rows, words, targets) in enumerate(batches):
                F.cross_entropy(model(rows, words), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 and not saved:
                    parts = (model.state_dict(), optimizer.state_dict(), batches.state_dict())
                    saved.extend(copy.deepcopy(parts))

        found = []
        for _ in range(2):
            net = Net()
            model, optimizer = METHODS[method](net, torch.optim.Adam(net.parameters(), lr=0.05))
            batches = loader(Data(), global_batch_size=BATCH, shares=[3, 1])
            if saved:
                for each, state in zip((model, optimizer, batches), saved, strict=True):
                    each.load_state_dict(state)
            run(batches, model, optimizer)
            found.append(torch.cat([each.detach().reshape(-1).clone() for each in net.parameters()]))
        return found[0], found[1]

    for straight, again in run_threads(through, 2):
        assert torch.equal(straight, again)


def test_a_state_of_unequal_parts_goes_on_with_any_parts() -> None:
    """After two batches of 8 the rest of the epoch comes, whatever divides it; nothing comes twice."""
    options: dict[str, Any] = {"global_batch_size": 8, "shuffle": True}
    made = loader(list(range(30)), rank=1, num_replicas=2, shares=[5, 3], **options)
    taken = iter(made)
    next(taken), next(taken)
    state = made.state_dict()
    whole = [index for batch in indices_of(30, 1, rank=0, num_replicas=1, **options)[0] for index in batch]
    for num_ranks, shares in ((2, [1, 7]), (3, [1, 1, 2]), (2, None), (1, None)):
        rest = []
        for rank in range(num_ranks):
            other = loader(list(range(30)), rank=rank, num_replicas=num_ranks, shares=shares, **options)
            other.load_state_dict({**state, "shares": [7, 1]})
            rest += [index for batch in other for index in batch.tolist()]
        assert sorted(rest) == sorted(whole[16:])


class OwnTime(threading.local):
    """A clock for each rank: only what a rank is said to compute, and its waits for other ranks, move it on."""

    now_ns, is_waiting = 0, False

    def of_work(self) -> int:
        return self.now_ns

    def of_waits(self) -> int:
        """It is asked for at the begin and at the end of each wait, which takes 100 ms."""
        self.is_waiting = not self.is_waiting
        self.now_ns += 0 if self.is_waiting else 100_000_000
        return self.now_ns


own_time = OwnTime()


def adapting(rank: int, size: int, slow: Callable[[int], int]) -> tuple[list[int], list[int], dict[str, Any]]:
    """Two epochs with a rank that is half as fast: its parts by step, all indices, and the last state."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = loader(Numbered(24 * 20 + 5), global_batch_size=24, shares="speed")
    sizes, seen = [], []
    for _ in range(2):
        for numbers, rows, words in batches:
            sizes.append(len(rows))
            seen += numbers.tolist()
            own_time.now_ns += 1_000_000 * len(rows) * (2 if slow(len(sizes)) == rank else 1)
            model(rows, words).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sizes, seen, batches.state_dict()


class Numbered(Data):
    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        return index, self.rows[index], self.words[index]


def test_parts_follow_speeds_and_epochs_stay_exact(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_work = SimpleNamespace(perf_counter_ns=own_time.of_work, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(speed, "time", of_work)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter_ns=own_time.of_waits))

    def slow(step: int) -> int:
        return 1 if step <= 21 else 0  # the other rank becomes slow in the second epoch

    with caplog.at_level(logging.INFO, "guozhuang"):
        first, second = run_threads(adapting, 2, slow)
    assert first[0][0] == second[0][0] == 12  # equal at first
    assert 14 <= first[0][19] <= 18 and first[0][19] + second[0][19] == 24, first[0]
    assert 6 <= first[0][40] <= 10, first[0]
    everything = first[1] + second[1]
    assert sorted(everything) == sorted([*range(24 * 20 + 5)] * 2)
    assert first[2] == second[2] and sum(first[2]["shares"]) == 24
    lines = [record.getMessage() for record in caplog.records if 'shares="speed"' in record.getMessage()]
    assert len(lines) >= 2 and "of 24 samples (own time of a sample: " in lines[0]


# ---- what is refused -------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"shares": [1, 2, 3]}, "`shares` holds 3 numbers, and 2 ranks share the data"),
    ({"shares": [1, 0]}, "a number that is not above 0 and finite"),
    ({"shares": [1, float("inf")]}, "a number that is not above 0 and finite"),
    ({"shares": "fast"}, 'neither "speed" nor a list of numbers'),
    ({"shares": 3}, 'neither "speed" nor a list of numbers'),
    ({"shares": [20, 1]}, "rank 1 would get no sample of a global batch of 8.*21 samples is enough"),
    ({"shares": [3, 1], "batch_size": 1, "global_batch_size": 1}, "fewer samples than there are ranks"),
    ({"shares": [3, 1], "batch_size": None}, "the dataset makes the batches of single ranks"),
    ({"shares": [3, 1], "batch_size": 1, "batch_sampler": [[0], [1]]}, "the batch sampler makes the batches"),
    ({"shares": [3, 1], "ends": "uneven"}, "parts of a batch use each sample once anyway"),
    ({"shares": "speed", "num_replicas": 5}, "5 ranks share the data, and the speeds of 2 can be compared"),
]


def refused(rank: int, size: int) -> None:
    for options, text in REFUSED:
        with pytest.raises(UsageError, match=text):
            loader(list(range(30)), **{"batch_size": 4, "rank": rank, "num_replicas": size, **options})
    with pytest.raises(UsageError, match="an IterableDataset cannot be cut by index"):
        loader(Stream(), 4, shares=[3, 1], stride_stream=True, shuffle=False)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


def test_what_cannot_be_divided_is_refused_on_every_rank() -> None:
    run_threads(refused, 2)


def test_ranks_with_different_shares_are_named() -> None:
    def differing(rank: int, size: int) -> None:
        with pytest.raises(ValueError, match=r"(?s)by different shares.*rank 0 +\[3.0, 1.0\].*rank 1 +equal"):
            next(iter(loader(list(range(30)), 4, shares=[3, 1] if rank == 0 else None)))

    run_threads(differing, 2)


def test_means_over_other_ranks_are_refused() -> None:
    def other_group(rank: int, size: int) -> None:
        group = dist.new_group([0, 1])
        if rank < 2:
            model = DistributedDataParallel(Net(), process_group=group)
            rows, words, _ = next(iter(loader(Data(), global_batch_size=BATCH, shares=SHARES[size])))
            with pytest.raises(UsageError, match="3 unequal parts, and gradients are averaged over 2 ranks"):
                model(rows, words).sum().backward()
        else:
            iter(loader(Data(), global_batch_size=BATCH, shares=SHARES[size]))

    run_threads(other_group, 3)


def test_strategies_without_weights_are_refused() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    registry.add_trained(module, module, optimizer, "local-sgd", "this strategy does not weigh")
    batches = loader(list(range(30)), 4, rank=0, num_replicas=2, shares=[3, 1])
    with pytest.raises(UsageError, match=r"unequal parts, and this strategy does not weigh.*'local-sgd'.*--batch-by"):
        iter(batches)
    iter(loader(list(range(30)), 4, rank=0, num_replicas=2))


def test_only_a_training_that_leads_has_a_weight() -> None:
    """An evaluation inside of a training loop changes no weight, and a loader with equal parts that comes next does."""
    training = loader(list(range(30)), global_batch_size=8, rank=0, num_replicas=2, shares=[3, 1])
    other = loader(list(range(30)), 4, rank=0, num_replicas=2)
    batches = iter(training)
    next(batches)
    assert registry.weight.value == 1.5
    list(other)
    assert registry.weight.value == 1.5
    list(batches)
    next(iter(other))
    assert (registry.weight.value, registry.weight.num_ranks) == (1.0, 0)
