"""How far two sets of weights are apart."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from guozhuang.lab.results import Difference


def difference(reference: Path, other: Path) -> Difference:
    """Compare two files of ``torch.save({name: tensor})``.

    Args:
        reference: the weights to compare with.
        other: weights of the same names and shapes.
    """
    expected = torch.load(reference, weights_only=True)
    found = torch.load(other, weights_only=True)
    assert expected.keys() == found.keys(), "both runs trained the same model"
    largest, tensor, relative, squares, norm_squares = 0.0, "", 0.0, 0.0, 0.0
    for name, weight in expected.items():
        wide = torch.complex128 if weight.is_complex() else torch.float64
        weight = weight.to(wide)
        apart = (found[name].to(wide) - weight).abs()
        if apart.numel() == 0:
            continue
        here = _number(apart.max())
        if not tensor or not here <= largest:  # "not <=" also lets a NaN through, and it then stays
            largest, tensor = (here, name) if not math.isnan(largest) else (largest, tensor)
        scale = _number(weight.abs().max())
        relative = max(relative, here / scale if scale > 0 else (0.0 if here == 0 else math.inf))
        squares += _number((apart**2).sum())
        norm_squares += _number((weight.abs() ** 2).sum())
    distance = math.sqrt(squares / norm_squares) if norm_squares > 0 else (0.0 if squares == 0 else math.inf)
    return Difference(largest, tensor, relative, distance)


def _number(value: torch.Tensor) -> float:
    return float(value.item())
