"""Torch elastic's agent, driven with our meeting points, our output, and nothing left behind it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, run_script_path

from guozhuang.errors import UsageError, explain
from guozhuang.launch import guard, tracebacks
from guozhuang.launch.elastic_fixed import FixedMeeting, OtherNodeError
from guozhuang.launch.elastic_nodes import ElasticMeeting
from guozhuang.launch.failures import Failure, exit_code, first, headline
from guozhuang.launch.output import Output
from guozhuang.world import versions
from guozhuang.world.identity import LaunchedNode

_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}  # torchrun's
_GRACE_S = 2.0  # for what ranks left behind (data-loader workers, programs they started) to end by SIGTERM
# After Ctrl-C, for ranks to come out of a collective they stand in; Python sees the signal only then.
_INTERRUPT_S = 5.0
# What --run-path asks for, in a process of its own: torch would do it in one that has none of rank.py's care.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
_TAIL_BYTES = 1 << 17


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run of this node ended.

    Attributes:
        failures: by rank; empty where all ended well.
        num_nodes: of the last attempt.
        code: the exit code where no rank of this node failed, or none failed first.
        elsewhere: what happened on another node that failed first; empty if none is known.
    """

    failures: Mapping[int, Failure]
    num_nodes: int
    code: int = 0
    elsewhere: str = ""


class Run:
    """One run of this node's ranks. ``close`` must be called, also after an error.

    Args:
        options: torchrun's, as parsed.
        pass_local_rank: the option by which the script gets its local rank ("--local-rank"); None for none.
        log_folder: where each rank writes its file; None: their output is shown.
        secret: that joining needs; None without one.
        node: what srun or mpirun said of this node, where they tell how nodes meet.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        pass_local_rank: str | None,
        log_folder: str | None,
        secret: bytes | None,
        node: LaunchedNode | None = None,
    ) -> None:
        self.name = os.urandom(8).hex()
        self._options, self._log_folder, self._secret = options, log_folder, secret
        self._pass_local_rank = pass_local_rank
        self._node = node
        self._folder = tempfile.mkdtemp(prefix="guozhuang-run-")
        self._sessions: dict[int, int] = {}
        self._interrupted: float | None = None
        self._guard = guard.Guard(self.name, self._folder)
        self._output = Output(on_signal=self._on_signal)
        self._meeting: RendezvousHandler | None = None
        self._is_closed = self._was_told = False

    def start(self) -> Ended:
        """Meet the other nodes, start the ranks, and wait for their end.

        Raises:
            UsageError: an option that torch elastic refuses, or a port that is taken; nothing was started.
            WorldError: another node was not there in time.
            SignalException: the agent was told to end; its ranks have ended.
        """
        os.environ[guard.VARIABLE] = self.name
        config, command, arguments = self._command()
        self._meeting = self._meet(config)
        spec = versions.call_with_known(
            WorkerSpec,
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=command,
            args=tuple(arguments),
            rdzv_handler=self._meeting,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            numa_options=versions.field(config, "numa_options"),
            duplicate_stdout_filters=versions.field(config, "duplicate_stdout_filters"),
            duplicate_stderr_filters=versions.field(config, "duplicate_stderr_filters"),
            virtual_local_rank=versions.field(config, "virtual_local_rank"),
        )
        agent = versions.call_with_known(
            functools.partial(_Agent, self),
            LocalElasticAgent,
            spec=spec,
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=versions.field(config, "shutdown_timeout"),
        )
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        try:
            result: RunResult = agent.run()
        except SignalException as error:
            # The other nodes of an elastic run go on without this one: nothing is closed for them.
            self._was_told = True
            self._give_up(f"the agent got {error.sigval.name}", 128 + int(error.sigval), False)
            raise
        except Exception:
            events.record(agent.get_event_failed(), config.event_log_handler)
            raise
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        num_nodes = agent.get_worker_group().group_world_size or 1
        self._output.close()
        failures = self.failures(result.failures) if result and result.is_failed() else {}
        if failures:
            failure = failures[first(failures)]
            text = headline(failure, socket.gethostname())
            is_reaction = failure.is_reaction or failure.code == -signal.SIGTERM
            cause = self._give_up(text, exit_code(failure.code), is_reaction)
            return Ended(failures, num_nodes, 0 if cause is None else cause.code, "" if cause is None else str(cause))
        # Without a rank that failed: torch elastic gave the node up, as for a rank that the kernel holds for too long.
        return Ended(failures, num_nodes, 1 if result and result.is_failed() and not failures else 0)

    def _give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Tell the other nodes; they would wait for ranks that are gone."""
        if isinstance(self._meeting, FixedMeeting):
            return self._meeting.give_up(text, code, is_reaction)
        return None

    def close(self) -> None:
        """End what may be left of the run, at once; show what it printed; remove the temporary folder."""
        if self._is_closed:
            return
        self._is_closed = True
        guard.end_all(self.name, self._sessions, 0)
        if isinstance(self._meeting, ElasticMeeting) and self._was_told:
            self._meeting.leave()
        elif self._meeting is not None:
            self._meeting.shutdown()
        self._output.close(None if self._interrupted is None else _INTERRUPT_S)
        self._guard.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self) -> tuple[LaunchConfig, Callable[..., object] | str, list[str]]:
        """Torch's own reading of the options, with our process in between (rank.py) and our log files."""
        options = self._options
        ours = not (options.redirects != "0" or options.tee != "0" or options.logs_specs)
        if ours or options.log_dir is None:
            options.log_dir = self._folder
        try:
            config, command, arguments = config_from_args(options)
        except (ValueError, AssertionError, RuntimeError) as error:
            what = f"torch elastic refused the options: {error}"
            raise UsageError(explain(what, fix="see `guozhuang run --help`")) from error
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = versions.field(config, "signals_to_handle") or ""
        duplicated = ("duplicate_stdout_filters", "duplicate_stderr_filters")
        if ours and not any(versions.field(config, name) for name in duplicated):
            config.logs_specs = self._logs()
        if self._pass_local_rank is not None:
            place = len(arguments) - len(options.training_script_args)
            arguments.insert(place, f"{self._pass_local_rank}={macros.local_rank}")
        if command is run_script_path:
            command, arguments = sys.executable, ["-u", "-c", _RUN_PATH, *arguments]
        assert isinstance(command, str)
        entry = str(Path(__file__).with_name("rank.py"))
        own_files = self._log_folder if ours and self._log_folder is not None else ""
        return config, sys.executable, ["-I", "-S", entry, str(os.getpid()), own_files, command, *arguments]

    def _logs(self) -> LogsSpecs:
        options = self._options
        shown = {int(rank) for rank in options.local_ranks_filter.split(",")} if options.local_ranks_filter else None
        num_local_ranks, alone = int(options.nproc_per_node), options.nnodes in ("1", "1:1")
        if self._log_folder is not None or (num_local_ranks == 1 and alone and shown is None):
            return _Logs(self, self._folder, self._output, piped=False, shown=None)
        return _Logs(self, self._folder, self._output, piped=True, shown=shown)

    def _meet(self, config: LaunchConfig) -> RendezvousHandler:
        """The way in which nodes meet. See [Note: stores] in elastic_stores.py."""
        options, timeout_s = self._options, float(config.rdzv_configs["timeout"])
        if config.rdzv_backend not in _DEFAULT_PORTS or config.rdzv_configs.get("store_type", "tcp") != "tcp":
            return get_rendezvous_handler(_parameters(config))
        default_port = 0 if config.max_nodes == 1 else _DEFAULT_PORTS[config.rdzv_backend]
        host, port = options.master_addr.strip("[]"), options.master_port
        if options.rdzv_endpoint:
            try:
                host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port)
            except ValueError as error:
                raise UsageError(explain(str(error), value=options.rdzv_endpoint, fix="give HOST:PORT")) from error
        port = default_port if port is None else port
        if config.max_nodes == 1:
            return FixedMeeting("", port, 0, 1, config.run_id, timeout_s, None)
        try:
            if config.rdzv_backend == "static":
                node, num_nodes = options.node_rank, config.max_nodes
                if not 0 <= node < num_nodes:
                    what = (
                        f"--node-rank is the number of this node, from 0 to {num_nodes - 1} with --nnodes {num_nodes}"
                    )
                    raise UsageError(explain(what, value=node, fix="give each node its own"))
                point = self._node.meeting_point if self._node is not None else None
                return FixedMeeting(host, port, node, num_nodes, config.run_id, timeout_s, self._secret, point)
            return ElasticMeeting(_parameters(config), host, port, timeout_s, self._secret)
        except OSError as error:
            what = f"no store can be opened at {host}:{port}: {error.strerror or error}"
            fix = "give --master-addr (or --rdzv-endpoint) an address of node 0"
            raise UsageError(explain(what, fix=fix)) from error

    # What the agent and its parts call.

    @property
    def attempt(self) -> int | None:
        """How many times the ranks of the run were started before, as all nodes count it; None where nobody says."""
        meeting = self._meeting
        return meeting.attempt if isinstance(meeting, FixedMeeting | ElasticMeeting) else None

    def started(self, pids: Mapping[int, int]) -> None:
        """The ranks of an attempt have these processes."""
        self._sessions |= {pid: guard.started(pid) for pid in pids.values()}
        self._guard.know(list(pids.values()))
        self._output.watch(pids)

    def end_leftovers(self) -> None:
        """End what the ranks of the attempt that is over left behind."""
        guard.end_all(self.name, self._sessions, 0 if self._interrupted is not None else _GRACE_S)

    def failures(self, found: Mapping[int, ProcessFailure]) -> dict[int, Failure]:
        """What is known of each rank that failed."""
        return {rank: self._failure(rank, failure) for rank, failure in found.items()}

    def say_restart(self, found: Mapping[int, ProcessFailure], count: int, limit: int) -> None:
        """One line on a failure after which the ranks are started anew."""
        failures = self.failures(found)
        if failures:
            what = headline(failures[first(failures)], socket.gethostname())
            text = f"guozhuang run: {what}; all ranks are started anew ({count} of at most {limit} times)"
            print(text, file=sys.stderr, flush=True)

    def _failure(self, rank: int, found: ProcessFailure) -> Failure:
        trace = self._output.traces.get(rank)
        ended, lines, times = float(found.timestamp), [], []
        if trace is not None and trace.pid == found.pid:
            # The dates of torch are of another clock, and in seconds: mixed with ours they still come last.
            ended = trace.ended if trace.ended is not None else ended
            lines, times = [line for _, line in list(trace.lines)], [when for when, _ in list(trace.lines)]
        if not lines and self._log_folder is not None:
            lines, times = _tail(Path(self._log_folder) / f"rank{rank}.log"), []
        lines = [tracebacks.plain(line) for line in lines]
        return Failure(rank, found.exitcode, found.pid, ended, lines, times)

    def _on_signal(self, number: int) -> None:
        """In the output's thread: what Ctrl-C could not end in time, SIGTERM ends. See ``_INTERRUPT_S``."""
        if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            return
        if self._interrupted is None:
            self._interrupted = time.monotonic()
            if number == signal.SIGINT:
                self._output.later(_INTERRUPT_S, self._end_stuck)
        else:  # told twice: the user does not want to wait
            for pid in guard.belonging(self.name, self._sessions):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _end_stuck(self) -> None:
        for pid in guard.belonging(self.name, self._sessions):
            if pid in self._sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


class _Agent(LocalElasticAgent):
    """Tells the run what happens to its ranks."""

    def __init__(self, run: Run, **more: Any) -> None:
        super().__init__(**more)
        self._run = run

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._run.started({worker.global_rank: ids[worker.local_rank] for worker in worker_group.workers})
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._remaining_restarts > 0:
            limit = worker_group.spec.max_restarts
            self._run.say_restart(result.failures, limit - self._remaining_restarts + 1, limit)
        return result

    def _exit_barrier(self) -> None:
        if isinstance(self._worker_group.spec.rdzv_handler, FixedMeeting):
            self._worker_group.spec.rdzv_handler.wait_for_others()
        else:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _shutdown(self, *how: Any, **more: Any) -> None:
        super()._shutdown(*how, **more)  # what it is told differs between versions of torch
        self._run.end_leftovers()


class _Logs(LogsSpecs):
    """Where the ranks of an attempt write: to our pipes, or where the agent does (then rank.py may send them to a file)."""

    def __init__(self, run: Run, folder: str, output: Output, piped: bool, shown: set[int] | None) -> None:
        super().__init__(folder)
        self._run = run
        self._folder, self._output, self._piped, self._shown = folder, output, piped, shown
        self._attempt = 0

    @property
    def root_log_dir(self) -> str:
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch elastic before each attempt, with the variables of each local rank."""
        self._attempt += 1
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self._output.begin(list(ranks.values()))
        found = LogsDest()
        for local_rank, rank in ranks.items():
            if self._run.attempt is not None:
                # Torch elastic counts on each node by itself, and ranks that look for each other by it would not meet.
                envs[local_rank]["TORCHELASTIC_RESTART_COUNT"] = str(self._run.attempt)
            folder = os.path.join(self._folder, str(self._attempt), str(rank))
            os.makedirs(folder)
            paths = ("", "")
            if self._piped:
                paths = self._output.pipes(rank, folder, self._shown is None or local_rank in self._shown)
            found.stdouts[local_rank], found.stderrs[local_rank] = paths
            found.error_files[local_rank] = os.path.join(folder, "error.json")
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = found.error_files[local_rank]
        return found


def _parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def _tail(path: Path) -> list[str]:
    """The last lines of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return [line.rpartition("\r")[2] for line in file.read().decode(errors="replace").split("\n")][-400:]
    except OSError:
        return []
