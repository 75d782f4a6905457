"""Methods of exchanging gradients or weights between ranks: the interfaces in ``base`` and ``weights``, one file per method."""

from .allreduce import AllReduce
from .base import Done, GradientExchange, Work
from .comm_hook import CommHook

__all__ = ["AllReduce", "CommHook", "Done", "GradientExchange", "Work"]
