"""Run one node's ranks: start and watch them, carry out the decisions of ``Job``, and remove everything at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import string
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from torch.distributed.elastic import events
from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.launcher.api import LaunchConfig
from typing_extensions import override

from guozhuang.launch.console.say import say
from guozhuang.launch.failures import Failure, describe, exit_code, first, headline
from guozhuang.launch.job import Job, Outcome, Over, Replace, Send
from guozhuang.launch.node_run import NodeRun
from guozhuang.launch.options.plan import Plan
from guozhuang.launch.rank_files import RankFiles
from guozhuang.launch.rendezvous.agents import OtherNodeError
from guozhuang.launch.rendezvous.endpoint import open_fixed
from guozhuang.launch.rendezvous.fixed import Attempt, FixedRendezvous, NodeShare
from guozhuang.launch.request import Request, RunReport
from guozhuang.launch.servers import ServersError, ServersOfANode
from guozhuang.launch.signals import RUN_FAILED, SignalledError
from guozhuang.watch.processes import ENDED_BY_SIGTERM
from guozhuang.world import versions

_GRACE_S = 2.0  # seconds between SIGTERM and SIGKILL for processes that ranks left behind, such as data-loader workers
_SHUTDOWN_S = 30.0  # seconds between SIGTERM and SIGKILL for ranks, if nothing else was asked for
_HELD = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class LocalRun(NodeRun):
    """The run of this node's ranks by our own agent, after a rendezvous with the agents of a fixed number of nodes."""

    def __init__(self, plan: Plan, request: Request) -> None:
        super().__init__(plan, request)
        if self._has_torchruns_logs:
            assert self._config.logs_specs is not None
            say(f"the files of torchrun's way of logging are in {self._config.logs_specs.root_log_dir}")
        self._files = RankFiles(self._folder, self._output, self._shown(may_inherit=True), bool(request.attempt))
        self._logs: TorchrunLogs | None = None
        self._servers = ServersOfANode(plan.num_servers, self._output.say)
        self._rendezvous: FixedRendezvous | None = None
        self._attempt: Attempt | None = None
        self._pids: dict[int, int] = {}
        self._error_files: dict[int, str] = {}
        asked_s = plan.elastic.shutdown_timeout
        shutdown_s = versions.field(self._config, "shutdown_timeout") if asked_s is None else asked_s
        self._job = Job(
            self._config.max_restarts,
            _SHUTDOWN_S if shutdown_s is None else max(0.1, float(shutdown_s)),
            plan.policy,
            _number(os.environ.get(_HELD, "")),
        )

    def run(self) -> RunReport:
        """Carry out the rendezvous, start the ranks of this node, and wait for their end; return how the run ended.

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
                if error.number == signal.SIGINT:
                    self._output.interrupted()
                has_failed = self._request.max_restarts is not None and error.number == RUN_FAILED
                number = signal.SIGTERM if has_failed else error.number
                self._job.interrupt(number, time.monotonic(), self._ask_to_end(error))
                self._end_ranks()
                self._give_up(f"its agent {error}", 128 + error.number)
                raise
            except Exception as error:
                self._signals.note()
                self._job.stop(time.monotonic(), ranks_know=self._is_asked_end(error))
                self._end_ranks()
                if isinstance(error, ServersError):
                    self._give_up(str(error), 1)
                raise

    def _give_up(self, text: str, code: int) -> None:
        """Report to the other nodes that this one aborts the run; otherwise they would wait for its ranks."""
        if self._rendezvous is not None:
            self._rendezvous.give_up(text, code, False)

    def _ask_to_end(self, error: SignalledError) -> bool:
        """Ask the ranks to save a checkpoint and to end, if the signal is SIGTERM; return whether they will."""
        rendezvous = self._rendezvous
        if error.number != signal.SIGTERM or self._job.failed or rendezvous is None or not rendezvous.ask_to_end():
            return False
        limit = f"they have {self._job.shutdown_s:g} s (--shutdown-timeout), and a second signal ends them at once"
        self._output.say(f"{error}; all ranks save a checkpoint after the same step and end; {limit}")
        return True

    def _is_asked_end(self, error: Exception) -> bool:
        return isinstance(error, OtherNodeError) and bool(self._rendezvous and self._rendezvous.is_asked_end(error))

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
        """Start the servers and all ranks of this node for an attempt."""
        os.environ.update(self._servers.start(attempt))
        self._crew.know(self._servers.pids)
        environs = {local: self._environment(attempt, local) for local in range(self._plan.num_local_ranks)}
        ranks = {local: int(environ["RANK"]) for local, environ in environs.items()}
        if self._has_torchruns_logs:
            self._output.begin(list(ranks.values()))
            self._logs = TorchrunLogs(self._config, environs)
            for local, rank in ranks.items():
                for path in self._logs.of_rank(local):
                    self._output.follow(rank, path)
        else:
            self._files.begin(environs)
        self._job.begin(())
        for local, environ in environs.items():
            self._start_rank(local, environ)
        if self._plan.is_warm and self._job.restarts_left > 0:
            self._crew.keep_warm(self._words)

    def _start_rank(self, local_rank: int, environ: dict[str, str]) -> None:
        """Start the process of a rank; only then the rank counts as living: nothing waits for one that could not be started."""
        rank = int(environ["RANK"])
        if self._logs is not None:
            places = [each.get(local_rank) or "" for each in (self._logs.files.stdouts, self._logs.files.stderrs)]
        else:
            places = list(self._files.open(local_rank, environ))
        command = self._with_local_rank(self._command, str(local_rank))
        command = versions.bound_to_numa(command, local_rank, versions.field(self._config, "numa_options"))
        self._error_files[rank] = environ.get("TORCHELASTIC_ERROR_FILE", "")
        with self._signals.held():
            pid = self._crew.start(rank, command, os.environ | environ, *places)
            self._job.living.add(rank)
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
        if job.ranks_know and self._rendezvous is not None and self._rendezvous.must_signal():
            job.signal_after_all()
        for decision in job.turn(time.monotonic()):
            if isinstance(decision, Send):
                self._crew.send(decision.ranks, decision.number)
            elif isinstance(decision, Replace):
                self._replace(decision)
            elif isinstance(decision, Over):
                return decision.outcome
        for rank, code in self._crew.wait(min(0.1, self._config.monitor_interval)).items():
            self._ended(rank, code)
            if code == 0 and job.living and self._rendezvous is not None:
                with contextlib.suppress(RuntimeError):  # the store is gone with node 0, which is noticed elsewhere
                    self._rendezvous.tell_ended(rank)
        if job.is_watching_kernel:
            job.kernel_holds(self._crew.held(), time.monotonic())
        return None

    def _ended(self, rank: int, code: int) -> None:
        """Report to the job that a rank has ended. Only its code says so if another node's agent has asked all ranks to end."""
        job, rendezvous = self._job, self._rendezvous
        assert rendezvous is not None
        if code == ENDED_BY_SIGTERM and not job.failed and rendezvous.was_asked_to_end():
            job.stop(time.monotonic(), ranks_know=True)
        knew = job.ranks_know
        job.ended(rank, code)
        if knew and not job.ranks_know:
            rendezvous.take_back_request()
            what = headline(self._failures({rank: code})[rank], socket.gethostname())
            self._output.say(f"{what}; the others get SIGTERM")

    def _replace(self, lost: Replace) -> None:
        """Kill the children that a failed rank left, and start a new process for the rank while the other ranks run on."""
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
        """Wait until the ranks of this node have ended. The caller must have stopped the job before."""
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

    @override
    def close(self) -> None:
        self._crew.end_all(0.0)
        self._servers.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        super().close()
        if self._has_torchruns_logs and self._plan.elastic.log_dir is None:
            with contextlib.suppress(OSError):  # a folder with logs is kept: rmdir removes an empty one only
                assert self._config.logs_specs is not None
                os.rmdir(str(self._config.logs_specs.root_log_dir))

    # Methods that report how the run ended.

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
        if outcome is Outcome.STOPPED:  # the agent of another node has asked the ranks to save and to end
            elsewhere = rendezvous.give_up("its ranks were asked to save and to end", ENDED_BY_SIGTERM, True)
            self._output.close()
            text = str(elsewhere or "the ranks were asked to save and to end")
            return RunReport(text, host=host, code=ENDED_BY_SIGTERM, is_cause=False)
        failures = self._failures(self._job.failed)
        rank = first(failures)
        failure = failures[rank]
        elsewhere = rendezvous.give_up(headline(failure, host), exit_code(failure.code), failure.is_reaction)
        # Closing the output may wait for its reader without limit, so it follows the report to the other nodes.
        self._output.close()
        failures = self._failures(self._job.failed)
        assert self._attempt is not None
        num_nodes = len(self._attempt.shares)
        done = [rank for rank, code in sorted(self._job.codes.items()) if code == 0]
        text, rank = describe(failures, host, num_nodes, done), first(failures)
        if elsewhere is not None:
            text = f"the first failure was on {elsewhere}\nhere, then:\n{text}"
            return RunReport(text, host=host, code=elsewhere.code, is_cause=False)
        may_be_cause = num_nodes == 1 or not failure.is_reaction
        return RunReport(text, f"rank {rank}", host, exit_code(failures[rank].code), may_be_cause)

    def _first_failure(self) -> str:
        failures = self._failures(self._job.failed)
        return headline(failures[first(failures)], socket.gethostname())

    def _count(self) -> str:
        return f"{self._job.max_restarts - self._job.restarts_left} of at most {self._job.max_restarts} times"

    def _failures(self, codes: Mapping[int, int]) -> dict[int, Failure]:
        """Return a ``Failure`` for each rank that failed, with the rank's last lines."""
        self._output.catch_up()
        found, now = {}, time.monotonic()
        for rank, code in codes.items():
            ended = self._output.traces[rank].ended
            error_file = self._error_files.get(rank, "")
            found[rank] = self._failure(rank, code, self._pids[rank], now if ended is None else ended, error_file)
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
    """Return the number in the value of a variable of torchrun; 0.0 (off) if the value is no number."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


class TorchrunLogs:
    """The log files of one attempt by torchrun's options (``--tee`` ...), and the threads that print new lines of them.

    Args:
        config: the options as torch parsed them.
        environs: the environment variables of each local rank.
    """

    def __init__(self, config: LaunchConfig, environs: dict[int, dict[str, str]]) -> None:
        assert config.logs_specs is not None
        self.files: LogsDest = config.logs_specs.reify(environs)
        # A plug-in for --logs-specs may name files of an earlier attempt or run. Empty them: each rank appends to its files, so
        # that the process that replaces a failed rank keeps the lines of the earlier one.
        for path in filter(None, (*self.files.stdouts.values(), *self.files.stderrs.values())):
            with open(path, "wb"):
                pass
        self._stack = contextlib.ExitStack()
        self._tails: list[TailLog] = []
        prefixes = _prefixes(config, environs)
        for name, teed, shown_on in (
            ("stdout", self.files.tee_stdouts, sys.stdout),
            ("stderr", self.files.tee_stderrs, sys.stderr),
        ):
            self._tail(config.role, teed, shown_on, prefixes)
            filters = versions.field(config, f"duplicate_{name}_filters")
            if filters:
                path = getattr(self.files, f"filtered_{name}")
                copy = self._stack.enter_context(open(path, "w", errors="replace", buffering=1))  # noqa: SIM115
                has_one = _has_one_of(tuple(filters))
                self._tail(config.role, teed, copy, prefixes, log_line_filter=has_one)

    def _tail(self, role: str, files: dict[int, str], shown_on: IO[str], prefixes: Any, **more: Any) -> None:
        self._tails.append(TailLog(role, files, shown_on, prefixes, **more).start())  # type: ignore[arg-type]

    def of_rank(self, local_rank: int) -> list[str]:
        """Return the paths of the files to which this rank's output goes."""
        found = (self.files.stdouts.get(local_rank), self.files.stderrs.get(local_rank))
        return [path for path in found if path]

    def close(self) -> None:
        """Show the remaining lines, and end the threads. All ranks of the attempt must have ended before."""
        for tail in self._tails:
            tail.stop()
        self._stack.close()


def _has_one_of(needles: tuple[str, ...]) -> Any:
    return lambda line: any(needle in line for needle in needles)


def _prefixes(config: LaunchConfig, environs: Mapping[int, Mapping[str, str]]) -> dict[int, str] | None:
    template = config.log_line_prefix_template
    if not template:
        return None
    return {
        local_rank: string.Template(template).safe_substitute(
            role_name=config.role, rank=environ["RANK"], local_rank=local_rank
        )
        for local_rank, environ in environs.items()
    }
