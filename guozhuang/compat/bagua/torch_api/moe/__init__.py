"""Mixture of experts: ``MoE``, and ``is_moe_param``."""

from .layer import MoE, is_moe_param

__all__ = ["MoE", "is_moe_param"]
