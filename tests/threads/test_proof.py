"""Habits that are right in one process: under a divided model they are right too, or refused before the first step.

A row is a small program: a model, what the script does with it, and what becomes of it. Each program runs on the plain model,
and with two ranks that are threads on the divided one.
"""

from __future__ import annotations

import copy
import os
import random
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from guozhuang.errors import UsageError
from guozhuang.parallel.guard import full_tensor
from guozhuang.parallel.proof import compare, first_batch, noise, reference
from guozhuang.strategies import get
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.ways import Setup
from guozhuang.world.layout import Layout
from tests.threads.ranks import run_threads

STEPS = 3


class Block(nn.Module):
    """A residual block; ``inside`` is what it does with what its layers give."""

    def __init__(self, inside=None, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.inside, self.state = inside, None

    def forward(self, x):
        hidden = self.down(torch.relu(self.up(self.norm(x))))
        return x + (hidden if self.inside is None else self.inside(self, hidden))


class Net(nn.Module):
    """Blocks between two layers; ``between`` is what the model itself does after each block."""

    def __init__(self, inside=None, between=None):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([Block(inside) for _ in range(4)])
        self.between, self.calls = between, 0

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x = x if self.between is None else self.between(self, x)
        return self.head(x)


class Found:
    """What a model returns that has a class for it."""

    def __init__(self, logits):
        self.logits = logits


class Classified(Net):
    def forward(self, x):
        return Found(super().forward(x))


class Listed(Net):
    """Its blocks are given, and return, a list of tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([OfList() for _ in range(4)])

    def forward(self, x):
        found = [self.embed(x), x]
        for block in self.blocks:
            found = block(found)
        return self.head(found[0])


class OfList(Block):
    def forward(self, found):
        return [super().forward(found[0]), found[1]]


class Bypassed(nn.Module):
    """Its parent calls the layers of a Sequential itself, with a norm over features between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        x = F.layer_norm(self.layers[1](self.layers[0](x)), (self.layers[0].out_features,))
        return self.layers[2](x)


def batch_norm(block, x):
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def functional_norm(block, x):
    return F.batch_norm(x, None, None, training=True)


def rows_attend(block, x):
    return (x @ x.T / 4).softmax(-1) @ x


def keeps_a_loss(block, x):
    block.state = x.pow(2).mean()
    return x


def carries_state(block, x):
    block.state = x.detach() if block.state is None else 0.5 * (block.state + x.detach())
    return x + 0.1 * block.state


def largest_in_evaluation(block, x):
    return x if block.training else x * (x >= x.topk(8, -1)[0][..., -1:])


def counts(net, x):
    net.calls += 1
    return x * (1 + 0.01 * net.calls)


MODELS = {
    "plain": Net,
    "statistics by hand": lambda: Net(batch_norm),
    "F.batch_norm": lambda: Net(functional_norm),
    "an own class": Classified,
    "statistics and an own class": lambda: Classified(batch_norm),
    "rows attend to each other": lambda: Net(rows_attend),
    "F.dropout in a block": lambda: Net(lambda block, x: F.dropout(x, 0.2, block.training)),
    "noise in a block": lambda: Net(lambda block, x: x + 0.1 * torch.randn_like(x)),
    "noise between blocks": lambda: Net(between=lambda net, x: x + 0.1 * torch.randn_like(x)),
    "Python's random in a block": lambda: Net(lambda block, x: x * (1 + random.random())),
    "numpy's random in a block": lambda: Net(lambda block, x: x * (1 + numpy.random.rand())),
    "a loss in an attribute": lambda: Net(keeps_a_loss),
    "a state in an attribute": lambda: Net(carries_state),
    "a counter": lambda: Net(between=counts),
    "other ways in evaluation": lambda: Net(lambda block, x: x * 2 if not block.training else x),
    "the largest in evaluation": lambda: Net(largest_in_evaluation),
    "statistics in evaluation": lambda: Net(lambda block, x: x if block.training else batch_norm(block, x)),
    "layers called by their parent": Bypassed,
    "a list of tensors": Listed,
    "BatchNorm1d": lambda: nn.Sequential(
        *[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(4)]
    ),
    "one sequence, no batch": lambda: Net(lambda block, x: x.cumsum(0)),
}


def loss_of(model, x, y):
    found = model(x)
    return F.cross_entropy(found.logits if isinstance(found, Found) else found, y)


def usual(model, optimizer, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    return loss


def norms_in_the_loss(model, optimizer, x, y):
    loss = loss_of(model, x, y) + 0.01 * sum(p.norm() for p in model.parameters())
    loss.backward()
    return loss


def whole_norms_in_the_loss(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    return loss.detach() + 0.01 * sum(full_tensor(p).norm() for p in model.parameters())


def attribute_in_the_loss(model, optimizer, x, y):
    loss = loss_of(model, x, y)
    inner = getattr(model, "module", model)
    loss = loss + sum(block.state for block in inner.blocks)
    loss.backward()
    return loss


def clip_by_hand(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    total = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None).sqrt()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.1 / total)
    return loss


def clip_each(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    for p in model.parameters():
        if p.grad is not None:
            clip_grad_norm_(p, 0.02)
    return loss


def clip_groups(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    parameters = list(model.parameters())
    clip_grad_norm_(parameters[: len(parameters) // 2], 0.05)
    clip_grad_norm_(parameters[len(parameters) // 2 :], 0.02)
    return loss


def clip_all(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.05)
    return loss


def scaled(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5).add_(p, alpha=0.01)
            p.grad.clamp_(-0.1, 0.1)
    return loss


def centred(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    for p in model.parameters():
        if p.grad is not None and p.dim() == 2:
            p.grad -= p.grad.mean(1, keepdim=True)
    return loss


def gradient_of_input(model, optimizer, x, y):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, x, y), x)
    return usual(model, optimizer, (x + 0.1 * gradient.sign()).detach(), y)


def backward_with_inputs(model, optimizer, x, y):
    loss = loss_of(model, x, y)
    loss.backward(inputs=list(model.parameters()))
    return loss


def hook_in_the_loss(model, optimizer, x, y):
    seen = []
    block = getattr(model, "module", model).blocks[3]
    handle = block.register_forward_hook(lambda module, given, output: seen.append(output))
    loss = loss_of(model, x, y) + 0.1 * seen[-1].pow(2).mean()
    handle.remove()
    loss.backward()
    return loss


def evaluates(model, optimizer, x, y):
    loss = usual(model, optimizer, x, y)
    model.eval()
    with torch.no_grad():
        loss = loss.detach() + model(x).pow(2).mean()
    model.train()
    return loss


def evaluates_in_inference_mode(model, optimizer, x, y):
    model.eval()
    with torch.inference_mode():
        loss = model(x).pow(2).mean()
    model.train()
    return usual(model, optimizer, x, y).detach() + float(loss)


def accumulates(model, optimizer, x, y):
    loss = usual(model, optimizer, x[:4], y[:4])
    return loss + usual(model, optimizer, x[4:], y[4:])


def two_forwards(model, optimizer, x, y):
    loss = loss_of(model, x, y) + loss_of(model, -x, y)
    loss.backward()
    return loss


HABITS = {
    each.__name__.replace("_", " "): each
    for each in (
        *(
            usual,
            norms_in_the_loss,
            whole_norms_in_the_loss,
            attribute_in_the_loss,
            clip_by_hand,
            clip_each,
            clip_groups,
        ),
        *(clip_all, scaled, centred, gradient_of_input, backward_with_inputs, hook_in_the_loss, evaluates, accumulates),
        *(evaluates_in_inference_mode, two_forwards),
    )
}
PIPELINE, TENSOR = Layout(pp=2), Layout(tp=2)
EQUAL = None
#: Model, habit, and for each layout what the refusal says; EQUAL: the result is that of one process.
ROWS = (
    ("plain", "usual", EQUAL, EQUAL),
    ("plain", "norms in the loss", "norm would be computed from the part", "norm would be computed from the part"),
    ("plain", "whole norms in the loss", EQUAL, EQUAL),
    ("plain", "clip by hand", "sum would be computed from the part", "sum would be computed from the part"),
    ("plain", "clip each", EQUAL, EQUAL),
    ("plain", "clip groups", EQUAL, EQUAL),
    ("plain", "clip all", EQUAL, EQUAL),
    ("plain", "scaled", EQUAL, EQUAL),
    ("plain", "centred", "mean would be computed from the part", "mean would be computed from the part"),
    ("plain", "gradient of input", "the gradient of '.*' is not that of one process", EQUAL),
    ("plain", "backward with inputs", "there is none, and in one process there is one", EQUAL),
    ("plain", "hook in the loss", "the script's loss is not that of one process", EQUAL),
    ("plain", "evaluates", EQUAL, EQUAL),
    ("plain", "accumulates", EQUAL, EQUAL),
    ("a loss in an attribute", "evaluates in inference mode", "another attribute 'blocks.0.state'", EQUAL),
    ("a list of tensors", "evaluates in inference mode", EQUAL, EQUAL),
    ("plain", "two forwards", EQUAL, EQUAL),
    ("statistics by hand", "usual", "the first part whose output differs is 'blocks.0'", EQUAL),
    ("F.batch_norm", "usual", "the first part whose output differs is 'blocks.0'", EQUAL),
    ("an own class", "usual", EQUAL, EQUAL),
    ("an own class", "backward with inputs", "there is none, and in one process there is one", EQUAL),
    ("statistics and an own class", "usual", "the first part whose output differs is 'blocks.0'", EQUAL),
    ("rows attend to each other", "usual", "the first part whose output differs is 'blocks.0'", EQUAL),
    ("one sequence, no batch", "usual", "let samples come first", EQUAL),
    ("BatchNorm1d", "usual", "BatchNorm takes the statistics of each microbatch", "nothing in Sequential was found"),
    ("a loss in an attribute", "attribute in the loss", "another attribute 'blocks.0.state'", EQUAL),
    (
        "a state in an attribute",
        "usual",
        "the model's forward fails, and in one process it does not",
        EQUAL,
    ),
    ("a counter", "usual", "another attribute '.calls'", EQUAL),
    ("other ways in evaluation", "evaluates", EQUAL, EQUAL),
    ("the largest in evaluation", "evaluates", EQUAL, EQUAL),
    ("statistics in evaluation", "evaluates", "is not that of one process in evaluation", EQUAL),
    ("layers called by their parent", "usual", "", ".*"),
)
#: Of what is equal; the others are slow tests.
QUICK = {
    PIPELINE: {("plain", "usual"), ("plain", "clip groups"), ("plain", "accumulates"), ("an own class", "usual")},
    TENSOR: {("plain", "usual"), ("plain", "clip all"), ("a counter", "usual")},
}


def marks(model, habit, layout, expected):
    return pytest.mark.slow if expected is EQUAL and (model, habit) not in QUICK[layout] else ()


CASES = [
    pytest.param(
        *(model, habit, layout, expected),
        id=f"{model}-{habit}-{layout}",
        marks=marks(model, habit, layout, expected),
    )
    for model, habit, *words in ROWS
    for layout, expected in zip((PIPELINE, TENSOR), words, strict=True)
    if expected != ""
]


def train(model, habit, prepare):
    """Return the losses and the weights after some steps of a script."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model, optimizer = prepare(model, optimizer)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        losses.append(float(HABITS[habit](model, optimizer, x, y).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def seed():
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


@pytest.mark.parametrize(("kind", "habit", "layout", "expected"), CASES)
def test_a_habit_is_right_or_refused(kind, habit, layout, expected):
    torch.manual_seed(0)
    one = MODELS[kind]().double()
    models = [copy.deepcopy(one) for _ in range(2)]
    setup = Setup(SimpleNamespace(layout=layout), wishes={"num_microbatches": 4} if layout.pp > 1 else {})
    seed()
    losses, weights = train(one, habit, lambda *pair: pair)

    def rank_of(rank, size):
        try:
            return train(
                models[rank], habit, lambda model, optimizer: prepare_divided(model, optimizer, setup, get("hybrid"))
            )
        except Exception as error:  # another one than UsageError where the other rank has left
            return f"{type(error).__name__}: {error}"

    seed()
    results = run_threads(rank_of, 2)
    if expected is not EQUAL:
        assert all(isinstance(each, str) for each in results), results
        assert any(re.search(f"^UsageError: .*({expected})", each, re.DOTALL) for each in results), results
        return
    for found in results:
        assert not isinstance(found, str), found
        torch.testing.assert_close(found[0], losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1], weights, rtol=1e-9, atol=1e-12)


def test_a_reference_is_not_killed_after_it_was_waited_for(monkeypatch):
    """Its number may be that of another process by then."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os._exit(3)
    os.close(writing)
    calls = []
    for name in ("kill", "waitpid"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1])
    one = reference.Reference(pid, reading)
    assert (one.next().why, one.next().why) == ("it has ended with code 3", "it has ended")
    assert calls == ["kill", "waitpid"]


def test_a_kind_whose_forwards_always_find_gradients_is_given_up_and_said(monkeypatch, caplog):
    monkeypatch.setattr(first_batch, "_MOST_WAITS", 3)
    torch.manual_seed(0)
    one = Net()
    models = [copy.deepcopy(one) for _ in range(2)]

    def rank_of(rank, size):
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        model, _ = prepare_divided(models[rank], optimizer, Setup(SimpleNamespace(layout=TENSOR)), get("hybrid"))
        for is_training in (True, False, False, False, False):
            model.train(is_training)
            model(torch.ones(4, 6)).sum().backward()

    run_threads(rank_of, 2)
    told = [each.getMessage() for each in caplog.records if "not compared" in each.getMessage()]
    assert len(told) == 1 and "gradients of earlier batches were there before each of 3 forwards" in told[0]


def test_a_batch_that_the_script_gives_up_leaves_nothing_unproved():
    torch.manual_seed(0)
    one = Net(between=lambda net, x: x.roll(1, 0) if x.dim() == 3 else x)
    models = [copy.deepcopy(one) for _ in range(2)]

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=PIPELINE), wishes={"num_microbatches": 4})
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        model, _ = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        loss = model(torch.arange(48.0).sin().view(8, 6)).sum()
        if reference.here is not None:  # one process goes on with the first batch
            loss.backward()
        try:
            model(torch.arange(96.0).sin().view(8, 2, 6))
        except UsageError as error:
            return str(error)

    assert all("the model's output is not that of one process" in str(found) for found in run_threads(rank_of, 2))


@pytest.mark.parametrize(
    ("free", "num_together", "said"),
    [
        (1600, 1, ""),
        (1599, 1, "may need 0.0 GB, and 0.0 GB are free"),
        (3199, 2, "free for each of 2 copies"),
        (0, 0, ""),
    ],
)
def test_a_copy_that_memory_may_not_hold_is_not_made(monkeypatch, free, num_together, said):
    monkeypatch.setattr(reference, "available_bytes", lambda: free)
    found = reference.lack_of([nn.Parameter(torch.zeros(10, 10))], num_together)
    assert said in found and bool(found) == bool(said)


@pytest.mark.parametrize("times", [noise.TIMES, 0.0])
def test_a_gradient_that_is_rounding_alone_differs_from_none(monkeypatch, times):
    """The mean of squares behind a norm does not depend on what lies before it, but for rounding."""
    monkeypatch.setattr(first_batch, "TIMES", times)
    torch.manual_seed(0)
    norm = nn.LayerNorm(64, eps=1e-12)
    one = nn.Sequential(nn.Linear(64, 64), *[Block(width=64) for _ in range(3)], norm)
    models = [copy.deepcopy(one) for _ in range(2)]

    def rank_of(rank, size):
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        model, _ = prepare_divided(models[rank], optimizer, Setup(SimpleNamespace(layout=TENSOR)), get("hybrid"))
        try:
            model(torch.linspace(-1, 1, 8 * 64).sin().view(8, 64)).pow(2).mean().backward()
        except UsageError as error:
            return str(error)

    assert all(bool(found) == (times == 0) for found in run_threads(rank_of, 2))


def test_a_loss_that_is_rounding_alone_differs_from_none():
    """Weights that tremble may leave one number by chance what it was."""
    torch.manual_seed(0)
    rounding = noise.LossRounding()
    outputs = nn.LayerNorm(64)(torch.randn(8, 64))
    rounding.watch([outputs, None])
    outputs.sum().backward()
    one = reference.ReferenceReport("backward", loss=1.67e-6, rounding=rounding.norm)
    found = noise.noise_of(one, reference.ReferenceReport("backward", loss=1.67e-6))
    assert not [*compare.differences_of_loss(1.19e-7, 1.67e-6, found)]
    assert [*compare.differences_of_loss(1e-2, 1.67e-6, found)] and [*compare.differences_of_loss(1.19e-7, 1.67e-6, {})]


def test_gradients_of_a_stage_are_a_mean_also_where_another_stage_is_frozen():
    """A frozen stage averages nothing, and it is the one that has the reference."""
    torch.manual_seed(0)
    one = Net()
    one.embed.requires_grad_(False)
    one.blocks.requires_grad_(False)
    models = [copy.deepcopy(one) for _ in range(4)]

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=Layout(pp=2, dp=2)), wishes={"num_microbatches": 2, "cut": ["head"]})
        optimizer = torch.optim.SGD([p for p in models[rank].parameters() if p.requires_grad], 0.1)
        model, _ = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        place = torch.distributed.get_rank() % 2
        model(torch.arange(48.0).sin().view(8, 6).chunk(2)[place]).pow(2).mean().backward()

    run_threads(rank_of, 4)


def test_copies_that_have_seen_other_rows_are_compared_with_the_buffers_of_the_first():
    """An evaluation begins with a broadcast of running statistics, which each copy has of its own rows."""
    torch.manual_seed(0)
    one = nn.Sequential(Block(), nn.BatchNorm1d(16), Block())
    models = [copy.deepcopy(one) for _ in range(4)]

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=Layout(tp=2, dp=2)))
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        model, optimizer = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        rows = torch.arange(256.0).sin().view(16, 16)
        model(rows.chunk(2)[setup.world.layout.coordinate(rank)["dp"]]).pow(2).mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            return model(rows)

    first, *others = run_threads(rank_of, 4)
    assert all(torch.equal(first, other) for other in others)
