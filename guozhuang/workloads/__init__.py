"""The trained models and data: text classification with BERT, random tokens, or a user's own by ``module:function``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guozhuang.workloads.base import Workload
    from guozhuang.workloads.named import WORKLOADS, load, options_from, origin, title

__all__ = ["WORKLOADS", "Workload", "load", "options_from", "origin", "title"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported at the first use, because these import torch and ``arguments`` is to be had without
        from guozhuang.workloads import base, named

        return getattr(base if name == "Workload" else named, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
