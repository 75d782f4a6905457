"""Starts, signals and awaits the elastic workers of one machine by ``launch.crew``; for the driver and for ``remote_host``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from guozhuang.compat.horovod.common.elastic_variables import Driver
from guozhuang.compat.horovod.common.extension import ELASTIC, EXTENSION, OF_A_PROCESS
from guozhuang.launch.crew import Crew, entry
from guozhuang.launch.job import Job, Send
from guozhuang.launch.rendezvous.fixed import Attempt, NodeShare
from guozhuang.launch.request import environment_of_launchers
from guozhuang.world import machine

CANNOT_BE_STARTED = 126  # exit code of a worker whose program cannot be started, as shells use it
# Seconds that a worker has to end after SIGTERM, before SIGKILL.
GRACE_S = 5.0
# Variables that workers must not inherit: an outer run may have set them for the driver, and each round sets its own values.
_STALE = frozenset({
    *Attempt(0, 0, [NodeShare(1)], "", 0).environment(0), "GUOZHUANG_LOCAL_RANK", "GUOZHUANG_SECRET", ELASTIC, *OF_A_PROCESS,
})  # fmt: skip
_STALE_BEGINNING = "TORCHELASTIC_"


def environment_of_workers(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of workers: that of this process, without variables that an outer run has set, plus ``more``."""
    own = os.environ.items()
    kept = {name: text for name, text in own if name not in _STALE and not name.startswith(_STALE_BEGINNING)}
    return kept | dict(more)


def variables(driver: Driver, host: str) -> dict[str, str]:
    """Return the environment variables that give one worker its number, its driver and the name of its host.

    Args:
        driver: the worker's number, and the address at which its host reaches the driver's store.
        host: the name of its host, as the user or the discovery script wrote it.
    """
    return {
        ELASTIC: f"{driver.worker}@{driver.host}:{driver.port}",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_ELASTIC_TIMEOUT": str(max(1, round(driver.timeout_s))),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": "1",
    }


class LocalWorkers:
    """The workers on this machine. The thread that starts them must outlive them; see [Note: no orphans] in guard.py.

    Args:
        folder: a temporary folder, which is removed if this process is killed.
        store: the address of the driver's store from here, on loopback.
        timeout_s: how long the driver may be silent before workers give up (--elastic-timeout).
        environment: the variables that all workers get; ``start`` adds those of the single worker.
    """

    def __init__(self, folder: str, store: tuple[str, int], timeout_s: float, environment: Mapping[str, str]) -> None:
        self._store, self._timeout_s, self._environment = store, timeout_s, environment
        self._crew = Crew(folder)
        self._jobs: dict[int, Job] = {}  # by worker number; a ``Job`` decides when to send which signal
        self._pids: dict[int, int] = {}

    def start(self, worker: int, host: str, num_local: int, command: Sequence[str], stdout: str, stderr: str) -> int:
        """Start a worker; return its process id.

        Args:
            worker: its number.
            host: the name of this machine, as the user or the discovery script wrote it.
            num_local: the largest number of workers here, which share the cores.
            command: the program and its arguments.
            stdout, stderr: the paths of the pipes to write to.

        Raises:
            OSError: it cannot be started: no memory, too many processes, arguments too long or with a zero byte.
        """
        num_threads = max(1, machine.usable_cores() // num_local)
        environ = environment_of_launchers(num_threads, EXTENSION.python_path, self._environment)
        environ |= variables(Driver(*self._store, worker, self._timeout_s), host)
        try:
            pid = self._crew.start(worker, [*entry(), *command], environ, stdout, stderr)
        except (OSError, ValueError) as error:
            raise OSError(f"{command[0]} cannot be started: {error}") from error
        self._jobs[worker], self._pids[worker] = Job(0, GRACE_S), pid
        self._jobs[worker].begin([worker])
        return pid

    def end(self, worker: int, at_once: bool = False) -> None:
        """Schedule SIGTERM for a worker, and SIGKILL after ``GRACE_S`` or, if ``at_once``, now; ``wait`` sends them."""
        job = self._jobs.get(worker)
        if job is not None:
            job.stop(time.monotonic())
            if at_once:
                job.interrupt(signal.SIGKILL, time.monotonic())

    def wait(self, limit_s: float) -> dict[int, int]:
        """Send due signals, and wait until a worker ends or the limit passes; return ended workers' exit codes by number.

        Processes that an ended worker left running have been killed then, so that none writes to its pipes any more.
        """
        for job in self._jobs.values():
            for decision in job.turn(time.monotonic()):
                if isinstance(decision, Send):
                    self._crew.send(decision.ranks, decision.number)
        codes = self._crew.wait(limit_s)
        for worker in codes:
            del self._jobs[worker]
            self._crew.end_left(self._pids.pop(worker))
        return codes

    def close(self) -> None:
        """Kill the processes of the run that remain on this machine."""
        self._crew.close()
