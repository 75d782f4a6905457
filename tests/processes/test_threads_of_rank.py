"""Ranks of torchrun and of ``guozhuang run`` compute with the threads, and on the cores, that they should."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from guozhuang.world import machine
from tests.launching import guozhuang, python, write

CORES = machine.usable_cores()
pytestmark = pytest.mark.skipif(CORES < 2, reason="needs 2 cores")

SHOW = """
import json, logging, os, sys, torch
import guozhuang as gz
logging.basicConfig(level=logging.INFO, format="%(message)s")
def show(**more):
    found = {"rank": rank, "threads": torch.get_num_threads(), "cpus": sorted(os.sched_getaffinity(0))}
    print(json.dumps(found | more) + "\\n", end="", flush=True)
rank = int(os.environ["RANK"])
if "alone" in sys.argv:  # each rank is a world of its own, so that torchrun's 1 thread leaves cores idle
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
if "set" in sys.argv and rank == 1:
    torch.set_num_threads(1)
show()
gz.init()
show(omp=os.environ.get("OMP_NUM_THREADS"))
gz.shutdown()
show()
gz.init()
show()
gz.shutdown()
"""


def shown(printed: str) -> list[list[dict[str, Any]]]:
    """What each rank showed: before it entered the world, in it, after it had left it, and in the next one."""
    found = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if '"threads"' in line]
    return [[each for each in found if each["rank"] == rank] for rank in (0, 1)]


def torchrun(folder: Path, *words: str, **more: str) -> tuple[list[list[dict[str, Any]]], str]:
    script = write(folder, SHOW)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, *words)
    done = python(*run, folder=folder, **more)
    assert done.returncode == 0, done.stderr
    return shown(done.stdout), done.stderr


@pytest.mark.slow
def test_one_thread_on_idle_cores_becomes_as_many_as_there_are_cores(tmp_path: Path) -> None:
    """Torchrun's own OMP_NUM_THREADS=1 is nobody's choice; ``torch.set_num_threads`` of a script is, and stays."""
    (first, second), printed = torchrun(tmp_path, "alone", "set")
    assert first[1]["omp"] == "1", "torchrun set it"
    assert [each["threads"] for each in first] == [1, CORES, 1, CORES]
    assert [each["threads"] for each in second] == [1, 1, 1, 1]
    assert f"{CORES} threads a rank ({CORES} cores / 1 rank)\n" in printed


@pytest.mark.slow
def test_what_a_user_exported_stays_and_ranks_are_bound_on_request(tmp_path: Path) -> None:
    ranks, printed = torchrun(tmp_path, OMP_NUM_THREADS="1", GUOZHUANG_BIND="cores")
    assert [each["threads"] for rank in ranks for each in rank] == [1] * 8
    (_, first, left, again), (_, second, *_) = ([set(each["cpus"]) for each in rank] for rank in ranks)
    assert first and second and not first & second
    assert first | second == left == os.sched_getaffinity(0), "whoever leaves the world may run anywhere again"
    assert again == first
    assert printed.count(", bound to cores\n") == 2, "each world says so once"


def test_a_run_says_what_holds(tmp_path: Path) -> None:
    done = guozhuang("run", "-np", 2, "--bind", "cores", write(tmp_path, SHOW), folder=tmp_path)
    ranks = shown(done.stdout)
    assert [each["threads"] for rank in ranks for each in rank] == [CORES // 2] * 8
    assert not set(ranks[0][1]["cpus"]) & set(ranks[1][1]["cpus"])
    words = f"{CORES // 2} thread{'s' * (CORES > 3)} a rank ({CORES} cores / 2 ranks), bound to cores"
    assert done.stderr.count(words) == 2, done.stderr
