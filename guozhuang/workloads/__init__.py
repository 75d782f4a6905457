"""The trained models and data: text classification with BERT, random tokens, or a user's own by ``module:function``."""

from guozhuang.workloads.base import Workload
from guozhuang.workloads.named import WORKLOADS, add_arguments, load, options_from

__all__ = ["WORKLOADS", "Workload", "add_arguments", "load", "options_from"]
