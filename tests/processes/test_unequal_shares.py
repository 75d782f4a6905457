"""Unequal parts of a batch in real ranks: every strategy weighs them or refuses; ``guozhuang run --batch-by speed`` adapts."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.registry import registry
from guozhuang.strategies import STRATEGIES, get
from guozhuang.world.layout import HYBRID, OWN_AXIS
from tests import launching
from tests.ranks import run_ranks

EXACT = ("ddp", "auto", "sharded", "parameter-server", "sparse-rows")
NEARLY = {"sharded-quantize8": 0.05, "quantize8": 0.05, "fp16": 0.005, "bf16": 0.02, "powersgd": 1e-10}
REFUSE = (
    *("torch-ddp", "sharded-gradients", "sharded-weights", "adasum", "local-sgd", "node-local-sgd", "diloco"),
    *("decentralized", "async-model-average", "async-parameter-server", "low-precision-decentralized"),
)
ROWS, WIDTH, EPOCHS = 26, 6, 2  # 6 whole batches of 4 in an epoch


class Data:
    """Rows of float64, so that what is equal is seen."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def trained(strategy: str | None, shares: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Train and return the weights; ``None``: in this process alone."""
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1)).to(dtype)
    if strategy is not None:
        model = gz.SyncBatchNorm.convert_sync_batchnorm(model)
    module, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy is not None:
        model, optimizer = gz.prepare(model, optimizer, strategy)
    one = {"rank": 0, "num_replicas": 1} if strategy is None else {}
    batches = gz.loader(Data(dtype), global_batch_size=4, shares=shares, drop_last=True, **one)
    for _ in range(EPOCHS):
        for rows in batches:
            with gz.accumulate(model, steps=2) as is_last:
                (model(rows).square().mean() / 2).backward()
            if is_last:
                gz.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([each.detach().double().reshape(-1) for each in module.parameters()])


def all_strategies(rank: int, size: int, backend: str) -> dict[str, float]:
    gz.init(backend)
    single, found = trained(None, None), {}
    names = [*EXACT, *(NEARLY if backend == "shm" else ())]
    for name in names:
        found[name] = float((trained(name, [3, 1]) - single).abs().max())
    if backend == "gloo":
        gz.shutdown()
        return found
    found["halves"] = float((trained("sharded", [3, 1], torch.bfloat16) - single).abs().max())
    for name in (*REFUSE, "tensor"):
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        kept = gz.prepare(model, torch.optim.Adam(model.parameters()), name)
        batches = gz.loader(Data(torch.float32), 4, shares=[1] if name == "tensor" else [3, 1])
        with pytest.raises(
            UsageError, match=f"unequal parts, and {'ranks that' if name == 'tensor' else 'this strategy'}"
        ):
            next(iter(batches))
        del kept, model, batches
        gc.collect()  # what stands around fully_shard refers to itself
    gz.shutdown()  # rank 0 keeps the store, which the other one may still read
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_strategies_weigh_or_refuse(backend: str) -> None:
    for found in run_ranks(all_strategies, 2, backend, init=False):
        for name in EXACT:
            assert found[name] < 1e-10, (name, found)
        for name, bound in ({**NEARLY, "halves": 0.1} if backend == "shm" else {}).items():
            assert found[name] < bound, (name, found)


def test_every_strategy_of_several_ranks_is_asked() -> None:
    """A new strategy has to say here what it does with unequal parts."""
    divided = {*OWN_AXIS, HYBRID, "torch-pipeline", "torch-tensor"}
    known = {*EXACT, *NEARLY, *REFUSE, "none"}
    # Exchanges of gradients as those above, of momentum to which this rank adds its gradient, and of weights.
    like = {"sparse-rows8", "quantize4", "dithering", "onebit", "topk", "randomk", "qadam", "onebit-adam"}
    like |= {"overlapped-local-sgd", "decentralized-pairs"}
    left = {n for n in STRATEGIES if not get(n).one_process} - divided - known - like
    assert all(name.startswith(("horovod", "byteps", "bagua")) for name in left), left


SCRIPT = """
import json, sys, torch
from types import SimpleNamespace
import guozhuang as gz
from guozhuang.data import speed
from guozhuang.registry import registry
from guozhuang.watch import waits

now_ns = 0  # a clock that only this script sets forward
given = SimpleNamespace(perf_counter_ns=lambda: now_ns, monotonic=speed.time.monotonic, sleep=speed.time.sleep)
speed.time = waits.time = given

class Data:
    def __len__(self):
        return 32 * 42 + 7

    def __getitem__(self, index):
        return index, torch.ones(4) * (index % 7)

model = torch.nn.Linear(4, 1)
model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
batches = gz.loader(Data(), global_batch_size=32, num_workers=int(sys.argv[2]))
equal = gz.loader(Data(), 8, ends="uneven")
rank, sizes, seen = gz.init().rank, [], []
for index, rows in batches:
    sizes.append(len(rows))
    seen += index.tolist()
    assert abs(registry.weight.value - len(rows) * 2 / (32 if len(sizes) < 43 else 7)) < 1e-9
    now_ns += 2_000_000 * len(rows) * (2 if rank == (1 if len(sizes) <= 21 else 0) else 1)
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
json.dump([sizes, seen], open(f"{sys.argv[1]}/{rank}.json", "w"))
"""


@pytest.mark.parametrize(("strategy", "num_workers"), [("ddp", 0), pytest.param("sharded", 2, marks=pytest.mark.slow)])
def test_run_by_speed_adapts_within_20_steps(strategy: str, num_workers: int, tmp_path: Path) -> None:
    """A rank needs twice as long for a sample; after 21 steps it is the other one."""
    script = launching.write(tmp_path, SCRIPT)
    words = ("run", "-np", "2", "--batch-by", "speed", "--strategy", strategy, script, tmp_path, num_workers)
    # A fork of the tests' fork server would start the loader's workers by a fork server too, which runs the script again.
    # Its workers make sockets in TMPDIR, whose paths are at most 107 bytes long.
    done = launching.guozhuang(*words, folder=tmp_path, forks_ranks=not num_workers, TMPDIR=tempfile.gettempdir())
    assert done.returncode == 0, done
    (sizes, seen), (others, also_seen) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert sizes[0] == others[0] == 16 and [a + b for a, b in zip(sizes, others, strict=True)] == [32] * 42 + [7]
    assert 19 <= sizes[19] <= 24 and 8 <= sizes[40] <= 13, sizes
    assert sorted([*seen, *also_seen]) == list(range(32 * 42 + 7))
    told = [line for line in (done.stdout + done.stderr).splitlines() if "the ranks take" in line]
    assert len(told) >= 2 and "of 32 samples (own time of a sample" in told[0], done
    assert "a loader keeps equal parts" in done.stdout + done.stderr


def test_registry_knows_the_request_in_a_world_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUOZHUANG_BATCH_BY", "fast")
    from guozhuang.world.requests import requested_shares

    with pytest.raises(UsageError, match="GUOZHUANG_BATCH_BY must hold speed or equal"):
        requested_shares()
    for text, wanted in (("speed", "speed"), ("equal", None), ("", None)):
        monkeypatch.setenv("GUOZHUANG_BATCH_BY", text)
        assert requested_shares() == wanted
    assert registry.shares is None
