"""What the launcher says must not change how the run ends, whoever reads it or does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guozhuang import cli
from guozhuang.launch.console.say import say
from tests.waiting import EXPIRES_S, LIMIT_S

SAY = Path(say.__code__.co_filename)


def test_it_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo")
    say("three", "guozhuang", within_s=LIMIT_S)
    assert capsys.readouterr().err == "guozhuang run: one\ntwo\nguozhuang: three\n"


def test_nobody_reads_it() -> None:
    """As with `2>&1 | head`: no exception, and the exit code stays."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import runpy, sys\nsay = runpy.run_path(sys.argv[1])['say']\nsay('x'); say('y'); sys.exit(7)"
    done = subprocess.run([sys.executable, "-S", "-c", program, str(SAY)], stderr=writing, timeout=LIMIT_S)
    os.close(writing)
    assert done.returncode == 7


def test_there_is_no_standard_error() -> None:
    """As with `2>&-`: standard output does not get it either, and the exit code stays."""
    program = "import runpy, sys\nsys.stderr = None\nsay = runpy.run_path(sys.argv[1])['say']\n"
    program += "say('x'); say('y', within_s=1); sys.exit(7)"
    done = subprocess.run([sys.executable, "-S", "-c", program, str(SAY)], stdout=subprocess.PIPE, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (7, b"")


def test_a_reader_that_has_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("x", within_s=EXPIRES_S)
    os.close(reading)


def test_closed_standard_streams_are_opened() -> None:
    """As with `<&- >&- 2>&-`: else the next socket gets what is printed. What is started finds them too."""
    pid = os.fork()
    if pid == 0:
        found = False
        try:
            os.closerange(0, 3)
            cli._open_closed()
            found = all(os.path.samefile(f"/proc/self/fd/{each}", os.devnull) for each in range(3))
            found = found and all(map(os.get_inheritable, range(3)))
        finally:
            os._exit(7 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
