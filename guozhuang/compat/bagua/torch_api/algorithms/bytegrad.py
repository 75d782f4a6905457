"""The module of ``ByteGradAlgorithm``."""

from .gradients import ByteGradAlgorithm

__all__ = ["ByteGradAlgorithm"]
