"""Make the plan of a comparison from the command line's options, which are checked before any process starts."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from guozhuang import strategies, units, workloads
from guozhuang.errors import UsageError, explain
from guozhuang.lab.contender import Contender, contenders, short_set
from guozhuang.lab.options import DEFAULT_CPU_RANKS, DEFAULT_ROUNDS, DEFAULT_STEPS
from guozhuang.lab.progress import PlannedRun
from guozhuang.lab.results import ComparisonSettings
from guozhuang.lab.verdict import BUSY
from guozhuang.world.devices import SHARED_MEMORY, backend_of_cpu_ranks, num_cuda
from guozhuang.world.layout import HYBRID
from guozhuang.world.machine import usable_cores
from guozhuang.world.threads.settle import asked_threads

FEWEST_ROUNDS = 2
TIMELINE_STEPS = 10


@dataclass(frozen=True)
class ComparisonPlan:
    """The checked settings of a comparison.

    Attributes:
        contenders: the strategies and their backends, in the order of the table.
        workload: the workload's name, or ``module:function``.
        options: the options of the workload.
        settings: the other settings that the report prints.
        timeout_s: the time limit of one run.
        device: ``cpu``, ``cuda``, or None for CUDA where there is any.
        scratch: the folder for the runs' files.
        out: the folder of the report.
        timeline: the file for traces; None to write none.
        may_stop_early: whether the number of rounds was left open; see ``verdict.settled``.
        is_short: whether the strategies were left open, so that they are a short set that suits the machine.
    """

    contenders: tuple[Contender, ...]
    workload: str
    options: dict[str, Any]
    settings: ComparisonSettings
    timeout_s: float
    device: str | None
    scratch: Path
    out: Path
    timeline: Path | None
    may_stop_early: bool = False
    is_short: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rows, in the order of the table."""
        return tuple(one.name for one in self.contenders)

    def turn(self, number: int) -> tuple[Contender, ...]:
        """Return the contenders in the order of a round, from 1; it rotates, so that each runs early, late and in between."""
        first = (number - 1) % len(self.contenders)
        return (*self.contenders[first:], *self.contenders[:first])

    def part(self, number: int) -> str:
        """Return the name of a round; that of the timelines for 0."""
        return f"round {number}/{self.settings.num_rounds}" if number else "timeline"

    def run(self, contender: Contender, number: int) -> PlannedRun:
        """Return the run of a contender in a round, or for number 0 that of its timeline."""
        num_steps = self.settings.num_steps if number else min(self.settings.num_steps, TIMELINE_STEPS)
        num_steps += self.settings.num_warmup_steps
        return PlannedRun(contender.name, self.part(number), number == 1, num_steps, contender.entry.one_process)

    def runs(self) -> Iterator[tuple[Contender, int]]:
        """Yield the contender and the round's number (0: timeline) of every run, in the order in which they are made."""
        for number in range(1, self.settings.num_rounds + 1):
            yield from ((one, number) for one in self.turn(number))
        if self.timeline is not None:
            yield from ((one, 0) for one in self.contenders)

    def trace_file(self, contender: Contender) -> Path:
        """Return the file for a contender's timeline; there must be ``timeline``."""
        assert self.timeline is not None
        suffix = self.timeline.suffix or ".json"
        one = len(self.contenders) == 1
        return self.timeline if one else self.timeline.with_name(f"{self.timeline.stem}-{contender.name}{suffix}")


def plan_of(namespace: argparse.Namespace, scratch: Path, console: Any) -> tuple[ComparisonPlan, dict[str, Any]]:
    """Check the command line, and load the workload once, so that mistakes are reported before any process starts.

    Args:
        namespace: the parsed command line.
        scratch: a folder for the runs' files, and for data that the workload prepares once for all runs.
        console: a rich console, for a message that the workload is being loaded.

    Returns:
        The plan, and the workload's description of itself.
    """
    on_cpu = namespace.device == "cpu" or not torch.cuda.is_available()
    num_ranks = namespace.ranks if namespace.ranks is not None else default_ranks(on_cpu, num_cuda())
    compared = contenders(_names(namespace, on_cpu, num_ranks), namespace.backend, namespace.groups, on_cpu, num_ranks)
    for option, least, why in (
        ("ranks", 1, ""),
        ("steps", 1, ""),
        ("epochs", 1, ""),
        ("rounds", 1, ""),
        ("threads_per_rank", 1, ""),
        ("warmup_steps", 2, ": the first step builds buckets and the optimizer's state, a later one is weighed"),
    ):
        value = getattr(namespace, option)
        if value is not None and value < least:
            raise UsageError(explain(f"--{option.replace('_', '-')} is a count of at least {least}{why}", value=value))
    if not namespace.timeout > 0:
        raise UsageError(explain("--timeout is a number of seconds above 0", value=namespace.timeout))
    if namespace.steps is not None and namespace.epochs is not None:
        raise UsageError(explain("--steps and --epochs were both given", fix="give one of them"))
    out = writable(namespace.out)
    if namespace.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            explain("there is no CUDA device on this machine", value="--device cuda", fix="say --device cpu")
        )
    if namespace.timeline is not None and namespace.timeline.is_dir():
        fix = "name a file; FILE-strategy.json are written"
        raise UsageError(explain("--timeline is a folder", value=str(namespace.timeline), fix=fix))
    if namespace.timeline is not None:
        writable(namespace.timeline.absolute().parent, "--timeline")
    options = workloads.options_from(namespace.workload, namespace)
    console.print(f"Loading the workload {workloads.title(namespace.workload)} …", highlight=False)
    workload = workloads.load(namespace.workload, options, scratch / "data")
    dataset_size = len(workload.train)  # type: ignore[arg-type]
    global_batch_size = num_ranks * workload.batch_size
    if dataset_size < global_batch_size:
        what = (
            f"the training data is smaller than one global batch: {num_ranks} ranks {units.TIMES} "
            f"{workload.batch_size} samples"
        )
        fix = "use fewer ranks, a smaller batch or more data"
        raise UsageError(explain(what, value=dataset_size, fix=fix))
    num_steps = namespace.steps if namespace.steps is not None else DEFAULT_STEPS
    if namespace.epochs is not None:
        steps_per_epoch = dataset_size // global_batch_size
        num_steps = namespace.epochs * steps_per_epoch - namespace.warmup_steps
        if num_steps < 1:
            what = f"an epoch is {steps_per_epoch} steps; {namespace.warmup_steps} of warm-up leave none to measure"
            fix = "give more epochs, fewer --warmup-steps, a smaller batch, or --steps"
            raise UsageError(explain(what, value=namespace.epochs, fix=fix))
    settings = ComparisonSettings(
        num_ranks=num_ranks,
        num_steps=num_steps,
        num_warmup_steps=namespace.warmup_steps,
        num_rounds=namespace.rounds if namespace.rounds is not None else DEFAULT_ROUNDS,
        num_epochs=namespace.epochs,
        seed=namespace.seed,
        threads_per_rank=namespace.threads_per_rank or asked_threads()[1] or max(1, usable_cores() // num_ranks),
        batch_size=workload.batch_size,
        dataset_size=dataset_size,
    )
    plan = ComparisonPlan(
        compared,
        namespace.workload,
        options,
        settings,
        namespace.timeout,
        namespace.device,
        scratch,
        out,
        namespace.timeline,
        namespace.rounds is None,
        namespace.strategies is None and not namespace.all,
    )
    return plan, dict(workload.details)


def conditions(plan: ComparisonPlan, details: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be the same for finished runs of an interrupted comparison to count in this one, by its name.

    Rounds and strategies may be others: each run of a strategy stands for itself.
    """
    settings = plan.settings
    return {
        "workload": workloads.title(plan.workload),
        **{f"workload option {name}": json.dumps(value) for name, value in plan.options.items()},
        **{f"workload's {name}": str(value) for name, value in details.items()},
        **{f"file {name}": state for name, state in workloads.origin(plan.workload, plan.options).items()},
        "ranks": str(settings.num_ranks),
        "steps": str(settings.num_steps),
        "warm-up steps": str(settings.num_warmup_steps),
        "seed": str(settings.seed),
        "threads per rank": str(settings.threads_per_rank),
        "batch size": str(settings.batch_size),
        "training samples": str(settings.dataset_size),
        "device": plan.device or "chosen",
    }


def default_ranks(on_cpu: bool, num_devices: int) -> int:
    """Return how many ranks are compared if none are asked for: a rank for each CUDA device, or two on CPUs."""
    return DEFAULT_CPU_RANKS if on_cpu else num_devices


def _names(namespace: argparse.Namespace, on_cpu: bool, num_ranks: int) -> str:
    """Return the strategies that are to be compared, as ``--strategies`` writes them."""
    if namespace.strategies is not None and namespace.all:
        raise UsageError(explain("--strategies and --all were both given", fix="give one of them"))
    if namespace.strategies is not None:
        return str(namespace.strategies)
    if namespace.all:
        return ",".join(name for name in strategies.STRATEGIES if name != HYBRID)  # which needs a layout
    backend = namespace.backend or backend_of_cpu_ranks(["this node"] * num_ranks)[0]
    return ",".join(short_set(on_cpu, backend == SHARED_MEMORY))


def writable(folder: Path, option: str = "--out") -> Path:
    """Make a folder if there is none, and return its absolute path; raise UsageError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            explain(
                f"{option}: nothing can be written there: {error.strerror}",
                value=str(folder),
                fix="give another folder",
            )
        ) from error
    return folder.absolute()


def notes_of(plan: ComparisonPlan, busy: float = 0.0) -> tuple[str, ...]:
    """Return warnings for the reader of the report: settings or a busy machine under which the numbers mean less.

    Args:
        plan: the settings.
        busy: the share of the cores that other programs kept busy before the comparison began, or after it.
    """
    found = []
    if busy > BUSY:
        found.append(f"Something else kept {units.percent(busy)} of the cores busy when the comparison began or ended.")
    settings = plan.settings
    cores = usable_cores()
    asked, number = asked_threads()
    if asked:
        counts = number == settings.threads_per_rank
        found.append(
            f"OMP_NUM_THREADS={asked} {'counts' if counts else 'does not count'} here: each rank computes with "
            f"{settings.threads_per_rank} thread(s); strategies of one process compute with all {cores} cores."
        )
    wanted = settings.num_ranks * settings.threads_per_rank
    if wanted > cores:
        found.append(
            f"{settings.num_ranks} ranks with {settings.threads_per_rank} thread(s) each share {cores} cores: they "
            "take turns, so strategies of several ranks look slower than on a machine with a core per thread."
        )
    if "single" not in plan.names:
        found.append("single was not compared, so there is no difference of weights and no speed-up over it.")
    found += _warming(plan)
    return tuple(found)


def _warming(plan: ComparisonPlan) -> list[str]:
    """Return a note for each strategy that still sends whole gradients in some or all of its measured steps."""
    settings, found = plan.settings, []
    for one in plan.contenders:
        left = one.entry.warmup_steps - settings.num_warmup_steps
        if left > 0:
            share = "all" if left >= settings.num_steps else f"{left} of the {settings.num_steps}"
            found.append(
                f"{one.name} sends whole gradients in its first {one.entry.warmup_steps} steps, as {share} measured ones were: "
                f"its speed after them shows with --warmup-steps {one.entry.warmup_steps}."
            )
    return found
