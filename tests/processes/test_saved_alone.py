"""What a script saves by ``torch.save`` under each strategy is loaded where this package is not."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang.errors import UsageError
from tests.launching import python
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S

WHOLE = (
    *("ddp", "torch-ddp", "sharded", "sharded-quantize8", "local-sgd", "diloco", "decentralized", "powersgd", "onebit"),
    *("qadam", "parameter-server", "async-parameter-server", "horovod", "bagua-gradient-allreduce"),
)
PARTS = ("sharded-gradients", "sharded-weights")
DIVIDED = ("pipeline", "tensor")

LOADS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "guozhuang":
            raise ImportError("a pickle needs " + name)

sys.meta_path.insert(0, Absent())
import pathlib, torch
files = sorted(pathlib.Path(sys.argv[1]).glob("*.pt"))
for file in files:
    try:
        found = torch.load(file, weights_only=file.name.startswith("state"))
        if file.name.startswith("model"):
            found(torch.ones(2, 4)).sum().backward()
            found.load_state_dict(found.state_dict())
            assert type(found) is torch.nn.Sequential, type(found)
    except Exception as error:
        print(file.name, type(error).__name__, error)
print(len(files), "files")
"""


def saves(rank: int, size: int, folder: str) -> None:
    gz.init(timeout_s=LIMIT_S)
    for strategy in (*WHOLE, *DIVIDED, *PARTS):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = gz.prepare(model, optimizer, strategy, proof=False)
        for _ in range(2):
            model(torch.ones(4, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {"state": model.state_dict(), "state of optimizer": optimizer.state_dict()}
        if strategy in PARTS:
            found = {"state": {name: gz.full_tensor(value) for name, value in found["state"].items()}}
        if strategy in WHOLE:
            found |= {"model": model, "model unwrapped": gz.unwrap(model)}
        else:
            with pytest.raises((UsageError, RuntimeError)):
                torch.save(model, io.BytesIO())
        for name, value in found.items() if rank == 0 else ():
            torch.save(value, f"{folder}/{name} {strategy}.pt")
    gz.shutdown()


def test_what_is_saved_loads_without_this_package(tmp_path: Path) -> None:
    run_ranks(saves, 2, str(tmp_path), init=False)
    done = python("-c", LOADS, tmp_path)
    assert done.stdout == f"{4 * len(WHOLE) + 2 * len(DIVIDED) + len(PARTS)} files\n", done
