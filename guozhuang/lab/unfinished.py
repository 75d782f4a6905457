"""Keeps the finished runs of a comparison until all are made, so that one that was interrupted goes on where it stopped.

In the folder ``unfinished`` of the report: ``comparison.json`` says what must be the same for a run to count, and each finished
run is a file. Every file appears complete or not at all, so the comparison may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from guozhuang import records
from guozhuang.errors import UsageError, explain
from guozhuang.lab.contender import Contender
from guozhuang.lab.results import Difference, MeasuredRound

_SCHEMA_VERSION = 2


@contextlib.contextmanager
def alone_in(folder: Path, what: str = "comparison") -> Iterator[None]:
    """Let no other comparison write to a folder inside this context: it would remove these runs, or take them for its own.

    Args:
        folder: the folder.
        what: what the command is called in the error.

    Raises:
        UsageError: another one, perhaps of another process, is in this context.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for its end, or give this one another --out"
            raise UsageError(explain(f"another {what} writes to this folder now", value=str(folder), fix=fix)) from None
        except OSError:  # a network file system without such locks
            pass
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended well: a round's measurements, or a timeline.

    Attributes:
        contender: the row.
        number: the number of the round, from 1; 0 for a timeline.
        duration_s: how long the run took, start and evaluation included.
        measured: the measurements; None for a timeline.
        trace: the path of the timeline; None for a round.
        schema_version: the form of the file.
    """

    contender: Contender
    number: int
    duration_s: float
    measured: MeasuredRound | None
    trace: str | None = None
    schema_version: int = _SCHEMA_VERSION


class Unfinished:
    """The finished runs of a comparison in a folder.

    Args:
        folder: created if missing.
        must_match: what must be the same for a finished run to count in this comparison, by its name for the user.
        is_fresh: whether to remove what an earlier comparison left.

    Attributes:
        differs: what is not the same as in the comparison that left runs here, as "steps was 50, is 100"; those were removed.
        problem: why a run could not be kept, such as a full disk; empty if all were.
    """

    def __init__(self, folder: Path, must_match: Mapping[str, str], is_fresh: bool) -> None:
        self.folder = folder
        before = self._read() if not is_fresh else {}
        self.differs = records.differences(before, must_match) if before else ()
        if self.differs or not before:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        records.write_text(folder / "comparison.json", records.to_json({"must_match": dict(must_match)}))
        found = filter(None, map(_run_of, folder.glob("run-*.json")))
        self._runs = {(run.contender, run.number): run for run in found}
        self.problem = ""

    def find(self, contender: Contender, number: int) -> FinishedRun | None:
        """Return the finished run of this round (0: the timeline), if it was made with the same settings of the row."""
        return self._runs.get((contender, number))

    def keep(self, run: FinishedRun, weights: Path | None = None) -> None:
        """Keep a finished run, and before it the file of weights that belongs to it; if that fails, set ``problem``."""
        name, kind = run.contender.name, f"round{run.number}" if run.number else "timeline"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if weights is not None:
                self._keep_weights(weights, self.weights(name))
            records.write_text(self.folder / f"run-{kind}-{name}.json", records.to_json(asdict(run)))
        except OSError as error:
            self.problem = self.problem or f"{error.strerror}: {self.folder}"
            return
        self._runs[run.contender, run.number] = run

    def _keep_weights(self, weights: Path, path: Path) -> None:
        copy = path.with_suffix(".part")
        try:
            shutil.copyfile(weights, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())  # else a power cut could leave an empty file under the final name
            os.replace(copy, path)
        finally:
            copy.unlink(missing_ok=True)

    def weights(self, name: str) -> Path:
        """Return the path of the weights that a row's first round ended with; no such file if there are none."""
        return self.folder / f"weights-{name}.pt"

    def differences(self) -> dict[str, Difference]:
        """Return the differences of weights that were kept, by the names of rows."""
        path = self.folder / "differences.json"
        try:
            found = json.loads(path.read_text())
            return {name: records.build(Difference, each) for name, each in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or an empty file after a power cut
            return {}

    def keep_differences(self, found: Mapping[str, Difference], but: str) -> None:
        """Keep the differences of weights, and remove the weights but those of one row, to which later ones are compared."""
        document = {name: asdict(each) for name, each in found.items()}
        try:
            records.write_text(self.folder / "differences.json", records.to_json(document))
        except OSError as error:
            self.problem = self.problem or f"{error.strerror}: {self.folder}"
            return
        for path in self.folder.glob("weights-*.pt"):
            if path != self.weights(but):
                path.unlink()

    def remove(self) -> None:
        """Remove the folder: the comparison has ended, or nothing was finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._runs)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads((self.folder / "comparison.json").read_text())["must_match"]
            return {str(key): str(value) for key, value in found.items()}
        except (OSError, ValueError, KeyError, AttributeError):
            return {}


def _run_of(path: Path) -> FinishedRun | None:
    """Return the run that a file holds; None for one that another version wrote."""
    try:
        return records.from_json(FinishedRun, path.read_text(), _SCHEMA_VERSION, path.name, "")
    except UsageError:
        return None
