"""Horovod's Python interface, carried out by Guozhuang: functions have the names and module paths that they have in Horovod.

``import horovod.torch as hvd`` finds ``guozhuang.compat.horovod.torch``: always under ``guozhuang run``, and everywhere if the
extra ``horovod`` is installed. ``compat/redirect.py`` shows how; docs/horovod.md lists the differences.
"""

from __future__ import annotations

from guozhuang.compat.horovod.runner import run as run
from guozhuang.compat.horovod.version import __version__ as __version__


def _check_has_gpu() -> bool:
    """Return whether PyTorch has a CUDA (or ROCm) device on this machine."""
    import torch

    return torch.cuda.is_available()
