from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from guozhuang.lab.runs import ended_by_signals, first_cause


def _tell(folder: Path, name: str, time: float, text: str) -> None:
    (folder / f"error-{name}.json").write_text(json.dumps({"time": time, "who": f"rank {name}", "text": text}))


def test_the_error_noticed_first_is_the_cause(tmp_path: Path) -> None:
    _tell(tmp_path, "0", 12.0, "RuntimeError: connection closed by peer")
    _tell(tmp_path, "1", 11.5, "ValueError: bad sample")
    assert first_cause(tmp_path, tmp_path / "log", 1, 60) == "rank 1: ValueError: bad sample"


def test_a_rank_that_could_not_speak_comes_before_those_that_lost_it(tmp_path: Path) -> None:
    _tell(tmp_path, "0", 12.0, "RuntimeError: connection reset by peer")
    log = tmp_path / "log"
    log.write_text("...\nguozhuang run: rank 1 failed first: signal 9 (SIGKILL) (process 7); no memory\n")
    assert first_cause(tmp_path, log, 137, 60) == "rank 1 failed first: signal 9 (SIGKILL) (process 7); no memory"
    log.write_text("guozhuang run: rank 0 failed first: signal 6 (SIGABRT) (process 7)\n")  # while it was leaving
    assert first_cause(tmp_path, log, 134, 60) == "rank 0: RuntimeError: connection reset by peer"


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("x\nguozhuang run: rank 1 failed first: signal 9 (SIGKILL) (process 7); no memory\ny", 137, "signal 9"),
        ("", -11, "a rank was ended by signal 11 (SIGSEGV)"),
        ("", -9, "signal 9 (SIGKILL); if nobody sent it, the machine ran out of memory: a smaller model"),
        ("a\n\nb\nc\nd\n", 3, "exit code 3: b | c | d"),
        ("", None, "no end after 60 s"),
    ],
)
def test_without_a_word_from_a_rank_the_log_and_the_exit_code_tell(
    tmp_path: Path, log: str, code: int | None, says: str
) -> None:
    (tmp_path / "log").write_text(log)
    assert says in first_cause(tmp_path, tmp_path / "log", code, 60)


def test_what_a_rank_said_tells_more_than_that_time_ran_out(tmp_path: Path) -> None:
    _tell(tmp_path, "0", 1.0, "RuntimeError: timed out waiting for rank 1")
    assert "rank 0" in first_cause(tmp_path, tmp_path / "log", None, 60)


def test_a_signal_interrupts_a_comparison_unless_it_is_ignored_as_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("SIGTERM was ignored")
    finally:
        signal.signal(signal.SIGHUP, before)
