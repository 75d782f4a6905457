"""Helpers of Bagua beside the algorithms: fused optimizers and samplers."""

from .fuse.optimizer import fuse_optimizer
from .load_balancing_data_loader import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler", "fuse_optimizer"]
