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
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from guozhuang.errors import WorldError, explain
from guozhuang.launch import elastic_command, guard, tracebacks
from guozhuang.launch.console.output import Output
from guozhuang.launch.console.say import say
from guozhuang.launch.elastic_logs import Logs
from guozhuang.launch.failures import Failure, exit_code, first, headline
from guozhuang.launch.options import torchrun as torchrun_options
from guozhuang.launch.outer import Outer
from guozhuang.launch.rendezvous import choice as elastic_meeting
from guozhuang.launch.rendezvous.base import AnewError, Meeting
from guozhuang.launch.rendezvous.signs import OtherNodeError
from guozhuang.launch.servers import ServersError, ServersOfANode
from guozhuang.watch.processes import start_of
from guozhuang.world import versions
from guozhuang.world.identity import LaunchedNode

_GRACE_S = 2.0  # for what ranks left behind (data-loader workers, programs they started) to end by SIGTERM
# After Ctrl-C, for ranks to come out of a collective they stand in; Python sees the signal only then.
_INTERRUPT_S = 5.0
_SHUTDOWN_S = 30  # for ranks to end when they are told to, where this version of torch has no option for it


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run of this node ended.

    Attributes:
        failures: by rank; empty where all ended well.
        num_nodes: of the last attempt.
        code: the exit code where no rank of this node failed, or none failed first.
        elsewhere: what happened on another node that failed first; empty if none is known.
        why: what went wrong where no rank failed; empty if nothing did.
    """

    failures: Mapping[int, Failure]
    num_nodes: int
    code: int = 0
    elsewhere: str = ""
    why: str = ""


class Run:
    """One run of this node's ranks. ``close`` must be called, also after an error.

    Args:
        options: torchrun's, as parsed.
        pass_local_rank: the option by which the script gets its local rank ("--local-rank"); None for none.
        log_folder: where each rank writes its file; None: their output is shown.
        secret: that joining needs; None without one.
        node: what srun or mpirun said of this node, where they tell how nodes meet.
        outer: what the launcher of several hosts said, where it has started this agent.
        num_servers: parameter servers to be started beside the ranks.
        copy_folder: where what each rank prints is written too; None: nowhere.
        timestamps: put the time before each line that is shown.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        pass_local_rank: str | None,
        log_folder: str | None,
        secret: bytes | None,
        node: LaunchedNode | None = None,
        outer: Outer | None = None,
        num_servers: int = 0,
        copy_folder: str | None = None,
        timestamps: bool = False,
    ) -> None:
        self.name = os.urandom(8).hex()
        self._options, self._log_folder, self._secret = options, log_folder, secret
        self._pass_local_rank = pass_local_rank
        self._node = node
        self.outer = outer or Outer()
        self._folder = tempfile.mkdtemp(prefix="guozhuang-run-")
        self._sessions: dict[int, int] = {}
        self._interrupted: float | None = None
        self._guard = guard.Guard(self.name, self._folder)
        self._output = Output(on_signal=self._on_signal, terminals=self.outer.terminals, timestamps=timestamps)
        self._copy_folder, self._is_plain = copy_folder, copy_folder is None and not timestamps
        self.servers = ServersOfANode(num_servers, self._output.say)
        self._meeting: RendezvousHandler | None = None
        self._is_closed = self._was_told = False
        self.shutdown_s: Any = _SHUTDOWN_S  # in seconds
        self._torchs_folder = ""  # of torch's own log files, where they have none by --log-dir

    def start(self) -> Ended:
        """Meet the other nodes, start the ranks, and wait for their end.

        Raises:
            UsageError: an option that torch elastic refuses, or a port that is taken; nothing was started.
            WorldError: another node was not there in time.
            SignalException: the agent was told to end; its ranks have ended.
        """
        os.environ[guard.VARIABLE] = self.name
        config, command, arguments = self._command()
        self._meeting = elastic_meeting.meet(self._options, config, self._secret, self._node, self.outer)
        if isinstance(self._meeting, Meeting):
            self._meeting.say = self._output.say
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
            return self._until_the_end(agent)
        except SignalException as error:
            self._was_told = True
            if isinstance(self._meeting, Meeting):
                self._meeting.was_told(f"its agent got {error.sigval.name}", 128 + int(error.sigval))
            raise

    def _until_the_end(self, agent: _Agent) -> Ended:
        handler = agent.get_worker_group().spec.event_log_handler
        try:
            result: RunResult = agent.run()
        except SignalException:
            raise
        except RendezvousError as error:
            events.record(agent.get_event_failed(), handler)
            fix = "look at the agents of the other nodes, at --rdzv-endpoint and at --rdzv-conf"
            raise WorldError(explain(f"the nodes did not meet: {error}", fix=fix)) from error
        except Exception as error:
            events.record(agent.get_event_failed(), handler)
            if isinstance(error, ServersError):
                self._give_up(str(error), 1, False)
            raise
        events.record(agent.get_event_succeeded(), handler)
        ended = self._told_to_others(agent, result)
        # Only now: whoever reads our output may take as long as they like, and the other nodes have heard.
        self._output.close()
        return dataclasses.replace(ended, failures=self.failures(result.failures)) if ended.failures else ended

    def _told_to_others(self, agent: _Agent, result: RunResult) -> Ended:
        num_nodes = agent.get_worker_group().group_world_size or 1
        failures = self.failures(result.failures) if result and result.is_failed() else {}
        if failures:
            failure = failures[first(failures)]
            text = headline(failure, socket.gethostname())
            is_reaction = failure.is_reaction or failure.code == -signal.SIGTERM
            cause = self._give_up(text, exit_code(failure.code), is_reaction)
            return Ended(failures, num_nodes, 0 if cause is None else cause.code, "" if cause is None else str(cause))
        if result is not None and result.state != WorkerState.SUCCEEDED:
            why = agent.why_given_up(result.state)
            self._give_up(why, 1, False)
            return Ended(failures, num_nodes, 1, why=why)
        return Ended(failures, num_nodes)

    def _give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Tell the other nodes; they would wait for ranks that are gone."""
        if isinstance(self._meeting, Meeting):
            return self._meeting.give_up(text, code, is_reaction)
        return None

    def close(self) -> None:
        """End what may be left of the run, at once; show what it printed; remove the temporary folder."""
        if self._is_closed:
            return
        self._is_closed = True
        guard.end_all(self.name, self._sessions, 0)
        if isinstance(self._meeting, Meeting) and self._was_told:
            self._meeting.leave()
        elif self._meeting is not None:
            self._meeting.shutdown()
        # Who was told to end does not wait for whoever reads the output: the thread, which would note it, may stand there.
        self._output.close(_INTERRUPT_S if self._was_told or self._interrupted is not None else None)
        self._guard.close()
        if self._torchs_folder:
            with contextlib.suppress(OSError):
                os.rmdir(self._torchs_folder)  # nothing was started
        shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self) -> tuple[LaunchConfig, str, list[str]]:
        options, ours = self._options, not torchrun_options.keeps_torchs_logs(self._options)
        has_folder = options.log_dir is not None
        if ours:
            options.log_dir = self._folder
        config, command, arguments = elastic_command.torchs(options)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = versions.field(config, "signals_to_handle") or ""
        shutdown_s = versions.field(config, "shutdown_timeout")
        self.shutdown_s = _SHUTDOWN_S if shutdown_s is None else max(0.1, shutdown_s)
        if ours:
            config.logs_specs = self._logs()
        else:
            assert config.logs_specs is not None
            folder = str(config.logs_specs.root_log_dir)
            self._torchs_folder = "" if has_folder else folder
            say(f"the files of torchrun's way of logging are in {folder}")
        log_folder = self._log_folder if ours and self._log_folder is not None else ""
        rank = elastic_command.of_a_rank(options, command, arguments, self._pass_local_rank, log_folder)
        return config, sys.executable, rank

    def _logs(self) -> LogsSpecs:
        options = self._options
        shown = {int(rank) for rank in options.local_ranks_filter.split(",")} if options.local_ranks_filter else None
        num_local_ranks, alone = int(options.nproc_per_node), options.nnodes in ("1", "1:1")
        is_one = num_local_ranks == 1 and alone and shown is None and self._is_plain
        if self._log_folder is not None or is_one:
            return Logs(self, self._folder, self._output, self._log_folder, piped=False, shown=None)
        return Logs(self, self._folder, self._output, None, piped=True, shown=shown, copy_folder=self._copy_folder)

    # What the agent and its parts call.

    @property
    def attempt(self) -> int | None:
        """How many times the ranks of the run were started before, as all nodes count it; None where nobody says."""
        meeting = self._meeting
        return meeting.attempt if isinstance(meeting, Meeting) else None

    def follow(self, files: Mapping[int, Sequence[str]]) -> None:
        """The ranks of an attempt write into these files of torch elastic's."""
        self._output.begin(list(files))
        for rank, paths in files.items():
            for path in paths:
                self._output.follow(rank, path, whole=True)

    def started(self, pids: Mapping[int, int]) -> None:
        """The ranks of an attempt have these processes."""
        started = [*pids.values(), *self.servers.pids]
        self._sessions |= {pid: start_of(pid) for pid in started}
        self._guard.know(started)
        self._output.watch(pids)

    def end_leftovers(self) -> None:
        """End what the ranks of the attempt that is over left behind."""
        guard.end_all(self.name, self._sessions, 0 if self._interrupted is not None else _GRACE_S)
        self.servers.close()

    def failures(self, found: Mapping[int, ProcessFailure]) -> dict[int, Failure]:
        """What is known of each rank that failed."""
        self._output.catch_up()
        return {rank: self._failure(rank, failure) for rank, failure in found.items()}

    def say_restart(self, found: Mapping[int, ProcessFailure], count: int, limit: int) -> None:
        """One line on a failure after which the ranks are started anew."""
        failures = self.failures(found)
        if failures:
            what = headline(failures[first(failures)], socket.gethostname())
            self._output.say(f"{what}; all ranks are started anew ({count} of at most {limit} times)")

    def _failure(self, rank: int, found: ProcessFailure) -> Failure:
        trace = self._output.traces.get(rank)
        ended, lines, times = float(found.timestamp), [], []
        if trace is not None and trace.pid == found.pid:
            # The dates of torch are of another clock, and in seconds: mixed with ours they still come last.
            ended = trace.ended if trace.ended is not None else ended
            lines, times = [line for _, line in list(trace.lines)], [when for when, _ in list(trace.lines)]
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
        self._finished: RunResult | None = None  # of this attempt, once all ranks of the node have ended well

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            with contextlib.suppress(AnewError):
                super()._rendezvous(worker_group)
                try:
                    self._run.servers.meet(worker_group)  # here, where a node that is lost makes all begin anew
                except dist.DistNetworkError as error:
                    meeting = worker_group.spec.rdzv_handler
                    raise (meeting.told(error) if isinstance(meeting, Meeting) else error) from error
                return

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._finished = None
        self._run.servers.start(worker_group)
        ids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        # Torch elastic gives 30 s, whatever was asked for, where a rank has failed.
        close, limit_s = self._pcontext.close, self._run.shutdown_s
        self._pcontext.close = lambda death_sig=None, timeout=0: close(death_sig, limit_s)  # type: ignore[method-assign]
        if not isinstance(self._logs_specs, Logs):
            files = self._pcontext.stdouts, self._pcontext.stderrs
            local = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
            self._run.follow({rank: [each[i] for each in files if each[i]] for rank, i in local.items()})
        self._run.started({worker.global_rank: ids[worker.local_rank] for worker in worker_group.workers})
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._finished is not None:
            self._run.servers.check()
            return self._with_the_others(self._finished)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state != WorkerState.SUCCEEDED:
            self._run.servers.check()  # after the ranks, which fail a moment after the server that they lost
        if result.state == WorkerState.FAILED and self._remaining_restarts > 0:
            limit = worker_group.spec.max_restarts
            self._run.say_restart(result.failures, limit - self._remaining_restarts + 1, limit)
        return self._with_the_others(result) if result.state == WorkerState.SUCCEEDED else result

    def _with_the_others(self, result: RunResult) -> RunResult:
        """Ranks that have ended well are as if they ran until those of all nodes have: they may have to begin anew."""
        meeting = self._worker_group.spec.rdzv_handler
        if not isinstance(meeting, Meeting):
            return result
        if self._finished is None:
            self._finished = result
            self._run.outer.finished()
        return result if meeting.are_all_done() else RunResult(state=WorkerState.HEALTHY)

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        if versions.field(spec, "virtual_local_rank"):
            worker_env["GUOZHUANG_LOCAL_RANK"] = str(local_rank)  # LOCAL_RANK is 0 in all of them

    def why_given_up(self, state: WorkerState) -> str:
        """Why torch elastic ended ranks none of which has failed."""
        stuck = getattr(self, "_uninterruptible_state_first_seen", {})
        ranks = [f"rank {w.global_rank} (process {w.id})" for w in self._worker_group.workers if w.id in stuck]
        if not ranks:
            return f"torch elastic gave the ranks of this node up: they are {state.name}"
        return (
            f"{', '.join(ranks)} on host {socket.gethostname()}: held by the kernel (state D, as by a device or a file system "
            "that does not answer) for longer than TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
        )

    def _exit_barrier(self) -> None:
        if not isinstance(self._worker_group.spec.rdzv_handler, Meeting):
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _shutdown(self, *how: Any, **more: Any) -> None:
        super()._shutdown(*how, **more)  # what it is told differs between versions of torch
        self._run.end_leftovers()
