"""A rank that ends with 0 while others wait for it is named within seconds, wherever they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import Launched, python

pytestmark = pytest.mark.waits

SCRIPT = """
import sys, torch, guozhuang as gz
where = sys.argv[1]
world = gz.init()
if where == "prepare" and world.rank == 1:
    sys.exit(0)
net = torch.nn.Linear(2, 2)
model, optimizer = gz.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
if where == "save" and world.rank == 1:
    sys.exit(0)
gz.save("ck")
print("all were there")
"""


@pytest.mark.parametrize("where", ["prepare", pytest.param("save", marks=pytest.mark.slow)])
def test_it_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = Launched("run", "-np", 3, "train.py", where, folder=tmp_path).wait()
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "all were there" not in said
    assert "rank 1 ended with exit code 0" in said or "rank 1 (pid" in said, said


AT_EXIT = """
import sys, threading, weakref
from guozhuang.groups.serial import SerialThread

class Owner:
    pass

owner, is_over = Owner(), threading.Event()

def job():
    is_over.wait()
    for _ in range(3_000_000):
        pass
    open(sys.argv[1], "w").close()

thread = SerialThread("a test's")
thread.run(job)
weakref.finalize(owner, is_over.set)  # at exit
"""


@pytest.mark.slow
def test_the_exit_waits_for_threads_that_end_then(tmp_path: Path) -> None:
    """One that is ended by the interpreter inside of torch aborts the process: [Note: threads at exit] in groups/serial.py."""
    done = python("-c", AT_EXIT, tmp_path / "ended")
    assert done.returncode == 0 and (tmp_path / "ended").exists(), done
