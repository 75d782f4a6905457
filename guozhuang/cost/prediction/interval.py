"""How far a prediction may be off: what is known of each thing that makes it uncertain, and what would take that away."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from guozhuang.cost.cluster import Cluster
from guozhuang.cost.collectives import MOST_EXTRAPOLATED, collective_cost
from guozhuang.cost.fit import bootstrap, percentile
from guozhuang.cost.prediction.profile import Profile
from guozhuang.cost.trace import Start, Trace

#: Measurements that take a doubt away: of the step itself, of the links, of the profile on an idle machine.
COMPARE, CHECK, PROFILE = "compare", "check", "profile"
#: By what factor a step that was measured may differ the next time.
REPEATED = 1.05
_RARELY, _GRADIENTS, _ACTIVATIONS = "no exchange, or a rare one", "gradients", "activations"
_KINDS: Final = {
    "none": _RARELY, "single": _RARELY, "local-sgd": _RARELY, "ddp": _GRADIENTS, "torch-ddp": _GRADIENTS,
    "sharded": _GRADIENTS, "fp16": _GRADIENTS, "quantize8": _GRADIENTS, "pipeline": _ACTIVATIONS, "tensor": _ACTIVATIONS,
}  # fmt: skip
#: By what is exchanged and whether a network carries it: the factor within which nine of ten measured steps lay of their
#: prediction, and how many configurations that are: BERT-tiny and mini, 2 and 4 ranks, shared memory, loopback, links of 10, 1
#: and 0.1 Gbit/s, all on one host with 2 cores, each measured once, with ``benchmarks/prediction.py``. They were read
#: off these same configurations: that they hold about nine of ten of them is no check.
MEASURED: Mapping[tuple[str, bool], tuple[float, int]] = {
    (_RARELY, False): (1.29, 11), (_RARELY, True): (1.46, 20), (_GRADIENTS, False): (1.23, 30),
    (_GRADIENTS, True): (1.54, 48), (_ACTIVATIONS, False): (1.35, 12), (_ACTIVATIONS, True): (2.17, 14),
}  # fmt: skip
_UNCOMPARED, _A_DOUBLING, _LINKS = 1.25, 1.15, 1.5
_SMALL = 4096  # bytes of the smallest collective that a profile measures; smaller ones cost as much
#: A profile is in doubt if other programs used more than this share of the cores while it was measured.
BUSY = 0.2


@dataclass(frozen=True)
class Doubt:
    """One thing that makes a prediction uncertain.

    Attributes:
        why: what it is, in a few words; empty for what every prediction has: the errors of those that were checked.
        factor: if this were all, nine of ten steps would lie within this factor of their prediction.
        remedy: the measurement that takes it away: :data:`COMPARE`, :data:`CHECK` or :data:`PROFILE`; empty if there is none.
    """

    why: str
    factor: float
    remedy: str = ""


def half_width(doubts: Sequence[Doubt], without: str | None = None) -> float:
    """Return half the width of the interval that these make together, as a logarithm: they are independent of each other.

    Args:
        doubts: all there are.
        without: a measurement that is supposed to have been made; None: none. One of the step itself takes all away.
    """
    if without == COMPARE:
        return math.log(REPEATED)
    return math.hypot(*(math.log(each.factor) for each in doubts if without is None or each.remedy != without))


def checked(strategy: str, cluster: Cluster) -> tuple[str, Doubt]:
    """Return where the errors of such predictions are known from, and how large they were."""
    kind = _KINDS.get(strategy, _GRADIENTS)
    factor, count = MEASURED[kind, cluster.num_nodes > 1]
    over = "over a network" if cluster.num_nodes > 1 else "on one host"
    source = f"{kind} {over}: a factor of {factor:g} ({count} configurations)"
    return source, Doubt("", factor, COMPARE)


def doubts(
    profile: Profile,
    cluster: Cluster,
    strategy: str,
    batch: int,
    on_one_machine: int,
    threads: int,
    traces: Sequence[Trace],
    exposed: float,
) -> list[Doubt]:
    """Return what a configuration has that those did not have whose predictions were checked, and how steady steps are.

    Args:
        profile: what was measured.
        cluster: of so many ranks as train.
        strategy: its name.
        batch: samples that a process has in a step.
        on_one_machine: ranks that share a machine.
        threads: compute threads of each.
        traces: what is simulated.
        exposed: the share of the step that waits for communication.
    """
    found = [Doubt("", math.exp(_spread_of_median(profile.lone_steps)), COMPARE)]
    if strategy not in _KINDS:
        found.append(Doubt(f"no step of {strategy} was compared with its prediction", _UNCOMPARED, COMPARE))
    most = profile.most_ranks(threads)
    if on_one_machine > most:
        why = f"{on_one_machine} ranks on one machine, measured up to {most}"
        found.append(Doubt(why, _A_DOUBLING ** _doublings(on_one_machine, max(most, 1)), COMPARE))
    low, high = profile.measured_batches()
    if not low <= batch <= high:
        why = f"{batch} samples a step, measured from {low} to {high}"
        found.append(Doubt(why, _A_DOUBLING ** max(_doublings(batch, high), _doublings(low, batch)), COMPARE))
    starts = {(e.operation, e.num_bytes, e.ranks) for trace in traces for e in trace.events if isinstance(e, Start)}
    links = [cluster.inside] * (cluster.ranks_per_node > 1) + [cluster.between] * (cluster.num_nodes > 1)
    if starts and any(not link.table and link.name != "measured" for link in links):
        found.append(Doubt("links as described, not as measured", 1 + (_LINKS - 1) * min(1.0, 0.1 + exposed), CHECK))
    largest: dict[str, tuple[str, int, tuple[int, ...]]] = {}  # what a small one costs, latency, was measured
    for each in sorted(each for each in starts if each[1] >= _SMALL):
        largest[each[0]] = each
    far = max((collective_cost(*each, cluster).extrapolated for each in largest.values()), default=1.0)
    if far > MOST_EXTRAPOLATED:
        why = f"collectives {far:.0f} times as large, or among as many times the ranks, as were measured"
        factor = 1 + (_A_DOUBLING ** math.log2(far) - 1) * min(1.0, 0.1 + exposed)
        found.append(Doubt(why, factor, CHECK))
    if profile.busy > BUSY:
        why = f"other programs kept {profile.busy:.0%} of the cores busy when the profile was measured"
        found.append(Doubt(why, 1 + profile.busy, PROFILE))
    return found


def _doublings(larger: float, smaller: float) -> float:
    return max(0.0, math.log2(larger / smaller))


def _spread_of_median(steps: Sequence[float]) -> float:
    """Return half the width of the 90 % interval of the median of observed steps, as a logarithm, by a bootstrap."""

    def median(drawn: Sequence[Sequence[float]]) -> float:
        return percentile(sorted(itertools.chain.from_iterable(drawn)), 0.5)

    drawn = bootstrap([[step] for step in steps], median)
    return (math.log(percentile(drawn, 0.95)) - math.log(percentile(drawn, 0.05))) / 2
