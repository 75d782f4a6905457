"""``DistributedDataParallel``: every rank holds the model, gradients are made equal while backward runs."""

from .module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
