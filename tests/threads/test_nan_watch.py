"""A gradient that becomes NaN is said once, with the step, the rank and the parameter, by the rank on which it did."""

from __future__ import annotations

import logging
import math

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
