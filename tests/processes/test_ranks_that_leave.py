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
if where in ("save", "collective") and world.rank == 1:
    sys.exit(0)
if where == "collective":
    torch.distributed.all_reduce(torch.ones(2))
gz.save("ck")
print("all were there")
"""


@pytest.mark.parametrize(
    ("where", "strategy"),
    [
        ("prepare", "ddp"),
        pytest.param("save", "ddp", marks=pytest.mark.slow),
        ("save", "async-parameter-server"),  # whose ranks stay at their end, because they serve each other
        pytest.param("collective", "async-parameter-server", marks=pytest.mark.slow),
    ],
)
def test_it_is_named(tmp_path: Path, where: str, strategy: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = Launched("run", "-np", 3, "--strategy", strategy, "train.py", where, folder=tmp_path).wait()
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "all were there" not in said
    assert "rank 1 ended with exit code 0" in said or "rank 1 (pid" in said, said


LEAVES_EARLY = """
import sys, time, torch, guozhuang as gz
world = gz.init()
net = torch.nn.Linear(2, 2)
model, optimizer = gz.prepare(net, torch.optim.SGD(net.parameters(), 0.001))
steps, began = 0, time.monotonic()
while world.rank == 0 and time.monotonic() - began < 12 or steps < 3:  # --hang-timeout 2: twice that and 5 s
    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    steps += 1
print("trained", steps)
"""


@pytest.mark.slow
def test_a_rank_that_serves_others_after_its_end_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES_EARLY)
    words = ("run", "-np", 2, "--strategy", "async-parameter-server", "--hang-timeout", 2, "train.py")
    done = Launched(*words, folder=tmp_path).wait()
    assert done.returncode == 0 and done.stdout.count("trained") == 2, done


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
