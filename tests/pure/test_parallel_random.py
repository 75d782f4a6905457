"""Random operations of divided models. Ranks and stages run one after the other here: each starts from the same generator."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.parallel.random import Draws, divided, divided_by, undivided
from guozhuang.parallel.random.draws import _Mode

# (samples, heads, tokens, width)
SHAPE = (6, 5, 4, 8)


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def dropped_in_place(x: Tensor) -> Tensor:
    return F.dropout(x.clone(), 0.3, inplace=True)


# Each draws as many numbers as its input has elements.
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "in place": dropped_in_place,
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(*x.shape),
    "randint": lambda x: torch.randint(-5, 1000, x.shape),
    "torch.normal of a size": lambda x: torch.normal(1.0, 2.0, x.shape),
    "torch.normal of means": lambda x: torch.normal(x, 2.0),
    "torch.normal of means and deviations": lambda x: torch.normal(x, x.abs()),
    "a normal distribution": lambda x: torch.distributions.Normal(x, x.abs() + 0.1, validate_args=False).rsample(),
    "bernoulli of values": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_ of values": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli of a number": lambda x: x.bernoulli(0.2),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "random_": lambda x: torch.empty_like(x).random_(0, 100),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "channels last": lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last), 0.3),
    "expanded": lambda x: torch.rand_like(x.sum((0, 1), keepdim=True).expand(x.shape)),
    "dropout out of training": lambda x: torch.native_dropout(x, 0.3, False)[0] + torch.rand_like(x),
    "transposed": lambda x: torch.rand_like(x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)),
}
# Rows of the batch; spans of the heads, of ranks that have several ranges and that have none alike.
MICROBATCHES = {"even": (2, 2, 2), "uneven": (3, 1, 2), "one": (6,)}
SPANS: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "2 ranks": (((0, 3),), ((3, 5),)),
    "3 ranks": (((0, 2),), ((2, 3),), ((3, 5),)),
    "interleaved": (((0, 1), (3, 4)), ((1, 3), (4, 5))),
}


def slices(lengths: Sequence[int]) -> list[slice]:
    stops = list(itertools.accumulate(lengths))
    return [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def of_spans(x: Tensor, spans: Sequence[tuple[int, int]], dim: int = 1) -> Tensor:
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_of_a_draw_are_those_of_one_process(name: str) -> None:
    """Whatever is divided, heads over ranks or rows over microbatches or both."""
    run, x = ELEMENTWISE[name], torch.randn(SHAPE)
    torch.default_generator.manual_seed(7)
    whole, state = run(x), torch.get_rng_state()
    for spans_of_ranks, lengths in itertools.product(SPANS.values(), MICROBATCHES.values()):
        if spans_of_ranks == SPANS["interleaved"] and name.endswith("of values"):
            continue  # refused
        if spans_of_ranks == SPANS["3 ranks"] and name == "channels last":
            continue  # one channel tells nothing about their order
        found = torch.full_like(whole, -7)
        for spans in spans_of_ranks:
            part, module = of_spans(x, spans), Calls(run)
            draws = Draws(module)
            for rows in (6, 4):
                with draws.probe(rows):
                    module(torch.empty(rows, *part.shape[1:], device="meta"))

            draws.begin()
            torch.default_generator.manual_seed(7)
            pieces = []
            for rows in slices(lengths):
                with draws.microbatch(rows, 6), divided(1, spans, 5):
                    pieces.append(module(part[rows]))
            mine = torch.cat(pieces)
            assert torch.equal(torch.get_rng_state(), state), (name, spans, lengths)
            place = 0
            for start, stop in spans:
                found[:, start:stop] = mine[:, place : place + stop - start]
                place += stop - start
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


class Block(nn.Module):
    """Attention and what else draws: SDPA's dropout, channels dropped whole, a path dropped whole."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.channels, self.dropout = nn.Linear(width, width), nn.Dropout1d(0.2), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2 if self.training else 0.0)
        x = x + self.dropout(self.linear(mixed.transpose(1, 2).flatten(2)))
        keeps = x.new_empty((len(x), 1, 1)).bernoulli_(0.8) if self.training else 1.0
        return x + self.channels(x) * keeps


class Glue(nn.Module):
    """A model that draws outside of its blocks, too."""

    def __init__(self, recomputed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.recomputed = recomputed

    def forward(self, x: Tensor, call: Callable[[int, nn.Module, Tensor], Tensor]) -> Tensor:
        x = F.dropout(x, 0.1, self.training)
        first = x
        for i, block in enumerate(self.blocks):
            x = call(i, block, x)
            if i == 1:
                x = F.dropout(x, 0.1, self.training)
        return x + first


def call_block(model: Glue, block: nn.Module, x: Tensor) -> Tensor:
    return block(x) if model.recomputed is None else checkpoint(block, x, use_reentrant=model.recomputed)


class SimpleStage:
    """One stage of a pipeline of a ``Glue``: its own blocks, and all code between blocks."""

    def __init__(self, model: Glue, own: range) -> None:
        self.model, self.own = copy.deepcopy(model), own
        self.draws = Draws(self.model, first=own[0] == 0)
        for num_rows in (6, 5):
            with self.draws.probe(num_rows):
                x = torch.empty(num_rows, 5, 8, device="meta", dtype=torch.float64)
                self.model(x, lambda i, block, x: copy.deepcopy(block).to("meta")(x))

    def forward(self, inputs: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
        """The output of the last own block, and that of the model."""
        sent = []

        def call(i: int, block: nn.Module, x: Tensor) -> Tensor:
            with self.draws.unit(own=i in self.own):
                if i not in self.own:
                    return received if i < self.own[0] else torch.zeros_like(x)
                sent.append(call_block(self.model, block, x))
                return sent[-1]

        result = self.model(inputs, call)
        return sent[-1], result

    def tail(self, inputs: Tensor, received: Tensor) -> Tensor:
        """The output of the model, given that of its last block: the first lines are computed again."""

        def call(i: int, block: nn.Module, x: Tensor) -> Tensor:
            with self.draws.unit(own=False):
                return received

        return self.model(inputs, call)


KINDS = {"kept": None, "recomputed": False, "recomputed reentrant": True}
PIPELINES = [
    pytest.param(lengths, kind, marks=[] if name == "uneven" else [pytest.mark.slow], id=f"{name}, {kind_name}")
    for name, lengths in MICROBATCHES.items()
    for kind_name, kind in KINDS.items()
]


@pytest.mark.parametrize(("lengths", "recomputed"), PIPELINES)
def test_stages_of_a_pipeline_draw_as_one_process(lengths: tuple[int, ...], recomputed: bool | None) -> None:
    """Outputs, gradients and the generator's state of several steps, with draws between the blocks and in them."""
    model = Glue(recomputed).double()
    stages = [SimpleStage(model, own) for own in (range(1), range(1, 3), range(3, 4))]
    state = torch.get_rng_state()
    for step in range(3):
        x = torch.randn(6, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        torch.set_rng_state(state)
        whole_x = x.clone().requires_grad_()
        whole = model(whole_x, lambda i, block, x: call_block(model, block, x))
        state_of_one = torch.get_rng_state()
        whole.pow(2).sum().backward()

        torch.set_rng_state(state)
        inputs = [x[rows].clone().requires_grad_() for rows in slices(lengths)]
        flows = inputs
        message: Tensor | None = None
        for stage in stages:
            stage.draws.begin()
            if message is not None:
                torch.default_generator.manual_seed(99)  # where another rank's generator is
                stage.draws.set_state(message)
            sent = []
            for rows, given, received in zip(slices(lengths), inputs, flows, strict=True):
                with stage.draws.microbatch(rows, 6):
                    sent.append(stage.forward(given, received))
            flows, results = [each for each, _ in sent], [each for _, each in sent]
            message = stage.draws.state()
        assert message is not None
        for stage in stages:
            torch.default_generator.manual_seed(5)
            stage.draws.end(message)
            assert torch.equal(torch.get_rng_state(), state_of_one)
            with stage.draws.tail(message, 6):
                tail = stage.tail(x, torch.cat(flows))
            torch.testing.assert_close(tail, whole, rtol=1e-9, atol=1e-9)
            assert torch.equal(torch.get_rng_state(), state_of_one)
        torch.testing.assert_close(torch.cat(results), whole, rtol=1e-9, atol=1e-9)
        state = state_of_one
        for rows, result in reversed(list(zip(slices(lengths), results, strict=True))):
            with contextlib.ExitStack() as stack:
                for stage in stages:
                    stack.enter_context(stage.draws.backward(rows, 6))
                result.pow(2).sum().backward()
        gradients = [each.grad for each in inputs if each.grad is not None]
        torch.testing.assert_close(torch.cat(gradients), whole_x.grad, rtol=1e-9, atol=1e-9)
        assert torch.equal(torch.get_rng_state(), state)
        for stage in stages:
            assert not stage.draws._kept, "what was drawn for later microbatches is forgotten when they have it"


@pytest.mark.parametrize("recomputed", KINDS.values(), ids=list(KINDS))
def test_divided_heads_and_whole_activations(recomputed: bool | None) -> None:
    """A tensor-parallel block: attention is divided by heads, what follows is not, and one process's state is left behind."""
    x = torch.randn(3, 4, 5, 8)

    class Attention(nn.Module):
        def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
            super().__init__()
            self.spans = spans

        def forward(self, heads: Tensor) -> Tensor:
            with divided(-3, self.spans, 4):
                mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
                with undivided():
                    return mixed.sum() * F.dropout(torch.ones(3, 2, 2), 0.3).sum() + mixed

    def gradient(spans: Sequence[tuple[int, int]]) -> Tensor:
        module = Attention(spans)
        draws = Draws(module)
        part = of_spans(x, spans).requires_grad_()
        for _ in range(3):
            part.grad = None
            torch.default_generator.manual_seed(3)
            with draws.forward():
                found = module(part) if recomputed is None else checkpoint(module, part, use_reentrant=recomputed)
            state = torch.get_rng_state()
            # Each head's gradient: the sum over all heads differs between ranks, but not its derivative.
            (found * found.detach()).sum().backward()
            assert torch.equal(state, torch.get_rng_state())
        states.append(state)
        return found.detach() - 0

    states: list[Tensor] = []
    torch.default_generator.manual_seed(3)
    mixed = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
    factor = F.dropout(torch.ones(3, 2, 2), 0.3).sum()
    for spans in (((0, 3),), ((3, 4),)):
        mine = of_spans(mixed, spans)
        torch.testing.assert_close(gradient(spans), mine.sum() * factor + mine, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[0], states[1])


def test_a_kernel_that_draws_nothing_leaves_the_generator() -> None:
    """Attention without dropout is a random operation by its tag, and draws nothing."""
    draws, x = Draws(nn.Identity()), torch.randn(2, 3, 5, 8, requires_grad=True)
    state = torch.get_rng_state()
    with draws.forward(), divided(-3, ((0, 3),), 6):
        F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(state, torch.get_rng_state())


def test_operations_are_looked_at_only_while_something_may_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probability of 0, or evaluation, costs nothing; one that rises later is seen before the first draw."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    draws, x = Draws(layer), torch.randn(3, 5, 8)
    looked: list[object] = []
    whole = _Mode.__torch_dispatch__

    def counted(mode: _Mode, func: object, *args: object) -> object:
        looked.append(func)
        return whole(mode, func, *args)

    monkeypatch.setattr(_Mode, "__torch_dispatch__", counted)

    def step() -> int:
        looked.clear()
        torch.default_generator.manual_seed(0)
        with draws.forward(layer.training):
            found = layer(x)
        torch.default_generator.manual_seed(0)
        assert torch.equal(found, layer(x))
        return len(looked)

    assert [step() > 0, step()] == [True, 0]
    layer.dropout1.p = 0.5
    assert step() > 0
    layer.eval()
    assert [step() >= 0, step()] == [True, 0]


def test_merged_dims_and_sizes_that_change() -> None:
    """(samples * heads, tokens, tokens) divided by heads; heads that are divided again; images whose height shrinks."""
    x = torch.ones(6, 5, 3, 3)
    torch.default_generator.manual_seed(0)
    whole = F.dropout(x.flatten(0, 1), 0.5).unflatten(0, (6, 5))
    draws = Draws(nn.Identity())
    for spans in SPANS["interleaved"]:
        part = of_spans(x, spans)
        torch.default_generator.manual_seed(0)
        with draws.forward(), divided(0, spans, 5, merged=True):
            found = F.dropout(part.flatten(0, 1), 0.5).unflatten(0, (6, part.shape[1]))
        assert torch.equal(found, of_spans(whole, spans))

    for spans, inner in itertools.product((((0, 2), (4, 5)), ((2, 4),)), (0, 1)):
        length = sum(stop - start for start, stop in spans)
        torch.default_generator.manual_seed(0)
        with draws.forward(), divided(-3, spans, 5), divided(1, ((inner, inner + 1),), length):
            assert torch.equal(F.dropout(x[:, :1], 0.5), of_spans(whole, spans)[:, inner : inner + 1])

    image = torch.ones(2, 3, 8, 5)
    torch.default_generator.manual_seed(0)
    first, second = F.dropout(image, 0.5), F.dropout(image[:, :, ::2], 0.5)

    def rows(shape: torch.Size) -> list[tuple[int, tuple[tuple[int, int]], int]]:
        return [(2, ((0, 6),), 8) if shape[2] == 6 else (2, ((0, 3),), 4)] if len(shape) == 4 else []

    torch.default_generator.manual_seed(0)
    with draws.forward(), divided_by(rows):
        assert torch.equal(F.dropout(image[:, :, :6], 0.5), first[:, :, :6])
        assert torch.equal(F.dropout(image[:, :, :6:2], 0.5), second[:, :, :3])


def test_only_modules_that_draw_are_watched() -> None:
    """After two forwards; a draw that comes later warns once, and all are right from then on."""

    class Late(nn.Module):
        p = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.p, self.training)

    late = Late()
    model = nn.Sequential(nn.Linear(4, 4), Block(4 * 2), late)[1:]
    draws = Draws(model)
    x = torch.randn(3, 5, 8)

    def step() -> Tensor:
        torch.default_generator.manual_seed(0)
        with draws.forward():
            return model(x)

    def plain() -> Tensor:
        torch.default_generator.manual_seed(0)
        return model(x)

    for _ in range(3):
        assert torch.equal(step(), plain())
    assert {type(each).__name__ for each in draws._watch.modules} == {"Block", "Dropout", "Dropout1d"}
    late.p = 0.5
    with pytest.warns(UserWarning, match="drew random numbers in code that drew none"):
        step()
    for _ in range(3):
        with divided(2, ((0, 4),), 8):
            step()
    assert late in draws._watch.modules
    assert copy.deepcopy(model)(x).shape == x.shape


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "permutation": (lambda x: x[torch.randperm(len(x))], "randperm chooses among elements"),
    "poisson": (lambda x: torch.poisson(x.abs()), "poisson cannot be divided"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "rrelu_with_noise cannot be divided"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_draws_that_cannot_be_divided_are_refused_by_name(name: str) -> None:
    run, text = REFUSED[name]
    module = Calls(run)
    draws = Draws(module)
    for rows in (4, 6):
        with draws.probe(rows):
            module(torch.empty(rows, 3, device="meta"))
    with pytest.raises(UsageError, match=text), draws.microbatch(slice(0, 2), 4):
        module(torch.randn(2, 3))


def test_rows_that_cannot_be_told_are_refused() -> None:
    module = Calls(lambda x: torch.rand(x.shape))
    draws = Draws(module)
    with (
        pytest.raises(UsageError, match=r"which dim of a random draw \(rand\) is rows"),
        draws.microbatch(slice(0, 2), 4),
    ):
        module(torch.ones(2, 2))
    for rows in (4, 5):
        with draws.probe(rows):
            module(torch.empty(rows, 2, device="meta"))
    draws.begin()
    with draws.microbatch(slice(0, 2), 4):
        assert module(torch.ones(2, 2)).shape == (2, 2)
    odd = Calls(lambda x: torch.rand(len(x) + 1))
    with draws.probe(4):
        odd(torch.empty(4, 2, device="meta"))
    with pytest.raises(UsageError, match="no multiple of the number of rows"), draws.probe(5):
        odd(torch.empty(5, 2, device="meta"))
