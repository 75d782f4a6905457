"""The module of ``GradientAllReduceAlgorithm``."""

from .gradients import GradientAllReduceAlgorithm

__all__ = ["GradientAllReduceAlgorithm"]
