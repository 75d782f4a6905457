"""Helpers of Bagua beside the algorithms: fused optimizers, samplers, and datasets that are cached."""

from .cache_loader import CacheLoader
from .cached_dataset import CachedDataset
from .fuse.optimizer import fuse_optimizer
from .load_balancing_data_loader import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "fuse_optimizer",
]
