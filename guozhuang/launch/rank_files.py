"""Make the pipes, terminals and files that the ranks of an attempt write their output and errors to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.copies import FULL
from guozhuang.launch.console.output import Output, RankPlaces


@dataclass(frozen=True)
class Shown:
    """The user's options on the output of ranks: shown or in files, of which ranks, with copies or not.

    Attributes:
        log_folder: folder where each rank has its own log file; None: the output is shown instead.
        piped: whether ranks write into pipes that the agent reads; otherwise they inherit the agent's streams.
        local_ranks: the local ranks whose output is shown; None: all.
        copy_folder: folder where the agent writes a copy of the output that it reads from the pipes; None: no copies.
        copy_prefix: as in ``Request``.
    """

    log_folder: str | None = None
    piped: bool = True
    local_ranks: frozenset[int] | None = None
    copy_folder: str | None = None
    copy_prefix: str = ""


class RankFiles(LogsSpecs):
    """Opens the pipes, terminals and log files between the ranks and ``Output``. Torch elastic uses it as its ``LogsSpecs``.

    Args:
        folder: folder for pipes and error files.
        output: the thread that reads the pipes.
        shown: the user's options.
        is_restart: whether earlier agents already ran attempts of this run.
    """

    def __init__(self, folder: str, output: Output, shown: Shown, is_restart: bool = False) -> None:
        super().__init__(folder)
        self._folder, self._output, self._shown = folder, output, shown
        self._is_restart, self._attempt = is_restart, 0

    @property
    def root_log_dir(self) -> str:
        """Return the folder for pipes and error files."""
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the files of all ranks, and add variables to ``envs``; torch elastic calls this before each attempt.

        Raises:
            UsageError: a folder for copies cannot be created.
        """
        self.begin(envs)
        found = LogsDest()
        for local_rank, environ in envs.items():
            found.stdouts[local_rank], found.stderrs[local_rank] = self.open(local_rank, environ)
            found.error_files[local_rank] = environ["TORCHELASTIC_ERROR_FILE"]
        return found

    def begin(self, environs: Mapping[int, Mapping[str, str]]) -> None:
        """Begin the next attempt, with these local ranks (number -> environment variables), and reset ``Output`` for it."""
        self._attempt += 1
        self._output.begin([int(environ["RANK"]) for environ in environs.values()])

    def open(self, local_rank: int, environ: dict[str, str]) -> tuple[str, str]:
        """Open the output of a rank; return the paths for stdout and stderr; an empty path: inherit the agent's stream.

        Args:
            local_rank: the local rank.
            environ: its environment variables; some are added.
        """
        rank, shown = int(environ["RANK"]), self._shown
        folder = os.path.join(self._folder, str(self._attempt), str(rank))
        number = 0
        while os.path.exists(folder):  # an earlier process of this rank, which failed and is replaced, used the folder
            number += 1
            folder = os.path.join(self._folder, str(self._attempt), f"{rank}.{number}")
        os.makedirs(folder)
        places = RankPlaces("", "", {})
        if shown.piped and shown.log_folder is None:
            is_shown = shown.local_ranks is None or local_rank in shown.local_ranks
            prefix = shown.copy_prefix.format_map(environ)
            copies = self._copies(rank, int(environ["WORLD_SIZE"]), prefix, is_replaced=number > 0)
            places = self._output.pipes(rank, folder, is_shown, copies, copy_prefix=prefix)
        elif shown.log_folder is not None:
            log = os.path.join(shown.log_folder, f"rank{rank}.log")
            if self._attempt == 1:
                self._check_log(log)
            title = f"--- started anew, attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}\n"
            places = self._output.pipes(rank, folder, shown=False, log=log, title=title)
        environ.update(places.variables)
        environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
        return places.stdout, places.stderr

    def _check_log(self, path: str) -> None:
        """Raise UsageError unless a log file can be opened; a full disk must not keep a run from training."""
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            if error.errno not in FULL:
                what = f"the output of a rank cannot be written to {path}: {error.strerror}"
                raise UsageError(explain(what, fix="choose another --log-dir")) from error

    def _copies(self, rank: int, size: int, prefix: str, is_replaced: bool) -> str | None:
        """Create the folder for copies of a rank's output; the first process of a rank empties them. None: there are no copies.

        Raises:
            UsageError: the folder cannot be created in the first attempt; in later ones the run continues without copies.
        """
        if self._shown.copy_folder is None:
            return None
        folder = self._shown.copy_folder if prefix else copies_of(self._shown.copy_folder, rank, size)
        is_first = self._attempt == 1 and not (self._is_restart or is_replaced)
        try:
            open_copies(folder, is_first, prefix)
        except OSError as error:
            what = f"what rank {rank} prints cannot be written to {error.filename}: {error.strerror}"
            if is_first:
                raise UsageError(explain(what, fix="choose another folder for copies")) from error
            self._output.say(what)
            return None
        return folder


def open_copies(folder: str, is_first: bool, prefix: str = "") -> None:
    """Make the folder for copies of a rank's output, with its files.

    Args:
        folder: the folder.
        is_first: whether to empty the files, which an earlier run may have left.
        prefix: what the names of the files begin with.

    Raises:
        OSError: a folder or file cannot be made; the error names it.
    """
    os.makedirs(folder, exist_ok=True)
    for name in ("stdout", "stderr"):
        with open(os.path.join(folder, prefix + name), "wb" if is_first else "ab"):
            pass


def hang_in(error_file: str) -> str:
    """Return the line that names the ranks that hung, from the error file of a rank that ``--hang-timeout`` ended; else ""."""
    try:
        with open(error_file) as file:
            return str(json.load(file).get("hang", ""))
    except (OSError, ValueError, AttributeError):
        return ""  # the rank wrote no error file, or another program wrote one in another format


def copies_of(folder: str, rank: int, size: int) -> str:
    """Return the folder for copies of a rank's output, as in ``rank.03``: padded with zeros, so that names sort by rank."""
    return os.path.join(folder, f"rank.{rank:0{len(str(size - 1))}d}")
