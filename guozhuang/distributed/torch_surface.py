"""Methods and attributes of PyTorch's DistributedDataParallel that programs and libraries use outside a training step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ..errors import UsageError, explain
from ..exchange import CommHook, GradientExchange
from ..exchange.comm_hook import Hook
from ..gradients.buckets import Caps
from .torch_reducer import TorchReducer


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
    _chosen: GradientExchange[Any] | None

    if TYPE_CHECKING:

        def register_comm_hook(self, state: object, hook: Hook) -> None:
            """Declared for type checkers; ``DistributedDataParallel`` defines it."""

        def _connect(self) -> None: ...

        @property
        def reducer(self) -> TorchReducer | None:
            """Declared for type checkers; ``DistributedDataParallel`` defines it."""

    def _inherited_attributes(self) -> None:
        """Set the attributes that inherited methods and other libraries read, and that ``__init__`` does not set anyway."""
        self._use_python_reducer = False
        self._lazy_init_ran = True
        self._delay_grad_buffer: Tensor | None = None
        self._delay_all_reduce_all_params = False
        self._ddp_sink_clone = True
        self.use_side_stream_for_tensor_copies = False
        self.broadcast_bucket_size = 250 << 20

    @property
    def bucket_bytes_cap(self) -> int:
        """The size limit of all buckets but the first ones in bytes; ``torch.compile`` cuts its graphs by it."""
        return self._caps.each[-1]

    @property
    def broadcast_buffers(self) -> bool:
        """PyTorch's older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module as the active wrapper, by whose bucket size ``torch.compile`` cuts its graphs.

        It refuses to cut them by less than the size of PyTorch's first bucket; such a module is compiled whole.
        """
        if self.bucket_bytes_cap < dist._DEFAULT_FIRST_BUCKET_BYTES:
            return self.module(*inputs, **kwargs)
        return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[misc]

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The module's present buffers that are broadcast, by name."""
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The module's present buffers that are broadcast, as a list."""
        return list(self.named_module_buffers.values())

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split inputs along ``dim`` for several accelerators, as PyTorch's method does."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move inputs to an accelerator, as PyTorch's method does."""
        return _to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id), False)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join outputs along ``dim`` on one accelerator, as PyTorch's method does."""
        return gather(outputs, output_device, dim=self.dim)

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

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts about this wrapper under PyTorch's keys; sizes in bytes, flags as 0 and 1.

        The times of PyTorch's dictionary are left out; the timeline has them.
        """
        reducer = self.reducer
        buckets = [] if reducer is None else reducer.buckets
        sizes = [sum(p.numel() * p.element_size() for p in bucket.parameters) for bucket in buckets]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for bucket in buckets for p in bucket.parameters})
        return {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "is_multi_device_module": int(self.is_multi_device_module),
            "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())),
            "num_parameter_tensors": sum(len(bucket.parameters) for bucket in buckets),
            "total_parameter_size_bytes": sum(sizes),
            "dtypes": ", ".join(dtypes),
            "bucket_sizes": ", ".join(map(str, sizes)),
            "bucket_cap_bytes": self._caps.each[-1],
            "find_unused_parameters": int(self.find_unused_parameters),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "forward_sync_buffers": int(self.forward_sync_buffers),
            "static_graph": int(self.static_graph),
            "comm_hook": getattr(self._chosen.hook, "__qualname__", "object")
            if isinstance(self._chosen, CommHook)
            else "",
            "iteration": 0 if reducer is None else reducer.step,
        }

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
            raise RuntimeError(
                explain(
                    "the last backward did not come to its end, so its gradients are not averaged",
                    rank=self.process_group.rank(),
                    fix="call this after backward has returned; an error in backward leaves ranks apart",
                )
            )

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Mark parameters and buffers of a module, by name, that a later wrapper must neither average nor broadcast."""
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        tensors: Mapping[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name in names:
            if name in tensors:
                tensors[name]._ddp_ignored = True  # other parts of PyTorch read this attribute

    def _set_static_graph(self) -> None:
        """Declare, before the first backward, that all steps use the same graph."""
        if self.static_graph:
            warnings.warn("static_graph was set already", stacklevel=2)
            return
        self.static_graph = True
        if self._reducer is not None:
            self._reducer.close()
        self._connect()


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
    "_setup_in_backward_optimizers",
    "_fire_reducer_autograd_hook",
    "_root_copy_hook",
    "_module_wait_for_copy_hook",
    "_ddp_init_helper",
    "_check_global_requires_backward_grad_sync",
    "_check_and_sync_module_buffers",
    "_sync_final_model",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_register_buffer_comm_hook",
    "_register_fused_optim",
    "_sync_buffers",
    "_sync_module_buffers",
    "_default_broadcast_coalesced",
    "_set_sparse_metadata",
    "_set_ddp_runtime_logging_sample_rate",
    "_update_process_group",
):
    setattr(TorchSurface, _name, _refuse(_name))
