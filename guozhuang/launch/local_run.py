"""The run of one node: start its ranks, watch them, carry out the decisions of ``Job``, and remove everything at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping

from torch.distributed.elastic import events
from torch.distributed.launcher.api import LaunchConfig

from guozhuang.launch import guard, torchrun_logs, tracebacks
from guozhuang.launch.console.output import Output
from guozhuang.launch.console.say import say
from guozhuang.launch.crew import Crew, entry
from guozhuang.launch.failures import Failure, describe, exit_code, first, headline
from guozhuang.launch.job import Job, Outcome, Over, Replace, Send
from guozhuang.launch.options import command, torchrun
from guozhuang.launch.options.plan import Plan
from guozhuang.launch.rank_files import RankFiles, Shown, hang_in
from guozhuang.launch.rendezvous.endpoint import open_fixed
from guozhuang.launch.rendezvous.fixed import Attempt, FixedRendezvous, NodeShare
from guozhuang.launch.request import Request, RunReport
from guozhuang.launch.servers import ServersError, ServersOfANode
from guozhuang.launch.signals import SignalledError, Signals
from guozhuang.launch.torchrun_logs import TorchrunLogs
from guozhuang.world import versions

_GRACE_S = 2.0  # time between SIGTERM and SIGKILL for processes that ranks left behind, such as data-loader workers
_OUTPUT_S = 5.0  # after a signal: how long the remaining output may wait for its reader
_SHUTDOWN_S = 30.0  # time between SIGTERM and SIGKILL for ranks, where this version of torch has no option for it
_HELD = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class LocalRun:
    """A run of this node's ranks. The caller must call ``close``, also after an error.

    Args:
        plan: the checked options of the command line.
        request: options of the program that started this agent.
    """

    def __init__(self, plan: Plan, request: Request) -> None:
        self._plan, self._request = plan, request
        self._folder = tempfile.mkdtemp(prefix="guozhuang-run-")
        self._config, self._words, is_torchruns = self._read(plan)
        self._crew = Crew(self._folder)
        os.environ[guard.VARIABLE] = self._crew.run
        self._output = Output(terminals=request.terminals, timestamps=plan.timestamps)
        self._files = RankFiles(self._folder, self._output, self._shown(), bool(request.attempt))
        self._has_torchruns_logs = is_torchruns
        self._logs: TorchrunLogs | None = None
        self._servers = ServersOfANode(plan.num_servers, self._output.say)
        self._rendezvous: FixedRendezvous | None = None
        self._attempt: Attempt | None = None
        self._pids: dict[int, int] = {}
        self._error_files: dict[int, str] = {}
        self._signals = Signals(torchrun.signals_of(plan.elastic.signals_to_handle))
        shutdown_s = versions.field(self._config, "shutdown_timeout")
        self._job = Job(
            self._config.max_restarts,
            _SHUTDOWN_S if shutdown_s is None else max(0.1, float(shutdown_s)),
            plan.policy,
            _number(os.environ.get(_HELD, "")),
        )
        self._is_closed = False

    def _read(self, plan: Plan) -> tuple[LaunchConfig, list[str], bool]:
        options, is_torchruns = plan.elastic, torchrun.keeps_torchs_logs(plan.elastic)
        if not is_torchruns:
            options.log_dir = self._folder
        try:
            config, words = command.read(options)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        if is_torchruns:
            assert config.logs_specs is not None
            say(f"the files of torchrun's way of logging are in {config.logs_specs.root_log_dir}")
        return config, words, is_torchruns

    def _shown(self) -> Shown:
        plan, options = self._plan, self._plan.elastic
        ranks = (
            frozenset(int(rank) for rank in options.local_ranks_filter.split(","))
            if options.local_ranks_filter
            else None
        )
        is_alone = plan.num_local_ranks == 1 and self._config.max_nodes == 1
        is_plain = plan.copy_folder is None and not plan.timestamps and ranks is None
        return Shown(plan.log_folder, not (is_alone and is_plain), ranks, plan.copy_folder)

    def run(self) -> RunReport:
        """Meet the other nodes, start the ranks, and wait for their end; return how the run ended.

        Raises:
            UsageError: a port is taken, or a folder cannot be created; nothing was started.
            WorldError: another node did not join in time, aborted the run, or is lost; or a server ended.
            SignalledError: the agent got a signal that ends the run; its ranks have ended.
        """
        with self._signals:
            try:
                self._rendezvous = open_fixed(self._plan, self._config, self._request)
                self._rendezvous.say = self._output.say
                return self._attempts(self._rendezvous)
            except SignalledError as error:
                self._job.interrupt(error.number, time.monotonic())
                self._end_ranks()
                self._give_up(f"its agent {error}", 128 + error.number)
                raise
            except Exception as error:
                self._signals.note()
                self._job.stop(time.monotonic())
                self._end_ranks()
                if isinstance(error, ServersError):
                    self._give_up(str(error), 1)
                raise

    def _give_up(self, text: str, code: int) -> None:
        """Report to the other nodes that this one aborts the run; otherwise they would wait for its ranks."""
        if self._rendezvous is not None:
            self._rendezvous.give_up(text, code, False)

    def _attempts(self, rendezvous: FixedRendezvous) -> RunReport:
        share = NodeShare(self._plan.num_local_ranks, self._plan.num_servers, self._config.role)
        while True:
            self._attempt = rendezvous.meet(share)
            self._start(self._attempt)
            outcome = self._follow(rendezvous)
            if outcome not in (Outcome.RESTART, Outcome.RETRY):
                return self._conclude(outcome, rendezvous)
            if outcome is Outcome.RETRY:
                self._output.say(f"{self._first_failure()}; all ranks are started anew ({self._count()})")
            self._clean_up()

    def _start(self, attempt: Attempt) -> None:
        """Start all ranks of an attempt."""
        os.environ.update(self._servers.start(attempt))
        self._crew.know(self._servers.pids)
        environs = {local: self._environment(attempt, local) for local in range(self._plan.num_local_ranks)}
        ranks = {local: int(environ["RANK"]) for local, environ in environs.items()}
        if self._has_torchruns_logs:
            self._output.begin(list(ranks.values()))
            self._logs = TorchrunLogs(self._config, environs)
            for local, rank in ranks.items():
                for path in self._logs.of_rank(local):
                    self._output.follow(rank, path, whole=True)
        else:
            self._files.begin(environs)
        self._job.begin(ranks.values())
        for local, environ in environs.items():
            self._start_rank(local, environ)
        if self._plan.is_warm and self._job.restarts_left > 0:
            self._crew.keep_warm(self._words)

    def _start_rank(self, local_rank: int, environ: dict[str, str]) -> None:
        if self._logs is not None:
            places = [each.get(local_rank) or "" for each in (self._logs.files.stdouts, self._logs.files.stderrs)]
        else:
            places = list(self._files.open(local_rank, environ))
        log_folder = "" if self._has_torchruns_logs or self._plan.log_folder is None else self._plan.log_folder
        words = command.with_local_rank(self._words, self._plan.elastic, self._plan.pass_local_rank, str(local_rank))
        whole = versions.bound_to_numa(
            [*entry(log_folder), *words], local_rank, versions.field(self._config, "numa_options")
        )
        rank = int(environ["RANK"])
        self._error_files[rank] = environ.get("TORCHELASTIC_ERROR_FILE", "")
        pid = self._crew.start(rank, whole, os.environ | environ, *places)
        self._pids[rank] = pid
        self._output.watch({rank: pid})

    def _environment(self, attempt: Attempt, local_rank: int) -> dict[str, str]:
        found = attempt.environment(local_rank)
        most = self._request.max_restarts
        found["TORCHELASTIC_MAX_RESTARTS"] = str(max(self._config.max_restarts, most or 0))
        found["TORCHELASTIC_RUN_ID"] = self._config.run_id
        found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        found["TORCHELASTIC_SIGNALS_TO_HANDLE"] = str(versions.field(self._config, "signals_to_handle") or "")
        place = attempt.place(local_rank) | {"host": self._request.host or socket.gethostname()}
        found |= {name: text.format(**place) for name, text in self._request.extension.rank_variables.items()}
        if versions.field(self._plan.elastic, "virtual_local_rank"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            found["CUDA_VISIBLE_DEVICES"] = (
                str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
            )
            found["GUOZHUANG_LOCAL_RANK"], found["LOCAL_RANK"] = str(local_rank), "0"
        return found

    def _follow(self, rendezvous: FixedRendezvous) -> Outcome:
        """Wait until the attempt is over on this node, or, if it succeeded, on all nodes; return its outcome."""
        while True:
            outcome = self._turn()
            if outcome is Outcome.SUCCEEDED:
                return self._wait_for_others(rendezvous)
            if outcome is not None:
                self._servers.check()
                return outcome
            if self._job.failed:
                continue
            self._servers.check()
            if rendezvous.must_restart():
                self._job.stop(time.monotonic(), restart=True)

    def _turn(self) -> Outcome | None:
        """Carry out the job's decisions, and report to it which ranks have ended; return the outcome once there is one."""
        job = self._job
        while self._signals.noted:
            job.interrupt(self._signals.noted.pop(0), time.monotonic())
        for decision in job.turn(time.monotonic()):
            if isinstance(decision, Send):
                self._crew.send(decision.ranks, decision.number)
            elif isinstance(decision, Replace):
                self._replace(decision)
            elif isinstance(decision, Over):
                return decision.outcome
        for rank, code in self._crew.wait(min(0.1, self._config.monitor_interval)).items():
            job.ended(rank, code)
        if job.is_watching_kernel:
            job.kernel_holds(self._crew.held(), time.monotonic())
        return None

    def _replace(self, lost: Replace) -> None:
        """Start a new process for a rank that failed, while the other ranks keep running. First its children are killed."""
        assert self._attempt is not None
        self._crew.end_left(self._pids[lost.rank])
        failure = self._failures({lost.rank: lost.code})[lost.rank]
        what = headline(failure, socket.gethostname())
        self._output.say(f"{what}; it is replaced ({self._count()}), and the others go on")
        self._output.replace(lost.rank)
        own = self._attempt.environment(0)
        local_rank = lost.rank - int(own["RANK"])
        self._start_rank(local_rank, self._environment(self._attempt, local_rank))

    def _wait_for_others(self, rendezvous: FixedRendezvous) -> Outcome:
        """Wait until the ranks of all nodes have ended with 0; return RESTART if another node restarts its ranks before."""
        self._request.finished()
        while not rendezvous.are_all_done():
            self._servers.check()
            if rendezvous.must_restart():
                return Outcome.RESTART
            time.sleep(min(0.1, self._config.monitor_interval))
        return Outcome.SUCCEEDED

    def _end_ranks(self) -> None:
        """Wait until the ranks have ended. The caller has stopped the job before."""
        while self._job.living and self._turn() is None:
            pass
        self._clean_up()

    def _clean_up(self) -> None:
        """End the servers and every process that the ranks of the ended attempt left behind."""
        self._crew.end_all(0.0 if self._signals.is_signalled else _GRACE_S)
        self._servers.close()
        if self._logs is not None:
            self._logs.close()
            self._logs = None

    def close(self) -> None:
        """Kill the remaining processes of the run, show their remaining output, and remove the temporary folder."""
        if self._is_closed:
            return
        self._is_closed = True
        self._crew.end_all(0.0)
        self._servers.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        # After a signal the agent does not wait long for the reader of its output.
        self._output.close(_OUTPUT_S if self._signals.is_signalled else None)
        self._crew.close()
        if self._has_torchruns_logs and self._plan.elastic.log_dir is None:
            torchrun_logs.remove_if_empty(self._config)
        shutil.rmtree(self._folder, ignore_errors=True)

    # The report of the run's end.

    def _conclude(self, outcome: Outcome, rendezvous: FixedRendezvous) -> RunReport:
        self._clean_up()
        host = socket.gethostname()
        self._record(outcome)
        if outcome is Outcome.SUCCEEDED:
            self._output.close()
            return RunReport(host=host)
        if outcome is Outcome.HELD:
            ranks = ", ".join(f"rank {rank} (process {self._pids[rank]})" for rank in self._job.held)
            why = (
                f"{ranks} on host {host}: held by the kernel (state D, as by a device or a file system that does not "
                f"answer) for longer than {_HELD}"
            )
            self._give_up(why, 1)
            self._output.close()
            return RunReport(why, host=host, code=1)
        failures = self._failures(self._job.failed)
        rank = first(failures)
        failure = failures[rank]
        is_reaction = failure.is_reaction or failure.code == -signal.SIGTERM
        elsewhere = rendezvous.give_up(headline(failure, host), exit_code(failure.code), is_reaction)
        # After the report to the other nodes, because writing may wait for the reader of our output without limit.
        self._output.close()
        failures = self._failures(self._job.failed)
        assert self._attempt is not None
        num_nodes = len(self._attempt.shares)
        text, rank = describe(failures, host, num_nodes), first(failures)
        if elsewhere is not None:
            text = f"the first failure was on {elsewhere}\nhere, then:\n{text}"
            return RunReport(text, host=host, code=elsewhere.code, is_cause=False)
        return RunReport(text, f"rank {rank}", host, exit_code(failures[rank].code), num_nodes == 1 or not is_reaction)

    def _first_failure(self) -> str:
        failures = self._failures(self._job.failed)
        return headline(failures[first(failures)], socket.gethostname())

    def _count(self) -> str:
        return f"{self._job.max_restarts - self._job.restarts_left} of at most {self._job.max_restarts} times"

    def _failures(self, codes: Mapping[int, int]) -> dict[int, Failure]:
        """Return what is known of each rank that failed, with its last lines."""
        self._output.catch_up()
        found = {}
        for rank, code in codes.items():
            trace = self._output.traces[rank]
            seen = list(trace.lines)
            ended = time.monotonic() if trace.ended is None else trace.ended
            lines = [tracebacks.plain(line) for _, line in seen]
            times, hang = [when for when, _ in seen], hang_in(self._error_files.get(rank, ""))
            found[rank] = Failure(rank, code, self._pids[rank], ended, lines, times, hang)
        return found

    def _record(self, outcome: Outcome) -> None:
        """Record the end of the run as an event of torch elastic, for ``--event-log-handler``."""
        metadata: dict[str, events.EventMetadataValue] = {
            "run_id": self._config.run_id,
            "role": self._config.role,
            "hostname": socket.gethostname(),
            "state": "SUCCEEDED" if outcome is Outcome.SUCCEEDED else "FAILED",
            "agent_restarts": self._job.max_restarts - self._job.restarts_left,
        }
        name = f"guozhuang.agent.{metadata['state']}".lower()
        events.record(events.Event(name, events.EventSource.AGENT, metadata=metadata), self._config.event_log_handler)


def _number(text: str) -> float:
    """Return the number in the value of a variable of torchrun; 0.0 (off) if it is none."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
