"""Collectives matched by name: each kind, in any order, with whatever goes wrong on the way; ranks are threads."""

import math
import os
import random
import threading
from collections.abc import Callable

import pytest
import torch

from guozhuang.errors import UsageError
from guozhuang.gradients.named import (
    DuplicateNameError,
    Kind,
    NamedChannel,
    NamedEngine,
    NegotiationError,
    Reduction,
    Settings,
)
from tests.processes.negotiating import asked, full, in_place, reduced, reducing, run_engines, together

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def every_kind(engine: NamedEngine) -> int:
    channel, n = engine.world, engine.world.size
    rank = channel.rank
    assert rank is not None and channel.ranks == tuple(range(n)) and channel.group is not None
    reductions(channel, rank, n)
    arithmetic(channel, rank, n)
    movements(channel, rank, n)
    empty_and_large(channel, rank, n)
    return channel.num_rounds


def reductions(channel: NamedChannel, rank: int, n: int) -> None:
    total = n * (n + 1) // 2
    for dtype in DTYPES:
        own = full(rank + 1, dtype=dtype)
        for name, reduction, expected in (
            ("sum", Reduction.SUM, total),
            ("min", Reduction.MIN, 1),
            ("max", Reduction.MAX, n),
            ("product", Reduction.PRODUCT, math.factorial(n)),
        ):
            [out] = reduced(channel, f"{name}.{dtype}", own, reduction=reduction)
            assert out.dtype == dtype and torch.equal(out, full(expected, dtype=dtype)), (name, dtype, out)
            assert torch.equal(own, full(rank + 1, dtype=dtype)), "the input stays"
        [mean] = reduced(channel, f"mean.{dtype}", own, reduction=Reduction.AVERAGE)
        expected = full(total / n, dtype=torch.float64)
        assert torch.equal(mean, expected.to(dtype)), (dtype, mean)
    one = torch.tensor([rank == 0, True, False])
    for reduction, result in (
        (Reduction.SUM, [True, True, False]),
        (Reduction.MAX, [True, True, False]),
        (Reduction.AVERAGE, [True, True, False]),
        (Reduction.MIN, [n == 1, True, False]),
        (Reduction.PRODUCT, [n == 1, True, False]),
    ):
        assert reduced(channel, f"bool.{reduction}", one, reduction=reduction)[0].tolist() == result
    scalar = torch.tensor(float(rank))
    assert reduced(channel, "scalar", scalar)[0].item() == n * (n - 1) / 2
    parameter = torch.nn.Parameter(full(1.0))
    [out] = in_place(channel, "parameter", parameter).wait()
    assert out is parameter and torch.equal(parameter.detach(), full(n)) and parameter.requires_grad
    of_inference(channel, rank, total)


def of_inference(channel: NamedChannel, rank: int, total: int) -> None:
    with torch.inference_mode():
        tensors = [full(rank + 1, num) for num in (4, 7, 5, 3)]
    handles = [in_place(channel, f"inference.{i}", each) for i, each in enumerate(tensors[:3])]
    handles.append(reducing(channel, "inference.new", tensors[3]))
    outs = [handle.wait()[0] for handle in handles]
    assert all(out is tensor for out, tensor in zip(outs, tensors[:3], strict=False))
    assert all(out.eq(total).all() for out in outs) and not outs[3].is_inference()
    [out] = asked(channel, Kind.BROADCAST, "inference", tensors[3], outputs=(tensors[3],), root=0).wait()
    assert out is tensors[3] and out.eq(1).all()


def arithmetic(channel: NamedChannel, rank: int, n: int) -> None:
    own = torch.tensor([-7, 7, 5], dtype=torch.int32) if rank == 0 else torch.zeros(3, dtype=torch.int32)
    [mean] = reduced(channel, "truncated", own, reduction=Reduction.AVERAGE)
    assert mean.tolist() == [int(-7 / n), int(7 / n), int(5 / n)], "toward zero"
    [scaled] = reduced(channel, "ints", own, prescale=0.5, postscale=1.5)
    assert scaled.tolist() == [int(-3 * 1.5), int(3 * 1.5), int(2 * 1.5)]
    whole = full(49, dtype=torch.int64)
    mean_of_equal = reduced(channel, "equal", whole, reduction=Reduction.AVERAGE)[0]
    assert torch.equal(mean_of_equal, whole), "an average of equal integers is that one"
    half = full(2.0 ** (rank + 1), dtype=torch.float16)
    [out] = reduced(channel, "half", half, prescale=0.5, postscale=4.0)
    assert torch.equal(out, full(4.0 * (2**n - 1), dtype=torch.float16)) and torch.equal(
        half[:1], full(2.0 ** (rank + 1), 1).half()
    )
    [out] = reduced(channel, "mean", full(float(rank)), reduction=Reduction.AVERAGE, prescale=2.0, postscale=3.0)
    assert torch.allclose(out, full(3.0 * (n - 1)))
    first, second = reduced(channel, "group", full(rank, 3), full(1.0, 5, torch.float64))
    assert torch.equal(first, full(n * (n - 1) / 2, 3)) and torch.equal(second, full(n, 5, torch.float64))
    adaptive(channel, rank, n)


def adaptive(channel: NamedChannel, rank: int, n: int) -> None:
    orthogonal = torch.zeros(2 * n + 3)
    orthogonal[rank] = 3.0
    parallel = full(2.0, 5)
    handles = [
        reducing(channel, "adasum.orthogonal", orthogonal, reduction=Reduction.ADASUM),
        reducing(channel, "adasum.parallel", parallel, reduction=Reduction.ADASUM),
        reducing(channel, "adasum.scaled", parallel, reduction=Reduction.ADASUM, prescale=0.5, postscale=4.0),
    ]
    outs = [handle.wait()[0] for handle in handles]
    assert torch.equal(outs[0][:n], full(3.0, n)) and not outs[0][n:].any(), "each tensor for itself: a sum"
    assert torch.allclose(outs[1], parallel) and torch.allclose(outs[2], 2.0 * parallel)


def movements(channel: NamedChannel, rank: int, n: int) -> None:
    for dtype in (*DTYPES, torch.bool):
        rows = (rank % 3) + (0 if rank == 1 else 1)
        own = torch.full((rows, 2), rank, dtype=dtype)
        [out] = asked(channel, Kind.ALLGATHER, f"uneven.{dtype}", own).wait()
        parts = [torch.full(((r % 3) + (0 if r == 1 else 1), 2), r, dtype=dtype) for r in range(n)]
        assert torch.equal(out, torch.cat(parts)), (dtype, out)
        root = n - 1
        [out] = asked(channel, Kind.BROADCAST, f"root.{dtype}", full(rank + 1, dtype=dtype), root=root).wait()
        assert torch.equal(out, full(root + 1, dtype=dtype))
    same, other = asked(channel, Kind.ALLGATHER, "group", full(rank, 2), full(-rank, 1)).wait()
    assert torch.equal(same, torch.arange(n).repeat_interleave(2).float())
    assert torch.equal(other, -torch.arange(n).float())
    mine = full(rank)
    handle = asked(channel, Kind.BROADCAST, "in place", mine, outputs=(mine,), root=0)
    assert handle.wait()[0] is mine and torch.equal(mine, full(0))
    many = [asked(channel, Kind.BROADCAST, f"many.{i}", full(10 * rank + i, i, torch.int64), root=0) for i in range(9)]
    for i, each in enumerate(many):
        assert torch.equal(each.wait()[0], full(i, i, torch.int64))
    to_all(channel, rank, n)
    scattered(channel, rank, n)


def to_all(channel: NamedChannel, rank: int, n: int) -> None:
    own = torch.arange(2 * n).view(2 * n, 1) + 100 * rank
    handle = asked(channel, Kind.ALLTOALL, "even", own)
    expected = torch.cat([torch.arange(2 * rank, 2 * rank + 2).view(2, 1) + 100 * r for r in range(n)])
    assert torch.equal(handle.wait()[0], expected) and handle.received_splits == [2] * n
    for times in (1, 2, 0):  # other splits each time under the same name
        splits = tuple(times * r for r in range(n))
        handle = asked(channel, Kind.ALLTOALL, "uneven", full(rank, sum(splits) + 1, torch.float16), splits=splits)
        [out] = handle.wait()
        assert handle.received_splits == [times * rank] * n
        assert torch.equal(out, torch.arange(n).repeat_interleave(times * rank).half())


def scattered(channel: NamedChannel, rank: int, n: int) -> None:
    for extra in range(n):
        own = torch.arange(2 * (2 * n + extra), dtype=torch.float32).view(-1, 2)
        [out] = asked(channel, Kind.REDUCESCATTER, f"rows.{extra}", own, reduction=Reduction.AVERAGE).wait()
        begin = 2 * rank + min(rank, extra)
        assert torch.allclose(out, own[begin : begin + 2 + (rank < extra)]), "the first ranks get one row more"
        [out] = asked(channel, Kind.REDUCESCATTER, f"ints.{extra}", own.long(), prescale=2.0).wait()
        assert torch.equal(out, 2 * n * own.long()[begin : begin + 2 + (rank < extra)])
    few, none = asked(channel, Kind.REDUCESCATTER, "few", full(1.0, 1), torch.zeros(0, 3)).wait()
    assert few.tolist() == [n] * (rank == 0) and none.shape == (0, 3)


def empty_and_large(channel: NamedChannel, rank: int, n: int) -> None:
    handles = [
        reducing(channel, "empty", torch.zeros(0, 3)),
        asked(channel, Kind.BROADCAST, "empty", torch.zeros(0), root=0),
        asked(channel, Kind.ALLGATHER, "empty", torch.zeros(0, 3)),
        asked(channel, Kind.ALLGATHER, "no columns", torch.zeros(rank, 0)),
        asked(channel, Kind.REDUCESCATTER, "empty", torch.zeros(0)),
        asked(channel, Kind.ALLTOALL, "empty", torch.zeros(0, 2)),
    ]
    shapes = [tuple(handle.wait()[0].shape) for handle in handles]
    assert shapes == [(0, 3), (0,), (0, 3), (n * (n - 1) // 2, 0), (0,), (0, 2)]
    large = [full(rank + 1, 300_000) for _ in range(3)]
    for handle in [reducing(channel, f"large.{i}", each) for i, each in enumerate(large)]:
        assert torch.equal(handle.wait()[0], full(n * (n + 1) / 2, 300_000))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_every_kind_gives_what_it_should(num_ranks: int) -> None:
    rounds = run_engines(every_kind, num_ranks, name="threads")
    assert len(set(rounds)) == 1, "ranks take part in the same rounds"


def in_any_order(engine: NamedEngine, seed: int, steps: int) -> tuple[int, int]:
    """Mixed kinds in two channels, from two threads, in an order of each rank's own; some of it fails."""
    n, rank = engine.world.size, engine.world.rank
    assert rank is not None
    part = engine.add([0, n - 1])
    own = random.Random(1000 * seed + rank)
    shared = random.Random(seed)
    for step in range(steps):
        jobs: list[Callable[[], object]] = []
        for i in range(12):
            channel = part if shared.random() < 0.3 else engine.world
            what, rows = shared.randrange(9), (1 + shared.randrange(5)) * (20_000 if shared.random() < 0.05 else 1)
            if channel.rank is not None:
                jobs.append(_job(channel, i, step, what, rows))
        own.shuffle(jobs)
        errors: list[BaseException] = []

        def work(some: list[Callable[[], object]], errors: list[BaseException] = errors) -> None:
            try:
                for check in [job() for job in some]:
                    check()  # type: ignore[operator]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(jobs[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    together(engine.world)
    return engine.world.num_rounds, engine.world.num_full_rounds


def _job(channel: NamedChannel, i: int, step: int, what: int, rows: int) -> Callable[[], Callable[[], None]]:
    """Submit; then wait and compare. What comes of it is the same for all seeds."""
    n, rank = channel.size, channel.rank
    assert rank is not None
    name = f"{i}"  # again at every step, with other kinds and shapes

    def start() -> Callable[[], None]:
        if what == 0:
            handle = asked(channel, Kind.ALLGATHER, name, full(rank, rank + rows))
            expected = torch.cat([full(r, r + rows) for r in range(n)])
        elif what == 1:
            handle = asked(channel, Kind.BROADCAST, name, full(rank + step, rows), root=n - 1)
            expected = full(n - 1 + step, rows)
        elif what == 2:  # ranks differ
            handle = reducing(channel, name, full(1.0, rows + rank))

            def fails() -> None:
                with pytest.raises(NegotiationError, match="Mismatched allreduce tensor shapes"):
                    handle.wait()

            return fails
        elif what == 3:
            handle = reducing(channel, name, full(rank, rows), full(i, 2), reduction=Reduction.MAX)
            expected = full(n - 1, rows)
        elif what == 4:
            handle = asked(channel, Kind.ALLTOALL, name, full(rank, n * rows), splits=(rows,) * n)
            expected = torch.arange(n).repeat_interleave(rows).float()
        elif what == 5:
            handle = asked(channel, Kind.REDUCESCATTER, name, full(rank + i, n * rows))
            expected = full(n * (n - 1) / 2 + n * i, rows)
        elif what == 6:
            mine = full(rank, rows)
            handle = in_place(channel, name, mine, reduction=Reduction.AVERAGE)
            expected = full((n - 1) / 2, rows)
        else:
            handle = reducing(channel, name, full(rank + i, rows))
            expected = full(n * (n - 1) / 2 + n * i, rows)

        def check() -> None:
            assert torch.equal(handle.wait()[0], expected), (what, name)
            assert torch.equal(handle.wait()[0], expected), "again the same"

        return check

    return start


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, Settings()),
        (3, Settings(cache_capacity=2, fusion_threshold_bytes=3000)),
        (4, Settings(cache_capacity=0)),
        (5, Settings()),
        (2, Settings(cache_capacity=8, cycle_time_ms=0.5)),
    ],
)
@pytest.mark.parametrize("steps", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_ranks_submit_in_any_order(num_ranks: int, settings: Settings, steps: int) -> None:
    rounds = run_engines(in_any_order, num_ranks, num_ranks, steps, settings=settings, name="threads")
    assert len(set(rounds)) == 1


def refusals(engine: NamedEngine) -> None:
    channel = engine.world
    part = engine.add([0])
    if engine.world.rank == 1:
        assert part.rank is None and part.group is None
        with pytest.raises(ValueError, match="none of the ranks"):
            reducing(part, "x", full(1))
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("contiguous", lambda: reducing(channel, "x", torch.zeros(2, 3).t())),
        ("dtype", lambda: reducing(channel, "x", torch.zeros(2, dtype=torch.complex64))),
        ("dense", lambda: reducing(channel, "x", torch.zeros(2).to_sparse())),
        ("floating-point", lambda: reducing(channel, "x", full(1, dtype=torch.int64), reduction=Reduction.ADASUM)),
        ("sums or averages", lambda: asked(channel, Kind.REDUCESCATTER, "x", full(1), reduction=Reduction.MAX)),
        ("divide", lambda: asked(channel, Kind.ALLTOALL, "x", full(1, 3))),
        ("entry", lambda: asked(channel, Kind.ALLTOALL, "x", full(1, 3), splits=(1,))),
        ("more than", lambda: asked(channel, Kind.ALLTOALL, "x", full(1, 3), splits=(2, 2))),
        ("root", lambda: asked(channel, Kind.BROADCAST, "x", full(1), root=2)),
        ("like its input", lambda: reducing(channel, "x", full(1), outputs=(full(1, 5),))),
        ("an output for each", lambda: reducing(channel, "x", full(1), outputs=())),
        ("allocates", lambda: asked(channel, Kind.ALLGATHER, "x", full(1), outputs=(full(1),))),
        ("needs a tensor", lambda: reducing(channel, "x")),
    ]
    for pattern, submit in wrong:
        with pytest.raises(ValueError, match=pattern):
            submit()
    engine.start_timeline(os.devnull)
    with pytest.raises(UsageError, match="is being written"):
        engine.start_timeline("another")
    engine.stop_timeline()
    rounds = channel.num_rounds
    if channel.rank == 0:
        handle = reducing(channel, "twice", full(1))
        with pytest.raises(DuplicateNameError, match=r"'allreduce.twice'"):
            reducing(channel, "twice", full(1))
        assert not handle.done()
    together(channel, "now the other rank")
    if channel.rank == 1:
        handle = reducing(channel, "twice", full(1))
    assert torch.equal(handle.wait()[0], full(2)) and handle.done()
    assert channel.num_rounds > rounds
    with pytest.raises(ValueError, match="different ranks"):
        engine.add([0, 0])
    with pytest.raises(ValueError, match="different ranks"):
        engine.add([0, 2])
    with pytest.raises(ValueError, match="ranks differ"):
        engine.add([0] if channel.rank == 0 else [1])
    with pytest.raises(ValueError, match="can be removed"):
        engine.remove(engine.world)
    engine.remove(part)
    if channel.rank == 0:
        with pytest.raises(NegotiationError, match="shut down"):
            reducing(part, "x", full(1))
    again = engine.add([0, 1])
    assert torch.equal(reduced(again, "x", full(1))[0], full(2)) and engine.failure is None


def test_what_cannot_work_is_refused_at_once() -> None:
    run_engines(refusals, 2, name="threads")


def joins(engine: NamedEngine) -> list[int | None]:
    channel, n = engine.world, engine.world.size
    rank = channel.rank
    assert rank is not None
    reduced(channel, "cached", full(1.0))
    last = []
    for turn in range(2):
        for step in range(rank + 1):  # as many steps as the rank says
            here = [r for r in range(n) if r >= step]
            for reduction, expected in (
                (Reduction.SUM, len(here)),
                (Reduction.AVERAGE, len(here) / n),
                (Reduction.MAX, 1.0),
                (Reduction.MIN, 1.0 if len(here) == n else 0.0),
                (Reduction.ADASUM, None),
            ):
                [out] = reduced(channel, f"{turn}.{reduction}", full(1.0), reduction=reduction)
                assert expected is None or torch.allclose(out, full(expected)), (step, reduction, out)
            assert torch.equal(reduced(channel, "cached", full(1.0))[0], full(len(here)))
            if step == n - 1 and n > 1:
                for kind in (Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER):
                    root = 0 if kind == Kind.BROADCAST else None
                    with pytest.raises(NegotiationError, match=f"{kind.value.capitalize()} is not supported with Join"):
                        asked(channel, kind, "while joined", full(1.0, n), root=root).wait()
        handle = channel.join()
        assert handle.wait() == []
        last.append(handle.last_joined)
        [out] = asked(channel, Kind.ALLGATHER, "after", full(rank, 1)).wait()
        assert torch.equal(out, torch.arange(n).float())
    together(channel)
    pending = reducing(channel, "cached", full(1.0)) if rank == 0 else None
    channel.join().wait()
    if pending is not None:
        assert pending.done() and torch.equal(pending.wait()[0], full(1.0)), "done before the join is over, with zeros"
    joins_of_a_part(engine)
    return last


def joins_of_a_part(engine: NamedEngine) -> None:
    part = engine.add(range(1, engine.world.size) if engine.world.size > 1 else [0])
    if part.rank is not None:
        for step in range(part.rank + 1):
            assert torch.equal(reduced(part, "x", full(1.0))[0], full(part.size - step))
        handle = part.join()
        handle.wait()
        assert handle.last_joined == part.size - 1
        assert torch.equal(reduced(part, "x", full(1.0))[0], full(part.size))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_with_fewer_steps_join(num_ranks: int) -> None:
    assert run_engines(joins, num_ranks, name="threads") == [[num_ranks - 1] * 2] * num_ranks
