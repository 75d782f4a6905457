"""What a script leaves out of averaging, in the list that PyTorch's DistributedDataParallel reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang import strategies
from guozhuang.errors import UsageError
from guozhuang.strategies import apply
from guozhuang.world import World
from tests.threads.ranks import run_threads


def test_what_a_script_leaves_out_stays_on_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is prepared again with another optimizer; wrapped once more it would be averaged twice."""

    def on_rank(rank: int, size: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        left_out = ["0.bias"]
        model._ddp_params_and_buffers_to_ignore = left_out  # type: ignore[assignment]
        for strategy in ("ddp", "sharded", "ddp"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            prepared, _ = gz.prepare(model, optimizer, strategy)
            with pytest.raises(UsageError, match="would average it twice"):
                gz.DistributedDataParallel(prepared)
            assert list(copy.deepcopy(prepared)._ddp_params_and_buffers_to_ignore) == left_out
            if strategy == "sharded":
                assert not strategies.is_prepared(prepared, [torch.optim.SGD(model.parameters(), lr=0.1)])
            assert gz.unwrap(prepared) is model
            assert model._ddp_params_and_buffers_to_ignore is left_out

    monkeypatch.setattr(apply, "current", lambda: World(0, 1, 0, 1, 0, 1, torch.device("cpu"), "threads"))
    run_threads(on_rank, 1)
