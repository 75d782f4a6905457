"""``SyncBatchNorm`` and its ``convert_sync_batchnorm``: Guozhuang's, also on CPUs. Make or convert before ``with_bagua``."""

from guozhuang import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
