"""What scripts know as ``horovod``: the same names at the same paths, on Guozhuang.

``import horovod.torch as hvd`` finds ``guozhuang.compat.horovod.torch``: under ``guozhuang run`` in any case, and everywhere
with the extra ``horovod``. See ``redirect.py`` for how, and docs/horovod.md for what differs.
"""

from __future__ import annotations

from guozhuang.compat.horovod.runner import run as run
from guozhuang.compat.horovod.version import __version__ as __version__


def _check_has_gpu() -> bool:
    """Whether PyTorch has a CUDA (or ROCm) device here."""
    import torch

    return torch.cuda.is_available()
