"""``guozhuang check`` over hosts with a network between them: a slow host, a wrong interface, a host that cannot be reached."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import slurm, sshd
from tests.hosts.network import Hosts, missing, run_everywhere
from tests.hosts.sshd import Sshd
from tests.launching import environment
from tests.waiting import LIMIT_S

pytestmark = [
    pytest.mark.waits,
    pytest.mark.needs_root,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can"),
]

needs_ssh = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "it can")

MAIN = "import sys; from guozhuang.check import main; sys.exit(main(sys.argv[1:]))"
CHECK = [sys.executable, "-c", MAIN, "--json", "--timeout"]


def document_in(printed: str) -> dict[str, Any]:
    """Hosts.start joins stdout and stderr; the document is what stands between braces at the beginning of lines."""
    lines = printed.splitlines()
    start = lines.index("{")
    end = len(lines) - 1 - lines[::-1].index("}")
    found: dict[str, Any] = json.loads("\n".join(lines[start : end + 1]))
    return found


def texts(document: dict[str, Any], kind: str) -> list[str]:
    return [each["text"] for each in document["findings"] if each["kind"] == kind]


def reshape(hosts: Hosts, host: int, rate: str) -> None:
    """Another rate for what a host sends and gets."""
    for namespace, device in ((hosts._name(host), "eth0"), (hosts._switch, f"p{host}")):
        shape = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape]
        subprocess.run(command, check=True, timeout=LIMIT_S)


@pytest.mark.slow
def test_the_host_behind_a_slow_link_is_named() -> None:
    with Hosts(3, rate="1gbit") as hosts:
        reshape(hosts, 1, "100mbit")
        printed = run_everywhere(hosts, [1, 1, 1], [*CHECK, "20"], environment())
    document = document_in(printed[0])
    slow = texts(document, "slow-link")
    assert len(slow) == 1, document["findings"]
    assert slow[0].startswith("The link of h1 is slow")
    assert document["exit_code"] == 0
    by_pair = {(each["a"], each["b"]): each for each in document["links"]}
    assert set(by_pair) == {(0, 1), (0, 2), (1, 2)}
    for pair, mbit in (((0, 1), 100), ((1, 2), 100), ((0, 2), 1000)):
        carried = min(by_pair[pair]["forward_bytes_per_s"], by_pair[pair]["backward_bytes_per_s"]) * 8 / 1e6
        assert 0.7 * mbit < carried < 1.3 * mbit, (pair, carried)
    # One clock: the kernel's. What is measured must be as near as it says.
    assert len(document["clocks"]) == 2
    assert all(abs(each["offset_s"]) <= each["uncertainty_s"] + 1e-3 for each in document["clocks"])
    # The names of these hosts resolve nowhere, and are told without harm to gz.init.
    assert len(texts(document, "unresolvable-name")) == 1
    assert [each["median_s"] > 0 for each in document["reductions"]] == [True, True]
    used = {(each["network"]["in_use"], each["network"]["routed"]) for each in document["facts"]}
    assert used == {("eth0", "eth0")}


@pytest.mark.slow
def test_a_wrong_interface_is_named_and_breaks() -> None:
    with Hosts(2) as hosts:
        env = environment(GLOO_SOCKET_IFNAME="lo")
        printed = run_everywhere(hosts, [1, 1], [*CHECK, "20"], env, expect_failure=True)
    document = document_in(printed[0])
    assert document["exit_code"] == 1
    wrong = texts(document, "wrong-interface")
    assert wrong == ["The loopback interface lo is in use on h0 and h1, and no other host reaches it."]
    assert {each["fix"] for each in document["findings"] if each["kind"] == "wrong-interface"} == {
        "set GLOO_SOCKET_IFNAME=eth0, which leads to rank 0, or unset it"
    }
    assert document["links"][0]["failure"]


@pytest.mark.slow
def test_two_ranks_on_each_of_two_hosts() -> None:
    with Hosts(2, rate="100mbit") as hosts:
        printed = run_everywhere(hosts, [2, 2], [*CHECK, "30"], environment())
    document = document_in(printed[0])
    assert document["exit_code"] == 0
    assert [(each["a"], each["b"], each["between_nodes"]) for each in document["links"]] == [
        (0, 1, False), (0, 2, True), (0, 3, True), (1, 2, True), (1, 3, True), (2, 3, False)
    ]  # fmt: skip
    slow = texts(document, "slow-link")
    assert len(slow) == 1 and slow[0].startswith("4 of 4 links between nodes carry less than 62.5 MB/s"), slow


@pytest.mark.slow
def test_a_cable_cut_in_the_middle_names_the_host(tmp_path: Path) -> None:
    cut = (
        "import os, time\nfrom guozhuang.check import measure\n"
        "before = measure.follow\n"
        "def late(*a):\n    print('READY', flush=True)\n"
        f"    while not os.path.exists('{tmp_path}/cut'):\n        time.sleep(0.02)\n"
        "    return before(*a)\n"
        "measure.follow = late\n"
    )
    with Hosts(2) as hosts:
        processes = []
        for rank in range(2):
            own = {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, "-c", cut + MAIN, "--json", "--timeout", "20"]
            processes.append(hosts.start(rank, command, environment(**own)))
        assert processes[1].stdout is not None
        while (line := processes[1].stdout.readline()).strip() != "READY":
            assert line, "rank 1 ended before it was ready"
        hosts.cut(1)
        (tmp_path / "cut").touch()
        printed = processes[0].communicate(timeout=LIMIT_S)[0]
        assert processes[0].returncode == 1
        processes[1].communicate(timeout=LIMIT_S)
        assert processes[1].returncode == 1
    document = document_in(printed)
    assert [(each["rank"], each["host"]) for each in document["absences"]] == [(1, "h1")]


@needs_ssh
@pytest.mark.slow
def test_a_host_without_our_key_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with Sshd(tmp_path) as server:
        config = tmp_path / "config"
        config.write_text(server.config.read_text().replace("/ssh/id\n", "/ssh/stranger\n"))
        done = subprocess.run(
            [*CHECK, "10", "-H", "a0:1,a1:2,nowhere:1", "--ssh-config", str(config)],
            env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["num_ranks"] == 4
    assert document["facts"] == []
    found = {each["text"].split()[0]: each["kind"] for each in document["findings"]}
    assert found == {"a0": "missing-ssh-key", "a1": "missing-ssh-key", "nowhere": "unresolvable-name"}


@needs_ssh
@pytest.mark.slow
def test_what_only_the_launcher_can_refuse_is_bad_usage_too(tmp_path: Path) -> None:
    with Sshd(tmp_path) as server:
        arguments = ["5", "-H", "a0:1", "-x", "NOT_SET_ANYWHERE", "--ssh-config", str(server.config)]
        done = subprocess.run([*CHECK, *arguments], env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert (
        "UsageError" in done.stderr and "NOT_SET_ANYWHERE" in done.stderr
    )  # the command line prints it without a trace
    assert done.stdout == ""


@needs_ssh
@pytest.mark.slow
def test_over_ssh_the_hosts_that_can_be_reached_are_measured(tmp_path: Path) -> None:
    with Hosts(2, rate="1gbit") as hosts, Sshd(tmp_path, hosts, 2) as server:
        arguments = ["40", "-H", f"{hosts.address(0)}:1,h1:1,h5:1", "--ssh-config", str(server.config)]
        process = hosts.start(0, [*CHECK, *arguments], environment(), cwd=tmp_path)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, out
    document = document_in(out)
    assert document["num_ranks"] == 2
    assert [each["kind"] for each in document["findings"] if each["level"] == "fail"] == ["unreachable-host"]
    assert document["findings"][0]["text"].startswith("h5 cannot be reached over ssh: ")
    assert [each["host"] for each in document["facts"]] == ["h0", "h1"]
    assert {each["network"]["in_use"] for each in document["facts"]} == {"eth0"}
    assert texts(document, "wrong-interface") == []
    (link,) = document["links"]
    assert link["failure"] == "" and 0.7e9 < 8 * link["forward_bytes_per_s"] < 1.3e9
    assert [each["failure"] for each in document["reductions"]] == ["", ""]
    assert "the check ran without h5" in document["notes"]


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "it can")
def test_under_srun() -> None:
    with slurm.Cluster(nodes=2, cpus=2) as cluster:
        done = cluster.run(["srun", "-n2", "-N2", *CHECK, "20"], environment())
    assert done.returncode == 0, done.stdout
    document = document_in(done.stdout)
    assert document["launcher"] == "slurm"
    assert [each["failure"] for each in document["links"]] == [""]
    assert document["reductions"][0]["median_s"] > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="needs mpirun.openmpi (apt install openmpi-bin)")
def test_under_mpirun() -> None:
    # By this name: beside it, `mpirun` is Open MPI 5 where pip installed that, which names its options in another way.
    options = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--mca",
        "oob_tcp_if_include",
        "lo",
        "--mca",
        "btl_tcp_if_include",
        "lo",
    ]
    command = ["mpirun.openmpi", *options, "-np", "2", *CHECK, "20"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    document = document_in(done.stdout)
    assert document["num_ranks"] == 2
    assert [each["failure"] for each in document["links"]] == [""]
