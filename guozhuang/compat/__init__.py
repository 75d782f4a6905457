"""The interfaces of other systems, so that scripts written for them run unchanged. Leaves: nothing in the package uses them.

Their strategies stand here as data, which the package's ``__init__`` hands to the table of strategies.
"""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from guozhuang.launch.request import Extension


def extension() -> "Extension":
    """What every run gets so that scripts written for other systems run under ``guozhuang run`` as they are."""
    from guozhuang.compat.horovod.common.extension import EXTENSION

    return EXTENSION


def _horovod(model: nn.Module, optimizer: Optimizer, setup: object) -> tuple[nn.Module, Optimizer]:
    from guozhuang.compat.horovod import strategy

    return strategy.prepare(model, optimizer)


#: Name of the neighbour before it in the table, and the fields of ``guozhuang.strategies.Strategy``.
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
)
