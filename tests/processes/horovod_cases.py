"""Many small cases in one start of ranks: each case is a function ``case_*`` of (rank, size), called by all ranks in one order.

A rank stops at its first failure, and leaves the world, so that the others fail too and do not wait.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import guozhuang.compat.horovod.torch as hvd
from tests.processes.cases import names_of_cases
from tests.ranks import run_ranks

# Two to four ranks as they are, the last ones slow; over gloo; with everything switched off that makes it faster.
USUAL: dict[str, dict[str, str]] = {"2": {}, "3": {}, "4": {}}
GLOO = {"GUOZHUANG_BACKEND": "gloo"}
PLAIN = {
    "HOROVOD_CACHE_CAPACITY": "0",
    "HOROVOD_FUSION_THRESHOLD": "0",
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
}


def as_tests(
    namespace: Mapping[str, Any],
    worlds: Mapping[str, Mapping[str, str]] = USUAL,
    slow: Sequence[str] = ("4",),
    enters: bool = True,
    prefix: str = "case_",
    system: Any = hvd,
) -> Callable[..., None]:
    """A test of each case of a module in each world: its environment by a word that begins with the number of ranks.

    ``enters`` the world of the ``system`` before the first case; if not, each case enters and leaves it by itself.
    """
    names = names_of_cases(namespace, prefix)

    @functools.cache
    def outcome(world: str) -> list[dict[str, str]]:
        told = (namespace["__name__"], names, enters, system.__name__)
        return run_ranks(run_cases, int(world[0]), *told, init=False, env=dict(worlds[world]))

    @pytest.mark.parametrize("world", [pytest.param(w, marks=pytest.mark.slow) if w in slow else w for w in worlds])
    @pytest.mark.parametrize("name", names)
    def test_cases(name: str, world: str) -> None:
        check(outcome(world), name)

    return test_cases


def check(outcome: Sequence[Mapping[str, str]], name: str) -> None:
    """Fail with what a case said on the first rank where it failed."""
    for rank, results in enumerate(outcome):
        assert not results.get(name), f"on rank {rank}:\n{results[name]}"
    if not all(name in results for results in outcome):
        pytest.skip("not reached: a case before it failed")


def run_cases(rank: int, size: int, module: str, names: Sequence[str], enters: bool, system: str) -> dict[str, str]:
    """Return the traceback of each case by its name; "" where it passed."""
    results: dict[str, str] = {}
    bound = importlib.import_module(system)
    if enters:
        bound.init()
    try:
        for name in names:
            torch.manual_seed(rank)
            try:
                getattr(importlib.import_module(module), name)(rank, size)
            except BaseException:
                results[name] = traceback.format_exc()
                break
            results[name] = ""
    finally:
        bound.shutdown()
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
