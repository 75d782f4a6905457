"""``DistributedDataParallel`` of Bagua: PyTorch's signature, and an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from guozhuang.errors import explain

from ..algorithms import Algorithm
from ..algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from .bagua_distributed import BaguaDistributedDataParallel


class DistributedDataParallel_V1_9_0(nn.Module):
    """A module around another one, which an algorithm trains; :func:`DistributedDataParallel` makes it.

    Attributes:
        module: the module inside.
        inner: the object that trains it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        process_group: Any,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__()
        trained = [p for p in module.parameters() if p.requires_grad]
        assert trained, explain(
            "the module has no parameter that requires a gradient", fix="train it without a wrapper"
        )
        devices = sorted({str(p.device) for p in trained})
        if len(devices) > 1:
            raise ValueError(explain("the module lies on several devices", value=devices, fix="move it to one device"))
        self.module = module
        self.inner = BaguaDistributedDataParallel(
            module, optimizers, algorithm, process_group, find_unused_parameters=find_unused_parameters
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module inside."""
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up on this rank."""
        return self.inner.no_sync()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward averages gradients."""
        return self.inner.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.inner.require_backward_grad_sync = value

    def __getattr__(self, name: str) -> Any:
        if name in ("scatter", "to_kwargs", "gather", "join", "register_comm_hook"):
            what = f"{name} is not a method of Bagua's DistributedDataParallel"
            raise NotImplementedError(explain(what, fix="use guozhuang.DistributedDataParallel, which has it"))
        of_inner = name.startswith("bagua_") or name in ("parameters_to_ignore", "process_group")
        if of_inner and hasattr(inner := vars(self).get("inner"), name):
            return getattr(inner, name)
        return super().__getattr__(name)


def make_data_parallel(
    module: nn.Module,
    device_ids: Sequence[Any] | None = None,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool = True,
    process_group: Any = None,
    bucket_cap_mb: float = 25,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = True,
    optimizers: Sequence[Optimizer] = (),
    algorithm: Algorithm | None = None,
) -> nn.Module:
    """Return the module in a wrapper with which all ranks train it by an algorithm. Every rank must call it.

    Args:
        module: the module; its keys are behind ``module.`` in those of the wrapper.
        device_ids: None. With another value, as with those of the arguments that say so, PyTorch's class is taken, and warns.
        output_device: None, else PyTorch's class.
        dim: 0, else PyTorch's class.
        broadcast_buffers: True, else PyTorch's class. Buffers are not sent, as in Bagua.
        process_group: the ranks: a group of Bagua's or of ``torch.distributed``; None: all.
        bucket_cap_mb: the size of buckets is that of BAGUA_DEFAULT_BUCKET_SIZE.
        find_unused_parameters: parameters may get no gradient.
        check_reduction: False, else PyTorch's class.
        gradient_as_bucket_view: gradients are views of buckets.
        optimizers: the optimizers of the module.
        algorithm: the method; None: gradient_allreduce.

    Raises:
        AssertionError: no parameter requires a gradient.
        ValueError: the module lies on several devices; a group of another kind.
    """
    chosen = {
        "device_ids": device_ids,
        "output_device": output_device,
        "dim": dim,
        "broadcast_buffers": broadcast_buffers,
        "check_reduction": check_reduction,
    }
    if tuple(chosen.values()) != (None, None, 0, True, False):
        what = "device_ids, output_device, dim, broadcast_buffers or check_reduction: PyTorch's class takes this module"
        warnings.warn(
            explain(what, value=tuple(chosen.values()), fix="leave them out to train by the algorithm"), stacklevel=2
        )
        return torch.nn.parallel.DistributedDataParallel(
            module,
            process_group=getattr(process_group, "torch_group", process_group),
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **chosen,
        )
    return DistributedDataParallel_V1_9_0(
        module, optimizers, algorithm or GradientAllReduceAlgorithm(), process_group, find_unused_parameters
    )
