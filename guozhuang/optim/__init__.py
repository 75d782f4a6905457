"""Optimizers that know of the other ranks; each is a ``torch.optim.Optimizer``."""

from .qadam import QAdam

__all__ = ["QAdam"]
