"""Strategies between the copies of a divided model do what they do for whole models; states go from layout to layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import guozhuang as gz
from guozhuang.parallel.division import division_of, whole
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.table import Strategy, _compressed, get
from guozhuang.strategies.ways import Lazy, Setup, WithExchange
from guozhuang.world import World
from guozhuang.world.layout import Layout
from tests.threads.ranks import GENERATOR, run_threads

STEPS, MICRO, ROWS, WORDS, WIDTH = 3, 2, 8, 12, 8
PLAN = {"blocks.*.up": "columns", "blocks.*.down": "rows"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(torch.tanh(self.up(rows)))


class Tagger(nn.Module):
    """The first and the last stage hold one matrix, the second of four stages trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.words.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.words(words)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def of(sizes: str) -> Layout:
    return Layout(**{axis: int(size) for axis, _, size in (part.partition("=") for part in sizes.split(","))})


def made() -> Tagger:
    with GENERATOR:
        torch.manual_seed(4)
        return Tagger().double()


def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    """The rows of all copies of the model together."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return tuple(torch.randint(WORDS, (ROWS, 3), generator=generator) for _ in range(2))  # type: ignore[return-value]


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def norm_of_step(model: Any, step: int, place: int = 0, copies: int = 1, has_schedule: bool = False) -> float:
    """Compute the gradients of several micro-batches, clip them, and return their norm."""
    for micro in range(MICRO):
        words, labels = (each.chunk(copies)[place] for each in batch(step, micro))
        if has_schedule:
            model.step(words, labels)
        else:
            mean(model(words), labels).backward()
    with gz.averaged_gradients(model):
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= MICRO
    return float(gz.clip_grad_norm_(model.parameters(), 0.2))


def strategy_of(name: str) -> Strategy:
    """A strategy of the table, or one whose numbers of steps are small."""
    if name not in SOON:
        return get(name)
    return Strategy(name, "", exact=False, trains=True, one_process=False, prepare=SOON[name])


def prepared(
    rank: int, model: nn.Module, optimizer: Any, strategy: str, layout: Layout, **wishes: Any
) -> tuple[Any, Any]:
    world = World(rank, layout.size, rank, layout.size, 0, 1, torch.device("cpu"), "threads", layout)
    wishes = {"plan": PLAN if layout.tp > 1 else None, **wishes}
    if layout.pp > 1:
        wishes["cut"] = ["blocks.2"] if layout.pp == 2 else ["blocks.1", "blocks.2", "blocks.3"]
    found = prepare_divided(model, optimizer, Setup(world, wishes=wishes), strategy_of(strategy))
    return found[0], found[1]


def equal(found: Any, wanted: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-9)


ADAMW: Callable[[Any], Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True)  # noqa: E731
PLAIN_ADAMW: Callable[[Any], Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.02)  # noqa: E731
LAMB: Callable[[Any], Optimizer] = lambda p: gz.optim.LAMB(p, lr=0.02)  # noqa: E731
SGD: Callable[[Any], Optimizer] = lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)  # noqa: E731

SHARDED = (
    ("pp=2,dp=2", ADAMW, None),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("pp=4,dp=2", ADAMW, None),
            ("pp=2,dp=2", ADAMW, "1f1b"),
            ("pp=2,dp=2", SGD, "zero-bubble"),
            ("pp=2,dp=2,tp=2", SGD, None),
            ("pp=2,dp=2", LAMB, None),
        )
    ),
)


@pytest.mark.parametrize(("sizes", "make", "schedule"), SHARDED)
def test_sharded_inside_a_pipeline_is_one_process(
    sizes: str, make: Callable[[Any], Optimizer], schedule: str | None
) -> None:
    """With a state from before ``prepare`` or from before the first forward, and one that goes on in other layouts."""
    layout = of(sizes)
    alone = made()
    optimizer = make(alone.parameters())
    states, norms = [], []
    for step in range(STEPS + 1):
        states.append((copy.deepcopy(alone.state_dict()), copy.deepcopy(optimizer.state_dict())))
        optimizer.zero_grad()
        norms.append(norm_of_step(alone, step))
        optimizer.step()
    states.append((alone.state_dict(), optimizer.state_dict()))

    def on_rank(rank: int, size: int) -> None:
        for is_loaded_before in (True, False):
            model, (state, of_optimizer) = made(), states[1]
            model.load_state_dict(state)
            inner = make(model.parameters())
            if is_loaded_before:
                inner.load_state_dict(copy.deepcopy(of_optimizer))
            wishes = {"loss": mean, "schedule": schedule} if schedule else {}
            pipe, stepped = prepared(rank, model, inner, "sharded", layout, **wishes)
            if not is_loaded_before:
                stepped.load_state_dict(copy.deepcopy(of_optimizer))
            equal(stepped.state_dict(), of_optimizer)
            check(rank, pipe, stepped, layout, range(1, STEPS), schedule is not None)
            equal(pipe.state_dict(), states[STEPS][0])
            equal(stepped.state_dict(), states[STEPS][1])
        saved = copy.deepcopy((pipe.state_dict(), stepped.state_dict()))
        again = made()
        other = Layout(dp=size // 2, tp=2) if layout.tp == 1 else Layout(pp=4, tp=2)
        divided, resumed = prepared(rank, again, make(again.parameters()), "hybrid", other)
        divided.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        check(rank, divided, resumed, other, range(STEPS, STEPS + 1))
        equal(divided.state_dict(), states[-1][0])
        equal(resumed.state_dict()["state"], states[-1][1]["state"])

    def check(rank: int, model: Any, stepped: Any, layout: Layout, steps: range, has_schedule: bool = False) -> None:
        for step in steps:
            stepped.zero_grad()
            equal(norm_of_step(model, step, layout.coordinate(rank)["dp"], layout.dp, has_schedule), norms[step])
            stepped.step()

    run_threads(on_rank, layout.size)


def trained(rank: int, strategy: str, layout: Layout, steps: int, make: Callable[[Any], Optimizer]) -> Any:
    """What a rank holds after some steps: the losses, its whole weights before and after ranks agree, and held copies alike."""
    model = made()
    prepared_model, stepped = prepared(rank, model, make(model.parameters()), strategy, layout)
    place = layout.coordinate(rank)["dp"]
    for step in range(steps):
        stepped.zero_grad()
        for micro in range(MICRO):
            words, labels = (each.chunk(layout.dp)[place] for each in batch(step, micro))
            mean(prepared_model(words), labels).backward()
        if step == 2:  # ranks agree in the middle, and go on
            prepared_model.eval()
            with torch.no_grad():
                prepared_model(words)
            prepared_model.train()
        stepped.step()
    with torch._C.DisableTorchFunctionSubclass():  # parts of this rank, which scripts cannot read
        held = {
            name: p.detach().clone()
            for name, p in model.named_parameters()
            if (d := division_of(p)) is None or (d.dim is None and d.is_owned)
        }
    own = {name: p.detach() if (d := division_of(p)) is None else whole(p, d) for name, p in model.named_parameters()}
    own = {name: value.clone() for name, value in own.items()}
    return own, copy.deepcopy(prepared_model.state_dict()), held


SOON = {
    "diloco at once": WithExchange(Lazy("exchange.diloco:DiLoCo", every=4, num_fragments=1, overlap_steps=2)),
    "onebit soon": WithExchange(
        Lazy(
            "exchange.warmup:Warmup",
            2,
            Lazy("exchange.allreduce:AllReduce"),
            _compressed("onebit:OneBit", error_feedback=True),
        )
    ),
    "qadam soon": WithExchange(None, Lazy("optim:QAdam.around", warmup_steps=3)),
}
ONE_BY_ONE = ("local-sgd", "decentralized", "decentralized-pairs", "diloco at once", "qadam", "node-local-sgd")
ROUNDED = (
    *("low-precision-decentralized", "overlapped-local-sgd", "quantize8", "sharded-quantize8", "topk", "diloco"),
    *("onebit soon", "qadam soon"),
)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("decentralized", "pp=2,dp=2"),
        pytest.param("local-sgd", "pp=2,dp=2,tp=2", marks=pytest.mark.slow),
        *(
            pytest.param(strategy, sizes, marks=pytest.mark.slow)
            for strategy in ONE_BY_ONE
            for sizes in ("dp=4,tp=2", "pp=2,dp=4")
        ),
    ],
)
def test_weights_are_exchanged_as_those_of_whole_models(strategy: str, sizes: str) -> None:
    """Each copy of the model has the weights that its only rank has where models are whole."""
    layout, steps = of(sizes), 18 if "local-sgd" in strategy else 7
    alone = run_threads(lambda rank, size: wholes(rank, size, strategy, steps), layout.dp)
    found = run_threads(lambda rank, size: trained(rank, strategy, layout, steps, ADAMW), layout.size)
    for rank, (own, agreed, _) in enumerate(found):
        wanted = alone[layout.coordinate(rank)["dp"]]
        equal(own, wanted[0])
        equal(agreed, wanted[1])


def wholes(rank: int, size: int, strategy: str, steps: int) -> Any:
    """The same training by the strategy itself, of whole models."""
    model, layout = made(), Layout(dp=size)
    world = World(rank, size, rank, size, 0, 1, torch.device("cpu"), "threads", layout)
    prepare = strategy_of(strategy).prepare
    assert isinstance(prepare, WithExchange)
    wrapped, stepped = prepare(model, ADAMW(model.parameters()), Setup(world))
    for step in range(steps):
        stepped.zero_grad()
        for micro in range(MICRO):
            words, labels = (each.chunk(size)[rank] for each in batch(step, micro))
            mean(wrapped(words), labels).backward()
        if step == 2:
            wrapped.eval()
            wrapped.train()
        stepped.step()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    return own, copy.deepcopy(wrapped.state_dict())


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        pytest.param(strategy, sizes, marks=[] if (strategy, sizes) == ("quantize8", "dp=2,tp=2") else pytest.mark.slow)
        for strategy in ROUNDED
        for sizes in ("pp=2,dp=2,tp=2", "dp=2,tp=2")
    ],
)
def test_what_ranks_hold_alike_stays_alike_where_exchanges_round(strategy: str, sizes: str) -> None:
    """The ranks of a copy round other parts together; what several of them hold is the same all the same."""
    layout = of(sizes)
    found = run_threads(lambda rank, size: trained(rank, strategy, layout, 8, PLAIN_ADAMW), layout.size)
    start = found[0]
    for rank, (own, agreed, held) in enumerate(found):
        same_copy = next(
            each for r, each in enumerate(found) if layout.coordinate(r)["dp"] == layout.coordinate(rank)["dp"]
        )
        for name, value in held.items():
            if name in same_copy[2]:
                assert torch.equal(value, same_copy[2][name]), name
        for name, value in agreed.items():
            assert torch.isfinite(value).all() and torch.equal(value, start[1][name]), name
        assert own.keys() == start[0].keys()


class HalfFrozen(Tagger):
    """Trains its first half alone: the last stage of two trains nothing, and holds a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[:2].requires_grad_(True)


class SparseWords(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "sizes"), [(HalfFrozen, "local-sgd", "pp=2,dp=2"), (SparseWords, "quantize8", "dp=2,tp=2")]
)
def test_frozen_stages_and_sparse_gradients_stay_alike(
    kind: type[Tagger], strategy: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Tagger", kind)

    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    found = run_threads(lambda rank, size: trained(rank, strategy, of(sizes), STEPS, make), of(sizes).size)
    for _, agreed, _ in found:
        assert all(torch.equal(value, found[0][1][name]) for name, value in agreed.items())


class Shampoo(Optimizer):
    """Multiplies gradients by inverses of sums of their products; its state has matrices in a list."""

    whole_tensors = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad if p.dim() == 2 else p.grad.view(1, -1)
                state = self.state[p]
                if not state:
                    state["sums"] = [0.1 * torch.eye(size, dtype=p.dtype) for size in g.shape]
                left, right = state["sums"]
                left.add_(g @ g.T)
                right.add_(g.T @ g)
                g = torch.linalg.inv(left) @ g @ torch.linalg.inv(right)
                p.sub_(group["lr"] * (g / (1 + g.norm())).view_as(p))


def muon_and_adamw(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02)


WHOLE: dict[str, Callable[[nn.Module], tuple[Optimizer, ...]]] = {
    "adafactor": lambda model: (torch.optim.Adafactor(model.parameters(), lr=0.05),),
    "muon": muon_and_adamw,
    "shampoo": lambda model: (Shampoo(model.parameters()),),
    "lamb": lambda model: (gz.optim.LAMB(model.parameters(), lr=0.02),),
    "lars": lambda model: (gz.optim.LARS(model.parameters(), lr=2.0, weight_decay=0.01),),
}


@pytest.mark.parametrize(
    ("kind", "strategy", "sizes"),
    [
        pytest.param(
            *(kind, strategy, sizes),
            marks=[] if (kind, strategy) == ("shampoo", "sharded") and "pp" not in sizes else pytest.mark.slow,
        )
        for kind in WHOLE
        for strategy in ("hybrid", "sharded")
        for sizes in ("dp=2,tp=2", "pp=2,dp=2,tp=2")
    ],
)
def test_whole_matrices_and_their_norms_are_those_of_one_process(kind: str, strategy: str, sizes: str) -> None:
    """Slices of a matrix are stepped as one matrix; the state is whole where it is saved, and loads."""
    layout, alone = of(sizes), made()
    optimizers = WHOLE[kind](alone)
    states, norms = [], []
    for step in range(STEPS):
        norms.append(norm_of_step(alone, step))
        for each in optimizers:
            each.step()
        alone.zero_grad()
        states.append((copy.deepcopy(alone.state_dict()), [copy.deepcopy(each.state_dict()) for each in optimizers]))
    rtol = 1e-9 if kind != "muon" else 0.1  # it orthogonalizes in bfloat16, where sums in another order are others

    def on_rank(rank: int, size: int) -> None:
        for first in (0, 1):
            model = made()
            given = WHOLE[kind](model)
            if first:
                model.load_state_dict(states[0][0])
            wrapped, stepped = prepared(rank, model, given, strategy, layout)
            for each, state in zip(stepped, states[0][1], strict=True):
                if first:
                    each.load_state_dict(copy.deepcopy(state))
            for step in range(first, STEPS):
                equal(norm_of_step(wrapped, step, layout.coordinate(rank)["dp"], layout.dp), norms[step], rtol)
                for each in stepped:
                    each.step()
                    each.zero_grad()
            torch.testing.assert_close(wrapped.state_dict(), states[-1][0], rtol=rtol, atol=rtol)
            for each, state in zip(stepped, states[-1][1], strict=True):
                torch.testing.assert_close(each.state_dict()["state"], state["state"], rtol=rtol, atol=rtol)

    run_threads(on_rank, layout.size)
