"""``guozhuang.launch``: a function on new ranks, for programs and notebooks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launching import Launched, guozhuang, write
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.waits

# A program in the shape of a notebook: what the ranks run is defined in __main__, with a model, state and helpers beside it.
PROGRAM = """
import os, sys, threading, time
import torch
import guozhuang as gz

class Model(torch.nn.Linear):
    pass

class OfTheProgram(Exception):
    pass

def batch(rank, size):
    x = torch.arange(16.0).reshape(4, 4)
    return x[rank::size]

def train(lr, *, steps):
    world = gz.init()
    torch.manual_seed(0)
    model = Model(4, 1)
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for _ in range(steps):
        model(batch(world.rank, world.size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return world.rank, type(optimizer).__name__, model.weight.detach().clone(), torch.distributed.get_backend()

def fail():
    if os.environ["RANK"] == "1":
        raise OfTheProgram("on purpose")
    gz.init()  # waits for the other rank, which never comes: it must not be what ends the wait

def leave():
    os._exit(0 if os.environ["RANK"] == "0" else 7)

def nested():
    return gz.init().rank, gz.launch(lambda: gz.init().size, nproc=1)

def later():
    open("later has begun", "w").close()
    while not os.path.exists("later may end"):
        time.sleep(0.01)

def wait():
    print("waiting", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    if sys.argv[1:] == ["wait"]:
        try:
            gz.launch(wait, nproc=2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise SystemExit(0)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # the first one sets a variable for torch's compiler
    before = dict(os.environ)
    found = gz.launch(train, (0.001,), {"steps": 3}, nproc=2, strategy="sharded")
    assert [each[0] for each in found] == [0, 1] and found[0][1] == "ShardedOptimizer" and found[0][3] == "shm", found
    assert torch.equal(found[0][2], found[1][2])
    # The same program as one process, on all of the data.
    torch.manual_seed(0)
    alone = Model(4, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.001)
    for _ in range(3):
        alone(batch(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found[0][2], alone.weight.detach())
    try:
        gz.launch(fail, nproc=2)
    except gz.RankFailed as error:
        assert error.rank == 1 and "in fail" in str(error) and "OfTheProgram: on purpose" in str(error), error
        assert isinstance(error.__cause__, OfTheProgram), error.__cause__
    else:
        raise SystemExit("no error")
    try:
        gz.launch(leave, nproc=2)
    except gz.RankFailed as error:
        assert "rank 1" in str(error) and "exit code 7" in str(error), error
    else:
        raise SystemExit("no error")
    for words, more in (("launch() takes a function", {"function": 3}), ("there is no such strategy", {"strategy": "x"})):
        try:
            gz.launch(**{"function": train, "nproc": 2, **more})
        except ValueError as error:
            assert words in str(error), error
    lock = threading.Lock()
    for words, function in (("returned cannot be pickled", lambda: (i for i in "ab")), ("rank 0 left before", sys.exit)):
        try:
            gz.launch(function)
        except gz.RankFailed as error:
            assert words in str(error), error
        else:
            raise SystemExit("no error")
    assert gz.launch(nested, nproc=2) == [(0, [1]), (1, [1])]
    other = threading.Thread(target=gz.launch, args=(later,))
    other.start()
    while not os.path.exists("later has begun"):
        time.sleep(0.01)
    for words, function in (("another thread", later), ("cannot be pickled for the ranks", lambda: lock)):
        try:
            gz.launch(function)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise SystemExit("no error")
        open("later may end", "w").close()
        other.join()
    assert dict(os.environ) == before
    print("done")
"""


@pytest.mark.slow
def test_results_and_exceptions_come_back_and_nothing_is_left(tmp_path: Path) -> None:
    script = write(tmp_path, PROGRAM)
    done = guozhuang("run", "-np", 1, script, folder=tmp_path, timeout_s=3 * LIMIT_S)  # starts it for the path alone
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "done", done


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_of_a_function(tmp_path: Path) -> None:
    script = write(tmp_path, PROGRAM)
    with Launched("run", "-np", 1, script, "wait", folder=tmp_path) as launched:
        launched.until(lambda: launched.printed.count("waiting") == 2)
        program = next(
            each for each in launched.processes() if str(script) in each.cmdline() and "wait" in each.cmdline()
        )
        program.send_signal(signal.SIGINT)
        done = launched.wait()
        assert done.returncode == 0 and "interrupted" in done.stdout, done
        assert not launched.left()
