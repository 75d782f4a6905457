"""Measure the profile of a training on this machine, and read and write its file."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from guozhuang import workloads
from guozhuang.cost.prediction.profile import SCHEMA_VERSION, Crowding, Profile, trace_name
from guozhuang.cost.trace import Compute, Trace
from guozhuang.errors import UsageError, explain
from guozhuang.lab.compare import busy_share
from guozhuang.lab.contender import Contender
from guozhuang.lab.planner.fake.traces import check_recordable, recorded
from guozhuang.lab.predict.observe import Observed, median_parts
from guozhuang.lab.results import RunFailure
from guozhuang.lab.runs import Runs
from guozhuang.lab.worker import RunSpec
from guozhuang.records import build, from_json, to_json, write_text
from guozhuang.workloads import Workload
from guozhuang.world.devices import SHARED_MEMORY
from guozhuang.world.machine import describe, usable_cores

if TYPE_CHECKING:
    from rich.console import Console

# Seconds of all measuring together, of one run of it, and of what a run takes beside measuring.
_ALL_S, _MOST_S, _LEAST_S, _OVERHEAD_S = 55.0, 4.0, 0.3, 1.0
# Of the step of one process everything else is a part or a multiple, so each time it gets as much time as two others. It is
# measured at the beginning and at the end, and the faster one counts: what else happens on a machine slows a step, for seconds.
_CROWD_SHARE = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 50  # of a recording
_SLOWED = 1.25  # a forward pass that takes so many times as long as that of one process is recorded once more
_TIMEOUT_S = 180.0


class Recording(NamedTuple):
    """What one rank of a strategy does is to be recorded in a fake world."""

    one: Contender
    num_ranks: int
    num_nodes: int
    backend: str
    num_threads: int

    @property
    def name(self) -> str:
        """The key of its traces in a profile."""
        return trace_name(self.one.name.partition("@")[0], self.num_ranks, self.num_nodes, self.backend)


class Wanted(NamedTuple):
    """What a profile is to hold.

    Attributes:
        crowds: how many processes of how many threads to measure at a time; the first is one process alone.
        backends: the backends whose collectives are timed on two ranks.
        recordings: the strategies whose steps are recorded.
    """

    crowds: tuple[tuple[int, int], ...]
    backends: tuple[str, ...]
    recordings: tuple[Recording, ...] = ()

    def beside(self, profile: Profile) -> Wanted:
        """Return what of this a profile lacks; one process alone is measured again with it, see ``Profile.extended``."""
        known = {(each.num_ranks, each.num_threads) for each in profile.crowding}
        crowds = [each for each in self.crowds if each not in known]
        carried = {each.transport for each in profile.collectives}
        backends = tuple(each for each in self.backends if each not in carried)
        recordings = tuple(
            each._replace(num_threads=profile.num_threads)
            for each in self.recordings
            if each.name not in profile.traces and each.name not in profile.refused
        )
        is_whole = not crowds and not backends and not recordings
        return Wanted(() if is_whole else ((1, profile.num_threads), *crowds), backends, recordings)


@dataclass(frozen=True)
class Subject:
    """What is profiled: a workload with its options, as the command line names it.

    Attributes:
        name: as ``--workload`` takes it.
        options: the options of the workload.
        workload: built once here, to find mistakes before any process starts.
        folder: a folder for files of the runs.
        device: ``cpu``, ``cuda``, or None for CUDA where there is any.
    """

    name: str
    options: dict[str, Any]
    workload: Workload
    folder: Path
    device: str | None

    @property
    def conditions(self) -> dict[str, str]:
        """What must be the same for a profile of an earlier time to count now, by its name."""
        return {
            "workload": workloads.title(self.name),
            **{f"workload option {name}": json.dumps(value) for name, value in sorted(self.options.items())},
            **{f"workload's {name}": str(value) for name, value in self.workload.details.items()},
            **{f"file {name}": state for name, state in workloads.origin(self.name, self.options).items()},
            "batch size": str(self.workload.batch_size),
            "device": self.device or "chosen",
            **describe().conditions,
        }


def subject(namespace: argparse.Namespace, folder: Path, console: Console) -> Subject:
    """Load the workload that the command line names.

    Raises:
        UsageError: there is no such workload or device, or the data is too small to measure a step.
    """
    if namespace.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(explain("there is no CUDA device on this machine", value="cuda", fix="say --device cpu"))
    options = workloads.options_from(namespace.workload, namespace)
    console.print(f"Loading the workload {workloads.title(namespace.workload)} …", highlight=False)
    workload = workloads.load(namespace.workload, options, folder / "data")
    if len(workload.train) < workload.batch_size:  # type: ignore[arg-type]
        what = "the training data is smaller than one batch"
        raise UsageError(explain(what, value=len(workload.train), fix="use a smaller batch or more data"))  # type: ignore[arg-type]
    return Subject(namespace.workload, options, workload, folder, namespace.device)


def measure(
    what: Subject,
    wanted: Wanted,
    console: Console,
    runs: Runs,
    earlier: Profile | None = None,
) -> Profile:
    """Measure a profile, and say what is done meanwhile.

    Args:
        what: the training.
        wanted: what to measure.
        console: for the progress.
        runs: executes the runs.
        earlier: a profile that lacks these; it is extended by them.

    Raises:
        UsageError: a run failed; the text has its cause.
    """
    busy = busy_share()  # of other programs: before anything is computed here
    began, own = time.monotonic(), what.workload.batch_size
    size = len(what.workload.train)  # type: ignore[arg-type]
    others = tuple(each for each in (own // 2, own * 2) if 1 <= each <= size) if earlier is None else ()
    of_crowds = [_CROWD_SHARE] * len(wanted.crowds)
    shares = [*of_crowds, *[1] * (len(wanted.backends) + len(wanted.recordings)), *of_crowds]

    def begin(text: str) -> float:
        """Say what is measured next, and return the seconds for it."""
        _say(console, began, text)
        left_s = _ALL_S - (time.monotonic() - began) - _OVERHEAD_S * len(shares)
        a_share, share = left_s / sum(shares), shares.pop(0)
        return max(_LEAST_S * share, min(_MOST_S, a_share * share))

    def crowded() -> tuple[list[Crowding], Observed]:
        """Measure the steps of all crowds once; return them, and what the first process alone has found."""
        crowding, alone = list[Crowding](), None
        for num_ranks, num_threads in wanted.crowds:
            several = f"{num_ranks} processes at a time, each" if num_ranks > 1 else "one process"
            seconds = begin(f"a step of {several} with {num_threads} thread{'s' * (num_threads != 1)}")
            spec = _spec(what, "none", "profile", num_ranks, num_threads, seconds, None)
            found = _execute(runs, replace(spec, batch_sizes=() if alone else others))
            alone = alone or found[0]
            parts = [median_parts(each.steps) for each in found]
            mean = {part: statistics.fmean(one[part] for one in parts) for part in parts[0]}
            steps = tuple(tuple(sum(step) for step in each.steps) for each in found)
            crowding.append(Crowding(num_ranks, num_threads, mean, steps))
        assert alone is not None, "the first crowd is one process"
        return crowding, alone

    first, alone = crowded()
    collectives = []
    for backend in wanted.backends:
        seconds = begin(f"collectives of two ranks over {backend}")
        one, other = (
            each.collectives for each in _execute(runs, _spec(what, "none", "collectives", 2, 1, seconds, backend))
        )
        # Each rank has used the processor by itself; the times are equal on both.
        collectives += [
            replace(a, processor_s=(a.processor_s + b.processor_s) / 2) for a, b in zip(one, other, strict=True)
        ]
    traces, refused = dict[str, tuple[Trace, ...]](), dict[str, str]()
    for each in wanted.recordings:
        seconds = begin(f"what a rank of {each.one.name} does among {each.num_ranks}")
        trace = _recorded(what, each, seconds, first[0].step_s, runs)
        has_time = time.monotonic() - began < _ALL_S
        if has_time and not isinstance(trace, str) and _forward_s(trace) > _SLOWED * first[0].parts["forward"]:
            again = _recorded(what, each, seconds, first[0].step_s, runs)
            trace = trace if isinstance(again, str) else min(trace, again, key=_forward_s)
        if isinstance(trace, str):
            refused[each.name] = trace
        else:
            traces[each.name] = trace
    last, alone_again = crowded()
    crowding = [min(pair, key=lambda one: one.step_s) for pair in zip(first, last, strict=True)]
    if last[0].step_s < first[0].step_s:
        alone = alone_again
    _say(console, began, "done")
    made = Profile(
        workload=workloads.title(what.name),
        conditions=what.conditions,
        device=alone.device,
        num_threads=wanted.crowds[0][1],
        num_cores=usable_cores(),
        batch_size=own,
        batches=alone.batches,
        gradients=alone.gradients,
        crowding=tuple(crowding),
        collectives=tuple(collectives),
        traces=traces,
        refused=refused,
        busy=busy,
        created=datetime.now(UTC).astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    return made if earlier is None else earlier.extended(made)


def _say(console: Console, began: float, text: str) -> None:
    console.print(f"{time.monotonic() - began:4.0f} s  {text}", highlight=False)


def _spec(
    what: Subject, strategy: str, purpose: str, num_ranks: int, num_threads: int, seconds: float, backend: str | None
) -> RunSpec:
    on_cpu = what.device == "cpu" or not torch.cuda.is_available()
    return RunSpec(
        name=f"{purpose} of {num_ranks}",
        strategy=strategy,
        purpose=purpose,
        folder=tempfile.mkdtemp(prefix=f"{purpose}-", dir=what.folder),
        workload=what.name,
        options=what.options,
        data_folder=str(what.folder / "data"),
        num_ranks=num_ranks,
        num_threads=num_threads,
        num_cores=usable_cores(),
        num_steps=0,
        num_warmup_steps=0,
        seed=0,
        timeout_s=_TIMEOUT_S,
        device=what.device,
        backend=backend or (SHARED_MEMORY if on_cpu else None),
        seconds=seconds,
    )


def _execute(runs: Runs, spec: RunSpec) -> list[Observed]:
    folder = Path(spec.folder)
    outcome = runs.execute(spec, folder / "log", lambda step: None)
    if isinstance(outcome, RunFailure):
        raise UsageError(explain(f"the {spec.name} process(es) failed: {outcome.cause}"))
    return [
        build(Observed, json.loads((folder / f"observed-{rank}.json").read_text())) for rank in range(spec.num_ranks)
    ]


def _recorded(what: Subject, each: Recording, seconds: float, step_s: float, runs: Runs) -> tuple[Trace, ...] | str:
    """Record what rank 0 does, if it stands for all ranks, else what each does; or return why that cannot be."""
    spec = replace(
        _spec(what, each.one.strategy, "trace", each.num_ranks, each.num_threads, seconds, each.backend),
        num_steps=max(_FEWEST_STEPS, min(_MOST_STEPS, int(seconds / step_s))),
        num_nodes=each.num_nodes,
        layout=each.one.layout,
        schedule=each.one.schedule,
        num_groups=each.one.num_groups,
    )
    try:
        check_recordable(each.one.entry)
    except UsageError as error:
        return str(error)
    found = recorded(runs, spec, Path(spec.folder) / "log")
    return found.cause.removeprefix("rank 0: ") if isinstance(found, RunFailure) else found


def _forward_s(traces: Sequence[Trace]) -> float:
    """Return the seconds of a forward pass: no strategy makes it longer than that of one process with the whole model."""
    forward = [e.seconds for trace in traces for e in trace.events if isinstance(e, Compute) and e.part == "forward"]
    return sum(forward) / sum(trace.num_steps for trace in traces)


def kept(
    path: Path | None,
    what: Subject,
    wanted: Wanted,
    console: Console,
    opened: Callable[[int], AbstractContextManager[Runs]],
) -> Profile:
    """Return a profile that holds what is wanted: the file's, extended by what it lacks, or a new one, which the file gets.

    Args:
        path: the file; None: the profile is not kept.
        what: the training.
        wanted: what the profile must hold; it may hold more.
        console: for the progress.
        opened: returns what executes runs, for ranks of so many threads; it is not called if nothing is to be measured.

    Raises:
        UsageError: the file is of another training or machine, or a run failed.
    """
    earlier = None
    if path is not None and path.exists():
        earlier = read(path, what.conditions)
        wanted = wanted.beside(earlier)
        lacks = " It lacks some of what is asked, and is extended." if wanted.crowds else ""
        console.print(f"Using the profile {path} of {earlier.created}.{lacks}", highlight=False, soft_wrap=True)
        if not wanted.crowds:
            return earlier
    with opened(wanted.crowds[0][1]) as runs:
        found = measure(what, wanted, console, runs, earlier)
    if path is not None:
        write(found, path)
    return found


def read(path: Path, conditions: dict[str, str]) -> Profile:
    """Read a profile that was written before.

    Args:
        path: its file.
        conditions: those of now.

    Raises:
        UsageError: it is no profile, or was measured under other conditions; the text names them.
    """
    fix = f"remove {path}, so that it is measured again"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"the profile {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(explain(what, fix=f"{fix}, or name another file")) from error
    found = from_json(Profile, text, SCHEMA_VERSION, f"profile ({path})", fix)
    differs = [
        f"{name}: {found.conditions.get(name, 'none')} then, {conditions.get(name, 'none')} now"
        for name in [*conditions, *(found.conditions.keys() - conditions.keys())]
        if found.conditions.get(name) != conditions.get(name)
    ]
    if differs:
        what = f"the profile {path} does not hold here, because something differs: {'; '.join(differs)}"
        raise UsageError(explain(what, fix=f"{fix}, or name another file"))
    return found


def write(found: Profile, path: Path) -> None:
    """Write a profile to a file, whole or not at all."""
    write_text(path, to_json(asdict(found)))
