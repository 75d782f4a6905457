"""The counts of ``gz.accumulate``, and attributes that a wrapper hides; its sums are in tests/processes/test_one_script.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.strategies import apply
from guozhuang.world import World


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.optim.Optimizer]:
    monkeypatch.setattr(apply, "current", lambda: World(0, 1, 0, 1, 0, 1, torch.device("cpu"), "alone"))
    model = nn.Linear(3, 1)
    return gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="single")


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4"])
def test_steps_is_a_count(steps: Any) -> None:
    with pytest.raises(UsageError, match="`steps` is the number of micro-batches"):
        gz.accumulate(nn.Linear(1, 1), steps=steps)


def test_a_loop_that_is_left_early_cannot_step(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = pair
    for micro in gz.accumulate(model, 3):
        backward(model)
        if micro == 1:
            break
    with pytest.raises(UsageError, match="after micro-batch 2 of 3"):
        optimizer.step()
    assert list(gz.accumulate(model, 3)) == [0, 1, 2]
    optimizer.step()


def test_after_an_exception_a_step_begins_anew_without_gradients(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = pair
    optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(MemoryError), gz.accumulate(model, 4):
            backward(model)
            raise MemoryError
        with pytest.raises(UsageError, match=r"a new step begins after micro-batch 1 of 4.*zero_grad\(\) first"):
            list(gz.accumulate(model, 4))
        optimizer.zero_grad()
        assert list(gz.accumulate(model, 4)) == [0, 1, 2, 3]
    optimizer.step()


def test_a_plain_module_and_other_numbers_of_steps(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    plain = nn.Linear(1, 1)
    assert list(gz.accumulate(plain, 2)) == [0, 1] and list(gz.accumulate(plain, 1)) == [0]
    with gz.accumulate(pair[0], 1) as is_last:
        assert is_last
    with gz.accumulate(pair[0], 2) as is_last:
        assert not is_last
    with pytest.raises(UsageError, match="micro-batch 2 of 2 came with another number"):
        gz.accumulate(pair[0], 3)


class Wide(nn.Linear):
    dim, device_ids = 512, ()


def test_hidden_attributes_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(apply, "current", lambda: World(0, 1, 0, 1, 0, 1, torch.device("cpu"), "alone"))
    model = Wide(3, 1)
    with caplog.at_level(logging.WARNING, "guozhuang"):
        found, _ = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="dp")
    assert (
        "hide your model's (got ['device_ids', 'dim']). Fix: reach yours by gz.unwrap(model).device_ids" in caplog.text
    )
    assert gz.unwrap(found).dim == 512
    caplog.clear()
    quiet = nn.Linear(3, 1)
    gz.prepare(quiet, torch.optim.SGD(quiet.parameters(), lr=0.1), strategy="dp")
    assert "hide" not in caplog.text


def test_a_weight_is_the_number_of_tokens_that_losses_are_made_of(
    pair: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = pair

    def steps(counts: list[int], weight: float | torch.Tensor) -> None:
        for micro in gz.accumulate(model, len(counts), weight=weight):
            gz.global_mean(model(torch.ones(counts[micro], 3)).sum(), counts[micro]).backward()

    for counts in ([2, 6], [8]):  # a sum of 8 equal terms, of which each micro-batch has some
        steps(counts, torch.tensor(8))
        assert model.weight.grad.tolist() == [[1.0, 1.0, 1.0]]
        optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"`weight` is 9 tokens, and gz\.global_mean was given 8"):
        steps([2, 6], 9)
    with pytest.raises(UsageError, match=r"gz\.global_mean was given 0"):
        for _ in gz.accumulate(model, 2, weight=4):
            backward(model)
    with pytest.raises(UsageError, match=r"micro-batch.*weight=num_tokens"):
        for _ in gz.accumulate(model, 2):
            gz.global_mean(model(torch.ones(2, 3)).sum(), 2)
    optimizer.zero_grad()
    gz.global_mean(model(torch.ones(2, 3)).sum(), 2).backward()  # the window of the step that broke off is gone
    assert model.weight.grad.tolist() == [[1.0, 1.0, 1.0]]


def test_a_weight_that_changes_within_a_step_is_refused(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, _ = pair
    with gz.accumulate(model, 2, weight=3):
        gz.global_mean(model(torch.ones(1, 3)).sum(), 1).backward()
    with pytest.raises(UsageError, match="micro-batch 2 of 2 came with another `weight`"):
        gz.accumulate(model, 2, weight=4)


@pytest.mark.parametrize(
    ("loss", "count", "text"),
    [
        (torch.ones(2), 1, "a tensor of one element"),
        (1.0, 1, "a tensor of one element"),
        (torch.ones(()), -1, "at least 0"),
        (torch.ones(()), float("nan"), "at least 0"),
        (torch.ones(()), 0, "no rank has a token"),
    ],
)
def test_a_mean_of_what_is_no_sum_or_no_count_is_refused(loss: Any, count: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        gz.global_mean(loss, count)


def test_one_process_has_all_rows() -> None:
    rows = torch.ones(2, 3)
    assert gz.all_gather(rows) is rows
    with pytest.raises(UsageError, match="a tensor of rows"):
        gz.all_gather(torch.ones(()))
