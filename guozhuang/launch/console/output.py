"""What the ranks of a node print, and when each of them ends: one thread that reads their pipes and watches their processes.

[Note: pipes] Each rank writes into a named pipe of the agent's temporary folder. Files that are followed by polling, as
torch's own ``--tee`` does, fill a disk over weeks, show a line a tenth of a second late, and lose their order between ranks.
Rank 0 gets a pseudo terminal where it is shown on one (streams.py). Nothing that was printed is lost at the end: what a process
wrote stays in the pipe when it ends, also by SIGKILL; the thread stops only after every process of the run has ended (guard.py)
and each pipe has been read until it was empty. Both streams of a rank share a pipe where both of the agent's go to the same
place, so their order is kept.
With ``--log-dir`` a rank writes into its file by itself (rank.py), which then needs nobody to be whole. The thread reads it
too, so that it knows when a rank began to print its traceback.

[Note: who was first] A failure spreads over a world in a few milliseconds. So the thread notes when each process ended (a
pidfd becomes readable) and when each line came: a rank that begins to print a traceback has failed, though it may take long
to end.

[Note: a reader that takes nothing] A terminal or a pager may take nothing for as long as it likes, and then the ranks wait, as
a single process would. The agent must not: it has other nodes to tell, and may itself be told to end. So only the thread ever
writes, and it does so without the lock; what others have drawn waits until it comes to that. While it waits for room it looks
after signals.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from guozhuang.launch.console.log_files import LogFile
from guozhuang.launch.console.say import WHO, say
from guozhuang.launch.console.screen import mark
from guozhuang.launch.console.streams import NamedPipe, OwnTerminal, Stream, Trace
from guozhuang.launch.console.target import Target, is_same
from guozhuang.watch.processes import pidfd_open

_LOOK_S = 0.1  # between looks at log files
_DRAIN_S = 5.0  # for a pipe that somebody still writes to, at the end
_CATCH_UP_S = 1.0
# How a line begins that rank.py writes before what the rank does.
_ANEW = b"--- started anew, attempt "
_NAMES = {1: "stdout", 2: "stderr"}
# For rank.py: the terminals that are to be the rank's streams.
_TERMINALS = {1: "GUOZHUANG_STDOUT", 2: "GUOZHUANG_STDERR"}


@dataclass(frozen=True)
class RankPlaces:
    """Where a rank is to write.

    Attributes:
        stdout, stderr: paths to open; empty: where the agent writes, unless ``variables`` say more.
        variables: for the rank's environment; rank.py reads some of them.
    """

    stdout: str
    stderr: str
    variables: Mapping[str, str]


class Output:
    """The thread and what it knows. ``close`` ends it.

    Args:
        colour: whether marks are coloured; None: on a terminal, unless NO_COLOR is set.
        terminals: for each of the two streams, whether it ends on a terminal and is coloured, where its descriptor leads to
            somebody who passes it on; None: as the descriptors say.
        timestamps: put the time before each line.
    """

    def __init__(
        self,
        colour: bool | None = None,
        terminals: Sequence[tuple[bool, bool]] | None = None,
        timestamps: bool = False,
    ) -> None:
        self.traces: dict[int, Trace] = {}
        self._timestamps = timestamps
        same = is_same(1, 2)
        (out_ends_on, out_colour), (err_ends_on, err_colour) = terminals or ((None, colour), (None, colour))
        out = Target(1, out_colour, out_ends_on, self._wait_for_room, is_queued=True)
        err = out if same else Target(2, err_colour, err_ends_on, self._wait_for_room, is_queued=True)
        self._targets = [out, err]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._lock = threading.Lock()  # for the selector's map, streams and screens; nobody waits while holding it
        self._streams: list[Stream] = []
        self._files: list[tuple[LogFile, Trace]] = []
        self._handlers: dict[int, Any] = {}  # of signals: what was there before ours
        self._ending = self._is_closed = False
        self._has_ended = threading.Event()
        self._signals_before: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._signals_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
                signal.siginterrupt(signal.SIGTSTP, False)
        self._thread = threading.Thread(target=self._run, name="guozhuang output", daemon=True)
        self._thread.start()

    def begin(self, ranks: Sequence[int]) -> None:
        """A new attempt with these ranks begins; all processes of the last one have ended."""
        with self._lock:
            self._drain()
        self._poke()
        self.traces = {rank: Trace() for rank in ranks}

    def replace(self, rank: int) -> None:
        """Another process is this rank from now on; what the last one printed does not explain its end."""
        self.traces[rank] = Trace()

    def pipes(self, rank: int, folder: str, shown: bool = True, copies: str | None = None) -> RankPlaces:
        """Ways for what a rank writes to come here.

        Args:
            rank: its number in the world.
            folder: where the pipes are made; one per rank and attempt.
            shown: pass on what it prints, not only keep the last lines.
            copies: a folder; what it prints is added to the files stdout and stderr there. None: nowhere.
        """
        paths: dict[int, str] = {}
        variables: dict[str, str] = {}
        for descriptor, target in zip((1, 2), self._targets, strict=True):
            if descriptor == 2 and target is self._targets[0] and copies is None:
                paths[2] = paths[1]
                if _TERMINALS[1] in variables:
                    variables[_TERMINALS[2]] = variables[_TERMINALS[1]]
                break
            way: NamedPipe | OwnTerminal | None = None
            if rank == 0 and shown and not self._timestamps:
                way = self._own_terminal(target)
            if isinstance(way, OwnTerminal):
                paths[descriptor], variables[_TERMINALS[descriptor]] = "", way.path
                if way.columns and os.isatty(0) and "COLUMNS" not in os.environ:
                    variables["COLUMNS"] = str(way.columns)
            else:
                way = NamedPipe(os.path.join(folder, _NAMES[descriptor]))
                paths[descriptor] = way.path
            copy = None if copies is None else os.path.join(copies, _NAMES[descriptor])
            screen, colour = target.screen if shown else None, shown and target.colour
            stream = Stream(way, rank, self.traces[rank], screen, colour, self._timestamps, copy)
            with self._lock:
                self._streams.append(stream)
                self._selector.register(stream.source, selectors.EVENT_READ, stream.read)
        return RankPlaces(paths[1], paths[2], variables)

    def _own_terminal(self, target: Target) -> OwnTerminal | None:
        if not os.isatty(target.descriptor):
            return None
        try:
            way = OwnTerminal(target.descriptor, len(mark(0, False)))
        except OSError:
            return None
        if self._signals_before is not None and signal.SIGWINCH not in self._handlers:
            # The handler does nothing; the signal comes to the thread by its number. See ``_on_wake``.
            self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: None)
            signal.siginterrupt(signal.SIGWINCH, False)
        return way

    def follow(self, rank: int, path: str, whole: bool = False) -> None:
        """A rank writes into this file by itself from now on; keep the last lines of it.

        Args:
            rank: its number in the world.
            path: the file.
            whole: what is there already was written by it too.
        """
        with self._lock:
            self._files.append((LogFile(path, skipped=_ANEW, whole=whole), self.traces[rank]))
        self._poke()

    def catch_up(self) -> None:
        """Take in what ranks that have ended have printed. Whoever reads our output is not waited for."""
        with self._lock:
            deadline = time.monotonic() + _CATCH_UP_S
            for stream in self._streams:
                while stream.read() and time.monotonic() < deadline:
                    pass
            self._look()
        self._poke()

    def say(self, text: str) -> None:
        """Say something of the launcher's own on standard error, in lines of its own: above a progress bar, not behind it.

        Whoever reads our output is not waited for. After ``close`` it is as ``say.say``.
        """
        with self._lock:
            if not self._ending:
                self._targets[1].screen.lines(b"", f"{WHO}: {text}".encode(errors="replace").split(b"\n"))
        if self._ending:
            say(text, within_s=_CATCH_UP_S)
        self._poke()

    def watch(self, pids: Mapping[int, int]) -> None:
        """Note when these processes, by rank, end."""
        for rank, pid in pids.items():
            trace = self.traces.setdefault(rank, Trace())
            trace.pid = pid
            try:
                handle = pidfd_open(pid)
            except OSError:
                continue  # the moment at which the agent looks must do

            def ended(handle: int = handle, trace: Trace = trace) -> None:
                trace.ended = time.monotonic()
                self._selector.unregister(handle)
                os.close(handle)

            with self._lock:
                self._selector.register(handle, selectors.EVENT_READ, ended)

    def close(self, limit_s: float | None = None) -> None:
        """Show what is still in the pipes, and end the thread. All processes of the run have ended. Once is enough.

        Args:
            limit_s: how long whoever reads our output may take, in seconds; None: as long as it likes.
        """
        if self._is_closed:
            return
        if self._ending and limit_s is None:
            limit_s = _CATCH_UP_S  # a signal ended the wait of the first time
        with self._lock:
            self._ending = True
        self._poke()
        # Not by join(): until Python 3.13 a thread counts as ended once an exception has come out of that.
        has_ended = self._has_ended.wait(limit_s)
        self._is_closed = True
        if self._signals_before is not None:  # the thread looked after signals until now
            signal.set_wakeup_fd(self._signals_before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if not has_ended:
            return  # it waits for somebody to take what it writes; it is a daemon
        self._thread.join()
        self._wake.close()
        self._woken.close()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._woken and isinstance(key.fileobj, int):
                with contextlib.suppress(OSError):
                    os.close(key.fileobj)
        self._selector.close()

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: stop the ranks too, which are in sessions of their own; go on with them when the shell says so."""
        self._tell_ranks(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        # To this thread: the process stands still before the call returns. Without a shell to go on, the kernel ignores it.
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._pause)
        signal.siginterrupt(signal.SIGTSTP, False)
        self._tell_ranks(signal.SIGCONT)
        self._wake.send(bytes([signal.SIGWINCH]))  # the size of the terminal may have changed

    def _tell_ranks(self, number: int) -> None:
        for trace in list(self.traces.values()):
            if trace.pid and trace.ended is None:
                with contextlib.suppress(OSError):
                    os.killpg(trace.pid, number)

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        try:
            self._do_run()
        finally:
            self._has_ended.set()

    def _do_run(self) -> None:
        while not self._ending:
            with self._lock:
                waits = [stream.patience_s / 2 for stream in self._streams if stream.is_waiting]
                waits += [_LOOK_S] if self._files else []
            for key, _ in self._selector.select(min(waits) if waits else None):
                with self._lock:
                    key.data()
                self._flush()
            if waits:
                with self._lock:
                    for stream in self._streams:
                        stream.show_what_waits()
                    self._look()
                self._flush()
        with self._lock:
            self._drain()
        self._flush()

    def _flush(self) -> None:
        """Write what was drawn; in the thread only. See [Note: a reader that takes nothing]."""
        while any(target.flush() for target in self._targets):
            pass  # while it waited more may have come, and the word of it was taken

    def _wait_for_room(self, descriptor: int) -> bool:
        """Until something can be written there; a change of the terminal's size is heard meanwhile."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = [found for found, _ in poll.poll()]
            if self._woken.fileno() in ready:
                with self._lock:
                    self._on_wake()
            if descriptor in ready:
                return True

    def _drain(self) -> None:
        """Read what is left, by whichever thread, which holds the lock: nobody writes any more.

        In the main thread an exception may come at any place (a signal), and then the rest is for the next time.
        """
        deadline = time.monotonic() + _DRAIN_S
        while self._streams:
            stream = self._streams[0]
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream.source)
            while stream.read() and time.monotonic() < deadline:
                pass
            stream.finish()
            self._streams.remove(stream)
        while self._files:
            file, trace = self._files[0]
            _keep(trace, file.finish())
            self._files.pop(0)
        for target in self._targets:
            target.screen.end()

    def _look(self) -> None:
        for file, trace in self._files:
            _keep(trace, file.read())

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._woken.recv(64):
                if number == signal.SIGWINCH:
                    for stream in self._streams:
                        stream.resize()


def _keep(trace: Trace, lines: Sequence[str]) -> None:
    now = time.monotonic()
    trace.lines.extend((now, line) for line in lines)
