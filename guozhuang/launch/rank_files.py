"""Where the ranks of an attempt write: pipes, terminals and files, and their error files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.output import Output, RankPlaces


@dataclass(frozen=True)
class Shown:
    """What the user asked for.

    Attributes:
        log_folder: where each rank writes its own file; None: its output is shown.
        piped: whether the output comes through pipes; otherwise ranks write where the agent writes.
        local_ranks: whose output is shown; None: everybody's.
        copy_folder: where what comes through the pipes is written too; None: nowhere.
    """

    log_folder: str | None = None
    piped: bool = True
    local_ranks: frozenset[int] | None = None
    copy_folder: str | None = None


class RankFiles(LogsSpecs):
    """Opens the ways from the ranks to ``Output``; for torch elastic too, as the place of its logs.

    Args:
        folder: for pipes and error files.
        output: what reads the pipes.
        shown: what the user asked for.
        is_restart: the first attempt follows others, of other agents.
    """

    def __init__(self, folder: str, output: Output, shown: Shown, is_restart: bool = False) -> None:
        super().__init__(folder)
        self._folder, self._output, self._shown = folder, output, shown
        self._is_restart, self._attempt = is_restart, 0

    @property
    def root_log_dir(self) -> str:
        """The folder for pipes and error files."""
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called before each attempt, with the variables of each local rank; adds to them.

        Raises:
            UsageError: a folder for copies cannot be made.
        """
        self.begin(envs)
        found = LogsDest()
        for local_rank, environ in envs.items():
            found.stdouts[local_rank], found.stderrs[local_rank] = self.open(local_rank, environ)
            found.error_files[local_rank] = environ["TORCHELASTIC_ERROR_FILE"]
        return found

    def begin(self, environs: Mapping[int, Mapping[str, str]]) -> None:
        """An attempt with these local ranks and their variables begins."""
        self._attempt += 1
        self._output.begin([int(environ["RANK"]) for environ in environs.values()])

    def open(self, local_rank: int, environ: dict[str, str]) -> tuple[str, str]:
        """Where a rank of this attempt shall write its two streams; empty: where the agent writes.

        Args:
            local_rank: of the rank.
            environ: its variables; some are added.
        """
        rank, shown = int(environ["RANK"]), self._shown
        folder = os.path.join(self._folder, str(self._attempt), str(rank))
        number = 0
        while os.path.exists(folder):  # of the process that this one replaces
            number += 1
            folder = os.path.join(self._folder, str(self._attempt), f"{rank}.{number}")
        os.makedirs(folder)
        places = RankPlaces("", "", {})
        if shown.piped and shown.log_folder is None:
            is_shown = shown.local_ranks is None or local_rank in shown.local_ranks
            places = self._output.pipes(rank, folder, is_shown, self._copies(rank, int(environ["WORLD_SIZE"])))
        elif shown.log_folder is not None:
            self._output.follow(rank, os.path.join(shown.log_folder, f"rank{rank}.log"))
        environ.update(places.variables)
        environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
        return places.stdout, places.stderr

    def _copies(self, rank: int, size: int) -> str | None:
        """The folder for what a rank prints; empty, but for attempts before this one. None: there are no copies.

        Raises:
            UsageError: it cannot be made, in the first attempt; later that is said, and the run goes on without it.
        """
        if self._shown.copy_folder is None:
            return None
        folder = copies_of(self._shown.copy_folder, rank, size)
        is_first = self._attempt == 1 and not self._is_restart
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
