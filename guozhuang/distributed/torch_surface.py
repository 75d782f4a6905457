"""Methods and attributes of PyTorch's DistributedDataParallel that programs and libraries use outside a training step."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..errors import UsageError, explain
from ..exchange.comm_hook import Hook
from ..gradients.buckets import Caps
from ..units import listed
from ..weights.around import AroundSteps
from ..weights.equal_start import broadcast_tensors
from ..world.versions import field, never_compiled
from .arguments import MIB
from .torch_reducer import TorchReducer

_here = threading.local()  # .active: the wrapper whose forward runs in this thread


class TorchSurface:
    """The part of ``DistributedDataParallel`` that programs use as with PyTorch's class, outside a training step."""

    module: nn.Module
    _reducer: TorchReducer | None
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    device_ids: list[int] | None
    device_type: str
    output_device: int | None
    dim: int
    is_multi_device_module: bool
    forward_sync_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    _caps: Caps
    around: AroundSteps | None
    _averaged: list[tuple[str, nn.Parameter]]

    if TYPE_CHECKING:

        def register_comm_hook(self, state: object, hook: Hook) -> None:
            """Declared for type checkers; ``DistributedDataParallel`` defines it."""

        def _connect(self) -> None: ...

        def _broadcast_buffers(self) -> None: ...

        @property
        def reducer(self) -> TorchReducer | None:
            """Declared for type checkers; ``DistributedDataParallel`` defines it."""

    def _inherited_attributes(self, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> None:
        """Set the attributes that inherited methods and other libraries read, and that ``__init__`` does not set anyway.

        ``bucket_bytes_cap`` is also the size by which ``torch.compile`` cuts its graphs.
        """
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in bucket_cap_mb_list or ()]
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.bucket_bytes_cap = max(self.bucket_bytes_cap_list, default=self._caps.each[-1])
        if make_config := field(torch.nn.parallel.distributed, "_BucketCapacityConfig"):
            self._bucket_config = make_config.create(bucket_cap_mb, bucket_cap_mb_list, use_python_reducer=False)
        self._module_parameters = [
            p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore
        ]
        self._use_python_reducer = False
        self._require_manual_backward_finalization = False  # since torch 2.15
        self._lazy_init_ran = self._has_rebuilt_buckets = True
        self._comm_hooks: list[Any] = []
        self._accum_grad_hooks: list[Any] = []
        self._delay_all_reduce_params: list[Tensor] = []
        self._delay_grad_buffer: Tensor | None = None
        self._delay_grad_views: list[Tensor] = []
        self._delay_all_reduce_all_params = False
        self._ddp_sink_clone = True
        self.use_side_stream_for_tensor_copies = False
        self.broadcast_bucket_size = 250 * MIB

    def _setup_in_backward_optimizers(self) -> None:
        """Let optimizers of ``_apply_optimizer_in_backward`` step when their gradients are averaged, not when they are made.

        Raises:
            RuntimeError: gradients of these parameters are not averaged, because weights are exchanged or they were frozen.
        """
        applied = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
        if applied is None or not applied.param_to_acc_grad_map:  # the other map lacks those with register_hook=False
            return
        handles = applied.param_to_optim_hook_handle_map
        found = {name: p for name, p in self._averaged if hasattr(p, "_in_backward_optimizers")}
        if found and (self.around is not None or self.reducer is None):
            what = "an optimizer was applied in backward to parameters whose gradients are not averaged by this wrapper"
            raise RuntimeError(explain(what, value=listed(found), fix="call the optimizer's step() after backward"))
        for parameter in found.values():
            for handle in handles.get(parameter, ()):
                handle.remove()
        if self.reducer is not None:
            self.reducer.optimized = list(found.values())

    @contextlib.contextmanager
    @never_compiled
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Be the active wrapper in this context; PyTorch's own would let threads keep each other's wrappers alive."""
        outer, _here.active = getattr(_here, "active", None), self
        TorchDDP._active_ddp_module = self  # type: ignore[assignment]
        try:
            yield
        finally:
            _here.active = TorchDDP._active_ddp_module = outer

    @functools.partial(never_compiled, recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module as the active wrapper, by whose bucket size ``torch.compile`` cuts its graphs.

        It refuses to cut them by less than the size of PyTorch's first bucket; such a module is compiled whole.
        """
        if self.bucket_bytes_cap < dist._DEFAULT_FIRST_BUCKET_BYTES:
            return self.module(*inputs, **kwargs)
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``, as an attribute."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The module's present buffers that are broadcast, by name."""
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The module's present buffers that are broadcast, as a list."""
        return list(self.named_module_buffers.values())

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Register one of PyTorch's two built-in hooks, under the rules of :meth:`register_comm_hook`.

        Raises:
            UsageError: the type is neither ALLREDUCE nor FP16_COMPRESS.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        kinds = dist.BuiltinCommHookType
        if comm_hook_type == kinds.ALLREDUCE:
            hook: Hook = default_hooks.allreduce_hook
        elif comm_hook_type == kinds.FP16_COMPRESS:
            hook = default_hooks.fp16_compress_hook
        else:
            fix = "give torch.distributed.BuiltinCommHookType.ALLREDUCE or .FP16_COMPRESS"
            raise UsageError(explain("there is no such built-in communication hook", value=comm_hook_type, fix=fix))
        self.register_comm_hook(self.process_group, hook)
        cast(Any, self).logger._set_comm_hook_name(str(comm_hook_type))

    def _remove_autograd_hooks(self) -> None:
        """Remove the reducer's hooks from the parameters, whose gradients then stay on this rank."""
        if self.reducer is not None:
            self.reducer.close()

    def _check_reducer_finalized(self) -> None:
        """Raise unless the exchanges of the last backward have ended.

        Raises:
            RuntimeError: the last backward was aborted.
        """
        if self._reducer is not None and self._reducer._pass is not None:
            what = (
                "Expected to have finished reduction in the prior iteration before starting a new one: the last backward "
                "did not come to its end, so its gradients are not averaged"
            )
            fix = "call this after backward has returned; an error in backward leaves ranks apart"
            raise RuntimeError(explain(what, rank=self.process_group.rank(), fix=fix))

    def _set_static_graph(self) -> None:
        """Declare, before the first backward, that all steps use the same graph.

        Raises:
            RuntimeError: gradients were averaged already.
        """
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._reducer is not None and self._reducer.step > 0:
            what = "set_static_graph() should be called before training loop starts"
            text = explain(what, value=f"{self._reducer.step} steps", fix="pass static_graph=True to the constructor")
            cast(Any, self).logger.set_error_and_log(text)
            raise RuntimeError(text)
        if self.find_unused_parameters:
            what = "find_unused_parameters=True has no effect beside static_graph, which finds them in the first step"
            warnings.warn(what, stacklevel=2)
        self.static_graph = True
        if self._reducer is not None:
            self._reducer.close()
        self._connect()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on. Every rank of the old and the new group must call it, between two steps.

        The exchange starts anew, without the state (error feedback, for example) that it had; weights are not made equal. A
        rank that is not in the new group must not run a synchronized backward until it is in a group again.

        Raises:
            UsageError: a weight exchange is in use, which has groups of its own.
        """
        if self.around is not None:
            what = "the process group cannot be changed while a weight exchange is in use"
            raise UsageError(explain(what, fix="wrap the module anew with the new group"))
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        if dist.distributed_c10d._rank_not_in_group(new_process_group):
            return
        self.process_group = new_process_group
        self._connect()

    def _assign_modules_buffers(self) -> None:
        """Do nothing: ``modules_buffers`` and ``named_module_buffers`` always show the module's present buffers."""

    def _sync_buffers(self) -> None:
        """Make the buffers equal, by the registered hook if there is one, else from rank 0. Every rank must call it."""
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            self._broadcast_buffers()
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None and self.reducer is not None:
            self.reducer._install_post_backward_futures(futures)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Broadcast the buffers from a rank of the group. Every rank must call it."""
        self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers (default: all that are broadcast) from a rank of the group. Every rank must call it."""
        broadcast_tensors(self.modules_buffers if bufs is None else bufs, self.process_group, authoritative_rank)


def _refuse(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        what = "this method belongs to the reducer of PyTorch's wrapper, which guozhuang.DistributedDataParallel does not have"
        fix = "leave the call out: buckets and hooks are made when they are first needed"
        raise UsageError(explain(what, value=name, fix=fix))

    method.__name__, method.__doc__ = name, "Raise UsageError: this is a part of PyTorch's own reducer."
    return method


# These inherited methods would build or drive a reducer of PyTorch's beside ours.
for _name in (
    "_register_accum_grad_hook",
    "_delayed_all_reduce_hook",
    "_register_delay_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_root_copy_hook",
    "_module_wait_for_copy_hook",
    "_ddp_init_helper",
    "_check_global_requires_backward_grad_sync",
    "_check_and_sync_module_buffers",
    "_sync_final_model",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_set_sparse_metadata",
    "_check_manual_backward_finalization_supported",  # called to switch it on; since torch 2.15, as the next one
    "finalize_backward",
):
    setattr(TorchSurface, _name, _refuse(_name))
