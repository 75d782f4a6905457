"""``guozhuang tune``: race settings of a training, one knob after the other, and write the plan of the fastest."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from guozhuang import units
from guozhuang.cost.race import Race, RaceOutcome, Rules
from guozhuang.errors import UsageError, explain
from guozhuang.lab.plan import default_ranks, writable
from guozhuang.lab.predict import profile as profiles
from guozhuang.lab.predict.profile import Subject, subject
from guozhuang.lab.results import RunFailure
from guozhuang.lab.runs import Runs, ended_by_signals
from guozhuang.lab.tune.arguments import OF_THE_RESULT
from guozhuang.lab.tune.foresight import PROFILE_S, Foresight
from guozhuang.lab.tune.knobs import Choices, RunSetting, best_cap, chosen_knobs
from guozhuang.lab.unfinished import alone_in
from guozhuang.lab.verdict import short
from guozhuang.lab.worker import RunSpec
from guozhuang.launch.options.plan_file import TrainingPlan, replaced_plan, write_plan
from guozhuang.records import differences
from guozhuang.world.devices import backend_of_cpu_ranks, num_cuda
from guozhuang.world.layout import Layout
from guozhuang.world.machine import describe, usable_cores

if TYPE_CHECKING:
    from rich.console import Console

_FALSE_WINS = 0.05  # of all knobs together


def run(namespace: argparse.Namespace, python_path: Sequence[str] = ()) -> int:
    """Tune as the command line asks: race, write the plan, print what was found.

    Args:
        namespace: the parsed options.
        python_path: the folders that ``guozhuang run`` adds to the ranks' PYTHONPATH, relative to this package.

    Returns:
        0; 130 if interrupted. No process is left behind, and no part of a file.

    Raises:
        UsageError: an option cannot work, another tuner writes to the same folder, or every setting failed.
    """
    from rich.console import Console

    progress = Console(stderr=True)
    try:
        plan = _tuned(namespace, progress, python_path)
    except KeyboardInterrupt:
        progress.print("Interrupted: every process was ended. Nothing was written.", highlight=False)
        return 130
    if namespace.json:
        sys.stdout.write(namespace.out.read_text())
    else:
        _show(Console(), plan, namespace.out)
    return 0


def _tuned(namespace: argparse.Namespace, progress: Console, python_path: Sequence[str]) -> TrainingPlan:
    imported = set(sys.modules)
    knobs = chosen_knobs(namespace.knobs)
    rules = _checked(namespace, len(knobs))
    out: Path = namespace.out.absolute()
    replaced_plan(out, is_tuned=True)
    if namespace.profile is not None:
        if namespace.profile.resolve() == out.resolve():
            fix = "name another file for the profile"
            raise UsageError(explain("--profile and --out are one file", value=str(namespace.profile), fix=fix))
        writable(namespace.profile.absolute().parent, "--profile")
        if namespace.profile.is_dir():
            raise UsageError(explain("--profile is a folder", value=str(namespace.profile), fix="name a file"))
    with ExitStack() as until_end:
        until_end.enter_context(ended_by_signals())
        until_end.enter_context(alone_in(out.parent, "tuner"))
        scratch = Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="guozhuang-")))
        what = subject(namespace, scratch, progress)
        choices = _choices(namespace, what)
        given = {name: getattr(namespace, name) for name in OF_THE_RESULT}
        given |= {"knobs": ",".join(knobs), "ranks": choices.num_ranks}
        tuned_on = {**what.conditions, **{f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}}
        if out.exists() and (earlier := _earlier(namespace, out, tuned_on, progress)) is not None:
            return earlier
        profile = namespace.profile or scratch / "profile.json"
        if profile.exists():
            profiles.read(profile, what.conditions)
        choices.others("strategy", choices.default(), None)  # finds mistakes in --strategies before any process starts
        modules = [name for name in sys.modules if name not in imported and not name.startswith("torch.")]
        per_rank = max(1, choices.num_cores // choices.num_ranks)
        runs = until_end.enter_context(Runs(scratch, per_rank, modules, python_path))
        least_s = PROFILE_S if namespace.profile is None else 0.0
        foresight = Foresight(what, choices, runs, profile, least_s, progress)
        tuning = _Tuning(namespace, what, choices, runs, rules, progress, foresight)
        tuning.tune(knobs)
        plan = _plan(tuning, tuned_on)
        write_plan(plan, out)
        return plan


def _checked(namespace: argparse.Namespace, num_knobs: int) -> Rules:
    for option, least in (("ranks", 1), ("steps", 1), ("rounds", 3), ("warmup_steps", 2)):
        value = getattr(namespace, option)
        if value is not None and value < least:
            what = f"--{option.replace('_', '-')} is a count of at least {least}"
            raise UsageError(explain(what, value=value, fix=f"give {least} or more, or leave it out"))
    if not 0 < namespace.timeout < math.inf:
        what = "--timeout is a number of seconds above 0"
        raise UsageError(explain(what, value=namespace.timeout, fix="leave it out for 600"))
    if not 0 < namespace.margin < 100:
        what = "--margin is a percentage between 0 and 100"
        raise UsageError(explain(what, value=namespace.margin, fix="leave it out for 2"))
    return Rules(_FALSE_WINS / num_knobs, namespace.margin / 100, namespace.rounds)


def _choices(namespace: argparse.Namespace, what: Subject) -> Choices:
    on_cpu = what.device == "cpu" or not torch.cuda.is_available()
    num_ranks = namespace.ranks if namespace.ranks is not None else default_ranks(on_cpu, num_cuda())
    global_batch, size = num_ranks * what.workload.batch_size, len(what.workload.train)  # type: ignore[arg-type]
    if size < global_batch:
        text = f"the training data is smaller than one batch of {num_ranks} ranks, {global_batch} samples"
        raise UsageError(explain(text, value=size, fix="use fewer ranks, a smaller batch or more data"))
    backend = namespace.backend or (backend_of_cpu_ranks(["this node"] * num_ranks)[0] if on_cpu else "nccl")
    is_fused = bool(what.options.get("fused"))
    asked = (namespace.backend, namespace.strategies)
    return Choices(on_cpu, usable_cores(), num_ranks, global_batch, backend, *asked, is_fused=is_fused)


def _earlier(
    namespace: argparse.Namespace, out: Path, tuned_on: dict[str, str], progress: Console
) -> TrainingPlan | None:
    """Return the plan that a file holds already, if it was tuned for the same; say what differs if not."""
    found = replaced_plan(out, is_tuned=True)
    assert found is not None
    differs = differences(found.tuned_on, tuned_on)
    if differs:
        progress.print(
            f"The plan in {out} does not count here, and is made anew: {'; '.join(differs)}.",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        return None
    if namespace.fresh:
        return None
    same = "machine, versions and training are the same"
    progress.print(f"{out} holds this plan already: {same}. --fresh tunes again.", highlight=False, soft_wrap=True)
    return found


@dataclass
class _Tuning:
    """The state of the races: the fastest setting so far, and what each knob has shown.

    Attributes:
        foresight: predicts settings, so that those that are far behind do not race; None: all race.
        now: the fastest setting so far.
        parallel: the fastest one of several ranks, from the last race that had one.
        gain: the default's time divided by that of ``now``: the product of what the races have shown.
        found: a line for each knob.
        seconds: the time of a step of each setting that was measured, in the last race with it.
    """

    namespace: argparse.Namespace
    what: Subject
    choices: Choices
    runs: Runs
    rules: Rules
    progress: Console
    foresight: Foresight | None = None
    now: RunSetting = field(init=False)
    parallel: RunSetting | None = None
    gain: float = 1.0
    found: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def tune(self, knobs: Sequence[str]) -> None:
        """Race the settings of each knob in turn, each with the best of the knobs before."""
        self.now = self.choices.default()
        for knob in knobs:
            others, why_none = self.choices.others(knob, self.now, self.parallel)
            if not others:
                self._note(f"{knob}: {self.now.name}; {why_none}")
                continue
            outcome = self._race(knob, [self.now, *others])
            if knob == "cap" and (cap := best_cap(self._by_cap(outcome))) is not None:
                following = replace(self.now, cap_mb=cap)
                if following.name not in outcome.seconds:
                    self._race("cap, by the parabola through these", [self.now, following])

    def _by_cap(self, outcome: RaceOutcome) -> dict[float, float]:
        caps = {replace(self.now, cap_mb=cap).name: cap or 25.0 for cap in (None, *(x.cap_mb for x in self._last))}
        return {caps[name]: value for name, value in outcome.seconds.items() if name in caps}

    def _race(self, knob: str, settings: Sequence[RunSetting]) -> RaceOutcome:
        """Race settings, the present one first; take up the winner."""
        by_name = {setting.name: setting for setting in settings}
        self._last = list(settings)
        race = Race(list(by_name), self.rules)
        self.progress.print(f"{knob}: {'; '.join(by_name)}", highlight=False, soft_wrap=True, markup=False)
        while not race.is_over:
            times = {}
            for name in race.turn():
                if name not in race.alive:
                    continue
                began = time.monotonic()
                took = self._run(by_name[name], race.num_rounds + 1)
                if race.num_rounds == 0 and name == settings[0].name:
                    # A slow setting would be run twice before it is dropped.
                    saved_s = 2 * (time.monotonic() - began) * (len(settings) - 1)
                    far = {} if self.foresight is None else self.foresight.far_behind(settings, saved_s)
                    for other, why in far.items():
                        if other != name:
                            race.drop(other, why)
                if isinstance(took, str):
                    race.drop(name, took)
                else:
                    times[name] = took
            if race.alive and all(name in times for name in race.alive):
                race.add(times)
        outcome = race.outcome()
        self.now = by_name[outcome.chosen]
        self.gain *= outcome.ratio
        self.seconds.update(outcome.seconds)
        several = [s for s in settings if s.num_ranks > 1 and s.name in outcome.seconds]
        if several:
            self.parallel = min(several, key=lambda setting: outcome.seconds[setting.name])
        self._note(f"{knob}: {outcome.headline}")
        for name, why in outcome.left.items():
            self._note(f"  not {name}: {why}")
        return outcome

    def _note(self, line: str) -> None:
        self.found.append(line)
        self.progress.print(line, highlight=False, soft_wrap=True, markup=False)

    def _run(self, setting: RunSetting, number: int) -> float | str:
        """Run a setting once; return the seconds of a step of the global batch, or why it failed."""
        namespace, row = self.namespace, setting.row
        one_process = row.entry.one_process
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.what.folder))
        spec = RunSpec(
            name=setting.name,
            strategy=row.strategy,
            purpose="timing",
            folder=str(folder),
            workload=self.what.name,
            options=self.what.options,
            data_folder=str(self.what.folder / "data"),
            num_ranks=self.choices.num_ranks if one_process else setting.num_ranks,
            num_threads=setting.num_threads,
            num_cores=self.choices.num_cores,
            num_steps=namespace.steps,
            num_warmup_steps=namespace.warmup_steps,
            seed=namespace.seed,
            timeout_s=namespace.timeout,
            device=self.what.device,
            backend=row.backend,
            num_groups=row.num_groups,
            layout=row.layout,
            schedule=row.schedule,
            batch_size=None if one_process else self.choices.global_batch // setting.num_ranks,
            is_fused=setting.is_fused,
            bucket_cap_mb=setting.cap_mb,
        )
        outcome = self.runs.execute(spec, folder / "log", lambda step: None)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(outcome, RunFailure):
            took: float | str = f"failed: {short(outcome.cause)}"
        else:
            took = max(rank.median_step_s for rank in outcome)
        said = took if isinstance(took, str) else units.duration(took) + " a step"
        self.progress.print(f"  round {number}: {setting.name}: {said}", highlight=False, soft_wrap=True, markup=False)
        return took


def _plan(tuning: _Tuning, tuned_on: dict[str, str]) -> TrainingPlan:
    now, choices, machine = tuning.now, tuning.choices, describe()
    # Ranks that hold one copy of the model together take a batch together.
    copies = now.num_ranks // Layout.parse(now.row.layout, now.row.strategy, now.num_ranks).model_size
    in_the_script = [f"batches of {choices.global_batch // copies} samples (gz.loader's batch_size)"]
    if now.row.strategy == "dp":
        in_the_script.append(f"gz.prepare(..., num_replicas={choices.num_ranks})")
    if choices.on_cpu and torch.cuda.is_available():
        in_the_script.append('gz.init(device="cpu")')
    if now.is_fused:
        in_the_script.append("an optimizer made with fused=True")
    step_s = tuning.seconds.get(now.name, math.nan)
    prediction: dict[str, Any] = {"step_s": step_s, "times_as_fast_as_the_default": tuning.gain}
    prediction["default"] = choices.default().name
    prediction["seconds_of_each"] = dict(tuning.seconds)
    return TrainingPlan(
        num_nodes=1,
        ranks_per_node=now.num_ranks,
        strategy=now.row.strategy,
        device="cpu" if choices.on_cpu else "cuda",
        layout=now.row.layout,
        schedule=now.row.schedule,
        backend=now.row.backend,
        groups=now.row.num_groups if now.row.num_groups > 1 else None,
        bucket_cap_mb=now.cap_mb,
        threads_per_rank=now.num_threads,
        in_the_script=tuple(in_the_script),
        why="\n".join(tuning.found),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        versions={"guozhuang": machine.guozhuang, "torch": machine.torch, "python": machine.python},
        prediction=prediction,
        tuned_on=tuned_on,
    )


def _show(console: Console, plan: TrainingPlan, path: Path) -> None:
    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(plan.why)
    gain = float(plan.prediction["times_as_fast_as_the_default"])
    if gain > 1:
        say(f"\nTogether {units.times(gain)} {plan.prediction['default']}, the default.")
    else:
        say(f"\nThe default stays: {plan.prediction['default']}.")
    for each in plan.in_the_script:
        say(f"  in the script: {each}")
    say(f"  {plan.command()}\n  guozhuang run --plan {path} train.py")
