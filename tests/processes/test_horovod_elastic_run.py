"""Elastic runs: a driver, and workers on "hosts" that are all this machine (127.0.0.1, 127.0.0.2, ...)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from guozhuang.compat.horovod.runner.elastic.settings import ElasticSettings
from tests.forking import fork_server
from tests.launching import ROOT
from tests.waiting import EXPIRES_S, LIMIT_S, remaining, until

pytestmark = pytest.mark.waits

TRAIN = """
import json, os, sys, time
import torch
import horovod.torch as hvd

folder = sys.argv[1]
torch.set_num_threads(1)
if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.9":  # it is lost while the others are still in hvd.init()
    from guozhuang.compat.horovod.common import basics
    assert callable(basics._places)
    basics._places = lambda *arguments: os.kill(os.getpid(), 9)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(240), seed=3)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, batches=[])
sizes = []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

syncs, sync = [], state.sync
state.sync = lambda: (sync(), syncs.append(state.step))

def inputs(indices):
    values = torch.tensor(indices, dtype=torch.float32)
    return torch.stack([values / 240, (values * 7 % 11) / 11], 1)

def allowed():
    return int(open(f"{folder}/allowed").read() or 0)

@hvd.elastic.run
def train(state):
    while state.epoch < 1:
        indices = list(state.sampler)
        for begin in range(0, len(indices), 4):
            mine = indices[begin : begin + 4]
            x = inputs(mine)
            optimizer.zero_grad()
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
            everybodys = hvd.allgather(torch.tensor(mine)).view(hvd.size(), -1).tolist()
            state.batches = [*state.batches, everybodys]
            state.step += 1
            state.sampler.record_batch(begin, 4)
            with open(f"{folder}/now{hvd.rank()}.tmp", "w") as file:
                json.dump([os.getpid(), hvd.size(), state.step, os.environ["HOROVOD_HOSTNAME"]], file)
            os.replace(f"{folder}/now{hvd.rank()}.tmp", f"{folder}/now{hvd.rank()}")
            if state.step % 3 == 0:
                state.commit()
            while hvd.allreduce(torch.tensor([state.step >= allowed()]).float(), op=hvd.Max, name="held")[0]:
                state.check_host_updates()
                time.sleep(0.05)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return "done"

print(train(state), hvd.rank(), sizes, syncs)
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "batches": state.batches, "optimizer": optimizer.state_dict()}, f"{folder}/result")
"""


def settings(folder: Path, hosts: str, *command: str, **more: Any) -> ElasticSettings:
    """Of a run whose hosts are what the file ``hosts`` says."""
    (folder / "hosts").write_text(hosts)
    found = ElasticSettings(
        command=list(command),
        num_proc=2,
        min_np=2,
        host_discovery_script=f"cat {folder}/hosts",
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        elastic_timeout_s=LIMIT_S,
    )
    return replace(found, **more)


class Driver:
    """``run_elastic`` in a process of its own, which prints to a file of the folder; see ``driver``."""

    def __init__(self, folder: Path, wanted: ElasticSettings, file: str, grace_s: float | None) -> None:
        self._printed = folder / file
        context = fork_server()
        self.process: Any = context.Process(target=_drive, args=(wanted, str(self._printed), grace_s))
        self.process.start()

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace") if self._printed.exists() else ""

    def until(self, what: Callable[[], object]) -> None:
        """Wait until the answer is true; fail with what was printed if the driver ends before that."""
        until(what, goes_on=self.process.is_alive, told=lambda: self.printed)

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        self.process.join(timeout_s)
        assert not self.process.is_alive(), f"it runs after {timeout_s:g} s; it printed:\n{self.printed}"
        return int(self.process.exitcode)


@contextmanager
def driver(
    folder: Path, wanted: ElasticSettings, file: str = "printed", grace_s: float | None = None
) -> Iterator[Driver]:
    """Nothing of it is left afterwards. ``grace_s`` is how long workers have after SIGTERM, where that is another time."""
    running = Driver(folder, wanted, file, grace_s)
    try:
        yield running
    finally:
        if running.process.is_alive():
            running.process.kill()
        running.process.join(LIMIT_S)
        left = remaining(lambda: of_folder(folder), LIMIT_S)
        assert not left, (left, running.printed)


def of_folder(folder: Path) -> list[str]:
    """Processes that have the folder on their command line."""
    return [
        str(each) for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or [])
    ]


def allow(folder: Path, steps: int) -> None:
    """Let the ranks train until they have done so many steps."""
    (folder / "allowed.new").write_text(str(steps))
    (folder / "allowed.new").replace(folder / "allowed")


def now(folder: Path, rank: int) -> list[Any]:
    """[pid, size, step, host] of a rank at its last step."""
    path = folder / f"now{rank}"
    return json.loads(path.read_text()) if path.exists() else [0, 0, 0, ""]


def replayed(batches: list[list[list[int]]]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same steps in one process: the mean over ranks of each rank's gradient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for everybodys in batches:
        optimizer.zero_grad()
        for mine in everybodys:
            values = torch.tensor(mine, dtype=torch.float32)
            x = torch.stack([values / 240, (values * 7 % 11) / 11], 1)
            ((model(x).squeeze(1) - x.sum(1)).square().mean() / len(everybodys)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_one_never_enters_one_comes_one_is_killed_one_is_removed(tmp_path: Path, backend: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = (sys.executable, str(tmp_path / "train.py"), str(tmp_path))
    hosts = "127.0.0.1:1\n127.0.0.2:1\n127.0.0.9:1\n"
    wanted = settings(tmp_path, hosts, *command, num_proc=3, min_np=1, max_np=3, output_filename=str(tmp_path / "out"))
    wanted = replace(wanted, env={**wanted.env, "GUOZHUANG_BACKEND": backend})
    allow(tmp_path, 7)  # one after a commit
    with driver(tmp_path, wanted) as running:
        running.until(lambda: now(tmp_path, 1)[1:3] == [2, 7])
        assert "the world of round 1 was not entered" in running.printed and "round 2 begins" in running.printed
        (tmp_path / "hosts").write_text("127.0.0.1:1\n127.0.0.2:1\n127.0.0.3:1\n")
        running.until(lambda: "round 3 begins" in running.printed)
        allow(tmp_path, 14)
        running.until(lambda: now(tmp_path, 2)[1:3] == [3, 14])
        pid, _, _, host = now(tmp_path, 1)
        assert host == "127.0.0.2"
        os.kill(pid, signal.SIGKILL)
        running.until(lambda: now(tmp_path, 1)[1] == 2 and now(tmp_path, 1)[3] == "127.0.0.3")
        allow(tmp_path, 20)
        running.until(lambda: now(tmp_path, 1)[1:3] == [2, 20])
        (tmp_path / "hosts").write_text("127.0.0.2:1\n127.0.0.3:1\n")  # without that of rank 0
        running.until(lambda: now(tmp_path, 0)[3] == "127.0.0.3")
        allow(tmp_path, 10**6)
        assert running.wait() == 0, running.printed
        printed = running.printed
    assert "done 0 [2, 1] [7, 12]" in printed, printed  # nobody is new in the last round, and all hold the same
    assert "RemovedError: removed from elastic job" in printed
    assert "rank 2 (host 127.0.0.9" in printed and "rank 1 (host 127.0.0.2" in printed
    assert printed.count("signal 9 (SIGKILL)") == 2
    result = torch.load(tmp_path / "result")
    sizes = [len(everybodys) for everybodys in result["batches"]]
    assert sizes[:20] == [2] * 7 + [3] * 5 + [2] * 8, "what was after the last commit, at step 12, was done again"
    assert set(sizes[20:]) == {1}
    seen = [index for everybodys in result["batches"] for mine in everybodys for index in mine]
    assert set(seen) == set(range(240)) and len(seen) - 240 < 3 * 4, "each sample once, but for the last batch"
    model, optimizer = replayed(result["batches"])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(result["model"][name], value, rtol=1e-5, atol=1e-6)
    ours, theirs = result["optimizer"]["state"], optimizer.state_dict()["state"]
    for number, entries in theirs.items():
        torch.testing.assert_close(ours[number]["momentum_buffer"], entries["momentum_buffer"], rtol=1e-4, atol=1e-6)
    assert "done 0" in (tmp_path / "out" / "rank.0" / "stdout").read_text()


LIGHT = """
import os, sys, time
from guozhuang.compat.horovod.runner.elastic import worker

folder = sys.argv[1]
while True:
    found = worker.membership().join()
    place = f"{found.number} {os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.environ['HOROVOD_CROSS_SIZE']}"
    print(place, flush=True)
    while not os.path.exists(f"{folder}/round{found.number}.over"):
        if os.path.exists(f"{folder}/end{os.environ['HOROVOD_HOSTNAME']}"):
            sys.exit(3)
        if os.path.exists(f"{folder}/end{os.environ['RANK']}"):
            sys.exit(4)
        time.sleep(0.02)
"""


def light(folder: Path) -> tuple[str, ...]:
    (folder / "light.py").write_text(LIGHT)
    return sys.executable, str(folder / "light.py"), str(folder)


@pytest.mark.slow
def test_a_failure_takes_its_host_along_and_the_limit_of_resets_ends_the_job(tmp_path: Path) -> None:
    hosts = "127.0.0.1:2\n127.0.0.2:1\n"
    wanted = settings(tmp_path, hosts, *light(tmp_path), num_proc=3, min_np=1, reset_limit=0, prefix_timestamp=True)
    with driver(tmp_path, wanted) as running:
        # Both hosts have the local rank 0, one has the local rank 1.
        running.until(lambda: all(line in running.printed for line in ("1 0 3 2", "1 1 3 1", "1 2 3 2")))
        (tmp_path / "end0").touch()
        running.until(lambda: "ending rank 1 (host 127.0.0.1" in running.printed)
        (tmp_path / "round1.over").touch()
        assert running.wait() == 1, running.printed
        printed = running.printed
    assert "gets no workers any more" in printed
    assert "Horovod was shutdown because number of resets during elastic job exceeded limit: 0" in printed
    assert "Horovod detected that one or more processes exited with non-zero status" in printed
    assert "Process name: rank 0 (host 127.0.0.1" in printed and "Exit code: 4" in printed
    assert re.search(r"^20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \[1\] 1 1 3 1$", printed, re.MULTILINE), printed


def test_too_few_slots_end_the_job(tmp_path: Path) -> None:
    wanted = settings(tmp_path, "127.0.0.1:1\n", *light(tmp_path), elastic_timeout_s=EXPIRES_S)
    with driver(tmp_path, wanted) as running:
        assert running.wait() == 1
        assert (
            f"after {EXPIRES_S:g} s (--elastic-timeout) 1 slot can be used (found: 127.0.0.1:1), and 2"
            in running.printed
        )


def test_a_worker_whose_slot_goes_is_told_so_and_no_failure(tmp_path: Path) -> None:
    wanted = settings(tmp_path, "127.0.0.1:2\n", *light(tmp_path), min_np=1)
    with driver(tmp_path, wanted) as running:
        running.until(lambda: "[0] 1 0 2 1" in running.printed and "[1] 1 1 2 1" in running.printed)
        (tmp_path / "hosts").write_text("127.0.0.1:1\n")
        running.until(lambda: "hosts are now: 127.0.0.1:1" in running.printed)
        (tmp_path / "round1.over").touch()
        running.until(lambda: "[0] 2 0 1 1" in running.printed and "has left with exit code 1" in running.printed)
        running.process.terminate()
        assert running.wait() == 128 + signal.SIGTERM
        printed = running.printed
    assert "RemovedError: removed from elastic job" in printed and "got SIGTERM" in printed
    assert "rank 1 (host 127.0.0.1" in printed and "Horovod detected" not in printed


def test_scripts_that_fail_at_once(tmp_path: Path) -> None:
    fails = ("/bin/sh", "-c", f"echo {tmp_path} says no >&2; exit 4")
    with driver(tmp_path, settings(tmp_path, "127.0.0.1:1\n127.0.0.2:1\n", *fails)) as running:
        assert running.wait() == 1
        printed = running.printed
    assert "so no host is left" in printed and "Exit code: 4" in printed and f"  {tmp_path} says no" in printed
    with driver(tmp_path, settings(tmp_path, "127.0.0.1:2\n", "/no/such/program", str(tmp_path))) as running:
        assert running.wait() == 1
        assert "Exit code: 127" in running.printed
    too_long = ("/bin/true", str(tmp_path), "x" * 200_000)
    with driver(tmp_path, settings(tmp_path, "127.0.0.1:1\n", *too_long, num_proc=1, min_np=1)) as running:
        assert running.wait() == 1
        assert "horovodrun: /bin/true cannot be started: " in running.printed and "Exit code: 126" in running.printed
    with driver(tmp_path, settings(tmp_path, "nonsense here\n", *fails)) as running:
        assert running.wait() == 2
        assert "discovery script" in running.printed
    both = ("/bin/sh", "-c", f"echo {tmp_path}; test $HOROVOD_HOSTNAME = 127.0.0.1")
    with driver(tmp_path, settings(tmp_path, "127.0.0.1:1\n", *both, num_proc=1, min_np=1)) as running:
        assert running.wait() == 0, running.printed


def test_a_discovery_script_that_fails_and_a_driver_that_is_killed(tmp_path: Path) -> None:
    command = ("/bin/sh", "-c", f"echo {tmp_path}; sleep 600")
    with driver(tmp_path, settings(tmp_path, "127.0.0.1:1\n127.0.0.2:1\n", *command)) as running:
        running.until(lambda: running.printed.count(f"{tmp_path}\n") == 2)
        (tmp_path / "hosts").rename(tmp_path / "away")
        running.until(lambda: "ended with exit code 1, saying: cat: " in running.printed)
        assert "The hosts that were found before stay" in running.printed
        (tmp_path / "away").rename(tmp_path / "hosts")
        running.until(lambda: "the discovery script works again" in running.printed)
        running.process.kill()
        running.process.join(LIMIT_S)
        assert not remaining(lambda: of_folder(tmp_path), LIMIT_S)


def _drive(wanted: ElasticSettings, path: str, grace_s: float | None) -> None:
    with open(path, "wb") as file:
        for target in (1, 2):
            os.dup2(file.fileno(), target)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "GUOZHUANG_"))]:
        del os.environ[name]
    from guozhuang.compat.horovod.runner.elastic import crew
    from guozhuang.compat.horovod.runner.elastic import driver as module
    from guozhuang.errors import UsageError

    if grace_s is not None:
        crew.GRACE_S = module.GRACE_S = grace_s  # type: ignore[misc]
    try:
        code = module.run_elastic(wanted)
    except UsageError as error:
        print(error, flush=True)
        code = 2
    sys.exit(code)
