"""Following the log file of a rank."""

from __future__ import annotations

from pathlib import Path

from guozhuang.launch.console.streams import LogFile, Trace


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path, trace = tmp_path / "log", Trace()
    path.write_text("ValueError: of yesterday\n")
    file = LogFile(str(path), skipped=b"--- ")
    assert file.read() == []
    append(path, "--- started anew\none\ntw")
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
    assert LogFile(str(path), whole=True).finish() == [b"one", b"two"]
    assert LogFile(str(tmp_path / "none"), whole=True).finish() == []
