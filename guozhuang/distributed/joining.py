"""``join()`` for uneven inputs: a rank that has run out of batches takes part in the steps of ranks that still have data.

Built on ``torch.distributed.algorithms.join``, whose context calls the hook below; it therefore works together with other
joinable objects (ZeroRedundancyOptimizer). For every collective that an active rank issues in a step, the hook issues the
same one, in the same order. The context tells it only of forwards, so each synchronized one must have exactly one backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from ..errors import UsageError, explain
from ..weights.equal_start import broadcast_tensors, state_of

if TYPE_CHECKING:
    from .module import DistributedDataParallel
    from .torch_reducer import TorchReducer


class ShadowSteps(JoinHook):
    """The hook that issues the collectives of each step on a rank without data, while other ranks still have data.

    Args:
        ddp: the wrapper of this rank.
        divide_by_initial_world_size: divide by all ranks of the group, not only by those that still have data.
    """

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        self._without_gradient: list[torch.Tensor] | None = None  # None: this rank has had data in all steps so far
        ddp.divide_by_initial_world_size = divide_by_initial_world_size
        ddp.logger._set_uneven_input_join()

    def main_hook(self) -> None:
        """Take part in one step of the ranks with data: with gradients not exchanged yet, those of ``no_sync``, or zeros."""
        ddp = self._ddp
        reducer = ddp.reducer
        if reducer is not None:
            refuse_switch(reducer.before_forward(), ddp.process_group.rank())
        if ddp._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            if hasattr(ddp, "buffer_hook"):
                ddp._sync_buffers()
            else:
                sync_buffers(ddp, joined=True)
        syncs_buffers_after = ddp._check_sync_bufs_post_fwd()  # type: ignore[no-untyped-call]
        adds = reducer is not None and not ddp.keeps_gradients and reducer.has_accumulated
        anyone_synchronizes = tell_synchronization(ddp, False, adds)
        if syncs_buffers_after:
            ddp._sync_buffers()
        ddp.require_forward_param_sync = anyone_synchronizes
        if not anyone_synchronizes:
            return
        # While all parameters are frozen the reducer has no bucket, and there is nothing to exchange.
        if not ddp.keeps_gradients and reducer is not None and reducer.buckets:
            if self._without_gradient is None:
                self._without_gradient = [p for p in reducer.parameters if p.grad is None]
            reducer.shadow()
        if ddp.around is not None:
            ddp.around.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last; with a weight exchange, make all ranks' weights equal instead."""
        ddp = self._ddp
        leave_context(ddp)
        for parameter in self._without_gradient or ():
            parameter.grad = None  # optimizers of other joined objects needed it; the program never made it
        if ddp.around is not None:
            ddp.around.changed = True  # other ranks made steps, even if this rank made none
            ddp.agree()
            return
        source = ddp._authoritative_rank = _common_rank(ddp, is_last_joiner)
        state = state_of(ddp.module, ddp.ignored, buffers=ddp.forward_sync_buffers)
        broadcast_tensors([tensor for _, tensor in state], ddp.process_group, source)


def watch_contexts() -> None:
    """Let each join context leave the wrappers behind it as they were before it, also where an exception has ended it.

    PyTorch's ``__exit__`` calls no hook after an exception, so it is replaced: scripts make such contexts themselves, too.
    """
    exits: Any = Join.__exit__
    if hasattr(exits, "_leaves"):
        return

    @functools.wraps(exits)
    def leaving(self: Join, *args: Any) -> Any:
        try:
            return exits(self, *args)
        finally:
            for joinable in self._joinables:
                if hasattr(joinable, "in_join_context"):  # no wrapper of ours otherwise
                    leave_context(cast("DistributedDataParallel", joinable))

    vars(leaving)["_leaves"] = True
    setattr(Join, "__exit__", leaving)  # noqa: B010  (type checkers refuse an assignment to a method)


def leave_context(ddp: DistributedDataParallel) -> None:
    """Let forwards behind a join context send what forwards before it do. PyTorch leaves its ``_join_config`` enabled."""
    ddp.in_join_context = False
    ddp._join_config = _JoinConfig.construct_disabled_join_config()


def sync_buffers(ddp: DistributedDataParallel, joined: bool) -> None:
    """Broadcast the buffers from the highest rank that still has data. Every rank of a join context must call it."""
    source = _common_rank(ddp, not joined)
    broadcast_tensors(ddp.modules_buffers, ddp.process_group, source)


def check_can_join(ddp: DistributedDataParallel) -> None:
    """Raise if the module communicates in its forward: a rank without data calls no forward, and could not take part.

    Raises:
        UsageError: the module has a SyncBatchNorm part.
    """
    if ddp.process_group.size() == 1:
        return
    found = next((name for name, part in ddp.module.named_modules() if isinstance(part, nn.SyncBatchNorm)), None)
    if found is not None:
        what = "join() does not work with SyncBatchNorm: ranks that have run out of data do not take part in its collectives"
        fix = "pass throw_on_early_termination=True, use BatchNorm, or give every rank the same number of batches"
        raise UsageError(explain(what, value=found, rank=ddp.process_group.rank(), fix=fix))


def refuse_switch(changed: Sequence[str], rank: int) -> None:
    """Raise if ``requires_grad`` was switched in a join context, where ranks without data would not notice it.

    Raises:
        UsageError: ``changed`` is not empty; it names the parameters.
    """
    if changed:
        what = "requires_grad was switched inside a join context"
        fix = "switch it before join() is entered, on every rank"
        raise UsageError(explain(what, value=", ".join(changed), rank=rank, fix=fix))


def expect_one_backward(reducer: TorchReducer) -> None:
    """Record that ranks without data take part in the next backward; called before a synchronized forward begins.

    Raises:
        UsageError: they still wait for the backward of an earlier forward, and would take this forward's collectives for its.
    """
    if not reducer.buckets or reducer.group.size() == 1:
        return
    if reducer.awaited_pass == reducer.step:
        what = "a second forward came before a backward of the first one"
        fix = "run a forward whose loss is added to that of another one inside no_sync(), one without backward inside no_grad()"
        raise _not_one_for_each(what, reducer.group.rank(), fix)
    reducer.awaited_pass = reducer.step


def refuse_second_backward(reducer: TorchReducer) -> None:
    """Raise if ranks without data do not take part in the backward that runs now.

    Raises:
        UsageError: no synchronized forward came between the last backward and this one.
    """
    if reducer.group.size() > 1 and reducer.awaited_pass != reducer.step:
        what = "a backward came without a synchronized forward of its own"
        raise _not_one_for_each(what, reducer.group.rank(), "add the losses of one forward and call backward once")


def _not_one_for_each(what: str, rank: int, fix: str) -> UsageError:
    why = "ranks that have run out of data take part in one backward for each forward"
    return UsageError(explain(f"inside join() {what}; {why}", rank=rank, fix=fix))


def tell_synchronization(ddp: DistributedDataParallel, synchronizes: bool, adds: bool = True) -> bool:
    """Return whether any rank passes ``synchronizes=True``, so that gradients are exchanged in this step. All must call.

    The ranks that pass ``adds=True`` have gradients for this step; sums are divided by their number if join() was asked to.
    """
    counts = torch.tensor([float(synchronizes), float(adds)], device=ddp.device)
    dist.all_reduce(counts, group=ddp.process_group)
    num_synchronizing, num_adding = counts.tolist()
    if ddp.reducer is not None and not ddp.divide_by_initial_world_size:
        ddp.reducer.num_active_ranks = int(num_adding)
    return bool(num_synchronizing)


def _common_rank(ddp: DistributedDataParallel, candidate: bool) -> int:
    """Return the highest rank of the group that passes ``candidate=True``. Every rank must call."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    chosen = int(rank.item())
    assert chosen >= 0, "no rank was a candidate"
    return chosen
