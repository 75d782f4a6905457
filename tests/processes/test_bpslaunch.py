"""``bpslaunch`` as its users start it: workers, servers and the scheduler, in any order, and how their failures end the run."""

from __future__ import annotations

import contextlib
import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.launching import BPSLAUNCH, ROOT, Launched, guozhuang, python, write
from tests.ranks import free_port
from tests.waiting import until

pytestmark = pytest.mark.waits

TELL = """
import json, os, sys
import torch, torch.distributed as dist
import guozhuang as gz
if os.environ["RANK"] == "1" and "fail" in sys.argv:
    sys.exit(3)
world = gz.init()
total = torch.ones(1) * world.rank
dist.all_reduce(total)
names = ("BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "PYTHONUNBUFFERED")
mine = [world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes, total.item()]
print(json.dumps([*mine, *(os.environ[name] for name in names), sys.argv[1:]]))
"""
ONE = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"}
ORDERS = [("scheduler", "server", "0", "1"), ("1", "0", "server", "scheduler")]


def bpslaunch(*words: object, folder: Path, **more: str) -> CompletedProcess[str]:
    return guozhuang(*words, folder=folder, program=BPSLAUNCH, **more)


def together(
    folder: Path,
    who: tuple[str, ...],
    command: list[object],
    own: Mapping[str, Mapping[str, str]] | None = None,
    meanwhile: Callable[[Mapping[str, Launched]], None] = lambda started: None,
    programs: Mapping[str, tuple[str, list[object]]] | None = None,
    **more: str,
) -> dict[str, CompletedProcess[str]]:
    """Run a bpslaunch for each of these to its end; a number is a worker.

    Args:
        folder: where they get folders of their own.
        who: the roles.
        command: what workers run.
        own: further variables of some of them.
        meanwhile: is called when all were started.
        programs: what some of them are instead of a bpslaunch, with its arguments.
        **more: further variables of all.
    """
    common = {
        "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()), "PET_RDZV_CONF": "timeout=150",
    } | more  # fmt: skip
    started = {}
    with contextlib.ExitStack() as stack:
        for name in who:
            role = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": name} if name.isdigit() else {"DMLC_ROLE": name}
            (folder / name).mkdir()
            environ = common | role | dict((own or {}).get(name, {}))
            program, words = (programs or {}).get(name, (BPSLAUNCH, command if name.isdigit() else []))
            launched = Launched(*words, folder=folder / name, program=program, **environ)
            started[name] = stack.enter_context(launched)
        meanwhile(started)
        done = {name: each.wait() for name, each in started.items()}
        assert not any(each.left() for each in started.values())
    return done


def told(text: str) -> list[list[object]]:
    """What ranks printed, each after its number in brackets."""
    return sorted(json.loads(line.partition("] ")[2]) for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=["scheduler-first", "scheduler-last"])
def test_two_workers_with_two_ranks_a_server_and_the_scheduler(tmp_path: Path, order: tuple[str, ...]) -> None:
    script = write(tmp_path, TELL)
    numa = {"0": {"BYTEPS_NUMA_ON": "1"}, "1": {"BYTEPS_NUMA_ON": "1"}}
    done = together(tmp_path, order, [sys.executable, script, "a b", "$x"], numa, NVIDIA_VISIBLE_DEVICES="0,1")
    assert [each.returncode for each in done.values()] == [0] * 4, done
    for worker in (0, 1):
        assert told(done[str(worker)].stdout) == [
            [2 * worker + local, 4, local, 2, worker, 2, 6.0, str(local), "2", "1", ["a b", "$x"]] for local in (0, 1)
        ]
    assert done["0"].stderr.count("mean nothing to Guozhuang (docs/byteps.md): BYTEPS_NUMA_ON") == 1
    assert "BYTEPS_NUMA_ON" not in done["1"].stderr


@pytest.mark.slow
def test_server_and_scheduler_end_after_the_last_worker(tmp_path: Path) -> None:
    """Here both are processes that import byteps.server; worker 0 has ended before worker 1 may."""
    script = write(tmp_path, "import os, sys, time\nwhile os.environ['RANK'] == '1' and not os.path.exists(sys.argv[1]):\n"
                   "    time.sleep(0.05)\nprint('ended', flush=True)")  # fmt: skip
    (imports := tmp_path / "imports.py").write_text(
        "import guozhuang.compat.byteps.server\nfrom guozhuang.compat import redirect\nredirect.install('byteps')\n"
        "import byteps.server\nprint('returned')\n"
    )
    own: tuple[str, list[object]] = ("tests.launching:run_script", [imports])

    def meanwhile(started: Mapping[str, Launched]) -> None:
        until(lambda: "ended" in started["0"].printed)
        assert all(each.is_running for each in started.values())
        (tmp_path / "go").touch()

    command: list[object] = [sys.executable, script, tmp_path / "go"]
    programs = {"scheduler": own, "server": own}
    done = together(tmp_path, ORDERS[1], command, meanwhile=meanwhile, programs=programs)
    assert [each.returncode for each in done.values()] == [0] * 4, done
    assert done["server"].stdout == done["scheduler"].stdout == "returned\n"


def test_an_import_of_byteps_server_by_others_starts_nothing(tmp_path: Path) -> None:
    text = "from guozhuang.compat import redirect; redirect.install('byteps'); import byteps.server; print('here')"
    for role in ({}, {"DMLC_ROLE": "worker"}):
        done = guozhuang(write(tmp_path, text), folder=tmp_path, program="tests.launching:run_script", **role)
        assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")
    script = write(tmp_path, text.replace("import byteps.server", "import guozhuang.compat.byteps.server"))
    done = guozhuang(script, folder=tmp_path, program="tests.launching:run_script", DMLC_ROLE="server")
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")
    script = write(tmp_path, text)
    done = guozhuang(script, folder=tmp_path, program="tests.launching:run_script", DMLC_ROLE="server")
    assert done.returncode == 2 and "DMLC_NUM_WORKER is not set, which a server needs" in done.stderr


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_with_its_code(tmp_path: Path) -> None:
    script = write(tmp_path, TELL)
    command: list[object] = [sys.executable, script, "fail"]
    done = together(tmp_path, ORDERS[0], command, NVIDIA_VISIBLE_DEVICES="0,1")
    assert [each.returncode for each in done.values()] == [3] * 4, done
    assert all("rank 1" in each.stderr for each in done.values())


def test_a_rank_that_dies_on_the_only_worker(tmp_path: Path) -> None:
    script = write(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)")
    done = bpslaunch(sys.executable, script, folder=tmp_path, NVIDIA_VISIBLE_DEVICES="0,1", **ONE)
    assert done.returncode == 3 and "rank 1" in done.stderr


def test_arguments_arrive_whole_and_a_line_goes_to_a_shell(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print(sys.argv[1:])")
    done = bpslaunch(sys.executable, script, "a b", "$HOME", "'", folder=tmp_path, **ONE)
    assert (done.returncode, done.stdout) == (0, f"{['a b', '$HOME', chr(39)]}\n")
    done = bpslaunch('echo "$BYTEPS_LOCAL_RANK of $BYTEPS_LOCAL_SIZE" && exit 5', folder=tmp_path, **ONE)
    assert (done.returncode, done.stdout) == (5, "0 of 1\n")
    # In a rank it is the command, as dist_launcher may be given a line with a bpslaunch in it.
    words = [sys.executable, "-m", "guozhuang.compat.byteps.bpslaunch", "sh", "-c", 'echo "$RANK $0"', "a b"]
    done = bpslaunch(*words, folder=tmp_path, **ONE)
    assert (done.returncode, done.stdout) == (0, "0 a b\n")


def test_the_command_that_the_extra_installs(tmp_path: Path) -> None:
    folder = ROOT / "packaging" / "byteps"
    [entry] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["scripts"].values()
    module, _, function = entry.partition(":")
    text = f"import sys; sys.argv[1:] = ['echo', 'a  b']; from {module} import {function}; {function}()"
    done = python("-c", text, folder=tmp_path, PYTHONPATH=f"{folder}:{ROOT}", **ONE)
    assert (done.returncode, done.stdout) == (0, "a  b\n"), done.stderr


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        ({"DMLC_WORKER_ID": ""}, ["true"], "DMLC_WORKER_ID"),
        ({"DMLC_NUM_WORKER": "2"}, ["true"], "DMLC_PS_ROOT_URI"),
        ({"DMLC_ROLE": ""}, ["true"], "DMLC_ROLE"),
        ({}, [], "a worker needs a command"),
        ({}, ["no-such-program", "a"], "there is no such program"),
        ({"BYTEPS_ENABLE_GDB": "1"}, ["true"], "start the script under gdb yourself"),
    ],
)
def test_usage_ends_with_2(tmp_path: Path, changes: dict[str, str], words: list[str], text: str) -> None:
    done = bpslaunch(*words, folder=tmp_path, **(ONE | changes))
    assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_with_one_worker_nobody_else_is_needed(tmp_path: Path, role: str) -> None:
    done = bpslaunch(folder=tmp_path, DMLC_ROLE=role, DMLC_NUM_WORKER="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_who_never_comes_is_named_everywhere(tmp_path: Path) -> None:
    """The server does not come; in the other run nobody is there but a worker."""
    done = together(tmp_path, ("scheduler", "0", "1"), ["true"], PET_RDZV_CONF="timeout=8")
    assert [each.returncode for each in done.values()] == [1] * 3, done
    assert all("1 of 4 bpslaunches did not come within 8 s: server 0" in each.stderr for each in done.values())
    (tmp_path / "alone").mkdir()
    [alone] = together(tmp_path / "alone", ("0",), ["true"], PET_RDZV_CONF="timeout=1").values()
    assert alone.returncode == 1 and "could not reach the store of the scheduler at 127.0.0.1" in alone.stderr
    assert "DMLC_ROLE=scheduler bpslaunch" in alone.stderr


@pytest.mark.slow
def test_worker_counts_that_differ_end_all(tmp_path: Path) -> None:
    own = {"1": {"DMLC_NUM_WORKER": "3"}}
    done = together(tmp_path, ORDERS[0], ["true"], own, PET_RDZV_CONF="timeout=30")
    assert [each.returncode for each in done.values()] == [1] * 4, done
    told = [name for name, each in done.items() if "do not agree who takes part" in each.stderr]
    assert len(told) >= 3, done
    for name, each in done.items():  # who comes when the others have ended finds nobody
        said = "export the same DMLC_NUM_WORKER" if name in told else "could not reach the store of the scheduler"
        assert said in each.stderr, done


BY_HAND = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "BYTEPS_LOCAL_SIZE": "1", "BYTEPS_LOCAL_RANK": "0"}
INIT = """import guozhuang as gz, torch.distributed as dist
world = gz.init(timeout_s=150)
print(world.rank, world.size)
dist.barrier()"""


@pytest.mark.slow
@pytest.mark.parametrize("counts", [("2", "2"), ("2", "3")], ids=["agree", "differ"])
def test_processes_that_somebody_started_by_hand(tmp_path: Path, counts: tuple[str, str]) -> None:
    script = write(tmp_path, INIT)
    more = BY_HAND | {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        started = []
        for worker, count in enumerate(counts):
            (folder := tmp_path / str(worker)).mkdir()
            own = more | {"DMLC_WORKER_ID": str(worker), "DMLC_NUM_WORKER": count}
            started.append(
                stack.enter_context(Launched(str(script), folder=folder, program="tests.launching:run_script", **own))
            )
        done = [each.wait() for each in started]
    if counts == ("2", "2"):
        assert [each.stdout for each in done] == ["0 2\n", "1 2\n"], done
    else:
        assert all("the processes do not agree how many they are" in each.stderr for each in done), done
