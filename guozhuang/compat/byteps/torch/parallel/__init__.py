"""``byteps.torch.parallel``: a module whose gradients are averaged by the time that backward returns."""

from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
