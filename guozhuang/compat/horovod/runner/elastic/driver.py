"""The driver of an elastic run: carries out the decisions of ``job``. The package's docstring describes the whole."""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common.extension import EXTENSION
from guozhuang.compat.horovod.runner import static_run
from guozhuang.compat.horovod.runner.elastic import assignment
from guozhuang.compat.horovod.runner.elastic.blacklist import Blacklist
from guozhuang.compat.horovod.runner.elastic.board import DriverBoard, HostUpdateResult
from guozhuang.compat.horovod.runner.elastic.crew import (
    GRACE_S,
    Ended,
    Event,
    LocalWorkers,
    Lost,
    Printed,
    Reached,
    Said,
    Started,
)
from guozhuang.compat.horovod.runner.elastic.discovery import (
    DiscoveryError,
    FixedHosts,
    HostDiscoveryScript,
    Watch,
)
from guozhuang.compat.horovod.runner.elastic.doors import Doors
from guozhuang.compat.horovod.runner.elastic.job import ElasticJob, ElasticLimits, Orders, Worker
from guozhuang.compat.horovod.runner.elastic.printing import Printing
from guozhuang.compat.horovod.runner.elastic.remote_crew import HostConfig, RemoteCrew
from guozhuang.compat.horovod.runner.elastic.writing import Room
from guozhuang.compat.horovod.runner.settings import ElasticSettings
from guozhuang.errors import UsageError, explain
from guozhuang.launch import guard
from guozhuang.launch.failures import exit_code, how
from guozhuang.launch.hosts import ssh
from guozhuang.launch.request import with_folders
from guozhuang.net import interfaces
from guozhuang.net.store import serve
from guozhuang.watch.processes import node_identity

_WHO = "horovodrun"
_TURN_S, _BEAT_S = 0.05, 1.0
_LOOPBACK = "127.0.0.1"
_STORE_S = 300.0  # limit in seconds for each operation of the store
# Seconds to wait, after their grace, for the events that workers have ended.
_LAST_S = 5.0
_LAST_WORDS_S = 1.0  # seconds to wait, after a signal, for the remaining output to be written
_LAST_LINES = 12
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_elastic(settings: ElasticSettings) -> int:
    """Run workers on a changing set of hosts until the job is done. Blocks; no worker is left when it returns.

    The output of workers is shown on standard output and standard error, as ``[rank] line``; the driver's own messages go to
    standard error. Call it in the main thread if signals are to end the workers in an orderly way.

    Args:
        settings: the program, and the number of workers.

    Returns:
        0 if a worker ended with 0 (from then on no worker is replaced) and all have ended; 1 if the job failed, after
        naming the first worker that failed; 128 + its number if a signal ended the driver.

    Raises:
        UsageError: the settings contradict each other, or the discovery script does not work; nothing was started then. Or a
            host is to be reached over ssh, and there is no ssh here.
    """
    _check(settings)
    slots = settings.slots_per_host or 1
    source: FixedHosts | HostDiscoveryScript = FixedHosts(settings.hosts or ())
    if settings.host_discovery_script is not None:
        source = HostDiscoveryScript(settings.host_discovery_script, slots)
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        watch = Watch(source, messages.put)
    except DiscoveryError as error:
        raise UsageError(
            explain(str(error), fix="let it print a line for each host, host:slots, and end with 0")
        ) from error
    with contextlib.closing(watch):
        return _Driver(settings, messages).run(watch)


def _check(settings: ElasticSettings) -> None:
    least, most, first = settings.min_np, settings.max_np, settings.num_proc
    if least < 1 or first < least or (most is not None and most < first):
        what = "the numbers of processes must fit: 1 <= --min-np <= -np <= --max-np"
        raise UsageError(explain(what, value=f"{least}, {first}, {most}", fix="change one of them"))
    if settings.host_discovery_script is None and not settings.hosts:
        fix = "give --host-discovery-script SCRIPT, or -H host:slots,..."
        raise UsageError(explain("an elastic run has neither hosts nor a script that finds them", fix=fix))
    cooldown = settings.cooldown_range
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        what = "--blacklist-cooldown-range is the least and the most seconds that a host is left alone"
        raise UsageError(explain(what, value=list(cooldown), fix="give two numbers above 0, the smaller one first"))


class _Driver:
    def __init__(self, settings: ElasticSettings, messages: queue.SimpleQueue[str]) -> None:
        self._settings, self._messages = settings, messages
        limits = ElasticLimits(
            num_proc=settings.num_proc,
            min_np=settings.min_np,
            max_np=settings.max_np,
            elastic_timeout_s=settings.elastic_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            reset_limit=settings.reset_limit,
        )
        self._job = ElasticJob(limits, Blacklist(settings.cooldown_range))
        self._environment = elastic_variables.environment_of_workers(settings.env)
        if settings.network_interfaces:  # every host uses the interface of this name, as in a run that is not elastic
            chosen = interfaces.named(settings.network_interfaces[0])
            self._environment |= interfaces.variables(chosen, self._environment, override=True)
        most = max(settings.max_np or 0, settings.num_proc, sum(slots for _, slots in settings.hosts or ()))
        self._events: queue.Queue[Event] = queue.Queue()
        self._room = Room()
        self._printing = Printing(
            self._name, settings.prefix_timestamp, settings.output_filename, most, self._room.give
        )
        listener = socket.create_server((_LOOPBACK, 0))
        self._port = int(listener.getsockname()[1])
        self._board = DriverBoard(serve(listener, _STORE_S))
        self._ssh = ssh.SshOptions(settings.ssh_port, settings.ssh_identity_file)
        self._doors = Doors(self._port, settings.network_interfaces)
        self._run_name = secrets.token_hex(8)
        self._guard = guard.Guard(self._run_name, "")
        self._crew = LocalWorkers(self._events, self._room)
        self._remote: dict[str, RemoteCrew] = {}
        self._addresses: dict[str, str] = {}  # host name -> the address of this host by which that host reached it
        self._is_local: dict[str, bool] = {}
        self._signals: list[int] = []
        self._next_beat = 0.0

    def run(self, watch: Watch) -> int:
        """Run the job to its end, and return the exit code."""
        # Signals are only recorded until the clean-up is done: a second Ctrl-C must not leave workers behind.
        with _noted(self._signals), contextlib.ExitStack() as ending:
            # Clean-up in reverse order, last one first; if one raises the rest are called all the same.
            for do in (
                self._printing.close, self._show_the_rest, self._doors.close, self._guard.close,
                lambda: guard.end_all(self._run_name, {}, 0.0), self._close_crews, self._end_workers,
            ):  # fmt: skip
                ending.callback(do)
            while True:
                self._hear(_TURN_S)
                if self._signals:
                    self._say(f"got {signal.Signals(self._signals[0]).name}; ending all workers")
                    return 128 + self._signals[0]
                self._job.found(watch.newest())
                orders = self._job.turn(time.monotonic())
                self._carry_out(orders)
                if orders.over is not None:
                    return self._conclude(orders.over)

    def _hear(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` seconds for an event, then handle all events and messages; write a heartbeat when it is due."""
        with contextlib.suppress(queue.Empty):
            self._understand(self._events.get(timeout=wait_s))
            for _ in range(1000):  # a worker that never stops printing must not hold the driver up
                self._understand(self._events.get_nowait())
        running = [worker.number for worker in self._job.workers if worker.code is None]
        for number, told in self._board.arrivals(running).items():
            self._job.came(number, *told)
        with contextlib.suppress(queue.Empty):
            while True:
                self._say(self._messages.get_nowait())
        self._crew.look()
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            self._board.beat()

    def _understand(self, event: Event) -> None:
        if isinstance(event, Printed):
            self._printing.take(event.worker, event.stream, event.data)
            self._job.heard(event.worker, time.monotonic())
        elif isinstance(event, Started):
            worker = self._job.workers[event.worker]
            worker.pid = event.pid
            if self._here(worker.slot.host):
                self._guard.know([event.pid])
            if self._settings.verbose:
                self._say(f"started worker {event.worker} on host {worker.slot.host}: process {event.pid}")
        elif isinstance(event, Ended):
            self._printing.ended(event.worker)
            worker = self._job.workers[event.worker]
            if worker.code is None:
                if event.code != 0 and worker.round and worker.round == self._job.round:
                    self._board.give_up(worker.round, explain(f"{worker.title} ended with {how(event.code)}"))
                self._job.ended(event.worker, event.code, time.monotonic())
                self._board.forget(event.worker)
                if worker is not self._job.first_failure:
                    self._printing.forget(event.worker)
        elif isinstance(event, Reached):
            self._addresses[event.host] = event.address
        elif isinstance(event, Lost):
            self._say(f"host {event.host} {event.why}")
        elif isinstance(event, Said):
            self._printing.say(f"{event.host}: {event.text}")

    def _carry_out(self, orders: Orders) -> None:
        for text in orders.say:
            self._say(text)
        for worker in orders.end:
            self._end(worker, GRACE_S)
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
        places = assignment.places([worker.slot for worker in workers])
        found = {worker.number: place for worker, place in zip(workers, places, strict=True)}
        towards = _towards([worker.slot.host for worker in workers], self._addresses)
        for worker, place in zip(workers, places, strict=True):
            self._printing.is_rank(worker.number, place.rank)
        self._board.announce(
            self._job.round, may_skip_sync, found,
            {worker.number: towards[worker.slot.host] for worker in workers if worker.slot.host in towards},
        )  # fmt: skip
        if self._job.round > 1 or self._settings.verbose:
            hosts = list(dict.fromkeys(worker.slot.host for worker in workers))
            self._say(f"round {self._job.round} begins: {len(workers)} ranks on {', '.join(hosts)}")

    def _start(self, worker: Worker) -> None:
        host = worker.slot.host
        num_local = min(self._job.slots_of(host), self._settings.max_np or self._job.slots_of(host))
        command = list(self._settings.command)
        if self._here(host):
            environ = self._environment | {guard.VARIABLE: self._run_name}
            environ |= with_folders(environ.get("PYTHONPATH", ""), EXTENSION.python_path)
            timeout_s = self._settings.elastic_timeout_s
            told = elastic_variables.Driver(_LOOPBACK, self._port, worker.number, timeout_s)
            environ |= elastic_variables.variables(told, host, num_local, environ)
            self._crew.start(worker.number, command, environ)
            return
        remote = self._remote.get(host)
        if remote is None or remote.is_lost:
            remote = self._remote[host] = RemoteCrew(host, self._told(), self._events, self._room)
        remote.start(worker.number, command, num_local)

    def _told(self) -> HostConfig:
        ssh.check_installed()
        environment = ssh.of_the_job(self._environment, EXTENSION) | ssh.carried(self._environment, EXTENSION)
        environment |= self._settings.env
        return HostConfig(
            doors=self._doors.open(),
            secret=self._doors.secret,
            same=node_identity(),
            timeout_s=self._settings.elastic_timeout_s,
            start_timeout_s=self._settings.start_timeout_s,
            environment=environment,
            ssh=self._ssh,
        )

    def _end(self, worker: Worker, grace_s: float) -> None:
        if self._here(worker.slot.host):
            self._crew.end(worker.number, grace_s)
        elif worker.slot.host in self._remote:
            self._remote[worker.slot.host].end(worker.number, grace_s)

    def _here(self, host: str) -> bool:
        """Return whether a host is this machine. A port of ssh that the user gave is ignored: it is meant for remote hosts."""
        if host not in self._is_local:
            self._is_local[host] = ssh.is_here(host)
        return self._is_local[host]

    def _conclude(self, code: int) -> int:
        failed = self._job.first_failure
        if code == 0 or failed is None:
            return code
        if failed.is_told:
            text = [f"the job has failed: the first worker that failed is {failed.title}, which did not answer"]
        else:
            assert failed.code is not None
            text = [static_run.text_of(failed.title, exit_code(failed.code))]
        lines = self._printing.last_lines(failed.number, _LAST_LINES)
        if lines:
            text += ["the last lines it printed:", *(f"  {line}" for line in lines)]
        self._say("\n".join(text))
        return code

    def _end_workers(self) -> None:
        for grace_s in (GRACE_S, 0.0):
            running = [worker for worker in self._job.workers if worker.code is None]
            for worker in running:
                worker.is_told = True
                self._end(worker, grace_s)
            deadline, num_signals = time.monotonic() + grace_s + _LAST_S, len(self._signals)
            while any(worker.code is None for worker in self._job.workers) and time.monotonic() < deadline:
                self._hear(_TURN_S)
                if len(self._signals) > num_signals:
                    break  # another signal: kill at once, without waiting for the grace

    def _close_crews(self) -> None:
        with contextlib.ExitStack() as ending:
            for remote in self._remote.values():
                ending.callback(remote.close)
            ending.callback(self._crew.close)
        with contextlib.suppress(queue.Empty):
            while True:
                self._understand(self._events.get_nowait())

    def _show_the_rest(self) -> None:
        """Wait until all output is written, however slow its reader; after a signal wait for a second at most."""
        while not (self._printing.wait(_TURN_S) or self._signals):
            pass
        self._printing.wait(_LAST_WORDS_S)

    def _name(self, number: int) -> str:
        worker = self._job.workers[number]
        return f"{worker.slot.host}#{worker.slot.index}"

    def _say(self, text: str) -> None:
        self._printing.say(f"{_WHO}: {text}")


@contextlib.contextmanager
def _noted(signals: list[int]) -> Iterator[None]:
    """Only record the signals that would end a launcher; does nothing outside the main thread, which alone receives signals."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            # SIG_IGN: set by nohup, for one. None: a handler that Python did not set, and could not restore.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def _towards(hosts: Sequence[str], reached: Mapping[str, str]) -> dict[str, str]:
    """Return for each host of a round an address by which it reaches the driver's host; empty if all are this machine.

    Args:
        hosts: the hosts of the round.
        reached: the address by which each host connected to this one; loopback if the host is this very machine.
    """
    outside = {host: reached[host] for host in hosts if reached.get(host, _LOOPBACK) != _LOOPBACK}
    return {host: outside.get(host, next(iter(outside.values()))) for host in hosts} if outside else {}
