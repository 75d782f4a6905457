"""The rank processes of one node: each is started in its own session, watched by pidfd, and killed at the end of the run.

See [Note: no orphans] in guard.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from guozhuang.launch import guard
from guozhuang.watch.processes import pidfd_open, start_of, status

ENTRY = str(Path(__file__).with_name("rank.py"))
_POLL_S = 0.05  # interval of polling where the kernel has no pidfd


def entry(log_folder: str = "") -> list[str]:
    """Return the words to put before a rank's command, so that the kernel kills the rank with this process; see rank.py."""
    return [sys.executable, "-I", "-S", ENTRY, str(os.getpid()), log_folder]


def state_of(pid: int) -> str:
    """Return the state of a process, a letter of proc(5) ("D": uninterruptible sleep); "" if it is gone."""
    known = status(pid)
    return "" if known is None else known.state


class Crew:
    """The rank processes of one node. The thread that starts them must outlive them; see [Note: no orphans].

    Args:
        run: the name of the run, which all its processes have in the environment.
        folder: the run's temporary folder, which the guard removes if this process is killed.
    """

    def __init__(self, run: str, folder: str) -> None:
        self.run = run
        self.sessions: dict[int, int] = {}  # process id of each rank ever started -> its start time
        self._guard = guard.Guard(run, folder)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._handles: dict[int, int] = {}  # pidfd -> rank

    def start(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], stdout: str = "", stderr: str = ""
    ) -> int:
        """Start a rank; return its process id.

        Args:
            rank: its number in the world.
            command: the program and its arguments, after the words of ``entry``.
            environ: its complete environment.
            stdout, stderr: paths of files or pipes to write to; empty: the rank inherits the stream of this process.
        """
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(open(path, "wb")) if path else None for path in (stdout, stderr))
            process = subprocess.Popen(command, env=dict(environ), stdout=out, stderr=err, start_new_session=True)
        self._processes[rank] = process
        self.know([process.pid])
        with contextlib.suppress(AttributeError, OSError):
            self._handles[pidfd_open(process.pid)] = rank
        return process.pid

    def know(self, pids: Sequence[int]) -> None:
        """Add further processes to the run, such as its parameter servers, so that they are killed with it."""
        self.sessions |= {pid: start_of(pid) for pid in pids}
        self._guard.know(pids)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._processes[rank].pid

    def wait(self, limit_s: float) -> dict[int, int]:
        """Wait until a rank ends or the limit passes; return the exit codes of ranks that have ended since the last call."""
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
        """Send a signal to the process groups of these ranks, so also to child processes that stayed in them."""
        for rank in ranks:
            if rank in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._processes[rank].pid, number)

    def held(self) -> list[int]:
        """Return the ranks that are in uninterruptible sleep now."""
        return [rank for rank, process in self._processes.items() if state_of(process.pid) == "D"]

    def end_all(self, grace_s: float) -> None:
        """End the remaining processes of the run by SIGTERM, and after ``grace_s`` seconds by SIGKILL; 0: SIGKILL at once."""
        guard.end_all(self.run, self.sessions, grace_s)

    def close(self) -> None:
        """Kill the remaining processes of the run, and end the guard."""
        self.end_all(0.0)
        self.wait(0.0)
        for handle in self._handles:
            os.close(handle)
        self._handles, self._processes = {}, {}
        self._guard.close()

    def kill(self) -> None:
        """Kill every process of the run now. Any thread may call it."""
        for pid in guard.belonging(self.run, self.sessions):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
