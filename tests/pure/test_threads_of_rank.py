"""How many threads a rank gets and on which cores: the choice, the machine's tables, the words a user may ask with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from guozhuang.errors import UsageError
from guozhuang.world import machine, requests, slurm
from guozhuang.world.machine import Core
from guozhuang.world.threads.choice import (
    CoresOfRank,
    asks_for_binding,
    choose,
    chosen_by,
    leaves_idle,
)

ALL = range(8)


def cores(num: int = 8, nodes: int = 1, threads: int = 1) -> dict[int, Core]:
    """So many CPUs on nodes of equal size; the second thread of a core is numbered after all first ones, as Linux does."""
    each = num // threads
    return {cpu: Core(cpu % each * nodes // each, 0, cpu % each) for cpu in range(num)}


def known(
    ranks: Mapping[int, Sequence[int]], rank: int = 0, of: dict[int, Core] | None = None, **more: Any
) -> CoresOfRank:
    return CoresOfRank(rank, ranks, of or cores(), **{"num_threads": 1} | more)


def same(num: int, cpus: Sequence[int] = ALL) -> dict[int, Sequence[int]]:
    return dict.fromkeys(range(num), cpus)


THREADS: dict[str, tuple[CoresOfRank, int, str]] = {
    "torchrun left 1 on idle cores": (known(same(2)), 4, "4 threads a rank (8 cores / 2 ranks), not bound to cores"),
    "alone": (known(same(1), num_threads=8), 8, "8 threads a rank (8 cores / 1 rank)"),
    "the rest stays idle": (known(same(3)), 2, "2 threads a rank (8 cores / 3 ranks), not bound to cores"),
    "more ranks than cores": (known(same(9)), 1, "1 thread a rank (8 cores / 9 ranks), not bound to cores"),
    "hardware threads add none": (known(same(2), of=cores(threads=2)), 2, "(4 cores / 2 ranks)"),
    "srun bound each": (known({0: [0, 1], 1: [2, 3]}), 2, "(2 cores of its own), bound by the launcher"),
    "mpirun bound two to a core": (known({0: [0], 1: [1]}), 1, "(1 core of its own), bound by the launcher"),
    "mpirun bound two of three to a socket": (
        known({0: range(4), 1: range(4, 8), 2: range(4)}), 2, "(4 cores, some of them of other ranks too), bound by",
    ),
    "and the third has one of its own": (
        known({0: range(4), 1: range(4, 8), 2: range(4)}, 1), 4, "(4 cores of its own), bound by the launcher",
    ),
    "two hardware threads of one core": (known({0: [0], 1: [4]}, of=cores(threads=2)), 1, "1 thread a rank (1 core / 2 ranks)"),
    "a quota": (known(same(2), quota=5.5), 2, "2 threads a rank (a quota of 5.5 cores / 2 ranks), not bound to cores"),
    "a quota below a core": (known(same(1), quota=0.5), 1, "1 thread a rank (a quota of 0.5 cores / 1 rank)"),
    "a quota above": (known(same(2), quota=64), 4, "(8 cores / 2 ranks)"),
    "srun that binds nothing": (known(same(2), step_cpus=4), 2, "(4 CPUs of the Slurm step / 2 ranks)"),
    "chosen": (known(same(2), num_threads=3, chosen_by="OMP_NUM_THREADS"), 3, "3 threads a rank (OMP_NUM_THREADS), not"),
    "chosen as it would be": (known(same(2), num_threads=4, chosen_by="OMP_NUM_THREADS"), 4, "(8 cores / 2 ranks)"),
    "freed": (
        known(same(2), was_freed=True), 4,
        "4 threads a rank (8 cores / 2 ranks), freed from mpirun's default binding, not bound to cores",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", THREADS)
def test_threads(case: str) -> None:
    given, num_threads, words = THREADS[case]
    found = choose(given)
    assert (found.num_threads, found.cpus, found.refused) == (num_threads, None, "")
    assert words in found.text


TWO, SIBLINGS = cores(nodes=2), cores(nodes=2, threads=2)
BOUND: dict[str, tuple[CoresOfRank, Sequence[int] | None, str]] = {
    "auto on one node": (known(same(2)), None, "not bound to cores"),
    "auto on two": (known(same(2), of=TWO), range(4), "bound to NUMA nodes"),
    "its peer": (known(same(2), 1, of=TWO), range(4, 8), "bound to NUMA nodes"),
    "a rank between two nodes has both": (known(same(3), 1, of=TWO), ALL, "bound to NUMA nodes"),
    "with siblings": (known(same(2), 1, of=SIBLINGS), (2, 3, 6, 7), "bound to NUMA nodes"),
    "auto where a quota is smaller": (known(same(2), of=TWO, quota=4), None, "not bound: a quota of 4 cores"),
    "one rank of a node": (known(same(1), of=TWO, bind="cores"), None, "2 nodes"),
    "cores": (known(same(3), 1, bind="cores"), (2, 3, 4), "bound to cores"),
    "cores with siblings": (known(same(4), 1, of=SIBLINGS, bind="cores"), (1, 5), "bound to cores"),
    "numa on one node": (known(same(2), bind="numa"), ALL, "bound to NUMA nodes"),
    "off on two nodes": (known(same(2), of=TWO, bind="off"), None, "not bound to cores"),
    "inside what a launcher gave two": (known({0: range(4), 1: range(4, 8), 2: range(4)}, 2, bind="cores"), (2, 3), "bound"),
    "a launcher bound each": (known({0: [0], 1: [5]}, of=TWO, bind="cores"), None, "bound by the launcher"),
}  # fmt: skip


@pytest.mark.parametrize("case", BOUND)
def test_binding(case: str) -> None:
    given, cpus, words = BOUND[case]
    found = choose(given)
    assert (found.cpus, found.refused) == (None if cpus is None else frozenset(cpus), "")
    assert words in found.text if case != "one rank of a node" else "bound" not in found.text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (known(same(9), bind="cores"), "9 ranks share 8 cores"),
        (known(same(2), bind="numa", quota=3), "a quota of 3 cores holds wherever they run"),
        (known({0: range(4), 1: range(2, 8)}, bind="cores"), "ranks may run on some of the same cores"),
        (known(same(2), bind="cores", chosen_by="OMP_PROC_BIND"), "OMP_PROC_BIND places the threads"),
    ],
    ids=["more ranks", "quota", "overlap", "placed"],
)
def test_asked_for_and_not_bound_is_told(given: CoresOfRank, why: str) -> None:
    found = choose(given)
    assert (found.cpus, found.refused) == (None, why)
    assert found.text.endswith(f"not bound: {why}")


@pytest.mark.parametrize(
    ("environ", "agents", "is_set", "found"),
    [
        ({}, None, False, ""),
        ({"OMP_NUM_THREADS": "1"}, None, False, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "1"}, ["PATH"], False, ""),
        ({"OMP_NUM_THREADS": "1"}, ["PATH", "OMP_NUM_THREADS"], False, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "2"}, ["PATH"], False, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4"}, ["PATH", "MKL_NUM_THREADS"], False, "MKL_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "1"}, ["PATH"], True, "torch.set_num_threads"),
        ({"OMP_NUM_THREADS": ""}, None, False, ""),
        ({"OMP_PROC_BIND": "close", "OMP_NUM_THREADS": "1"}, ["PATH"], False, "OMP_PROC_BIND"),
        ({"OMP_PROC_BIND": "FALSE", "KMP_AFFINITY": "disabled"}, None, False, ""),
        ({"GOMP_CPU_AFFINITY": "0-3"}, None, False, "GOMP_CPU_AFFINITY"),
    ],
)
def test_what_a_user_chose(environ: dict[str, str], agents: list[str] | None, is_set: bool, found: str) -> None:
    assert chosen_by(environ, agents, is_set) == found


@pytest.mark.parametrize(
    ("words", "environ", "asks"),
    [
        ("mpirun -np 1 python train.py", {"OMPI_MCA_cpu_type": "x86_64", "OMPI_MCA_orte_bound_at_launch": "1"}, False),
        ("prterun --bind-to core -np 1 python train.py", {}, True),
        ("mpirun -bind-to none python train.py", {}, True),
        ("mpirun --bind-to-core python train.py", {}, True),
        ("mpirun --map-by ppr:1:node --report-bindings python train.py", {}, False),
        ("mpirun --map-by slot:oversubscribe python train.py", {}, False),
        ("mpirun --map-by slot:pe=4 python train.py", {}, True),
        ("mpirun --map-by=ppr:2:socket python train.py", {}, True),
        ("mpirun --rankfile hosts python train.py", {}, True),
        ("mpirun --mca hwloc_base_binding_policy core python train.py", {}, True),
        ("prterun --prtemca rmaps_default_mapping_policy node python train.py", {}, False),
        ("orted", {"OMPI_MCA_hwloc_base_binding_policy": "core"}, True),
        ("orted", {"OMPI_MCA_hwloc_base_report_bindings": "1"}, False),
        ("prterun python train.py", {"PRTE_MCA_hwloc_default_binding_policy": "core"}, True),
        ("orted", {"OMPI_MCA_rmaps_base_mapping_policy": "slot:pe=1"}, True),
        ("orted", {"OMPI_MCA_rmaps_base_mapping_policy": "ppr:1:node"}, False),
        ("orted", {"OMPI_MCA_orte_rankfile": "/tmp/ranks"}, True),
    ],
)
def test_a_binding_that_was_asked_for_of_mpirun(words: str, environ: dict[str, str], asks: bool) -> None:
    assert asks_for_binding(words.split(), environ) == asks


@pytest.mark.parametrize(
    ("own", "theirs", "of", "num_ranks", "num_local", "wanted", "leaves"),
    [
        ([0], ALL, cores(), 1, 1, None, True),
        ([3], ALL, cores(), 2, 2, None, True),
        ([0, 4], ALL, cores(threads=2), 2, 2, None, True),
        ([0], [0, 1], cores(), 2, 2, None, False),  # no core is idle
        ([0], ALL, cores(), 1, 1, 1, False),  # one thread was chosen
        ([0], ALL, cores(), 1, 1, 4, True),
        ([0], ALL, cores(), 3, 1, None, False),  # three ranks are bound to a core on request only
        (range(4), ALL, cores(nodes=2), 8, 1, None, True),  # a rank for each machine, on one of its NUMA nodes
        (range(4), ALL, cores(nodes=2), 8, 2, None, False),
        (range(3), ALL, cores(nodes=2), 8, 1, None, False),  # bound by somebody else
        (range(4), ALL, cores(nodes=2), 1, 1, None, False),
        ([0], [0], cores(), 1, 1, None, False),
        ([0], range(4, 8), cores(), 1, 1, None, False),
    ],
)
def test_mpiruns_default_binding_is_left_where_cores_are_idle(
    own: Sequence[int],
    theirs: Sequence[int],
    of: dict[int, Core],
    num_ranks: int,
    num_local: int,
    wanted: int | None,
    leaves: bool,
) -> None:
    assert leaves_idle(own, theirs, of, num_ranks, num_local, wanted) == leaves


def test_the_cores_of_a_machine(tmp_path: Path) -> None:
    """Two packages of two cores of two threads, as the kernel shows them; what it does not show is a core of its own."""
    for cpu in range(8):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7", "")):  # the last has memory only
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    found = machine.cores_of(range(8), str(tmp_path))
    assert found == {cpu: Core(cpu % 4 // 2, cpu % 4 // 2, cpu % 4) for cpu in range(8)}
    assert machine.cores_of([3, 9], str(tmp_path / "nothing")) == {3: Core(0, 0, 3), 9: Core(0, 0, 9)}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"SLURM_CPUS_ON_NODE": "8"}, 8),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "3"}, 6),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_STEP_NUM_TASKS": None}, None),
    ],
    ids=["not told", "of the node", "of each task", "outside of a step"],
)
def test_the_cpus_of_a_step(environ: dict[str, str | None], found: int | None) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    given = step | {"SLURM_STEP_TASKS_PER_NODE": "2"} | environ
    assert slurm.cpus_of_step({name: value for name, value in given.items() if value is not None}) == found


def test_what_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests.requested_bind() == "auto"
    for text in ("cores", " NUMA ", "off", "auto", ""):
        monkeypatch.setenv("GUOZHUANG_BIND", text)
        assert requests.requested_bind() == (text.strip().lower() or "auto")
    monkeypatch.setenv("GUOZHUANG_BIND", "core")
    with pytest.raises(UsageError, match=r"must hold one of auto, cores, numa, off \(got 'core'\)"):
        requests.requested_bind()
