"""``guozhuang.compare``: a comparison from Python, in a program or a notebook."""

from __future__ import annotations

import importlib
import io
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from guozhuang import compat
from guozhuang.errors import UsageError, explain
from guozhuang.lab import compare as lab
from guozhuang.lab import config
from guozhuang.lab.results import Results, StrategyRow
from guozhuang.lab.verdict import Verdict, judge
from guozhuang.workloads import Workload


@dataclass(frozen=True)
class ComparisonOutcome:
    """What a comparison found.

    Attributes:
        results: everything that was measured, as ``results.json`` has it.
        verdict: the conclusion: the recommended strategy, a headline, reasons and cautions.
        report: the path of ``report.html``.
    """

    results: Results
    verdict: Verdict
    report: Path

    @property
    def rows(self) -> tuple[StrategyRow, ...]:
        """Return a row for each strategy, failed ones too: ``name``, ``ok``, ``samples_per_s``, ``final_loss``, ..."""
        return self.results.rows

    def __getitem__(self, name: str) -> StrategyRow:
        """Return the row of a strategy.

        Raises:
            KeyError: it was not compared.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name} was not compared; rows: {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        """Return the tables and the conclusion that ``guozhuang compare`` prints."""
        from rich.console import Console

        from guozhuang.lab import table

        text = io.StringIO()
        table.show(Console(file=text, width=100, force_jupyter=False), self.results, self.verdict, self.report)
        return text.getvalue()


def compare(
    workload: str | Callable[..., Workload] = "text",
    strategies: Sequence[str] | str | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> ComparisonOutcome:
    """Train the same workload under several strategies, each in fresh processes, and return what was measured.

    This process trains nothing and joins no process group, so it may be a notebook. The report is written too (``out``).
    An interrupted comparison goes on where it stopped when this is called again with the same arguments.

    Args:
        workload: "text", "synthetic", "module:function", or a function that returns a ``guozhuang.workloads.Workload``; it is
            called in every process, with the mapping ``option`` if it takes an argument. One that other processes cannot import
            by name, such as one of a notebook, is sent to them by cloudpickle.
        strategies: their names, as ``--strategies`` takes them; None: a short set that suits the machine.
        progress: whether to print the progress on standard error.
        options: any other option of ``guozhuang compare``, by its name: ``ranks=4, steps=100, rounds=3, batch_size=16,
            data="reviews.csv", out="report", option={"hidden": 64}``.

    Raises:
        UsageError: an option or the workload cannot work; nothing was started.
        KeyboardInterrupt: it was interrupted; every process was ended, and the finished runs are kept.
    """
    from rich.console import Console

    shown = workload if isinstance(workload, str) else getattr(workload, "__name__", type(workload).__name__)
    arguments = {"strategies": strategies, **options}
    with ExitStack() as until_end:
        name = workload if isinstance(workload, str) else _by_name(workload, until_end)
        namespace = config.read({"workload": name, **arguments}, "guozhuang.compare")
        told = ", ".join([shown, *(f"{key}={value!r}" for key, value in arguments.items() if value is not None)])
        console = Console(stderr=True, quiet=not progress)
        command = f"guozhuang.compare({told})"
        results, path = lab.perform(namespace, console, compat.extension().python_path, command)
    return ComparisonOutcome(results, judge(results), path)


def _by_name(function: Callable[..., Workload], until_end: ExitStack) -> str:
    """Return a name by which other processes find a function: that of its module, or that of a file written for them."""
    if not callable(function):
        raise UsageError(
            explain("the workload is neither a name nor a function", value=function, fix="give module:function")
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    is_named = module not in (None, "__main__") and name.isidentifier()
    if is_named and getattr(importlib.import_module(str(module)), name, None) is function:
        return f"{module}:{name}"
    folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix="guozhuang-"))
    path = Path(folder) / f"{name.rpartition('.')[2].strip('<>') or 'workload'}.pickle"
    try:
        path.write_bytes(cloudpickle.dumps(function))
    except (pickle.PicklingError, TypeError) as error:
        what = f"the workload's function cannot be sent to other processes: {error}"
        raise UsageError(
            explain(what, value=name, fix="move it to a module, or make what it uses inside it")
        ) from error
    return str(path)
