"""Shows the progress of a comparison: a live bar on a terminal, else a plain line per run."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from guozhuang import units

if TYPE_CHECKING:
    from rich.console import Console


class Reporter:
    """Shows which run is running, its progress and its speed; a context manager.

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
        self._first: tuple[int, float] | None = None  # the first step that was reported, and when

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, label: str, num_steps: int) -> None:
        """Show that a run begins."""
        self._label = f"[{self._done + 1}/{self._num_runs}] {label}"
        self._num_steps, self._first = num_steps, None
        shown = self._label.replace("[", r"\[")
        self._bar.reset(self._task, total=num_steps, description=shown, rate="starting", visible=True)

    def skip(self, num_runs: int = 1) -> None:
        """Subtract runs that will not be made from the total."""
        self._num_runs -= num_runs

    def tick(self, step: int) -> None:
        """Show how many steps the run has done."""
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
        """Print how the run ended, as a line that stays."""
        from rich.text import Text

        self._done += 1
        self._bar.update(self._task, visible=False)
        self._console.print(Text(f"{self._label}: {outcome}"), soft_wrap=True, highlight=False)
