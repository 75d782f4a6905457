"""``strategy="bagua-bytegrad"``: makes the calls that such a script makes between making its optimizer and training."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from .torch_api import communication
from .torch_api.algorithms import Algorithm


def prepare(model: nn.Module, optimizer: Optimizer, algorithm: str, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Prepare a plain model and its optimizer for training with Bagua. Every rank must call this, after ``guozhuang.init()``.

    Args:
        model: what is trained.
        optimizer: its optimizer.
        algorithm: the name of the algorithm in Bagua's registry.
        **options: the options of the algorithm.

    Returns:
        The same model and optimizer: Bagua trains a model without a wrapper.
    """
    if not communication.is_initialized():
        communication.init_process_group()
    model.with_bagua([optimizer], Algorithm.init(algorithm, **options))  # type: ignore[operator]
    return model, optimizer
