"""What the ranks of a node print, and when each of them ends: one thread that reads their pipes and watches their processes.

[Note: pipes] Each rank writes into a named pipe of the agent's temporary folder, which torch elastic opens as its log file
would be. Files that are followed by polling, as torch's own ``--tee`` does, fill a disk over weeks, show a line a tenth of a
second late, and lose their order between ranks; a pseudo terminal would have to be one's own per rank. Nothing that was
printed is lost at the end: what a process wrote stays in the pipe when it ends, also by SIGKILL; the thread stops only after
every process of the run has ended (guard.py) and each pipe has been read until it was empty. Both streams of a rank share a
pipe where both of the agent's go to the same place, so their order is kept.
With ``--log-dir`` a rank writes into its file by itself (rank.py), which then needs nobody to be whole.

[Note: who was first] Torch elastic looks ten times a second who has ended and notes the second. A failure spreads over a
world in a few milliseconds. So the thread notes when each process ended (a pidfd becomes readable) and when each line came:
a rank that begins to print a traceback has failed, though it may take long to end.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from guozhuang.launch.screen import Lines, Screen, mark

_KEPT_LINES = 400  # of each rank, for the report of a failure
_READ_BYTES = 65536
# An unfinished line of a rank whose output is shown by lines is shown all the same when it has stood for so long.
_PATIENCE_S = 1.0
# And one of rank 0, whose progress bars are shown as they come: Python writes the parts of a line one by one, and lines of
# other ranks would come between them.
_LIVE_PATIENCE_S = 0.05
_DRAIN_S = 5.0  # for a pipe that somebody still writes to, at the end
_numbers = itertools.count()


@dataclass
class Trace:
    """What was seen of one rank of the current attempt.

    Attributes:
        pid: of its process; 0 until it is known.
        ended: when the process ended, by the monotonic clock in seconds; None while it runs or where it cannot be seen.
        lines: the last lines it printed and when each came; those of a log file have no time (0.0).
    """

    pid: int = 0
    ended: float | None = None
    lines: collections.deque[tuple[float, str]] = field(default_factory=lambda: collections.deque(maxlen=_KEPT_LINES))


class Output:
    """The thread and what it knows. ``close`` ends it.

    Args:
        colour: whether marks are coloured; None: on a terminal, unless NO_COLOR is set.
        on_signal: called in the thread with the number of each signal that the agent gets.
    """

    def __init__(self, colour: bool | None = None, on_signal: Callable[[int], None] = lambda number: None) -> None:
        self.traces: dict[int, Trace] = {}
        self._on_signal = on_signal
        same = _is_same(1, 2)
        out = _Target(1, colour)
        self._targets = [out, out if same else _Target(2, colour)]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._lock = threading.Lock()  # for the selector's map, which both threads change
        self._pipes: list[_Pipe] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._ending = False
        self._signals_before: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._signals_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="guozhuang output", daemon=True)
        self._thread.start()

    def begin(self, ranks: Sequence[int]) -> None:
        """A new attempt with these ranks begins; all processes of the last one have ended."""
        self._drain()
        self.traces = {rank: Trace() for rank in ranks}

    def pipes(self, rank: int, folder: str, shown: bool = True) -> tuple[str, str]:
        """Where a rank is to write: the paths for its standard output and for its errors.

        Args:
            rank: its number in the world.
            folder: where the pipes are made; one per rank and attempt.
            shown: pass on what it prints, not only keep the last lines.
        """
        paths: list[str] = []
        for name, target in zip(("stdout", "stderr"), self._targets, strict=True):
            if paths and target is self._targets[0]:
                return paths[0], paths[0]
            path = os.path.join(folder, name)
            os.mkfifo(path, 0o600)
            pipe = _Pipe(path, rank, target if shown else None, self.traces[rank])
            with self._lock:
                self._pipes.append(pipe)
                self._selector.register(pipe.source, selectors.EVENT_READ, pipe.read)
            paths.append(path)
        return paths[0], paths[1]

    def watch(self, pids: Mapping[int, int]) -> None:
        """Note when these processes, by rank, end."""
        for rank, pid in pids.items():
            trace = self.traces.setdefault(rank, Trace())
            trace.pid = pid
            try:
                handle = os.pidfd_open(pid)
            except (AttributeError, OSError):
                continue  # torch elastic's dates must do

            def ended(handle: int = handle, trace: Trace = trace) -> None:
                trace.ended = time.monotonic()
                self._selector.unregister(handle)
                os.close(handle)

            with self._lock:
                self._selector.register(handle, selectors.EVENT_READ, ended)

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Call something in the thread after so many seconds; to be called in the thread."""
        self._later.append((time.monotonic() + delay_s, what))

    def close(self, limit_s: float | None = None) -> None:
        """Show what is still in the pipes, and end the thread. All processes of the run have ended. Once is enough.

        Args:
            limit_s: how long whoever reads our output may take, in seconds; None: as long as it likes.
        """
        if self._signals_before is not None:
            signal.set_wakeup_fd(self._signals_before)
            self._signals_before = None
        if self._ending:
            return
        self._ending = True
        self._poke()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return  # it stands in a write that nobody takes; it is a daemon
        self._wake.close()
        self._woken.close()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._woken and isinstance(key.fileobj, int):
                with contextlib.suppress(OSError):
                    os.close(key.fileobj)
        self._selector.close()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        while not self._ending:
            with self._lock:
                waits = [pipe.patience_s for pipe in self._pipes if pipe.is_waiting]
            waits += [_PATIENCE_S] if self._later else []
            for key, _ in self._selector.select(min(waits) / 2 if waits else None):
                with self._lock:
                    key.data()
            if waits:
                with self._lock:
                    for pipe in self._pipes:
                        pipe.show_what_waits()
            for timer in [timer for timer in self._later if timer[0] <= time.monotonic()]:
                self._later.remove(timer)
                timer[1]()
        self._drain()

    def _drain(self) -> None:
        """Read what is left, by whichever thread: nobody writes any more."""
        with self._lock:
            deadline = time.monotonic() + _DRAIN_S
            for pipe in self._pipes:
                while pipe.read() and time.monotonic() < deadline:
                    pass
                pipe.finish()
                self._selector.unregister(pipe.source)
                pipe.close()
            self._pipes.clear()
            for target in self._targets:
                target.screen.end()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._woken.recv(64):
                if number:
                    self._on_signal(number)


class _Target:
    """Standard output or standard error of the agent."""

    def __init__(self, descriptor: int, colour: bool | None) -> None:
        self._descriptor = descriptor
        self._is_gone = False
        is_terminal = os.isatty(descriptor)
        if colour is None:
            colour = os.environ.get("FORCE_COLOR", "0") not in ("", "0") or (
                is_terminal and not os.environ.get("NO_COLOR")
            )
        self.colour = colour
        self.screen = Screen(self._write, is_terminal)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_gone:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._descriptor, selectors.EVENT_WRITE)
                    selector.select()
            except OSError as error:
                # Whoever read our output is gone. The ranks go on, and their pipes must not fill up.
                self._is_gone = True
                if self._descriptor == 1:
                    with contextlib.suppress(OSError):
                        text = f"guozhuang run: standard output is closed ({error.strerror}); the ranks go on unseen\n"
                        os.write(2, text.encode())


class _Pipe:
    """What one stream (or both) of a rank comes through."""

    def __init__(self, path: str, rank: int, target: _Target | None, trace: Trace) -> None:
        self.source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # An own end for writing: the pipe is never at its end, only empty, so that waiting for it costs nothing.
        self._own_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._screen = target.screen if target is not None else None
        self._mark = mark(rank, target is not None and target.colour)
        self._is_live = rank == 0
        self._trace, self._lines = trace, Lines()
        self.patience_s = _LIVE_PATIENCE_S if self._is_live else _PATIENCE_S
        self._held = b""  # of a stream that is shown as it comes: the begin of a line, for a moment
        self._since = 0.0  # when what waits came
        self._is_closed = False
        self._number = next(_numbers)

    def read(self) -> bool:
        """Take what is there; False if nothing was."""
        if self._is_closed:
            return False  # the selector saw something before the other thread had read it all
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            return False
        if not self.is_waiting or not self._is_live:
            self._since = time.monotonic()
        self._take(self._lines.feed(data))
        if self._screen is not None and self._is_live:
            whole = (self._held + data).rpartition(b"\n")
            self._held = whole[2]
            if whole[1]:
                self._screen.live(self._number, self._mark, whole[0] + whole[1])
                self._since = time.monotonic()
        return True

    def _take(self, lines: Sequence[bytes]) -> None:
        now = time.monotonic()
        for line in lines:
            self._trace.lines.append((now, line.decode(errors="replace")))
            if self._screen is not None and not self._is_live:
                self._screen.line(self._mark, line)

    @property
    def is_waiting(self) -> bool:
        return bool(self._held) if self._is_live else self._lines.is_waiting()

    def show_what_waits(self) -> None:
        if self.is_waiting and time.monotonic() > self._since + self.patience_s:
            self._show()

    def _show(self) -> None:
        if not self._is_live:
            self._take(self._lines.rest())
        elif self._screen is not None:
            self._screen.live(self._number, self._mark, self._held)
            self._held = b""

    def finish(self) -> None:
        if self._is_live and self._held:
            self._show()
        self._take(self._lines.rest())

    def close(self) -> None:
        self._is_closed = True
        os.close(self.source)
        os.close(self._own_end)


def _is_same(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same terminal, file or pipe."""
    try:
        a, b = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
