"""What makes a prediction surer: the measurement that would narrow its interval most, and steps that were measured."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from guozhuang import workloads
from guozhuang.cost.prediction.interval import CHECK, COMPARE, PROFILE, REPEATED, Doubt, half_width
from guozhuang.cost.prediction.predict import Prediction
from guozhuang.errors import UsageError, explain
from guozhuang.lab.predict.profile import Subject
from guozhuang.lab.results import from_json
from guozhuang.world.machine import describe


class ComparedCase(NamedTuple):
    """What was measured: a strategy (with its layout), its backend (empty for one process), its ranks, and their threads."""

    name: str
    backend: str
    num_ranks: int
    num_threads: int


class Advice(NamedTuple):
    """A measurement, as a command line, and the interval in seconds that it is expected to leave."""

    command: str
    interval_s: tuple[float, float]


def measured_steps(paths: Sequence[Path], what: Subject) -> dict[ComparedCase, tuple[float, ...]]:
    """Read the steps that ``guozhuang compare`` has measured of the same training on this machine.

    Args:
        paths: files ``results.json``, or folders that hold one.
        what: the training.

    Returns:
        Seconds of a step of all ranks together, one for each round.

    Raises:
        UsageError: a file cannot be read, or was measured on another machine, with other versions or of another training.
    """
    found: dict[ComparedCase, tuple[float, ...]] = {}
    now = {name: str(each) for name, each in asdict(describe()).items() if name != "memory_bytes"}
    now |= {"workload": workloads.title(what.name), "batch size": str(what.workload.batch_size)}
    now |= {f"workload's {name}": str(value) for name, value in what.workload.details.items()}
    for path in paths:
        file = path / "results.json" if path.is_dir() else path
        try:
            results = from_json(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                explain(f"--measured names a file that cannot be read: {error}", value=str(path))
            ) from None
        then = {name: str(each) for name, each in asdict(results.machine).items() if name != "memory_bytes"}
        then |= {"workload": results.workload, "batch size": str(results.settings.batch_size)}
        then |= {f"workload's {name}": str(value) for name, value in results.workload_details.items()}
        differs = [
            f"{name}: {then.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in [*now, *(then.keys() - now.keys())]
            if then.get(name) != now.get(name)
        ]
        if differs:
            what_differs = f"{file} is no measurement of this training here, because {'; '.join(differs)}"
            raise UsageError(explain(what_differs, fix="leave it out, or compare again"))
        for row in results.rows:
            if row.ok:
                ranks = results.settings.num_ranks
                step = ComparedCase(row.name.partition("@")[0], row.backend, ranks, row.rounds[0].ranks[0].num_threads)
                samples = results.settings.global_batch_size
                found[step] = tuple(samples / each.samples_per_s for each in row.rounds)
    return found


def as_measured(found: Prediction, steps_s: Sequence[float]) -> Prediction:
    """Return a prediction that holds what was measured in some rounds: its parts and bounds are changed in proportion."""
    step_s = statistics.median(steps_s)
    factor, spread = step_s / found.step_s, max(REPEATED, math.sqrt(max(steps_s) / min(steps_s)))
    return dataclasses.replace(
        found,
        step_s=step_s,
        parts={part: seconds * factor for part, seconds in found.parts.items()},
        bounds=(found.bounds[0] * factor, found.bounds[1] * factor),
        interval_s=(step_s / spread, step_s * spread),
        doubts=(Doubt("", spread),),
        interval_source=f"measured steps: a factor of {spread:.3g}",
    )


def advice(found: Prediction, commands: Mapping[str, str]) -> Advice | None:
    """Return the measurement that narrows the interval of a prediction most; None if none of them does.

    Args:
        found: the prediction.
        commands: how to make each measurement that can be made, by the words of ``interval``.
    """
    now = half_width(found.doubts)
    left = {each.remedy: half_width(found.doubts, each.remedy) for each in found.doubts if each.remedy in commands}
    best = min(left, key=lambda remedy: left[remedy], default=None)
    if best is None or left[best] >= 0.99 * now:
        return None
    return Advice(commands[best], (found.step_s * math.exp(-left[best]), found.step_s * math.exp(left[best])))


def commands(
    what: Subject, step: ComparedCase, threads: int | None, profile: Path | None, is_here: bool, num_nodes: int
) -> dict[str, str]:
    """Return how to make each measurement that a prediction may want, as far as it can be made from here.

    Args:
        what: the training.
        step: that is predicted.
        threads: ``--threads-per-rank``; None where it was not given.
        profile: where the profile is kept.
        is_here: whether the ranks would run on this machine.
        num_nodes: on how many machines the ranks would run.
    """
    of_ranks = f"-np {step.num_ranks}" if num_nodes == 1 else "-H " + ",".join(["HOST"] * min(num_nodes, 2))
    found = {}
    if is_here or num_nodes > 1:
        found[CHECK] = f"guozhuang check {of_ranks} --json > links.json, and this with --on links.json"
    if profile is not None:
        found[PROFILE] = f"rm {shlex.quote(str(profile))}, and this again while nothing else computes"
    if is_here:
        words = ["guozhuang", "compare", "--workload", what.name, *_words(what)]
        words += ["--strategies", f"{step.name}@{step.backend}" if step.backend else step.name]
        words += ["--ranks", str(step.num_ranks), "--out", "measured"]
        words += ["--threads-per-rank", str(threads)] if threads is not None else []
        found[COMPARE] = f"{shlex.join(words)}, and this with --measured measured"
    return found


def _words(what: Subject) -> list[str]:
    """Return the options of the workload as words of a command line."""
    found = list[str]()
    for name, value in what.options.items():
        flag = "--" + name.replace("_", "-")
        if ":" in what.name:
            found += ["--option", f"{name}={value}"]
        elif isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            found += [flag, *map(str, value if isinstance(value, list) else [value])]
    return found
