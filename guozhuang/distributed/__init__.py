"""``DistributedDataParallel``: every rank holds the whole model; gradients are averaged while backward runs."""

from .module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
