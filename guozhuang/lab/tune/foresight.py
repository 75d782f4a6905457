"""What is predicted of settings before they race, so that those that are far behind need no run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from guozhuang.cost.prediction.interval import BUSY
from guozhuang.cost.prediction.predict import BUCKETED, ONE_PROCESS, Prediction, machine_of, predict
from guozhuang.errors import UsageError
from guozhuang.lab.predict import profile as profiles
from guozhuang.lab.predict.cases import Case, unmeasured_machine, wanted
from guozhuang.lab.runs import Runs
from guozhuang.lab.tune.knobs import Choices, RunSetting

if TYPE_CHECKING:
    from rich.console import Console

#: A setting that is predicted to take no more than so many times as long as the best one races.
WITHIN = 1.3
#: Runs that take fewer seconds than this together are run without a profile, which would take as long.
PROFILE_S = 60.0


class Foresight:
    """Predicts the steps of settings on this machine from a profile, which is measured when it is worth its time.

    Args:
        what: the training.
        choices: the settings that there are.
        runs: executes what must be measured.
        path: the file of the profile; it need not exist.
        least_s: seconds that a race must be able to save for the profile to be measured.
        progress: for what is measured, and why nothing is predicted if so.
    """

    def __init__(
        self, what: profiles.Subject, choices: Choices, runs: Runs, path: Path, least_s: float, progress: Console
    ) -> None:
        self._what, self._choices, self._runs = what, choices, runs
        self._path, self._least_s, self._progress = path, least_s, progress

    def far_behind(self, settings: Sequence[RunSetting], runs_s: float) -> dict[str, str]:
        """Return why settings need no run, by the name of each that needs none: they are predicted to be far behind the best.

        How far that is at least, :data:`WITHIN` says; where the 90 % intervals of the two together are wider, it is as far as
        they are wide.

        Args:
            settings: those that are to race.
            runs_s: the seconds of the runs that may be saved.
        """
        found = self.predicted(settings, runs_s)
        if not found:
            return {}
        best = min(found, key=lambda name: found[name].step_s)
        reasons = {}
        for name, each in found.items():
            times = each.step_s / found[best].step_s
            if times > max(WITHIN, math.exp(math.hypot(_half_width(each), _half_width(found[best])))):
                reasons[name] = f"predicted to take {times:.2f} times as long as {best}; it was not run"
        return reasons

    def predicted(self, settings: Sequence[RunSetting], runs_s: float) -> dict[str, Prediction]:
        """Return the predictions of a step of the global batch, by the name of the setting.

        Args:
            settings: those that are to race. An optimizer in one kernel is predicted as the workload's own: all of a race have
                the same one.
            runs_s: the seconds of the runs that may be saved.

        Returns:
            One for each setting that can be predicted; nothing where the profile would take longer than the runs.
        """
        cases = {each.name: self._case(each) for each in settings if self._is_predictable(each)}
        if len(cases) < 2 or (runs_s < self._least_s and self._lacks(list(cases.values()))):
            return {}
        try:
            profile = profiles.kept(
                self._path, self._what, wanted(list(cases.values())), self._progress, lambda _: nullcontext(self._runs)
            )
        except UsageError as error:
            self._progress.print(f"Nothing is predicted: {error}", highlight=False, soft_wrap=True, markup=False)
            return {}
        if profile.busy > BUSY:
            what = f"other programs kept {profile.busy:.0%} of the cores busy when the profile was measured"
            self._progress.print(f"Nothing is predicted: {what}.", highlight=False)
            return {}
        found = {}
        for setting in settings:
            if setting.name not in cases:
                continue
            num_ranks = self._choices.num_ranks if setting.row.entry.one_process else setting.num_ranks
            case = cases[setting.name]
            try:
                found[setting.name] = predict(
                    profile,
                    machine_of(profile, case.backend),
                    setting.row.name.partition("@")[0],
                    num_ranks,
                    self._choices.global_batch // num_ranks,
                    num_threads=setting.num_threads,
                    cap_bytes=None if setting.cap_mb is None else int(setting.cap_mb * 2**20),
                )
            except UsageError:
                continue  # it races: its run says whether it can train
        return found

    def _is_predictable(self, setting: RunSetting) -> bool:
        strategy = setting.row.strategy
        is_known = strategy == ONE_PROCESS or not setting.row.entry.one_process
        is_capped = setting.cap_mb is not None and strategy not in BUCKETED
        return self._choices.on_cpu and is_known and not is_capped and setting.row.num_groups == 1

    def _lacks(self, cases: Sequence[Case]) -> bool:
        if not self._path.exists():
            return True
        return bool(wanted(cases).beside(profiles.read(self._path, self._what.conditions)).crowds)

    def _case(self, setting: RunSetting) -> Case:
        row = setting.row
        backend = row.backend or self._choices.backend
        here = unmeasured_machine(on_cpu=True)
        return Case(row, here, setting.num_ranks, setting.num_ranks, setting.num_threads, backend, is_here=True)


def _half_width(found: Prediction) -> float:
    low, high = found.interval_s
    return math.log(high / low) / 2
