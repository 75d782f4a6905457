"""``SyncBatchNorm`` and its ``convert_sync_batchnorm``: Guozhuang's, also on CPUs. Make or convert before ``with_bagua``."""

from guozhuang.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
