"""``guozhuang compare``: run one workload under several strategies, each in fresh processes, in alternating rounds."""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil
import torch

from guozhuang import strategies, timeline, units
from guozhuang.lab.contender import Contender
from guozhuang.lab.measure import difference
from guozhuang.lab.plan import FEWEST_ROUNDS, ComparisonPlan, notes_of, plan_of
from guozhuang.lab.results import (
    Difference,
    Machine,
    MeasuredRound,
    RankRecord,
    Results,
    RunFailure,
    StrategyRow,
    summarize_round,
    to_json,
)
from guozhuang.lab.runs import Runs, ended_by_signals, new_folder
from guozhuang.lab.verdict import SETTLED, judge, settled, short
from guozhuang.lab.worker import RunSpec
from guozhuang.world.machine import processor_name, usable_cores

if TYPE_CHECKING:
    from rich.console import Console

_TIMELINE_STEPS = 10


def run(namespace: argparse.Namespace, python_path: Sequence[str] = ()) -> int:
    """Run the comparison that the command line asks for: measure all strategies, write the report, print the verdict.

    Args:
        namespace: the parsed options.
        python_path: the folders that ``guozhuang run`` adds to the ranks' PYTHONPATH, relative to this package.

    Returns:
        0; 1 if no strategy finished; 130 if interrupted. No process is left behind in any case.

    Raises:
        UsageError: an option cannot work; nothing was started.
    """
    from rich.console import Console

    from guozhuang.lab import report, table

    started, imported = time.monotonic(), set(sys.modules)
    progress, printer = Console(stderr=True), Console()
    try:
        with ended_by_signals(), tempfile.TemporaryDirectory(prefix="guozhuang-") as scratch:
            plan, details = plan_of(namespace, Path(scratch), progress)
            busy = busy_share()  # of other programs: measured before the comparison itself computes anything
            num_runs = len(plan.names) * (plan.settings.num_rounds + (plan.timeline is not None))
            shutil.rmtree(plan.out / "logs", ignore_errors=True)  # remove the logs of an earlier comparison
            # Modules that loading the workload has imported; the warm parent imports them too.
            modules = [name for name in sys.modules if name not in imported and not name.startswith("torch.")]
            with (
                Runs(Path(scratch), plan.settings.threads_per_rank, modules, python_path) as runs,
                Reporter(progress, num_runs) as reporter,
            ):
                rows, notes = _measure(plan, runs, reporter)
    except KeyboardInterrupt:
        progress.print("Interrupted: every process was ended, and nothing was written.")
        return 130
    results = Results(
        created=datetime.now(UTC).astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        command=shlex.join(["guozhuang", *sys.argv[1:]]),
        workload=plan.workload,
        workload_details=details,
        settings=replace(plan.settings, num_rounds=max((len(row.rounds) for row in rows), default=0) or 1),
        machine=describe(),
        rows=rows,
        notes=(*notes_of(plan, busy), *notes),
        duration_s=time.monotonic() - started,
    )
    path = report.write(results, plan.out)
    if namespace.json:
        sys.stdout.write(to_json(results) + "\n")
    else:
        table.show(printer, results, judge(results), path)
    return 0 if any(row.ok for row in rows) else 1


@dataclass
class _Found:
    """The results of the runs so far: rounds, failures, weight differences and traces of each strategy."""

    rounds: dict[str, list[MeasuredRound]]
    failures: dict[str, RunFailure] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _measure(plan: ComparisonPlan, runs: Runs, reporter: Reporter) -> tuple[tuple[StrategyRow, ...], tuple[str, ...]]:
    """Execute all runs; return a row per strategy, and notes for the reader of the report."""
    found = _Found({name: [] for name in plan.names})
    for number in range(1, plan.settings.num_rounds + 1):
        _round(plan, number, found, runs, reporter)
        if plan.may_stop_early and FEWEST_ROUNDS <= number < plan.settings.num_rounds and _is_settled(plan, found):
            reporter.skip((plan.settings.num_rounds - number) * len(plan.names))
            found.notes.append(
                f"{number} rounds were enough: no strategy's differ by more than {units.percent(SETTLED)}, and the fastest is "
                f"further than that ahead of the next. --rounds {plan.settings.num_rounds} makes one more."
            )
            break
    if plan.timeline is not None:
        _trace(plan, plan.timeline, found, runs, reporter)
    return tuple(_row(plan, one, found) for one in plan.contenders), tuple(found.notes)


def _is_settled(plan: ComparisonPlan, found: _Found) -> bool:
    speeds = {
        name: [each.samples_per_s for each in found.rounds[name]] for name in plan.names if name not in found.failures
    }
    return settled(speeds, [one.name for one in plan.contenders if one.entry.trains])


def _round(plan: ComparisonPlan, number: int, found: _Found, runs: Runs, reporter: Reporter) -> None:
    """Run each strategy once, except failed ones; in the first round, compare the final weights with those of ``single``."""
    first = (number - 1) % len(plan.names)  # rotate the order, so that each strategy runs early, late and in between
    weights: dict[str, Path] = {}
    for contender in (*plan.contenders[first:], *plan.contenders[:first]):
        name = contender.name
        if name in found.failures:
            reporter.skip()
            continue
        spec = _spec(plan, contender, "first" if number == 1 else "timing")
        reporter.begin(f"round {number}/{plan.settings.num_rounds}, {name}", spec.num_warmup_steps + spec.num_steps)
        outcome = _execute(plan, runs, spec, number, reporter)
        if isinstance(outcome, RunFailure):
            found.failures[name] = outcome
            reporter.end(f"failed: {short(outcome.cause)}")
            continue
        found.rounds[name].append(summarize_round(number, outcome))
        reporter.end(f"{units.rate(found.rounds[name][-1].samples_per_s)} samples/s")
        if (kept := Path(spec.folder) / "weights.pt").exists():
            weights[name] = kept
    if "single" in weights:
        others = {name: path for name, path in weights.items() if name != "single"}
        found.differences.update({name: difference(weights["single"], path) for name, path in others.items()})
    for path in weights.values():
        path.unlink()


def _trace(plan: ComparisonPlan, path: Path, found: _Found, runs: Runs, reporter: Reporter) -> None:
    """Run each strategy, except failed ones, once more to record its timeline."""
    for contender in plan.contenders:
        name = contender.name
        if name in found.failures:
            reporter.skip()
            continue
        spec = _spec(plan, contender, "timeline")
        reporter.begin(f"timeline, {name}", spec.num_warmup_steps + spec.num_steps)
        outcome = _execute(plan, runs, spec, plan.settings.num_rounds + 1, reporter)
        if isinstance(outcome, RunFailure):
            found.notes.append(f"There is no timeline of {name}: {short(outcome.cause)} (log: {outcome.log})")
            reporter.end(f"no timeline: {short(outcome.cause)}")
            continue
        out = path if len(plan.names) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix or '.json'}")
        timeline.merge(sorted(Path(spec.folder).glob("timeline-*.json")), out)
        found.traces[name] = str(out.absolute())
        reporter.end(str(out))


def _spec(plan: ComparisonPlan, contender: Contender, purpose: str) -> RunSpec:
    settings = plan.settings
    cores = usable_cores()
    return RunSpec(
        name=contender.name,
        strategy=contender.strategy,
        purpose=purpose,
        folder=new_folder(plan.scratch, contender.name),
        workload=plan.workload,
        options=plan.options,
        data_folder=str(plan.scratch / "data"),
        num_ranks=settings.num_ranks,
        num_threads=cores if contender.entry.one_process else settings.threads_per_rank,
        num_cores=cores,
        num_steps=min(settings.num_steps, _TIMELINE_STEPS) if purpose == "timeline" else settings.num_steps,
        num_warmup_steps=settings.num_warmup_steps,
        seed=settings.seed,
        timeout_s=plan.timeout_s,
        device=plan.device,
        backend=contender.backend,
        num_groups=contender.num_groups,
    )


def _execute(
    plan: ComparisonPlan, runs: Runs, spec: RunSpec, number: int, reporter: Reporter
) -> tuple[RankRecord, ...] | RunFailure:
    log = Path(spec.folder) / "log"
    found = runs.execute(spec, log, reporter.tick)
    if isinstance(found, RunFailure):
        kept = plan.out / "logs" / f"{spec.name}-{'timeline' if spec.purpose == 'timeline' else f'round{number}'}.log"
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(log, kept)
        return replace(found, log=str(kept), round=number)
    return found


def _row(plan: ComparisonPlan, contender: Contender, found: _Found) -> StrategyRow:
    name, strategy = contender.name, contender.entry
    return StrategyRow(
        name=name,
        strategy=contender.strategy,
        summary=contender.summary,
        exact=strategy.exact,
        trains=strategy.trains,
        one_process=strategy.one_process,
        source=strategy.source,
        simplicity=list(strategies.STRATEGIES).index(contender.strategy),
        num_processes=1 if strategy.one_process else plan.settings.num_ranks,
        rounds=tuple(found.rounds[name]),
        difference=found.differences.get(name),
        failure=found.failures.get(name),
        timeline=found.traces.get(name),
        asked_backend=contender.backend,
        num_groups=contender.num_groups,
    )


def describe() -> Machine:
    """Return the hardware and software facts of this machine that the report shows."""
    return Machine(
        cpu=processor_name(),
        num_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        accelerators=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        guozhuang=_version(),
    )


def busy_share(watch_s: float = 0.5) -> float:
    """Measure for ``watch_s`` seconds which share of the cores is busy; return the share, between 0 and 1."""
    return float(psutil.cpu_percent(watch_s)) / 100


def _version() -> str:
    try:
        return metadata.version("guozhuang")
    except metadata.PackageNotFoundError:
        return "not installed (run from its sources)"


class Reporter:
    """Shows on the console which run of the comparison is under way, its progress and its speed; a context manager.

    Args:
        console: a rich console; on a terminal a bar is drawn twice a second, rarely enough not to disturb the measurement.
        num_runs: the number of runs of the comparison.
    """

    def __init__(self, console: Console, num_runs: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console
        self._num_runs = num_runs
        self._done = 0
        self._label = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, rate="", visible=False)
        self._num_steps = 0
        self._first: tuple[int, float] | None = None  # the first step that ``tick`` reported in this run, and its time

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, label: str, num_steps: int) -> None:
        """Show that a run with this label and number of steps begins."""
        self._label = f"[{self._done + 1}/{self._num_runs}] {label}"
        self._num_steps, self._first = num_steps, None
        shown = self._label.replace("[", r"\[")
        self._bar.reset(self._task, total=num_steps, description=shown, rate="starting", visible=True)

    def skip(self, num_runs: int = 1) -> None:
        """Reduce the shown total by this many runs, which will not be made."""
        self._num_runs -= num_runs

    def tick(self, step: int) -> None:
        """Show that the current run has done ``step`` steps, and how fast."""
        now = time.monotonic()
        if step == 0:
            return
        if self._first is None:
            self._first = (step, now)
        first_step, first_at = self._first
        if step >= self._num_steps:
            rate = "ending"
        else:
            rate = (
                f"{units.rate((step - first_step) / (now - first_at))} steps/s" if step > first_step else "first steps"
            )
        self._bar.update(self._task, completed=step, rate=rate)

    def end(self, outcome: str) -> None:
        """Print the outcome of the current run, as a line that stays on the terminal."""
        from rich.text import Text

        self._done += 1
        self._bar.update(self._task, visible=False)
        self._console.print(Text(f"{self._label}: {outcome}"), soft_wrap=True, highlight=False)
