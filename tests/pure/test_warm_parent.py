"""Which ranks a warm parent can fork."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from guozhuang.launch.warm import NotWarmError, arguments_of, check_variables

PYTHON = [sys.executable, "-u"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*PYTHON, "-m", "package.module", "--a", "b"], ["-m", "package.module", "--a", "b"]),
        ([*PYTHON, "train.py"], ["train.py"]),
        ([*PYTHON, "./train.py", "-m", "x"], ["./train.py", "-m", "x"]),
        ([*PYTHON, "missing.py"], "missing.py is not a file"),
        ([*PYTHON, "folder"], "folder is not a file"),
        ([*PYTHON, "train.pyc"], "train.pyc is not a file of Python source"),
        ([*PYTHON, "-c", "print()"], "-c is not a file"),
        ([*PYTHON, "-m"], "-m is not a file"),
        ([sys.executable, "-u", "-X", "dev", "train.py"], "-X is not a file"),
        ([sys.executable, "train.py"], "not that of a Python program with this interpreter"),
        (["/other/python", "-u", "train.py"], "not that of a Python program with this interpreter"),
        (["numactl", "--cpunodebind=0", *PYTHON, "train.py"], "not that of a Python program"),
        (PYTHON, "not that of a Python program"),
    ],
)
def test_files_and_modules_can_be_run_by_a_fork(
    words: list[str], expected: list[str] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train.pyc"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    if isinstance(expected, list):
        assert arguments_of(words) == expected
        return
    with pytest.raises(NotWarmError, match=expected):
        arguments_of(words)


def test_no_fork_where_a_process_cannot_adopt_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotWarmError, match="only Linux"):
        arguments_of([*PYTHON, "-m", "module"])


@pytest.mark.parametrize(
    ("before", "now", "name"),
    [
        ({}, {}, ""),
        ({"RANK": "0"}, {"RANK": "1", "MASTER_PORT": "1", "GUOZHUANG_RUN": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, ""),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"}, ""),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS"),
        ({}, {"PYTHONHASHSEED": "1"}, "PYTHONHASHSEED"),
        ({"LD_PRELOAD": "libjemalloc.so"}, {}, "LD_PRELOAD"),
        ({"TORCH_LOGS": "+all"}, {"TORCH_LOGS": "all"}, "TORCH_LOGS"),
    ],
)
def test_variables_that_are_read_on_loading_must_not_change(
    before: dict[str, str], now: dict[str, str], name: str
) -> None:
    if not name:
        check_variables(before, now)
        return
    with pytest.raises(NotWarmError, match=f"another {name},"):
        check_variables(before, now)
