from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from guozhuang.lab.measure import difference
from guozhuang.lab.results import Difference


def _difference(tmp_path: Path, one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> Difference:
    torch.save(one, tmp_path / "one")
    torch.save(two, tmp_path / "two")
    return difference(tmp_path / "one", tmp_path / "two")


def test_equal_weights_differ_by_exactly_nothing(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.zeros(2), "c": torch.empty(0)}
    assert _difference(tmp_path, weights, weights) == Difference(0.0, "a", 0.0, 0.0)


def test_the_largest_is_named_and_the_relative_one_is_of_its_own_tensor(tmp_path: Path) -> None:
    one = {"large": torch.tensor([100.0, 1.0]), "small": torch.tensor([0.5])}
    two = {"large": torch.tensor([101.0, 1.0]), "small": torch.tensor([0.6])}
    found = _difference(tmp_path, one, two)
    assert found.largest == 1.0
    assert found.tensor == "large"
    assert found.relative == pytest.approx(0.2)
    assert found.distance == pytest.approx(math.hypot(1, 0.1) / math.hypot(100, 1, 0.5))


def test_low_precision_is_compared_in_double(tmp_path: Path) -> None:
    one, two = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert _difference(tmp_path, {"w": one}, {"w": two}).largest == 0.0078125


def test_a_weight_that_is_not_a_number_is_not_hidden(tmp_path: Path) -> None:
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    two = {"a": torch.tensor([math.nan]), "b": torch.tensor([1.5])}
    found = _difference(tmp_path, one, two)
    assert math.isnan(found.largest)
    assert found.tensor == "a"
    assert math.isnan(found.distance)


def test_a_tensor_of_zeros_that_moved_is_infinitely_far(tmp_path: Path) -> None:
    assert _difference(tmp_path, {"a": torch.zeros(2)}, {"a": torch.tensor([0.0, 1e-9])}).relative == math.inf
