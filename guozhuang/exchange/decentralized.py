"""Averages weights with all ranks or with one other rank while the next gradient is computed at the weights before the average.

Formula, with x_r the weights of rank r at the start of a step and g_r the gradient computed there: rank r's optimizer applies
g_r to the average, x_r <- step(avg(x)_r, g_r). "all": avg is the mean over ranks. "shift_one": avg is (x_r + x_p) / 2 with the
partner p of this exchange. The t-th exchange, for an even number of ranks n (Bagua's): p = ((t + r) mod n/2) + n/2 for r < n/2,
else p = (r - n/2 - t) mod n/2. For an odd n, which Bagua does not support: p = (t - r) mod n, and the one rank with p = r skips
the exchange; over n exchanges each rank is paired with each other rank once.
Error: the gradient is one exchange old, and with "shift_one" ranks differ until ``agree``; averages are computed in float32
(in float64 for float64 weights), and narrower weights are rounded once. Averaging keeps the sum of the weights over ranks, to
rounding. The average has equal bits on all ranks with "all", and on both ranks of a pair with "shift_one".
Traffic, each ``every`` steps: "all" 2 (n-1)/n of the weights, as an all-reduce, in float32 for narrower ones; "shift_one" the
weights once, in their own dtypes, to one other rank (for odd n (n-1)/n of that on average). No rank waits for it if forward and
backward take longer.
Source: Lian et al. 2017, arXiv:1705.09056 (D-PSGD); Gan et al. 2021, arXiv:2107.01499 (Bagua).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import override

from ..errors import UsageError, explain
from ..groups.subgroups import end_together
from ..weights.flat import Named
from .node_groups import NodeGroups, find_nodes, make_groups
from .weight_lane import WeightLane, mean, swap, through_nodes
from .weights import WeightExchange

_PEERS = ("all", "shift_one")


def partner(turn: int, rank: int, size: int) -> int | None:
    """Return the partner of ``rank`` in the exchange number ``turn`` under "shift_one"; None if the rank skips it."""
    if size % 2:
        other = (turn - rank) % size
        return None if other == rank else other
    half = size // 2
    return (turn + rank) % half + half if rank < half else (rank - half - turn) % half


@dataclass
class DecentralizedState:
    """The state of :class:`Decentralized`.

    Attributes:
        group: the ranks.
        lane: runs the exchanges in a thread and holds the copies of the weights that are sent; None for one rank.
        nodes: the groups inside and between nodes, for ``nodes_first``; else None.
    """

    group: dist.ProcessGroup
    lane: WeightLane | None
    nodes: NodeGroups | None = None


@dataclass(frozen=True)
class Decentralized(WeightExchange[DecentralizedState]):
    """Averages the weights while forward and backward run.

    The exchange starts after an optimizer step and its result is written before the next one. Nothing is sent before the first
    step, because all weights are still equal.

    Args:
        peers: "all" for the mean over ranks, "shift_one" for one other rank at a time.
        every: how many optimizer steps from one average to the next.
        nodes_first: average inside each node first; then the first ranks of the nodes exchange, and tell their nodes. Only they
            use the links between nodes. "all" is then the mean of the nodes' means, whatever their numbers of ranks.

    Raises:
        UsageError: ``peers`` is another word, or ``every`` is below 1; from ``prepare``: "shift_one" has no second node.
    """

    peers: Literal["all", "shift_one"] = "all"
    every: int = 1
    nodes_first: bool = False

    def __post_init__(self) -> None:
        if self.peers not in _PEERS:
            raise UsageError(explain("peers is one of 'all' and 'shift_one'", value=self.peers))
        if self.every < 1:
            raise UsageError(explain("every is a number of steps, at least 1", value=self.every))

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> DecentralizedState:
        """Allocate a copy of the weights, two for "shift_one", and make a second group of the ranks. Every rank must call."""
        if group.size() == 1:
            return DecentralizedState(group, None)
        nodes = None
        if self.nodes_first:
            nodes = make_groups(group, find_nodes(group, None))
            if self.peers == "shift_one" and len(nodes.nodes.members) == 1:
                what = "shift_one pairs nodes if weights are averaged inside each node first, and there is one node"
                fix = "pair the ranks themselves, without a mean inside nodes first (hierarchical=False in Bagua)"
                raise UsageError(explain(what, value=f"{group.size()} ranks", rank=group.rank(), fix=fix))
        return DecentralizedState(group, WeightLane(parameters, group, 1 if self.peers == "all" else 2), nodes)

    def before_step(self, state: DecentralizedState, step: int) -> None:
        """Wait for the average of the weights at which the gradient was computed, and write it into the parameters.

        Raises:
            WorldError: a rank has ended, or did not take part within the group's time-out.
        """
        lane = state.lane
        if lane is not None and lane.in_flight:
            lane.wait()
            lane.flat.write(lane.copies[0])

    def after_step(self, state: DecentralizedState, step: int) -> None:
        """Start to average the new weights, in every ``every``-th step."""
        lane = state.lane
        if lane is None or (step + 1) % self.every:
            return
        lane.drop()
        lane.flat.read(lane.copies[0])
        lane.start(lambda: self._average(lane, state.nodes, step))

    def _average(self, lane: WeightLane, nodes: NodeGroups | None, step: int) -> None:
        lane.not_finite.look(lane.flat, lane.copies[0], step)
        if nodes is None:
            self._exchange(lane, lane.group, step)
            return
        through_nodes(lane.copies[0], lane.copies[0], nodes, lambda: self._exchange(lane, nodes.across, step))

    def _exchange(self, lane: WeightLane, group: dist.ProcessGroup, step: int) -> None:
        mine = lane.copies[0]
        if self.peers == "all":
            mean(mine, group)
            return
        other = partner((step + 1) // self.every, group.rank(), group.size())
        if other is not None:
            pairs = enumerate(zip(mine, lane.copies[1], strict=True))
            swap([(other, x, y, tag) for tag, (x, y) in pairs], group, "whose turn it was")
            for x, y in zip(mine, lane.copies[1], strict=True):
                if x.itemsize < 4:  # the sum of two float16 or bfloat16 could overflow
                    x.copy_((x.float() + y) / 2)
                else:
                    x += y
                    x /= 2

    def agree(self, state: DecentralizedState) -> None:
        """Replace the weights by the mean over all ranks; the result of a running average of these weights is dropped."""
        if state.lane is not None:
            state.lane.agree()

    @override
    def close(self, state: DecentralizedState) -> None:
        state.lane = None

    def end(self, state: DecentralizedState) -> None:
        """Wait for a running average, drop its result, and end the groups that ``prepare`` made. Every rank must call."""
        if state.lane is not None:
            state.lane.end(state.group)
        if state.nodes is not None:
            end_together([state.nodes.inside, state.nodes.across], state.group)
        self.close(state)

    def load_state_dict(self, state: DecentralizedState, saved: Mapping[str, Any]) -> None:
        """Drop a running average, because it is not of the weights that were loaded."""
        if state.lane is not None:
            state.lane.drop()
        super().load_state_dict(state, saved)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float:
        """Return the bytes of one all-reduce, or one message, divided by ``every``; :meth:`agree` is not counted."""
        num_bytes = num_elements * element_bytes
        if world_size == 1:
            return 0.0
        if self.peers == "all":
            return 2 * (world_size - 1) * num_elements * max(4, element_bytes) / world_size / self.every
        meets = (world_size - 1) / world_size if world_size % 2 else 1.0
        return meets * num_bytes / self.every
