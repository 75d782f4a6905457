"""``model.with_bagua``, which any module has once ``bagua.torch_api`` is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .algorithms import Algorithm
from .data_parallel.bagua_distributed import BaguaDistributedDataParallel


class BaguaModule:
    """The method that modules get by importing ``bagua.torch_api``.

    After :meth:`with_bagua` a module also has the attributes ``bagua_ddp``, the object that trains it, ``bagua_algorithm``,
    ``bagua_optimizers``, ``bagua_buckets``, and ``bagua_module_name`` (its class and a number, unless it was set before).
    They are no properties of all modules, because ``torch.compile`` and ``torch.jit.script`` read all of a class. In a copy
    of the module those that train it are None.
    """

    def with_bagua(
        self,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        process_group: Any = None,
        do_flatten: bool = True,
    ) -> Any:
        """Train this module on all ranks by an algorithm, and return it: the same object, with the same keys. Collective.

        Called again, it goes on with another algorithm; rank 0's weights and optimizers are sent to all ranks again.

        Args:
            optimizers: all optimizers that step its parameters, in a list. Their ``step`` is hooked into.
            algorithm: one object may serve several models.
            process_group: the ranks: a group of Bagua's or of ``torch.distributed``; None: all.
            do_flatten: True for the algorithm async; else without effect, since gradients are always views of buckets.

        Raises:
            RuntimeError: ``init_process_group`` was not called; no parameter requires a gradient.
            NotImplementedError: a part of the module has sparse gradients.
            ValueError: an optimizer is LBFGS, or something is no optimizer, algorithm or group.
            MismatchError: ranks hold different models.
        """
        module: Any = self
        BaguaDistributedDataParallel(module, optimizers, algorithm, process_group, do_flatten)
        return module


def add_to_modules() -> None:
    """Give ``torch.nn.Module`` the method of :class:`BaguaModule`. Repeated calls are harmless."""
    nn.Module.with_bagua = BaguaModule.with_bagua  # type: ignore[attr-defined]
