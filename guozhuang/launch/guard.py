"""Find and kill the processes of a run, so that none is left on the node when the run ends.

[Note: no orphans] The ranks of an agent must end with it, even when it is killed with SIGKILL and cannot stop them.
1. Each rank asks the kernel for SIGKILL at the death of its parent (rank.py). The agent's main thread starts the ranks and
   is the last of its threads to end, so the parent that the kernel watches is the agent itself. If the agent dies between
   the fork and that request, the kernel sends nothing; so the rank checks its parent after the request.
2. That request covers the ranks only, because it is not inherited through fork: data-loader workers and programs that a
   script started would keep running. A guard process, which is no child of the agent and has another session, waits for the
   agent's end. Then it kills every process that has the run's variable in its environment or is in the session of a rank
   (each rank has its own session). The kernel does not reuse the number of a session while a process of it lives; if the
   session's leader started later than the rank we recorded, the number was reused and the process is not ours.
3. At every ordinary end, and before a restart, the agent kills the same processes itself.
The guard is run as a file by an interpreter without site packages, and imports one file of the package: ``watch.processes``.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

# When this file is run as a program, load ``watch.processes`` alone; the import below would load all packages that contain it.
if not __package__:
    import types

    _name, _path = "guozhuang.watch.processes", os.path.join(os.path.dirname(__file__), "../watch/processes.py")
    sys.modules[_name] = _found = types.ModuleType(_name)
    with open(_path, "rb") as _file:
        exec(_file.read(), _found.__dict__)

from guozhuang.watch.processes import all_pids, environment, pidfd_open, start_of, status

# Environment variable that holds the name of the run in every process of it.
VARIABLE = "GUOZHUANG_RUN"
# Environment variable of guards, in place of ``VARIABLE``; a supervisor that kills all processes spares guards for a second.
OF_GUARDS = "GUOZHUANG_GUARD"
_LIMIT_S = 5.0  # seconds to wait after SIGKILL; then a process in uninterruptible sleep (state D) is left behind


def belonging(run: str, sessions: Mapping[int, int], spared: Collection[int] = ()) -> list[int]:
    """Return the ids of the living processes of a run, without the caller.

    Args:
        run: the run's name, as in ``VARIABLE``; empty: only sessions are looked at.
        sessions: the process id of each rank (also the id of its session), mapped to its start time (``start_of``).
        spared: process ids that are left out.
    """
    mark, found = f"{VARIABLE}={run}".encode(), []
    for pid in all_pids():
        if pid == os.getpid() or pid in spared or (known := status(pid)) is None or known.state in "ZX":
            continue
        if _is_of_session(known.session, sessions) or (run and mark in environment(pid)):
            found.append(pid)
    return found


def end_all(run: str, sessions: Mapping[int, int], grace_s: float, spared: Collection[int] = ()) -> list[int]:
    """End every process of a run; return the ids of the processes that were alive at the call.

    Args:
        run, sessions, spared: see ``belonging``.
        grace_s: seconds between SIGTERM and SIGKILL; 0: SIGKILL at once.
    """
    there = belonging(run, sessions, spared)
    left, begin = there, time.monotonic()
    signalled: set[int] = set()
    while left and time.monotonic() < begin + grace_s + _LIMIT_S:
        number = signal.SIGTERM if time.monotonic() < begin + grace_s else signal.SIGKILL
        for pid in left:
            if number == signal.SIGKILL or pid not in signalled:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.01)
        left = belonging(run, sessions, spared)  # search again: a process may have started children
    return there


def _is_of_session(session: int, sessions: Mapping[int, int]) -> bool:
    if session not in sessions:
        return False
    leader = start_of(session)
    return leader == 0 or leader == sessions[session]


class Guard:
    """The agent's handle of its guard, a process that kills the other processes of the run when the agent is gone.

    Args:
        run: the run's name.
        folder: the agent's temporary folder, which the guard removes where the agent could not.
    """

    def __init__(self, run: str, folder: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), run, folder]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", env={**{name: value for name, value in os.environ.items() if name != VARIABLE}, OF_GUARDS: run},
            start_new_session=True,
        )  # fmt: skip

    def know(self, pids: Sequence[int]) -> None:
        """Send the guard the process ids of ranks that were started."""
        if self._process is not None:
            self._process.wait()  # the process that ``__init__`` started only forks the real guard, and exits at once
        self._send("".join(f"{pid} {start_of(pid)}\n" for pid in pids))

    def close(self) -> None:
        """End the guard, because the agent has ended all processes itself."""
        self._send("done\n")
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _send(self, text: str) -> None:
        if self._process is not None and not self._process.stdin.closed:  # type: ignore[union-attr]
            with contextlib.suppress(OSError):  # fails if the guard was killed; ranks still end with the agent
                self._process.stdin.write(text.encode())  # type: ignore[union-attr]
                self._process.stdin.flush()  # type: ignore[union-attr]


def main(arguments: Sequence[str]) -> None:
    """Wait until the agent sends "done" or has ended; if it has ended, kill the remaining processes of its run."""
    agent, run, folder = int(arguments[0]), arguments[1], arguments[2]
    if os.fork():
        os._exit(0)  # only the forked process remains: the guard must be no child of the agent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    received = b""
    try:
        # The pipe may stay open after the agent's end, because a child of the agent may hold it; a pidfd shows the end.
        agent_ended = pidfd_open(agent)
    except OSError:
        agent_ended = -1
    sources = [0, *([agent_ended] if agent_ended >= 0 else [])]
    while True:
        ready, _, _ = select.select(sources, [], [])
        data = os.read(0, 65536) if 0 in ready else b""
        received += data
        if received.endswith(b"done\n"):
            return
        if agent_ended in ready or not data:
            break
    words = [line.split() for line in received.decode().splitlines()]
    end_all(run, {int(pid): int(when) for pid, when in words}, 0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
