"""Mean of the gradients in two levels: a plain sum inside each node, then an exchange of your choice between nodes.

Formula, with n ranks on m nodes, k_j of them on node j, and s_j = sum of the gradients of node j's ranks:
every rank gets outer_j((m / n) s_j), where ``outer`` averages over nodes; for an exact ``outer`` that is (1 / n) sum_j s_j, so
every rank has equal weight in the mean, however many ranks its node has.
Error: that of ``outer`` with m members and sums as input; and, if ``inner`` is a ``Cast``, its rounding before and after.
Traffic, if all nodes have k ranks: a rank sends 2 (k-1)/k of a bucket inside its node, and the bytes of ``outer`` for 1/k of
the bucket to its peers, one on every other node. So all ranks use the network at once and each byte crosses it once per node.
Source: the two-level schemes of Bagua (Gan et al. 2021, arXiv:2107.01499, which takes a mean of means) and BytePS (Jiang et al.
2020, OSDI).

[Note: parts or leaders] With equally many ranks on every node and an ``outer`` that works on any part of a bucket, a bucket is
cut into k parts: reduce-scatter inside the node, ``outer`` on this rank's part among the ranks with the same local rank,
all-gather inside the node. Otherwise (uneven nodes; methods that need whole parameters, such as PowerSGD) the first rank of
each node leads: reduce to the leader, ``outer`` among leaders on the whole bucket, broadcast inside the node.

[Note: two lanes in a row] A first lane (thread) sums inside the node and starts ``outer``; it then submits to a second lane the
job that waits for ``outer`` and distributes the result inside the node. So the groups inside nodes exchange buckets in one
order on all ranks, ``outer`` is started in that order too, and traffic inside nodes overlaps with traffic between them. See
also [Note: one order on all ranks] in groups/serial.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..groups.serial import Lane, SerialWork
from ..world import versions
from .allreduce import AllReduce
from .around import AroundGradients
from .base import Done, GradientExchange, Work, check_saved
from .cast import Cast
from .compressed import Compressed
from .node_groups import NodeGroups, find_nodes, make_groups, node_sizes, on_leaders
from .numbers import in_float32, numbers, warn_unless_finite
from .parts import Part, cut, cut_values, uncut, whole_values
from .warmup import Warmup


class _Passage:
    """The ``Work`` of a bucket whose exchange runs in two threads, one after the other. See [Note: two lanes in a row]."""

    def __init__(self) -> None:
        self.entering: SerialWork | None = None
        self.leaving: SerialWork | None = None

    def is_completed(self) -> bool:
        """Return, without waiting, whether the result is in the bucket."""
        return self.leaving is not None and self.leaving.is_completed()

    def wait(self) -> None:
        """Wait until the result is in the bucket; raise the error of either thread."""
        assert self.entering is not None
        self.entering.wait()
        assert self.leaving is not None
        self.leaving.wait()


@dataclass
class HierarchicalState:
    """The state of :class:`Hierarchical`.

    Attributes:
        members: the ranks of each node.
        scheme: "inner" on one node, "outer" with one rank per node, else "parts" or "leaders".
        groups: the groups inside and between nodes; None for the schemes "inner" and "outer".
        lanes: the first and the second lane of [Note: two lanes in a row]; None for the schemes "inner" and "outer".
        factor: the factor by which sums inside a node are multiplied before ``outer``.
        parts: this rank's part of each bucket, by bucket index; with "leaders" it is the whole bucket on the leader.
        outer: the state of ``outer``, or of ``inner`` on one node; None on ranks that do not exchange between nodes.
    """

    members: list[list[int]]
    scheme: str
    groups: NodeGroups | None
    lanes: tuple[Lane, Lane] | None
    factor: float
    parts: dict[int, Part] = field(default_factory=dict)
    outer: Any = None


@dataclass(frozen=True)
class Hierarchical(AroundGradients[HierarchicalState], inner="outer"):
    """Exchanges gradients through ``inner`` inside a node and through ``outer`` between nodes.

    Args:
        inner: ``AllReduce()``, or ``Cast(dtype, AllReduce())`` to send a narrower dtype inside the node.
        outer: any exchange of gradients; with ``Compressed``, only traffic between nodes is coded.
        identities: one text per rank, equal for ranks that exchange through ``inner``, for example the name of a rack. None:
            the ranks that can share memory, which ``prepare`` finds out.

    Raises:
        UsageError: ``inner`` is another exchange, or ``outer`` is no exchange of gradients.
    """

    inner: GradientExchange[Any]
    outer: GradientExchange[Any]
    identities: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not is_plain(self.inner):
            fix = "give AllReduce() or Cast(dtype, AllReduce()); a code belongs between nodes, as outer"
            raise UsageError(explain("Hierarchical sums plainly inside a node", value=self.inner, fix=fix))
        if not isinstance(self.outer, GradientExchange):
            fix = "give an exchange such as Compressed(MinMax8()); WeightHierarchical(AllReduce(), ...) is for weights"
            raise UsageError(explain("outer is an exchange of gradients", value=self.outer, fix=fix))

    @override
    def inner_state(self, state: HierarchicalState) -> Any:
        return state.outer

    # ---- methods that make the state

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: HierarchicalState | None = None
    ) -> HierarchicalState:
        size = group.size()
        if before is not None:
            kept = self._kept(before) if before.scheme == "parts" else {}
            state = HierarchicalState(before.members, before.scheme, before.groups, before.lanes, before.factor)
        else:
            kept, nodes = {}, find_nodes(group, self.identities)
            num_nodes, scale = len(nodes.members), self.outer.input_scale(size)
            members = [list(ranks) for ranks in nodes.members]
            if num_nodes == 1:
                state = HierarchicalState(members, "inner", None, None, self.inner.input_scale(size) / scale)
            elif nodes.is_flat:
                state = HierarchicalState(members, "outer", None, None, 1.0)
            else:
                scheme = "parts" if nodes.is_even and _may_be_cut(self.outer) else "leaders"
                factor = num_nodes / size * self.outer.input_scale(num_nodes) / scale
                groups = make_groups(group, nodes)
                lanes = Lane(groups.inside), Lane(groups.inside)
                state = HierarchicalState(members, scheme, groups, lanes, factor)
        was = None if before is None else before.outer
        if state.groups is None:
            only = self.inner if state.scheme == "inner" else self.outer
            state.outer = only.prepare(buckets, group, was)
            return state
        for bucket in buckets:
            wire_dtype, nodes = self._wire_dtype(numbers(bucket).dtype), state.groups.nodes
            if state.scheme == "parts":
                state.parts[bucket.index] = cut(bucket, nodes.local_rank, len(nodes.here), wire_dtype)
            else:
                state.parts[bucket.index] = uncut(bucket, state.groups.leads, wire_dtype)
        if state.scheme == "parts":
            self._prepare_outer(state, was)
            if kept:
                self.outer.load_state_dict(state.outer, cut_values(kept, state.parts.values()))
        elif buckets:
            on_leaders(state.groups, lambda: self._prepare_outer(state, was), buckets[0].flat.device, [])
        elif state.groups.leads:
            self._prepare_outer(state, was)
        return state

    def _prepare_outer(self, state: HierarchicalState, was: Any) -> None:
        assert state.groups is not None
        crossing = [held.part for held in state.parts.values() if held.part is not None]
        state.outer = self.outer.prepare(crossing, state.groups.across, was)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.wire_dtype(dtype) if isinstance(self.inner, Cast) else dtype

    # ---- methods that exchange the buckets of a step

    @override
    def start(self, bucket: Bucket, state: HierarchicalState, step: int) -> Work:
        if state.scheme == "outer":
            return self.outer.start(bucket, state.outer, step)
        if state.scheme == "inner":
            if state.factor != 1.0:
                bucket.flat.mul_(state.factor)
            return self.inner.start(bucket, state.outer, step)
        assert state.lanes is not None
        (entering, leaving), passage, devices = state.lanes, _Passage(), [bucket.flat.device]

        def enter() -> None:
            if not is_plain(self.outer):  # warn here: ``outer`` gets a sum and could not name the rank
                assert state.groups is not None
                rank = state.groups.nodes.rank
                warn_unless_finite(bucket, in_float32(numbers(bucket)), step, rank, "it reaches all ranks")
            work = self._enter(bucket, state, entering.group, step)
            passage.leaving = leaving.run(lambda: self._leave(bucket, state, leaving.group, work), devices)

        passage.entering = entering.run(enter, devices)
        return passage

    def _enter(self, bucket: Bucket, state: HierarchicalState, group: dist.ProcessGroup, step: int) -> Work:
        """Sum the bucket inside the node, and start ``outer`` on this rank's part."""
        held, flat = state.parts[bucket.index], numbers(bucket)
        wire = flat if held.wire is None else held.wire
        late = self._scale_into(wire, flat, state.factor)
        if held.own is not None:
            versions.reduce_scatter_single(held.own, wire, group=group)
        elif group.size() > 1:
            dist.reduce(wire, group_dst=0, group=group)
        if held.part is None:
            return Done()
        own, part = wire if held.own is None else held.own, numbers(held.part)
        if own.data_ptr() != part.data_ptr():
            part.copy_(own[: part.numel()])
        if late != 1.0:
            part.mul_(late)
        return self.outer.start(held.part, state.outer, step)

    def _leave(self, bucket: Bucket, state: HierarchicalState, group: dist.ProcessGroup, work: Work) -> None:
        """Wait for ``outer``, and send its result to all ranks of the node."""
        held, flat = state.parts[bucket.index], numbers(bucket)
        wire = flat if held.wire is None else held.wire
        work.wait()
        if held.part is not None:
            own, part = wire if held.own is None else held.own, numbers(held.part)
            if own.data_ptr() != part.data_ptr():  # copy even on a node of one rank, to round as others do
                own[: part.numel()].copy_(part)
        if held.own is not None:
            versions.all_gather_single(wire, held.own, group=group)
        elif group.size() > 1:
            dist.broadcast(wire, group_src=0, group=group)
        if wire is not flat:
            flat.copy_(wire[: flat.numel()])

    def _scale_into(self, wire: Tensor, flat: Tensor, factor: float) -> float:
        """Copy ``flat`` into ``wire``, scaled by ``factor`` if the dtype is narrow; return the factor to apply after the sum.

        Narrow dtypes are scaled before the sum, which could overflow although the mean does not. Scaling other dtypes after the
        sum is cheaper, because this rank's part has fewer elements.
        """
        early = factor if wire.dtype in (torch.float16, torch.bfloat16) and abs(factor) < 1.0 else 1.0
        if wire is not flat:
            torch.mul(flat, early, out=wire[: flat.numel()])
            wire[flat.numel() :].zero_()
        elif early != 1.0:
            flat.mul_(early)
        return factor / early

    # ---- methods for checkpoints, and the traffic

    @override
    def state_dict(self, state: HierarchicalState) -> dict[str, Any]:
        """Return "nodes" (the ranks of each node), "scheme", and "outer" (the state of ``outer`` for this rank's node)."""
        kept: Any = {}
        if state.scheme == "parts":
            kept = self._kept(state)
        elif state.scheme == "outer" or (state.groups is not None and state.groups.leads):
            kept = self.outer.state_dict(state.outer)
        return {"nodes": state.members, "scheme": state.scheme, "outer": kept}

    @override
    def load_state_dict(self, state: HierarchicalState, saved: Mapping[str, Any]) -> None:
        check_saved(saved, {"nodes", "scheme", "outer"}, "Hierarchical")
        if is_plain(self.outer) or state.scheme == saved["scheme"] == "inner":
            return
        if (saved["nodes"], saved["scheme"]) != (state.members, state.scheme):
            what = f"the checkpoint was saved with the ranks on other nodes than {state.members}"
            fix = "start as many ranks on each node as then, in that order"
            raise UsageError(explain(what, value=saved["nodes"], fix=fix))
        if state.groups is not None and not state.groups.leads and state.scheme == "leaders":
            return
        kept = cut_values(saved["outer"], state.parts.values()) if state.scheme == "parts" else saved["outer"]
        self.outer.load_state_dict(state.outer, kept)

    def _kept(self, state: HierarchicalState) -> Any:
        """Return the state of ``outer`` for a checkpoint, gathered into whole parameters. Every rank of the node must call."""
        assert state.groups is not None
        return whole_values(self.outer.state_dict(state.outer), state.parts.values(), state.groups.inside)

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return the bytes that a rank sends if all nodes in ``identities`` have equally many ranks and buckets can be cut.

        With gloo inside a node, (k-1)/k of the bucket is sent in addition, because gloo's reduce-scatter is a whole all-reduce.
        """
        members = node_sizes(self.identities, world_size)
        if len(set(members)) != 1 or not _may_be_cut(self.outer):
            return None
        if len(members) == 1:
            return self.inner.traffic(num_elements, element_bytes, world_size)
        length = -(-num_elements // members[0])
        narrow = min(element_bytes, self.inner.dtype.itemsize) if isinstance(self.inner, Cast) else element_bytes
        outer = self.outer.traffic(length, element_bytes, len(members))
        return None if outer is None else 2 * (members[0] - 1) * length * narrow + outer


def is_plain(exchange: GradientExchange[Any]) -> bool:
    """Return whether an exchange is an all-reduce, with or without a cast to a narrower dtype."""
    return isinstance(exchange.inner if isinstance(exchange, Cast) else exchange, AllReduce)


def _may_be_cut(exchange: GradientExchange[Any]) -> bool:
    """Return whether an exchange works on any part of a bucket, because it does not depend on parameters' shapes."""
    if isinstance(exchange, Cast):
        return _may_be_cut(exchange.inner)
    if isinstance(exchange, Warmup):
        return _may_be_cut(exchange.first) and _may_be_cut(exchange.then)
    return isinstance(exchange, AllReduce | Compressed)
