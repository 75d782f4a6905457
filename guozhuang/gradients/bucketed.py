"""The parameters that take part in the exchange now, their buckets, and the method by which full buckets are exchanged."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import UsageError, explain
from ..exchange.base import GradientExchange
from ..groups.allocation import zeros_for
from ..units import listed
from .awaited import AwaitedBackwards
from .buckets import NUM_MARKS, Bucket, Caps, in_process_memory
from .passes import ReducerOptions, weakly
from .selection import Selection

if TYPE_CHECKING:
    from .alike import Alike

_KEPT_SELECTIONS = 2


class BucketedParameters(abc.ABC):
    """Parameters in buckets, hooked so that each gradient is told, and the state of their exchange.

    Args:
        named_parameters: all parameters that may ever take part, with their names; those that require a gradient do.
        sparse: names of parameters whose gradients are sparse.
        group: the ranks.
        exchange: the method by which full buckets are exchanged.
        caps: upper bounds of the buckets' sizes.
        options: see :class:`ReducerOptions`.

    Attributes:
        step: number of passes so far.
        alike: compares the replicas of the ranks; None: nothing is compared.
        awaited: the forwards whose backward has not come.
    """

    alike: Alike | None = None

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: frozenset[str],
        group: dist.ProcessGroup,
        exchange: GradientExchange[Any],
        caps: Caps,
        options: ReducerOptions,
    ) -> None:
        self.group, self.exchange, self.caps, self.options = group, exchange, caps, options
        self._candidates = list(named_parameters)
        self._sparse = sparse
        self._selections: dict[Any, Selection] = {}
        self.step = 0
        self.awaited = AwaitedBackwards()
        self._marked: Bucket | None = None  # the bucket with which this rank has told its number in this pass
        self._state: Any = None
        self._signature = self._sign()
        self._selection = self._find_selection()
        self._connect()

    @abc.abstractmethod
    def on_gradient(self, index: int) -> None:
        """Take notice that autograd has accumulated a gradient of the parameter with this index."""

    def change_parameters(self) -> list[str]:
        """Take up switches of ``requires_grad``, dtype or device; return the names of the parameters that changed."""
        before, now = self._signature, self._sign()
        if before == now:
            return []
        self._signature = now
        self.close()
        left, self._selection = self._selection, self._find_selection()
        self._selection.take_over(left)
        self._connect()
        return [name for (name, _), a, b in zip(self._candidates, before, now, strict=True) if a != b]

    def _sign(self) -> tuple[tuple[bool, torch.dtype, torch.device], ...]:
        return tuple((p.requires_grad, p.dtype, p.device) for _, p in self._candidates)

    def _find_selection(self) -> Selection:
        """Return the selection of the parameters that require a gradient now: the one used for them before, or a new one."""
        selection = self._selections.pop(self._signature, None)
        if selection is None:
            chosen = [(name, p) for name, p in self._candidates if p.requires_grad]
            delayed, trigger, frees = self.options.delayed, self.options.trigger, self.options.frees
            allocate = in_process_memory if frees else zeros_for(self.group)
            selection = Selection(chosen, self._sparse, self.caps, allocate, delayed, trigger, frees)
        self._selections[self._signature] = selection
        if len(self._selections) > _KEPT_SELECTIONS:  # keep few: each holds the memory of its buckets
            del self._selections[next(iter(self._selections))]
        return selection

    def _connect(self) -> None:
        self._selection.connect(lambda index: weakly(self.on_gradient, index))
        self.use(self.exchange)

    @property
    def names(self) -> list[str]:
        """Names of the parameters that take part."""
        return self._selection.names

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that take part."""
        return self._selection.parameters

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are exchanged."""
        return self._selection.placement.buckets

    @property
    def layout(self) -> list[tuple[int, ...]]:
        """For each bucket the indices of its parameters in ``names`` and ``parameters``."""
        return self._selection.placement.layout

    def use(self, exchange: GradientExchange[Any]) -> None:
        """Exchange gradients by the method ``exchange`` from now on. Every rank must call it, between steps.

        Raises:
            UsageError: there are sparse gradients, which no exchange gets, and the method makes neither a mean nor a sum.
        """
        sparse = [name for bucket in self.buckets if bucket.sparse for name in bucket.names]
        if sparse and not (exchange.averages or exchange.sums):
            what = f"sparse gradients are averaged over all ranks, and {type(exchange).__name__} makes something else"
            fix = "make the embedding with sparse=False, or take an exchange that averages"
            raise UsageError(explain(what, value=listed(sparse), rank=self.group.rank(), fix=fix))
        before = self._state if exchange is self.exchange else None
        self.exchange = exchange
        dense = self._selection.placement.dense
        self._state = exchange.prepare(dense, self.group, before)
        # Whether to wait for each exchange of several rounds before the next one starts, so that all ranks issue one order.
        # Not on accelerators: there callbacks, which issue later rounds, run as soon as a work is issued, so in order anyway.
        self._in_turn = not exchange.one_round and any(bucket.flat.device.type == "cpu" for bucket in dense)

    def use_caps(self, caps: Caps) -> None:
        """Use buckets of other sizes from the next forward on. Every rank must call it, with equal caps."""
        self.caps = caps
        self._selections = {self._signature: self._selection}  # others were laid out by the caps of before
        self._selection.use_caps(caps)

    def exchange_state(self) -> dict[str, Any]:
        """Return the state of the exchange method, for a checkpoint. Every rank must call it."""
        return self.exchange.state_dict(self._state)

    def named_layout(self) -> list[list[str]] | None:
        """Return the names of each bucket's parameters, once the ranks have agreed on their order."""
        return self._selection.named_layout()

    def load_exchange_state(self, saved: Mapping[str, Any], step: int, layout: list[list[str]] | None = None) -> None:
        """Restore the results of ``exchange_state`` and ``named_layout`` at step ``step``. Every rank must call it."""
        if layout is not None and self._selection.restore(layout):
            self.use(self.exchange)
        self.exchange.load_state_dict(self._state, saved)
        self.step = step

    def renew_buckets(self) -> bool:
        """Apply the order of buckets that the ranks agreed on; return whether it is a new one. Not while a pass is open."""
        is_new = self._selection.renew()
        if is_new:
            self.use(self.exchange)
        return is_new

    # ---- methods that compare the ranks; see [Note: what is told, and what is compared then] in alike.py ---------------------

    @property
    def compares(self) -> bool:
        """Whether all ranks have to do the same now."""
        return self.alike is not None and self.group.size() > 1

    def _tell(self, bucket: Bucket) -> None:
        """Let this rank's number travel with the bucket, if this bucket and this exchange carry one."""
        if self.compares and self._carries_mark(bucket):
            bucket.mark(self._digest() % (1 << NUM_MARKS))
            self._marked = bucket

    def _carries_mark(self, bucket: Bucket) -> bool:
        if bucket.marks is None or not self.exchange.sends_marks:
            return False
        dtype, size = bucket.flat.dtype, self.group.size()
        # Sums of ones must be exact. On accelerators the script would wait for the device to read them.
        is_exact = (dtype.is_floating_point or dtype.is_complex) and size <= 2 / torch.finfo(dtype).eps
        return is_exact and bucket.flat.device.type == "cpu"

    def _digest(self) -> int:
        assert self.alike is not None
        self.alike.follow(self._selection.names, self._selection.parameters)
        return self.alike.digest(self.step)

    def _compare_ranks(self) -> None:
        """Compare what all ranks have told in this pass, whose exchanges have ended; else compare now and then.

        Raises:
            MismatchError: ranks have not done the same, or hold other weights.
        """
        marked, self._marked = self._marked, None
        if self.alike is None or not self.compares:
            if self.alike is not None:
                self.alike.forget()
        elif marked is not None:
            if not marked.unmark(self.group.size()):
                self.alike.compare(self.step)
        elif (self.step == 0 or self.alike.is_due(self.step)) and not any(map(self._carries_mark, self.buckets)):
            self.alike.compare_numbers(self._digest(), self.step, self.buckets[0].flat.device)
        self.awaited.stepped()

    def close(self) -> None:
        """Remove the hooks from the parameters; their gradients stay local from then on."""
        self._selection.disconnect()
