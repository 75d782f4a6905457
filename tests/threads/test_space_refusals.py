"""Images divided over ranks: what looks elementwise and is not, changes that would be lost, and inputs that are no images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.sync_batch_norm import normalize
from tests.threads.ranks import GENERATOR, run_threads
from tests.threads.test_parallel_space import (
    Operation,
    average_gradients,
    close,
    divided,
    equals_one_process,
    refuses_each,
)


def two_functions_of_one_name(x: Any) -> Any:
    """torch.batch_norm takes its arguments in another order than torch.nn.functional.batch_norm."""
    mean, variance = torch.linspace(0, 1, 4).to(x), torch.linspace(1, 2, 4).type_as(x)
    return torch.batch_norm(x, variance, mean, mean, variance, False, 0.1, 1e-5, False) + x


def answers_for_all(x: Any) -> Any:
    other = torch.where(torch.arange(13)[:, None] == 12, x.detach() + 1, x.detach())
    same = torch.equal(x, other), torch.equal(x, x.detach().clone())
    num_positive = torch.where(x > 0)[0].numel()
    return x * (2.0 if same == (False, True) else 3.0) * num_positive * x.new_full((2, 1, 1, 1), 0.5)


def changed_in_a_view(x: Any) -> Any:
    x = F.conv_transpose2d(x, torch.ones(4, 4, 3, 3).to(x), padding=1)
    x.flatten(2).mul_(2.0)
    resized = F.interpolate(x, scale_factor=2, mode="bilinear")
    resized.flatten(2).mul_(2.0)
    turned = x.roll(1, 2)
    turned.flatten(2).mul_(2.0)
    return x + resized[:, :, ::2, ::2] + turned


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "copies that change": lambda x: torch.cat([x]).mul_(2.0) + F.interpolate(x, size=(13, 9)).mul_(3.0) + x,
    "views that change": changed_in_a_view,
    "counts": lambda x: x * x.relu().count_nonzero(1, 2)[:, None, None],
    "a table of pixels": lambda x: x + F.embedding(torch.tensor([0, 2, 1]), x.mean(0).flatten(1).mT).sum(),
    "renorm": lambda x: x.renorm(2, 1, 1.0),
    "two functions of one name": two_functions_of_one_name,
    "answers for all elements": answers_for_all,
}


def test_operations_that_are_not_elementwise() -> None:
    cases = []
    for name, operation in OPERATIONS.items():
        with GENERATOR:
            torch.manual_seed(0)
            model = Operation(operation, 2).double()
            cases.append((name, torch.randn(2, 3, 13, 9, dtype=torch.float64), model))
    run_threads(equals_one_process, 3, cases)


def change_rows(x: Any, rows: Any) -> Any:
    x[:, :, rows].mul_(3.0)
    return x * 1.0


def change_features(x: Any) -> Any:
    x.flatten(1)[:, 2:].mul_(3.0)
    return x * 1.0


def change_after(x: Any, rows: Any) -> Any:
    picked = x[:, :, rows]
    x += 1.0
    return picked * 1.0


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows in place": (
        lambda x: change_rows(x, slice(1, 5)),
        "in place of rows picked from an activation would be lost",
    ),
    "one row in place": (lambda x: change_rows(x, 3), "in place what it picked from an activation"),
    "a view of the whole in place": (change_features, "in place what it picked from an activation"),
    "in place behind a view": (lambda x: change_after(x, 3), "of which the model has picked a view before"),
    "in place behind rows": (lambda x: change_after(x, slice(1, 5)), "of which the model has picked a view before"),
    "strides in memory": (lambda x: x.as_strided((2, 2), (1, 2)), "as_strided of an activation.*lie on several ranks"),
    "gradient": (lambda x: torch.autograd.grad(x.sum(), x)[0], "grad of an activation.*taken for the whole one"),
    "checkpoint": (lambda x: checkpoint(torch.relu, x, use_reentrant=True), "with use_reentrant=False"),
}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)

    def forward(self, image: Any) -> Any:
        return self.first(image.masked_fill_(image > 0, 0.0))


def refuses(rank: int, size: int) -> None:
    image = refuses_each(size, REFUSED.values())
    with pytest.raises(UsageError, match=r"none of the model's inputs is an image.*\(1, 3, 8, 4\) of uint8.*convert"):
        divided(nn.Conv2d(3, 3, 1), size)(image.to(torch.uint8))
    with torch.inference_mode():  # what the forward makes has no versions, its input has
        divided(Operation(lambda x: x.masked_fill_(image.new_ones(1) > 0, 0.0), 2), size)(image)
        masked = Masked()
        with pytest.raises(UsageError, match=r"the model's input, of which"):
            divided(masked, size)(image)
    with pytest.raises(UsageError, match=r"the model's input, of which each rank has its rows, would be lost"):
        divided(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)), size)(image)


@pytest.mark.slow
def test_changes_that_would_be_lost_are_refused() -> None:
    run_threads(refuses, 2)


class Conditioned(nn.Module):
    """A vector and a map with fewer rows than ranks stay whole; a convolution along channels is no convolution of images."""

    def __init__(self) -> None:
        super().__init__()
        self.along_channels, self.first, self.scale = nn.Conv1d(1, 1, 3, padding=1), nn.Conv2d(3, 4, 3), nn.Linear(5, 4)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, image: Any, vector: Tensor, place: Tensor) -> Any:
        x = self.norm(self.first(image)) * self.scale(vector)[:, :, None, None] + place
        weights = self.along_channels(x.mean((2, 3)).unsqueeze(1)).transpose(1, 2).unsqueeze(-1)
        large = (x.detach() * 0 + 900.0).half()  # whose sum is too large for 16 bits
        return x * weights + large.mean((2, 3), keepdim=True).float() * 1e-4


def is_conditioned(rank: int, size: int, model: nn.Module, inputs: list[Tensor]) -> None:
    one, mine = copy.deepcopy(model), copy.deepcopy(model)
    found, expected = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    one(*expected).square().sum().backward()
    divided(mine, size)(*found).square().sum().backward()
    average_gradients(mine)
    for name, a, b in zip(("image", "vector", "map"), found, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        close(f"gradient of the {name}", a.grad, b.grad, 1e-4)
    for (name, a), b in zip(mine.named_parameters(), one.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        close(f"gradient of {name}", a.grad, b.grad, 1e-4)
    normed = Operation(nn.LayerNorm((4, 13, 9)), 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert divided(normed, size)(inputs[0][..., :13, :9]).dtype == torch.bfloat16
    nothing = [each[:0] for each in inputs]
    assert divided(mine, size)(*nothing).shape == one(*nothing).shape


def test_inputs_that_are_no_images_and_empty_batches() -> None:
    with GENERATOR:
        torch.manual_seed(0)
        inputs, model = [torch.randn(2, 3, 40, 30), torch.randn(2, 5), torch.randn(2, 4, 1, 1)], Conditioned()
    run_threads(is_conditioned, 3, model, inputs)


def test_gradients_of_normalization_where_the_mean_is_large() -> None:
    with GENERATOR:
        torch.manual_seed(0)
        noise, more = torch.randn(2, 8, 4, 16, 16)
    weight, bias, gradient = torch.ones(4), torch.zeros(4), noise + more
    found, torchs, exact = ((noise + 1e3).to(t).requires_grad_() for t in (torch.float32, torch.float32, torch.float64))
    exact.data.copy_(found.detach())
    normalize(found, weight, bias, 1e-5, (lambda mine: mine.unsqueeze(0), lambda sums: sums))[0].backward(gradient)
    for x in (torchs, exact):
        nn.functional.batch_norm(x, None, None, weight.to(x), bias.to(x), True).backward(gradient.to(x))
    assert found.grad is not None and torchs.grad is not None and exact.grad is not None
    assert (found.grad - exact.grad).abs().max() <= 2 * (torchs.grad - exact.grad).abs().max()
