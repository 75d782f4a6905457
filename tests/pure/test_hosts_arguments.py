"""``-H``, ``--hostfile`` and their companions, as they are read; what is sent to hosts; where hosts meet."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.launch.hosts import meeting, ssh
from guozhuang.launch.hosts import options as hosts
from guozhuang.launch.hosts.frames import DoorsTried, NodeReady
from guozhuang.launch.hosts.options import HostsPlan
from guozhuang.launch.hosts.placement import Host, parse_hosts, place, read_hostfile
from guozhuang.launch.options.arguments import add_host_arguments, read
from tests.drawing import examples

SCRIPT = ["train.py", "--lr", "1"]


def plan(*words: str) -> HostsPlan:
    """The command line as the launcher reads it, in the environment of this process."""
    return hosts.plan(read(words), dict(os.environ))


def test_hosts_are_read() -> None:
    assert parse_hosts("a:2, b ,me@c:1") == [Host("a", 2), Host("b", None), Host("me@c", 1)]
    assert parse_hosts("[fd00::1]:4,fd00::2,[fd00::3],me@[fd00::4]:1") == [
        Host("fd00::1", 4), Host("fd00::2", None), Host("fd00::3", None), Host("me@fd00::4", 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", ",", "a:0", "a:x", "a:-1", "-oProxyCommand=x", "a b", "a;b", ":2", "[a:2", "a:2:"]
)
def test_hosts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="Fix:"):
        parse_hosts(text)


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\n\nnode1 slots=2 # fast\n  node2:3\nnode3\n")
    assert read_hostfile(str(path)) == [Host("node1", 2), Host("node2", 3), Host("node3", None)]


def test_a_hostfile_of_another_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes("\ufeffnode1 slots=2\r\nnode2\r\n".encode())
    assert read_hostfile(str(path)) == [Host("node1", 2), Host("node2", None)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=0\n", "line 1"),
        ("a\nb max_slots=2\n", "line 2"),
        ("a:2 slots=2\n", "line 1"),
        ("a b\n", "line 1"),
        ("# none\n", "names no host"),
        (None, "cannot be read"),
    ],
)
def test_a_hostfile_that_makes_no_sense_names_its_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_hostfile(str(path))


def test_ranks_are_placed() -> None:
    both = [Host("a", 2), Host("b", 3)]
    assert place(both, None, None) == [("a", "2"), ("b", "3")]
    assert place(both, 3, None) == [("a", "2"), ("b", "1")]
    assert place(both, 2, None) == [("a", "2")]
    assert place([Host("a", None), Host("b", None), Host("a", 2)], None, None) == [("a", "3"), ("b", "1")]
    assert place([Host("a", None), Host("b", 4)], None, "4") == [("a", "4"), ("b", "4")]
    assert place([Host("a", None)], None, "gpu") == [("a", "gpu")]
    for num_ranks, per_host, words in [(6, None, "which are 5"), (0, None, "at least 1"), (None, "3", "more ranks than a"),
                                       (None, "0", "at least 1")]:  # fmt: skip
        with pytest.raises(UsageError, match=words):
            place(both, num_ranks, per_host)


def test_a_port_in_the_place_of_slots_is_a_slip() -> None:
    assert place([Host("a", 2222)], 2, None) == [("a", "2")]
    for num_ranks, per_host in ((None, None), (2000, None), (None, "2000")):
        with pytest.raises(UsageError, match=r"more than 1024 ranks on a host \(got 2[02]{3}\).*--ssh-port"):
            place([Host("a", 2222)], num_ranks, per_host)


def test_the_options_go_to_the_agents() -> None:
    words = ["-H", "a:1,b:2", "--strategy", "ddp", "-x", "A=1", "--ssh_port=7", "-m", "--max-restarts", "3", "--timeline",
             "t.json", "--shutdown-timeout", "9"]  # fmt: skip
    found = plan(*words, *SCRIPT)
    assert (found.ssh, found.environment, found.timeline) == (ssh.SshOptions(7), {"A": "1"}, "t.json")
    assert (found.interface, found.master, found.port, found.start_timeout_s) == (None, None, 0, 60.0)
    for node_rank, (count, timeline) in enumerate([("1", "t.json"), ("2", "t.node1.json")]):
        sent = found.options_of(node_rank)
        assert (sent["strategy"], sent["module"], sent["hosts"]) == ("ddp", True, None)
        assert [sent["training_script"], *sent["training_script_args"]] == SCRIPT
        assert (sent["nproc_per_node"], sent["timeline"], sent["max_restarts"]) == (count, timeline, 0)
        assert (sent["shutdown_timeout"], sent["exported"], sent["ssh_port"]) == (9, None, None)
        assert json.loads(json.dumps(sent)) == sent


def test_variables_of_torchrun_stand_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NPROC_PER_NODE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "MAX_RESTARTS": "2",
                        "SHUTDOWN_TIMEOUT": "120", "SIGNALS_TO_HANDLE": "SIGUSR1, SIGTERM"}.items():  # fmt: skip
        monkeypatch.setenv(f"PET_{name}", value)
    found = plan("-H", "a,b", *SCRIPT)
    assert found.placed == [("a", "4"), ("b", "4")]
    assert (found.master, found.port, found.max_restarts) == ("10.0.0.1", 29500, 2)
    assert (found.shutdown_timeout_s, found.signals) == (120, [signal.SIGUSR1])
    assert found.options["signals_to_handle"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    found = plan("-H", "a:9,b:9", "-np", "3", "--master-port", "7", *SCRIPT)
    assert found.placed == [("a", "3")]
    assert found.port == 7


def test_variables_of_torchrun_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "0")
    monkeypatch.setenv("PET_NNODES", "")
    found = plan("-H", "a", *SCRIPT)
    assert (found.master, found.port, found.max_restarts, found.signals) == (None, 0, 0, [])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PET_NNODES", "2", "PET_NNODES and -H exclude"),
        ("PET_STANDALONE", "1", "PET_STANDALONE and -H exclude"),
        ("PET_RDZV_BACKEND", "c10d", "leave PET_RDZV_BACKEND out"),
        ("PET_MASTER_PORT", "70000", "no TCP port"),
        ("PET_NPROC_PER_NODE", "0", "at least 1"),
        ("PET_MAX_RESTARTS", "-1", "negative"),
        ("PET_SIGNALS_TO_HANDLE", "SIGKILL", "nobody can handle"),
    ],
)
def test_variables_that_make_no_sense_with_hosts_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        plan("-H", "a:1", *SCRIPT)


# What a script may be given: anything but a zero byte, which no argument can hold.
WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20), max_size=6)


@examples(50)
@given(WORDS)
def test_arguments_of_the_script_are_never_touched(words: list[str]) -> None:
    sent = json.loads(json.dumps(plan("-H", "a:1,b:2", "-np", "2", "train.py", *words).options_of(1)))
    assert (sent["training_script"], sent["training_script_args"]) == ("train.py", words)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (["--nnodes", "2"], "--nnodes and -H exclude each other"),
        (["--rdzv_backend=c10d"], "--rdzv-backend and -H"),
        (["--hostfile", "/no/such/file", "-H", "b"], "exclude each other"),
        (["--start-timeout", "0"], "above 0"),
        (["--start-timeout", "nan"], "above 0"),
        (["--ssh-port", "70000"], "no TCP port"),
        (["--master-port", "0"], "no TCP port"),
        (["--ssh-identity", "/no/such/key"], "no such file"),
        (["-x", "NOT_SET_HERE"], "not set here"),
        (["-x", "=x"], "NAME or NAME=VALUE"),
        (["--stand"], "--standalone and -H exclude"),
        (["--nnode", "3"], "leave --nnodes out"),
        (["--rdzv_back=c10d"], "--rdzv-backend and -H"),
        (["--nproc-per-node", "2", "-np", "2"], "exclude each other"),
        (["-np", "gpu"], "-np counts the ranks of all hosts"),
        (["--max-restarts", "-1"], "negative"),
        (["--signals-to-handle", "SIGFOO"], "no signal"),
    ],
)
def test_what_makes_no_sense_with_hosts_is_refused(head: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan("-H", "a:1", *head, *SCRIPT)


def test_options_may_be_abbreviated_as_torchrun_allows() -> None:
    assert plan("-H", "a:1", "--interf", "eth0", *SCRIPT).interface == "eth0"


def test_options_for_hosts_need_hosts() -> None:
    parser = argparse.ArgumentParser()
    add_host_arguments(parser)
    assert hosts.is_asked_for(parser.parse_args(["-H", "a"]))
    assert hosts.is_asked_for(parser.parse_args(["--hostfile", "f"]))
    assert not hosts.is_asked_for(parser.parse_args(["--interface", "eth0"]))  # serves other launchers too
    with pytest.raises(UsageError, match="--ssh-port, --start-timeout"):
        hosts.is_asked_for(parser.parse_args(["--ssh-port", "1", "--start_timeout", "9"]))


@examples(50)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=30))
def test_the_remote_shell_gets_each_word_as_it_is(program: str) -> None:
    before, sys.executable = sys.executable, program
    try:
        words = ssh.command("me@host", ssh.SshOptions(2222, "/k y", "/c"), 7, "token")
    finally:
        sys.executable = before
    assert shlex.split(words[-1]) == ["exec", program, "-c", ssh._BOOTSTRAP, "token"]
    assert words[-3:-1] == ["--", "me@host"]
    assert words[words.index("-i") + 1] == "/k y"
    assert "BatchMode=yes" in words and "ConnectTimeout=7" in words


def test_nothing_secret_is_on_a_command_line() -> None:
    assert "secret" not in " ".join(ssh.command("h", ssh.SshOptions(), 5, "token")).lower()


def test_what_of_the_environment_is_carried() -> None:
    environ = {
        "PATH": "/bin", "PYTHONPATH": "/x", "NCCL_DEBUG": "INFO", "GUOZHUANG_STRATEGY": "ddp", "OMP_NUM_THREADS": "2",
        "GUOZHUANG_SECRET": "00", "TORCHELASTIC_RUN_ID": "1", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "RANK": "1",
        "SLURM_PROCID": "0", "SSH_AUTH_SOCK": "/s", "LC_ALL": "C.UTF-8", "TORCH_LOGS": "x", "PYTHONHOME": "/h",
    }  # fmt: skip
    left = {"GUOZHUANG_SECRET", "TORCHELASTIC_RUN_ID", "HOME", "CUDA_VISIBLE_DEVICES", "RANK", "SLURM_PROCID", "SSH_AUTH_SOCK",
            "PYTHONHOME"}  # fmt: skip
    assert environ.keys() - ssh.carried(environ).keys() == left
    assert ssh.asked_for(["HOME", "NEW=a=b", "EMPTY="], environ) == {"HOME": "/root", "NEW": "a=b", "EMPTY": ""}


def test_the_folder_has_the_name_the_user_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "known").symlink_to("real")
    monkeypatch.chdir(tmp_path / "known")
    monkeypatch.setenv("PWD", str(tmp_path / "known"))
    assert ssh.folder() == str(tmp_path / "known")
    monkeypatch.setenv("PWD", "/")
    assert ssh.folder() == os.path.realpath(tmp_path / "real")


def ready(addresses: dict[str, list[str]], reached_at: str | None, same: str) -> NodeReady:
    return NodeReady(same, addresses, reached_at)


def test_the_addresses_that_a_host_offers() -> None:
    own = {
        "lo": ["127.0.0.1"],
        "docker0": ["172.17.0.1"],
        "eth0": ["10.0.0.5", "fd00::5", "fe80::1%eth0"],
        "ib0": ["10.1.0.5"],
    }
    first, other = ready(own, "10.1.0.5", "x"), ready({}, None, "y")
    assert meeting.candidates([first, other], "10.0.0.5", None) == ["10.1.0.5", "10.0.0.5", "172.17.0.1", "fd00::5"]
    assert meeting.candidates([first, other], "10.0.0.5", "192.0.2.1") == ["192.0.2.1"]
    assert meeting.candidates([first, ready({}, None, "x")], "a", None) == ["127.0.0.1"]
    # By a name that stands for somebody else, a translated address for example, nobody can be asked to listen.
    assert meeting.candidates([ready(own, "203.0.113.9", "x"), other], "203.0.113.9", None)[0] == "172.17.0.1"


def test_the_door_that_lets_everybody_in_is_chosen() -> None:
    names, doors = ["a", "b", "c"], [("10.0.0.1", 5), ("10.0.0.2", 6)]
    everywhere, second = DoorsTried(["", ""]), DoorsTried(["Connection refused", ""])
    neither = DoorsTried(["Connection refused", "nobody answered"])
    assert meeting.choose(names, doors, {}, [everywhere, everywhere]) == doors[0]
    assert meeting.choose(names, doors, {}, [everywhere, second]) == doors[1]
    text = meeting.choose(names, doors, {}, [everywhere, neither])
    assert isinstance(text, str)
    assert "from c: not 10.0.0.1 port 5 (Connection refused), not 10.0.0.2 port 6 (nobody answered)" in text
    assert "from b" not in text
    assert "10.0.0.9: in use" in str(meeting.choose(names, [], {"10.0.0.9": "in use"}, []))


def test_agents_replace_ranks_and_the_launcher_restarts_all() -> None:
    for policy, of_the_launcher, of_agents in (("restart-all", 3, 0), ("keep-survivors", 0, 3)):
        found = plan("-H", "a,b", "--max-restarts", "3", "--on-failure", policy, "t.py")
        assert found.max_restarts == of_the_launcher
        assert (found.options["max_restarts"], found.options["on_failure"]) == (of_agents, policy)
