"""The base of a node's run, with any rendezvous: its folder, ``Crew``, output, signal handlers, and the command of a rank."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, run_script_path

from guozhuang.errors import UsageError, explain
from guozhuang.launch import guard, tracebacks
from guozhuang.launch.console.output import Output
from guozhuang.launch.crew import Crew, entry
from guozhuang.launch.failures import Failure
from guozhuang.launch.options import torchrun as torchrun_options
from guozhuang.launch.options.plan import Plan
from guozhuang.launch.rank_files import Shown, hang_in
from guozhuang.launch.request import Request
from guozhuang.launch.signals import Signals
from guozhuang.world import versions

_OUTPUT_S = 5.0  # seconds; how long after a signal the remaining output may wait for its reader
# Runs the script for --run-path in a process that we start: torch would use one that does not end with the agent.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


class NodeRun:
    """The base class of the runs of one node. The caller must call ``close``, also after an error.

    Args:
        plan: the checked options of the command line.
        request: options of the program that started this agent.

    Raises:
        UsageError: torch refuses an option.
    """

    def __init__(self, plan: Plan, request: Request) -> None:
        self._plan, self._request = plan, request
        self._folder = tempfile.mkdtemp(prefix="guozhuang-run-")
        self._has_torchruns_logs = torchrun_options.keeps_torchs_logs(plan.elastic)
        if not self._has_torchruns_logs:
            plan.elastic.log_dir = self._folder
        try:
            self._config, self._words = self._read()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._crew = Crew(self._folder)
        os.environ[guard.VARIABLE] = self._crew.run
        self._output = Output(terminals=request.terminals, timestamps=plan.timestamps)
        self._signals = Signals(torchrun_options.signals_of(plan.elastic.signals_to_handle))

    def _read(self) -> tuple[LaunchConfig, list[str]]:
        """Let torch parse the options; return torch's configuration, and the program to start with its arguments."""
        program: Callable[..., object] | str
        # Torch remarks on an address that is not used, which nobody has given: it has a default.
        remarks = logging.getLogger("torch.distributed.run")
        level = remarks.level
        remarks.setLevel(logging.ERROR)
        try:
            config, program, arguments = config_from_args(self._plan.elastic)
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            what = f"torch elastic refused the options: {error}"
            raise UsageError(explain(what, fix="see `guozhuang run --help`")) from error
        finally:
            remarks.setLevel(level)
        if program is run_script_path:
            return config, [sys.executable, "-u", "-c", _RUN_PATH, *arguments]
        assert isinstance(program, str)
        return config, [program, *arguments]

    @property
    def _command(self) -> list[str]:
        """The command that starts a rank, without an option for the local rank."""
        return [*entry(), *self._words]

    def _with_local_rank(self, command: Sequence[str], local_rank: str) -> list[str]:
        """Return a command with the local rank as an option of the script, if ``--pass-local-rank`` asks for that.

        Args:
            command: as ``_command``.
            local_rank: the value; replaced by 0 with --virtual-local-rank, where each rank sees only its own device.
        """
        plan = self._plan
        if plan.pass_local_rank is None:
            return list(command)
        number = "0" if versions.field(plan.elastic, "virtual_local_rank") else local_rank
        at = len(command) - len(plan.elastic.training_script_args)
        return [*command[:at], f"{plan.pass_local_rank}={number}", *command[at:]]

    def _shown(self, *, may_inherit: bool) -> Shown:
        """Return the user's options on output; ``may_inherit``: the only rank of a run may inherit the agent's streams."""
        plan, filtered = self._plan, self._plan.elastic.local_ranks_filter
        ranks = frozenset(int(rank) for rank in filtered.split(",")) if filtered else None
        is_alone = plan.num_local_ranks == 1 and self._config.max_nodes == 1
        is_plain = plan.copy_folder is None and not plan.timestamps and ranks is None
        is_piped = not (may_inherit and is_alone and is_plain)
        return Shown(plan.log_folder, is_piped, ranks, plan.copy_folder, self._request.copy_prefix)

    def _failure(self, rank: int, code: int, pid: int, ended: float, error_file: str) -> Failure:
        """Return the ``Failure`` of a rank that ended at ``ended`` (of the monotonic clock), with its last lines."""
        seen = list(self._output.traces[rank].lines) if rank in self._output.traces else []
        lines = [tracebacks.plain(line) for _, line in seen]
        return Failure(rank, code, pid, ended, lines, [when for when, _ in seen], hang_in(error_file))

    def close(self) -> None:
        """Kill the remaining processes of the run, show their remaining output, and remove the temporary folder."""
        self._crew.end_all(0.0)
        # After a signal the agent does not wait long for the reader of its output.
        self._output.close(_OUTPUT_S if self._signals.is_signalled else None)
        self._crew.close()
        shutil.rmtree(self._folder, ignore_errors=True)
