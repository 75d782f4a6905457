"""Shows how far a comparison is, and estimates how long the rest of it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from guozhuang import units

if TYPE_CHECKING:
    from rich.console import Console


class PlannedRun(NamedTuple):
    """A run of one strategy that is planned.

    Attributes:
        name: the name of the row.
        part: "round 2/3", or "timeline".
        is_first: whether the run is one of the first round, in which models are evaluated too.
        num_steps: its steps, with those of the warm-up.
        one_process: whether one process trains, and not the ranks.
    """

    name: str
    part: str
    is_first: bool
    num_steps: int
    one_process: bool


class Forecast:
    """Estimates the duration of runs from those that were made.

    A run takes its steps, and some time besides: to start, to build the model, and in the first round to evaluate it. A step
    takes what it took in the same strategy's latest run, else the mean over others, of one process or of ranks as this one. The
    time besides is that of a run with evaluation, or without, as this one; of the same strategy, else the mean over others.
    """

    def __init__(self) -> None:
        self._step_s: dict[tuple[str, bool], float] = {}
        self._besides_s: dict[tuple[str, bool], float] = {}

    def note(self, run: PlannedRun, duration_s: float, step_s: float) -> None:
        """Remember that a run took ``duration_s`` seconds in all, and ``step_s`` for a step."""
        self._step_s[run.name, run.one_process] = step_s
        self._besides_s[run.name, run.is_first] = max(0.0, duration_s - run.num_steps * step_s)

    def seconds(self, runs: Iterable[PlannedRun]) -> float | None:
        """Return how long these runs will take together, in seconds; None if no run was noted yet."""
        return sum(self._seconds(run) for run in runs) if self._step_s else None

    def _seconds(self, run: PlannedRun) -> float:
        step_s = _of(self._step_s, run.name, run.one_process)
        return _of(self._besides_s, run.name, run.is_first) + run.num_steps * step_s


def _of(found: Mapping[tuple[str, bool], float], name: str, kind: bool) -> float:
    """Return what was found for a strategy in runs of a kind; else the mean over others of this kind, else over all."""
    alike = [value for (_, its_kind), value in found.items() if its_kind is kind]
    return found.get((name, kind), statistics.fmean(alike or found.values()))


class Reporter:
    """Shows on the console which run of the comparison is under way, its progress, its speed and the time left.

    A context manager.

    Args:
        console: a rich console; on a terminal a bar is drawn twice a second, rarely enough not to disturb the measurement.
        runs: the planned runs, in their order.
        forecast: knows how long runs take.
    """

    def __init__(self, console: Console, runs: Sequence[PlannedRun], forecast: Forecast) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console
        self._left = list(runs)
        self._forecast = forecast
        self._done = 0
        self._label = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, rate="", left="", visible=False)
        self._num_steps = 0
        self._run: PlannedRun | None = None
        self._began = 0.0
        self._first: tuple[int, float] | None = None  # the first step that ``tick`` reported in this run, and its time

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, run: PlannedRun) -> None:
        """Show that a planned run begins."""
        self._left = [each for each in self._left if each != run]
        self._run, self._began = run, time.monotonic()
        self._label = f"[{self._done + 1}/{self._done + 1 + len(self._left)}] {run.part}, {run.name}"
        self._num_steps, self._first = run.num_steps, None
        shown = self._label.replace("[", r"\[")
        self._bar.reset(
            self._task, total=run.num_steps, description=shown, rate="starting", left=self._time_left(), visible=True
        )

    def skip(self, is_skipped: Callable[[PlannedRun], bool]) -> None:
        """Take those planned runs out that will not be made."""
        self._left = [run for run in self._left if not is_skipped(run)]

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
        self._bar.update(self._task, completed=step, rate=rate, left=self._time_left())

    def end(self, outcome: str, step_s: float | None = None) -> None:
        """Print the outcome of the current run, as a line that stays on the terminal.

        Args:
            outcome: what to print.
            step_s: how long a step took, in seconds; None for a run that failed.
        """
        from rich.text import Text

        assert self._run is not None, "a run has begun"
        if step_s is not None:
            self._forecast.note(self._run, time.monotonic() - self._began, step_s)
        self._run = None
        self._done += 1
        self._bar.update(self._task, visible=False)
        left = self._time_left()
        self._console.print(
            Text(f"{self._label}: {outcome}{f', {left}' if left else ''}"), soft_wrap=True, highlight=False
        )

    def _time_left(self) -> str:
        seconds = self._forecast.seconds(self._left)
        if seconds is None:
            return ""
        if self._run is not None:
            own_s = self._forecast.seconds([self._run]) or 0.0
            seconds += max(0.0, own_s - (time.monotonic() - self._began))
        return f"about {about(seconds)} left" if self._left or self._run is not None else ""


def about(seconds: float) -> str:
    """Return a duration as an estimate is told: "20 s", "4 min", "1 h 10 min"."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, tens = divmod(round(minutes / 10), 6)
    return f"{hours} h {10 * tens} min" if tens else f"{hours} h"


def about_span(least_s: float, most_s: float) -> str:
    """Return a span of durations as an estimate is told: "20 to 30 s", "50 s to 2 min", "3 min" if both ends are that."""
    least, most = about(least_s), about(most_s)
    if least == most:
        return most
    same_unit = least.split()[1:] == most.split()[1:]
    return f"{least.split()[0] if same_unit else least} to {most}"
