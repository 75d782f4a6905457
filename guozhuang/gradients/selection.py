"""The parameters that require a gradient now: their buckets, and facts about them that earlier passes have shown.

Another selection is used when ``requires_grad`` of a parameter is switched. The reducer keeps old selections, so a GAN that
freezes its halves in turn gets each selection back in the state in which it was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .buckets import Allocate, Caps, Slot, assign, gradient_dtype, place
from .views import GradientViews


class Selection:
    """The parameters that require a gradient now, with their buckets. Lists have one entry for each parameter, by its index.

    Args:
        named_parameters: the parameters that require a gradient, with their names.
        sparse: names of parameters whose gradients are sparse.
        caps: upper bounds of the buckets' sizes.
        allocate: allocates the buckets' memory.
        delayed: names of parameters that are exchanged last, in a bucket of their own.
        trigger: name of a parameter for whose gradient the delayed bucket waits too; None: it waits for its own gradients only.
        frees: whether a bucket has memory only while a gradient lies in it.

    Attributes:
        counts_for: for each parameter, the buckets that wait for its gradient.
        seen: whether the parameter got a gradient since :meth:`missing` was last called.
        accumulated: whether ``.grad`` holds gradients of backwards that were not synchronized.
        nested: whether the parameter ever got a gradient in an inner backward.
        expected: number of gradients that the parameter gets in one pass; other than 1 only under ``static_graph``.
        used_in_first_pass: whether any rank used the parameter in the first pass; read under ``static_graph`` only.
        unused_last: whether this rank left the parameter unused in its last pass.
        predictable: whether the graph shows, before backward, which parameters it will reach.
        watching: whether this rank has not completed a pass of its own yet.
        learning: whether the ranks have not agreed on the order of buckets yet.
        restored: whether the layout comes from a checkpoint; then it does not change any more.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        sparse: frozenset[str],
        caps: Caps,
        allocate: Allocate,
        delayed: frozenset[str] = frozenset(),
        trigger: str | None = None,
        frees: bool = False,
    ) -> None:
        pairs = list(named_parameters)
        self._delayed, self._trigger, self._frees = delayed, trigger, frees
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
        """Copy from another selection the flags of parameters whose ``.grad`` was not synchronized yet."""
        accumulated = {id(p) for p, flag in zip(other.parameters, other.accumulated, strict=True) if flag}
        self.accumulated = [id(p) in accumulated and p.grad is not None for p in self.parameters]
        self.seen = self.accumulated.copy()

    def _assign(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Group parameters into buckets; the delayed parameters form the last one."""
        late = [i for i in order if self.names[i] in self._delayed]
        whole = Caps((max(1, sum(self._slots[i].num_bytes for i in late)),))
        layout: list[tuple[int, ...]] = []
        for part, caps in (([i for i in order if self.names[i] not in self._delayed], self._caps), (late, whole)):
            buckets = assign([self._slots[i] for i in part], range(len(part)), caps)
            layout += [tuple(part[k] for k in members) for members in buckets]
        return layout

    def _lay_out(self, layout: Sequence[tuple[int, ...]]) -> None:
        self.placement = place(layout, self.names, self.parameters, self._slots, self._allocate)
        self.views = GradientViews(self.parameters, self.placement, self._frees)
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
        """Record that a parameter got a gradient; outside a pass the gradient stays local until the next pass."""
        self.seen[index] = True
        if not in_pass:
            self.accumulated[index] = True

    def connect(self, on_gradient: Callable[[int], Callable[[Any, Any], None]]) -> None:
        """Hook each parameter: ``on_gradient(index)`` returns the hook that is called once a gradient has been accumulated.

        The hooks are registered on autograd's accumulation nodes, so they run after all hooks on the parameters themselves, in
        which a user may still change the gradient. The nodes are held here, because a parameter refers to its node weakly.
        """
        self.disconnect()
        self.nodes = [get_gradient_edge(p).node for p in self.parameters]
        self._handles = [node.register_hook(on_gradient(i)) for i, node in enumerate(self.nodes)]

    def disconnect(self) -> None:
        """Remove the hooks; gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unreachable(self) -> list[int]:
        """Return the indices of parameters that the running backward will not reach, as autograd's engine knows beforehand."""
        try:
            return [i for i, node in enumerate(self.nodes) if not torch._C._will_engine_execute_node(node)]
        except RuntimeError:  # torch.autograd.grad runs, which accumulates nothing; the pass will be dropped
            return []

    def missing(self) -> list[str]:
        """Return the names of parameters that got no gradient since the last call."""
        missing = [name for name, seen in zip(self.names, self.seen, strict=True) if not seen]
        self.seen = [False] * len(self.names)
        return missing

    def propose_order(self, came: Sequence[int]) -> list[int]:
        """Return all parameters' indices: by the time of each one's last gradient, then those without one, highest first."""
        last_place = {index: place for place, index in enumerate(came)}
        n = len(self.parameters)
        return sorted(range(n), key=lambda i: last_place.get(i, len(came) + n - i))

    def adopt_order(self, order: Sequence[int]) -> None:
        """Plan buckets by this order of parameters; :meth:`renew` applies the plan. Every rank calls it with the same order."""
        self.learning = False
        if not self.restored:
            self._new_layout = self._assign(order)

    def use_caps(self, caps: Caps) -> None:
        """Plan buckets of other sizes, in the present order of parameters; :meth:`renew` applies the plan."""
        self._caps, self.restored = caps, False
        layout = self.placement.layout if self._new_layout is None else self._new_layout
        self._new_layout = self._assign([i for members in layout for i in members])

    def named_layout(self) -> list[list[str]] | None:
        """Return the names of each bucket's parameters, for a checkpoint; None before the ranks have agreed on an order."""
        if self.learning and not self.restored:
            return None
        layout = self.placement.layout if self._new_layout is None else self._new_layout
        return [[self.names[i] for i in members] for members in layout]

    def restore(self, named_layout: Sequence[Sequence[str]]) -> bool:
        """Use the layout of a checkpoint from now on, if it names the same parameters; return whether it does."""
        place_of = {name: i for i, name in enumerate(self.names)}
        if sorted(name for members in named_layout for name in members) != sorted(self.names):
            return False
        layout = [tuple(place_of[name] for name in members) for members in named_layout]
        for members in layout:
            kinds = {(slot.dtype, slot.device, slot.sparse) for slot in (self._slots[i] for i in members)}
            if len(kinds) != 1 or (kinds.pop()[2] and len(members) > 1):
                return False  # dtypes or devices have changed since the checkpoint was saved
        self.restored, self._new_layout = True, None
        self._lay_out(layout)
        return True

    def renew(self) -> bool:
        """Apply the adopted order, between a backward and the next forward; return whether the buckets are new."""
        layout, self._new_layout = self._new_layout, None
        if layout is None or layout == self.placement.layout:
            return False
        self._lay_out(layout)
        return True
