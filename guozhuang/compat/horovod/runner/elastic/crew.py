"""Start the worker processes of one machine, read their output, and end them.

[Note: one queue] All events of workers go into one queue: from the threads here that read pipes and wait for processes, and
from those that receive messages of other hosts (``remote_crew``). So the thread that reads the queue makes all decisions alone.
It also starts the processes, and is the last thread to end: the kernel kills them when it does (guard.py, "no orphans").
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
_CANNOT_BE_STARTED = 126  # the exit code that shells use for it
# Seconds between SIGTERM and SIGKILL.
GRACE_S = 5.0
# Seconds to read on after a worker's end: a process that it started may still hold its pipes open.
_DRAIN_S = 1.0
_JOIN_S = 5.0
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Started:
    """Event: the process of a worker was started."""

    worker: int
    pid: int


@dataclass(frozen=True)
class Printed:
    """Event: a worker wrote to "stdout" or "stderr"."""

    worker: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Ended:
    """Event: the process of a worker has ended, after its last ``Printed``; ``code`` is the return code of ``subprocess``."""

    worker: int
    code: int


@dataclass(frozen=True)
class Reached:
    """Event: another host is ready; it reached the driver's host by this address."""

    host: str
    address: str


@dataclass(frozen=True)
class Lost:
    """Event: another host could not be reached, or is gone with all its workers."""

    host: str
    why: str


@dataclass(frozen=True)
class Said:
    """Event: ssh or the supervisor of another host printed a line, which no worker wrote."""

    host: str
    text: str


Event = Started | Printed | Ended | Reached | Lost | Said


class LocalWorkers:
    """The workers on this machine.

    Args:
        events: the queue that gets all events of the workers.
        room: counts bytes that were read from workers; the reader of ``events`` calls ``give`` when it has written them.
    """

    def __init__(self, events: queue.Queue[Event], room: Room) -> None:
        self._events, self._room = events, room
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._kill_at: dict[int, float] = {}

    def start(self, worker: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a worker. The calling thread must outlive it: the kernel kills the worker when that thread ends.

        Args:
            worker: its number.
            command: the program and its arguments; if it cannot be started, the worker prints why and ends with 126 or 127.
            environ: its whole environment.
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
        ) as error:  # such as no memory, too many processes, arguments that are too long or hold a zero byte
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
        """Send SIGTERM to a worker, and let ``look`` kill it ``grace_s`` seconds later; with 0 kill it at once."""
        process = self._processes.get(worker)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        self._kill_at[worker] = time.monotonic() + grace_s

    def look(self) -> None:
        """Kill workers whose grace is over, and drop those that have ended. To be called regularly."""
        for worker, at in list(self._kill_at.items()):
            if time.monotonic() >= at:
                del self._kill_at[worker]
                if worker in self._processes:
                    with contextlib.suppress(ProcessLookupError):
                        self._processes[worker].kill()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._processes = {number: each for number, each in self._processes.items() if each.returncode is None}

    def close(self) -> None:
        """Kill the remaining workers, and wait for the threads, which no longer wait for room for the output."""
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
        # WNOWAIT: until it is reaped its id, also the id of its session, cannot be reused; killpg ends what it left running.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        deadline = time.monotonic() + _DRAIN_S
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0.0))
        self._events.put(Ended(worker, code))
