"""The rank processes of one node: each is started in its own session, watched by pidfd, and killed at the end of the run.

See [Note: no orphans] in guard.py, and [Note: warm parent] in warm.py for ranks that are restarted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from guozhuang.launch import guard, warm
from guozhuang.launch.warm import ForkedRank, NotWarmError, WarmParent
from guozhuang.watch.processes import pidfd_open, start_of, status

ENTRY = str(Path(__file__).with_name("rank.py"))
_log = logging.getLogger("guozhuang")
# Seconds that ranks run before the warm parent starts, whose imports would slow them down; short runs need no warm parent.
WARM_AFTER_S = 5.0
_POLL_S = 0.05  # seconds between two checks whether a rank has ended, where the kernel has no pidfd


def entry() -> list[str]:
    """Return the words to put before a rank's command, so that the kernel kills the rank with this process; see rank.py."""
    return [sys.executable, "-I", "-S", ENTRY, str(os.getpid())]


def state_of(pid: int) -> str:
    """Return the state of a process, a letter of proc(5) ("D": uninterruptible sleep); "" if it is gone."""
    known = status(pid)
    return "" if known is None else known.state


class Crew:
    """The rank processes of one node. The thread that starts them must outlive them; see [Note: no orphans].

    Args:
        folder: the run's temporary folder, which the guard removes if this process is killed.

    Attributes:
        run: the name of the run, which all its processes have in the environment.
        warm: the warm parent, once it is started (``keep_warm``); it may have ended.
    """

    def __init__(self, folder: str) -> None:
        self.run = secrets.token_hex(8)
        self.sessions: dict[int, int] = {}  # process id of each rank or server that was started -> its start time
        self._guard = guard.Guard(self.run, folder)
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
        self._handles: dict[int, int] = {}  # pidfd -> rank
        self.warm: WarmParent | None = warm.inherited
        self._is_of_launchers = False
        self._warm_words: Sequence[str] = ()  # the rank command that ``wait`` starts a warm parent for; empty: none
        self._warm_at = float("inf")
        self._shared: set[tuple[str, str]] | None = None  # environment variables that were equal in all ranks so far

    def start(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], stdout: str = "", stderr: str = ""
    ) -> int:
        """Start the process of a rank, as a fork of the warm parent if possible; return the process id.

        Args:
            rank: its number in the world.
            command: the program and its arguments, after the words of ``entry``.
            environ: its complete environment, except the name of the run.
            stdout, stderr: paths of files or pipes to append to, which may be the same; empty: the rank inherits the stream
                of this process.
        """
        environ = {**environ, guard.VARIABLE: self.run}
        self._shared = set(environ.items()) if self._shared is None else self._shared & environ.items()
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(stdout, "ab")) if stdout else None
            err = out if stdout == stderr else stack.enter_context(open(stderr, "ab")) if stderr else None
            files = [0, out.fileno() if out else 1, err.fileno() if err else 2]
            process: subprocess.Popen[bytes] | ForkedRank | None = self._fork(rank, command, environ, files)
            if process is None:
                process = subprocess.Popen(command, env=environ, stdout=out, stderr=err, start_new_session=True)
        self._processes[rank] = process
        self.know([process.pid])
        with contextlib.suppress(AttributeError, OSError):
            self._handles[pidfd_open(process.pid)] = rank
        return process.pid

    def keep_warm(self, words: Sequence[str]) -> None:
        """Have ``wait`` start a warm parent in ``WARM_AFTER_S`` seconds; it forks later ranks where that is possible.

        Args:
            words: the command of a rank, without the words of ``entry``.
        """
        if self.warm is None and not self._warm_words:
            self._warm_words, self._warm_at = words, time.monotonic() + WARM_AFTER_S

    def warm_up(self, words: Sequence[str], environ: Mapping[str, str], modules: Sequence[str], limit_s: float) -> None:
        """Start a warm parent that forks launchers, whose ranks are forks too, and wait until it is ready.

        Args:
            words: the command of a launcher, without the words of ``entry``.
            environ: the environment of launchers and their ranks, as far as it is known.
            modules: further modules to import.
            limit_s: how long to wait; if the warm parent is not ready by then, launchers are started by ``exec``.
        """
        self._is_of_launchers = True
        self._start_warm_parent(words, {**environ, guard.VARIABLE: self.run}, modules, limit_s)

    def _start_warm_parent(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        modules: Sequence[str] = (),
        limit_s: float | None = None,
    ) -> None:
        try:
            self.warm = WarmParent.start(words, environ, modules)
            if limit_s is not None:
                self.warm.wait(limit_s)
        except (NotWarmError, OSError) as error:
            _log.debug("there is no warm parent: %s", error)

    def _fork(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], files: Sequence[int]
    ) -> ForkedRank | None:
        """Fork a rank from the warm parent; return None if the rank must be started by ``exec``."""
        if self.warm is None:
            return None
        ours = entry()
        try:
            if list(command[: len(ours)]) != ours:
                raise NotWarmError("another program is put before its command")
            forked = self.warm.fork(command[len(ours) :], environ, files, self._is_of_launchers)
        except NotWarmError as error:
            _log.debug("rank %d is not forked from the warm parent: %s", rank, error)
            return None
        _log.debug("rank %d is forked from the warm parent", rank)
        return forked

    def know(self, pids: Sequence[int]) -> None:
        """Add further processes to the run, such as its parameter servers, so that the end of the run kills them."""
        self.sessions |= {pid: start_of(pid) for pid in pids}
        self._guard.know(pids)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank whose end ``wait`` has not yet reported."""
        return self._processes[rank].pid

    def wait(self, limit_s: float) -> dict[int, int]:
        """Wait until a rank ends or the limit passes; return the exit codes of ranks that have ended since the last call."""
        if time.monotonic() >= self._warm_at:
            self._warm_at = float("inf")
            self._start_warm_parent(self._warm_words, dict(self._shared or ()))
        if self._handles:
            select.select(list(self._handles), [], [], limit_s)
        else:
            time.sleep(min(limit_s, _POLL_S) if self._processes else limit_s)
        ended = {}
        for rank, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                ended[rank] = code
                del self._processes[rank]
                for handle in [handle for handle, each in self._handles.items() if each == rank]:
                    del self._handles[handle]
                    os.close(handle)
        return ended

    def send(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal that ends processes to the process groups of these ranks, and so to children that stayed in them.

        A process that is stopped (SIGSTOP, a debugger) is continued, because only then it handles the signal.
        """
        for rank in ranks:
            if rank in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._processes[rank].pid, number)
                    os.killpg(self._processes[rank].pid, signal.SIGCONT)

    def held(self) -> list[int]:
        """Return the ranks that are in uninterruptible sleep (state D) now."""
        return [rank for rank, process in self._processes.items() if state_of(process.pid) == "D"]

    def end_all(self, grace_s: float) -> None:
        """End the remaining processes of the run by SIGTERM, and after ``grace_s`` seconds by SIGKILL; 0: SIGKILL at once.

        The warm parent stays, for the next attempt.
        """
        guard.end_all(self.run, self.sessions, grace_s, [] if self.warm is None else [self.warm.pid])

    def end_left(self, pid: int) -> None:
        """Kill the processes that an ended rank has left in its session."""
        guard.end_all("", {pid: self.sessions.pop(pid)}, 0.0)

    def close(self) -> None:
        """Kill the remaining processes of the run and its warm parent, and end the guard."""
        if self.warm is not None:
            self.warm.close()
            self.warm = None
        self.end_all(0.0)
        self.wait(0.0)
        for handle in self._handles:
            os.close(handle)
        self._handles, self._processes = {}, {}
        self._guard.close()
