"""The heartbeat with real ranks: one of them stops in some way, and the others say which, with the stacks of all."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import guozhuang as gz
from guozhuang.watch.report import EXIT_CODE
from tests.forking import fork_server
from tests.launching import guozhuang
from tests.processes import heartbeat_rank
from tests.ranks import free_port, run_ranks
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.waits

HANG_S = 2.0
slow = pytest.mark.slow


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative for a signal), and what it printed to either stream."""

    code: int
    text: str


def _child(case: str, who: int, hang_timeout_s: float | None, environ: dict[str, str], output: str) -> None:
    with open(output, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    torch.set_num_threads(1)
    code = 1
    try:
        heartbeat_rank.main(case, who, hang_timeout_s)
        code = 0
    except Exception as error:  # what the interpreter does with an exception that nobody catches
        heartbeat_rank.RUNNING[0].stop(error)
        traceback.print_exc()
    os._exit(code)


def ranks(
    folder: Path,
    case: str,
    who: int,
    hang_timeout_s: float | None,
    *,
    num_ranks: int = 3,
    backend: str = "gloo",
    kept_by: str = "launcher",
    awaited: Collection[int] | None = None,
    **environ: str,
) -> list[Ended]:
    """Start the ranks and wait for the ``awaited`` ones (all); the others are killed then."""
    context = fork_server()
    store, port = None, free_port()
    if kept_by == "launcher":
        limit = datetime.timedelta(seconds=LIMIT_S)
        store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        port = store.port
    processes = []
    for rank in range(num_ranks):
        own = environ | {
            "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "BACKEND": backend,
            "TORCHELASTIC_USE_AGENT_STORE": str(kept_by == "launcher"),
        }  # fmt: skip
        arguments = (case, who, hang_timeout_s, own, str(folder / f"out{rank}"))
        processes.append(context.Process(target=_child, args=arguments, name=f"rank {rank}"))
        processes[-1].start()
    deadline = time.monotonic() + LIMIT_S
    try:
        for rank in range(num_ranks) if awaited is None else awaited:
            processes[rank].join(max(deadline - time.monotonic(), 0.1))
        late = [rank for rank in (awaited or range(num_ranks)) if processes[rank].is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    del store
    told = [(folder / f"out{rank}").read_text() for rank in range(num_ranks)]
    assert not late, f"ranks {late} did not end\n" + "\n".join(f"---- {r}:\n{text}" for r, text in enumerate(told))
    return [Ended(process.exitcode, text) for process, text in zip(processes, told, strict=True)]  # type: ignore[arg-type]


def pid(ended: Ended) -> str:
    found = re.search(r"PID (\d+)", ended.text)
    assert found is not None, ended.text
    return found[1]


def stacks(ended: Ended) -> dict[str, str]:
    """The stacks in a full report, by what stands over them."""
    parts = re.split(r"^---- (.*?):(?: |\n)", ended.text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def held_up(text: str) -> int:
    """How many collectives rank 1 has started, by which the others are held up in the next one."""
    found = re.search(r"held up by rank 1: (\d+) collectives of the default group started, others (\d+)", text)
    assert found is not None and int(found[2]) == int(found[1]) + 1, text
    return int(found[1])


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=slow)])
def test_a_rank_stuck_outside_is_named_on_all_with_the_stacks_and_all_end(tmp_path: Path, backend: str) -> None:
    ended = ranks(tmp_path, "sleep", 1, HANG_S, backend=backend)
    for rank, each in enumerate(ended):
        assert each.code == EXIT_CODE, each.text
        assert f"[rank {rank}] hang: no rank has started a collective for" in each.text
        started = held_up(each.text)
        assert started >= 20
        assert re.search(rf"\n +1 +runs +{started} .* sleeps_in_a_call \(heartbeat_rank.py:\d+\)", each.text), each.text
        assert re.search(rf"\n +0, 2 +waits +{started + 1} .* all_reduce, called in train", each.text), each.text
        assert each.text.count("hang:") == 1, "said once"
    told = stacks(ended[0])
    assert "in all_reduce" in told["ranks 0, 2"] if backend == "gloo" else "in all_reduce" in ended[0].text
    assert "in sleeps_in_a_call" in told["rank 1"]
    assert not stacks(ended[2]), "whole on rank 0, short on the others"


@dataclass(frozen=True)
class Trouble:
    """What one rank does, and what the report of it is.

    Attributes:
        case: of heartbeat_rank.py.
        said: by each rank that ends.
        stack: part of the stack of the rank that does it; "" where none is gathered.
        unsaid: what no rank says.
        who: the rank that does it.
        ends: the ranks that end by themselves, with the exit code ``code``.
        ends_at: what they say before, if the test ends them then.
    """

    case: str
    said: tuple[str, ...]
    stack: str = ""
    unsaid: str = "no such words"
    who: int = 1
    hang_timeout_s: float | None = None
    group_timeout_s: str = "150"
    ends: Collection[int] = (0, 2)
    code: int = 1
    backend: str = "gloo"
    ends_at: str = ""


HANG = {"hang_timeout_s": HANG_S, "code": EXIT_CODE}
TROUBLES = {
    "an exception": Trouble("raise", ("rank 1 ended with ValueError: no such file: data.bin",)),
    "another call": Trouble("skip", ("wait in different collectives (all_reduce, barrier)",), ends=range(3), **HANG),
    "another call, on shm": Trouble(
        "skip", ("MismatchError", "barrier"), unsaid="held up", ends=range(3), backend="shm", hang_timeout_s=HANG_S
    ),
    "polls in vain": Trouble("poll", ("held up by rank 1",), "in polls_a_queue", ends=range(3), **HANG),
    "left early": Trouble(
        "leave", ("held up by rank 1, which left the world while others still wait",), unsaid="lost", **HANG
    ),
    "holds the lock of Python": Trouble("lock", ("held up by rank 1: no sign of life for",), "gave no stack", **HANG),
    "rank 0 holds it": Trouble(
        "lock", ("held up by rank 0: no sign of life for",), "gave no stack", who=0, ends=(1, 2), **HANG
    ),
    "stopped, no time-out": Trouble(
        "stop",
        ("is stopped (by a signal", "nothing is ended because of this"),
        unsaid="hang:",
        ends_at="nothing is ended because of this",
    ),
    "stuck, no time-out": Trouble(
        "sleep", ("a collective failed on rank", "held up by rank 1: "), "in sleeps_in_a_call", group_timeout_s="10"
    ),
}


@pytest.mark.parametrize("name", ["an exception", *(pytest.param(each, marks=slow) for each in [*TROUBLES][1:])])
def test_who_is_in_trouble_is_named(tmp_path: Path, name: str) -> None:
    trouble = TROUBLES[name]
    limits = {"hang_timeout_s": trouble.hang_timeout_s, "GROUP_TIMEOUT_S": trouble.group_timeout_s}
    limits |= {"ENDS_AT": trouble.ends_at} if trouble.ends_at else {}
    ended = ranks(tmp_path, trouble.case, trouble.who, awaited=trouble.ends, backend=trouble.backend, **limits)
    for each in (ended[rank] for rank in trouble.ends):
        assert each.code == trouble.code, each.text
        assert all(words in each.text for words in trouble.said), each.text
        if "held up by rank 1: " in trouble.said:
            held_up(each.text)
        assert trouble.unsaid not in each.text.replace("lost one", ""), each.text
    if trouble.stack:
        [told] = [stacks(ended[rank]) for rank in trouble.ends if stacks(ended[rank])]
        assert trouble.stack in told[f"rank {trouble.who}"]


@pytest.mark.slow
def test_a_stuck_data_loader_is_a_hang_and_its_workers_end_too(tmp_path: Path) -> None:
    ended = ranks(tmp_path, "loader", 1, HANG_S)
    for each in ended:
        assert each.code == EXIT_CODE, each.text
        assert "held up by rank 1" in each.text
    assert "in reads_slow_data" in stacks(ended[0])["rank 1"]
    worker = re.search(r"WORKER (\d+)", ended[1].text)
    assert worker is not None
    until(lambda: not psutil.pid_exists(int(worker[1])))


@pytest.mark.slow
def test_a_long_time_without_collectives_is_no_hang_while_nobody_stands_still(tmp_path: Path) -> None:
    for each in ranks(tmp_path, "compute", -1, 1.0, num_ranks=2):
        assert each.code == 0, each.text
        assert "hang" not in each.text


@pytest.mark.parametrize("kept_by", ["launcher", "rank 0"])
def test_after_a_good_end_nothing_is_said_and_nothing_left(tmp_path: Path, kept_by: str) -> None:
    for each in ranks(tmp_path, "none", -1, 5.0, kept_by=kept_by):
        assert each.code == 0, each.text
        watched = "'guozhuang heartbeat afterwards'"  # until the process ends
        assert re.fullmatch(rf"PID \d+\nLEFT \[{watched}\] \d\.\d+\n", each.text), each.text


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_killed_rank_is_named_before_its_echo_ends_the_others(tmp_path: Path, backend: str) -> None:
    ended = ranks(tmp_path, "kill", 2, None, backend=backend)
    gone = f"rank 2 of 3: its process {pid(ended[2])} is gone: killed, or ended without gz.shutdown()"
    for rank in (0, 1):
        assert ended[rank].code == 1, ended[rank].text
        assert gone in ended[rank].text
        assert re.search(r"a collective failed on ranks? [01]", ended[rank].text), ended[rank].text
        assert ended[rank].text.index(gone) < ended[rank].text.index("Traceback"), "before it ends"
    told = stacks(ended[0])
    assert told.pop("rank 2").startswith("gave no stack")
    assert "in train" in "".join(told.values())


def test_a_killed_rank_0_is_named_by_the_rank_that_takes_the_watch_over(tmp_path: Path) -> None:
    ended = ranks(tmp_path, "kill", 0, None)
    for rank in (1, 2):
        assert "the store" not in ended[rank].text
    watchers = [each for each in ended[1:] if stacks(each)]
    assert len(watchers) == 1
    assert all(f"rank 0 of 3: its process {pid(ended[0])} is gone" in each.text for each in ended[1:])


def test_a_killed_rank_0_that_kept_the_store_is_named_by_each_for_itself(tmp_path: Path) -> None:
    ended = ranks(tmp_path, "kill", 0, None, kept_by="rank 0")
    for rank in (1, 2):
        text = ended[rank].text
        assert f"[rank {rank}] the connection to the store of the world broke" in text
        assert f"rank 0, which keeps it, is gone (its process {pid(ended[0])} is gone)" in text
        assert "in train" in text


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=slow)])
@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ends_the_rest_at_the_time_out(tmp_path: Path, backend: str) -> None:
    ended = ranks(tmp_path, "stop", 1, 6.0, awaited=(0, 2), backend=backend)
    for rank in (0, 2):
        text = ended[rank].text
        assert ended[rank].code == EXIT_CODE, text
        stopped = f"rank 1 of 3: its process {pid(ended[1])} is stopped (by a signal or a debugger)"
        assert stopped in text
        assert text.index(stopped) < text.index("held up by rank 1, lost")
    assert "rank 1" in stacks(ended[0])


@slow
def test_a_lock_that_is_held_for_a_while_is_no_loss(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ended = ranks(tmp_path, "lock for a while", 1, LIMIT_S, awaited=(1,), PIPE=str(tmp_path / "pipe"))
    assert "WENT ON" in ended[1].text
    assert all("lost" not in each.text.split("WENT ON")[0] for each in ended[1:2])
    assert "no sign of life" not in ended[0].text


@slow
def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    done = multiprocessing.get_context("fork").Process(target=_stop_all_for, args=(os.getpid(), tmp_path, 4.0))
    done.start()
    ended = ranks(tmp_path, "none", -1, HANG_S)
    done.join(LIMIT_S)
    assert done.exitcode == 0
    for each in ended:
        assert each.code == 0, each.text
        assert "hang" not in each.text and "lost" not in each.text


def _stop_all_for(parent: int, folder: Path, seconds: float) -> None:
    def three() -> list[int]:
        found = [re.search(r"PID (\d+)\n", path.read_text()) for path in folder.glob("out*")]
        return [int(each[1]) for each in found if each] if len(found) == 3 and all(found) else []

    pids = until(three, LIMIT_S)
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, sign)
        time.sleep(seconds)
        seconds = 0.0
    os._exit(0)


def own_threads(rank: int, size: int) -> list[str]:
    del rank, size
    gz.init("gloo", "cpu")
    names = [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name]
    dist.barrier()
    gz.shutdown()
    return names


def test_it_can_be_switched_off() -> None:
    assert run_ranks(own_threads, 2, init=False, env={"GUOZHUANG_HANG_TIMEOUT": "off"}) == [[], []]
    on = run_ranks(own_threads, 2, init=False, env={"GUOZHUANG_HANG_TIMEOUT": None})
    assert [len(names) for names in on] == [2, 2]


SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import guozhuang as gz


def load_batch(step):
    if step == 20 and gz.init().rank == 1:
        time.sleep(1000)
    return torch.ones(100)


gz.init()
for step in range(10**9):
    dist.all_reduce(load_batch(step))
"""


@pytest.mark.slow
def test_the_option_of_guozhuang_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = guozhuang("run", "-np", 2, "--hang-timeout", 3, "train.py", folder=tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == EXIT_CODE, text
    for rank in (0, 1):
        assert f"[rank {rank}] hang: no rank has started a collective for" in text
    assert "held up by rank 1: 20 collectives of the default group started, others 21" in text
    assert "in load_batch" in text and "in all_reduce" in text
