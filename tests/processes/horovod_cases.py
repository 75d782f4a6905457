"""Many small cases in one start of ranks: each case is a function of (rank, size) that every rank calls in the same order.

A rank stops at its first failure, and leaves the world, so that the others fail too and do not wait.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import guozhuang.compat.horovod.torch as hvd
from tests.ranks import run_ranks

Case = Callable[[int, int], None]


def run_cases(
    num_ranks: int, cases: Iterable[Case], timeout_s: float = 60.0, enters: bool = True, **kwargs: Any
) -> list[dict[str, str]]:
    """Return, for each rank, the traceback of each case by its name; "" where it passed.

    ``enters`` the Horovod world before the first one; if not, each case enters and leaves it by itself.
    """
    found: list[dict[str, str]]
    found = run_ranks(_all, num_ranks, list(cases), enters, timeout_s=timeout_s, init=False, **kwargs)
    return found


def check(outcome: list[dict[str, str]], case: Case) -> None:
    """Fail with what the case said on the first rank where it failed."""
    for rank, results in enumerate(outcome):
        text = results.get(case.__name__, "")
        assert not text, f"on rank {rank}:\n{text}"
    if not all(case.__name__ in results for results in outcome):
        pytest.skip("not reached: a case before it failed")


def _all(rank: int, size: int, cases: list[Case], enters: bool) -> dict[str, str]:
    results: dict[str, str] = {}
    if enters:
        hvd.init()
    try:
        for case in cases:
            torch.manual_seed(rank)
            try:
                case(rank, size)
            except BaseException:
                results[case.__name__] = traceback.format_exc()
                break
            results[case.__name__] = ""
    finally:
        hvd.shutdown()
    return results


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that every rank can make for every rank: whole numbers from -9 to 9, or 0 to 9, or halves for floats."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -9
    numbers = torch.randint(low, 10, shape, generator=generator)
    return (numbers / 2).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def of_all(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """``of_rank`` of each rank."""
    return [of_rank(rank, *shape, dtype=dtype) for rank in range(size)]
