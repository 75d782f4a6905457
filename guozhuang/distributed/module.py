"""``DistributedDataParallel``, a drop-in for ``torch.nn.parallel.DistributedDataParallel``.

The wrapper makes the decisions; the work is done in other modules: ``arguments`` (options), ``equal_start`` (equal weights at
the start), ``reducer`` (backward), ``exchanging`` (exchanges), ``joining`` (uneven inputs), ``precision`` (mixed precision),
``torch_surface`` (the rest of PyTorch's methods).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..errors import UsageError, WorldError, explain
from ..gradients.additions import Additions
from ..gradients.forwards import tensors_with_graph
from ..gradients.passes import ReducerOptions, weakly
from ..sync_batch_norm import use_on_cpu
from ..timeline import Timeline
from ..weights.equal_start import broadcast_tensors, describe, sparse_names, start_equal, verify_equal_layout
from .arguments import (
    LEFT_OUT,
    bucket_caps,
    choose_devices,
    choose_group,
    sync_choices,
)
from .exchanging import Exchanging
from .joining import (
    ShadowSteps,
    check_can_join,
    expect_one_backward,
    refuse_switch,
    sync_buffers,
    tell_synchronization,
    watch_contexts,
)
from .precision import MixedPrecision, Precision
from .torch_reducer import Logger, TorchReducer
from .torch_surface import TorchSurface


class DistributedDataParallel(TorchSurface, Exchanging, TorchDDP):  # type: ignore[override]
    """Keeps the replicas of a module on all ranks equal: gradients are averaged while backward runs.

    A subclass of ``torch.nn.parallel.DistributedDataParallel``, with the arguments and methods that it has in torch 2.13, and a
    reducer and exchanges of its own. Every rank of the group must construct it at the same point, and call forward and backward
    equally often (or use :meth:`join`). Differences to PyTorch:

    - Gradients are views into the buckets whatever ``gradient_as_bucket_view`` says, since that saves a copy and half the
      memory. ``p.grad.detach_()`` works on them, and a gradient kept past ``zero_grad()`` keeps its values.
    - Each of several backwards per forward is synchronized. ``backward(create_graph=True)`` gives the synchronized value, and a
      function of it that is equal on all ranks can be differentiated again.
    - If a parameter got no gradient, the next forward raises on that rank, with names of parameters and ranks.
    - SyncBatchNorm works on CPU; ``torch.nn.SyncBatchNorm`` parts of a CPU module are replaced.
    - PyTorch's communication hooks of several rounds (PowerSGD) work over gloo; bf16 hooks work on CPU.

    Args:
        module: the module, equal on all ranks in names, shapes and dtypes of its parameters. Its parameters may lie on several
            devices of one type.
        device_ids: one accelerator index to which inputs are moved; None for CPU modules and modules on several devices.
        output_device: only checked and stored as an attribute, as in PyTorch; ``device_ids[0]`` by default.
        dim: dimension along which :meth:`scatter` and :meth:`gather` split and join.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also leaves out the broadcast at construction.
        init_sync: compare ranks and broadcast rank 0's parameters and buffers at construction.
        process_group: the ranks; all by default.
        bucket_cap_mb: size limit of a bucket in MiB. The first bucket is at most 1 MiB.
        find_unused_parameters: parameters may get no gradient; ranks agree after each backward (one small all-reduce).
        check_reduction: deprecated in PyTorch; warns. Reductions are always checked.
        gradient_as_bucket_view: see above.
        static_graph: all steps use the same graph; ranks agree once on the unused parameters, and parameters in several
            re-entrant checkpoints keep their overlap.
        delay_all_reduce_named_params: (name, parameter) pairs exchanged together once ``param_to_hook_all_reduce`` has its
            gradient.
        param_to_hook_all_reduce: see ``delay_all_reduce_named_params``; give both or none.
        mixed_precision: object with ``param_dtype``, ``reduce_dtype``, ``buffer_dtype`` (PyTorch's ``_MixedPrecision``).
            Not together with activation checkpointing, which would recompute in full precision.
        device_mesh: a mesh of one axis in place of ``process_group``.
        skip_all_reduce_unused_params: do not send buckets without used parameters; all ranks must use the same parameters.
        bucket_cap_mb_list: size limits of the buckets one by one in MiB; the last one holds for all further buckets.
        batched_grad_copy: copy a bucket's gradients with one call when it is full.
        forward_sync_buffers: broadcast rank 0's buffers before each forward (default True).
        lazy_bucket_allocation: a bucket has memory only from its first gradient of a backward until the first forward after
            ``zero_grad`` has dropped all of them, so that forwards can use it. It is ordinary memory, which an "shm" group
            copies from and to.

    Raises:
        UsageError: arguments that cannot work (a ValueError).
        MismatchError: ranks hold different models; on every rank, with a table.
        RuntimeError: no parameter requires a gradient; no process group; arguments PyTorch refuses with RuntimeError.
    """

    logger: Any  # a Logger; PyTorch's belongs to its reducer
    _warns = True  # of replicas that go apart, which is no error: scripts that work with PyTorch's class shall go on

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # not that of PyTorch's wrapper, which would make a reducer of its own
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            what = "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
            raise UsageError(explain(what, fix="give both or none"))
        if check_reduction:
            warnings.warn("check_reduction is deprecated: reductions are always checked", FutureWarning, stacklevel=2)
        self.process_group = choose_group(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        delayed = list(delay_all_reduce_named_params or ())
        ignored = set(getattr(module, LEFT_OUT, ())) | {name for name, _ in delayed}
        self.parameters_to_ignore = ignored
        handled = [p for name, p in module.named_parameters() if name not in ignored]
        if not any(p.requires_grad for p in [*handled, *(p for _, p in delayed)]):
            what = "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient"
            fix = "use the module as it is; there is nothing to average"
            raise RuntimeError(explain(what, fix=fix))
        everything = handled or [p for _, p in delayed]
        self.device_ids, self.output_device = choose_devices(everything, device_ids, output_device)
        self.device = everything[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in everything}) > 1
        self.dim = dim
        self.module = use_on_cpu(module) if self.device_type == "cpu" else module
        self.forward_sync_buffers, init_sync_buffers = sync_choices(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision  # type: ignore[assignment]
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.in_join_context = False
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self._inherited_attributes(bucket_cap_mb, bucket_cap_mb_list)
        self._delayed_names = [name for name, _ in delayed]
        self._trigger = (param_to_hook_all_reduce,)  # in a tuple, so that it does not become a parameter of the wrapper
        self._precision: Precision | None = None
        if mixed_precision is not None:
            m = mixed_precision
            self._precision = Precision(m.param_dtype, m.reduce_dtype, m.buffer_dtype, self.ignored)
        if init_sync:
            options = (
                "find_unused_parameters",
                "static_graph",
                "forward_sync_buffers",
                "skip_all_reduce_unused_params",
            )
            line = ", ".join(f"{name}={getattr(self, name)}" for name in options)
            lines = [f"{line}, bucket caps {self._caps.each} bytes"]
            start_equal(self.module, self.process_group, self.ignored, init_sync_buffers, lines)
        if self._precision is not None:
            self._precision.cast_buffers(self.module)
        self._connect()

    # ---- methods that set up the wrapper, and pickle it -----------------------------------------------------------------

    @property
    def ignored(self) -> frozenset[str]:
        """Names of the parameters and buffers that are neither averaged nor broadcast."""
        return frozenset(self.parameters_to_ignore) - frozenset(self._delayed_names)

    def _connect(self) -> None:
        """Initialize the attributes that a pickle does not contain; the reducer itself is created when first needed."""
        self._reducer: TorchReducer | None = None
        ignored = self.ignored
        self._averaged = [(name, p) for name, p in self.module.named_parameters() if name not in ignored]
        self._sparse = sparse_names(self.module)
        self._needs_reducer = any(p.requires_grad for _, p in self._averaged)
        self._additions = Additions(self._averaged)
        self._script_hooks: ScriptHooks | None = None
        if self.process_group.size() > 1:
            from ..gradients.script_hooks import ScriptHooks  # imported only when needed

            rank, asks = self.process_group.rank(), (weakly(self._awaits_average), weakly(self._count_passes))
            self._script_hooks = ScriptHooks(self._averaged, asks[0], rank, self._warns, asks[1])
        self.logger = Logger(self)

    @property
    def reducer(self) -> TorchReducer | None:  # type: ignore[override]  # there may be none, and it is made when needed
        """The reducer that averages gradients, created when first needed, because its buckets need as much memory as gradients.

        None if gradients stay local: all parameters were frozen at construction, or a weight exchange needs no reducer.
        """
        if self._reducer is None and self._needs_reducer:
            named = self._averaged
            options = ReducerOptions(
                find_unused=self.find_unused_parameters,
                static_graph=self.static_graph,
                skip_unused=self.skip_all_reduce_unused_params,
                batched_copy=self.batched_grad_copy,
                overlap=not self.find_unused_parameters
                or not any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules()),
                delayed=frozenset(self._delayed_names),
                trigger=next((name for name, p in named if p is self._trigger[0]), None),
                frees=self.lazy_bucket_allocation,
            )
            with torch.inference_mode(False):  # the first forward may be one of evaluation
                self._reducer = TorchReducer(
                    named, self._sparse, self.process_group, self.exchange, self._caps, options
                )
            self._reducer.is_shadowed = weakly(self._is_shadowed)
            if self.process_group.size() > 1:
                from ..gradients.alike import Alike  # imported only when needed

                count = self._reducer.awaited.counts
                self._reducer.alike = Alike(self.process_group, [p for _, p in named], count, self._warns)
                self.compare_what_is_equal(self._reducer)
        return self._reducer

    def _awaits_average(self) -> bool:
        """Return whether a gradient that arrives now is averaged over several ranks later."""
        if self.process_group.size() == 1 or self.around is not None or not self.exchange.averages:
            return False
        return self._reducer is None or not self._reducer.is_stepping

    def _count_passes(self) -> int:
        """Return how many backwards have averaged gradients."""
        return 0 if self._reducer is None else self._reducer.step

    def leave_gradients_local(self) -> None:
        """Stop averaging gradients, and free the buckets. Every rank must call it."""
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._needs_reducer = None, False

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group is not dist.group.WORLD:
            what = "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
            raise RuntimeError(explain(what, fix="pickle its .module"))
        if self.around is not None:
            raise RuntimeError(explain("a weight exchange in use cannot be pickled", fix="pickle the module's .module"))
        left_out = {"process_group", "_reducer", "_averaged", "_additions", "_script_hooks", "logger"}
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled wrapper, with the default group of the process that loads it; every rank must load."""
        nn.Module.__setstate__(self, state)
        self.process_group = choose_group(None, None, self.module)
        self._connect()

    @property
    def timeline(self) -> Timeline | None:
        """The timeline on which buckets and exchanges are recorded; None if nothing is recorded."""
        return None if self.reducer is None else self.reducer.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if self.reducer is not None:
            self.reducer.timeline = timeline

    # ---- methods of a training step ---------------------------------------------------------------------------------------

    @_disable_dynamo(recursive=False)  # torch.compile compiles the module inside, cut at the buckets
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. With gradients enabled, the backward that follows averages gradients over all ranks."""
        with _RecordFunctionFast("DistributedDataParallel.forward"):  # a range in a profile, as with PyTorch's class
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            if self._precision is None:
                outputs = self._run_ddp_forward(*inputs, **kwargs)
            else:
                with self._inside_ddp_forward():
                    outputs = self._precision.run(self.module, inputs, kwargs)
            return self._post_forward(outputs)

    def before_module(self) -> None:
        """Do what :meth:`forward` does before it calls the module, for a caller that calls the module itself.

        Inputs are not moved to a device. Every rank must call it, and then the module, and then :meth:`behind_module`.
        """
        self._pre_forward()

    def behind_module(self, outputs: Any) -> list[torch.Tensor]:
        """Do what :meth:`forward` does after it called the module, which gave ``outputs``; return those that have a graph."""
        self._post_forward(outputs)
        return tensors_with_graph(outputs)

    @_disable_dynamo(recursive=True)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            self._additions.refuse(self.module, self.ignored, self.process_group.rank())
            if self._script_hooks is not None:
                self._script_hooks.look(is_local=not self.require_backward_grad_sync)
        if torch.is_grad_enabled() and self.around is not None:
            self.around.note_forward(self.require_backward_grad_sync)
        if torch.is_grad_enabled() and self.reducer is not None:
            self.take_up_changes()
        elif self._reducer is not None:
            self._reducer.free_buckets()
        if torch.is_grad_enabled():
            self._setup_in_backward_optimizers()
        if self._join_config.enable and not self._join_config.throw_on_early_termination:
            check_can_join(self)
        synchronizes = self.require_backward_grad_sync and torch.is_grad_enabled()
        if synchronizes and self.reducer is not None and self._is_shadowed() and not self.keeps_gradients:
            expect_one_backward(self.reducer)
        Join.notify_join_context(self)
        if self.reducer is not None:
            self.reducer.num_active_ranks = self.process_group.size()
        if self._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()
        if self._join_config.enable:
            tell_synchronization(self, synchronizes)
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), False)
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    @_disable_dynamo(recursive=True)
    def _post_forward(self, outputs: Any) -> Any:
        if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()
        synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync and not self.keeps_gradients
        self.require_forward_param_sync = synchronizes
        if synchronizes and self.reducer is not None:
            is_awaited = self.module.training and not torch.jit.is_tracing()
            self.reducer.after_forward(tensors_with_graph(outputs), is_awaited)
        return outputs

    def take_up_changes(self) -> None:
        """Check the last backward, and compare ranks if ``requires_grad`` was switched since then. Every rank must call it.

        Raises:
            UsageError: ``requires_grad`` was switched inside a join context.
        """
        if self.reducer is not None and (changed := self.reducer.before_forward()):
            self._compare_again(self.reducer, changed)

    def _compare_again(self, reducer: TorchReducer, changed: Sequence[str]) -> None:
        config = self._join_config
        if self.in_join_context and config.enable and not config.throw_on_early_termination:
            refuse_switch(changed, self.process_group.rank())
        lines = describe(zip(reducer.names, reducer.parameters, strict=True), sparse_names(self.module))
        try:
            verify_equal_layout(self.process_group, lines)
        except WorldError as error:
            raise WorldError(f"{error} On this rank requires_grad was switched for {', '.join(changed)}.") from error

    def _broadcast_buffers(self) -> None:
        if self._join_config.enable:
            sync_buffers(self, joined=False)
            return
        try:
            broadcast_tensors(self.modules_buffers, self.process_group, source=0)
        except RuntimeError as error:
            if self.reducer is None:
                raise
            raise self.reducer.cause_of(error, "the broadcast of the buffers") from error

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next forward begins with a broadcast of the buffers."""
        if not (self.require_forward_param_sync and self.forward_sync_buffers):
            return False
        return any(name not in self.parameters_to_ignore for name, _ in self.module.named_buffers())

    # ---- methods for ranks with different numbers of batches ----------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context for loops in which ranks have different numbers of batches. Every rank must enter it.

        Args:
            divide_by_initial_world_size: True: sums of gradients are divided by all ranks, so every batch weighs the same;
                False: by the number of ranks that add to them. With a mean loss, a sample of a short last batch then
                weighs more than others: divide the sum of its losses by the full batch size instead.
            enable: False makes the context do nothing.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one rank has run out of data.

        Each synchronized forward inside it must have one backward, in which ranks without data take part. Behind it all ranks
        have the weights of one that made all steps, but each its own optimizer state (momentum, say): broadcast that one's.

        Raises:
            UsageError: the module has a SyncBatchNorm part, and ranks may run out of data. Inside the context a forward that
                is not followed by its backward raises it in the next one, and a second backward of one forward raises it.
        """
        if enable and not throw_on_early_termination:
            check_can_join(self)
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> ShadowSteps:
        """Return the hook that acts for this rank when it has no more data; called by ``torch.distributed.algorithms.Join``."""
        watch_contexts()
        self.in_join_context = False
        self.take_up_changes()  # compares switches of requires_grad at a point that every rank reaches
        if self.around is not None:
            self.around.take_up()
            self.around.awaits_none()
        self.in_join_context = True
        if self.reducer is not None:
            self.reducer.awaited_pass = -1
        return ShadowSteps(self, kwargs.get("divide_by_initial_world_size", True))
