"""The interfaces of other systems, so that scripts written for them run unchanged. No other part of the package imports them.

Their strategies are declared here as data, which the package's ``__init__`` adds to the table of strategies.
"""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from guozhuang.launch.request import Extension


def extension() -> "Extension":
    """Return the variables and folders by which ``guozhuang run`` runs scripts written for other systems unchanged."""
    from guozhuang.compat.horovod.common.extension import EXTENSION

    return EXTENSION


def _horovod(model: nn.Module, optimizer: Optimizer, setup: object) -> tuple[nn.Module, Optimizer]:
    from guozhuang.compat.horovod import strategy

    return strategy.prepare(model, optimizer)


#: For each strategy: the name of the one after which it stands in the table, and its ``guozhuang.strategies.Strategy`` fields.
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
