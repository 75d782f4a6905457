"""What Open MPI and Hydra tell, from a dict."""

from __future__ import annotations

import pytest

from guozhuang.errors import UsageError
from guozhuang.net.meeting_point import PortSequence
from guozhuang.world import mpi
from guozhuang.world.discovery import discover

URI = "735641600.0;tcp://192.0.2.2,10.0.0.2:48331;tcp6://[2001:db8::2]:33391"


def open_mpi(rank: int = 3, size: int = 4, local_rank: int = 1, local_size: int = 2, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": "735641601",
        "OMPI_MCA_orte_hnp_uri": URI,
        "OMPI_MCA_orte_precondition_transports": "54befbce9801b9bb-326b64c7307987f2",
        "HOME": "/home/somebody",
        **more,
    }


def hydra(rank: int = 3, size: int = 4, local_rank: int = 1, local_size: int = 2, **more: str) -> dict[str, str]:
    told = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return {**{name: str(value) for name, value in told.items()}, **more}


def point_of(environ: dict[str, str]) -> PortSequence:
    point = discover(environ).meeting_point
    assert isinstance(point, PortSequence)
    return point


PROXY = "/usr/bin/hydra_pmi_proxy --control-port head:38739 --rmk user --launcher ssh --pgid 0 --proxy-id 1 "
INTEL = "/opt/intel/hydra_bstrap_proxy --upstream-host head --upstream-port 41000 --pgid 0 --proxy-id 1 "


@pytest.fixture
def above(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines of the processes above this one."""
    lines = ["sh -c python train.py", PROXY, "/sbin/init"]
    monkeypatch.setattr(mpi, "lineage", lambda: lines)
    return lines


def test_open_mpi_on_several_nodes() -> None:
    told = discover(open_mpi())
    assert (told.launcher, told.rank, told.size, told.local_rank, told.local_size) == ("openmpi", 3, 4, 1, 2)
    assert (told.node_rank, told.num_nodes) == (None, None), "found out when the ranks meet"
    point = point_of(open_mpi())
    assert point.hosts == ("192.0.2.2", "10.0.0.2", "2001:db8::2")
    assert point.note.startswith("/home/somebody/.guozhuang/meet-")
    assert point == point_of(open_mpi(rank=0, local_rank=0)), "all ranks come to the same"
    assert point_of(open_mpi(GUOZHUANG_MEETING_DIR="/shared")).note.startswith("/shared/meet-")


def test_open_mpi_5_tells_the_host_of_mpirun_in_a_name() -> None:
    environ = open_mpi(PMIX_NAMESPACE="prterun-node-07.b-4711@1")
    del environ["OMPI_MCA_orte_hnp_uri"], environ["OMPI_MCA_orte_precondition_transports"]
    assert point_of(environ).hosts == ("node-07.b",)
    assert point_of(environ).secret != point_of(environ | {"PMIX_NAMESPACE": "prterun-node-07.b-4712@1"}).secret


def test_one_node_needs_no_network_and_no_note(above: list[str]) -> None:
    for environ in (open_mpi(1, 2, 1, 2), hydra(1, 2, 1, 2)):
        told = discover(environ)
        assert (told.local_rank, told.local_size, told.node_rank, told.num_nodes) == (1, 2, 0, 1)
        point = point_of(environ)
        assert (point.hosts, point.is_one_node, point.note) == (("127.0.0.1",), True, "")


def test_runs_do_not_meet_each_other(above: list[str]) -> None:
    points = [
        point_of(open_mpi()),
        point_of(open_mpi(PMIX_NAMESPACE="735641602")),
        point_of(open_mpi(OMPI_MCA_orte_precondition_transports="0-0")),
        point_of(open_mpi(size=6)),
        point_of(open_mpi(GUOZHUANG_SECRET="ab" * 16)),
        point_of(hydra()),
    ]
    above[1] = PROXY.replace("38739", "38740")
    points.append(point_of(hydra()))
    assert len({p.secret for p in points}) == len({p.ports for p in points}) == len({p.note for p in points}) + 1 == 7


def test_open_mpi_5_in_two_containers_that_are_alike() -> None:
    """With the host's network and name, and a process number each: only the port of the daemon differs."""

    def run(port: int, rank: int = 0, **more: int) -> PortSequence:
        told = {
            "PMIX_NAMESPACE": "prterun-host-7@1",
            "PMIX_SERVER_URI41": f"prterun-host-7@0.0;tcp4://127.0.0.1:{port}",
        }
        numbers = {"rank": rank, "size": 4, "local_rank": rank, "local_size": 4} | more
        environ = open_mpi(**numbers, **told)  # type: ignore[arg-type]
        del environ["OMPI_MCA_orte_hnp_uri"], environ["OMPI_MCA_orte_precondition_transports"]
        return point_of(environ)

    assert run(40001) == run(40001, rank=3)
    assert run(40001).secret != run(40002).secret and run(40001).ports != run(40002).ports
    # Over several nodes each has a daemon of its own.
    assert run(40001, local_size=2) == run(40002, rank=1, local_size=2)


@pytest.mark.parametrize("line", [PROXY, INTEL])
def test_hydra_is_known_by_its_proxy(line: str, above: list[str]) -> None:
    above[1] = line
    told = discover(hydra())
    assert (told.launcher, told.rank, told.size, told.local_rank, told.local_size) == ("hydra", 3, 4, 1, 2)
    assert point_of(hydra()).hosts == ("head",)
    assert point_of(hydra(MASTER_ADDR="first", MASTER_PORT="29500", SLURM_JOB_NODELIST="n[4-9]")).hosts == (
        "first",
        "head",
        "n4",
    )
    assert point_of(hydra(MASTER_PORT="29500")).ports[0] == 29500


def test_hydra_without_its_proxy_asks_for_a_secret(above: list[str]) -> None:
    del above[1]
    with pytest.raises(UsageError, match="nothing tells this run from others") as caught:
        discover(hydra())
    assert "GUOZHUANG_SECRET" in str(caught.value)
    assert point_of(hydra(GUOZHUANG_SECRET="ab" * 16)).ports != point_of(hydra(GUOZHUANG_SECRET="cd" * 16)).ports


def test_what_stands_above_this_process_can_be_read() -> None:
    assert mpi.lineage(), "at least pytest was started by something"
    assert all(isinstance(line, str) for line in mpi.lineage())


def test_one_process_is_alone(above: list[str]) -> None:
    assert discover(open_mpi(0, 1, 0, 1)).launcher == "alone"
    assert discover(hydra(0, 1, 0, 1)).launcher == "alone"


def test_open_mpi_inside_of_a_slurm_step_is_open_mpis() -> None:
    """mpirun starts a helper on each node by srun, whose variables the ranks inherit."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "3"}
    assert discover(open_mpi(3, 8) | step).rank == 3


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (open_mpi(4), "OMPI_COMM_WORLD_RANK"),
        (open_mpi(local_rank=2), "OMPI_COMM_WORLD_LOCAL_RANK"),
        (open_mpi(local_size=5), "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_SIZE": "4"}, "PMI_RANK is not set"),
        (hydra(-1), "PMI_RANK"),
        (hydra(1, 0), "PMI_SIZE"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        discover(environ)
    assert named in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_an_agent_per_node(above: list[str]) -> None:
    for one_each in (open_mpi(2, 3, 0, 1), hydra(2, 3, 0, 1)):
        told = mpi.node_of(one_each)
        assert told is not None and told.meeting_point is not None
        assert (told.node_rank, told.num_nodes, told.num_tasks, told.local_rank) == (2, 3, 1, 0)
    several = mpi.node_of(open_mpi(1, 2, 1, 2))
    assert several is not None and several.meeting_point is None
    assert (several.node_rank, several.num_nodes, several.num_tasks, several.local_rank) == (0, 1, 2, 1)
    assert mpi.node_of({}) is None
