"""Data-parallel training of Bagua: ``DistributedDataParallel`` and what stands behind ``with_bagua``."""

from . import functional
from .distributed import make_data_parallel as DistributedDataParallel

__all__ = ["DistributedDataParallel", "functional"]
