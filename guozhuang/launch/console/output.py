"""Read and show the output of a node's ranks in one thread, which also notes when their processes end.

[Note: pipes] Each rank writes into a named pipe in the agent's temporary folder. Torch's own ``--tee`` polls files instead:
that fills a disk over weeks, shows a line a tenth of a second late, and loses the order of lines of different ranks.
Rank 0 gets a pseudo terminal if its output is shown on a terminal (streams.py). No output is lost at the end: bytes stay in
the pipe when their writer ends, even by SIGKILL, and the thread stops only after every process of the run has ended (guard.py)
and each pipe is empty. Both streams of a rank share a pipe if both streams of the agent go to the same place, so their order
is kept.
With ``--log-dir`` what the thread reads is written into a file per rank (copies.py), and not shown: a rank that wrote there by
itself would end by an exception of ``print`` when the disk is full, and wait while the disk does not answer. The files of
torchrun's way of logging, into which ranks do write, are read, to note when a rank begins to print its traceback.

[Note: who was first] A failure spreads over a world in a few milliseconds. So the thread notes when each process ended (its
pidfd becomes readable) and when each line arrived: a rank has failed when it begins to print a traceback, though it may end
much later.

[Note: a reader that takes nothing] A terminal or a pager may take no output for any time, and then the ranks block, as a
single process would. The agent must not block: it has to report to other nodes, and to react to signals. So only this thread
writes, without holding the lock, and other threads queue their output for it. While the thread waits for room it also handles
changes of the terminal's size.
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

from guozhuang.launch.console.copies import Copies, Copy
from guozhuang.launch.console.say import WHO, say
from guozhuang.launch.console.screen import mark
from guozhuang.launch.console.streams import LastOutput, LogFile, NamedPipe, OwnTerminal, Stream
from guozhuang.launch.console.target import Target, is_same
from guozhuang.watch.processes import pidfd_open

_LOOK_S = 0.1  # seconds between two reads of log files
_DRAIN_S = 5.0  # limit in seconds for emptying the pipes at the end, in case a process still writes
_CATCH_UP_S = 1.0
_NAMES = {1: "stdout", 2: "stderr"}
# Variables that pass to rank.py the paths of the terminals that it opens as the rank's stdout and stderr.
_TERMINALS = {1: "GUOZHUANG_STDOUT", 2: "GUOZHUANG_STDERR"}


@dataclass(frozen=True)
class RankPlaces:
    """The paths and variables by which a rank finds the pipes or terminals for its output.

    Attributes:
        stdout, stderr: paths to open; empty: a terminal that ``variables`` name, or else the agent's stream.
        variables: variables for the rank's environment; rank.py reads some of them.
    """

    stdout: str
    stderr: str
    variables: Mapping[str, str]


class Output:
    """The thread that reads and shows the output of ranks, with its state. ``close`` ends the thread.

    Args:
        terminals: for stdout and stderr (whether it is shown on a terminal, whether to colour it), if the reader of the
            descriptors passes the output on; None: as the descriptors themselves are, and NO_COLOR says.
        timestamps: whether to put the time before each line.
        who: the name of the program, before its own messages.
    """

    def __init__(
        self,
        terminals: Sequence[tuple[bool, bool]] | None = None,
        timestamps: bool = False,
        who: str = WHO,
    ) -> None:
        self.traces: dict[int, LastOutput] = {}
        self._timestamps, self._who = timestamps, who
        same = is_same(1, 2)
        (out_ends_on, out_colour), (err_ends_on, err_colour) = terminals or ((None, None), (None, None))
        out = Target(1, out_colour, out_ends_on, self._wait_for_room, is_queued=True)
        err = out if same else Target(2, err_colour, err_ends_on, self._wait_for_room, is_queued=True)
        self._targets = [out, err]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._lock = threading.Lock()  # guards the selector's map, streams and screens; never held while blocking
        self._streams: list[Stream] = []
        # For each process with a ``name`` in place of a rank (see ``pipes``): "stdout" or "stderr" -> its stream.
        self._named: dict[int, dict[str, Stream]] = {}
        self._files: list[tuple[LogFile, LastOutput]] = []
        self._copies = Copies()
        self._handlers: dict[int, Any] = {}  # signal -> the handler that ours replaced, to restore it
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
        """Close the streams of the last attempt, whose processes must have ended, and begin an attempt with these ranks."""
        with self._lock:
            self._drain()
        self._poke()
        self.traces = {rank: LastOutput() for rank in ranks}

    def replace(self, rank: int) -> None:
        """Drop the kept lines of a rank whose process is replaced: they must not explain the end of the new process."""
        self.traces[rank] = LastOutput()

    def pipes(
        self,
        rank: int,
        folder: str,
        shown: bool = True,
        copies: str | None = None,
        name: str = "",
        log: str | None = None,
        title: str = "",
        copy_prefix: str = "",
    ) -> RankPlaces:
        """Open pipes or terminals for the output of a rank; return the paths by which the rank finds them.

        Args:
            rank: its number in the world.
            folder: the folder for the pipes, a different one for each rank and attempt.
            shown: whether to show the output; False: only the last lines are kept.
            copies: a folder where the output is appended to the files stdout and stderr; "": ``rename`` gives it later;
                None: no copies.
            name: shown instead of the rank, until ``rename`` gives another one; ``rank`` is then any number.
            log: a file to which the output of both streams is appended, in the order in which it was printed; None: none.
            title: a line to begin with where ``log`` has something in it already.
            copy_prefix: what the names of the files in ``copies`` begin with.
        """
        paths: dict[int, str] = {}
        variables: dict[str, str] = {}
        for descriptor, target in zip((1, 2), self._targets, strict=True):
            if descriptor == 2 and (log is not None or (target is self._targets[0] and copies is None)):
                paths[2] = paths[1]
                if _TERMINALS[1] in variables:
                    variables[_TERMINALS[2]] = variables[_TERMINALS[1]]
                break
            way: NamedPipe | OwnTerminal | None = None
            if rank == 0 and shown and not self._timestamps and not name:
                way = self._own_terminal(target)
            if isinstance(way, OwnTerminal):
                paths[descriptor], variables[_TERMINALS[descriptor]] = "", way.path
                if way.columns and os.isatty(0) and "COLUMNS" not in os.environ:
                    variables["COLUMNS"] = str(way.columns)
            else:
                way = NamedPipe(os.path.join(folder, _NAMES[descriptor]))
                paths[descriptor] = way.path
            path = os.path.join(copies, copy_prefix + _NAMES[descriptor]) if copies else copies if log is None else log
            copy = None if path is None else Copy(self._copies, path, title)
            screen, colour = target.screen if shown else None, shown and target.colour
            stream = Stream(way, name or rank, self.traces[rank], screen, colour, self._timestamps, copy)
            if name:
                self._named.setdefault(rank, {})[_NAMES[descriptor]] = stream
            with self._lock:
                self._streams.append(stream)
                self._selector.register(stream.source, selectors.EVENT_READ, stream.read)
        return RankPlaces(paths[1], paths[2], variables)

    def rename(self, number: int, rank: int | str, copies: str | None) -> None:
        """Show further output of a process under another rank or name.

        Args:
            number: the ``rank`` that ``pipes`` got, together with a ``name``.
            rank: its rank, or a text.
            copies: the folder that gets its further output, and all output if it had no folder; None: it stays as it is.
        """
        with self._lock:
            for name, stream in self._named.get(number, {}).items():
                stream.rename(rank, copies and os.path.join(copies, name))

    def finish(self, number: int) -> None:
        """Read the remaining output of a process with a ``name``, and close its pipes. All writers to them must have ended."""
        with self._lock:
            for stream in self._named.pop(number, {}).values():
                self._finish(stream, time.monotonic() + _CATCH_UP_S)
        self._poke()

    def _own_terminal(self, target: Target) -> OwnTerminal | None:
        if not os.isatty(target.descriptor):
            return None
        try:
            way = OwnTerminal(target.descriptor, len(mark(0, False)))
        except OSError:
            return None
        if self._signals_before is not None and signal.SIGWINCH not in self._handlers:
            # The handler does nothing: the output thread reads the signal from the wakeup descriptor, see ``_on_wake``.
            self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: None)
            signal.siginterrupt(signal.SIGWINCH, False)
        return way

    def follow(self, rank: int, path: str) -> None:
        """Begin to read a log file that a rank writes directly, and keep its last lines for the report of a failure.

        Args:
            rank: its number in the world.
            path: the file, which is new.
        """
        with self._lock:
            self._files.append((LogFile(path), self.traces[rank]))
        self._poke()

    def catch_up(self) -> None:
        """Read the remaining output of ranks that have ended, without waiting for the reader of our own output."""
        with self._lock:
            deadline = time.monotonic() + _CATCH_UP_S
            for stream in self._streams:
                while stream.read() and time.monotonic() < deadline:
                    pass
            self._look()
        self._poke()

    def say(self, text: str) -> None:
        """Print a message of the launcher on standard error, in lines of its own, above a progress bar if there is one.

        The call does not wait for the reader of our output. After ``close`` it does the same as ``say.say``.
        """
        with self._lock:
            if not self._ending:
                self._targets[1].screen.lines(b"", f"{self._who}: {text}".encode(errors="replace").split(b"\n"))
        if self._ending:
            say(text, self._who, within_s=_CATCH_UP_S)
        self._poke()

    def interrupted(self) -> None:
        """Show no tracebacks of ranks that Ctrl-C finds importing torch; call it before the ranks get SIGINT."""
        with self._lock:
            for stream in self._streams:
                stream.interrupted()
        self._poke()

    def watch(self, pids: Mapping[int, int]) -> None:
        """Watch these processes (rank -> process id), and note when each of them ends, in its trace."""
        for rank, pid in pids.items():
            trace = self.traces.setdefault(rank, LastOutput())
            trace.pid = pid
            try:
                handle = pidfd_open(pid)
            except OSError:
                continue  # a kernel without pidfd: the time at which the agent notices the end is used instead

            def ended(handle: int = handle, trace: LastOutput = trace) -> None:
                trace.ended = time.monotonic()
                self._selector.unregister(handle)
                os.close(handle)

            with self._lock:
                self._selector.register(handle, selectors.EVENT_READ, ended)

    def end(self, limit_s: float | None = None) -> bool:
        """Have the thread show the rest and end; return whether it did within ``limit_s`` seconds. ``close`` must follow."""
        with self._lock:
            self._ending = True
        self._poke()
        # An event and not join(): before Python 3.13 a thread counts as ended once an exception has interrupted join() on it.
        return self._has_ended.wait(limit_s)

    def close(self, limit_s: float | None = None) -> None:
        """Show the remaining output of the pipes, and end the thread. All processes of the run must have ended.

        Args:
            limit_s: how long to wait for the reader of our output, and then for the disk with the copies, in seconds; None:
                for the reader without limit, and for the disk while it takes something (``Copies.close``).
        """
        if self._is_closed:
            return
        copies_s = limit_s
        if self._ending and limit_s is None:
            limit_s = _CATCH_UP_S  # a signal interrupted an earlier call of close: do not wait without limit again
        has_ended = self.end(limit_s)
        if has_ended:
            self._copies.close(copies_s)
        self._is_closed = (
            True  # only now: where a signal interrupts the wait for the disk, the next call goes on with it
        )
        if self._signals_before is not None:  # restore the signal handling that __init__ replaced
            signal.set_wakeup_fd(self._signals_before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if not has_ended:
            return  # leave the thread, which is a daemon, behind: it still waits for the reader of our output
        self._thread.join()
        self._wake.close()
        self._woken.close()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._woken and isinstance(key.fileobj, int):
                with contextlib.suppress(OSError):
                    os.close(key.fileobj)
        self._selector.close()

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: stop the ranks, which have sessions of their own, and this process; resume all together."""
        self._tell_ranks(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        # A signal to this thread stops the process before the call returns. The kernel ignores it in an orphaned process group.
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._pause)
        signal.siginterrupt(signal.SIGTSTP, False)
        self._tell_ranks(signal.SIGCONT)
        self._wake.send(bytes([signal.SIGWINCH]))  # the terminal's size may have changed while the process was stopped

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
                waits = [patience_s / 2 for stream in self._streams if (patience_s := stream.patience_s) is not None]
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
        """Write the queued output. Only the output thread may call this, see [Note: a reader that takes nothing]."""
        while any(target.flush() for target in self._targets):
            pass  # repeat, because output may be queued, and its wakeup consumed, while flush() waits for room

    def _wait_for_room(self, descriptor: int) -> bool:
        """Wait until the descriptor can take output; meanwhile handle changes of the terminal's size. Always return True."""
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
        """Read the remaining output and close the streams. The caller must hold the lock; no process may write any more.

        In the main thread a signal's exception may come at any line; the next call then continues with the rest.
        """
        deadline = time.monotonic() + _DRAIN_S
        while self._streams:
            self._finish(self._streams[0], deadline)
        while self._files:
            file, trace = self._files[0]
            trace.keep(file.finish())
            self._files.pop(0)
        for target in self._targets:
            with contextlib.suppress(Exception):  # the end of the output thread is awaited, so it must not fail
                target.screen.end()

    def _finish(self, stream: Stream, deadline: float) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(stream.source)
        while stream.read() and time.monotonic() < deadline:
            pass
        stream.finish()
        self._streams.remove(stream)

    def _look(self) -> None:
        for file, trace in self._files:
            trace.keep(file.read())

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._woken.recv(64):
                if number == signal.SIGWINCH:
                    for stream in self._streams:
                        stream.resize()
