"""A gradient that becomes NaN is said once, with the step, the rank and the parameter, by the rank on which it did."""

from __future__ import annotations

import logging
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from guozhuang.exchange.nan_watch import NanWatch
from guozhuang.gradients.buckets import Bucket
from tests.threads.ranks import run_threads

SIZES = ((300, 7), (), (5,))
NAMES = ["weight", "number", "bias"]


def watches(rank: int, size: int, defers: bool, in_buckets: bool) -> None:
    watch, parameters = NanWatch(dist.group.WORLD, defers), [torch.zeros(size, requires_grad=True) for size in SIZES]
    bucket = Bucket(0, True, NAMES, parameters)
    for parameter, view in zip(parameters, bucket.views, strict=True):
        parameter.grad = view
    for step in range(6):
        if step == 3 and rank == 1:
            bucket.views[0].fill_(math.nan)
        if step == 4:  # what rank 1 had is in the weights of all
            bucket.flat.fill_(math.nan)
        watch.look(bucket, step) if in_buckets else watch.look_at(NAMES, parameters, step)
        dist.barrier()


@pytest.mark.parametrize("in_buckets", [True, False])
@pytest.mark.parametrize("defers", [True, False])
def test_the_first_rank_says_so_once(defers: bool, in_buckets: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "guozhuang"):
        run_threads(watches, 3, defers, in_buckets)
    [record] = caplog.records
    what = "some parameter" if defers else "'weight'"
    assert record.getMessage().startswith(f"[rank 1] step 3: the gradient of {what} is NaN here"), record.getMessage()


def reads(rank: int, size: int) -> int:
    """How often a watch reads flags in 4 steps of 20 units; then NaN is there in step 500, and another step comes."""
    watch, parameters = NanWatch(dist.group.WORLD, defers=True), [torch.zeros(3, requires_grad=True) for _ in range(20)]
    flags, read = list[torch.Tensor](), torch.Tensor.__bool__
    with mock.patch.object(torch.Tensor, "__bool__", lambda flag: flags.append(flag) or read(flag)):
        for step in (0, 1, 2, 3, 500, 0):
            for parameter in parameters:
                parameter.grad = torch.full((3,), math.nan if step == 500 else 0.0)
                watch.look_at(["w"], [parameter], step)
            if step == 3:
                num_reads = len(flags)
    return num_reads


def test_flags_of_a_step_are_read_together_whichever_step_comes_next(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "guozhuang"):
        assert run_threads(reads, 1) == [3]
    [record] = caplog.records
    assert "step 500: " in record.getMessage()


def stops(rank: int, size: int) -> str:
    watch, bucket = NanWatch(dist.group.WORLD), Bucket(0, True, NAMES, [torch.zeros(size) for size in SIZES])
    watch.look(bucket, 0)
    bucket.views[1].fill_(math.nan)
    with pytest.raises(FloatingPointError) as caught:
        watch.look(bucket, 1)
    return str(caught.value)


def test_every_rank_that_has_it_stops_where_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUOZHUANG_STOP_ON_NAN", "1")
    for rank, text in enumerate(run_threads(stops, 2)):
        assert text.startswith(f"[rank {rank}] step 1: the gradient of 'number' is NaN here"), text
