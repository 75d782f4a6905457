"""Run ranks with one of torchrun's rendezvous backends (``--rdzv-backend``), through torch elastic's public interface.

Torch elastic then starts, watches and restarts the ranks by its own rules. We add: output and variables of ranks as in other
runs, a secret for the ``c10d`` store if one is set, and the guard, which leaves no process when the agent is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.failures import describe, exit_code, first
from guozhuang.launch.node_run import NodeRun
from guozhuang.launch.rank_files import RankFiles
from guozhuang.launch.rendezvous.endpoint import open_for_torch
from guozhuang.launch.request import RunReport
from guozhuang.launch.signals import SignalledError
from guozhuang.world import versions

# Settings of the c10d rendezvous with which the other nodes notice a lost node and restart within ten seconds instead of 45.
_FASTER = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 2}
# Environment variable that is set because otherwise a node that joins later waits for an address that no node writes.
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


class TorchElasticRun(NodeRun):
    """The run of this node's ranks by torch elastic's agent, which starts, watches and restarts them."""

    def run(self) -> RunReport:
        """Run torch elastic's agent to its end; return how the run ended.

        Raises:
            UsageError: the rendezvous backend, an address or an option cannot be used.
            WorldError: the rendezvous of the nodes failed.
            SignalledError: the agent got a signal that ends the run; its ranks have ended.
        """
        config, kept = self._config, contextlib.ExitStack()
        asked_s = self._plan.elastic.shutdown_timeout
        if asked_s is not None and versions.field(config, "shutdown_timeout") is None:
            what = "torch elastic's agent knows no --shutdown-timeout in this version of PyTorch"
            raise UsageError(explain(what, value=asked_s, fix="leave it out, or --rdzv-backend"))
        with self._signals, kept:  # our signal handlers serve until torch elastic installs its own
            if not self._has_torchruns_logs:
                config.logs_specs = RankFiles(self._folder, self._output, self._shown(may_inherit=False))
            if config.rdzv_backend == "c10d" and config.rdzv_configs.get("store_type", "tcp") == "tcp":
                kept.enter_context(contextlib.closing(open_for_torch(self._plan, config)))
                os.environ[_NOT_SHARED] = "1"
            if config.rdzv_backend == "c10d":
                config.rdzv_configs = _FASTER | config.rdzv_configs
            try:
                with _silence(), _explained(config):
                    report = self._launch()
                # While signals are handled, because the reader of our output may take nothing for any time.
                self._crew.end_all(0.0)
                self._output.close()
                return report
            except SignalException as error:
                self._signals.is_signalled = True
                raise SignalledError(int(error.sigval)) from error
            finally:
                self._crew.end_all(0.0)

    def _launch(self) -> RunReport:
        host = socket.gethostname()
        # Torch elastic replaces "${local_rank}" in any argument by the local rank, and each "$$" by "$".
        plain = [word.replace("$", "$$") for word in self._command]
        program, *arguments = self._with_local_rank(plain, macros.local_rank)
        try:
            elastic_launch(self._config, program)(*arguments)
        except ChildFailedError as error:
            self._output.catch_up()
            # Torch gives the time of a failure by the wall clock; lines have that of the monotonic clock: convert the former.
            offset_s = time.monotonic() - time.time()
            failures = {
                rank: self._failure(rank, each.exitcode, each.pid, offset_s + float(each.timestamp), each.error_file)
                for rank, each in error.failures.items()
            }
            rank = first(failures)
            text = describe(failures, host, self._config.max_nodes)
            return RunReport(text, f"rank {rank}", host, exit_code(failures[rank].code))
        return RunReport(host=host)


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
    import torch.distributed.launcher.api  # both modules set their loggers' level at import  # noqa: F401

    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
