"""``model.with_bagua``, which any module has once ``bagua.torch_api`` is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .algorithms import Algorithm
from .bucket import BaguaBucket
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
        train_by(module, optimizers, algorithm, process_group, do_flatten, find_unused_parameters=False)
        return module


def train_by(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    algorithm: Algorithm,
    process_group: Any,
    do_flatten: bool,
    find_unused_parameters: bool,
) -> BaguaDistributedDataParallel:
    """Let an algorithm train a module from now on; ``bagua_ddp`` is the object that does so. Every rank must call it."""
    made = BaguaDistributedDataParallel(
        module, optimizers, algorithm, process_group, do_flatten, find_unused_parameters
    )
    held = vars(module)
    held.update(bagua_ddp=made, bagua_algorithm=made.bagua_algorithm, bagua_buckets=_Buckets(made))
    held["bagua_optimizers"] = _Optimizers(made.bagua_optimizers)
    held.setdefault("bagua_module_name", f"{type(module).__name__}_{id(module)}")
    return made


class _Optimizers(list[Optimizer]):
    """The optimizers of a module, which a copy of it does not have."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


class _Buckets(Sequence[BaguaBucket]):
    """The buckets of a module as they are now; the engine may change them."""

    def __init__(self, trained_by: BaguaDistributedDataParallel) -> None:
        self._trained_by = trained_by

    def __getitem__(self, place: Any) -> Any:
        return self._trained_by.bagua_buckets[place]

    def __len__(self) -> int:
        return len(self._trained_by.bagua_buckets)

    def __reduce__(self) -> Any:
        return type(None), ()


def add_to_modules() -> None:
    """Give ``torch.nn.Module`` the method of :class:`BaguaModule`. Repeated calls are harmless."""
    nn.Module.with_bagua = BaguaModule.with_bagua  # type: ignore[attr-defined]
