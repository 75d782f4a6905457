"""``guozhuang compare``: run one workload under several strategies, each in fresh processes, in alternating rounds."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from guozhuang import strategies, timeline, units, workloads
from guozhuang.lab.contender import Contender
from guozhuang.lab.measure import difference
from guozhuang.lab.plan import FEWEST_ROUNDS, TIMELINE_STEPS, ComparisonPlan, conditions, notes_of, plan_of
from guozhuang.lab.progress import Forecast, PlannedRun, Reporter, about, about_span
from guozhuang.lab.results import (
    Difference,
    MeasuredRound,
    RankRecord,
    Results,
    RunFailure,
    StrategyRow,
    summarize_round,
    to_json,
)
from guozhuang.lab.runs import WHERE_TO_LOOK, Runs, ended_by_signals
from guozhuang.lab.unfinished import FinishedRun, Unfinished, alone_in
from guozhuang.lab.verdict import SETTLED, judge, restless, short, undecided
from guozhuang.lab.worker import RunSpec
from guozhuang.world.machine import describe, usable_cores

if TYPE_CHECKING:
    from rich.console import Console

_FEW_RUNS, _FEW_STEPS = 6, 150  # a comparison of fewer is begun without a trial
_LONG_S, _SHORT_STEPS = 600.0, 20  # a comparison that takes longer is told how long one of few steps takes
_TRIAL_STEPS = 2  # measured steps of the trial, after as many of warm-up
_FIRST_LIMIT_S = 300.0  # the most that is waited for the first trial
_LEAST_LIMIT_S = 60.0  # the least that is waited for a trial of ranks
_SINGLE = Contender("single", "single")


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

    from guozhuang.lab import table

    command = shlex.join(["guozhuang", *sys.argv[1:]])
    try:
        results, path = perform(namespace, Console(stderr=True), python_path, command)
    except KeyboardInterrupt:
        return 130
    if namespace.json:
        sys.stdout.write(to_json(results) + "\n")
    else:
        table.show(Console(), results, judge(results), path)
    return 0 if any(row.ok for row in results.rows) else 1


def perform(
    namespace: argparse.Namespace, progress: Console, python_path: Sequence[str], command: str
) -> tuple[Results, Path]:
    """Perform a comparison: measure all strategies, and write the report.

    What finished runs an interrupted comparison of the same things has left in the report's folder are not made again.

    Args:
        namespace: the parsed options.
        progress: the console for the progress.
        python_path: the folders that ``guozhuang run`` adds to the ranks' PYTHONPATH, relative to this package.
        command: what the report shows as the command.

    Returns:
        The results, and the path of the report.

    Raises:
        UsageError: an option cannot work, or another comparison writes to the same folder; nothing was started.
        KeyboardInterrupt: a signal ended it; every process was ended, and the finished runs are kept.
    """
    from guozhuang.lab import report

    started, imported = time.monotonic(), set(sys.modules)
    with ExitStack() as until_end:
        unfinished = None
        try:
            with ended_by_signals(), tempfile.TemporaryDirectory(prefix="guozhuang-") as scratch:
                plan, details = plan_of(namespace, Path(scratch), progress)
                until_end.enter_context(alone_in(plan.out))
                busy = busy_share()  # of other programs: measured before the comparison itself computes anything
                machine = describe()
                must_match = conditions(plan, details) | machine.conditions
                unfinished = Unfinished(plan.out / "unfinished", must_match, namespace.fresh)
                shutil.rmtree(plan.out / "logs", ignore_errors=True)  # remove the logs of an earlier comparison
                # Modules that loading the workload has imported; the warm parent imports them too.
                modules = [name for name in sys.modules if name not in imported and not name.startswith("torch.")]
                with Runs(Path(scratch), plan.settings.threads_per_rank, modules, python_path) as runs:
                    earlier_s, notes = _resumed(plan, unfinished, progress)
                    planned, forecast = _foresee(plan, unfinished, runs, progress)
                    with Reporter(progress, planned, forecast) as reporter:
                        rows, more = _measure(plan, unfinished, runs, reporter)
                busy = max(busy, busy_share())
        except KeyboardInterrupt:
            num_kept = 0 if unfinished is None else len(unfinished)
            if unfinished is not None and not num_kept:
                unfinished.remove()
            kept = f"{num_kept} finished run{'s' * (num_kept != 1)} will not be made again by the same command"
            kept = kept if num_kept else "Nothing was written"
            progress.print(f"Interrupted: every process was ended. {kept}.", highlight=False, soft_wrap=True)
            raise
        results = Results(
            created=datetime.now(UTC).astimezone().strftime("%Y-%m-%d %H:%M %Z"),
            command=command,
            workload=workloads.title(plan.workload),
            workload_details=details,
            settings=replace(plan.settings, num_rounds=max((len(row.rounds) for row in rows), default=0) or 1),
            machine=machine,
            rows=rows,
            notes=(*notes_of(plan, busy), *notes, *more),
            duration_s=earlier_s + time.monotonic() - started,
            busy=busy,
        )
        path = report.write(results, plan.out)
        unfinished.remove()
    return results, path


def _resumed(plan: ComparisonPlan, unfinished: Unfinished, progress: Console) -> tuple[float, list[str]]:
    """Say which runs of an interrupted comparison count; return their seconds, and notes for the reader of the report."""
    if unfinished.differs:
        what = (
            f"Finished runs in {unfinished.folder} do not count here and were removed: {'; '.join(unfinished.differs)}."
        )
        progress.print(what, highlight=False, soft_wrap=True, markup=False)
    kept = [run for one, number in plan.runs() if (run := _kept(plan, unfinished, one, number)) is not None]
    if not kept:
        return 0.0, []
    names = ", ".join(dict.fromkeys(run.contender.name for run in kept))
    what = f"{len(kept)} finished run(s) of {names}"
    same = "workload, options, data, machine and versions are the same"
    going_on = f"Going on where a comparison was interrupted: {what} are not made again; {same}. --fresh begins anew."
    progress.print(going_on, highlight=False, soft_wrap=True, markup=False)
    note = f"{what} were not made by this command, but before an interruption of the same one: {same}."
    return sum(run.duration_s for run in kept), [note]


def _foresee(
    plan: ComparisonPlan, unfinished: Unfinished, runs: Runs, progress: Console
) -> tuple[list[PlannedRun], Forecast]:
    """Say what will be run and how long that takes; return the runs that are still to be made, and the forecast for them."""
    forecast, planned = Forecast(), list[PlannedRun]()
    for contender, number in plan.runs():
        kept = _kept(plan, unfinished, contender, number)
        if kept is None:
            planned.append(plan.run(contender, number))
        elif kept.measured is not None:
            forecast.note(plan.run(contender, number), kept.duration_s, kept.measured.phases.step_s)
    if not planned:
        return planned, forecast  # all were finished, and the report was not
    settings, why = plan.settings, ""
    is_long = len(planned) >= _FEW_RUNS or sum(run.num_steps for run in planned) >= _FEW_STEPS
    if is_long and forecast.seconds([]) is None:  # no run was made before an interruption
        why = _try(plan, forecast, runs)
    if plan.is_short:
        others = f"--all compares all {len(strategies.STRATEGIES)} strategies, --strategies others"
        chosen = f"Comparing {', '.join(plan.names)}, which suit this machine; {others}."
        progress.print(chosen, highlight=False, soft_wrap=True)
    steps = f"{settings.num_warmup_steps} + {settings.num_steps} steps"
    what = f"{len(planned)} run{'s' * (len(planned) != 1)} of {steps} in up to {settings.num_rounds} round(s)"
    most_s = forecast.seconds(planned)
    if most_s is not None:
        # Where only runs of the last round are left, that it is needed was decided before the interruption.
        sooner = [run for run in planned if run.part != plan.part(settings.num_rounds)] if plan.may_stop_early else []
        what += f": about {about_span(forecast.seconds(sooner or planned) or 0.0, most_s)}"
    progress.print(f"{what}{why}.", highlight=False, soft_wrap=True)
    if most_s is not None and most_s > _LONG_S and settings.num_steps > _SHORT_STEPS:
        runs_of_two = [run for run in planned if run.part in (plan.part(1), plan.part(2))]
        few = [run._replace(num_steps=settings.num_warmup_steps + _SHORT_STEPS) for run in runs_of_two]
        less = about(forecast.seconds(few) or 0.0)
        progress.print(f"--steps {_SHORT_STEPS} --rounds 2 would take about {less}.", highlight=False)
    return planned, forecast


def _try(plan: ComparisonPlan, forecast: Forecast, runs: Runs) -> str:
    """Make a few steps in one process and on the ranks, whichever will train, for the forecast; return a remark on them."""
    of_ranks = [one for one in plan.contenders if not one.entry.one_process]
    took, limit_s = list[str](), min(plan.timeout_s, _FIRST_LIMIT_S)
    for one in ([_SINGLE] if len(of_ranks) < len(plan.contenders) else []) + of_ranks[:1]:
        spec = _spec(plan, one, "trial")
        spec = replace(spec, num_steps=_TRIAL_STEPS, num_warmup_steps=_TRIAL_STEPS, timeout_s=limit_s)
        began = time.monotonic() - runs.opening_s
        outcome = runs.execute(spec, Path(spec.folder) / "log", lambda step: None)
        if isinstance(outcome, RunFailure):
            cause = short(outcome.cause.removesuffix(WHERE_TO_LOOK))  # the trial's log is not kept
            return f"; a trial of {one.name} failed: {cause}".removesuffix(".")
        step_s = summarize_round(1, outcome).phases.step_s
        trial = PlannedRun(one.name, "trial", False, 2 * _TRIAL_STEPS, one.entry.one_process)
        duration_s = time.monotonic() - runs.opening_s - began
        forecast.note(trial, duration_s, step_s)
        limit_s = min(
            limit_s, _LEAST_LIMIT_S + 10 * duration_s
        )  # where ranks hang, only their own run waits to the end
        took.append(f"{units.duration(step_s)} under {one.name}")
    return f"; a step took {' and '.join(took)} in a trial"


def _kept(plan: ComparisonPlan, unfinished: Unfinished, contender: Contender, number: int) -> FinishedRun | None:
    """Return the finished run of a contender in a round (0: its timeline, which must still be there)."""
    run = unfinished.find(contender, number)
    if run is None or number:
        return run
    return run if run.trace == str(plan.trace_file(contender).absolute()) and Path(run.trace).exists() else None


@dataclass
class _Found:
    """The results of the runs so far: rounds, failures, weight differences and traces of each strategy."""

    rounds: dict[str, list[MeasuredRound]]
    failures: dict[str, RunFailure] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _measure(
    plan: ComparisonPlan, unfinished: Unfinished, runs: Runs, reporter: Reporter
) -> tuple[tuple[StrategyRow, ...], tuple[str, ...]]:
    """Execute all runs that are not finished; return a row per strategy, and notes for the reader of the report."""
    found = _Found({name: [] for name in plan.names})
    names = set(plan.names)
    for number in range(1, plan.settings.num_rounds + 1):
        for contender in plan.turn(number):
            if contender.name in names and contender.name not in found.failures:
                _run_once(plan, contender, number, found, unfinished, runs, reporter)
        if number == 1:
            _compare_weights(plan, found, unfinished)
        if plan.may_stop_early and FEWEST_ROUNDS <= number < plan.settings.num_rounds:
            names = _undecided(plan, found, number)
            done = set(plan.names) - names
            reporter.skip(lambda run, done=done: run.part != plan.part(0) and run.name in done)  # type: ignore[misc]
    if plan.timeline is not None:
        for contender in plan.contenders:
            if contender.name not in found.failures:
                _trace(plan, contender, found, unfinished, runs, reporter)
    if unfinished.problem:
        found.notes.append(
            f"Finished runs could not be kept, so an interrupted comparison would begin anew: {unfinished.problem}."
        )
    return tuple(_row(plan, one, found) for one in plan.contenders), tuple(found.notes)


def _undecided(plan: ComparisonPlan, found: _Found, number: int) -> set[str]:
    """Return the strategies that need a round after this one, and note why others need none."""
    speeds = {
        name: [each.samples_per_s for each in found.rounds[name]] for name in plan.names if name not in found.failures
    }
    names, busy = undecided(speeds, [one.name for one in plan.contenders if one.entry.trains]), restless(speeds)
    more = f"--rounds {plan.settings.num_rounds} makes one more."
    if busy:
        worst = max(busy, key=lambda name: busy[name])
        found.notes.append(
            f"{number} rounds were made: those of {worst} differ by {units.times(busy[worst])}, so that one more would not "
            f"settle which strategy is faster on this machine now. {more}"
        )
        return set()
    if not names:
        found.notes.append(
            f"{number} rounds were enough: no strategy's differ by more than {units.percent(SETTLED)}, and the fastest is "
            f"further than that ahead of the next. {more}"
        )
    elif names < speeds.keys():
        others = units.listed(name for name in speeds if name not in names)
        found.notes.append(f"{number} rounds were enough for {others}: another one would not change the verdict.")
    return names


def _run_once(
    plan: ComparisonPlan,
    contender: Contender,
    number: int,
    found: _Found,
    unfinished: Unfinished,
    runs: Runs,
    reporter: Reporter,
) -> None:
    """Run a strategy in a round, unless that run was finished before an interruption."""
    name, kept = contender.name, unfinished.find(contender, number)
    if kept is not None and kept.measured is not None:
        found.rounds[name].append(kept.measured)
        return
    spec = _spec(plan, contender, "first" if number == 1 else "timing")
    reporter.begin(plan.run(contender, number))
    began = time.monotonic()
    outcome = _execute(plan, runs, spec, number, reporter)
    if isinstance(outcome, RunFailure):
        found.failures[name] = outcome
        reporter.skip(lambda run: run.name == name)
        reporter.end(f"failed: {short(outcome.cause)}")
        return
    measured = summarize_round(number, outcome)
    weights = Path(spec.folder) / "weights.pt"
    run = FinishedRun(contender, number, time.monotonic() - began, measured)
    unfinished.keep(run, weights if weights.exists() else None)
    weights.unlink(missing_ok=True)
    found.rounds[name].append(measured)
    reporter.end(f"{units.rate(measured.samples_per_s)} samples/s", measured.phases.step_s)


def _compare_weights(plan: ComparisonPlan, found: _Found, unfinished: Unfinished) -> None:
    """Compare the weights that the strategies ended the first round with to those of ``single``."""
    found.differences.update(unfinished.differences())
    reference = unfinished.weights("single")
    for name in plan.names:
        weights = unfinished.weights(name)
        if name != "single" and reference.exists() and weights.exists():
            found.differences[name] = difference(reference, weights)
    unfinished.keep_differences(found.differences, but="single")


def _trace(
    plan: ComparisonPlan, contender: Contender, found: _Found, unfinished: Unfinished, runs: Runs, reporter: Reporter
) -> None:
    """Run a strategy once more to record its timeline, unless that is there already."""
    name, kept = contender.name, _kept(plan, unfinished, contender, 0)
    if kept is not None and kept.trace is not None:
        found.traces[name] = kept.trace
        return
    spec = _spec(plan, contender, "timeline")
    reporter.begin(plan.run(contender, 0))
    began = time.monotonic()
    outcome = _execute(plan, runs, spec, plan.settings.num_rounds + 1, reporter)
    if isinstance(outcome, RunFailure):
        found.notes.append(f"There is no timeline of {name}: {short(outcome.cause)} (log: {outcome.log})")
        reporter.end(f"no timeline: {short(outcome.cause)}")
        return
    out = plan.trace_file(contender)
    timeline.merge(sorted(Path(spec.folder).glob("timeline-*.json")), out)
    found.traces[name] = str(out.absolute())
    unfinished.keep(FinishedRun(contender, 0, time.monotonic() - began, None, found.traces[name]))
    reporter.end(str(out))


def _spec(plan: ComparisonPlan, contender: Contender, purpose: str) -> RunSpec:
    settings = plan.settings
    cores = usable_cores()
    return RunSpec(
        name=contender.name,
        strategy=contender.strategy,
        purpose=purpose,
        folder=tempfile.mkdtemp(prefix=f"{contender.name.replace(':', '-')}-", dir=plan.scratch),
        workload=plan.workload,
        options=plan.options,
        data_folder=str(plan.scratch / "data"),
        num_ranks=settings.num_ranks,
        num_threads=cores if contender.entry.one_process else settings.threads_per_rank,
        num_cores=cores,
        num_steps=min(settings.num_steps, TIMELINE_STEPS) if purpose == "timeline" else settings.num_steps,
        num_warmup_steps=settings.num_warmup_steps,
        seed=settings.seed,
        timeout_s=plan.timeout_s,
        device=plan.device,
        backend=contender.backend,
        num_groups=contender.num_groups,
        layout=contender.layout,
        schedule=contender.schedule,
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
        layout=contender.layout or "",
        schedule=contender.schedule or "",
    )


def busy_share(watch_s: float = 0.5) -> float:
    """Measure for ``watch_s`` seconds which share of the cores is busy; return the share, between 0 and 1."""
    return float(psutil.cpu_percent(watch_s)) / 100
