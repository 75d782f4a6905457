"""``model.with_bagua``, which any module has once ``bagua.torch_api`` is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .algorithms import Algorithm
from .data_parallel.bagua_distributed import BaguaDistributedDataParallel

_NAME = "_bagua_module_name"


class BaguaModule:
    """The methods and properties that modules get by importing ``bagua.torch_api``.

    After :meth:`with_bagua` a module also has the attribute ``bagua_ddp``, the object that trains it.
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
        if (before := vars(module).get("bagua_ddp")) is not None:
            before.end()
        train_by(module, optimizers, algorithm, process_group, do_flatten, find_unused_parameters=False)
        return module

    @property
    def bagua_module_name(self) -> str:
        """The name of the module: its class and a number, unless it was set."""
        return str(vars(self).get(_NAME) or f"{type(self).__name__}_{id(self)}")

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        vars(self)[_NAME] = name

    @property
    def bagua_algorithm(self) -> Any:
        """The algorithm at work. This and the following properties raise AttributeError before ``with_bagua``."""
        return self.bagua_ddp.bagua_algorithm  # type: ignore[attr-defined]

    @property
    def bagua_optimizers(self) -> Any:
        """The optimizers that ``with_bagua`` got."""
        return self.bagua_ddp.bagua_optimizers  # type: ignore[attr-defined]

    @property
    def bagua_buckets(self) -> Any:
        """The buckets in which the algorithm exchanges."""
        return self.bagua_ddp.bagua_buckets  # type: ignore[attr-defined]


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
    vars(module)["bagua_ddp"] = made
    return made


def add_to_modules() -> None:
    """Give ``torch.nn.Module`` the methods of :class:`BaguaModule`. Repeated calls are harmless."""
    for name, value in vars(BaguaModule).items():
        if not name.startswith("__"):
            setattr(nn.Module, name, value)
