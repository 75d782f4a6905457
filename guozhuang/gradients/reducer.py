"""Collects gradients in buckets by autograd's hooks, and exchanges each full bucket while backward runs.

[Note: one pass]
A *pass* is one backward that synchronizes. It opens when the first gradient reaches an output of the model (a tensor hook,
which runs in the outermost graph task) or, where backward passes no output, a parameter; see [Note: whose graph] in
forwards.py. Opening queues one callback, `_finish`, which the autograd engine runs when that graph task has ended. In between,
each parameter's hook puts its gradient into the bucket; a bucket that has all its gradients is started, but never before the
buckets of lower index. So every rank starts bucket 0, 1, 2, ... in that order, in whatever order its own gradients come. For
parameters that have no gradient when backward ends (unused ones), `_finish` fills in zeros. A pass in which no parameter got a
gradient was `torch.autograd.grad` on an input and is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import Variable

from ..errors import MismatchError
from ..exchange.base import Work
from ..exchange.nan_watch import NanWatch
from ..exchange.sparse import all_gather_mean, no_rows
from ..registry import registry
from ..timeline import Timeline
from ..watch.waits import waits
from ..world.versions import never_compiled
from .awaited import Awaited
from .bucketed import BucketedParameters
from .buckets import Bucket
from .forwards import Forwards, current_number
from .passes import (
    Pass,
    broken_off,
    graph_lacks,
    late_gradient,
    record_ends,
    record_ready,
    record_start,
    weakly,
)
from .unused import UnusedReport, UsedAnywhere

_E = TypeVar("_E", bound=Exception)


class Reducer(BucketedParameters):
    """Exchanges the gradients of all ranks while backward runs. Every rank must construct it, with equal parameters.

    Args: see :class:`BucketedParameters`.

    Attributes:
        exchange_step: returns the step number to pass to the exchange; None: ``step``.
        num_active_ranks: divisor of a mean; less than the group's size while some ranks have nothing to add.
        after_pass: called when a pass has ended and all its gradients are exchanged; None: nothing is.
        timeline: where spans are recorded; None (the default) costs nothing.
        num_ranks_used: for each parameter on how many ranks it was used, where the ranks last agreed on it; empty before.
        error: the text of the last error that was raised here; "" before.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unused, self._nan = UnusedReport(self.group), NanWatch(self.group)
        self._lock = threading.RLock()  # autograd runs backward in one thread per device, and each calls hooks
        self._pass: Pass | None = None
        self._last_pass: Pass | None = None  # keeps its works: see [Note: who drops a work last] in passes.py
        self._pass_since_forward = False
        self._forwards = Forwards()
        self._forward_start = current_number()
        self._any_backward = False  # whether the next backward is a pass, whichever forward made its graph
        self.exchange_step: Callable[[], int] | None = None
        self.num_active_ranks = self.group.size()
        self.after_pass: Callable[[], object] | None = None
        self.timeline: Timeline | None = None
        self.num_ranks_used: list[int] = []
        self.error = ""
        registry.weight.listen(self._keep_weighted)
        self._left_out: list[int] = []  # under static_graph, the parameters that the last pass lacked against the first

    # ---- This method runs between two passes. -----------------------------------------------------------------------------

    def before_forward(self) -> list[str]:
        """Check the last pass for unused parameters; change the buckets if parameters changed or a new bucket order is due.

        Every rank calls it before a forward with gradients.

        Returns:
            Names of the parameters that changed (``requires_grad``, dtype or device); the caller checks that all ranks agree.

        Raises:
            UnusedParameterError: a parameter got no gradient since the forward before the last pass.
            RuntimeError: the last backward was interrupted in the middle of an exchange.
        """
        self._forward_start = current_number()
        if torch._C._current_graph_task_id() != -1:  # inside a backward: activation checkpointing repeats a forward
            return []
        if self._pass is not None:
            broken, self._pass = self._pass, None
            if broken.next_bucket or any(self._selection.views.filled):
                raise self._noted(broken_off(broken.next_bucket, len(self.buckets), self.group.rank()))
            # Without any gradient it was broken off by the program, and the ranks have not gone apart.
            if broken.num_fired and self.options.static_graph and not self._selection.watching:
                self._left_out = self._lacking(broken)
        if self._left_out:
            left_out, self._left_out = {i: self.names[i] for i in self._left_out}, []
            raise self._noted(graph_lacks(left_out, self.group.rank()))
        if self._pass_since_forward:
            self._pass_since_forward = False
            missing = self._selection.missing()
            if missing and not self.options.find_unused and not self.options.static_graph:
                indices = [self.names.index(name) for name in missing]
                raise self._noted(self._unused.error(missing, indices, self.step - 1))
        changed = self.change_parameters()
        if not changed:
            self.renew_buckets()
        self.free_buckets()
        return changed

    def free_buckets(self) -> None:
        """Free the buckets in which no gradient lies, if the options ask for it, unless a backward is running.

        These include the buckets of parameters that were trained before, as where the two models of a GAN take turns.
        """
        if not self.options.frees or torch._C._current_graph_task_id() != -1:  # see before_forward
            return
        with self._lock:
            if self._pass is None:
                for selection in self._selections.values():
                    selection.views.leave()

    # ---- These methods run a pass. See [Note: one pass]. -------------------------------------------------------------

    def after_forward(self, outputs: Sequence[Tensor], is_awaited: bool = False) -> None:
        """Record a forward whose backward passes average gradients; the caller called :meth:`before_forward` as it began.

        Args:
            outputs: the tensors with a graph that the forward returned.
            is_awaited: whether all ranks make this forward, and its backward.
        """
        self._forwards.add(self._forward_start)
        hook = weakly(self.on_output, self.awaited.add() if is_awaited and outputs else None)
        for output in outputs:
            output.register_hook(hook)

    def expect_backward(self, is_expected: bool = True) -> None:
        """Make the next backward that reaches a parameter a pass, whichever forward made its graph. Every rank must call it.

        Args:
            is_expected: False takes an earlier call back.
        """
        self._any_backward = is_expected

    def _begin(self, shadow: bool = False) -> Pass:
        selection, size = self._selection, self.group.size()
        num_active = self.num_active_ranks if self.exchange.averages else size
        weight = registry.weight.among(size, self.group.rank())
        selection.views.begin(self.exchange.input_scale(size) * size / num_active * weight)
        fired, task = [0] * len(selection.names), torch._C._current_graph_task_id()
        self._pass = Pass(task, selection.expected.copy(), selection.num_awaited(), fired, shadow)
        return self._pass

    def _open(self) -> Pass:
        current, selection = self._begin(), self._selection
        if torch.is_grad_enabled():  # create_graph=True: backwards through the graph made here are passes, too
            current.graph_start = current_number()
        Variable._execution_engine.queue_callback(self._finish)
        if self.options.find_unused and not self.options.static_graph and selection.predictable:
            with _RecordFunctionFast("search_unused_parameters"):  # PyTorch's name of it in a profile
                current.predicted_unused = selection.unreachable()
        if not selection.watching:
            for i in current.predicted_unused:
                current.left[i] = 0
            for i, left in enumerate(current.left):
                if left == 0:
                    self._count_down(current, i)
        return current

    def on_output(self, forward: Awaited | None = None) -> None:
        """Open a pass, if none is open: backward has reached an output of the model, made by this forward."""
        with self._lock:
            if forward is not None:
                self.awaited.came(forward)
            if self._pass is None:
                self._open()

    def on_gradient(self, index: int) -> None:
        """Put a gradient that autograd has accumulated into its bucket, and start the buckets that are full."""
        with self._lock:
            selection = self._selection
            current = self._pass
            if current is None and (
                self._any_backward or self._forwards.made_what_runs(selection.names[index], self.group.rank())
            ):
                current = self._open()
            selection.came(index, current is not None)
            if current is None:
                return
            current.num_fired += 1
            finds_unused = self.options.find_unused and not self.options.static_graph
            if not finds_unused or selection.parameters[index].grad is not None:  # else it is undefined: not used here
                current.fired[index] += 1
            current.order.append(index)
            if selection.watching or not self.options.static_graph:
                selection.nested[index] |= torch._C._current_graph_task_id() != current.task
            if selection.watching:
                return
            if selection.nested[index] and not self.options.static_graph:
                if selection.views.filled[index]:
                    raise self._noted(late_gradient(self.names[index], self.options, self.group.rank()))
                return
            left = current.left[index] = current.left[index] - 1
            if left > 0:
                return
            bucket = selection.placement.bucket_of[index]
            if left < 0:  # the parameter was taken for unused, or got more gradients than in the first pass
                if self.options.static_graph or selection.views.filled[index] or bucket < current.next_bucket:
                    raise self._noted(late_gradient(self.names[index], self.options, self.group.rank()))
                selection.predictable = False
            if not self.options.batched_copy:
                selection.views.fill(index)
            is_any_full = left == 0 and self._count_down(current, index)
            if self.timeline is not None:
                record_ends(current, self.timeline)
            if is_any_full and self.options.overlap:
                self._start_full(current)

    def _count_down(self, current: Pass, index: int) -> bool:
        """Count down the gradients that this parameter's buckets wait for; return whether a bucket became full."""
        is_any_full = False
        for bucket in self._selection.counts_for[index]:
            current.waiting[bucket] -= 1
            if current.waiting[bucket] == 0:
                is_any_full = True
                record_ready(bucket, self.step, self.timeline)
        return is_any_full

    def _start_full(self, current: Pass) -> None:
        """Start the exchange of full buckets in order, up to the first one that is not full."""
        while current.next_bucket < len(self.buckets) and current.waiting[current.next_bucket] == 0:
            self._start(current, self.buckets[current.next_bucket])
            current.next_bucket += 1

    def _start(self, current: Pass, bucket: Bucket) -> None:
        members, views = self.layout[bucket.index], self._selection.views
        unfilled = [i for i in members if not views.filled[i]]
        if self.options.batched_copy:
            views.fill_together([i for i in unfilled if self._is_used(current, i)])
        for i in unfilled:
            if not views.filled[i]:
                views.fill(i, keep=not self._is_used(current, i))
        if bucket.sparse or (self.options.skip_unused and not any(self._is_used(current, i) for i in members)):
            current.works.append(None)  # not now: sparse buckets are exchanged when backward has ended
            return
        current.sent_ns = current.sent_ns or time.time_ns()
        timeline, step = self.timeline, self.step if self.exchange_step is None else self.exchange_step()
        start_ns = 0 if timeline is None else timeline.now()
        if not current.shadow:
            self._nan.look(bucket, self.step)
        self._tell(bucket)
        with waits.inside():  # some groups and methods have ended when they return
            work = self.exchange.start(bucket, self._state, step)
        current.works.append(work)
        if timeline is not None:
            record_start(current, bucket, work, start_ns, timeline)
        if self._in_turn:
            self._wait(bucket.index, work)

    def _is_used(self, current: Pass, index: int) -> bool:
        if current.shadow:  # no backward runs here: parameters used in this rank's last own pass count as used
            return self._selection.accumulated[index] or not self._selection.unused_last[index]
        return current.fired[index] > 0 or self._selection.accumulated[index]

    # ---- These methods end a pass. -------------------------------------------------------------------------------------

    @never_compiled
    def _finish(self) -> None:
        with self._lock:
            current = self._pass
            assert current is not None
            if current.graph_start is not None:
                self._forwards.add(current.graph_start)
            if current.num_fired == 0:
                self._pass = None
                return
            current.ended_ns = time.time_ns()
            if self.timeline is not None:
                self.timeline.mark("backward ended", "buckets", step=self.step)
            self._complete(current)

    def shadow(self) -> None:
        """Take part in a pass of the other ranks after this rank has run out of data, with what it still holds or zeros."""
        current, selection = self._begin(shadow=True), self._selection
        for bucket, members in zip(self.buckets, self.layout, strict=True):
            if not any(selection.accumulated[i] for i in members):
                bucket.zero()
                continue
            bucket.hold()
            for i, view in zip(members, bucket.views, strict=False):  # a sparse bucket has no views
                if selection.accumulated[i]:
                    selection.views.fill(i)
                else:
                    view.zero_()
        selection.views.filled = [True] * len(self.parameters)
        self._complete(current)

    @property
    def has_accumulated(self) -> bool:
        """Whether this rank holds gradients of backwards that were not synchronized, which the next pass sends."""
        held = zip(self._selection.accumulated, self.parameters, strict=True)
        return any(flag and p.grad is not None for flag, p in held)

    def _complete(self, current: Pass) -> None:
        selection, n = self._selection, len(self.parameters)
        for b, waiting in enumerate(current.waiting):
            if waiting:  # backward has ended, so no more gradients come
                current.waiting[b] = 0
                record_ready(b, self.step, self.timeline)
        self._start_full(current)
        used_here = [selection.accumulated[i] if current.shadow else self._is_used(current, i) for i in range(n)]
        asking: UsedAnywhere | None = None
        if selection.learning if self.options.static_graph else self.options.find_unused:
            asking = UsedAnywhere(used_here, self.group, self.buckets[0].flat.device)
            current.others.append(asking)
        for bucket, work in zip(self.buckets, current.works, strict=True):
            if work is not None:
                self._wait(bucket.index, work)
        if self.timeline is not None:
            record_ends(current, self.timeline, at_end=True)
        try:
            self._compare_ranks()
        except MismatchError as error:
            raise self._noted(error) from None
        used = [True] * n
        if asking is not None:
            self.num_ranks_used = asking.counts()
            used = selection.used_in_first_pass = [count > 0 for count in self.num_ranks_used]
        elif self.options.static_graph:  # agreed on in the first pass; no_sync gradients are alike on all ranks
            used = [a or b for a, b in zip(selection.used_in_first_pass, used_here, strict=True)]
        elif self.options.skip_unused:  # the view of a bucket that was not sent holds no result
            used = [current.works[b] is not None or self.buckets[b].sparse for b in selection.placement.bucket_of]
        self._exchange_sparse(current, used)
        for i in range(n):
            if not current.shadow:
                selection.views.settle(i, used[i])
            elif used[i]:
                selection.views.show(i)
        selection.views.end()
        if self.options.static_graph and not selection.watching and not current.shadow:
            self._left_out = self._lacking(current)
        self._learn(current)
        if not current.shadow:
            selection.unused_last = [not was_used for was_used in used_here]
        selection.accumulated = [False] * n
        self._last_pass, self._pass, self._any_backward = current, None, False
        self._pass_since_forward = not current.shadow
        self.step += 1
        registry.num_means += 1
        if self.after_pass is not None:
            self.after_pass()

    def _lacking(self, current: Pass) -> list[int]:
        """Return the indices of parameters that got fewer gradients in this pass than in the first one."""
        return [
            i
            for i, (fired, wanted) in enumerate(zip(current.fired, self._selection.expected, strict=True))
            if fired < wanted
        ]

    def _exchange_sparse(self, current: Pass, used: Sequence[bool]) -> None:
        for bucket, members in zip(self.buckets, self.layout, strict=True):
            if bucket.sparse and used[members[0]]:
                parameter, is_old = bucket.parameters[0], current.shadow and not self._selection.accumulated[members[0]]
                gradient = no_rows(parameter) if is_old or parameter.grad is None else parameter.grad
                divisor = (1 if self.exchange.sums else self.num_active_ranks) / registry.weight.value
                parameter.grad = all_gather_mean(gradient, divisor, self.group, current.others)

    def _wait(self, bucket: int, work: Work) -> None:
        try:
            waits.for_work(work)
        except RuntimeError as error:
            raise self.cause_of(error, f"the exchange of bucket {bucket} of {len(self.buckets)}") from error

    def _keep_weighted(self, factor: float) -> None:
        """Multiply the gradients that backwards have left on this rank. See [Note: unequal parts] in registry.py."""
        with torch.no_grad():
            for parameter, is_local in zip(self.parameters, self._selection.accumulated, strict=True):
                if is_local and parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def cause_of(self, error: RuntimeError, what: str) -> RuntimeError:
        """Compose the error for a collective that failed: the cause that another rank reported, or that a rank is gone."""
        return self._noted(self._unused.cause_of(error, what, self.step))

    def _noted(self, error: _E) -> _E:
        self.error = str(error)
        return error

    def _learn(self, current: Pass) -> None:
        """Learn from the first pass: the order of buckets, as rank 0 saw it, and the number of each parameter's gradients."""
        selection = self._selection
        if selection.learning:
            proposed, device = selection.propose_order(current.order), self.buckets[0].flat.device
            order = torch.tensor(proposed, dtype=torch.int64, device=device)
            if self.group.size() > 1:
                work = dist.broadcast(order, group_src=0, group=self.group, async_op=True)
                current.others.append(work)
                waits.for_work(work)
            selection.adopt_order([int(i) for i in order.tolist()])
        if selection.watching and not current.shadow:
            selection.watching = False
            if self.options.static_graph:
                selection.expected = current.fired
            if any(current.fired[i] for i in current.predicted_unused):
                selection.predictable = False  # inner backwards, which the outer graph does not show, make gradients
