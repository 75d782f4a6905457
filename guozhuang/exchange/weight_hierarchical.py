"""Averages gradients inside each node in every step, and exchanges weights between nodes by a method of your choice.

Formula, with k_j ranks on node j: every rank of node j steps with g = (1 / k_j) sum of the gradients of node j's ranks. These
ranks start with equal weights, so they stay equal, bit for bit, and act as one worker with a batch k_j times as large.
``outer`` exchanges weights among these workers, each of which counts once, whatever its k_j.
Error: that of ``outer`` with as many ranks as there are nodes.
Traffic: inside each node, an all-reduce of the gradients in every step, and a broadcast of the weights each time ``outer``
changes them. Between nodes, each node sends as much as one rank does with ``outer`` in a world of one rank per node.
Source: DiLoCo, Douillard et al. 2023, arXiv:2311.08105, whose workers are sites of many devices; hierarchical local SGD, Lin et
al. 2020, arXiv:1808.07217.

[Note: leaders act, others follow] The first rank of each node (the leader) takes part in ``outer`` with the whole weights; only
leaders hold the state of ``outer``. Around each call of ``outer`` the leader compares the version counters of its weights,
which torch raises with each in-place change, so no values are read. An all-reduce reports to the node whether they changed; if
so, the leader's weights are broadcast. So the ranks of a node follow whenever ``outer`` acts, and keep equal bits.

[Note: steps that a rank of a node missed] A rank whose data has ended takes part with gradients of zero and makes no optimizer
step, so its weights are behind those of its node. ``miss_step`` announces this; before the optimizer's step the rank reports it
to its node, and after that step it gets the weights of a rank that made the step, before the leader acts. It does not get the
optimizer's state: with an optimizer that has one (momentum, Adam's moments), the ranks of the node make different steps after
the ``join()`` and differ, except right after a broadcast of the leader's weights. A node without any data left takes part in
``outer`` with its current weights, as a single rank would. If a rank leaves out a step outside ``join()``, its node waits for
it in that step, and it waits for its node in the next backward, up to the time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..groups.subgroups import end_together
from ..weights.flat import FlatWeights, Named, as_real
from .allreduce import AllReduce
from .around import AroundWeights
from .base import Done, GradientExchange, Work, check_saved
from .hierarchical import is_plain
from .node_groups import (
    NodeGroups,
    find_nodes,
    groups_alone,
    inside_of,
    make_groups,
    node_sizes,
    num_groups,
    on_leaders,
)
from .warmup import after_warmups
from .weight_lane import naming_peers
from .weights import WeightExchange


@dataclass
class InsideNodesState:
    """The state of :class:`InsideNodes`, made once per bucket layout.

    Attributes:
        node: the group of this rank's node; None if every rank has a node of its own.
        num_ranks: the number of ranks on all nodes.
        inner: the state of the exchange inside the node; None for a rank that is alone on its node.
        everywhere: the state of the exchange over all ranks.
    """

    node: dist.ProcessGroup | None
    num_ranks: int
    inner: Any
    everywhere: Any


@dataclass(frozen=True)
class InsideNodes(GradientExchange[InsideNodesState]):
    """Averages gradients over the ranks of each node only; ``WeightHierarchical`` creates it.

    Args:
        inner: the exchange of gradients inside a node.
        outer: the exchange of weights between nodes; in steps in which it averages gradients, they are averaged over all ranks.
        identities: see ``WeightHierarchical``.
    """

    inner: GradientExchange[Any]
    outer: WeightExchange[Any]
    identities: Sequence[str] | None = None

    @property
    def _everywhere(self) -> GradientExchange[Any]:
        return self.outer.gradients() or AllReduce()

    @property
    @override
    def one_round(self) -> bool:
        return self.inner.one_round and self._everywhere.one_round

    @property
    @override
    def averages(self) -> bool:
        """False: the number of ranks that still have data is counted over all nodes, so it cannot correct one node's mean."""
        return False

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: InsideNodesState | None = None
    ) -> InsideNodesState:
        if before is None:
            nodes = find_nodes(group, self.identities)
            node, inner, everywhere = None if nodes.is_flat else inside_of(group, nodes), None, None
        else:
            node, inner, everywhere = before.node, before.inner, before.everywhere
        if node is not None and node.size() > 1:
            inner = self.inner.prepare(buckets, node, inner)
        return InsideNodesState(node, group.size(), inner, self._everywhere.prepare(buckets, group, everywhere))

    @override
    def start(self, bucket: Bucket, state: InsideNodesState, step: int) -> Work:
        if self.outer.averages_gradients(step):
            chosen, its_state, size = self._everywhere, state.everywhere, state.num_ranks
        else:
            if state.node is None or state.node.size() == 1:
                return Done()
            chosen, its_state, size = self.inner, state.inner, state.node.size()
        return chosen.scale_and_start(bucket, its_state, step, size)

    @override
    def state_dict(self, state: InsideNodesState) -> dict[str, Any]:
        """Return the saved state of the exchange over all ranks; the exchange inside nodes has none."""
        kept = self._everywhere.state_dict(state.everywhere)
        return {"everywhere": kept} if kept else {}

    @override
    def load_state_dict(self, state: InsideNodesState, saved: Mapping[str, Any]) -> None:
        if saved.keys() - {"everywhere"}:
            what = "the checkpoint was saved with another exchange of gradients"
            raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))
        self._everywhere.load_state_dict(state.everywhere, saved.get("everywhere", {}))

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return the bytes sent inside a node if ``identities`` give all nodes equally many ranks, else None."""
        counts = node_sizes(self.identities, world_size)
        if len(set(counts)) != 1:
            return None
        return 0 if counts[0] == 1 else self.inner.traffic(num_elements, element_bytes, counts[0])


@dataclass
class WeightHierarchicalState:
    """The state of :class:`WeightHierarchical`.

    Attributes:
        members: the ranks of each node.
        group: the group of all ranks.
        groups: the groups inside and between nodes; None if every rank has a node of its own.
        made: all groups that were made for this state, which :meth:`WeightHierarchical.end` ends.
        outer: the state of the exchange between nodes; None on ranks that do not lead their node.
        weights: the parameters, as real numbers.
        flat: the layout of the parameters in the flat tensors that are broadcast.
        flags: buffer of the all-reduce by which the ranks of a node compare numbers.
        num_missed: how many steps this rank missed since it last got the weights of a rank that made them.
        source: the local rank whose weights the node gets after the next step, because some ranks miss that step; else None.
    """

    members: list[list[int]]
    group: dist.ProcessGroup
    groups: NodeGroups | None
    made: list[dist.ProcessGroup]
    outer: Any
    weights: list[Tensor]
    flat: FlatWeights
    flags: Tensor
    num_missed: int = 0
    source: int | None = None

    @property
    def acts(self) -> bool:
        """Whether this rank takes part in the exchange between nodes."""
        return self.groups is None or self.groups.leads

    def version(self) -> int:
        """Return a number that grows with every in-place change of the weights."""
        return sum(each._version for each in self.weights)


@dataclass(frozen=True)
class WeightHierarchical(AroundWeights[WeightHierarchicalState], inner="outer"):
    """Exchanges gradients through ``inner`` inside a node in every step, and weights through ``outer`` between nodes.

    With one rank per node it equals ``outer`` alone, bit for bit; on one node it is ``inner``, with an ``outer`` of one member.
    A warm-up belongs into ``outer``: ``WeightHierarchical(AllReduce(), WeightWarmup(100, AllReduce(), DiLoCo(50)))``, and so
    does an interval: ``WeightHierarchical(AllReduce(), Every(8, Average()))``. Gradients of the warm-up are averaged over all
    ranks. ``join(divide_by_initial_world_size=...)`` has no effect: sums are always divided by the number of ranks of the node.

    Args:
        inner: ``AllReduce()``, or ``Cast(dtype, AllReduce())``.
        outer: an exchange of weights whose ``in_step`` is True. It must change the weights in place, not through ``.data``, or
            the change is not noticed and not broadcast in the node.
        identities: one text per rank, equal for ranks of one node, for example the name of a rack or a site. None: ranks that
            can share memory are on one node, which ``prepare`` finds out.

    Raises:
        UsageError: ``inner`` is another exchange, or ``outer`` is no weight exchange, is hierarchical, or is not ``in_step``.
    """

    inner: GradientExchange[Any]
    outer: WeightExchange[Any]
    identities: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not is_plain(self.inner):
            fix = "give AllReduce() or Cast(dtype, AllReduce())"
            raise UsageError(explain("WeightHierarchical sums plainly inside a node", value=self.inner, fix=fix))
        if not isinstance(self.outer, WeightExchange):
            fix = "Hierarchical(inner, outer) is for two exchanges of gradients"
            raise UsageError(explain("outer is an exchange of weights", value=self.outer, fix=fix))
        if isinstance(after_warmups(self.outer), WeightHierarchical):
            fix = "name the larger of the two kinds of nodes in `identities`, and use one WeightHierarchical"
            raise UsageError(explain("WeightHierarchical knows two levels", value=self.outer, fix=fix))
        if not self.outer.in_step:
            what = "gradients keep the ranks of a node in step, and this exchange lets each rank go at its own speed"
            fix = "use it without WeightHierarchical, or take one in step that hides its traffic: DiLoCo(overlap_steps=...)"
            raise UsageError(explain(what, value=self.outer, fix=fix))

    @override
    def inner_state(self, state: WeightHierarchicalState) -> Any:
        return state.outer

    @override
    def inner_acts(self, state: WeightHierarchicalState) -> bool:
        return state.acts

    @override
    def averages_gradients(self, step: int) -> bool:
        return True  # gradients are averaged inside nodes, or over all ranks in steps in which ``outer`` does so

    @override
    def gradients(self) -> GradientExchange[Any]:
        return InsideNodes(self.inner, self.outer, self.identities)

    # ---- methods that make the state

    @override
    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> WeightHierarchicalState:
        """Make the groups, and prepare ``outer`` on the first rank of each node. Every rank must call, with equal weights.

        Raises:
            UsageError: ``identities`` does not hold one text per rank; also the errors of ``outer.prepare``.
        """
        nodes = find_nodes(group, self.identities)
        groups = None if nodes.is_flat else make_groups(group, nodes)
        real = as_real(parameters)
        weights = [p for _, p in real]
        flags = torch.zeros(4, dtype=torch.int64, device=weights[0].device)
        members = [list(ranks) for ranks in nodes.members]
        state = WeightHierarchicalState(members, group, groups, [], None, weights, FlatWeights(real), flags)
        if groups is None:
            state.outer = self.outer.prepare(parameters, group)
            return state

        def prepare() -> None:
            state.outer = self.outer.prepare(parameters, groups.across)

        state.made = [groups.inside, groups.across]
        on_leaders(groups, prepare, flags.device, state.made)
        return state

    # ---- methods that act around an optimizer step, or end the exchange

    @override
    def miss_step(self, state: WeightHierarchicalState, step: int) -> None:
        super().miss_step(state, step)
        state.num_missed += 1

    @override
    def before_step(self, state: WeightHierarchicalState, step: int) -> None:
        """Let ``outer`` act, and find out whether ranks of this node miss the step."""
        if state.groups is None:
            state.num_missed = 0
            self.outer.before_step(state.outer, step)
            return
        changed, made = _did(state, lambda: self.outer.before_step(state.outer, step))
        here, size = state.groups.nodes.local_rank, state.groups.inside.size()
        least_missed = -(state.num_missed * size + here)
        most_changed, most_made, most_missed, least = _greatest(state, changed, made, state.num_missed, least_missed)
        state.made += groups_alone(state.groups, most_made - made)
        fewest_missed, source = divmod(-least, size)
        state.source = source if fewest_missed < most_missed else None
        if most_changed:
            _follow(state, 0)

    @override
    def after_step(self, state: WeightHierarchicalState, step: int) -> None:
        """Give ranks that missed the step the weights of a rank of their node that made it; then let ``outer`` act."""
        if state.groups is None:
            self.outer.after_step(state.outer, step)
            return
        if state.source is not None:
            _follow(state, state.source)
        state.num_missed, state.source = 0, None
        changed, made = _did(state, lambda: self.outer.after_step(state.outer, step))
        most_changed, most_made = _greatest(state, changed, made)
        state.made += groups_alone(state.groups, most_made - made)
        if most_changed:
            _follow(state, 0)

    @override
    def agree(self, state: WeightHierarchicalState) -> None:
        super().agree(state)
        if state.groups is not None:
            _follow(state, 0)

    @override
    def end(self, state: WeightHierarchicalState) -> None:
        super().end(state)
        if state.made:
            end_together(state.made, state.group)

    # ---- methods for checkpoints, and the traffic

    @override
    def state_dict(self, state: WeightHierarchicalState) -> dict[str, Any]:
        """Return "nodes" (each node's ranks), "outer" (on leaders, its state), "keeps" (whether ``outer`` has a state)."""
        kept = super().state_dict(state)
        keeps = bool(kept) if state.groups is None else bool(_greatest(state, bool(kept))[0])
        return {"nodes": state.members, "keeps": keeps, "outer": kept}

    @override
    def load_state_dict(self, state: WeightHierarchicalState, saved: Mapping[str, Any]) -> None:
        """Restore a saved state. If ``outer`` saved nothing, the ranks may be on other nodes than when it was saved."""
        check_saved(saved, {"nodes", "keeps", "outer"}, "WeightHierarchical")
        if saved["keeps"] and saved["nodes"] != state.members:
            what = f"the checkpoint was saved with the ranks on other nodes than {state.members}"
            fix = "start as many ranks on each node as then, in that order"
            raise UsageError(explain(what, value=saved["nodes"], fix=fix))
        if state.groups is None:
            self.outer.load_state_dict(state.outer, saved["outer"])
            return

        def load() -> None:
            self.outer.load_state_dict(state.outer, saved["outer"])

        on_leaders(state.groups, load, state.flags.device, state.made)

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return the bytes of ``outer`` if ``identities`` put every rank on a node of its own, else None.

        In general each node sends ``outer.traffic(num_elements, element_bytes, num_nodes)`` to other nodes; the bytes inside a
        node depend on how often ``outer`` changes the weights.
        """
        if set(node_sizes(self.identities, world_size)) != {1}:
            return None
        return self.outer.traffic(num_elements, element_bytes, world_size)


def _did(state: WeightHierarchicalState, act: Callable[[], None]) -> tuple[bool, int]:
    """Call ``act`` if this rank leads its node; return whether that changed the weights, and how many groups it made."""
    if not state.acts:
        return False, 0
    version, groups = state.version(), num_groups()
    act()
    return state.version() != version, num_groups() - groups


def _greatest(state: WeightHierarchicalState, *numbers: int) -> list[int]:
    """Return, for each of up to four numbers, the maximum over the ranks of the node. All ranks of the node must call."""
    assert state.groups is not None
    if state.groups.inside.size() == 1:
        return [int(each) for each in numbers]
    flags = state.flags[: len(numbers)]
    flags.copy_(torch.tensor(numbers))
    with _naming_the_node(state):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=state.groups.inside)
        return [int(each) for each in flags.tolist()]


@torch.no_grad()
def _follow(state: WeightHierarchicalState, source: int) -> None:
    """Broadcast the weights of the local rank ``source`` to all ranks of the node, all of which must call."""
    assert state.groups is not None
    inside = state.groups.inside
    if inside.size() == 1:
        return
    is_source = state.groups.nodes.local_rank == source
    flats = state.flat.copy() if is_source else state.flat.empty()
    with _naming_the_node(state):
        for flat in flats:
            if flat.numel():
                dist.broadcast(flat, group=inside, group_src=source)
    if not is_source:
        state.flat.write(flats)


def _naming_the_node(state: WeightHierarchicalState) -> AbstractContextManager[None]:
    """Turn an error of a collective inside the node into a WorldError that names the ranks of the node."""
    assert state.groups is not None
    here = state.groups.nodes.here

    def what() -> str:
        waited = f"rank {here[0]}, which leads, may have waited for another node"
        return f"the ranks {list(here)} of one node, which act as one between nodes, came apart ({waited})"

    return naming_peers(what, state.group, "look for their first error")
