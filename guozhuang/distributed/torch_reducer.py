"""The reducer and the logger under the names by which programs use PyTorch's, as ``model.reducer.prepare_for_backward``.

Times are of the host, in nanoseconds. As in PyTorch a forward lasts until its backward begins, the communication from the first
bucket that is sent until the last result, and both are measured in the first ten passes and in every hundredth one then.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from ..gradients.buckets import Bucket
from ..gradients.passes import Pass
from ..gradients.reducer import Reducer
from ..world.requests import torch_settings
from .joining import refuse_second_backward

if TYPE_CHECKING:
    from .module import DistributedDataParallel

_ALWAYS_MEASURED = 10


@dataclasses.dataclass
class _Times:
    """What was measured of the passes: sums over all measured ones, and the last one's values, by PyTorch's keys."""

    every: int = 100
    num_measured: int = 0
    sums: dict[str, int] = dataclasses.field(default_factory=dict)
    last: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, step: int, forward_ns: int, done: Pass) -> None:
        """Measure a pass that has just ended, if it is one of those that are measured."""
        if step >= _ALWAYS_MEASURED and step % self.every:
            return
        end_ns, sent_ns = time.time_ns(), done.sent_ns or done.ended_ns
        spans = {
            "forward_compute_time": done.opened_ns - forward_ns,
            "backward_compute_time": done.ended_ns - done.opened_ns,
            "backward_comm_time": end_ns - sent_ns,
            "backward_compute_comm_overlap_time": max(0, done.ended_ns - sent_ns),
        }
        self.last = spans | {
            "forward_compute_time_start": forward_ns,
            "backward_compute_time_start": done.opened_ns,
            "backward_compute_time_end": done.ended_ns,
            "backward_comm_time_start": sent_ns,
            "backward_comm_time_end": end_ns,
        }
        self.last["iteration"] = step
        self.num_measured += 1
        for key, value in spans.items():
            self.sums[key] = self.sums.get(key, 0) + value

    def known(self) -> dict[str, int]:
        """Return the last values and the averages; nothing before the first pass."""
        return self.last | {f"avg_{key}": value // self.num_measured for key, value in self.sums.items()}


class TorchReducer(Reducer):
    """A :class:`Reducer` with the methods of ``torch.distributed.Reducer`` that are called from outside.

    Attributes:
        times: what was measured of the passes.
        num_unused: number of parameters of the last pass that this rank did not use.
        optimized: parameters that optimizers step as soon as their gradients are averaged (``_apply_optimizer_in_backward``).
        is_shadowed: tells whether ranks without data take part in passes, in a ``join()`` context.
        awaited_pass: there, the number of the pass that they wait for, or of the last one that they waited for; -1: of none.
        is_stepping: whether the optimizers of ``optimized`` step now.
    """

    optimized: Sequence[Tensor] = ()
    is_shadowed: Callable[[], bool] | None = None
    awaited_pass = -1
    is_stepping = False

    def __init__(self, *args: Any) -> None:
        self.times = _Times()
        self._forward_ns = time.time_ns()
        self._is_graph_static = True
        self._after_backward: list[torch.futures.Future[Any]] = []
        super().__init__(*args)

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """Average the gradients of the next backward, whichever forward made its graph. Every rank must call it.

        Args:
            outputs: the tensors from which that backward starts; not read, because the running backward tells its graph.
        """
        self.expect_backward()

    def prepare_for_forward(self) -> None:
        """Do nothing: :meth:`before_forward` prepares."""

    def _rebuild_buckets(self) -> bool:
        """Apply a new order of buckets, if the ranks have agreed on one; return whether they have. Not inside a backward."""
        return self._pass is None and self.renew_buckets()

    def _delay_all_reduce(self) -> None:
        """Do nothing: trainers call it after the first backward of a static graph, and that backward has averaged already."""

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Wait for these futures at the end of the next backward that averages gradients."""
        self._after_backward += futures

    def _get_local_used_map(self) -> Tensor:
        """Return for each parameter on how many ranks it was used in the last pass, as a tensor of int32."""
        counts = self.num_ranks_used or [self.group.size()] * len(self.parameters)
        return torch.tensor(counts, dtype=torch.int32, device=self.buckets[0].flat.device)

    def _ddp_graph_static(self) -> bool:
        """Return whether this rank used the same parameters in all passes so far."""
        return self._is_graph_static

    def _get_zeros_like_grad_buckets(self) -> list[Bucket]:
        """Return the buckets, whose flat tensors are set to zero; for a rank that takes part without a gradient."""
        for bucket in self.buckets:
            bucket.zero()
        return self.buckets

    def _set_manual_finalization_required(self, required: bool) -> None:
        """Do nothing: it is never required, for ``require_manual_backward_finalization`` refuses True."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure each ``sample_rate``-th pass after the first ten."""
        self.times.every = sample_rate

    def _remove_autograd_hooks(self) -> None:
        """Remove the hooks from the parameters; their gradients stay local from then on."""
        self.close()

    @property
    @override
    def compares(self) -> bool:
        return super().compares and not (self.is_shadowed is not None and self.is_shadowed())

    @override
    def before_forward(self) -> list[str]:
        self._forward_ns = time.time_ns()
        return super().before_forward()

    @override
    def _start(self, current: Pass, bucket: Bucket) -> None:
        if not current.shadow and self.is_shadowed is not None and self.is_shadowed():
            refuse_second_backward(self)
        super()._start(current, bucket)

    @override
    def _complete(self, current: Pass) -> None:
        step, before = self.step, self._selection.unused_last
        super()._complete(current)
        while self._after_backward:
            self._after_backward.pop().wait()
        if self.optimized:
            self._step_optimizers()
        if not current.shadow:
            self._is_graph_static &= step == 0 or before == self._selection.unused_last
            self.times.add(step, self._forward_ns, current)

    def _step_optimizers(self) -> None:
        self.is_stepping = True
        try:
            with torch.no_grad():
                for parameter in self.optimized:
                    if parameter.grad is not None:
                        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                            optimizer.step()
                        parameter.grad = None
        finally:
            self.is_stepping = False

    def logging_data(self) -> dict[str, Any]:
        """Return what PyTorch's logging data tell of a reducer, by its keys; sizes in bytes, flags as 0 and 1."""
        sizes = ", ".join(str(sum(p.numel() * p.element_size() for p in b.parameters)) for b in self.buckets)
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self.parameters}
        facts: dict[str, Any] = {
            "bucket_sizes": sizes,
            "dtypes": ", ".join(sorted(_NAMES.get(name, name) for name in dtypes)),
            "num_parameter_tensors": len(self.parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in self.parameters),
            "iteration": 0,
        }
        last = self._last_pass
        if last is not None and self.step:
            unused = [p for p, missing in zip(self.parameters, self._selection.unused_last, strict=True) if missing]
            facts |= {
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, last.order)),
                "rebuilt_bucket_sizes": sizes,
                "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, members)) for members in self.layout),
                "num_buckets_reduced": sum(work is not None for work in last.works),
                "has_rebuilt_buckets": int(not self._selection.learning),
                "unused_parameter_size": sum(p.numel() * p.element_size() for p in unused),
            }
        if self.error:
            facts |= {"has_error": 1, "error": self.error}
        return facts | self.times.known()


# The names of dtypes in PyTorch's logging data, where they are not those of Python.
_NAMES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}
_NAMES |= {"int32": "int", "int64": "long int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char"}


class Logger:
    """Collects facts about a wrapper under the keys of PyTorch's ``dist.Logger``; the methods are those that others call.

    Args:
        ddp: the wrapper, which owns the logger.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._noted: dict[str, Any] = {}

    def set_error_and_log(self, text: str) -> None:
        """Note an error, which then stands in the data."""
        self._noted |= {"has_error": 1, "error": text}

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: the times of each pass are measured as it ends."""

    def _set_comm_hook_name(self, name: str) -> None:
        self._noted["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._noted["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._noted["static_graph"] = 1

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return the facts as PyTorch does: ``strs_map`` and ``ints_map``, two dictionaries."""
        facts = self.facts()
        strings = {key: value for key, value in facts.items() if isinstance(value, str)}
        return SimpleNamespace(strs_map=strings, ints_map={k: v for k, v in facts.items() if k not in strings})

    def facts(self) -> dict[str, Any]:
        """Return all facts."""
        ddp = self._ddp()
        assert ddp is not None, "the wrapper owns its logger"
        backend = dist.get_backend(ddp.process_group)
        facts: dict[str, Any] = {
            "backend_name": backend,
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(map(str, ddp.device_ids or ())),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in ddp.module.modules())),
            "is_multi_device_module": int(ddp.is_multi_device_module),
            "rank": ddp.process_group.rank(),
            "world_size": ddp.process_group.size(),
            **({"gloo_num_threads": 2} if backend == "gloo" else {}),
            **torch_settings(backend),
        }
        if ddp.static_graph:
            facts["static_graph"] = 1
        if ddp.reducer is not None:
            facts |= ddp.reducer.logging_data()
        else:
            facts |= {"iteration": 0, "num_parameter_tensors": 0, "total_parameter_size_bytes": 0}
        return facts | self._noted
