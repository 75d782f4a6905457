"""The name by which scripts import ``bagua.torch_api.moe``."""

from guozhuang.compat.bagua.torch_api.moe import MoE, is_moe_param

__all__ = ["MoE", "is_moe_param"]
