"""BytePS's dist_launcher: its command line, translated to one of `guozhuang run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from guozhuang.compat.byteps import dist_launcher
from guozhuang.errors import UsageError
from guozhuang.launch.hosts import options
from guozhuang.launch.options.arguments import read

AT = "--master-port 1234"


def words(folder: Path, given: str, workers: str = "a\n\nb\n", servers: str = "c\nd\nc\n") -> tuple[str, list[str]]:
    (folder / "workers").write_text(workers)
    (folder / "servers").write_text(servers)
    files = ["-WH", str(folder / "workers"), "--server-hostfile", str(folder / "servers")]
    more = ["--scheduler-port", "1234"] + (["--scheduler-ip", "a"] if "--scheduler-ip" not in given else [])
    found, notes = dist_launcher.words_for([*files, *more, *given.split()])
    options.plan(read(found), {})  # guozhuang run takes them
    return " ".join(found), notes


@pytest.mark.parametrize(
    ("given", "hosts", "wanted"),
    [
        (
            "bpslaunch python t.py -H x",
            {},
            f"-H a,b --nproc-per-node 1 --server-hosts c:2,d:1 {AT} --no-python python t.py -H x",
        ),
        (
            "--env NVIDIA_VISIBLE_DEVICES:0,1 --env URL:h:5 --interface eth1 sh run.sh",
            {"servers": "b\na\n"},
            f"-H a,b --nproc-per-node 2 --servers 2 {AT} --interface eth1 -x NVIDIA_VISIBLE_DEVICES=0,1 -x URL=h:5 "
            "--no-python sh run.sh",
        ),
        (
            "--username me --scheduler-ssh-port 2222 --env NVIDIA_VISIBLE_DEVICES:all t",
            {"workers": "a:2222\nyou@[::1]:2222\n", "servers": "c:2222\n"},
            f"-H me@a,you@[::1] --nproc-per-node gpu --server-hosts me@c:1 --ssh-port 2222 {AT} "
            "-x NVIDIA_VISIBLE_DEVICES=all --no-python t",
        ),
    ],
)
def test_words(tmp_path: Path, given: str, hosts: dict[str, str], wanted: str) -> None:
    assert words(tmp_path, given, **hosts) == (wanted, [])


def test_a_line_goes_to_a_shell_and_what_has_no_effect_is_said(tmp_path: Path) -> None:
    _, notes = words(tmp_path, "--scheduler-ip s --env BYTEPS_NUMA_ON:1 t")
    assert len(notes) == 2 and "BYTEPS_NUMA_ON" in notes[0] and "no scheduler is started at s: a, worker 0" in notes[1]
    files = ["-WH", str(tmp_path / "workers"), "-SH", str(tmp_path / "servers")]
    more = ["--scheduler-ip", "a", "--scheduler-port", "1", "cd x && bpslaunch python t.py"]
    assert dist_launcher.words_for([*files, *more])[0][-3:] == ["sh", "-c", more[-1]]


@pytest.mark.parametrize(
    ("given", "hosts", "text"),
    [
        ("bpslaunch", {}, "needs the command"),
        ("--env A t", {}, "--env takes NAME:VALUE"),
        ("--env BYTEPS_ENABLE_GDB:1 t", {}, "start the script under gdb yourself"),
        ("t", {"workers": "\n"}, "names no host"),
        ("t", {"workers": "a\nb\na\n"}, "a host is named twice"),
        ("t", {"workers": "a:22\nb:23\n", "servers": "c:22\n"}, "different ports of ssh"),
        ("--scheduler-ssh-port 23 t", {}, "different ports of ssh"),
        ("t", {"servers": "a\nc\n"}, "some servers are on hosts of workers"),
    ],
)
def test_what_cannot_work(tmp_path: Path, given: str, hosts: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        words(tmp_path, given, **hosts)
