"""The compressors of ``byteps.torch.compression``: those of the layer for Horovod, which have the same interface."""

from guozhuang.compat.horovod.torch.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
