"""Nothing of a run is left on its node: find the processes that belong to it, and end them.

[Note: no orphans] The ranks of an agent are to end with it, also when it is killed with SIGKILL and can do nothing.
1. Each rank asked the kernel for SIGKILL at the death of its parent (rank.py). The agent's main thread starts the ranks and
   is the last of its threads to end, so the parent that the kernel watches is the agent itself. Between fork and that
   request the agent can die unnoticed; so the rank looks at its parent after the request.
2. The kernel tells the ranks only, and forgets the request at every fork: data-loader workers and programs that a script
   started would go on. A guard, which is no child of the agent and in no session with it, waits for the agent's end, and
   then kills all that has the run's variable in its environment or belongs to the session of a rank. Each rank has a
   session of its own. The number of a session is not given to a new process while a process of it lives; a
   leader that is younger than the rank we knew is a stranger.
3. At every ordinary end, and before a restart, the agent does the same itself.
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
from collections.abc import Mapping, Sequence

if (
    not __package__
):  # run as a file: an import of names from a module that is loaded does not load the packages around it
    import types

    _name, _path = "guozhuang.watch.processes", os.path.join(os.path.dirname(__file__), "../watch/processes.py")
    sys.modules[_name] = _found = types.ModuleType(_name)
    with open(_path, "rb") as _file:
        exec(_file.read(), _found.__dict__)

from guozhuang.watch.processes import all_pids, environment, pidfd_open, start_of, status

# Every process of a run finds the run's own name in this variable.
VARIABLE = "GUOZHUANG_RUN"
# The guard has this one instead: a supervisor that kills what is left gives it time to do its work.
OF_GUARDS = "GUOZHUANG_GUARD"
_LIMIT_S = 5.0  # for processes that were killed to be gone; one that the kernel holds (state D) is left behind then


def belonging(run: str, sessions: Mapping[int, int]) -> list[int]:
    """The living processes of a run, apart from the caller.

    Args:
        run: the run's name, as in ``VARIABLE``.
        sessions: process id of each rank, which is its session too, to when it began (``start_of``).
    """
    mark, found = f"{VARIABLE}={run}".encode(), []
    for pid in all_pids():
        if pid == os.getpid() or (known := status(pid)) is None or known.state in "ZX":
            continue
        if _is_of_session(known.session, sessions) or mark in environment(pid):
            found.append(pid)
    return found


def end_all(run: str, sessions: Mapping[int, int], grace_s: float) -> list[int]:
    """End every process of a run; return those that were there.

    Args:
        run, sessions: see ``belonging``.
        grace_s: how long they may take after SIGTERM, in seconds, before SIGKILL; 0: SIGKILL at once.
    """
    there = belonging(run, sessions)
    left, begin = there, time.monotonic()
    told: set[int] = set()
    while left and time.monotonic() < begin + grace_s + _LIMIT_S:
        number = signal.SIGTERM if time.monotonic() < begin + grace_s else signal.SIGKILL
        for pid in left:
            if number == signal.SIGKILL or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.01)
        left = belonging(run, sessions)  # again from the start: they may have had children
    return there


def _is_of_session(session: int, sessions: Mapping[int, int]) -> bool:
    if session not in sessions:
        return False
    leader = start_of(session)
    return leader == 0 or leader == sessions[session]


class Guard:
    """The agent's side: a process that ends the run when this one is gone.

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
        """Tell the guard the ranks that were started."""
        if self._process is not None:
            self._process.wait()  # the guard proper is its child, and has long been made
        self._tell("".join(f"{pid} {start_of(pid)}\n" for pid in pids))

    def close(self) -> None:
        """Let the guard go: the agent has ended everything itself."""
        self._tell("done\n")
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _tell(self, text: str) -> None:
        if self._process is not None and not self._process.stdin.closed:  # type: ignore[union-attr]
            with contextlib.suppress(OSError):  # somebody killed the guard: ranks still end with the agent
                self._process.stdin.write(text.encode())  # type: ignore[union-attr]
                self._process.stdin.flush()  # type: ignore[union-attr]


def main(arguments: Sequence[str]) -> None:
    """Wait until the agent says that it is done, or is gone; then end what belongs to it."""
    agent, run, folder = int(arguments[0]), arguments[1], arguments[2]
    if os.fork():
        os._exit(0)  # the one who stays is no child of the agent: nobody takes it for a rank
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    told = b""
    try:
        # A child of the agent may hold our pipe open; its own end is seen here.
        agent_ended = pidfd_open(agent)
    except OSError:
        agent_ended = -1
    sources = [0, *([agent_ended] if agent_ended >= 0 else [])]
    while True:
        ready, _, _ = select.select(sources, [], [])
        data = os.read(0, 65536) if 0 in ready else b""
        told += data
        if told.endswith(b"done\n"):
            return
        if agent_ended in ready or not data:
            break
    words = [line.split() for line in told.decode().splitlines()]
    end_all(run, {int(pid): int(when) for pid, when in words}, 0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
