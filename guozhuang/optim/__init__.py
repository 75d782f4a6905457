"""Optimizers that take part in the exchange between ranks; each is a ``torch.optim.Optimizer``."""

from .qadam import QAdam

__all__ = ["QAdam"]
