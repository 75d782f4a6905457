"""The worker processes of one machine: started, read, ended.

[Note: one queue] What happens to workers comes as events into one queue, whoever noticed it: threads that read the pipes and
wait for the processes here, or those that hear from other hosts (``remote_crew``). So who owns the queue decides in one thread.
Processes are started by that thread too, which ends last: the kernel ends them with it (guard.py, "no orphans").
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from guozhuang.compat.horovod.runner.elastic.writing import Room
from guozhuang.launch import rank

_WHO = "horovodrun"
_CANNOT_BE_STARTED = 126  # as a shell says it
# Between SIGTERM and SIGKILL.
GRACE_S = 5.0
# For a pipe that a process of the worker's still holds after its end.
_DRAIN_S = 1.0
_JOIN_S = 5.0
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Started:
    """A worker has a process."""

    worker: int
    pid: int


@dataclass(frozen=True)
class Printed:
    """A worker wrote to "stdout" or "stderr"."""

    worker: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Ended:
    """The process of a worker has ended, and all it wrote has come; ``code`` as of ``subprocess``."""

    worker: int
    code: int


@dataclass(frozen=True)
class Reached:
    """Another host is ready; it came by this address of the driver's host."""

    host: str
    address: str


@dataclass(frozen=True)
class Lost:
    """Another host could not be reached, or is gone with all its workers."""

    host: str
    why: str


@dataclass(frozen=True)
class Said:
    """Another host says something of its own."""

    host: str
    text: str


Event = Started | Printed | Ended | Reached | Lost | Said


class LocalWorkers:
    """Workers on this machine.

    Args:
        events: where all that happens goes.
        room: for what they print; whoever takes it from ``events`` gives it back.
    """

    def __init__(self, events: queue.Queue[Event], room: Room) -> None:
        self._events, self._room = events, room
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._kill_at: dict[int, float] = {}

    def start(self, worker: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a worker; to be called by the thread that lives as long as it shall.

        Args:
            worker: its number.
            command: the program and its arguments; one that cannot be started ends with 126 or 127, saying so.
            environ: all of its environment.
        """
        stub = [sys.executable, "-I", "-S", str(rank.__file__), str(os.getpid()), ""]
        try:
            process = subprocess.Popen(
                [*stub, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=dict(environ), start_new_session=True,
            )  # fmt: skip
        except (
            OSError,
            ValueError,
        ) as error:  # no memory, no processes, arguments that are too long or hold a zero byte
            said = f"{_WHO}: {command[0]} cannot be started: {error}\n".encode(errors="replace")
            self._room.take(len(said))
            self._events.put(Printed(worker, "stderr", said))
            self._events.put(Ended(worker, _CANNOT_BE_STARTED))
            return
        self._processes[worker] = process
        self._events.put(Started(worker, process.pid))
        assert process.stdout is not None and process.stderr is not None
        readers = [
            self._thread(self._read, worker, name, stream)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        self._threads.append(self._thread(self._wait, worker, process, readers))

    def end(self, worker: int, grace_s: float = GRACE_S) -> None:
        """Ask a worker to end, and kill it after the grace; 0: at once."""
        process = self._processes.get(worker)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        self._kill_at[worker] = time.monotonic() + grace_s

    def look(self) -> None:
        """Kill whose grace is over, and forget who has ended; to be called now and then."""
        for worker, at in list(self._kill_at.items()):
            if time.monotonic() >= at:
                del self._kill_at[worker]
                if worker in self._processes:
                    with contextlib.suppress(ProcessLookupError):
                        self._processes[worker].kill()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._processes = {number: each for number, each in self._processes.items() if each.returncode is None}

    def close(self) -> None:
        """Kill what is left, and wait for the threads. Nobody need take what they still print."""
        self._room.close()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    @staticmethod
    def _thread(do: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=do, args=arguments, name="horovod worker", daemon=True)  # type: ignore[arg-type]
        thread.start()
        return thread

    def _read(self, worker: int, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _CHUNK_BYTES):
                self._room.take(len(data))
                self._events.put(Printed(worker, name, data))
                self._room.wait()

    def _wait(self, worker: int, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        # Not reaped yet, so that its number, which is its session's too, is nobody else's: what it left behind goes with it.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        deadline = time.monotonic() + _DRAIN_S
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0.0))
        self._events.put(Ended(worker, code))
