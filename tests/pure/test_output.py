"""The agent's output thread, with made-up ranks: whoever reads it, or does not, and whatever comes in between."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pty
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from guozhuang.launch import guard, node_run, torchrun
from guozhuang.launch.console import copies, output
from guozhuang.launch.console.lines import Lines
from guozhuang.launch.console.output import Output
from guozhuang.launch.console.screen import Screen
from guozhuang.launch.console.streams import LastOutput, NamedPipe, OwnTerminal, Stream
from guozhuang.launch.console.target import Target
from guozhuang.launch.options import plan as options
from guozhuang.launch.options.arguments import read
from guozhuang.launch.request import Request
from guozhuang.launch.signals import SignalledError
from tests.ranks import free_port
from tests.waiting import EXPIRES_S, LIMIT_S, until


class Reader:
    """Reads the agent's standard output and standard error, which are one pipe, when it is asked to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def fill(self) -> None:
        os.set_blocking(self.writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writing, b"x" * 65536)
        os.set_blocking(self.writing, True)

    def read(self, until: bytes, limit_s: float = LIMIT_S) -> bytes:
        data = b""
        deadline = time.monotonic() + limit_s
        while until not in data and time.monotonic() < deadline:
            if select.select([self.reading], [], [], 0.1)[0]:
                data += os.read(self.reading, 65536)
        return data.lstrip(b"x")


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    found = Reader()
    monkeypatch.setattr(output, "Target", lambda descriptor, *how, **more: Target(found.writing, *how, **more))
    monkeypatch.setattr(output, "is_same", lambda one, other: True)
    yield found
    for end in (found.reading, found.writing):
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.fixture(autouse=True)
def what_comes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit for what ranks have printed is reached because the machine is slow."""
    monkeypatch.setattr(output, "_CATCH_UP_S", LIMIT_S)
    monkeypatch.setattr(output, "_DRAIN_S", LIMIT_S)


def is_in(function: Callable[..., object], thread: threading.Thread) -> bool:
    """Whether a thread is inside a function."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def interrupted_once(comes: Callable[[], bool]) -> Iterator[None]:
    """The main thread is interrupted, as by Ctrl-C, as soon as ``comes()``."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def kill() -> None:
        until(comes)
        os.kill(os.getpid(), signal.SIGALRM)

    handler = signal.signal(signal.SIGALRM, interrupt)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        killer.join()
        signal.signal(signal.SIGALRM, handler)


def write(path: str, data: bytes) -> None:
    with open(path, "wb", buffering=0) as pipe:
        pipe.write(data)


def pipes_of_two(out: Output, folder: Path) -> list[str]:
    """The pipes into which ranks 0 and 1 print."""
    for rank in range(2):
        (folder / str(rank)).mkdir()
    return [out.pipes(rank, str(folder / str(rank))).stdout for rank in range(2)]


def test_what_the_launcher_says_stands_above_a_bar(reader: Reader, tmp_path: Path) -> None:
    out = Output(terminals=((True, False), (True, False)))
    out.begin([0])
    write(out.pipes(0, str(tmp_path)).stdout, b"\r 50%")
    assert reader.read(b"50%") == b"\r[0]  50%"
    out.say("rank 1 failed\nand more")
    assert reader.read(b" 50%") == b"\r\x1b[Jguozhuang run: rank 1 failed\nand more\n[0]  50%"
    out.close(LIMIT_S)


def test_after_the_end_the_launcher_speaks_directly(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.close(LIMIT_S)
    out.say("so it ended")
    assert capsys.readouterr().err == "guozhuang run: so it ended\n"


def test_all_that_a_rank_wrote_is_caught_up(tmp_path: Path) -> None:
    """A pipe or a terminal gives some thousand bytes a read."""
    out = Output()
    out.begin([1])
    stream = Stream(NamedPipe(str(tmp_path / "pipe")), 1, out.traces[1], None, False)
    stream.read = _small_reads(stream)  # type: ignore[method-assign]
    out._streams.append(stream)
    write(str(tmp_path / "pipe"), b"".join(b"line %d\n" % number for number in range(300)))
    out.catch_up()
    assert [line for _, line in out.traces[1].lines][-1] == "line 299"
    out.close(LIMIT_S)


def _small_reads(stream: Stream) -> Callable[[], bool]:
    real, read = os.read, stream.read

    def small() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "read", lambda descriptor, size: real(descriptor, min(size, 100)))
            return read()

    return small


def test_a_reader_that_takes_nothing_stops_no_agent(reader: Reader, tmp_path: Path) -> None:
    """It must tell the other nodes of a failure, begin anew, and be ended, all the same; nothing is lost."""
    out = Output()
    reader.fill()
    out.begin([0, 1])
    for place in pipes_of_two(out, tmp_path):
        write(place, b"first\n" * 5000 + b"last\n")
    until(lambda: is_in(Output._wait_for_room, out._thread))  # the thread stands before the full pipe
    out.catch_up()
    assert [trace.lines[-1][1] for trace in out.traces.values()] == ["last", "last"]
    out.say("all ranks are started anew")
    out.begin([0])
    shown = reader.read(b"anew\n")
    assert shown.count(b"[0] first\n") == shown.count(b"[1] first\n") == 5000
    assert shown.count(b"last\n") == 2 and shown.endswith(b"guozhuang run: all ranks are started anew\n")
    out.close(LIMIT_S)


def test_who_was_interrupted_while_closing_does_not_wait_again(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_CATCH_UP_S", EXPIRES_S)
    out = Output()
    out.begin([0])
    reader.fill()
    write(out.pipes(0, str(tmp_path)).stdout, b"hello\n")
    with interrupted_once(lambda: out._ending):
        out.close()
    out.close()
    assert reader.read(b"hello\n").endswith(b"[0] hello\n")
    out._thread.join(LIMIT_S)


def test_a_signal_ends_an_elastic_run_whose_output_nobody_takes(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (guard.VARIABLE, torchrun._NOT_SHARED):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(node_run, "_OUTPUT_S", EXPIRES_S)
    words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", __file__]
    run = torchrun.TorchElasticRun(options.plan(read(words), {}), Request())

    def kill() -> None:
        until(lambda: run._output._ending)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=kill)

    def succeed(*_: object) -> None:
        run._output.say("all is well")
        killer.start()

    monkeypatch.setattr(torchrun, "elastic_launch", lambda *_: succeed)
    reader.fill()

    def too_late(*_: object) -> None:
        raise AssertionError("the signal came when the run handled none any more")

    before = signal.signal(signal.SIGTERM, too_late)
    try:
        with contextlib.closing(run), pytest.raises(SignalledError, match="SIGTERM"):
            run.run()
    finally:
        killer.join()
        signal.signal(signal.SIGTERM, before)
    assert reader.read(b"well\n").endswith(b"guozhuang run: all is well\n")
    run._output._thread.join(LIMIT_S)


def test_an_interrupted_restart_loses_nothing(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while what is left of an attempt is taken in: the thread does the rest."""
    out = Output()
    out.begin([0, 1])
    places = pipes_of_two(out, tmp_path)
    finish = Stream.finish

    def interrupted(stream: Stream) -> None:
        monkeypatch.setattr(Stream, "finish", finish)
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "finish", interrupted)
    with out._lock:  # the thread does not come to it
        for place in places:
            write(place, b"un")
        with pytest.raises(KeyboardInterrupt):
            out._drain()
        for place in places:
            write(place, b"finished")
    out.close(LIMIT_S)
    assert sorted(reader.read(b"[1] unfinished\n").splitlines()) == [b"[0] unfinished", b"[1] unfinished"]
    assert not out._thread.is_alive()


def test_a_mistake_with_one_rank_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bytes] = []
    stream = Stream(NamedPipe(str(tmp_path / "pipe")), 1, LastOutput(), Screen(shown.append, False), False)
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "feed", lambda lines, data: 1 // 0)
        write(stream._way.path, b"one\n")
        assert stream.read() and stream._shown is None
    write(stream._way.path, b"two\n")
    assert stream.read() and not stream.read()
    stream.finish()
    assert b"".join(shown).count(b"ZeroDivisionError") == 1
    assert [line for _, line in stream._trace.lines] == ["two"], "it is still kept for the report"


def test_a_screen_that_fails_ends_no_thread(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails, the pipes of the ranks must be emptied: a rank would wait for room without limit."""
    out = Output()
    out.begin([0, 1])
    places = pipes_of_two(out, tmp_path)
    for name in ("lines", "live", "end"):
        monkeypatch.setattr(Screen, name, lambda *_: 1 // 0)
    for place in places:
        write(place, b"one\n")
        write(place, b"two\n" * (1 << 18))  # more than a pipe holds
    out.close(LIMIT_S)
    assert not out._thread.is_alive()
    assert all(list(trace.lines)[-1][1] == "two" for trace in out.traces.values()), "they are kept for the report"


def test_a_signal_is_no_mistake_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread reads what ranks have left, too: a signal must end the run, and not what is shown of a rank."""

    def signalled(lines: Lines, data: bytes) -> list[bytes]:
        raise SignalledError(signal.SIGTERM)

    stream = Stream(NamedPipe(str(tmp_path / "pipe")), 1, LastOutput(), Screen(lambda data: None, False), False)
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "feed", signalled)
        write(stream._way.path, b"one\n")
        with pytest.raises(SignalledError):
            stream.read()
    assert stream._shown is not None
    stream.finish()


def test_a_terminal_that_has_gone_is_not_asked_for_its_size() -> None:
    master, real = pty.openpty()
    stream = Stream(OwnTerminal(real, 4), 0, LastOutput(), None, False)
    os.close(master)
    stream.resize()
    stream.finish()
    os.close(real)


def test_a_disk_that_does_not_answer_holds_no_rank_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A named pipe that nobody reads stands for the file: a write to it does not return."""
    monkeypatch.setattr(copies, "_MAX_WAITING_BYTES", 1 << 20)
    os.mkfifo(tmp_path / "log")
    disk = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    out, written = Output(), b"line\n" * (1 << 19)
    out.begin([1])
    place = out.pipes(1, str(tmp_path), shown=False, log=str(tmp_path / "log")).stdout
    write(place, written)  # returns when all but the last bytes were read: more than the disk and the queue take
    out.catch_up()
    taken = b""

    def took(text: bytes) -> bool:
        nonlocal taken
        with contextlib.suppress(BlockingIOError):
            taken += os.read(disk, 1 << 20)
        return text in taken

    until(lambda: took(b"") and out._copies._num_waiting_bytes == 0)
    write(place, b"again\n")
    until(lambda: took(b"again\n"))
    out.close(LIMIT_S)
    os.close(disk)
    before, _, after = taken.partition(b"\n--- ")
    assert len(before) > 1 << 19 and written.startswith(before)
    assert after == b"%d bytes were lost here: the disk was full or slow\nagain\n" % (len(written) - len(before))
    said = capfd.readouterr().err
    assert said.count("the disk takes it too slowly; the rank goes on") == said.count("\n") == 1


def test_what_the_disk_never_took_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "log")
    disk = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    found = copies.Copies()
    copies.Copy(found, str(tmp_path / "log")).write(b"x" * (1 << 18))
    found.close(0.2)
    said = [""]

    def is_said() -> bool:
        said[0] += capfd.readouterr().err
        return f"the last {1 << 18} bytes that ranks printed are not written" in said[0]

    until(is_said)  # it is printed by a thread of its own, since the terminal may take nothing either
    os.close(disk)


def test_a_copy_says_what_was_dropped_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_MAX_WAITING_BYTES", 10)
    found, go = copies.Copies(), threading.Event()
    copy = copies.Copy(found, str(tmp_path / "log"))
    found.submit(go.wait)  # type: ignore[arg-type]
    for text in (b"first\n", b"dropped\n"):
        copy.write(text)
    copy.close()
    go.set()
    found.close(None)
    assert (tmp_path / "log").read_bytes() == b"first\n\n--- 8 bytes were lost here: the disk was full or slow\n"


def test_a_copy_is_begun_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real, fails = io.FileIO, [OSError(errno.ENOSPC, "No space left on device")] * 3

    def opened(path: str, mode: str) -> io.FileIO:
        if fails:
            raise fails.pop()
        return real(path, mode)

    monkeypatch.setattr(copies, "io", SimpleNamespace(FileIO=opened))
    found = copies.Copies()
    copy = copies.Copy(found, str(tmp_path / "log"), "--- a title\n")
    for text in (b"one\n", b"two\n", b"three\n"):
        copy.write(text)
    copy.close()
    found.close(None)
    lost = b"\n--- 8 bytes were lost here: the disk was full or slow\n"
    assert (tmp_path / "log").read_bytes() == lost + b"three\n"
    assert capfd.readouterr().err.count("No space left on device; the rank goes on") == 1


def test_the_end_of_the_output_waits_for_the_disk(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_CATCH_UP_S", 0.01)
    out = Output()
    main = threading.main_thread()
    out._copies.submit(lambda: until(lambda: is_in(copies.Copies.close, main)), 5)  # type: ignore[arg-type]
    assert out.end(LIMIT_S)
    out.close(None)
    assert out._copies._num_waiting_bytes == 0 and not capfd.readouterr().err
    out, go = Output(), threading.Event()
    out._copies.submit(go.wait, 5)  # type: ignore[arg-type]
    with interrupted_once(lambda: is_in(copies.Copies.close, main)):
        out.close()
    out.close(0.01)
    assert "the last 5 bytes that ranks printed are not written" in capfd.readouterr().err
    go.set()
    out._copies.close(None)
    waiting = copies.Copies()
    go.clear()
    waiting.submit(go.wait)  # type: ignore[arg-type]
    waiting.close(0.01)
    go.set()
    assert not capfd.readouterr().err, "no byte is lost"


IMPORTING = b"""\
Traceback (most recent call last):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 151, in <module>
    from torchcomms._comms import _BackendWrapper
ModuleNotFoundError: No module named 'torchcomms'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import torch
  File "/site-packages/torch/__init__.py", line 2150, in <module>
    from torch import _VF as _VF, functional as functional
KeyboardInterrupt
"""
TRAINING = b"""\
Traceback (most recent call last):
  File "/home/me/torch/train.py", line 30, in <module>
    loss.backward()
  File "/site-packages/torch/_tensor.py", line 625, in backward
    torch.autograd.backward(
KeyboardInterrupt
"""


def test_ctrl_c_shows_no_traceback_of_an_import_of_torch(reader: Reader, tmp_path: Path) -> None:
    out = Output(terminals=((False, False), (False, False)))
    out.begin([0, 1])
    places = pipes_of_two(out, tmp_path)
    write(places[1], b"before\nunfin")
    until(lambda: len(out.traces[1].lines) == 1)
    out.interrupted()
    write(places[0], IMPORTING)
    write(places[1], b"ished\n" + TRAINING + b"end")
    out.close(LIMIT_S)
    shown = [line.removeprefix(b"[1] ") for line in reader.read(b"end\n").splitlines()]
    assert shown == [b"before", b"unfin", b"ished", *TRAINING.splitlines(), b"end"]
    assert [text for _, text in out.traces[0].lines][-1] == "KeyboardInterrupt", "it is kept"


def test_a_process_whose_rank_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = Output(terminals=((False, False), (False, False)), who="horovodrun")

    def is_shown(number: int, line: str) -> bool:
        return any(line == text for _, text in out.traces[number].lines)

    for number in range(2):
        (tmp_path / str(number)).mkdir()
        out.replace(number)
    places = out.pipes(0, str(tmp_path / "0"), copies="", name="a#0")
    unnamed = out.pipes(1, str(tmp_path / "1"), copies="", name="b#0")
    write(places.stdout, b"one\ntw")
    until(lambda: is_shown(0, "one"))
    for rank, line in ((1, b"o\n"), (0, b"three\n")):
        (tmp_path / f"rank.{rank}").mkdir()
        out.rename(0, rank, str(tmp_path / f"rank.{rank}"))
        write(places.stdout, line)
        until(lambda: is_shown(0, "two" if rank else "three"))  # noqa: B023
    write(places.stderr, b"unfinished")
    out.say("something")
    write(unnamed.stdout, b"no rank\n")
    for number in range(2):
        out.finish(number)
    out.finish(0)
    assert [text for _, text in out.traces[0].lines] == ["one", "two", "three", "unfinished"]
    assert out.end(LIMIT_S)
    out.close(LIMIT_S)
    assert (tmp_path / "rank.1" / "stdout").read_text() == "one\ntwo\n"
    assert (tmp_path / "rank.0" / "stdout").read_text() == "three\n"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "unfinished"
    printed = capfd.readouterr()
    assert printed.out == "[a#0] one\n[1] two\n[0] three\n[b#0] no rank\n"
    assert sorted(printed.err.splitlines()) == ["[0] unfinished", "horovodrun: something"]
