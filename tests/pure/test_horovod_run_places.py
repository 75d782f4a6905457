"""HOROVOD_RANK and so on, which horovodrun's ranks find in their environment; copies of what they print."""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import setuptools

from guozhuang.compat.horovod.common import extension
from guozhuang.compat.horovod.common.extension import EXTENSION, OF_HOROVODRUN
from guozhuang.errors import UsageError, WorldError
from guozhuang.launch import agent
from guozhuang.launch.console.copies import Copies, Copy
from guozhuang.launch.console.output import RankPlaces
from guozhuang.launch.console.streams import LastOutput, NamedPipe, Stream
from guozhuang.launch.functions import mailbox
from guozhuang.launch.hosts import ssh
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read
from guozhuang.launch.rank_files import RankFiles, Shown, copies_of
from guozhuang.launch.rendezvous.fixed import Attempt, NodeShare
from guozhuang.launch.request import Request, RunReport, with_folders
from guozhuang.net import doors, interfaces
from guozhuang.net.door import OpenDoor
from tests.launching import ROOT
from tests.waiting import until


def test_crosswise_ranks_count_the_nodes_that_have_this_local_rank() -> None:
    hosts, shares = ["a", "fd00::1", "c"], [NodeShare(2), NodeShare(1), NodeShare(3)]
    found = []
    for node, local_rank in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)):
        place = Attempt(0, node, shares, "h", 1).place(local_rank) | {"host": hosts[node]}
        told = {name: text.format(**place) for name, text in extension.OF_HOROVODRUN.rank_variables.items()}
        found.append({name.removeprefix("HOROVOD_"): value for name, value in told.items()})
    assert [each["RANK"] for each in found] == list("012345")
    assert [each["HOSTNAME"] for each in found] == ["a", "a", "fd00::1", "c", "c", "c"]
    assert [(each["CROSS_RANK"], each["CROSS_SIZE"]) for each in found] == [
        ("0", "3"), ("0", "2"), ("1", "3"), ("2", "3"), ("1", "2"), ("0", "1")
    ]  # fmt: skip
    assert {each["SIZE"] for each in found} == {"6"} and [each["LOCAL_SIZE"] for each in found] == list("221333")
    assert {each["CONTROLLER"] for each in found} == {"gloo"}


def test_horovod_comes_after_what_the_user_has_on_the_path() -> None:
    ours = extension.ON_PATH
    assert (Path(ours) / "horovod" / "__init__.py").is_file()
    assert (
        with_folders("", extension.EXTENSION.python_path)
        == with_folders("", extension.EXTENSION.python_path)
        == {"PYTHONPATH": ours}
    )
    for before, after in (("", {"PYTHONPATH": ours}), ("/a:", {"PYTHONPATH": f"/a::{ours}"}), (f"{ours}:/a", {})):
        assert with_folders(before, extension.EXTENSION.python_path) == after


def test_what_other_hosts_are_told_of_the_environment() -> None:
    environ = {
        "HOROVOD_CYCLE_TIME": "1", "HOROVOD_RANK": "0", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_HOSTNAME": "x", "DATA": "/d",
        "HOME": "/root", "PATH": "/bin", "SSH_AUTH_SOCK": "/s", "RANK": "1", "SLURM_JOB_ID": "1", "GUOZHUANG_SECRET": "0",
        "BASH_FUNC_x%%": "() { :; }", "HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0",
        "KRB5CCNAME": "FILE:/tmp/krb5cc_0", "GUOZHUANG_HOROVOD_ELASTIC": "0@127.0.0.1:1", "HOROVOD_ELASTIC_TIMEOUT": "9",
        "BYTEPS_LOCAL_RANK": "0", "BYTEPS_ENABLE_ASYNC": "1",
    }  # fmt: skip
    assert ssh.carried(environ, extension.EXTENSION) == {
        "HOROVOD_CYCLE_TIME": "1",
        "PATH": "/bin",
        "HOROVOD_ELASTIC_TIMEOUT": "9",
        "BYTEPS_ENABLE_ASYNC": "1",
    }
    assert ssh.of_the_job(environ, extension.EXTENSION) == {"DATA": "/d"}


@pytest.mark.parametrize("more", [["--log-dir", "logs"], ["--tee", "3"]])
def test_copies_are_of_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match="--copy-output copies what is shown"):
        options.plan(read([*more, "--copy-output", "copies", "train.py"]), {})
    with pytest.raises(UsageError, match="--timestamps stand before lines that are shown"):
        options.plan(read([*more, "--timestamps", "train.py"]), {})
    found = options.plan(read(["--copy-output", "copies", "--timestamps", "train.py"]), {})
    assert (found.copy_folder, found.timestamps) == (os.path.join(tmp_path, "copies"), True)


def test_copies_sort_as_the_ranks_do() -> None:
    assert [copies_of("out", rank, 10) for rank in (0, 9)] == ["out/rank.0", "out/rank.9"]
    assert [copies_of("out", rank, 11) for rank in (0, 9, 10)] == ["out/rank.00", "out/rank.09", "out/rank.10"]
    assert copies_of("out", 7, 1001) == "out/rank.0007"
    assert copies_of("out", 0, 1) == "out/rank.0"


class FakeOutput:
    """What the logs of an attempt ask of ``Output``."""

    def __init__(self) -> None:
        self.copies: list[str | None] = []
        self.said: list[str] = []

    def begin(self, ranks: list[int]) -> None:
        pass

    def pipes(self, rank: int, folder: str, shown: bool, copies: str | None, copy_prefix: str) -> RankPlaces:
        self.copies.append(copies)
        return RankPlaces("", "", {})

    def say(self, text: str) -> None:
        self.said.append(text)


def test_copies_that_cannot_be_made_end_no_run_that_has_begun(tmp_path: Path) -> None:
    output = FakeOutput()
    logs = RankFiles(str(tmp_path / "run"), cast(Any, output), Shown(copy_folder=str(tmp_path)))
    envs = {0: {"RANK": "0", "WORLD_SIZE": "1"}}
    logs.reify(envs)
    folder = tmp_path / "rank.0"
    assert output.copies == [str(folder)] and sorted(path.name for path in folder.iterdir()) == ["stderr", "stdout"]
    shutil.rmtree(folder)
    folder.write_text("somebody else's file")
    logs.reify(envs)
    assert output.copies[1:] == [None] and len(output.said) == 1
    assert output.said[0].startswith(f"what rank 0 prints cannot be written to {folder}: ")
    logs = RankFiles(str(tmp_path / "again"), cast(Any, output), Shown(copy_folder=str(tmp_path)))
    with pytest.raises(UsageError, match="what rank 0 prints cannot be written to"):
        logs.reify(envs)


def test_a_stream_goes_on_without_a_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    way, trace, copies = NamedPipe(str(tmp_path / "pipe")), LastOutput(), Copies()
    stream = Stream(way, 1, trace, None, False, copy=Copy(copies, str(tmp_path)))  # a folder
    os.write(way._own_end, b"a line\n")
    assert stream.read()
    stream.finish()
    copies.close(None)
    assert [text for _, text in trace.lines] == ["a line"]
    assert f"no more of what a rank prints is written to {tmp_path}: Is a directory" in capfd.readouterr().err


def test_a_copy_that_cannot_be_closed_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As of a file system over a network that is full: the thread that writes all copies must not end by it."""
    copies = Copies()
    copy = Copy(copies, str(tmp_path / "copy"))
    until(lambda: copy._file is not None)
    assert copy._file is not None
    os.close(copy._file.fileno())
    copy.close()
    copies.close(None)
    assert f"is written to {tmp_path}/copy: Bad file descriptor" in capfd.readouterr().err


def test_gloo_uses_the_interface_that_horovod_was_told() -> None:
    told = {"HOROVOD_GLOO_IFACE": " eth7"}
    assert EXTENSION.defaults(told) == OF_HOROVODRUN.defaults(told) == {interfaces.GLOO: "eth7"}
    both = {**told, interfaces.GLOO: "eth8"}
    assert EXTENSION.defaults(both) == {}, "gloo's own name counts more"
    loopback = interfaces.Interface("lo", "127.0.0.1")
    assert interfaces.variables(loopback, both, override=True)[interfaces.GLOO] == "lo"
    assert EXTENSION.defaults({"HOROVOD_GLOO_IFACE": ""}) == {}


def test_the_ranks_of_guozhuang_run_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth7")
    monkeypatch.delenv(interfaces.GLOO, raising=False)
    found = {}
    monkeypatch.setattr(agent, "_run_here", lambda ours, request: found.update(os.environ) or RunReport())
    assert agent.main(["-np", "1", __file__], Request(EXTENSION)) == 0
    assert found[interfaces.GLOO] == "eth7" and interfaces.GLOO not in os.environ
    agent.main(["-np", "1", "--interface", "lo", __file__], Request(EXTENSION))
    assert found[interfaces.GLOO] == "lo", "the command line counts more"


@pytest.mark.parametrize(("answers", "is_in"), [((False, True), True), ((False, False), False)], ids=["late", "never"])
def test_a_busy_host_of_horovod_run_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[bool, ...], is_in: bool
) -> None:
    """A second visit, with the result, must not fail because the host did not answer for a moment."""
    tried, box = [], mailbox.Mailbox(list, None)
    knock = doors.knock

    def sometimes(host: str, port: int, secret: bytes, timeout_s: float) -> OpenDoor:
        tried.append((host, port))
        if not answers[min(len(tried), len(answers)) - 1]:
            raise TimeoutError("timed out")
        return knock(host, port, secret, timeout_s)

    monkeypatch.setattr(doors, "knock", sometimes)
    monkeypatch.setattr(mailbox, "_LIMIT_S", 20.0 if is_in else 0.1)
    secret, _, door = box.variables["GUOZHUANG_TASK"].partition("@")
    host, _, port = door.rpartition(":")
    where = bytes.fromhex(secret), [(host, int(port))]
    try:
        if is_in:
            with mailbox.visit(*where) as store:
                mailbox._put(store, where[0], mailbox._answer_of(3), pickle.dumps(mailbox.Answer("result")))
            assert box.answer(3) == mailbox.Answer("result") and box.answer(0) is None and len(tried) == 2
        else:
            with pytest.raises(WorldError, match=r"cannot be reached: .* timed out"), mailbox.visit(*where):
                pass
            assert len(tried) > 2
    finally:
        box.close()


@pytest.mark.parametrize("is_beside", [True, False], ids=["in-the-tree", "handed-on"])
def test_the_redirect_comes_from_this_tree_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    if is_beside:
        (tmp_path / "packaging" / "horovod").mkdir(parents=True)
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **all_of_it: told.update(all_of_it))
    for argument, is_named in (("dist_info", is_beside), ("sdist", False)):
        monkeypatch.setattr(sys, "argv", ["setup.py", argument])
        runpy.run_path(str(tmp_path / "setup.py"), run_name="__main__")
        assert not told["extras_require"]["byteps"]  # no such folder is there
        for extra in ("horovod", "test"):
            ours = [each for each in told["extras_require"][extra] if each.startswith("guozhuang")]
            where = (tmp_path / "packaging/horovod").resolve().as_uri()
            assert ours == ([f"guozhuang-horovod @ {where}"] if is_named else [])
