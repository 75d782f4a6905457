"""The module of ``LowPrecisionDecentralizedAlgorithm``."""

from .decentralized import LowPrecisionDecentralizedAlgorithm

__all__ = ["LowPrecisionDecentralizedAlgorithm"]
