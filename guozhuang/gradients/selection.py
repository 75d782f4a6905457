"""The parameters that take part now: their buckets, and what earlier passes have taught about them.

A selection changes when ``requires_grad`` of a parameter is switched. One that comes back (a GAN that freezes its halves in
turn) is found again as it was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .buckets import Allocate, Caps, Slot, assign, gradient_dtype, place
from .views import GradientViews


class Selection:
    """Lists are by parameter index.

    Args:
        named_parameters: those that require a gradient.
        sparse: names of parameters whose gradients are sparse.
        caps: bounds of the buckets.
        allocate: where their memory comes from.
        delayed: names of parameters that travel last, in a bucket of their own.
        trigger: the parameter whose gradient that bucket waits for; None for no other than its own.

    Attributes:
        counts_for: the buckets that wait for a parameter.
        seen: got a gradient since the last pass was accounted for.
        accumulated: holds gradients of backwards that were not synchronized.
        nested: got a gradient in an inner backward.
        expected: gradients in a pass; another number than 1 only under ``static_graph``.
        used_in_first_pass: by any rank; kept for ``static_graph``.
        unused_last: what this rank did not use in its last pass.
        predictable: the graph shows before backward which parameters it will reach.
        watching: this rank has not seen a backward of its own yet.
        learning: the ranks have not agreed on the order of buckets yet.
        restored: the layout is that of a checkpoint, and stays.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        sparse: frozenset[str],
        caps: Caps,
        allocate: Allocate,
        delayed: frozenset[str] = frozenset(),
        trigger: str | None = None,
    ) -> None:
        pairs = list(named_parameters)
        self._delayed, self._trigger = delayed, trigger
        self.names = [name for name, _ in pairs]
        self.parameters = [p for _, p in pairs]
        self._caps, self._allocate = caps, allocate
        self._slots = [Slot(p.numel(), gradient_dtype(p), p.device, name in sparse) for name, p in pairs]
        self._handles: list[Any] = []
        n = len(pairs)
        self.seen = [False] * n
        self.accumulated = [False] * n
        self.nested = [False] * n
        self.expected = [1] * n
        self.used_in_first_pass: list[bool] = []
        self.unused_last = [False] * n
        self.predictable = True
        self.watching = self.learning = True
        self.restored = False
        self._new_layout: list[tuple[int, ...]] | None = None
        self._lay_out(self._assign(range(n - 1, -1, -1)))

    def take_over(self, other: Selection) -> None:
        """Carry over what another selection knows of the gradients that parameters hold now."""
        accumulated = {id(p) for p, flag in zip(other.parameters, other.accumulated, strict=True) if flag}
        self.accumulated = [id(p) in accumulated and p.grad is not None for p in self.parameters]
        self.seen = self.accumulated.copy()

    def _assign(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Group parameters into buckets, the delayed ones behind all others."""
        late = [i for i in order if self.names[i] in self._delayed]
        whole = Caps((max(1, sum(self._slots[i].num_bytes for i in late)),))
        layout: list[tuple[int, ...]] = []
        for part, caps in (([i for i in order if self.names[i] not in self._delayed], self._caps), (late, whole)):
            buckets = assign([self._slots[i] for i in part], range(len(part)), caps)
            layout += [tuple(part[k] for k in members) for members in buckets]
        return layout

    def _lay_out(self, layout: Sequence[tuple[int, ...]]) -> None:
        self.placement = place(layout, self.names, self.parameters, self._slots, self._allocate)
        self.views = GradientViews(self.parameters, self.placement)
        self.counts_for = [[b] for b in self.placement.bucket_of]
        if self._trigger in self.names:
            late = {b for b, name in zip(self.placement.bucket_of, self.names, strict=True) if name in self._delayed}
            own = self.counts_for[self.names.index(self._trigger)]
            own += sorted(late.difference(own))

    def num_awaited(self) -> list[int]:
        """Return for each bucket how many parameters' gradients it waits for."""
        counts = [0] * len(self.placement.buckets)
        for buckets in self.counts_for:
            for b in buckets:
                counts[b] += 1
        return counts

    def came(self, index: int, in_pass: bool) -> None:
        """Take note of a gradient: one that a pass averages, or one that stays local until the next pass."""
        self.seen[index] = True
        if not in_pass:
            self.accumulated[index] = True

    def connect(self, on_gradient: Callable[[int], Callable[[Any, Any], None]]) -> None:
        """Hook each parameter: ``on_gradient(index)`` makes the hook, called when a gradient has been accumulated.

        The hooks are on the nodes that accumulate, after all hooks of the parameters themselves: a user's hook may change the
        gradient until then. The nodes are held, because a parameter refers to its node weakly.
        """
        self.disconnect()
        self.nodes = [get_gradient_edge(p).node for p in self.parameters]
        self._handles = [node.register_hook(on_gradient(i)) for i, node in enumerate(self.nodes)]

    def disconnect(self) -> None:
        """Take the hooks off; gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unreachable(self) -> list[int]:
        """Return the parameters that the graph task under way will not reach; the engine knows before it runs."""
        try:
            return [i for i, node in enumerate(self.nodes) if not torch._C._will_engine_execute_node(node)]
        except RuntimeError:  # torch.autograd.grad(..., parameters) accumulates nothing; the pass will be dropped
            return []

    def missing(self) -> list[str]:
        """Return the names of parameters that got no gradient since the last call."""
        missing = [name for name, seen in zip(self.names, self.seen, strict=True) if not seen]
        self.seen = [False] * len(self.names)
        return missing

    def propose_order(self, came: Sequence[int]) -> list[int]:
        """Return all parameters in the order in which their last gradients came; those that had none behind, reversed."""
        last_place = {index: place for place, index in enumerate(came)}
        n = len(self.parameters)
        return sorted(range(n), key=lambda i: last_place.get(i, len(came) + n - i))

    def adopt_order(self, order: Sequence[int]) -> None:
        """Lay out the buckets in this order from the next :meth:`renew` on."""
        self.learning = False
        if not self.restored:
            self._new_layout = self._assign(order)

    def named_layout(self) -> list[list[str]] | None:
        """Return the names of each bucket's parameters, for a checkpoint; None while the ranks have not agreed on an order."""
        if self.learning and not self.restored:
            return None
        layout = self.placement.layout if self._new_layout is None else self._new_layout
        return [[self.names[i] for i in members] for members in layout]

    def restore(self, named_layout: Sequence[Sequence[str]]) -> bool:
        """Lay out the buckets as a checkpoint tells, for good, if it tells of these parameters; tell whether it did."""
        place_of = {name: i for i, name in enumerate(self.names)}
        if sorted(name for members in named_layout for name in members) != sorted(self.names):
            return False
        layout = [tuple(place_of[name] for name in members) for members in named_layout]
        for members in layout:
            kinds = {(slot.dtype, slot.device, slot.sparse) for slot in (self._slots[i] for i in members)}
            if len(kinds) != 1 or (kinds.pop()[2] and len(members) > 1):
                return False  # dtypes have changed since then
        self.restored, self._new_layout = True, None
        self._lay_out(layout)
        return True

    def renew(self) -> bool:
        """Take up the adopted order, between a backward and the next forward; tell whether the buckets are new."""
        layout, self._new_layout = self._new_layout, None
        if layout is None or layout == self.placement.layout:
            return False
        self._lay_out(layout)
        return True
