"""Ranks that ask for different things under one name: all of them are told, and the job goes on."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from guozhuang.gradients.named import Kind, NamedChannel, NamedEngine, NegotiationError, Reduction, Submission
from tests.processes.negotiating import asked, full, reduced, run_engines


class Case(NamedTuple):
    pattern: str
    kind: Kind
    tensors: tuple[Tensor, ...]  # of all ranks but the last
    last_tensors: tuple[Tensor, ...]
    more: dict[str, Any]
    last_more: dict[str, Any]


def case(
    pattern: str, kind: Kind, one: object = None, last: object = None, last_kind: Kind | None = None, **more: Any
) -> tuple[Case, Kind]:
    """A case; what is a pair in ``more`` is of the others and of the last rank."""
    one = (full(1.0),) if one is None else one if isinstance(one, tuple) else (one,)
    last = one if last is None else last if isinstance(last, tuple) else (last,)
    mine = {key: value[0] for key, value in more.items()}
    theirs = {key: value[1] for key, value in more.items()}
    return Case(pattern, kind, one, last, mine, theirs), last_kind or kind


def cases(num_ranks: int) -> list[tuple[Case, Kind]]:
    matrix, sums = torch.zeros(2, 2), (Reduction.SUM, Reduction.MAX)
    reduce, gather, spread = Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST
    found = [
        case("collective operations: rank 0 has allreduce, rank . has allgather", reduce, last_kind=gather),
        case("data types: rank 0 has float32, rank . has float64", reduce, full(1), full(1).double()),
        case(r"allreduce tensor shapes: rank 0 has shape \[4\], rank . has shape \[5\]", reduce, full(1), full(1, 5)),
        case("allreduce tensor shapes", reduce, full(1), matrix),
        case("reduce operations: rank 0 has sum, rank . has max", reduce, reduction=sums),
        case("prescale factors", reduce, prescale=(1.0, 2.0)),
        case("postscale factors", reduce, postscale=(1.0, 2.0)),
        case("group sizes: rank 0 has 1 tensors, rank . has 2", reduce, full(1), (full(1), full(1))),
        case("allgather tensor shapes", gather, matrix, torch.zeros(2, 3)),
        case("allgather tensor shapes", gather, matrix, torch.zeros(2)),
        case("allgather tensor shapes", gather, torch.zeros(2), torch.tensor(1.0)),
        case("broadcast tensor shapes", spread, matrix, torch.zeros(2, 3), root=(0, 0)),
        case("broadcast root ranks: rank 0 has root 0, rank . has root 1", spread, root=(0, 1)),
        case("reducescatter tensor shapes", Kind.REDUCESCATTER, matrix, torch.zeros(3, 2)),
        case("reduce operations", Kind.REDUCESCATTER, reduction=(Reduction.SUM, Reduction.AVERAGE)),
        case("alltoall tensor shapes", Kind.ALLTOALL, torch.zeros(num_ranks, 2), torch.zeros(num_ranks, 3)),
    ]
    return found


def mismatches(engine: NamedEngine) -> None:
    channel, n = engine.world, engine.world.size
    last = channel.rank == n - 1
    for i, (each, last_kind) in enumerate(cases(n)):
        kind, tensors, more = (
            (last_kind, each.last_tensors, each.last_more) if last else (each.kind, each.tensors, each.more)
        )
        for _ in range(2):  # nothing of it stays
            handle = channel.submit(Submission(kind, f"name {i}", tensors, **more))
            for _ in range(2):
                with pytest.raises(NegotiationError, match=f"^Mismatched {each.pattern}.*'name {i}'"):
                    handle.wait()
        goes_on(channel)
    for kind in (Kind.ALLGATHER, Kind.REDUCESCATTER, Kind.ALLTOALL):
        with pytest.raises(NegotiationError, match=f"{kind.value} of rank-zero tensors is not supported"):
            asked(channel, kind, "scalar", torch.tensor(1.0)).wait()
    for _ in range(2):  # what was cached on all ranks, and then differs on one
        reduced(channel, "cached", full(1.0))
        with pytest.raises(NegotiationError, match="Mismatched data types"):
            reduced(channel, "cached", full(1.0).double() if last else full(1.0))
        goes_on(channel)


def goes_on(channel: NamedChannel) -> None:
    n = channel.size
    assert torch.equal(reduced(channel, "after", full(channel.rank or 0))[0], full(n * (n - 1) / 2))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_differ_hear_of_it_and_go_on(num_ranks: int) -> None:
    run_engines(mismatches, num_ranks, name="threads")


def in_a_part(engine: NamedEngine) -> None:
    part = engine.add([1, 2])
    if part.rank is not None:
        with pytest.raises(NegotiationError, match=r"rank 1 has shape \[1\], rank 2 has shape \[2\]"):
            reduced(part, "x", full(1.0, part.rank + 1))
        with pytest.raises(NegotiationError, match="rank 1 has root 1, rank 2 has root 2"):
            asked(part, Kind.BROADCAST, "x", full(1.0), root=part.rank).wait()
        goes_on(part)


def test_ranks_of_a_part_are_called_by_their_ranks_in_the_world() -> None:
    run_engines(in_a_part, 3, name="threads")
