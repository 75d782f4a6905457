"""Slurm's environment, from a dict; its lists against ``scontrol`` where that is installed."""

from __future__ import annotations

import random
import shutil
import subprocess
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.net import meeting_point as ports
from guozhuang.net.meeting_point import PortSequence
from guozhuang.world import node_lists
from guozhuang.world.discovery import discover
from guozhuang.world.slurm import hint, node_of

# ---- lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[001-003,7],x5", ["gpu001", "gpu002", "gpu003", "gpu7", "x5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("n[1-2]-ib,m", ["n1-ib", "n2-ib", "m"]),
        ("n[1,1]", ["n1", "n1"]),
        ("a.b-c.example", ["a.b-c.example"]),
    ],
)
def test_expansion(text: str, names: list[str]) -> None:
    assert node_lists.expand(text) == names


@pytest.mark.parametrize(
    "text", ["", ",", "n[", "n]", "n[]", "n[1", "n[2-1]", "n[a-b]", "n[1-]", "n[[1]]", "a,,b", "n[1-99999999]"]
)
def test_lists_that_cannot_be_read_are_named(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        node_lists.expand(text)
    assert repr(text) in str(caught.value)


# Node names as Slurm allows them; and brackets, of which each holds ranges and single numbers.
stems = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=6)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    parts, numbers = [], []
    for _ in range(draw(st.integers(1, 4))):
        width, first = draw(st.integers(1, 5)), draw(st.integers(0, 300))
        last = first + draw(st.integers(0, 6))
        start = f"{first:0{width}d}"
        is_range = draw(st.booleans())
        parts.append(f"{start}-{last:0{width}d}" if is_range else start)
        numbers += [f"{n:0{len(start)}d}" for n in range(first, (last if is_range else first) + 1)]
    return "[" + ",".join(parts) + "]", numbers


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list and what it stands for, made side by side."""
    texts, names = [], []
    for _ in range(draw(st.integers(1, 4))):
        pieces = [draw(stems)]
        choices: list[list[str]] = [pieces[:]]
        for _ in range(draw(st.integers(0, 2))):
            text, numbers = draw(brackets())
            pieces.append(text)
            choices.append(numbers)
            if draw(st.booleans()):
                after = draw(stems)
                pieces.append(after)
                choices.append([after])
        texts.append("".join(pieces))
        names += ["".join(each) for each in product(*choices)]
    return ",".join(texts), names


@given(lists())
def test_a_list_is_what_it_was_made_of(made: tuple[str, list[str]]) -> None:
    text, names = made
    assert node_lists.expand(text) == names


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 20)), min_size=1, max_size=6))
def test_counts(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert node_lists.counts(text) == [count for count, times in groups for _ in range(times)]


@given(st.text("0123456789(x),[]-a ", max_size=12))
def test_any_text_is_a_list_or_one_clear_error(text: str) -> None:
    for read in (node_lists.counts, node_lists.expand, node_lists.ports):
        try:
            read(text)
        except UsageError as error:
            assert repr(text) in str(error)


def test_reserved_ports() -> None:
    assert node_lists.ports("12000-12003,12008") == [12000, 12001, 12002, 12003, 12008]


def generated_lists(num: int) -> list[str]:
    """Lists as a cluster has them, besides odd ones: fixed seed, so that a failure can be looked at."""
    rng = random.Random(7)
    found = []
    for _ in range(num):
        parts = []
        for _ in range(rng.randint(1, 4)):
            name = rng.choice(["gpu", "n", "cn-", "x5", "rack", "node.b"])
            for _ in range(rng.choice([0, 1, 1, 1, 2])):
                spans = []
                for _ in range(rng.randint(1, 4)):
                    width, first = rng.choice([1, 1, 2, 3, 5]), rng.choice([0, 1, 7, 9, 95, 98, 100, 999])
                    last = first + rng.randint(0, 5)
                    spans.append(f"{first:0{width}d}" + (f"-{last:0{width}d}" if rng.random() < 0.6 else ""))
                name += "[" + ",".join(spans) + "]"
            parts.append(name)
        found.append(",".join(parts))
    return found


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol (apt install slurm-client or slurm-wlm)")
def test_expansion_is_that_of_scontrol(tmp_path_factory: pytest.TempPathFactory) -> None:
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\n")
    wanted = generated_lists(250)
    # One process for many: each list is followed by a line that no node is called by.
    script = 'for each in "$@"; do scontrol show hostnames "$each" || echo refused; echo .; done'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *wanted],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    theirs = [block.split() for block in done.stdout.split("\n.\n")[: len(wanted)]]
    assert len(theirs) == len(wanted), done.stderr
    assert not [text for text, names in zip(wanted, theirs, strict=True) if names[-1:] == ["refused"]], done.stderr
    wrong = [
        (t, node_lists.expand(t), names)
        for t, names in zip(wanted, theirs, strict=True)
        if node_lists.expand(t) != names
    ]
    assert not wrong, wrong[:3]


# ---- a step

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_UID": "1000",
    "SLURM_CLUSTER_NAME": "big",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[001-002,7]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_LAUNCHER_PORT": "33111",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    # As the batch script has them too, of the whole job.
    "SLURM_NTASKS": "64",
    "SLURM_TASKS_PER_NODE": "32(x2)",
    "SLURM_JOB_NODELIST": "gpu[001-099]",
}
PLACES = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def task(rank: int = 3, **changes: str | None) -> dict[str, str]:
    local_rank, node = PLACES[rank]
    environ = {
        **STEP,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        **changes,
    }
    return {name: value for name, value in environ.items() if value is not None}


def point_of(environ: dict[str, str]) -> PortSequence:
    point = discover(environ).meeting_point
    assert isinstance(point, PortSequence)
    return point


def test_every_task_knows_its_place() -> None:
    for rank, (local_rank, node) in enumerate(PLACES):
        told = discover(task(rank))
        assert (told.launcher, told.rank, told.size) == ("slurm", rank, 5)
        assert (told.local_rank, told.local_size) == (local_rank, 1 if node == 2 else 2)
        assert (told.node_rank, told.num_nodes) == (node, 3)


def test_all_tasks_come_to_the_same_meeting_point() -> None:
    points = {point_of(task(rank)) for rank in range(5)}
    assert len(points) == 1
    point = points.pop()
    assert point.hosts == ("gpu001", "10.0.0.9")
    assert point.others == ("gpu002", "gpu7")
    assert not point.is_one_node
    assert len(set(point.ports)) == len(point.ports) >= 8
    assert all(1024 < port < 29400 for port in point.ports), "no ephemeral port, which anybody may be using"
    assert point.secret.hex() not in repr(point)


def test_steps_and_jobs_meet_elsewhere() -> None:
    others = [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "18"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_CLUSTER_NAME": "b"}]
    points = [point_of(task()), *(point_of(task(**each)) for each in others)]
    assert len({p.secret for p in points}) == len(points)
    assert len({p.ports for p in points}) == len(points)
    given = point_of(task(GUOZHUANG_SECRET="ab" * 16))
    assert given.secret not in {p.secret for p in points}
    assert given.secret != point_of(task(GUOZHUANG_SECRET="ab" * 16, SLURM_STEP_ID="1")).secret


def test_reserved_ports_and_the_users_own_come_first() -> None:
    derived = point_of(task()).ports
    assert point_of(task(SLURM_STEP_RESV_PORTS="12000-12001")).ports == (12000, 12001, *derived)
    asked = point_of(task(MASTER_PORT="29500", MASTER_ADDR="login", SLURM_STEP_RESV_PORTS="12000"))
    assert asked.ports == (29500, 12000, *derived)
    assert asked.hosts[0] == "login"


@pytest.mark.parametrize(
    "job", [{}, {"SLURM_HET_SIZE": "2"}, {"SLURM_PACK_SIZE": "2"}], ids=["one kind", "het", "pack"]
)
def test_the_parts_of_a_step_meet(job: dict[str, str]) -> None:
    """``srun -n2 : -n3``: every part has an srun of its own, the counts are told to all; a plain job has no mark of it."""
    first = point_of(task(0, **job, SLURM_STEP_LAUNCHER_PORT="1", SLURM_SRUN_COMM_PORT="1"))
    assert point_of(task(2, **job, SLURM_STEP_LAUNCHER_PORT="2", SLURM_SRUN_COMM_PORT="2")) == first


def test_ports_that_were_reserved_for_one_part_come_last() -> None:
    derived = point_of(task()).ports
    assert point_of(task(SLURM_HET_SIZE="2", SLURM_STEP_RESV_PORTS="12000")).ports == (*derived, 12000)


def test_a_host_file_puts_rank_0_on_any_node() -> None:
    hosts = point_of(task(SLURM_DISTRIBUTION="arbitrary")).hosts
    assert hosts == ("gpu001", "gpu002", "gpu7", "10.0.0.9")
    many = task(SLURM_DISTRIBUTION="arbitrary", SLURM_STEP_NODELIST="n[1-5000]")
    assert len(point_of(many).hosts) < 100


@pytest.mark.parametrize("text", ["70000-70001", "65536", "0-3", "0"])
def test_reserved_ports_that_are_none_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{text}'"):
        discover(task(SLURM_STEP_RESV_PORTS=text))


def test_of_many_reserved_ports_some_are_enough() -> None:
    assert len(point_of(task(SLURM_STEP_RESV_PORTS="12000-13000")).ports) < 40


def test_one_node_needs_no_network() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu7", "SLURM_STEP_TASKS_PER_NODE": "2"}
    point = point_of(task(1, **one))
    assert (point.is_one_node, point.hosts, point.others) == (True, ("127.0.0.1",), ())


def test_what_batch_scripts_export_is_no_contradiction() -> None:
    """Widely copied scripts export WORLD_SIZE and the master for all, and leave the rank to SLURM_PROCID."""
    told = discover(task(WORLD_SIZE="5", MASTER_ADDR="gpu001", MASTER_PORT="29500"))
    assert (told.launcher, told.rank, told.size) == ("slurm", 3, 5)
    with pytest.raises(UsageError, match="WORLD_SIZE=4"):
        discover(task(WORLD_SIZE="4"))


def test_the_batch_script_is_a_world_of_one_with_a_hint() -> None:
    batch = {name: value for name, value in task().items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    assert discover(batch).launcher == "alone"
    assert "srun" in hint(batch)
    assert "64 tasks" in hint(batch)
    assert not hint(batch | {"SLURM_NTASKS": "1"})
    # --nodes=2 without -n: Slurm tells no number of tasks.
    del batch["SLURM_NTASKS"]
    assert "2 nodes (SLURM_JOB_NUM_NODES)" in hint(batch | {"SLURM_JOB_NUM_NODES": "2"})
    assert "`srun guozhuang check`" in hint(batch | {"SLURM_JOB_NUM_NODES": "2"}, "guozhuang check")
    assert not hint(batch | {"SLURM_JOB_NUM_NODES": "1"})
    assert not hint(task())
    assert not hint({})
    assert not hint({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "²"})
    # A step of one task, as a shell in an allocation is.
    assert discover(task(0, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1")).launcher == "alone"
    assert not hint(task(0, SLURM_STEP_NUM_TASKS="1"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_PROCID": None}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "'2(y2)'"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "'n[1'"),
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID"),
        ({"SLURM_STEP_ID": None}, "SLURM_STEP_ID"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"GUOZHUANG_SECRET": "zz"}, "GUOZHUANG_SECRET"),
    ],
)
def test_half_a_step_names_what_is_wrong(changes: dict[str, str | None], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        discover(task(**changes))
    assert named in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_counts_that_do_not_fit_are_left_to_the_roll_call() -> None:
    told = discover(task(SLURM_STEP_TASKS_PER_NODE="2"))
    assert (told.local_rank, told.local_size, told.node_rank, told.num_nodes) == (1, None, None, None)


def test_hydra_inside_of_slurm_is_hydras() -> None:
    """Its helpers are the tasks of the step, one per node; the ranks inherit what srun told the helper."""
    environ = task(2, PMI_SIZE="10", PMI_RANK="7", MPI_LOCALNRANKS="4", MPI_LOCALRANKID="3", GUOZHUANG_SECRET="ab" * 16)
    told = discover(environ)
    assert (told.launcher, told.rank, told.size, told.local_rank) == ("hydra", 7, 10, 3)
    # srun --mpi=pmi2 sets the same variables to what it says itself.
    assert discover(task(2, PMI_SIZE="5", PMI_RANK="2")).launcher == "slurm"


def test_an_agent_per_node() -> None:
    one_each = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    told = node_of(task(0, **one_each, SLURM_NODEID="1"))
    assert told is not None
    assert (told.node_rank, told.num_nodes, told.num_tasks, told.local_rank) == (1, 3, 1, 0)
    assert told.meeting_point is not None and told.meeting_point.hosts[0] == "gpu001"
    per_rank = node_of(task(3))
    assert per_rank is not None and (per_rank.num_tasks, per_rank.local_rank) == (2, 1)
    alone = node_of(task(0, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1"))
    assert alone is not None and (alone.num_nodes, alone.meeting_point) == (1, None)
    assert node_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None


# ---- ports


@given(st.lists(st.text(max_size=8), max_size=4))
def test_a_sequence_depends_on_its_key_alone(key: list[str]) -> None:
    found = ports.sequence(key)
    assert found == ports.sequence(tuple(key))
    assert len(set(found)) == len(found)
    assert all(15000 <= port < 29000 for port in found)
    assert ports.secret(b"", key) == ports.secret(b"", key) != ports.secret(b"x", key)


def test_neighbours_do_not_share_ports() -> None:
    """Jobs with ids in a row, two steps each, on one node: their first ports differ nearly always."""
    firsts = [ports.sequence(["slurm", str(job), str(step)])[0] for job in range(100) for step in range(2)]
    assert len(set(firsts)) > 190


def test_parts_of_a_key_are_kept_apart() -> None:
    assert ports.sequence(["1", "23"]) != ports.sequence(["12", "3"])
    assert ports.secret(b"", ["1", "23"]) != ports.secret(b"", ["12", "3"])
