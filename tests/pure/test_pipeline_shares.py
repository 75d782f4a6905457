"""The loss of a batch, computed by microbatches, is the loss of the batch, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from guozhuang.errors import UsageError
from guozhuang.parallel.pipeline.shares import cut_rows, find_shares, value_of

ROWS, TOKENS, CLASSES = 11, 3, 5
CUTS = [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11)]


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    outputs = torch.randn(ROWS, TOKENS, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=generator)
    labels[torch.rand(ROWS, TOKENS, generator=generator) < 0.4] = -100
    labels[6:9] = -100  # a microbatch in which nothing counts
    return outputs, labels


def _masked(outputs: Tensor, labels: Tensor) -> Tensor:
    each = functional.cross_entropy(outputs.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    mask = (labels >= 0).flatten()
    return (each * mask).sum() / mask.sum().clamp(min=1)


def _tokens(outputs: Tensor, labels: Tensor, **told: Any) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), **told)


MEANS = {
    "ignored labels": _tokens,
    "class weights": lambda o, y: _tokens(o, y, weight=torch.arange(1.0, CLASSES + 1)),
    "label smoothing": lambda o, y: _tokens(o, y, label_smoothing=0.1),
    "masked by hand": _masked,
    "sum": lambda o, y: _tokens(o, y, reduction="sum"),
    "rows": lambda o, y: (o**2).mean() + 0.0 * y.sum(),
    "sum and count": lambda o, y: (_tokens(o, y, reduction="sum"), (y >= 0).sum()),
    "dict": lambda o, y: _tokens(o["logits"], y),
    "module": lambda o, y: nn.CrossEntropyLoss()(o.transpose(1, 2), y),
    "some rows only": lambda o, y: (o[:, 0].square().mean(-1) * (y[:, 0] >= 0)).sum() / (y[:, 0] >= 0).sum(),
}


def _train(loss: Any, outputs: Any, labels: Tensor, tensor: Tensor) -> tuple[float, Tensor]:
    shares = find_shares(loss, cut_rows(outputs, CUTS[0], ROWS, "x"), labels, CUTS, ROWS, twice=True)
    total = 0.0
    for rows, factor in zip(CUTS, shares.factors, strict=True):
        if factor:
            part = value_of(loss(cut_rows(outputs, rows, ROWS, "x"), cut_rows(labels, rows, ROWS, "y")))[0] * factor
            part.backward()
            total += float(part)
    assert tensor.grad is not None
    return total, tensor.grad


@pytest.mark.parametrize("name", MEANS)
def test_microbatches_train_as_the_batch(name: str) -> None:
    loss, (outputs, labels) = MEANS[name], _batch()
    whole, cut = outputs.clone().requires_grad_(), outputs.clone().requires_grad_()
    given = {"logits": whole} if name == "dict" else whole
    value, count = value_of(loss(given, labels))
    value = value if count is None else value / count
    value.backward()
    state = torch.get_rng_state()
    total, gradient = _train(loss, {"logits": cut} if name == "dict" else cut, labels, cut)
    assert torch.equal(state, torch.get_rng_state())
    assert total == pytest.approx(float(value), rel=1e-6)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-6, atol=1e-9)


COUPLED = {
    "contrastive": lambda o, y: functional.cross_entropy(o[:, 0] @ o[:, 1].T, torch.arange(len(o))),
    "root of a mean": lambda o, y: (o * (1 + y.clamp(min=0)).unsqueeze(-1)).square().mean().sqrt(),
    "largest": lambda o, y: o.square().mean((1, 2)).max(),
    "by confidence": lambda o, y: (o.mean((1, 2)) * (w := o.detach().exp().sum((1, 2)))).sum() / w.sum(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_samples_are_refused(name: str) -> None:
    outputs, labels = _batch()
    with pytest.raises(UsageError, match="use the schedule gpipe"):
        find_shares(COUPLED[name], outputs[:3].clone().requires_grad_(), labels, CUTS, ROWS, twice=True)


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(UsageError, match=r"a tensor of the targets has the shape \(12,\), and the batch 11 rows"):
        find_shares(MEANS["rows"], torch.zeros(3, 2, requires_grad=True), torch.zeros(12), CUTS, ROWS)
    with pytest.raises(UsageError, match="a tensor of one element, or a sum and a count"):
        value_of(torch.zeros(3))
    with pytest.raises(UsageError, match="does not depend on tensors of the model's output"):
        find_shares(lambda o, y: y.float().mean(), torch.zeros(3, 2, requires_grad=True), torch.ones(11), CUTS, ROWS)


def test_known_losses_are_not_asked() -> None:
    labels = _batch()[1][:, 0]
    asked = find_shares(
        lambda o, y: functional.cross_entropy(o, y), torch.randn(3, 5, requires_grad=True), labels, CUTS, ROWS
    )
    for loss in (functional.cross_entropy, nn.CrossEntropyLoss()):
        assert find_shares(loss, None, labels, CUTS, ROWS).factors == pytest.approx(asked.factors, rel=1e-6)
    assert find_shares(nn.MSELoss(), None, labels, CUTS, ROWS).factors == pytest.approx(
        [3 / 11, 3 / 11, 3 / 11, 2 / 11]
    )
