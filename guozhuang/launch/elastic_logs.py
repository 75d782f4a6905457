"""Where the ranks of an attempt write, in the form in which torch elastic asks for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.output import Output, Places

if TYPE_CHECKING:
    from guozhuang.launch.elastic import Run


class Logs(LogsSpecs):
    """Our pipes, or where the agent writes (then rank.py may send them to a file).

    Args:
        run: whose ranks they are.
        folder: for pipes and error files.
        output: what reads the pipes.
        log_folder: where each rank writes its file; None: its output is shown.
        piped: whether the output comes through pipes.
        shown: the local ranks whose output is shown; None: all.
        copy_folder: where what comes through the pipes is written too; None: nowhere.
    """

    def __init__(
        self,
        run: Run,
        folder: str,
        output: Output,
        log_folder: str | None,
        piped: bool,
        shown: set[int] | None,
        copy_folder: str | None = None,
    ) -> None:
        super().__init__(folder)
        self._run = run
        self._folder, self._output, self._piped, self._shown = folder, output, piped, shown
        self._log_folder, self._copy_folder = log_folder, copy_folder
        self._attempt = 0

    @property
    def root_log_dir(self) -> str:
        """The folder for pipes and error files."""
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
            if self._run.outer.max_restarts is not None:
                envs[local_rank]["TORCHELASTIC_MAX_RESTARTS"] = str(self._run.outer.max_restarts)
            folder = os.path.join(self._folder, str(self._attempt), str(rank))
            os.makedirs(folder)
            places = Places("", "", {})
            if self._piped:
                copies = self._copies(rank, int(envs[local_rank]["WORLD_SIZE"]))
                places = self._output.pipes(rank, folder, self._shown is None or local_rank in self._shown, copies)
            elif self._log_folder is not None:
                self._output.follow(rank, os.path.join(self._log_folder, f"rank{rank}.log"))
            found.stdouts[local_rank], found.stderrs[local_rank] = places.stdout, places.stderr
            envs[local_rank].update(places.variables)
            found.error_files[local_rank] = os.path.join(folder, "error.json")
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = found.error_files[local_rank]
        return found

    def _copies(self, rank: int, size: int) -> str | None:
        """The folder for what a rank prints; empty, but for attempts before this one. None: there are no copies.

        Raises:
            UsageError: it cannot be made, in the first attempt; later that is said, and the run goes on without it.
        """
        if self._copy_folder is None:
            return None
        folder = copies_of(self._copy_folder, rank, size)
        is_first = self._attempt == 1 and not self._run.attempt
        try:
            os.makedirs(folder, exist_ok=True)
            for name in ("stdout", "stderr"):
                with open(os.path.join(folder, name), "wb" if is_first else "ab"):
                    pass  # without what an earlier run left
        except OSError as error:
            what = f"what rank {rank} prints cannot be written to {error.filename}: {error.strerror}"
            if is_first:
                raise UsageError(explain(what, fix="choose another folder for copies")) from error
            self._output.say(what)
            return None
        return folder


def copies_of(folder: str, rank: int, size: int) -> str:
    """Where in a folder the copies of what a rank prints lie: names of one length, so that they sort as the ranks do."""
    return os.path.join(folder, f"rank.{rank:0{len(str(size - 1))}d}")
