"""Runs whose nodes use one of torchrun's rendezvous backends (``--rdzv-backend``), through torch elastic's public interface.

Torch elastic then starts, watches and restarts the ranks by its own rules. We add: output and variables of ranks as in other
runs, a secret for the ``c10d`` store if one is set, and that no process is left when the agent is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch import guard, tracebacks
from guozhuang.launch.console.output import Output
from guozhuang.launch.crew import Crew, entry
from guozhuang.launch.failures import Failure, describe, exit_code, first
from guozhuang.launch.options import command, torchrun
from guozhuang.launch.options.plan import Plan
from guozhuang.launch.rank_files import RankFiles, Shown, hang_in
from guozhuang.launch.rendezvous.endpoint import open_for_torch
from guozhuang.launch.request import Request, RunReport
from guozhuang.launch.signals import SignalledError, Signals
from guozhuang.net.meet import WorldStore

_OUTPUT_S = 5.0
# Settings by which the other nodes notice a lost node and restart within ten seconds instead of 45.
_FASTER = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 2}
# Must be set: otherwise a node that joins later waits for an address that no node writes, and all agents end.
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Loggers of torch elastic that are silenced unless LOGLEVEL or TORCH_LOGS is set: our report says the same in few lines.
_SILENT = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


def run(plan: Plan, request: Request) -> RunReport:
    """Run torch elastic's agent to its end; return how the run ended.

    Raises:
        UsageError: the rendezvous backend or an address cannot be used.
        WorldError: the rendezvous of the nodes failed.
        SignalledError: the agent got a signal that ends the run; its ranks have ended.
    """
    # For the time until torch elastic installs its own handlers.
    with Signals(torchrun.signals_of(plan.elastic.signals_to_handle)):
        return _run(plan, request)


def _run(plan: Plan, request: Request) -> RunReport:
    options, folder = plan.elastic, tempfile.mkdtemp(prefix="guozhuang-run-")
    crew, output = Crew(folder), Output(terminals=request.terminals, timestamps=plan.timestamps)
    os.environ[guard.VARIABLE] = crew.run
    kept: WorldStore | None = None
    limit_s: float | None = None
    try:
        is_torchruns = torchrun.keeps_torchs_logs(options)
        if not is_torchruns:
            options.log_dir = folder
        config, words = command.read(options)
        if not is_torchruns:
            ranks = options.local_ranks_filter
            shown = frozenset(int(rank) for rank in ranks.split(",")) if ranks else None
            config.logs_specs = RankFiles(folder, output, Shown(plan.log_folder, True, shown, plan.copy_folder))
        if config.rdzv_backend == "c10d" and config.rdzv_configs.get("store_type", "tcp") == "tcp":
            kept = open_for_torch(plan, config)
            os.environ[_NOT_SHARED] = "1"
        if config.rdzv_backend == "c10d":
            config.rdzv_configs = _FASTER | config.rdzv_configs
        with _silence(), _explained(config):
            return _launch(config, _of_a_rank(plan, words), output)
    except (SignalException, SignalledError) as error:
        limit_s = _OUTPUT_S
        raise error if isinstance(error, SignalledError) else SignalledError(int(error.sigval)) from error
    finally:
        crew.end_all(0.0)
        output.close(limit_s)
        if kept is not None:
            kept.close()
        crew.close()
        shutil.rmtree(folder, ignore_errors=True)


def _of_a_rank(plan: Plan, words: list[str]) -> list[str]:
    # Torch elastic replaces "${local_rank}" in any argument by the local rank, and each "$$" by "$".
    plain = [word.replace("$", "$$") for word in words]
    return [
        *(word.replace("$", "$$") for word in entry(plan.log_folder or "")),
        *command.with_local_rank(plain, plan.elastic, plan.pass_local_rank, macros.local_rank),
    ]


def _launch(config: LaunchConfig, words: list[str], output: Output) -> RunReport:
    host = socket.gethostname()
    try:
        elastic_launch(config, words[0])(*words[1:])
    except ChildFailedError as error:
        output.catch_up()
        failures = {rank: _failure(rank, found, output) for rank, found in error.failures.items()}
        rank = first(failures)
        text = describe(failures, host, config.max_nodes)
        return RunReport(text, f"rank {rank}", host, exit_code(failures[rank].code))
    return RunReport(host=host)


def _failure(rank: int, found: Any, output: Output) -> Failure:
    seen = list(output.traces[rank].lines) if rank in output.traces else []
    lines = [tracebacks.plain(line) for _, line in seen]
    # Torch gives the time of the failure by the wall clock; it is converted to the monotonic clock of the lines.
    ended = time.monotonic() - (time.time() - float(found.timestamp))
    return Failure(rank, found.exitcode, found.pid, ended, lines, [when for when, _ in seen], hang_in(found.error_file))


@contextlib.contextmanager
def _explained(config: LaunchConfig) -> Iterator[None]:
    name = config.rdzv_backend
    try:
        yield
    except (RendezvousError, ConnectionError) as error:
        fix = "look at the agents of the other nodes, at --rdzv-endpoint and at --rdzv-conf"
        raise WorldError(explain(f"the nodes did not meet by --rdzv-backend {name}: {error}", fix=fix)) from error
    except (ValueError, TypeError, ImportError) as error:
        if isinstance(error, UsageError):
            raise
        what = f"--rdzv-backend {name} cannot be used: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise UsageError(explain(what, fix="choose c10d or static, or install what it needs")) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silence torch elastic's loggers inside the ``with`` block; our report says the same in fewer lines."""
    loggers = [] if {"LOGLEVEL", "TORCH_LOGS"} & os.environ.keys() else [logging.getLogger(name) for name in _SILENT]
    import torch.distributed.elastic.agent.server.api
    import torch.distributed.launcher.api  # they set their level when they are imported  # noqa: F401

    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
