"""Following the log file of a rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.run import config_from_args

from guozhuang.launch.console.streams import LastOutput, LogFile
from guozhuang.launch.local_run import TorchrunLogs
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path, trace = tmp_path / "log", LastOutput()
    file = LogFile(str(path))
    assert file.read() == []
    append(path, "one\ntw")
    assert file.read() == [b"one"]
    append(path, "o\n\x1b[31mred\x1b[0m\n 10%\r 20%")
    trace.keep(file.read())
    assert [text for _, text in trace.lines] == ["two", "red"]
    assert file.finish() == [b" 20%"]


def test_a_file_that_comes_later_or_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(str(path))
    assert file.read() == []
    path.write_text("first\nsecond\n")
    assert file.read() == [b"first", b"second"]
    path.write_text("new\n")
    assert file.read() == [b"new"]
    append(path, "x" * 1_000_000 + "\nlast\n")
    assert file.finish()[-1] == b"last", "of much at once, the end"


def test_all_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo")
    assert LogFile(str(path)).finish() == [b"one", b"two"]
    assert LogFile(str(tmp_path / "none")).finish() == []


def test_an_attempt_empties_files_that_a_plug_in_names_again(tmp_path: Path) -> None:
    path = tmp_path / "log"

    class FixedPaths(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(tmp_path)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return LogsDest(stdouts={0: str(path)}, stderrs={0: ""})

    plan = options.plan(read([__file__]), {})
    config = dataclasses.replace(config_from_args(plan.elastic)[0], logs_specs=FixedPaths())
    path.write_text("of yesterday\n")
    TorchrunLogs(config, {0: {"RANK": "0"}}).close()
    assert path.read_text() == ""
