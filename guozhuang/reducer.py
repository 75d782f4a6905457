"""Autograd hooks to full buckets to exchanges, while backward runs.

[Note: one pass]
A *pass* is one backward that synchronizes. It opens when the first gradient reaches an output of the model (a tensor hook,
which runs in the outermost graph task) or, where no output tensor was found, a parameter. Opening queues one callback, which
the autograd engine runs when that graph task has ended: `_finish`. In between, each parameter's hook puts its gradient into
the bucket; a bucket whose parameters are all there is started, but never before the buckets of lower index. So every rank
starts bucket 0, 1, 2, ... in that order, however its own gradients come. What is not there when backward ends (unused
parameters) is filled in by `_finish`. A pass in which no parameter got a gradient was `torch.autograd.grad` on an input
and is dropped.

[Note: nested backward]
Re-entrant checkpointing runs an inner backward inside the outer one. A parameter that is used in several such parts, or
inside and outside of one, gets several gradients in one pass, and after the first of them nobody can tell whether more will
come. The first pass (and the first after each change of the parameters) therefore starts no bucket before its end, and
watches: under `static_graph` it counts each parameter's gradients, and later passes wait for that many; otherwise a parameter
that was ever seen in an inner backward is taken as ready at the end of the pass only. What remains, a parameter that turns up
in an inner backward for the first time when its bucket has left, cannot be repaired (its bucket is being summed) and raises.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from .buckets import Bucket, Caps, Slot, assign, place
from .errors import WorldError, explain
from .exchange.base import GradientExchange, Work
from .exchange.sparse import all_gather_mean, no_rows
from .gradients import GradientViews
from .timeline import Timeline
from .unused import UnusedReport, UsedAnywhere


@dataclass(frozen=True)
class Options:
    """How a reducer treats gradients.

    Args:
        find_unused: parameters may get no gradient; the ranks agree on which after each pass.
        static_graph: every pass is like the first; unused parameters are agreed on once.
        skip_unused: do not exchange a bucket of which no parameter was used; every rank must use the same ones.
        batched_copy: copy a bucket's gradients with one call when it is full, not one by one as they come.
        serial: let each exchange of several rounds end before backward goes on (the model itself communicates in backward).
    """

    find_unused: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    batched_copy: bool = False
    serial: bool = False


@dataclass
class _Pass:
    """What is known of the pass under way; lists are by parameter index, but `waiting` and `works` by bucket."""

    task: int  # the graph task in which it was opened
    left: list[int]  # gradients still to come
    waiting: list[int]  # parameters still to come
    fired: list[int]  # gradients that came
    num_fired: int = 0
    next_bucket: int = 0
    works: list[Work | None] = field(default_factory=list)  # None: nothing was started for that bucket
    order: list[int] = field(default_factory=list)
    predicted_unused: list[int] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    shadow: bool = False  # this rank has run out of data and only takes part


class Reducer:
    """Makes the gradients of all ranks equal while backward runs. Every rank must construct it, with equal parameters.

    Args:
        named_parameters: all parameters it may ever handle, with their names; those that require a gradient take part.
        sparse: names of parameters whose gradients are sparse.
        group: the ranks.
        exchange: what is done with a full bucket.
        caps: bounds of the buckets.
        options: see :class:`Options`.

    Attributes:
        step: number of passes so far.
        synchronize: whether the next backward is a pass; the wrapper sets it at each forward.
        num_active_ranks: what a mean is divided by; fewer than the group while some ranks have run out of data.
        timeline: where spans are recorded; None (the default) costs nothing.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: frozenset[str],
        group: dist.ProcessGroup,
        exchange: GradientExchange[Any],
        caps: Caps,
        options: Options,
    ) -> None:
        self.group, self.exchange, self.caps, self.options = group, exchange, caps, options
        self._candidates = list(named_parameters)
        self._sparse = sparse
        self._unused = UnusedReport(group)
        self._lock = threading.RLock()  # a model on several devices has a backward thread per device
        self._handles: list[Any] = []
        self._pass: _Pass | None = None
        self._pass_since_forward = False
        self._armed = False  # a forward whose backward is to synchronize has run since the last pass
        self.step = 0
        self.synchronize = True
        self.num_active_ranks = group.size()
        self.timeline: Timeline | None = None
        self._select()

    # ---- layout -----------------------------------------------------------------------------------------------------

    def _select(self) -> None:
        """Take up the parameters that require a gradient now, in buckets of reverse registration order."""
        self.close()
        self._signature = self._sign()
        chosen = [(name, p) for name, p in self._candidates if p.requires_grad]
        self.names = [name for name, _ in chosen]
        self.parameters = [p for _, p in chosen]
        self._slots = [Slot(p.numel(), p.dtype, p.device, name in self._sparse) for name, p in chosen]
        # On the node that accumulates, after all hooks of the parameter: a user's hook may change the gradient until then.
        self._nodes = [get_gradient_edge(p).node for p in self.parameters]  # held: a parameter refers to it weakly
        self._handles = [node.register_hook(_hook(self, i)) for i, node in enumerate(self._nodes)]
        n = len(chosen)
        self._seen = [False] * n  # got a gradient since the check of the last pass
        self._accumulated = [False] * n  # holds gradients of backwards that were not synchronized
        self._nested = [False] * n  # got a gradient in an inner backward, see [Note: nested backward]
        self._expected = [1] * n
        self._used_in_first_pass: list[bool] = []  # by any rank; kept for static_graph
        self._predicts = self.options.find_unused and not self.options.static_graph
        self._watching = True  # this rank has not seen a backward of its own yet
        self._learning = True  # the ranks have not agreed on the order of buckets yet
        self._new_layout: list[tuple[int, ...]] | None = None
        self._lay_out(assign(self._slots, range(n - 1, -1, -1), self.caps))

    def _lay_out(self, layout: Sequence[tuple[int, ...]]) -> None:
        self._placement = place(layout, self.names, self.parameters, self._slots)
        self._views = GradientViews(self.parameters, self._placement.views)
        self.use(self.exchange)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are exchanged."""
        return self._placement.buckets

    @property
    def layout(self) -> list[tuple[int, ...]]:
        """For each bucket the indices of its parameters in ``names`` and ``parameters``."""
        return self._placement.layout

    def _sign(self) -> list[tuple[bool, torch.dtype, torch.device]]:
        return [(p.requires_grad, p.dtype, p.device) for _, p in self._candidates]

    def use(self, exchange: GradientExchange[Any]) -> None:
        """Exchange gradients by another method from now on. Every rank must call it, between steps."""
        self.exchange = exchange
        self._state = exchange.prepare(self._placement.dense, self.group)

    def close(self) -> None:
        """Take the hooks off the parameters; their gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_forward(self) -> list[str]:
        """Account for the last pass and take up changes of the layout. Every rank calls it before a forward with gradients.

        Returns:
            Names of the parameters that changed (``requires_grad`` was switched); where there are any, the caller compares
            the ranks.

        Raises:
            UnusedParameterError: a parameter got no gradient since the forward before the last pass.
            RuntimeError: the last backward was broken off in the middle of an exchange.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpointed part is computed again, inside a backward
            return []
        if self._pass is not None:
            self._drop_broken_pass(self._pass)
        if self._pass_since_forward:
            self._pass_since_forward = False
            missing = [name for name, seen in zip(self.names, self._seen, strict=True) if not seen]
            self._seen = [False] * len(self.names)
            if missing and not self.options.find_unused and not self.options.static_graph:
                raise self._unused.error(missing)
        if self._signature != self._sign():
            before, now = self._signature, self._sign()
            self._select()
            return [name for (name, _), a, b in zip(self._candidates, before, now, strict=True) if a != b]
        if self._new_layout is not None:
            layout, self._new_layout = self._new_layout, None
            if layout != self.layout:
                self._lay_out(layout)
        return []

    def _drop_broken_pass(self, broken: _Pass) -> None:
        self._pass = None
        if broken.next_bucket:
            raise RuntimeError(
                explain(
                    f"the last backward was broken off after {broken.next_bucket} of {len(self.buckets)} buckets had been "
                    "sent, so the ranks no longer agree on what comes next",
                    rank=self.group.rank(),
                    fix="let the error of that backward end the process, and start again from a checkpoint",
                )
            )

    # ---- a pass (see [Note: one pass]) ------------------------------------------------------------------------------

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Open a pass when backward reaches one of these tensors: the outputs of the model that have a graph."""
        self._armed = True
        hook = _output_hook(self)
        for output in outputs:
            output.register_hook(hook)

    def _begin(self) -> _Pass:
        n = len(self.parameters)
        self._views.begin(self.exchange.input_scale(self.group.size()) * self.group.size() / self.num_active_ranks)
        sizes = [len(members) for members in self.layout]
        self._pass = _Pass(torch._C._current_graph_task_id(), self._expected.copy(), sizes, [0] * n)
        return self._pass

    def _open(self) -> _Pass:
        current = self._begin()
        Variable._execution_engine.queue_callback(self._finish)
        if self._predicts:
            current.predicted_unused = self._unreachable()
        if not self._watching:
            for i in current.predicted_unused:
                current.left[i] = 0
            for i, left in enumerate(current.left):
                current.waiting[self._placement.bucket_of[i]] -= left == 0
        return current

    def _unreachable(self) -> list[int]:
        """Return the parameters that this graph task will not reach; the engine knows before it runs."""
        try:
            return [i for i, node in enumerate(self._nodes) if not torch._C._will_engine_execute_node(node)]
        except RuntimeError:  # torch.autograd.grad(..., parameters) accumulates nothing; the pass will be dropped
            return []

    def on_output(self) -> None:
        """Take note that backward has reached an output."""
        with self._lock:
            if self.synchronize and self._pass is None:
                self._open()

    def on_gradient(self, index: int) -> None:
        """Take note that a gradient was accumulated."""
        with self._lock:
            self._seen[index] = True
            if not self.synchronize or (self._pass is None and not self._armed):  # the latter: past the wrapper
                self._accumulated[index] = True
                return
            current = self._pass or self._open()
            current.num_fired += 1
            current.fired[index] += 1
            if self._watching or not self.options.static_graph:
                self._nested[index] |= torch._C._current_graph_task_id() != current.task
            if self._watching:
                current.order.append(index)
                return
            if self._nested[index] and not self.options.static_graph:
                if self._views.filled[index]:
                    self._raise_late(index)
                return
            left = current.left[index] = current.left[index] - 1
            if left > 0:
                return
            bucket = self._placement.bucket_of[index]
            if left < 0:  # it had been taken for unused, or came more often than in the first pass
                if self._views.filled[index] or bucket < current.next_bucket:
                    self._raise_late(index)
                self._predicts = False
            else:
                current.waiting[bucket] -= 1
            if not self.options.batched_copy:
                self._views.fill(index)
            if current.waiting[bucket] == 0 or not self.exchange.one_round:
                self._start_full(current)

    def _raise_late(self, index: int) -> None:
        promise = (
            " although static_graph=True promised the same gradients in every step" if self.options.static_graph else ""
        )
        raise RuntimeError(
            explain(
                f"parameter {self.names[index]!r} got a gradient in an inner (re-entrant) backward after its bucket was "
                f"complete{promise}",
                rank=self.group.rank(),
                fix="use checkpoint(..., use_reentrant=False), or static_graph=True if every step is alike",
            )
        )

    def _start_full(self, current: _Pass, at_end: bool = False) -> None:
        """Start the buckets that are full, in order."""
        while current.next_bucket < len(self.buckets) and current.waiting[current.next_bucket] == 0:
            last = current.works[-1] if current.works and not self.exchange.one_round else None
            if last is not None:
                if not at_end and not last.is_completed():
                    return  # the next gradient, or the end of backward, comes back to it
                self._wait(current.next_bucket - 1, last)
            self._start(current, self.buckets[current.next_bucket])
            current.next_bucket += 1

    def _start(self, current: _Pass, bucket: Bucket) -> None:
        members = self.layout[bucket.index]
        unfilled = [i for i in members if not self._views.filled[i]]
        if self.options.batched_copy:
            self._views.fill_together([i for i in unfilled if self._is_used(current, i)])
        for i in unfilled:
            if not self._views.filled[i]:
                self._views.fill(i, keep=not self._is_used(current, i))
        skips = self.options.skip_unused and not current.shadow
        if bucket.sparse or (skips and not any(self._is_used(current, i) for i in members)):
            current.works.append(None)  # sparse buckets follow when backward has ended
            return
        start_ns = 0 if self.timeline is None else self.timeline.now()
        work = self.exchange.start(bucket, self._state, self.step)
        current.works.append(work)
        if self.timeline is not None:
            _record(self.timeline, current, bucket, work, start_ns)
        if self.options.serial and not self.exchange.one_round:
            self._wait(bucket.index, work)

    def _is_used(self, current: _Pass, index: int) -> bool:
        return current.fired[index] > 0 or self._accumulated[index]

    # ---- the end of a pass --------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        with self._lock:
            current = self._pass
            assert current is not None
            if current.num_fired == 0:
                self._pass = None
                return
            if self.timeline is not None:
                self.timeline.mark("backward ended", "buckets", step=self.step)
            self._complete(current)

    def shadow(self) -> None:
        """Take part in a pass of the other ranks with zeros, after this rank has run out of data."""
        current = self._begin()
        current.shadow = True
        for bucket in self.buckets:
            bucket.flat.zero_()
        self._views.filled = [True] * len(self.parameters)
        self._complete(current, shadow=True)

    def _complete(self, current: _Pass, shadow: bool = False) -> None:
        current.waiting = [0] * len(self.buckets)
        self._start_full(current, at_end=True)
        if not self.exchange.one_round and current.works and current.works[-1] is not None:
            self._wait(len(self.buckets) - 1, current.works[-1])  # its later rounds come before the question below
        used_here = [self._is_used(current, i) for i in range(len(self.parameters))]
        asking: UsedAnywhere | None = None
        if self._learning if self.options.static_graph else self.options.find_unused:
            asking = UsedAnywhere(used_here, self.group, self.buckets[0].flat.device)
        for bucket, work in zip(self.buckets, current.works, strict=True):
            if work is not None:
                self._wait(bucket.index, work)
        for finished in current.at_end:
            finished()
        used = [True] * len(self.parameters)
        if asking is not None:
            used = self._used_in_first_pass = asking.result()
        elif (
            self.options.static_graph
        ):  # agreed on once; what earlier, unsynchronized backwards used is alike everywhere
            used = [a or b for a, b in zip(self._used_in_first_pass, used_here, strict=True)]
        self._exchange_sparse(used, shadow)
        for i in range(len(self.parameters)):
            if not shadow:
                self._views.settle(i, used[i])
            elif used[i]:
                self._views.show(i)
        if self._learning:
            self._learn(current)
        if self._watching and not shadow:
            self._watching = False
            if self.options.static_graph:
                self._expected = current.fired
            if any(current.fired[i] for i in current.predicted_unused):
                self._predicts = False  # gradients come from inner backwards, which the outer graph does not show
        self._accumulated = [False] * len(self.parameters)
        self._pass, self._armed = None, False
        self._pass_since_forward = not shadow
        self.step += 1

    def _exchange_sparse(self, used: Sequence[bool], shadow: bool) -> None:
        for bucket, members in zip(self.buckets, self.layout, strict=True):
            if bucket.sparse and used[members[0]]:
                parameter = bucket.parameters[0]
                gradient = None if shadow else parameter.grad
                mean = all_gather_mean(
                    no_rows(parameter) if gradient is None else gradient, self.num_active_ranks, self.group
                )
                parameter.grad = mean

    def _wait(self, bucket: int, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self.cause_of(error, f"the exchange of bucket {bucket} of {len(self.buckets)}") from error

    def cause_of(self, error: RuntimeError, what: str) -> RuntimeError:
        """Compose the error for a collective that failed: what another rank has said of it, or that a rank is gone."""
        return self._unused.error_elsewhere() or WorldError(
            explain(
                f"{what} in step {self.step} failed: {error}",
                rank=self.group.rank(),
                fix="look at the rank that stopped first; the others only noticed that it was gone",
            )
        )

    def _learn(self, current: _Pass) -> None:
        """Agree on the order of buckets for later passes: the one that rank 0 saw in the first."""
        self._learning = False
        last_place = {index: place for place, index in enumerate(current.order)}
        n = len(self.parameters)
        order = torch.tensor(sorted(range(n), key=lambda i: last_place.get(i, n * n + n - i)), dtype=torch.int64)
        order = order.to(self.buckets[0].flat.device)
        if self.group.size() > 1:
            dist.broadcast(order, group_src=0, group=self.group)
        self._new_layout = assign(self._slots, [int(i) for i in order.tolist()], self.caps)


def _hook(reducer: Reducer, index: int) -> Callable[[Any, Any], None]:
    reference = weakref.ref(reducer)  # a parameter may outlive the wrapper

    def hook(_: Any, __: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.on_gradient(index)

    return hook


def _output_hook(reducer: Reducer) -> Callable[[Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.on_output()

    return hook


def _record(timeline: Timeline, current: _Pass, bucket: Bucket, work: Work, start_ns: int) -> None:
    name, num_bytes = f"exchange {bucket.index}", bucket.num_bytes
    timeline.mark(f"bucket {bucket.index} started", "buckets", num_bytes=num_bytes)

    def finished(_: object = None) -> None:
        timeline.add(name, name, start_ns, timeline.now(), num_bytes=num_bytes)

    if isinstance(work, dist.Work):
        work.get_future().add_done_callback(functools.partial(finished))
    else:
        current.at_end.append(finished)
