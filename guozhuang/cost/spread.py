"""Ranks that take part in a synchronous step wait for the slowest of them: by how much the step grows with their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, explain
from .cluster import Cluster
from .collectives import collective_cost
from .simulate import Costs, StepTime, simulate
from .trace import HAND_OVER, RECV, SEND, Compute, Start, Trace, Wait

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Spread:
    """How much the steps of one rank differ from each other, without any communication.

    Attributes:
        observed: times of single steps of one rank, in any unit; their mean counts as 1.
        correlation: the share of the variance that all ranks have in common, from 0 to 1: of two ranks that compute side by
            side without communication, the correlation of their steps' times.
        slow: ranks that are slower all the time, and by what factor.
    """

    observed: tuple[float, ...]
    correlation: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.observed or min(self.observed) <= 0:
            raise UsageError(
                explain("a spread is made of times of steps", value=self.observed[:8], fix="measure some steps")
            )
        if not 0 <= self.correlation <= 1:
            raise UsageError(explain("a correlation of ranks is from 0 to 1", value=self.correlation))

    def factors(self, num_ranks: int, num_repetitions: int, seed: int = 0) -> np.ndarray[Any, Any]:
        """Draw how many times as long as on average each rank computes in each repetition.

        Draws are from the observed steps, in logarithms; the common share of the variance is one draw for all ranks.

        Returns:
            ``(num_repetitions, num_ranks)``, float64; without ``slow`` its expected value is 1, to first order.
        """
        import numpy as np

        logs = np.log(np.asarray(self.observed) / np.mean(self.observed))
        draw = np.random.default_rng(seed).choice
        common, center = draw(logs, (num_repetitions, 1)), logs.mean()
        own = draw(logs, (num_repetitions, num_ranks))
        share = self.correlation
        found: np.ndarray[Any, Any] = np.exp(
            center + share**0.5 * (common - center) + (1 - share) ** 0.5 * (own - center)
        )
        for rank, factor in self.slow:
            found[:, rank % num_ranks] *= factor
        return found

    def slowest(self, num_ranks: int, num_draws: int = 200, averaged_steps: int = 1, seed: int = 0) -> float:
        """Return how many times as long the slowest rank computes as one rank does on average.

        Args:
            num_ranks: the ranks that wait for each other.
            num_draws: how many steps are drawn.
            averaged_steps: the steps between two waits, over which differences average out.
            seed: of the draws.
        """
        import numpy as np

        drawn = self.factors(num_ranks, num_draws * averaged_steps, seed)
        return float(np.mean(drawn.reshape(num_draws, averaged_steps, num_ranks).mean(axis=1).max(axis=1)))


def simulate_spread(
    trace: Trace,
    cluster: Cluster,
    spread: Spread,
    *,
    costs: Costs = collective_cost,
    crowding: Sequence[float] = (),
    num_repetitions: int = 12,
    seed: int = 0,
    alone: StepTime | None = None,
) -> float:
    """Return the seconds of a training step in which each rank's work takes a time of its own in each repetition.

    One rank is simulated with all sharing of cores and links (:func:`guozhuang.cost.simulate.simulate`). The times that this
    found are repeated for all ranks, each with factors of its own, and every collective begins when its last rank has come.

    Args:
        trace: that of every rank; what it sends to a rank, each sends to the rank as far away. Calls among some ranks are
            among ``g`` ranks with a constant distance ``s``, and the other ranks are in such groups too: all ranks are divided
            into blocks of ``g * s``.
        cluster: where the ranks run.
        spread: of the steps of one rank.
        costs: as for ``simulate``.
        crowding: as for ``simulate``.
        num_repetitions: of the trace, the first of which does not count.
        seed: of the factors.
        alone: what ``simulate`` found for the trace, if that is known already.

    Raises:
        UsageError: the trace has a collective among ranks that are not such a group.
    """
    import numpy as np

    found = alone or simulate(trace, cluster, costs=costs, crowding=crowding)
    factors = spread.factors(trace.num_ranks, num_repetitions, seed)
    num_ranks = trace.num_ranks
    clocks = {event.thread: np.zeros(num_ranks) for event in trace.events}
    clocks.setdefault(0, np.zeros(num_ranks))
    lanes: dict[int, list[np.ndarray[Any, Any]]] = {}
    ends: dict[int, np.ndarray[Any, Any]] = {}
    first, sent = 0.0, np.zeros(num_ranks)
    for repetition in range(num_repetitions):
        for event, seconds in zip(trace.events, found.stretched, strict=True):
            clock = clocks[event.thread]
            if isinstance(event, Compute):
                clock += seconds * factors[repetition]
            elif isinstance(event, Wait):
                if event.call in ends:
                    np.maximum(clock, ends[event.call], out=clock)
            elif event.operation == SEND:
                ends[event.call] = sent = clock + seconds
            elif event.operation == RECV:  # from another rank, which does what this one does
                sender, receiver = event.ranks
                ends[event.call] = np.maximum(clock, np.roll(sent, receiver - sender))
                if event.blocking:
                    np.maximum(clock, ends[event.call], out=clock)
            elif event.operation == HAND_OVER or len(event.ranks) == 1:
                ends[event.call] = clock.copy()
            else:
                free = lanes.setdefault(event.group, [np.zeros(num_ranks) for _ in range(cluster.transport.lanes)])
                begun = np.maximum(clock, np.minimum.reduce(free))
                ends[event.call] = end = _last_of(begun, event) + seconds
                # The lane that is free first takes the call; lanes are equal, so which one does not matter.
                ordered = np.sort(np.stack(free), axis=0)
                ordered[0] = end
                lanes[event.group] = list(ordered)
                if event.blocking:
                    np.maximum(clock, end, out=clock)
        if repetition == 0:
            first = float(clocks[0].max())
    return (float(clocks[0].max()) - first) / (num_repetitions - 1) / trace.num_steps


def _last_of(times: np.ndarray[Any, Any], start: Start) -> np.ndarray[Any, Any]:
    """Return for each rank the latest time within its group."""
    import numpy as np

    size, ranks = len(times), start.ranks
    if len(ranks) == size:
        return np.full(size, times.max())
    step = ranks[1] - ranks[0]
    regular = step > 0 and list(ranks) == list(range(ranks[0], ranks[0] + step * len(ranks), step))
    if not regular or size % (step * len(ranks)):
        what = (
            "ranks with times of their own can be simulated where all ranks do the same, in groups of equal distances"
        )
        raise UsageError(explain(what, value=start, fix="simulate a trace of each rank"))
    latest: np.ndarray[Any, Any] = times.reshape(-1, len(ranks), step).max(axis=1, keepdims=True)
    return np.repeat(latest, len(ranks), axis=1).reshape(size)
