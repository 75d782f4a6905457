"""What a pipeline cuts of a batch: the samples of each input, wherever they lie, and nothing that is as long by chance."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from guozhuang.errors import UsageError
from guozhuang.parallel.pipeline.microbatches import SampleDims, cut_batch
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.table import get
from guozhuang.strategies.ways import Setup
from guozhuang.world.layout import Layout

from .ranks import run_threads

WIDTH, TOKENS = 6, 4


class Masked(nn.Module):
    """Blocks that are given a mask for pairs of tokens, which all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask):
        for block in self.blocks:
            x = x + (x @ x.transpose(1, 2) + mask).softmax(-1) @ block(x)
        return x


class Recurrent(nn.Module):
    """A network that is given the state which it has returned for the last batch: (layers, samples, features)."""

    def __init__(self, kind, layers) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cells = kind(WIDTH, WIDTH, layers, batch_first=True)

    def forward(self, x, state):
        x, state = self.cells(self.embed(x), state)
        return self.head(x), state


class Decides(nn.Module):
    """Blocks after which the model itself decides by their outputs, beside a guard that never speaks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
            if not torch.isfinite(x).all():
                raise ValueError("overflow")
            if x.mean() > 0:
                x = 1.5 * x
        return x


def alone(model, sizes):
    for x in batches(sizes):
        yield (model(x) - 1).pow(2).mean()


def detached(state):
    return tuple(each.detach() for each in state) if isinstance(state, tuple) else state.detach()


def with_mask(model, sizes):
    mask = torch.full((TOKENS, TOKENS), float("-inf"), dtype=torch.float64).triu(1)
    for x in batches(sizes):
        yield (model(x, mask) - 1).pow(2).mean()


def with_states(model, sizes):
    state = None
    for x in batches(sizes):
        y, state = model(x, state)
        yield (y - 1).pow(2).mean() + sum(each.pow(2).mean() for each in state)
        state = detached(state)


def with_gradients_of_states(model, sizes):
    first = torch.full((3, 1, WIDTH), 0.1, dtype=torch.float64)
    for x in batches(sizes):
        state = first.expand(-1, len(x), -1).clone().requires_grad_()
        yield (model(x, state)[0] - 1).pow(2).mean()
        first = first - state.grad[:, :1]


def batches(sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, TOKENS, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]


def train(model, optimizer, script, sizes):
    losses = []
    for loss in script(model, sizes):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "script", "sizes", "num_microbatches"),
    [
        pytest.param(Masked, with_mask, (8, 6, TOKENS, 8), 4, id="a mask that is as long as a later batch"),
        pytest.param(lambda: Recurrent(nn.LSTM, 2), with_states, (8, 8, 8), 4, id="states of LSTM"),
        pytest.param(lambda: Recurrent(nn.GRU, 3), with_states, (8, 8), 1, id="states of GRU, one microbatch"),
        pytest.param(Decides, alone, (8, 8, 8), 1, id="decisions of a whole batch"),
        pytest.param(lambda: Recurrent(nn.GRU, 3), with_gradients_of_states, (8, 6), 3, id="gradients of states"),
    ],
)
def test_inputs_are_cut_where_their_samples_lie(make, script, sizes, num_microbatches):
    torch.manual_seed(0)
    one = make().double()
    models = [copy.deepcopy(one) for _ in range(2)]
    losses, weights = train(one, torch.optim.SGD(one.parameters(), 0.1), script, sizes)

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=Layout(pp=2)), wishes={"num_microbatches": num_microbatches})
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        return train(*prepare_divided(models[rank], optimizer, setup, get("hybrid")), script, sizes)

    for found in run_threads(rank_of, 2):
        torch.testing.assert_close(found[0], losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1], weights, rtol=1e-9, atol=1e-12)


def test_microbatches_that_decide_differently_are_refused():
    torch.manual_seed(0)
    models = [Decides().double() for _ in range(2)]

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=Layout(pp=2)), wishes={"num_microbatches": 4})
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        model, _ = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        ones = torch.ones(8, TOKENS, WIDTH, dtype=torch.float64)
        model(ones).sum().backward()  # all decide alike
        model(torch.cat([ones[:6], -ones[6:]]))

    with pytest.raises(
        AssertionError, match=r"microbatches 0 and 3 decide differently .got '.*test_pipeline_inputs.py:\d+'"
    ):
        run_threads(rank_of, 2)


def test_a_backward_hook_around_parts_is_refused_and_one_on_a_part_is_called():
    """No stage has both what goes into a module of several parts and what comes out of it."""
    torch.manual_seed(0)
    one = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]).double()
    one[0][0].register_full_backward_hook(lambda module, inward, outward: (inward[0] * 0.5,))
    one = nn.Sequential(nn.Linear(WIDTH, WIDTH), one).double()
    models = [copy.deepcopy(one) for _ in range(2)]

    def script(model, sizes):
        for x in batches(sizes):
            yield model(x.flatten(0, 1)).pow(2).mean()

    losses, weights = train(one, torch.optim.SGD(one.parameters(), 0.1), script, (8, 8))

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=Layout(pp=2)), wishes={"num_microbatches": 2})
        pair = prepare_divided(models[rank], torch.optim.SGD(models[rank].parameters(), 0.1), setup, get("hybrid"))
        found = train(*pair, script, (8, 8))
        models[rank][1].register_full_backward_hook(lambda module, inward, outward: None)
        with pytest.raises(UsageError, match=r"a backward hook is on 1, whose parts .*1\.0 and 1\.1"):
            pair[0](torch.ones(4, WIDTH, dtype=torch.float64))
        return found

    for found in run_threads(rank_of, 2):
        torch.testing.assert_close(found[0], losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1], weights, rtol=1e-9, atol=1e-12)


def test_a_batch_of_another_size_tells_what_has_no_samples():
    dims, mask = SampleDims(), torch.zeros(4, 4)
    assert dims.of((torch.zeros(4, 2), mask), {}) == (0, 0)  # nothing tells yet
    assert dims.of((torch.zeros(8, 2), mask), {}) == (0, None)
    assert dims.of((torch.zeros(4, 2), mask), {}) == (0, None)
    assert [part.args[1].shape for part in cut_batch((torch.zeros(4, 2), mask), {}, 2, (0, None))] == [(4, 4)] * 2


def test_samples_are_looked_for_in_later_dims_where_the_first_has_none():
    dims, states = SampleDims(), torch.arange(24.0).view(2, 6, 2)
    args = (torch.zeros(6, 3), states, torch.zeros(5))
    assert dims.of(args, {}) == (0, None, None)
    assert dims.look_elsewhere(args, {}) and not dims.look_elsewhere(args, {})
    assert dims.of(args, {}) == (0, 1, None)
    parts = cut_batch(args, {}, 3, (0, 1, None))
    assert torch.equal(torch.cat([part.args[1] for part in parts], 1), states)
    assert all(part.args[1].is_contiguous() for part in parts)
