"""Execute one run of one strategy in fresh processes: start them, watch them with a time limit, end them, collect records."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from guozhuang import strategies
from guozhuang.lab.results import RankRecord, RunFailure
from guozhuang.lab.worker import RankFailure, RunSpec
from guozhuang.launch.crew import Crew, entry
from guozhuang.launch.failures import OUT_OF_MEMORY, how
from guozhuang.launch.request import environment_of_launchers
from guozhuang.launch.signals import SignalledError, Signals
from guozhuang.records import build, write_text

_IMPORT_S = 120.0  # seconds that the warm parent may take for its imports
_GRACE_S = 5.0  # seconds between asking processes to end and killing them
_LOOK_S = 0.5  # seconds between two looks at a run: long, because looking takes time from the measured processes
_CAUSE_CHARACTERS = 1500
_NO_MEMORY = f"; {OUT_OF_MEMORY}: a smaller model, batch or number of ranks needs less"
WHERE_TO_LOOK = "; the log holds the stacks of every rank. Fix: find who waits, or raise --timeout"
_RANK_LOGS = "ranks"  # name of the folder of the ranks' logs, inside the run's folder


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that the command first ends its processes."""
    try:
        with Signals((signal.SIGTERM, signal.SIGHUP)):
            yield
    except SignalledError:
        raise KeyboardInterrupt from None


class Runs:
    """Executes the runs of a comparison. Where possible, their processes are forks of a warm parent, see [Note: warm parent] in
    launch/warm.py; the first run waits until the warm parent has imported everything: imports would disturb the measurement.

    Args:
        folder: a folder that is removed at the end of the comparison.
        threads_per_rank: compute threads of a rank.
        modules: the modules that the workload needs.
        python_path: the folders that ``guozhuang run`` adds to the ranks' PYTHONPATH.

    Attributes:
        opening_s: the seconds that the imports of the warm parent took, in which the first run waited.
    """

    opening_s = 0.0

    def __init__(self, folder: Path, threads_per_rank: int, modules: Sequence[str], python_path: Sequence[str]) -> None:
        self._folder, self._modules = folder, modules
        self._environ = environment_of_launchers(threads_per_rank, python_path)
        self._crew: Crew | None = None

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._crew is not None:
            self._crew.close()

    def execute(self, spec: RunSpec, log: Path, tick: Callable[[int], None]) -> tuple[RankRecord, ...] | RunFailure:
        """Execute a run in fresh processes, and wait for its end.

        Args:
            spec: the run; its folder exists and is empty.
            log: the file for all output of the processes.
            tick: called every half second with the number of steps that rank 0 has done.

        Returns:
            A record per rank (none for a timeline run), or the failure. No process of the run is left in any case.
        """
        folder = Path(spec.folder)
        spec_file = folder / "spec.json"
        (folder / "progress").write_bytes(bytes(8))
        write_text(spec_file, json.dumps(asdict(spec)))
        crew = self._crew or self._open()
        code = None
        try:
            crew.start(0, [*entry(), *command(spec, spec_file)], self._environ, str(log), str(log))
            code = _watch(crew, folder, spec.timeout_s, tick)
            if code is None:
                _ask_for_stacks(folder)
        finally:
            if code is None:
                crew.send([0], signal.SIGTERM)
                crew.wait(_GRACE_S)
            crew.end_all(0.0)
            crew.wait(0.0)
        if code == 0:
            return _collect(spec)
        cause = first_cause(folder, log, code, spec.timeout_s)
        _append_ranks(log, folder)
        return RunFailure(cause, str(log), 0)

    def _open(self) -> Crew:
        began = time.monotonic()
        self._crew = crew = Crew(str(self._folder))
        # The first optimizer of a process imports torch._dynamo, which takes seconds.
        modules = [*self._modules, "torch._dynamo", "guozhuang.lab.worker", "guozhuang.launch.local_run"]
        crew.warm_up([sys.executable, "-u", "-m", "guozhuang"], self._environ, modules, _IMPORT_S)
        self.opening_s = time.monotonic() - began
        return crew


def command(spec: RunSpec, spec_file: Path) -> list[str]:
    """Return the command line of a run: one process for a strategy of one process or a rank of a fake world, else ranks
    under the launcher."""
    python = [sys.executable, "-u"]
    worker = ["-m", "guozhuang.lab.worker", str(spec_file)]
    if strategies.get(spec.strategy).one_process or spec.purpose == "trace":
        return [*python, *worker]
    # Each rank writes to a file of its own, so that the launcher need not spend time on copying output.
    options = ["--nproc-per-node", str(spec.num_ranks), "--log-dir", str(Path(spec.folder) / _RANK_LOGS)]
    options += ["--strategy", spec.strategy, "--groups", str(spec.num_groups)]
    options += ["--backend", spec.backend] if spec.backend is not None else []
    options += ["--layout", spec.layout] if spec.layout is not None else []
    options += ["--bucket-cap-mb", f"{spec.bucket_cap_mb:g}"] if spec.bucket_cap_mb is not None else []
    return [*python, "-m", "guozhuang", "run", *options, *worker]


def first_cause(folder: Path, log: Path, code: int | None, timeout_s: float) -> str:
    """Return why a run failed: the earliest error, because later errors on other ranks are its consequences.

    Args:
        folder: the run's folder.
        log: the file with the output of its processes.
        code: the exit code; None if the time ran out.
        timeout_s: the time limit.
    """
    failures = [build(RankFailure, json.loads(path.read_text())) for path in folder.glob("error-*.json")]
    text = log.read_text(errors="replace") if log.exists() else ""
    # A rank that a signal killed left no error file; the errors of other ranks only say that they lost that rank.
    ended = re.search(r"^guozhuang run: ((rank \d+) failed first: signal .*)$", text, re.MULTILINE)
    if ended and all(one.who != ended[2] for one in failures):
        return ended[1]
    if failures:
        first = min(failures, key=lambda one: one.time)
        return f"{first.who}: {first.text}"[:_CAUSE_CHARACTERS]
    if code is None:
        return f"no end after {timeout_s:g} s{WHERE_TO_LOOK}"
    if code < 0:
        return f"a rank was ended by {how(code)}{_NO_MEMORY * (code == -signal.SIGKILL)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (f"exit code {code}: " + " | ".join(lines[-3:]))[:_CAUSE_CHARACTERS]


def _watch(crew: Crew, folder: Path, timeout_s: float, tick: Callable[[int], None]) -> int | None:
    """Wait until the run's process ends, and call ``tick`` meanwhile; return the exit code, None if the time limit passed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended = crew.wait(min(_LOOK_S, max(0.01, deadline - time.monotonic())))
        if ended:
            return ended[0]
        tick(struct.unpack("=q", (folder / "progress").read_bytes())[0])
    return None


def _ask_for_stacks(folder: Path) -> None:
    for path in folder.glob("pid-*"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            psutil.Process(int(path.read_text())).send_signal(signal.SIGUSR1)
    time.sleep(2.0)  # wait until the ranks have written their stacks: on a busy machine signal handlers may run late


def _append_ranks(log: Path, folder: Path) -> None:
    """Append the output of each rank, which is in a file of its own, to the log of a run that failed."""
    with log.open("ab") as out:
        for path in sorted((folder / _RANK_LOGS).glob("rank*.log")):
            out.write(f"\n{path.stem}:\n".encode() + path.read_bytes())


def _collect(spec: RunSpec) -> tuple[RankRecord, ...]:
    paths = sorted(Path(spec.folder).glob("rank-*.json"))
    return tuple(build(RankRecord, json.loads(path.read_text())) for path in paths)
