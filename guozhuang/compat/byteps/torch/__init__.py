"""BytePS's interface for PyTorch: ``import byteps.torch as bps``.

Each process drives one device and calls ``bps.init()``; ``bps.DistributedOptimizer`` averages gradients. Tensors are matched
between ranks by name, see ``guozhuang.gradients.named``.
"""

from .compression import Compression
from .functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .ops import byteps_push_pull, declare, poll, push_pull, synchronize
from .optimizer import DistributedOptimizer
from .optimizer import _DistributedOptimizer as _DistributedOptimizer
from .session import init, local_rank, local_size, rank, resume, shutdown, size, suspend

__all__ = [
    "Compression", "DistributedOptimizer", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "byteps_push_pull", "declare", "init", "local_rank", "local_size", "poll", "push_pull", "rank", "resume",
    "shutdown", "size", "suspend", "synchronize",
]  # fmt: skip
