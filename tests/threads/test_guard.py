"""Divided parameters as the script sees them: what works element by element works, anything else is refused by name."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.parallel.guard import GuardedParameter, full_tensor
from guozhuang.strategies import get
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.ways import Setup
from guozhuang.world.layout import Layout
from tests.threads.ranks import run_threads

LAYOUTS = [Layout(pp=2), Layout(tp=2)]
REFUSED = {
    "norm": lambda p: p.norm(),
    "torch.norm": torch.norm,
    "sum of squares": lambda p: (p.grad**2).sum(),
    "mean of the absolute": lambda p: p.abs().mean(),
    "an element": lambda p: p[0],
    "a product": lambda p: p @ p.T,
    "a number": lambda p: float(p.grad.max()),
    "with a whole tensor": lambda p: p.data.add_(torch.ones(32, 6)),
    "a random tensor": torch.randn_like,
    "into a vector": lambda p: nn.utils.parameters_to_vector([p]),
    "numpy": lambda p: p.detach().numpy(),
    "a list": lambda p: p.tolist(),
    "saved": lambda p: torch.save(p, io.BytesIO()),
    "copied": copy.deepcopy,
    "is there a NaN": lambda p: bool(torch.isnan(p.grad).any()),
    "norms of many": lambda p: torch._foreach_norm([p]),
    "stacked": lambda p: torch.stack([p, p]),
}
CARRIED_OUT = {
    "scaled": lambda p: p.data.mul_(0.5),
    "decayed": lambda p: p.grad.add_(p, alpha=0.1),
    "clamped": lambda p: p.grad.clamp_(-0.01, 0.01),
    "signs": lambda p: p.grad.sign_(),
    "NaN replaced": lambda p: p.grad.nan_to_num_(),
    "an average of its own": lambda p: p.data.lerp_(torch.zeros_like(p), 0.1),
    "many at once": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "frozen": lambda p: p.requires_grad_(False),
    "no gradient": lambda p: setattr(p, "grad", None),
}


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6), nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))


def prepared(layout, model):
    """Return a model and its optimizer after a backward."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wishes = {"num_microbatches": 2} if layout.pp > 1 else {}
    setup = Setup(SimpleNamespace(layout=layout), wishes=wishes)
    plain = model
    model, optimizer = prepare_divided(model, optimizer, setup, get("hybrid"))
    assert gz.unwrap(model) is plain
    model(torch.ones(4, 6)).pow(2).mean().backward()
    return model, optimizer


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_would_be_computed_from_a_part_is_refused(layout):
    one = model_of()  # here, because ranks that are threads have one generator

    def rank_of(rank, size):
        model, _ = prepared(layout, one)
        answers = {}
        for name, ask in REFUSED.items():
            for parameter in (p for p in model.parameters() if p.dim() > 1 or not p.numel()):
                if isinstance(parameter, GuardedParameter) and (parameter.grad is not None or "grad" not in name):
                    try:
                        answer = repr(ask(parameter))
                        answers.setdefault(name, []).append(answer)
                    except UsageError as error:
                        assert "is divided among ranks" in str(error) and "gz.full_tensor(p)" in str(error)
                    except (AttributeError, TypeError):
                        assert parameter.grad is None  # on a stage that has none
        return answers

    assert run_threads(rank_of, 2) == [{}, {}]


@pytest.mark.parametrize("habit", CARRIED_OUT)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_works_element_by_element_is_that_of_one_process(layout, habit):
    one = model_of()
    start = copy.deepcopy(one)
    one(torch.ones(4, 6)).pow(2).mean().backward()
    steps = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
    with torch.no_grad():
        for p in one.parameters():
            CARRIED_OUT[habit](p)
    steps.step()

    def rank_of(rank, size):
        model, optimizer = prepared(layout, start)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None or "data" not in habit:
                    try:
                        CARRIED_OUT[habit](p)
                    except (AttributeError, TypeError):
                        assert p.grad is None
        optimizer.step()
        return model.state_dict()

    for found in run_threads(rank_of, 2):
        torch.testing.assert_close(found, dict(one.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_full_tensors_are_those_of_one_process(layout):
    one = model_of()
    start = copy.deepcopy(one)
    one(torch.ones(4, 6)).pow(2).mean().backward()

    def rank_of(rank, size):
        model, _ = prepared(layout, start)
        values = {name: full_tensor(p) for name, p in model.named_parameters()}
        squares = {name: full_tensor(p * p) for name, p in model.named_parameters()}
        assert all(
            type(value) is torch.Tensor and not value.requires_grad for value in (*values.values(), *squares.values())
        )
        return values, squares

    for values, squares in run_threads(rank_of, 2):
        for name, p in one.named_parameters():
            torch.testing.assert_close(values[name], p.detach())
            torch.testing.assert_close(squares[name], p.detach() ** 2)
    with pytest.raises(UsageError, match="full_tensor takes a parameter"):
        full_tensor(None)  # type: ignore[arg-type]


def test_a_model_that_is_not_divided_is_left_alone():
    model = model_of()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    torch.testing.assert_close(full_tensor(model[0].weight), model[0].weight.detach())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layer_replaced_after_prepare_is_refused(layout):
    start = model_of()

    def run(rank, size):
        model, _ = prepared(layout, start)
        model.module[3] = nn.Linear(6, 32)
        with pytest.raises(UsageError, match=r"added to the model after it was prepared.*3\.weight"):
            model(torch.ones(4, 6))

    run_threads(run, 2)
