"""The driver process of an elastic run: reports events to ``job``, and carries out its decisions. See the package's docstring.

[Note: one thread] One thread makes all decisions, starts the workers (the kernel kills them when it ends; guard.py, "no
orphans"), and talks to other hosts. It never waits for a slow reader of the output: the thread of ``console.output`` does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence

from guozhuang.compat.horovod.common.extension import EXTENSION
from guozhuang.compat.horovod.runner import static_run
from guozhuang.compat.horovod.runner.elastic.board import DriverBoard, HostUpdateResult
from guozhuang.compat.horovod.runner.elastic.crew import (
    CANNOT_BE_STARTED,
    GRACE_S,
    LocalWorkers,
    environment_of_workers,
)
from guozhuang.compat.horovod.runner.elastic.discovery import DiscoveryError, HostDiscovery
from guozhuang.compat.horovod.runner.elastic.job import ElasticJob, Orders, Worker
from guozhuang.compat.horovod.runner.elastic.remote_crew import RemoteWorkers
from guozhuang.compat.horovod.runner.elastic.remote_host import HostSettings
from guozhuang.compat.horovod.runner.elastic.settings import ElasticSettings
from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.output import Output
from guozhuang.launch.failures import exit_code, how
from guozhuang.launch.hosts import ssh
from guozhuang.launch.rank_files import copies_of, open_copies
from guozhuang.launch.signals import ENDING, Signals
from guozhuang.net import interfaces
from guozhuang.net.doors import Doors
from guozhuang.net.store import serve
from guozhuang.watch.processes import node_identity

_WHO = "horovodrun"
_TURN_S, _BEAT_S = 0.05, 1.0
_STORE_S = 300.0  # limit in seconds for each operation of the store
# Seconds to wait for workers to end after ``GRACE_S``, and for other hosts to confirm the end of the run.
_LAST_S, _CLOSE_S = 5.0, 10.0
_LAST_WORDS_S = 1.0  # seconds to wait, after a signal, for the remaining output to be written
_LAST_LINES = 12


def run_elastic(settings: ElasticSettings) -> int:
    """Run workers on a changing set of hosts until the job is done. Blocks; no worker is left when it returns.

    The output of workers is shown on standard output and standard error, as ``[rank] line``; the driver's own messages go to
    standard error. Call it in the main thread if signals are to end the workers in an orderly way.

    Args:
        settings: the program, and the number of workers; ``arguments.check`` has checked the numbers.

    Returns:
        0 if a worker ended with 0 (from then on no worker is replaced) and all have ended; 1 if the job failed, after
        naming the first worker that failed; 128 + its number if a signal ended the driver.

    Raises:
        UsageError: the folder of ``output_filename`` cannot be made, or the discovery script does not work; nothing was started
            then. Or a host is to be reached over ssh, which is not installed on this machine.
    """
    if settings.output_filename is not None:
        try:
            os.makedirs(settings.output_filename, exist_ok=True)
        except OSError as error:
            what = f"--output-filename names a folder that cannot be made: {error.strerror}"
            raise UsageError(explain(what, value=settings.output_filename, fix="give another path")) from error
    discovery = HostDiscovery(settings.host_discovery_script, settings.slots_per_host or 1, settings.hosts or ())
    try:
        discovery.find()
    except DiscoveryError as error:
        fix = "let it print a line for each host, host:slots, and end with 0"
        raise UsageError(explain(str(error), fix=fix)) from error
    # Signals are only recorded until the clean-up is done: a second Ctrl-C must not leave workers behind.
    signals = Signals(ENDING)
    signals.note()
    with signals, contextlib.closing(discovery), contextlib.ExitStack() as ending:
        return ElasticDriver(settings, signals.noted, ending).run(discovery)


class ElasticDriver:
    """Runs one elastic job: starts and ends its workers, announces rounds and shows output, as ``ElasticJob`` decides.

    Args:
        settings: the program, and the number of workers.
        signals: the signals that this process has got; the first one ends the run, another one kills the workers at once.
        ending: gets the calls that end everything that the run has started.
    """

    def __init__(self, settings: ElasticSettings, signals: Sequence[int], ending: contextlib.ExitStack) -> None:
        self._settings, self._signals = settings, signals
        self._job = ElasticJob(settings)
        environment = environment_of_workers(settings.env)
        if settings.network_interfaces:  # every host uses the interface of this name, as in runs of fixed size
            environment |= interfaces.variables_towards("", environment, settings.network_interfaces[0])
        self._environment = environment
        self._most = max(settings.max_np or 0, settings.num_proc, sum(slots for _, slots in settings.hosts or ()))
        listener = socket.create_server((interfaces.LOOPBACK, 0))
        store = (interfaces.LOOPBACK, int(listener.getsockname()[1]))
        self._board = DriverBoard(serve(listener, _STORE_S))
        self._doors = Doors(store[1], settings.network_interfaces)
        self._remote: dict[str, RemoteWorkers] = {}
        # Whether a host is this machine does not depend on the user's --ssh-port, which is meant for remote hosts.
        self._is_here = functools.cache(ssh.is_here)
        self._next_beat = 0.0
        self._begun: set[str] = set()  # the folders of --output-filename that this run has written to
        self._folder = tempfile.mkdtemp(prefix="guozhuang-run-")
        # ``ending`` makes these clean-up calls in reverse order, the last one first, and makes all even if one raises.
        ending.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._workers = LocalWorkers(self._folder, store, settings.elastic_timeout_s, environment)
        self._output = Output(timestamps=settings.prefix_timestamp, who=_WHO)
        for do in (self._show_the_rest, self._doors.close, self._workers.close, self._close_hosts, self._end_workers):
            ending.callback(do)

    def run(self, discovery: HostDiscovery) -> int:
        """Run the job to its end, and return the exit code."""
        while True:
            self._turn(_TURN_S)
            if self._signals:
                self.say(f"got {signal.Signals(self._signals[0]).name}; ending all workers")
                return 128 + self._signals[0]
            now = time.monotonic()
            if text := discovery.turn(now):
                self.say(text)
            self._job.found(discovery.newest)
            orders = self._job.turn(now)
            self._carry_out(orders)
            if orders.over is not None:
                return self._conclude(orders.over)

    def started(self, worker: int, pid: int) -> None:
        """Record that the process of a worker was started."""
        which = self._job.workers[worker]
        which.pid = pid
        if self._settings.verbose:
            self.say(f"started worker {worker} on host {which.slot.host}: process {pid}")

    def ended(self, worker: int, code: int) -> None:
        """Record that the process of a worker has ended."""
        which, trace = self._job.workers[worker], self._output.traces[worker]
        if which.rank is None and trace.lines:
            self._output.rename(worker, self._name(which), self._copies(f"worker.{worker}"))
        self._output.finish(worker)
        shutil.rmtree(os.path.join(self._folder, str(worker)), ignore_errors=True)
        if code != 0 and which.round and which.round == self._job.round:
            self._board.give_up(which.round, explain(f"{which.title} ended with {how(code)}"))
        self._job.ended(worker, code, time.monotonic())
        self._board.forget(worker)
        if which is not self._job.first_failure:
            del self._output.traces[worker]

    def say(self, text: str) -> None:
        """Show a message to the user."""
        self._output.say(text)

    def _turn(self, limit_s: float) -> None:
        """Wait up to ``limit_s`` seconds for events of workers, and handle them; write a heartbeat when it is due."""
        hosts = [host for host in self._remote.values() if not host.is_lost]
        if hosts:
            reading = [each for host in hosts for each in host.reading]
            writing = [each for host in hosts for each in host.writing]
            with contextlib.suppress(OSError, ValueError):
                select.select(reading, writing, [], limit_s)
        for host in hosts:
            host.turn()
        for number, code in self._workers.wait(0.0 if hosts else limit_s).items():
            self.ended(number, code)
        running = self._running
        for worker in running:
            if lines := self._output.traces[worker.number].lines:
                self._job.heard(worker.number, lines[-1][0])
        for number, report in self._board.arrivals([worker.number for worker in running]).items():
            self._job.came(number, *report)
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            self._board.beat()

    @property
    def _running(self) -> list[Worker]:
        return [worker for worker in self._job.workers if worker.code is None]

    def _carry_out(self, orders: Orders) -> None:
        for text in orders.say:
            self.say(text)
        for worker in orders.end:
            self._end(worker)
        for worker in orders.start:
            self._start(worker)
        if orders.dismiss:
            self._board.dismiss(orders.dismiss)
        if orders.changed:
            result = HostUpdateResult.no_update
            for name in orders.changed:
                result |= HostUpdateResult[name]
            self._board.update(result, time.time())
        if orders.announce:
            self._announce(orders.announce, orders.may_skip_sync)

    def _announce(self, workers: list[Worker], may_skip_sync: bool) -> None:
        by_host: dict[str, list[int]] = {}
        for rank, worker in enumerate(workers):
            by_host.setdefault(worker.slot.host, []).append(worker.number)
            self._output.rename(worker.number, rank, self._copies(copies_of("", rank, self._most)))
        towards = _towards(list(by_host), {host: remote.address for host, remote in self._remote.items()})
        self._board.announce(self._job.round, may_skip_sync, list(by_host.values()), towards)
        if self._job.round > 1 or self._settings.verbose:
            self.say(f"round {self._job.round} begins: {len(workers)} ranks on {', '.join(by_host)}")

    def _start(self, worker: Worker) -> None:
        number, host = worker.number, worker.slot.host
        num_local = min(self._job.slots_of(host), self._settings.max_np or self._job.slots_of(host))
        folder = os.path.join(self._folder, str(number))
        os.mkdir(folder)
        self._output.replace(number)
        copies = None if self._settings.output_filename is None else ""
        places = self._output.pipes(number, folder, copies=copies, name=self._name(worker))
        command = list(self._settings.command)
        if self._is_here(host):
            try:
                pid = self._workers.start(number, host, num_local, command, places.stdout, places.stderr)
            except OSError as error:
                self.say(str(error))
                self.ended(number, CANNOT_BE_STARTED)
            else:
                self._output.watch({number: pid})
                self.started(number, pid)
            return
        remote = self._remote.get(host)
        if remote is None or remote.is_lost:
            remote = self._remote[host] = self._connected(host)
        remote.start(number, command, num_local, places)

    def _connected(self, host: str) -> RemoteWorkers:
        ssh.check_installed()
        wanted, environment = self._settings, self._environment
        doors, secret = self._doors.open(), self._doors.secret.hex()
        settings = HostSettings(host, doors, secret, node_identity(), wanted.elastic_timeout_s)
        environment = {**ssh.of_the_job(environment, EXTENSION), **ssh.carried(environment, EXTENSION), **wanted.env}
        options = ssh.SshOptions(wanted.ssh_port, wanted.ssh_identity_file)
        return RemoteWorkers(settings, environment, options, wanted.start_timeout_s, self)

    def _end(self, worker: Worker, at_once: bool = False) -> None:
        if self._is_here(worker.slot.host):
            self._workers.end(worker.number, at_once)
        elif worker.slot.host in self._remote:
            self._remote[worker.slot.host].end(worker.number, at_once)

    def _name(self, worker: Worker) -> str:
        return f"{worker.slot.host}#{worker.slot.index}"

    def _copies(self, name: str) -> str | None:
        """Return the folder for copies of a worker's output, emptied at its first use in the run; None: write no copies."""
        if self._settings.output_filename is None:
            return None
        folder = os.path.join(self._settings.output_filename, name)
        try:
            open_copies(folder, is_first=folder not in self._begun)
        except OSError as error:
            self.say(f"no more is written to {folder}: {error.strerror}")
            return None
        self._begun.add(folder)
        return folder

    def _conclude(self, code: int) -> int:
        failed = self._job.first_failure
        if code == 0 or failed is None:
            return code
        if failed.is_signalled:
            text = [f"the job has failed: the first worker that failed is {failed.title}, which did not answer"]
        else:
            assert failed.code is not None
            text = [static_run.text_of(failed.title, exit_code(failed.code))]
        lines = [line for _, line in self._output.traces[failed.number].lines]
        if lines:
            text += ["the last lines it printed:", *(f"  {line}" for line in lines[-_LAST_LINES:])]
        self.say("\n".join(text))
        return code

    def _end_workers(self) -> None:
        for at_once in (False, True):
            for worker in self._running:
                worker.is_signalled = True
                self._end(worker, at_once)
            deadline = time.monotonic() + (0.0 if at_once else GRACE_S) + _LAST_S
            num_signals = len(self._signals)  # one more signal ends the wait, and then workers are killed at once
            while self._running and time.monotonic() < deadline and len(self._signals) == num_signals:
                self._turn(_TURN_S)

    def _close_hosts(self) -> None:
        hosts = [host for host in self._remote.values() if not host.is_lost]
        for host in hosts:
            host.stop()
        deadline = time.monotonic() + _CLOSE_S
        while not all(host.is_lost for host in hosts) and time.monotonic() < deadline:
            self._turn(_TURN_S)
        for host in hosts:
            if not host.is_lost:
                host.close()

    def _show_the_rest(self) -> None:
        """Wait until all output is written, however slow its reader or disk; after a signal wait for a second for each."""
        while not (self._output.end(_TURN_S) or self._signals):
            pass
        self._output.close(_LAST_WORDS_S if self._signals else None)


def _towards(hosts: Sequence[str], reached: Mapping[str, str]) -> list[str]:
    """Return for each host of a round an address by which it reaches the driver's host; "" if all hosts are this machine.

    Args:
        hosts: the hosts of the round.
        reached: the address by which each host connected to this one; loopback if the host is this very machine.
    """
    outside = {host: reached[host] for host in hosts if reached.get(host, interfaces.LOOPBACK) != interfaces.LOOPBACK}
    return [outside.get(host, next(iter(outside.values()), "")) for host in hosts]
