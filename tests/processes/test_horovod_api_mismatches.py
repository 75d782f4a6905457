"""Ranks that ask for different things under one name all hear of it, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from tests.processes.horovod_cases import check, run_cases


def fails(text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(HorovodInternalError, match=f"(?s)^Mismatched {text}") as raised:
        call(*args, **kwargs)
    assert isinstance(raised.value, RuntimeError)
    assert "rank 0" in str(raised.value) and "rank 1" in str(raised.value)
    # The job goes on.
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size()


def dtypes(rank: int, size: int) -> None:
    tensor = torch.ones(3, dtype=torch.float32 if rank == 0 else torch.int32)
    fails("data types", hvd.allreduce, tensor)
    fails("data types", hvd.allgather, tensor)
    fails("data types", hvd.broadcast, tensor, 0)
    fails("data types", hvd.reducescatter, tensor)
    fails("data types", hvd.alltoall, torch.ones(size, dtype=tensor.dtype))


def shapes(rank: int, size: int) -> None:
    other = torch.ones(4 + (rank == 1), 2)
    fails("allreduce tensor shapes", hvd.allreduce, other)
    fails("broadcast tensor shapes", hvd.broadcast, other, 0)
    fails("reducescatter tensor shapes", hvd.reducescatter, other)
    fails("allreduce tensor shapes", hvd.allreduce, torch.ones(6) if rank else torch.ones(2, 3))
    trailing = torch.ones(size, 2 + (rank == 1))
    fails("allgather tensor shapes", hvd.allgather, trailing)
    fails("alltoall tensor shapes", hvd.alltoall, trailing)
    fails("allgather tensor shapes", hvd.allgather, torch.ones(2) if rank else torch.ones(2, 2))


def reductions_and_factors(rank: int, size: int) -> None:
    fails("reduce operations", hvd.allreduce, torch.ones(2), op=hvd.Sum if rank else hvd.Max)
    fails("prescale", hvd.allreduce, torch.ones(2), prescale_factor=1.0 + rank)
    fails("postscale", hvd.allreduce, torch.ones(2), postscale_factor=1.0 + rank)


def roots(rank: int, size: int) -> None:
    fails("broadcast root ranks", hvd.broadcast, torch.ones(2), min(rank, 1))


def groups(rank: int, size: int) -> None:
    fails("group sizes", hvd.grouped_allreduce, [torch.ones(2)] * (2 + (rank == 1)))
    fails(
        "data types", hvd.grouped_allreduce, [torch.ones(2), torch.ones(2).to(torch.int32 if rank else torch.float64)]
    )


def only_what_differs_fails(rank: int, size: int) -> None:
    """Others that are under way at the same moment end well, and a name can be used again after it failed."""
    good = [hvd.allreduce_async(torch.ones(3), name=f"good.{n}", op=hvd.Sum) for n in range(3)]
    bad = hvd.allreduce_async(torch.ones(3 + rank), name="bad")
    with pytest.raises(HorovodInternalError, match="Mismatched"):
        hvd.synchronize(bad)
    assert hvd.synchronize(bad) is None
    assert all(torch.equal(hvd.synchronize(each), torch.full((3,), float(size))) for each in good)
    assert hvd.allreduce(torch.ones(1), name="bad", op=hvd.Sum).item() == size


def after_it_was_remembered(rank: int, size: int) -> None:
    """What the cache holds under the name is not taken for what is asked for now."""
    for _ in range(3):
        assert hvd.allreduce(torch.ones(3), name="again", op=hvd.Sum)[0] == size
    fails("allreduce tensor shapes", hvd.allreduce, torch.ones(3 + (rank == 0)), name="again")
    for _ in range(2):
        assert hvd.allreduce(torch.ones(5, dtype=torch.int64), name="again", op=hvd.Sum)[0] == size


CASES = [
    dtypes,
    shapes,
    reductions_and_factors,
    roots,
    groups,
    only_what_differs_fails,
    after_it_was_remembered,
]


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)])
def outcome(request):
    return run_cases(request.param, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ranks(outcome, case):
    check(outcome, case)
