"""``guozhuang plan --ranks N train.py``: its bytes and memory are those of real ranks; scripts that cannot run are told why."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from guozhuang.errors import UsageError
from guozhuang.lab.planner import fake
from tests.waiting import LIMIT_S

SCRIPT = """
import sys
import torch
from torch import nn
import torch.distributed as dist
import guozhuang as gz
from guozhuang.lab import measure

world = gz.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
model, optimizer = gz.prepare(model, torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))
number, sent = 0, 0
while number < 60:
    for x, y in gz.loader(data, batch_size=16):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if world.size > 1 and dist.get_backend() == "gloo" and number in (4, 24):
            dist.barrier()
            sent = measure.tcp_sent_bytes() - sent
    if number >= 24 and dist.get_backend() == "gloo":
        dist.barrier()
        print(f"sent {sent / 20:.0f} peak {measure.peak_memory_bytes()}", flush=True)
        break
"""


def planned(script: Path, ranks: int, capfd: Any, **more: Any) -> Any:
    given = {"ranks": str(ranks), "rank": "0", "on": None, "strategy": None, "layout": None, "json": True} | more
    asked = argparse.Namespace(training_script=str(script), training_script_args=[], **given)
    assert fake.run(asked) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("ddp", 4), ("quantize8", 4), ("sharded", 2)])
def test_bytes_and_memory_are_those_of_real_ranks(strategy: str, num_ranks: int, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "guozhuang", "run", "--nproc-per-node", str(num_ranks), "--backend", "gloo"]
    real = subprocess.run(
        [*command, "--strategy", strategy, str(script)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    told = [(int(a), int(b)) for a, b in re.findall(r"sent (\d+) peak (\d+)", real.stdout)]
    assert len(told) == num_ranks, real.stdout + real.stderr
    found = planned(script, num_ranks, capfd, strategy=strategy)
    predicted = sum(each["wire_bytes"] for each in found["sent"])
    # Each message has a header of its own, and the ranks' heartbeats are on the same sockets.
    measured = sum(sent for sent, _ in told) / num_ranks
    assert predicted == pytest.approx(measured, rel=0.01)
    if strategy != "sharded":  # whose copies inside of gloo are more than a fake world makes
        assert found["peak_bytes"] == pytest.approx(min(peak for _, peak in told), rel=0.1)


@pytest.mark.slow
def test_a_thousand_ranks(tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = planned(script, 1024, capfd, on="1024x1cores,10gbit/0.1ms", strategy="fp16")
    gradients = 2 * (256 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
    (sent,) = [each for each in found["sent"] if each["operation"] == "all_reduce"]
    assert sent["tensor_bytes"] == pytest.approx(gradients, rel=1e-3)
    assert sent["wire_bytes"] == pytest.approx(2 * gradients * 1023 / 1024, rel=0.05)
    assert [each["num_ranks"] for each in found["scaling"]] == [2**i for i in range(11)]
    efficiencies = [each["efficiency"] for each in found["scaling"]]
    assert efficiencies[0] == 1 and efficiencies == sorted(efficiencies, reverse=True)


@pytest.mark.slow
def test_what_scripts_get_wrong_is_said(tmp_path: Path, capfd: Any) -> None:
    given = {"ranks": "4", "rank": "3", "on": None, "strategy": None, "layout": None, "json": False}
    wrong = {
        "import torch\ntorch.multiprocessing.spawn(print, nprocs=4)": "starts its ranks itself",
        "import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=2)": "leave rank= and",
        "print('nothing')": "after 0 steps",
    }
    for number, (text, expected) in enumerate(wrong.items()):
        script = tmp_path / f"wrong{number}.py"
        script.write_text(text)
        assert fake.run(argparse.Namespace(training_script=str(script), training_script_args=[], **given)) == 2
        assert expected in capfd.readouterr().err
    with pytest.raises(UsageError, match="--ranks 1024"):
        fake.run(argparse.Namespace(training_script=str(script), training_script_args=[], **given | {"ranks": "2,4"}))
    plain = tmp_path / "alone.py"
    plain.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(30):\n    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n"
    )
    assert fake.run(argparse.Namespace(training_script=str(plain), training_script_args=[], **given)) == 0
    assert "the rank exchanged nothing" in capfd.readouterr().out
