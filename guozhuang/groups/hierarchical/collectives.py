"""Collectives in two steps: inside each node through its group, between nodes by lanes (a lane is one rank of every node).

Every function blocks until this rank's part is done; every rank must call it with the same sizes. Tensors are flat.

[Note: what overlaps]
A large tensor is cut into pieces. While gloo's threads send the lanes' parts of one piece over the link, this thread combines
the next piece inside the node, and distributes the result of an earlier one to the ranks of the node: `IN_FLIGHT` pieces are
on the link at a time, so that the link never idles. On the node and on each lane all ranks process pieces in the same order.

[Note: all ranks get the same bits]
A part is combined once: inside each node by the rank of its lane, or by all ranks in an order fixed by the node's group;
then by gloo's ring, after which every rank of the lane has the same bits; the ranks of a node copy the part from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.groups.gloo import Crossing
from guozhuang.groups.hierarchical.nodes import Nodes, part_of, pieces_of
from guozhuang.groups.verbs import start

#: Bytes of one lane in one piece. Long enough that latency does not matter, short enough that the steps that overlap with
#: nothing (the first piece before the link, the last one after it) do not matter either.
PART_BYTES = 1 << 20
IN_FLIGHT = 2  # pieces on the link at a time: as many as gloo has threads

Wait = Callable[[dist.Work, str], None]


class Collectives:
    """One rank's part in the collectives, over its node and its lane (see ``Nodes``).

    Args:
        nodes: the ranks of each node.
        inside: the group of this rank's node; None if the node has only this rank.
        lane: gloo among the ranks of this rank's lane; None if the rank is in no lane.
        wait: waits for a work of the lane, with a limit; its second argument names the collective for the error.
        settle: raises unless all ranks of the lane make the same call; called before the lane is used.
        empty: allocates memory that the node's group reads without a copy: (number of elements, dtype).
    """

    def __init__(
        self,
        nodes: Nodes,
        inside: dist.ProcessGroup | None,
        lane: Crossing | None,
        wait: Wait,
        settle: Callable[[], None],
        empty: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        self._nodes, self._inside, self._lane, self._wait, self._settle = nodes, inside, lane, wait, settle
        self._parts = Pool(empty, PART_BYTES)
        self._wholes = Pool(empty, PART_BYTES * nodes.num_lanes)
        # A node larger than the smallest one has ranks in no lane (see ``Nodes``); it processes its lanes one after the other.
        self._is_even_here = len(nodes.here) == nodes.num_lanes

    def barrier(self) -> None:
        """Wait until all ranks have joined; the comparison of this call must have begun with ``node_first`` (failure.py)."""
        self._settle()
        if self._inside is not None:
            start(self._inside, "barrier").wait()

    def all_reduce(self, flat: Tensor, op: Any) -> None:
        """Combine ``flat`` of all ranks in place. ``op``: a ReduceOp; AVG for floating point only."""
        inside_op, divisor = self._as_sum(op)

        def cross(part: Tensor) -> Any:
            return start(self._link(), "allreduce", [part], reduceOp=inside_op)

        def land(part: Tensor) -> None:
            if divisor != 1:
                part.div_(divisor)

        self._pipeline(flat, inside_op, cross, land, "all_reduce")

    def reduce(self, flat: Tensor, op: Any, root: int) -> None:
        """Combine ``flat`` of all ranks into ``flat`` of rank ``root``; on other ranks its values are undefined afterwards."""
        inside_op, divisor = self._as_sum(op)
        node = self._nodes.node_of(root)

        def cross(part: Tensor) -> Any:
            return start(self._link(), "reduce", [part], reduceOp=inside_op, rootRank=node)

        def land(part: Tensor) -> None:
            if divisor != 1 and self._nodes.node == node:
                part.div_(divisor)

        self._pipeline(flat, inside_op, cross, land, "reduce", gather=self._nodes.node == node)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Copy ``flat`` of rank ``root`` to all ranks; its bytes cross the network once for each other node."""
        node = self._nodes.node_of(root)
        if self._inside is not None and self._nodes.node == node:
            start(self._inside, "broadcast", [flat], rootRank=self._nodes.here.index(root)).wait()

        def cross(part: Tensor) -> Any:
            return start(self._link(), "broadcast", [part], rootRank=node)

        def land(part: Tensor) -> None:
            del part

        self._pipeline(flat, None, cross, land, "broadcast", gather=self._nodes.node != node)

    def all_gather(self, output: Tensor, flat: Tensor) -> None:
        """Concatenate ``flat`` of all ranks into ``output`` in rank order. Only for nodes of equal size."""
        assert self._nodes.is_even
        members = self._nodes.members
        of_lane = torch.empty(len(members) * flat.numel(), dtype=flat.dtype)
        self._wait(start(self._link(), "all_gather_single", of_lane, flat), "all_gather")
        if self._inside is None:
            gathered = of_lane
        else:
            gathered = torch.empty(output.numel(), dtype=output.dtype)
            start(self._inside, "all_gather_single", gathered, of_lane).wait()
        blocks = gathered.view(self._nodes.num_lanes, len(members), -1)  # dims: lane, node, elements
        rows = output.view(self._nodes.size, -1)
        for node, ranks in enumerate(members):
            for lane, rank in enumerate(ranks):
                rows[rank].copy_(blocks[lane, node])

    def reduce_scatter(self, output: Tensor, flat: Tensor, op: Any) -> None:
        """Combine ``flat`` of all ranks and write its r-th part to ``output`` of rank r. Only for nodes of equal size."""
        assert self._nodes.is_even
        inside_op, divisor = self._as_sum(op)
        members = self._nodes.members
        order = [members[node][lane] for lane in range(self._nodes.num_lanes) for node in range(len(members))]
        arranged = torch.empty(flat.numel(), dtype=flat.dtype)
        torch.index_select(flat.view(self._nodes.size, -1), 0, torch.tensor(order), out=arranged.view(len(order), -1))
        of_lane = arranged
        if self._inside is not None:
            of_lane = torch.empty(flat.numel() // self._nodes.num_lanes, dtype=flat.dtype)
            start(self._inside, "reduce_scatter_single", of_lane, arranged, reduceOp=inside_op).wait()
        crossing = start(self._link(), "reduce_scatter_single", output, of_lane, reduceOp=inside_op)
        self._wait(crossing, "reduce_scatter")
        if divisor != 1:
            output.div_(divisor)

    def _pipeline(
        self,
        flat: Tensor,
        inside_op: Any,
        cross: Callable[[Tensor], dist.Work],
        land: Callable[[Tensor], None],
        what: str,
        gather: bool = True,
    ) -> None:
        """Combine ``flat`` piece by piece: inside the node, over the link, then back to its ranks. See [Note: what overlaps].

        Args:
            flat: the tensor, of the same size on all ranks.
            inside_op: the operation inside the node before the link; None: all ranks of the node have the same values.
            cross: starts sending a part over the link, in place.
            land: called with a part that has arrived.
            what: the collective's name.
            gather: whether the ranks of this node receive the result.
        """
        lanes = self._nodes.num_lanes
        longest = max(PART_BYTES // flat.element_size(), 1) * lanes
        under_way: list[tuple[_LanePiece, dist.Work | None]] = []
        for begin, end in pieces_of(flat.numel(), longest):
            piece = _LanePiece(flat[begin:end], self._nodes, self._parts, self._wholes)
            self._enter(piece, inside_op)
            under_way.append((piece, cross(piece.part) if piece.part.numel() else None))
            if len(under_way) == IN_FLIGHT + 1:
                self._leave(*under_way.pop(0), land, what, gather)
        for piece, work in under_way:
            self._leave(piece, work, land, what, gather)

    def _enter(self, piece: _LanePiece, inside_op: Any) -> None:
        """Combine a piece inside the node, so that each rank that sends to other nodes holds the node's result for its part."""
        if self._inside is None or inside_op is None:
            return
        if self._is_even_here and self._nodes.num_lanes > 1:
            start(self._inside, "reduce_scatter_single", piece.hold(), piece.padded(), reduceOp=inside_op).wait()
            return
        for lane in range(self._nodes.num_lanes):
            part = piece.part_of(lane)
            if part.numel():
                start(self._inside, "reduce", [part], reduceOp=inside_op, rootRank=lane).wait()

    def _leave(
        self, piece: _LanePiece, work: dist.Work | None, land: Callable[[Tensor], None], what: str, gather: bool
    ) -> None:
        """Wait until this rank's part of a piece is combined between nodes, and distribute all parts among the node's ranks."""
        if work is not None:
            self._wait(work, what)
            land(piece.part)
        if self._inside is not None and gather:
            if self._is_even_here and self._nodes.num_lanes > 1:
                start(self._inside, "all_gather_single", piece.padded(), piece.held()).wait()
                piece.put_back()
            else:
                for lane in range(self._nodes.num_lanes):
                    part = piece.part_of(lane)
                    if part.numel():
                        start(self._inside, "broadcast", [part], rootRank=lane).wait()
        piece.release()

    def _as_sum(self, op: Any) -> tuple[Any, int]:
        """Return the operation for both steps and the divisor of its result: a mean is computed as a sum, then divided."""
        return (dist.ReduceOp.SUM, self._nodes.size) if op == dist.ReduceOp.AVG else (op, 1)

    def _link(self) -> Any:
        """Return the gloo group of this rank's lane (one rank per node), after a check that its ranks make the same call."""
        assert self._lane is not None
        self._settle()
        return self._lane.group


class Pool:
    """A pool of reusable buffers of one size.

    Args:
        empty: allocates ``num_elements`` of a dtype.
        buffer_bytes: the size of each buffer.
    """

    def __init__(self, empty: Callable[[int, torch.dtype], Tensor], buffer_bytes: int) -> None:
        self._empty, self._buffer_bytes = empty, buffer_bytes
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return a free buffer, a tensor of bytes; allocate one if none is free."""
        return self._free.pop() if self._free else self._empty(self._buffer_bytes, torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


def begin_of(buffer: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return the beginning of a buffer of bytes as a tensor of ``num_elements`` elements."""
    return buffer[: num_elements * dtype.itemsize].view(dtype)


class _LanePiece:
    """A piece of a tensor, divided into one part per lane (see ``Nodes``), and its buffers."""

    def __init__(self, values: Tensor, nodes: Nodes, parts: Pool, wholes: Pool) -> None:
        self._values, self._num_lanes = values, nodes.num_lanes
        self._parts, self._wholes = parts, wholes
        self._part_buffer: Tensor | None = None
        self._whole_buffer: Tensor | None = None
        self._each = -(-values.numel() // nodes.num_lanes)
        #: The part that this rank sends to other nodes; empty if it sends nothing there.
        self.part = self.part_of(nodes.lane) if nodes.lane is not None else values[:0]

    def part_of(self, lane: int) -> Tensor:
        """Return the view of the part of this piece that a lane combines between nodes."""
        begin, end = part_of(lane, self._values.numel(), self._num_lanes)
        return self._values[begin:end]

    def hold(self) -> Tensor:
        """Let ``part`` be the beginning of a buffer, without copying values; return the buffer, as long as the longest part."""
        self._part_buffer = self._parts.take()
        held = begin_of(self._part_buffer, self._each, self._values.dtype)
        self.part = held[: self.part.numel()]
        return held

    def held(self) -> Tensor:
        """Return a buffer that begins with this rank's part and is as long as the longest part."""
        if self._part_buffer is None:
            part = self.part
            held = self.hold()
            self.part.copy_(part)
            return held
        return begin_of(self._part_buffer, self._each, self._values.dtype)

    def padded(self) -> Tensor:
        """Return the values, padded with zeros to a multiple of the number of lanes; the tensor itself if it needs none."""
        num_elements = self._each * self._num_lanes
        if num_elements == self._values.numel():
            return self._values
        if self._whole_buffer is not None:
            return begin_of(self._whole_buffer, num_elements, self._values.dtype)
        self._whole_buffer = self._wholes.take()
        whole = begin_of(self._whole_buffer, num_elements, self._values.dtype)
        whole[: self._values.numel()].copy_(self._values)
        whole[self._values.numel() :].zero_()
        return whole

    def put_back(self) -> None:
        """Copy the values from the padded buffer, if one was used, back to the tensor."""
        if self._whole_buffer is not None:
            self._values.copy_(begin_of(self._whole_buffer, self._values.numel(), self._values.dtype))

    def release(self) -> None:
        """Return this piece's buffers to their pools."""
        if self._part_buffer is not None:
            self._parts.give_back(self._part_buffer)
        if self._whole_buffer is not None:
            self._wholes.give_back(self._whole_buffer)
