"""Of three hosts, one of which has a slow link, a run names that one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.launching import write

from .network import Hosts, _run, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

SCRIPT = """
import torch
import guozhuang as gz

torch.set_num_threads(1)
world = gz.init()
model = torch.nn.Linear(256, 512)
model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(220):
    model(torch.ones(2, 256)).square().mean().backward()
    optimizer.step()
"""


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    with Hosts(3, rate="500mbit") as hosts:
        for namespace, device in ((hosts._name(1), "eth0"), (hosts._switch, "p1")):
            shape = ("tbf", "rate", "80mbit", "burst", "128kb", "latency", "50ms")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)
        words = [
            sys.executable,
            "-m",
            "guozhuang",
            "run",
            "--nnodes",
            "3",
            "-np",
            "1",
            "--master-addr",
            hosts.address(0),
        ]
        env = os.environ | {"GUOZHUANG_BACKEND": "gloo"}
        running = [
            hosts.run(host, [*words, "--node-rank", str(host), script], env, tmp_path / f"{host}") for host in range(3)
        ]
        ended = [each.wait(120) for each in running]
    said = "".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0, 0], said
    found = re.findall(r"rank (\d) on (\S+) is slow: its (\w+)", said)
    assert found and set(found) == {("1", "h1", "link")}, said
