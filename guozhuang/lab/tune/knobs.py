"""The settings of a training that ``guozhuang tune`` tries, and which of them each knob changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from guozhuang import strategies
from guozhuang.errors import UsageError, explain
from guozhuang.lab.contender import Contender, contenders, short_set
from guozhuang.lab.tune.arguments import KNOBS
from guozhuang.world.devices import SHARED_MEMORY

_CAPS_MIB = (1.0, 6.0, 100.0, 400.0)  # beside the default of 25: about equal steps of the logarithm
_GROUPS = (2, 4)


@dataclass(frozen=True)
class RunSetting:
    """One complete way to start a training.

    Attributes:
        row: strategy, backend, groups and layout, as a row of a comparison has them.
        num_ranks: how many processes share the global batch.
        num_threads: the compute threads of each.
        is_fused: whether the optimizer is made with ``fused=True``.
        cap_mb: the cap of a bucket of gradients, in MiB; None: the default.
    """

    row: Contender
    num_ranks: int
    num_threads: int
    is_fused: bool = False
    cap_mb: float | None = None

    @property
    def name(self) -> str:
        """Return the setting in words, by which tables and races name it."""
        found = f"{self.row.name}, {self.num_ranks} rank{'s' * (self.num_ranks != 1)} of {self.num_threads} thread"
        found += "s" * (self.num_threads != 1)
        found += ", fused" if self.is_fused else ""
        found += f", buckets of {self.cap_mb:g} MiB" if self.cap_mb is not None else ""
        return found + (f", {self.row.num_groups} groups" if self.row.num_groups > 1 else "")


@dataclass(frozen=True)
class Choices:
    """The settings that there are for a training on a machine, by what decides about them.

    Attributes:
        on_cpu: whether the ranks compute on CPUs.
        num_cores: the cores that all ranks share.
        num_ranks: the ranks of the default setting.
        global_batch: the samples of a step, of all ranks together.
        backend: what carries collectives where a row names nothing.
        asked_backend: ``--backend``; None: it was not given.
        asked: ``--strategies``; None: it was not given.
        is_fused: whether the workload's optimizer is fused already.
    """

    on_cpu: bool
    num_cores: int
    num_ranks: int
    global_batch: int
    backend: str
    asked_backend: str | None = None
    asked: str | None = None
    is_fused: bool = False

    def default(self) -> RunSetting:
        """Return the setting that a user has who chooses nothing."""
        return self._settings("ddp", self.num_ranks)[0] if self.num_ranks > 1 else self._settings("single", 1)[0]

    def others(self, knob: str, now: RunSetting, parallel: RunSetting | None) -> tuple[list[RunSetting], str]:
        """Return the settings that a knob gives beside the present one, and why there are none, if so.

        Args:
            knob: one of ``KNOBS``.
            now: the fastest setting so far.
            parallel: the fastest one so far of several ranks; None if none was measured.
        """
        row = now.row
        if knob == "ranks":
            return self._of_ranks(now)
        if knob == "fused":
            is_fused = now.is_fused or self.is_fused
            return ([], "the optimizer is fused already") if is_fused else ([replace(now, is_fused=True)], "")
        if knob == "strategy":
            return self._of_strategies(now, parallel), "there is no other that suits the machine"
        carried = row.backend or self.backend
        if row.entry.one_process or now.num_ranks == 1:
            return [], "one process exchanges nothing"
        if carried == SHARED_MEMORY:
            return [], "in shared memory no bucket waits for a link"
        if knob == "cap":
            try:
                strategies.check_bucket_cap(row.entry, 1.0)
            except UsageError:
                return [], f"strategy {row.strategy} has no cap"
            return [replace(now, cap_mb=cap) for cap in _CAPS_MIB], ""
        if not row.entry.takes_groups or row.layout is not None:
            return [], f"strategy {row.strategy} uses one group"
        return [replace(now, row=replace(row, num_groups=k)) for k in _GROUPS], ""

    def _of_ranks(self, now: RunSetting) -> tuple[list[RunSetting], str]:
        if not self.on_cpu:
            return [], "each CUDA device has its rank"
        counts = [2**i for i in range(self.num_cores.bit_length())]
        counts = [n for n in counts if n <= self.num_cores and self.global_batch % n == 0 and n != now.num_ranks]
        found = [self._settings("single" if n == 1 else "ddp", n)[0] for n in counts]
        return (
            found,
            f"the global batch of {self.global_batch} samples and {self.num_cores} core(s) allow no other number",
        )

    def _of_strategies(self, now: RunSetting, parallel: RunSetting | None) -> list[RunSetting]:
        num_ranks = now.num_ranks if parallel is None or now.num_ranks > 1 else parallel.num_ranks
        text = self.asked
        if text is None:
            names = short_set(self.on_cpu, self.backend == SHARED_MEMORY)
            exact = [n for n in names if strategies.get(n).exact and strategies.get(n).trains]
            text = ",".join(n for n in exact if num_ranks > 1 or strategies.get(n).one_process)
        found = [replace(each, is_fused=now.is_fused) for each in self._settings(text, num_ranks)]
        return [each for each in found if self._what_runs(each) != self._what_runs(now)]

    def _what_runs(self, setting: RunSetting) -> RunSetting:
        """Return the setting without the words in which it was asked for, and with the backend that it gets."""
        row = setting.row
        backend = None if row.entry.one_process else row.backend or self.backend
        return replace(setting, row=replace(row, name="", backend=backend))

    def _settings(self, text: str, num_ranks: int) -> list[RunSetting]:
        rows = contenders(text, self.asked_backend, 1, self.on_cpu, num_ranks)
        for row in rows:
            if not row.entry.trains:
                what = f"strategy {row.strategy} is a bound on speed, not a way to train"
                raise UsageError(explain(what, value=row.name, fix="leave it out of --strategies"))
        per_rank = max(1, self.num_cores // num_ranks)
        return [
            RunSetting(row, 1, self.num_cores) if row.entry.one_process else RunSetting(row, num_ranks, per_rank)
            for row in rows
        ]


def chosen_knobs(text: str) -> tuple[str, ...]:
    """Return the knobs that ``--knobs`` names, in the order in which they are raced.

    Raises:
        UsageError: there is no such knob, or none is named.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in KNOBS]
    if unknown or not names:
        what = "there is no such knob" if unknown else "--knobs names none"
        raise UsageError(explain(what, value=unknown[0] if unknown else text, fix=f"give some of {', '.join(KNOBS)}"))
    return tuple(knob for knob in KNOBS if knob in names)


def best_cap(seconds: dict[float, float]) -> float | None:
    """Return the cap at the minimum of the parabola through the times over the logarithm of the cap; None if it has none.

    Args:
        seconds: the time of a step by the cap in MiB.

    Returns:
        A cap inside the range of those measured, in MiB, to two digits.
    """
    if len(seconds) < 4:
        return None
    logs = np.log(list(seconds))
    bend, slope, _ = np.polyfit(logs - logs.mean(), np.log(list(seconds.values())), 2)
    at = logs.mean() - slope / (2 * bend) if bend > 0 else math.inf
    return float(f"{math.exp(at):.2g}") if logs.min() < at < logs.max() else None
