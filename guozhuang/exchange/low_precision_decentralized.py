"""Averages weights with both neighbours in a ring of ranks; only differences, coded in 8 bits, are sent.

Formula (Bagua's): each rank keeps W, the copy of its weights that its neighbours also hold, and L and R, its copies of the left
and the right neighbour's W. All three start as the common weights. After the optimizer has changed the weights to x:
t = x + L/3 + R/3 - 5W/3, that is the mean of the three replicas and this rank's own step, less W; c = C(t), one code for all
weights of a device; c goes to both neighbours; W <- W + D(c), L <- L + D(c of the left), R <- R + D(c of the right); x <- W.
So a rank's W, its right neighbour's L and its left neighbour's R are always equal, bit for bit. With two ranks the left and the
right neighbour are the same rank, which gets one message; one rank alone does nothing.
Error: that of the code, half of 1/255 of the span of t over all weights of the device with ``MinMax8``, in each exchange. It
stays in x and so in the next t: the lost part is sent later. Until ``agree``, ranks differ by the part that the ring has not
averaged yet. All is computed in float32, to which float64 weights are rounded at each exchange.
Traffic, each ``every`` steps: two codes, about 2 bytes a weight (two ranks: one code). Ranks wait for it after the optimizer.
Source: Tang et al. 2018, arXiv:1803.06443 (difference compression, DCD-PSGD); Gan et al. 2021, arXiv:2107.01499 (Bagua).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError, explain
from ..groups.subgroups import end_together, twin
from ..weights.flat import FlatWeights, Named, as_real
from .base import check_saved
from .codecs.base import Codec
from .codecs.quantize8 import MinMax8
from .node_groups import NodeGroups, find_nodes, make_groups
from .numbers import is_finite
from .weight_lane import NotFinite, mean, swap, through_nodes
from .weights import WeightExchange

_HEADER_BYTES = 8  # a float32 before the code, padded: NaN if the difference is not finite and so not coded, else 0.0
_REPLICAS = ("own", "left", "right")


@dataclass
class _RingMemory:
    """The buffers of one exchange of a flat tensor: the weights x, the difference t, and the codes sent and received."""

    weights: Tensor
    difference: Tensor
    sent: Tensor
    from_left: Tensor
    from_right: Tensor


@dataclass
class RingState:
    """The state of :class:`LowPrecisionDecentralized`.

    Attributes:
        group: the ring: a second group of the same ranks, or with ``nodes_first`` the first ranks of the nodes; ``whole_group``
            itself if there is one rank.
        whole_group: the group of the ranks that was passed to ``prepare``.
        flat: the layout of the parameters in flat tensors of float32.
        whole: the layout of the parameters in flat tensors of their own dtypes.
        replicas: W, L and R under "own", "left" and "right": flat tensors of float32; W alone on ranks outside of the ring.
        memory: the buffers of one exchange, by flat tensor.
        random: the generator of the codec's random bits, by flat tensor.
        nodes: the groups inside and between nodes, for ``nodes_first``; else None.
        not_finite: logs which weights hold NaN or infinity.
    """

    group: dist.ProcessGroup
    whole_group: dist.ProcessGroup
    flat: FlatWeights
    whole: FlatWeights
    replicas: dict[str, list[Tensor]]
    memory: list[_RingMemory]
    random: list[torch.Generator]
    nodes: NodeGroups | None = None
    not_finite: NotFinite = field(default_factory=NotFinite)

    @property
    def in_ring(self) -> bool:
        """Whether this rank sends codes, and there is another rank to send them to."""
        return self.group.size() > 1 and (self.nodes is None or self.nodes.leads)


@dataclass(frozen=True)
class LowPrecisionDecentralized(WeightExchange[RingState]):
    """Averages weights in a ring of ranks, which keep copies of their neighbours' weights up to date by coded differences.

    Args:
        every: how many optimizer steps from one exchange to the next; the first step exchanges.
        codec: the code of the differences.
        seed: the seed of the codec's random bits, if it draws any.
        nodes_first: average inside each node first, without a code; the first ranks of the nodes are the ring, and tell their
            nodes. With one node nothing is coded.

    Raises:
        UsageError: ``every`` is below 1.
    """

    every: int = 1
    codec: Codec = field(default_factory=MinMax8)
    seed: int = 0
    nodes_first: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(explain("every is a number of steps, at least 1", value=self.every))

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> RingState:
        """Copy the weights into three replicas; make a second group of the ranks. Every rank must call, with equal weights."""
        real = as_real(parameters)
        flat, whole = FlatWeights(real, torch.float32), FlatWeights(real)
        if group.size() == 1:
            return RingState(group, group, flat, whole, {}, [], [])
        nodes = make_groups(group, find_nodes(group, None)) if self.nodes_first else None
        ring = twin(group) if nodes is None else nodes.across
        state = RingState(ring, group, flat, whole, {}, [], [], nodes)
        state.replicas = {name: flat.copy() for name in (_REPLICAS if state.in_ring else _REPLICAS[:1])}
        for each in state.replicas["own"]:
            length = _HEADER_BYTES + self.codec.row_bytes(each.numel()) if state.in_ring else 0
            codes = torch.zeros(3, length, dtype=torch.uint8, device=each.device)
            state.memory.append(_RingMemory(torch.empty_like(each), torch.empty_like(each), *codes.split(1)))
            state.random.append(torch.Generator(each.device))
        return state

    @torch.no_grad()
    def after_step(self, state: RingState, step: int) -> None:
        """Send the coded difference to both neighbours, update the three replicas, and set the weights to this rank's own one.

        Raises:
            WorldError: a neighbour has ended, or did not take part within the group's time-out; the text names it.
        """
        if not state.memory or step % self.every:
            return
        weights = [each.weights for each in state.memory]
        state.flat.read(weights)
        state.not_finite.look(state.flat, weights, step)
        own = state.replicas["own"]
        if state.nodes is None:
            self._in_ring(state, step)
        else:
            through_nodes(weights, own, state.nodes, lambda: self._in_ring(state, step))
        state.flat.write(own)

    def _in_ring(self, state: RingState, step: int) -> None:
        if not state.in_ring:
            for memory, own in zip(state.memory, state.replicas["own"], strict=True):
                own.copy_(memory.weights)
            return
        for index, memory in enumerate(state.memory):
            self._encode(state, index, memory, step)
        _send_to_neighbours(state)
        for index, memory in enumerate(state.memory):
            both = memory.from_right if state.group.size() > 2 else memory.from_left
            for name, code in zip(_REPLICAS, (memory.sent, memory.from_left, both), strict=True):
                self._add(state.replicas[name][index], code, memory.difference)

    def _encode(self, state: RingState, index: int, memory: _RingMemory, step: int) -> None:
        own, left, right = (state.replicas[name][index] for name in _REPLICAS)
        # (L + R - 2 W) / 3 + (x - W) equals the module's formula, but rounds less: it subtracts nearly equal numbers first.
        t = torch.add(left, right, out=memory.difference)
        t.sub_(own, alpha=2).div_(3)
        t += memory.weights - own
        fine = is_finite(t)
        memory.sent[:, :_HEADER_BYTES].view(torch.float32).fill_(0.0 if fine else math.nan)
        if fine:
            place = hash((self.seed, step, index, state.group.rank()))  # a hash of integers is equal in all processes
            state.random[index].manual_seed(place & (2**63 - 1))
            self.codec.encode(t.view(1, -1), memory.sent[:, _HEADER_BYTES:], state.random[index])

    def _add(self, replica: Tensor, code: Tensor, scratch: Tensor) -> None:
        if bool(code[0, :_HEADER_BYTES].view(torch.float32)[0].isnan()):
            replica.fill_(math.nan)
            return
        self.codec.decode(code[:, _HEADER_BYTES:], scratch.view(1, -1))
        replica += scratch

    @torch.no_grad()
    def agree(self, state: RingState) -> None:
        """Replace the weights and all replicas by the exact mean of the weights over all ranks. Every rank must call."""
        if not state.memory:
            return
        flats = state.whole.copy()
        state.not_finite.look(state.whole, flats, -1)
        mean(flats, state.whole_group)
        state.whole.write(flats)
        for replica in state.replicas.values():
            state.flat.read(replica)

    def end(self, state: RingState) -> None:
        """End the groups that ``prepare`` made. Every rank must call."""
        if state.group is not state.whole_group:
            inside = [] if state.nodes is None else [state.nodes.inside]
            end_together([state.group, *inside], state.whole_group)

    def state_dict(self, state: RingState) -> dict[str, Any]:
        """Return the replicas by parameter (none if all equal the weights, as after ``agree``) and the number of ranks."""
        weights = state.flat.copy()
        alike = all(
            torch.equal(mine, x) for few in state.replicas.values() for mine, x in zip(few, weights, strict=True)
        )
        views = {} if alike else {which: state.flat.by_name(few) for which, few in state.replicas.items()}
        found = {which: {name: view.clone() for name, view in few.items()} for which, few in views.items()}
        return {"ranks": state.group.size(), "replicas": found}

    @torch.no_grad()
    def load_state_dict(self, state: RingState, saved: Mapping[str, Any]) -> None:
        """Restore a state that was saved on this rank; if it was saved after ``agree``, the number of ranks may differ.

        Raises:
            UsageError: the state was saved by another method, for other parameters, or with another number of ranks.
        """
        fix = "load it with the strategy, the model and the number of ranks that it was saved with"
        check_saved(saved, {"ranks", "replicas"}, "LowPrecisionDecentralized")
        for replica in state.replicas.values():
            state.flat.read(replica)
        if not saved["replicas"]:
            return
        if saved["ranks"] != state.group.size():
            what = f"the checkpoint holds neighbours in a ring of {saved['ranks']} ranks, and there are {state.group.size()}"
            raise UsageError(explain(what, fix=fix))
        names = {name for few in state.flat.names for name in few}
        for which, few in state.replicas.items():
            values = saved["replicas"][which]
            if values.keys() != names:
                raise UsageError(explain("other parameters", value=sorted(values.keys() ^ names), fix=fix))
            for name, view in state.flat.by_name(few).items():
                view.copy_(values[name])

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float:
        """Return the bytes of one code to each neighbour divided by ``every``, for weights that are all on one device."""
        num_bytes = _HEADER_BYTES + self.codec.row_bytes(num_elements)
        return min(world_size - 1, 2) * num_bytes / self.every


def _send_to_neighbours(state: RingState) -> None:
    rank, size = state.group.rank(), state.group.size()
    messages = []
    for tag, memory in enumerate(state.memory):
        messages.append(((rank - 1) % size, memory.sent, memory.from_left, tag))
        if size > 2:
            messages.append(((rank + 1) % size, memory.sent, memory.from_right, tag))
    swap(messages, state.group, "a neighbour in the ring")
