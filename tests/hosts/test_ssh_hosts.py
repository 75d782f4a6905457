"""``guozhuang run -H`` over hosts with a network between them: addresses, interfaces, cut cables, hosts that are off."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import network
from tests.hosts.network import Hosts
from tests.hosts.sshd import Sshd, missing, none_left
from tests.hosts.test_ssh import LIGHT, TRAIN, ours, told
from tests.launching import environment
from tests.waiting import LIMIT_S, until

_LACKS = network.missing() or missing()
pytestmark = [
    pytest.mark.waits,
    pytest.mark.needs_root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "it can"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "work"
    found.mkdir()
    (found / "train.py").write_text(TRAIN)
    (found / "light.py").write_text(LIGHT)
    return found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Hosts, Sshd]]:
    with Hosts(2) as hosts, Sshd(tmp_path, hosts, 2) as sshd:
        yield hosts, sshd


def begin(hosts: Hosts, sshd: Sshd, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The launcher on host 0."""
    command = [sys.executable, "-m", "guozhuang", "run", "--ssh-config", str(sshd.config), *arguments]
    return hosts.start(0, command, environment(), cwd=folder)


def wait_for(process: subprocess.Popen[str], folder: Path, num_ranks: int) -> None:
    until(
        lambda: len([path for path in folder.glob("here*") if path.read_text()]) == num_ranks,
        goes_on=lambda: process.poll() is None,
        told=lambda: process.poll() is not None and process.stdout and process.stdout.read(),
    )


def test_two_hosts_train_and_use_the_interface_between_them(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    # The first host is the launcher's own, and known by its address; the other by a name that only ssh knows.
    process = begin(hosts, sshd, folder, "-H", f"{hosts.address(0)}:2,h1:1", "train.py")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert [each["total"] for each in told(out)] == [6.0] * 3
    assert {each["GLOO_SOCKET_IFNAME"] for each in told(out)} == {"eth0"}
    assert {each["NCCL_SOCKET_IFNAME"] for each in told(out)} == {"eth0"}
    assert not none_left(str(folder))


def test_the_store_is_behind_a_door_on_the_one_interface(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    process = begin(hosts, sshd, folder, "-H", "h0:1,h1:1", "light.py", "sleep")
    wait_for(process, folder, 2)
    assert hosts.listening(0) == {hosts.address(0)}, "the door, and nothing on other addresses"
    assert hosts.listening(1) == set()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_four_hosts_with_different_slots(tmp_path: Path, folder: Path) -> None:
    with Hosts(4) as hosts, Sshd(tmp_path, hosts, 4) as sshd:
        (folder / "hosts").write_text("h2 slots=1\nh0:2\nh3\nh1:5\n")
        process = begin(hosts, sshd, folder, "--hostfile", "hosts", "-np", "5", "train.py")
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
        assert [(each["GROUP_RANK"], each["LOCAL_WORLD_SIZE"]) for each in told(out)] == [
            ("0", "1"), ("1", "2"), ("1", "2"), ("2", "1"), ("3", "1")
        ]  # fmt: skip
        assert [each["total"] for each in told(out)] == [15.0] * 5


def test_a_host_that_is_off_is_named(tmp_path: Path, folder: Path) -> None:
    with Hosts(3) as hosts, Sshd(tmp_path, hosts, 2) as sshd:
        hosts.cut(2)
        process = begin(hosts, sshd, folder, "--start-timeout", "10", "-H", "h0:1,h1:1,h2:1", "light.py")
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 255
        assert re.search(r"host h2 could not be reached .*(timed out|No route|10 s)", ours(out)[0]), out
        assert not list(folder.glob("here*"))
        assert not none_left(str(folder))


def test_a_cut_cable_ends_both_sides(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    process = begin(hosts, sshd, folder, "-H", "h0:1,h1:1", "light.py", "child", "sleep")
    wait_for(process, folder, 2)
    hosts.cut(1)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 255
    assert re.search(r"host h1 was lost: the connection to it broke: .*not responding", ours(out)[0]), out
    assert "then host h0 was ended because of it" in ours(out)
    assert not none_left(str(folder)), "on the host that was cut off"


def test_a_host_that_is_switched_off_ends_the_run(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    process = begin(hosts, sshd, folder, "-H", "h0:1,h1:1", "light.py", "sleep")
    wait_for(process, folder, 2)
    hosts.cut(1)
    for pid in subprocess.run(["ip", "netns", "pids", hosts._name(1)], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):  # its parent was killed before, and took it along
            os.kill(int(pid), signal.SIGKILL)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 255, out
    assert ours(out)[0].startswith("host h1 was lost"), out
    assert not none_left(str(folder))


def test_a_rank_killed_on_the_other_host(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    process = begin(hosts, sshd, folder, "-H", "h0:1,h1:2", "light.py", "kill1", "child", "sleep")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert "host h1 failed: exit code 137" in ours(out)
    assert not none_left(str(folder))


def test_an_interface_that_a_host_lacks_is_named(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    process = begin(hosts, sshd, folder, "--interface", "ib0", "-H", "h0:1,h1:1", "light.py")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "network interface does not exist on h" in out and "eth0 (10.77.0.1" in out
    assert "Traceback" not in out


def test_an_address_that_nobody_reaches_is_explained(two: tuple[Hosts, Sshd], folder: Path) -> None:
    hosts, sshd = two
    process = begin(hosts, sshd, folder, "--master-addr", "127.0.0.1", "-H", "h0:1,h1:1", "light.py")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "host h0 cannot be reached by all others" in out and "from h1: not 127.0.0.1 port" in out
    assert "Connection refused" in out
