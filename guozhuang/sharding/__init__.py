"""Training with a divided optimizer: each rank updates its part of the weights (stage 1); ``fully_shard`` does stages 2 and 3.

Method: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, arXiv:1910.02054.
"""

from .clip import clip_grad_norm_
from .optimizer import ShardedOptimizer
from .prepared import shard
from .whole import is_dtensor

__all__ = ["ShardedOptimizer", "clip_grad_norm_", "is_dtensor", "shard"]
