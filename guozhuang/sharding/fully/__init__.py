"""The strategies sharded-gradients and sharded-weights: PyTorch's ``fully_shard`` with all that scripts rely on around it."""

from .shard import repeated_blocks, shard_fully

__all__ = ["repeated_blocks", "shard_fully"]
