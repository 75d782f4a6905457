"""Draw the conclusion of a comparison in sentences: which strategy to use, why, and how.

The rules depend on the results alone:

1. Only strategies that train and finished can be recommended; a bound on speed cannot, nor an exact strategy
   whose ranks ended with different weights, nor one that diverged: its final loss is not a number, or it exceeds the loss
   of the first step by more than :data:`DIVERGED` times that loss. Strategies that cannot be recommended are left out of all
   comparisons too. An inexact strategy can be recommended; the verdict calls it inexact and compares it with the fastest
   exact one.
2. The fastest strategy is the one with the highest median of samples/s.
3. Another strategy ties with the fastest if the ranges of both over the rounds overlap and the medians are less than
   :data:`TIE` apart (with one round there are no ranges: less than :data:`TIE_OF_ONE_ROUND`). Of tied strategies, the simplest
   is chosen. The headline says that it is a tie.
4. Nothing is recommended that the spread does not carry: if a strategy that does not tie has a round as fast as the slowest
   one of the fastest; if the rounds of one that ties differ by more than the factor :data:`RESTLESS`; or if there is one
   round, which has no spread, and other programs used more than :data:`BUSY` of the cores.
5. If the number of rounds was left open, a strategy gets a third round only where that could change rule 3: its two rounds
   differ by more than :data:`SETTLED`, or it is that close to another one at the top. Where the rounds of a strategy differ by
   more than the factor :data:`RESTLESS`, no strategy gets one: the machine is busy otherwise, and a third would not tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from guozhuang import units
from guozhuang.lab.results import PHASES, MeasuredRound, Results, StrategyRow
from guozhuang.watch.pace import PHASES as OWN_PHASES
from guozhuang.watch.pace import OwnTime, behind, sentence
from guozhuang.world.layout import Layout

TIE = 0.10
TIE_OF_ONE_ROUND = 0.03

#: The difference of samples/s in rule 5 of the module's docstring, as a share of the slower value.
SETTLED = 0.05

#: If the fastest round is faster than the slowest by more than this factor, other programs kept the machine busy.
RESTLESS = 1.25

#: If other programs use more than this share of the cores, the machine is not quiet; an idle desktop stays below.
BUSY = 0.2

#: If weights are further than this relative distance from those of ``single``, rounding alone is not the likely reason (fp32,
#: some hundred steps).
ROUNDING_DISTANCE = 1e-3

#: A training diverged if its loss rose by more than this many times the loss of the first step.
DIVERGED = 10.0


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a comparison.

    Attributes:
        recommended: the strategy's name; None if none can be recommended.
        headline: the conclusion in one sentence.
        reasons: the arguments for the conclusion, a sentence or two each.
        how: lines of code and shell that use the strategy.
        cautions: warnings about the results; why a strategy failed stands in its row.
    """

    recommended: str | None
    headline: str
    reasons: tuple[str, ...]
    how: tuple[str, ...]
    cautions: tuple[str, ...]


def judge(results: Results) -> Verdict:
    """Draw the conclusion from the results, by the rules in the docstring of this module."""
    candidates = [row for row in results.rows if row.ok and row.trains and not _drifted(row) and not _diverged(row)]
    if not candidates:
        ended = any(row.ok and row.trains for row in results.rows)
        why = "every strategy that trains went astray" if ended else "no strategy that trains came to its end"
        headline = f"Nothing to recommend: {why}."
        return Verdict(None, headline, (), (), tuple(_cautions(results, None, candidates)))
    fastest = max(candidates, key=lambda row: row.samples_per_s)
    tied = [row for row in candidates if row is fastest or _tie(fastest, row)]
    why = _not_carried(results, fastest, tied, candidates)
    if why:
        slower = [row.name for row in candidates if row.fastest < fastest.slowest]
        reasons = (
            [f"Slower than {fastest.name} in every round: {units.listed(slower)}."]
            if slower and len(fastest.rounds) > 1
            else []
        )
        cautions = tuple(_cautions(results, None, candidates))
        return Verdict(None, f"Nothing to recommend: {why}.", tuple(reasons), (), cautions)
    chosen = min(tied, key=lambda row: row.simplicity)
    reasons = [
        _speed(results, chosen, fastest, candidates),
        *_efficiency(results, chosen),
        _time(chosen),
        *_memory(results, chosen),
        *_compression(chosen, candidates),
    ]
    return Verdict(
        chosen.name,
        _headline(chosen, tied, candidates),
        tuple(reasons),
        how(results, chosen),
        tuple(_cautions(results, chosen, candidates)),
    )


def undecided(speeds: Mapping[str, Sequence[float]], training: Collection[str]) -> set[str]:
    """Return the strategies of which another round could change the verdict, by rule 5 in the docstring of this module.

    Args:
        speeds: samples/s of each round, by strategy; only strategies that have not failed.
        training: the names of the strategies that train.
    """
    names = {name for name, each in speeds.items() if max(each) > (1 + SETTLED) * min(each)}
    medians = {name: statistics.median(each) for name, each in speeds.items() if name in training}
    near = {name for name, median in medians.items() if max(medians.values()) <= (1 + SETTLED) * median}
    return names | (near if len(near) > 1 else set())


def restless(speeds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the strategies whose rounds differ so much that other programs kept the machine busy, and by which factor."""
    ratios = {name: max(each) / min(each) for name, each in speeds.items() if each and min(each) > 0}
    return {name: ratio for name, ratio in ratios.items() if ratio > RESTLESS}


def how(results: Results, row: StrategyRow) -> tuple[str, ...]:
    """Return the lines of code and shell with which a user's own training script uses the strategy of a row."""
    settings = results.settings
    num_processes = 1 if row.one_process else settings.num_ranks
    shares = 1
    if not row.one_process:
        shares = Layout.parse(row.layout, row.strategy or row.name, num_processes).dp
    batch_size = settings.global_batch_size // shares
    replicas = f", num_replicas={settings.num_ranks}" if row.name == "dp" else ""
    chosen = f"--strategy {row.strategy or row.name}"
    chosen += f" --backend {row.asked_backend}" if row.asked_backend is not None else ""
    chosen += f" --groups {row.num_groups}" if row.num_groups > 1 else ""
    chosen += f" --layout {row.layout}" if row.layout else ""
    chosen += f" --schedule {row.schedule}" if row.schedule else ""
    needs_loss = row.schedule not in ("", "gpipe") and row.strategy in ("pipeline", "hybrid")
    loss = ", loss=loss_fn" if needs_loss else ""
    step = "loss = model.step(x, y)  # in place of model(x), loss_fn and loss.backward()"
    return (
        "# in train.py:",
        "import guozhuang as gz",
        "world = gz.init()",
        f"model, optimizer = gz.prepare(model, optimizer{replicas}{loss})  # when both are made",
        f"for batch in gz.loader(dataset, batch_size={batch_size}): ...  # each rank takes its share",
        *([step] if needs_loss else []),
        "",
        "# in the shell:",
        f"guozhuang run --nproc-per-node {num_processes} {chosen} train.py",
    )


def _headline(chosen: StrategyRow, tied: Sequence[StrategyRow], candidates: Sequence[StrategyRow]) -> str:
    others = [row.name for row in tied if row is not chosen]
    if others:
        apart = "their rounds overlap" if len(chosen.rounds) > 1 else "one round cannot tell them apart"
        return f"Take {chosen.name}: a statistical tie with {units.listed(others)} ({apart}), and the simplest of them."
    if len(candidates) == 1:
        return f"Take {chosen.name}: it is the only strategy here that trains and came to its end with a usable result."
    inexact = "" if chosen.exact else ", and it is inexact"
    return f"Take {chosen.name}: it is the fastest strategy that trains this workload on this machine{inexact}."


def _not_carried(
    results: Results, fastest: StrategyRow, tied: Sequence[StrategyRow], candidates: Sequence[StrategyRow]
) -> str:
    """Return why the spread carries no verdict, by rule 4; empty if it does."""
    if len(candidates) == 1:
        return ""
    if len(fastest.rounds) == 1:
        if results.busy <= BUSY:
            return ""
        return (
            f"other programs kept {units.percent(results.busy)} of the cores busy, and one round does not show by how much "
            "rounds differ then. Run it again when nothing else computes, or with --rounds 3"
        )
    reached = [row for row in candidates if row.fastest >= fastest.slowest and row not in tied]
    if len(tied) > 1 and restless({row.name: (row.slowest, row.fastest) for row in tied}):
        reached += [row for row in tied if row is not fastest]
    if not reached:
        return ""
    ranges = units.listed(
        f"{row.name} trained {units.rate(row.slowest)} to {units.rate(row.fastest)} samples/s"
        for row in (fastest, *reached)
    )
    return (
        f"rounds differ by more than strategies do, so that the fastest of them is not certain: {ranges}. Run it again when "
        "nothing else computes, with more --rounds"
    )


def _speed(results: Results, chosen: StrategyRow, fastest: StrategyRow, candidates: Sequence[StrategyRow]) -> str:
    text = f"It trains {units.rate(chosen.samples_per_s)} samples/s"
    if len(chosen.rounds) > 1:
        text += f" ({units.rate(chosen.slowest)} to {units.rate(chosen.fastest)} over {len(chosen.rounds)} rounds)"
    text += f", an epoch in {units.duration(results.epoch_s(chosen))}"
    others = [row for row in candidates if row is not chosen]
    runner_up = max(others, key=lambda row: row.samples_per_s).name if others else "single"
    is_restless = restless({row.name: (row.slowest, row.fastest) for row in candidates})
    ratios = [
        f"{units.times(ratio)} {name}"
        + (f" (at least {units.times(chosen.slowest / other.fastest)})" if is_restless else "")
        for name in dict.fromkeys(("single", "torch-ddp", runner_up))
        if name != chosen.name and (other := results.row(name)) and (ratio := results.ratio(chosen, name)) is not None
    ]
    text += f": {' and '.join(ratios)}." if ratios else "."
    if chosen is not fastest:
        behind = 1 - chosen.samples_per_s / fastest.samples_per_s
        measured = (
            f"{fastest.name} measured {units.percent(behind)} more"
            if behind >= 0.005
            else f"{fastest.name} measured the same"
        )
        why = (
            "that is within what rounds differ by"
            if len(chosen.rounds) > 1
            else "one round cannot tell that from chance"
        )
        text += f" {measured}; {why}."
    return text


def _efficiency(results: Results, chosen: StrategyRow) -> list[str]:
    share = results.ratio(chosen, "none")
    none = results.row("none")
    if share is None or none is None:
        return []
    single = results.row("single")
    ranks = f"{results.settings.num_ranks} ranks"
    if chosen.one_process:
        if share < 1:
            return [
                f"The bound, {ranks} that do not communicate at all, is at {units.times(1 / share)} of it; "
                "no strategy reached that."
            ]
        return [
            f"{ranks[:1].upper()}{ranks[1:]} that do not communicate at all reach {units.percent(1 / share)} of it: "
            "on this machine no way of spreading the work over them can be faster."
        ]
    text = f"It reaches {units.percent(share)} of the bound (none: the same {ranks} without any communication)"
    if share < 0.98:
        text += f", so better communication alone could win at most {units.times(1 / share)}."
    elif share <= 1.02:
        text += ": communication costs next to nothing here."
    else:
        text += ": more than all, so it divides work that none repeats on every rank, or the rounds differ by chance."
    if single is not None and none.samples_per_s < single.samples_per_s:
        text += " The bound itself is below single: the cores are what limits this workload."
    return [text]


def _time(chosen: StrategyRow) -> str:
    phases = chosen.phases
    shares = {name: part / phases.step_s for name, part in zip(PHASES, phases.parts(), strict=True)}
    words = {
        "exchange": "communication that backward does not hide",
        "data": "fetching data",
        "optimizer": "the optimizer",
    }
    ordered = sorted((name for name in shares if shares[name] >= 0.005), key=lambda name: -shares[name])
    parts = ", ".join(f"{units.percent(shares[name])} {words.get(name, name)}" for name in ordered)
    return f"A step takes {units.duration(phases.step_s)}: {parts}."


def _memory(results: Results, chosen: StrategyRow) -> list[str]:
    used = chosen.machine_bytes
    if used is None:
        return []
    text = f"It needs {units.size(used)} of main memory"
    single = results.row("single")
    if single is not None and single.machine_bytes and chosen is not single:
        text += f" in all, {units.times(used / single.machine_bytes)} what single needs"
    return [text + "."]


def _compression(chosen: StrategyRow, candidates: Sequence[StrategyRow]) -> list[str]:
    """Return the reason that sending less does not pay, if an exact strategy was chosen among inexact ones; else nothing."""
    inexact = [row.name for row in candidates if not row.exact and row is not chosen]
    if not chosen.exact or not inexact:
        return []
    were = "was" if len(inexact) == 1 else "were"
    return [
        f"Sending less does not pay here: {units.listed(inexact)} (inexact) {were} not faster beyond what rounds differ by."
    ]


def _inexact(chosen: StrategyRow, candidates: Sequence[StrategyRow]) -> list[str]:
    """Return a caution that compares a recommended inexact strategy with the fastest exact one."""
    if chosen.exact:
        return []
    text = f"{chosen.name} is inexact: its weights are not those that one process would end with."
    exact = [row for row in candidates if row.exact]
    if exact:
        best = max(exact, key=lambda row: row.samples_per_s)
        text += f" The fastest exact strategy is {best.name}, with {units.rate(best.samples_per_s)} samples/s"
        name = next((name for name in chosen.metrics if name in best.metrics), None)
        if name is not None:
            own, other = (units.metric(name, row.metrics[name]) for row in (chosen, best))
            text += f"; {name} at the end {own} against {other}"
        text += "."
    return [text + " What it costs shows at the end of a whole training, not in so few steps: try both on yours."]


def _cautions(results: Results, chosen: StrategyRow | None, candidates: Sequence[StrategyRow]) -> list[str]:
    found = [] if chosen is None else _inexact(chosen, candidates)
    for row in results.rows:
        if row.ok and _drifted(row):
            found.append(f"{row.name} claims to be exact, and its ranks ended with different weights: do not use it.")
        if row.ok and _diverged(row):
            found.append(
                f"{row.name} began with a loss of {row.losses[0]:.4g} and ended with one of {row.final_loss:.4g}: "
                "training diverged, and its results mean nothing."
            )
    found += _far(results)
    found += _waits(results)
    busy = restless({row.name: (row.slowest, row.fastest) for row in results.rows if row.ok})
    if busy:
        most = max(busy, key=lambda name: busy[name])
        whose = f"those of {most}" if len(busy) == 1 else f"of {units.listed(busy)}, most those of {most}"
        found.append(
            f"The machine was not quiet: rounds differ, {whose}, by {units.times(busy[most])}. "
            "Run it again when nothing else computes, with more --steps."
        )
    if results.settings.num_rounds == 1:
        found.append("One round shows no spread: run at least three before a small difference is believed.")
    return found


def _waits(results: Results) -> list[str]:
    """Return for whom ranks wait: a rank that is slow in all rounds, or whichever is slowest in a step."""
    found = []
    for row in results.rows:
        if not row.ok or not row.exact or not row.trains or row.num_processes == 1 or row.phases.exchange_s is None:
            continue
        slow = [{(each.rank, each.phase): each for each in behind(_own_times(one))} for one in row.rounds]
        for (rank, phase), first in slow[0].items():
            if all((rank, phase) in each for each in slow):
                found.append(f"Under {row.name}, {sentence(first)}.")
    bound = next((row for row in results.rows if row.ok and row.name == "none"), None)
    exact = [r for r in results.rows if r.ok and r.trains and r.exact and r.num_processes > 1 and r.drift_s is not None]
    if bound is not None and bound.drift_s is not None and exact:
        best = max(exact, key=lambda row: row.samples_per_s)
        apart_s = best.phases.step_s - bound.phases.step_s
        if bound.drift_s > 0 and apart_s > 0:
            found.append(
                f"Of the {units.duration(apart_s)} by which a step of {best.name} is longer than one of none, "
                f"{units.duration(min(bound.drift_s, apart_s))} are no cost of an exchange: ranks drift. Under none each goes "
                "on at its own pace, and whoever trains together waits in each step for the rank that is slowest in it."
            )
    return found


def _own_times(one: MeasuredRound) -> dict[int, OwnTime]:
    """Return the own times of all ranks in a round."""
    found = {}
    for rank in one.ranks:
        own = {name: getattr(rank.phases, f"{name}_s") * 1e3 for name in OWN_PHASES}
        found[rank.rank] = OwnTime(one.number, own, rank.phases.step_s * 1e3, rank.num_steps)
    return found


def _far(results: Results) -> list[str]:
    """Return a caution about the exact strategies whose weights ended far from those of ``single``, with the likely cause."""
    far = {
        row.name: row.difference.distance
        for row in results.rows
        if row.ok and row.exact and row.difference is not None and not row.difference.distance <= ROUNDING_DISTANCE
    }  # a NaN counts as far too
    if not far:
        return []
    most = max(far.values(), key=lambda distance: math.inf if math.isnan(distance) else distance)
    apart = units.tiny(most) if len(far) == 1 else f"up to {units.tiny(most)}"
    return [
        f"{units.listed(far)} ended {apart} (relative distance of all weights) away from single, more than rounding explains "
        f"at first sight.{_why_far(results, list(far))}"
    ]


def _why_far(results: Results, names: Sequence[str]) -> str:
    """Return the likely causes of weights that differ from those of ``single``, as sentences with a space before them."""
    found = ""
    rows = [row for row in results.rows if row.name in names]
    number = max(row.rounds[0].ranks[0].num_batch_norms for row in rows)
    if number and results.settings.num_ranks > 1:
        layers = "a BatchNorm layer, which normalizes" if number == 1 else f"{number} BatchNorm layers, which normalize"
        found += (
            f" The likely cause is batch normalization: the model has {layers} over the {results.settings.batch_size} samples "
            f"of one rank here, and over all {results.settings.global_batch_size} under single. To normalize over the samples "
            "of all ranks: gz.SyncBatchNorm.convert_sync_batchnorm(model)."
        )
    dropout = results.workload_details.get("dropout")
    if dropout not in (None, 0, 0.0, "0", "0.0", "none", "no", "off"):
        found += (
            f" Dropout is on ({dropout}): ranks draw other masks than one process does, "
            "so equal weights cannot be expected."
        )
    return found


def _tie(fastest: StrategyRow, other: StrategyRow) -> bool:
    apart = 1 - other.samples_per_s / fastest.samples_per_s
    if len(fastest.rounds) < 2 or len(other.rounds) < 2:
        return abs(apart) < TIE_OF_ONE_ROUND
    return other.fastest >= fastest.slowest and abs(apart) < TIE


def _drifted(row: StrategyRow) -> bool:
    return row.exact and row.ranks_identical is False


def _diverged(row: StrategyRow) -> bool:
    """Return whether training diverged, by rule 1; after a first loss of 0 it did if the final loss exceeds ``DIVERGED``."""
    first, last = row.losses[0], row.final_loss
    return not math.isfinite(last) or last - first > DIVERGED * (abs(first) or 1.0)


def short(cause: str, num_characters: int = 200) -> str:
    """Return the first line of the cause of a failure, cut to a maximum length."""
    line = cause.strip().splitlines()[0] if cause.strip() else "no reason was given"
    return line if len(line) <= num_characters else line[: num_characters - 1] + "…"
