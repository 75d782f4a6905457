"""The interfaces of other systems (Horovod, BytePS, Bagua): their scripts run unchanged. ``public`` and ``cli`` import this.

Strategies for such systems are declared here as data, which ``public`` adds to the table of strategies.
"""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from guozhuang.launch.request import Extension


def extension() -> "Extension":
    """Return the environment variables and import folders with which ``guozhuang run`` runs Horovod scripts unchanged."""
    from guozhuang.compat.horovod.common.extension import EXTENSION

    return EXTENSION


def _horovod(model: nn.Module, optimizer: Optimizer, setup: object) -> tuple[nn.Module, Optimizer]:
    from guozhuang.compat.horovod import strategy

    return strategy.prepare(model, optimizer)


def _byteps(model: nn.Module, optimizer: Optimizer, setup: object) -> tuple[nn.Module, Optimizer]:
    from guozhuang.compat.byteps import torch as system
    from guozhuang.compat.horovod import strategy

    return strategy.prepare(model, optimizer, system)


def _bagua_gradient_allreduce(model: nn.Module, optimizer: Optimizer, setup: object) -> tuple[nn.Module, Optimizer]:
    from guozhuang.compat.bagua import strategy

    return strategy.prepare(model, optimizer, "gradient_allreduce")


def _bagua_bytegrad(model: nn.Module, optimizer: Optimizer, setup: object) -> tuple[nn.Module, Optimizer]:
    from guozhuang.compat.bagua import strategy

    return strategy.prepare(model, optimizer, "bytegrad", hierarchical=False)


_BAGUA = "Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB 2021, arXiv:2107.01499"

#: Pairs: the strategy in the table after which to insert this one, and the fields of its ``guozhuang.strategies.Strategy``.
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "torch-ddp",
        {
            "name": "horovod",
            "summary": "a DistributedOptimizer: gradients are matched by name, in whatever order they come",
            "exact": True,
            "trains": True,
            "one_process": False,
            "prepare": _horovod,
            "source": "Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018, "
            "arXiv:1802.05799",
        },
    ),
    (
        "horovod",
        {
            "name": "byteps",
            "summary": "BytePS's DistributedOptimizer: gradients are matched by name, in whatever order they come",
            "exact": True,
            "trains": True,
            "one_process": False,
            "prepare": _byteps,
            "source": "Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU "
            "Clusters, OSDI 2020",
        },
    ),
    (
        "byteps",
        {
            "name": "bagua-gradient-allreduce",
            "summary": "Bagua's with_bagua with gradient_allreduce: the model has no wrapper",
            "exact": True,
            "trains": True,
            "one_process": False,
            "prepare": _bagua_gradient_allreduce,
            "source": _BAGUA,
        },
    ),
    (
        "bagua-gradient-allreduce",
        {
            "name": "bagua-bytegrad",
            "summary": "Bagua's with_bagua with bytegrad: gradients and their mean in 8 bits, also inside a node",
            "exact": False,
            "trains": True,
            "one_process": False,
            "prepare": _bagua_bytegrad,
            "source": _BAGUA,
        },
    ),
)
