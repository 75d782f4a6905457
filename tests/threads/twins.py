"""All ranks in one process, for what weight exchanges compute; and the model and the steps of both. Letters stand for nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.exchange import AllReduce
from guozhuang.exchange.decentralized import Decentralized, partner
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.fragments import cut
from guozhuang.exchange.weight_hierarchical import WeightHierarchical
from guozhuang.exchange.weights import WeightExchange
from guozhuang.weights.flat import as_real
from tests.processes.cases import batch, everybodys, flat, mlp, momentum, seeded

Optimizers = Callable[[Any], torch.optim.Optimizer]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(batch(rank, step)) - 1).square().mean()


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def near(ours: nn.Module, theirs: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def near_row(ours: nn.Module, row: Tensor, atol: float = 1e-6) -> None:
    """As ``near``, against all weights in one row."""
    if not torch.allclose(flat(ours), row, rtol=1e-5, atol=atol):
        sizes = [p.numel() for p in ours.parameters()]
        for (name, p), part in zip(ours.named_parameters(), row.split(sizes), strict=True):
            torch.testing.assert_close(p.flatten(), part, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def members(layout: str) -> list[list[int]]:
    return [[rank for rank, node in enumerate(layout) if node == each] for each in dict.fromkeys(layout)]


def between(layout: str, exchange: WeightExchange[Any]) -> WeightExchange[Any]:
    """The exchange between nodes; itself where each rank is a node."""
    return exchange if len(set(layout)) == len(layout) else WeightHierarchical(AllReduce(), exchange, tuple(layout))


def equal_inside(model: nn.Module, layout: str, apart: bool = False) -> None:
    """Equal bits on the ranks of each node; ``apart``: others on each node."""
    found = everybodys(flat(model))
    for ranks in members(layout):
        assert all(torch.equal(found[rank], found[ranks[0]]) for rank in ranks), f"{layout}: {ranks} differ"
    firsts = [ranks[0] for ranks in members(layout)]
    if apart:
        assert not any(torch.equal(found[a], found[b]) for a in firsts for b in firsts if a < b), f"{layout}: all agree"


def wrapped(
    exchange: WeightExchange[Any] | None, make: Optimizers = momentum
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(mlp())
    optimizer = make(ddp.parameters())
    if exchange is not None:
        ddp.use_weight_exchange(exchange, optimizer)
    return ddp, optimizer


def train(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Sequence[int],
    parts: Sequence[float] = (1.0,),
    syncs: bool = True,
) -> None:
    """Steps of one batch each, in several backwards; ``syncs``: each of them synchronizes, not the last one only."""
    for step in steps:
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            ddp.require_backward_grad_sync = syncs or i == len(parts) - 1
            (loss_of(ddp, rank, step) * part).backward()
        optimizer.step()


class Twin:
    """A model and an optimizer for each node: what ranks do whose weights are not exchanged."""

    def __init__(self, layout: str, make: Optimizers = momentum) -> None:
        self.size, self.members = len(layout), members(layout)
        self.models = [mlp() for _ in self.members]
        self.optimizers = [make(m.parameters()) for m in self.models]
        self.has_met = False

    def of(self, rank: int) -> nn.Module:
        return next(m for m, ranks in zip(self.models, self.members, strict=True) if rank in ranks)

    def before(self, step: int) -> None:
        """What happens between backward and the optimizer."""

    def after(self, step: int) -> None:
        """What happens after the optimizer."""

    def together(self, step: int) -> bool:
        """Whether gradients are averaged over all ranks."""
        return False

    def step(self, step: int, but: Sequence[int] = ()) -> None:
        """``but`` are ranks without data."""
        together, self.has_met = self.together(step), False
        for model, ranks in zip(self.models, self.members, strict=True):
            model.zero_grad()
            for rank in range(self.size) if together else ranks:
                if rank not in but:
                    (loss_of(model, rank, step) / (self.size if together else len(ranks))).backward()
        self.before(step)
        for optimizer, ranks in zip(self.optimizers, self.members, strict=True):
            if together or not set(ranks) <= set(but):
                optimizer.step()
        self.after(step)

    @torch.no_grad()
    def agree(self) -> None:
        self.has_met = True
        for same in zip(*[m.parameters() for m in self.models], strict=True):
            mean = torch.stack(list(same)).mean(0)
            for p in same:
                p.copy_(mean)


class Means(Twin):
    """Local SGD: gradients are averaged in the first steps, and weights after every so many steps from then on."""

    def __init__(self, layout: str, every: int, start_step: int = 0, make: Optimizers = momentum) -> None:
        super().__init__(layout, make)
        self.every, self.start_step = every, start_step

    def together(self, step: int) -> bool:
        return step < self.start_step

    def after(self, step: int) -> None:
        self.has_met = self.together(step)
        if step >= self.start_step and (step + 1 - self.start_step) % self.every == 0:
            self.agree()


class Gossip(Twin):
    """Decentralized averaging: the mean of a step's weights, of all or of a pair, is there before the next optimizer step."""

    def __init__(self, layout: str, exchange: Decentralized) -> None:
        super().__init__(layout)
        self.exchange = exchange

    @torch.no_grad()
    def before(self, step: int) -> None:
        if step == 0 or step % self.exchange.every:
            return
        if self.exchange.peers == "all":
            self.agree()
            self.has_met = False
            return
        num = len(self.models)
        others = [partner(step // self.exchange.every, i, num) if num > 1 else None for i in range(num)]
        for same in zip(*[m.parameters() for m in self.models], strict=True):
            old = [p.detach().clone() for p in same]
            for i, other in enumerate(others):
                if other is not None:
                    same[i].copy_((old[i] + old[other]) / 2)


class Outer(Twin):
    """DiLoCo: global weights with a torch optimizer on each fragment of them; a few lines of the papers."""

    def __init__(self, layout: str, exchange: DiLoCo, make: Optimizers = momentum) -> None:
        super().__init__(layout, make)
        self.exchange = exchange
        self.weights = [p.detach().clone().requires_grad_() for p in self.models[0].parameters()]
        names = [name for name, _ in named(self.models[0])]
        self.fragments = [
            [(names.index(piece.parameter), piece) for piece in pieces]
            for pieces in cut(as_real(named(self.models[0])), exchange.num_fragments)
        ]
        self.momenta = [torch.zeros_like(w) for w in self.weights]
        self.under_way: dict[int, tuple[int, list[Tensor]]] = {}
        self.sent: dict[tuple[int, int, int], Tensor] = {}  # by node, fragment and parameter

    def locals_of(self, fragment: int) -> list[list[Tensor]]:
        """For each parameter of a fragment the weights of all nodes, as views."""
        return [
            [piece.of(list(m.parameters())[at].detach()) for m in self.models] for at, piece in self.fragments[fragment]
        ]

    @torch.no_grad()
    def difference(self, fragment: int) -> list[Tensor]:
        pairs = zip(self.fragments[fragment], self.locals_of(fragment), strict=True)
        return [(piece.of(self.weights[at]) - torch.stack(own)).mean(0) for (at, piece), own in pairs]

    def outer_step(self, fragment: int, differences: list[Tensor], kept: float) -> None:
        """One step of a torch optimizer of the fragment's own, with the momentum that it had."""
        e, its = self.exchange, self.fragments[fragment]
        pieces = [piece.of(self.weights[at].detach()).clone().requires_grad_() for at, piece in its]
        optimizer = torch.optim.SGD(pieces, lr=e.outer_lr, momentum=e.outer_momentum, nesterov=e.outer_momentum > 0)
        for own, difference, (at, piece) in zip(pieces, differences, its, strict=True):
            own.grad = difference
            if e.outer_momentum > 0:
                optimizer.state[own]["momentum_buffer"] = piece.of(self.momenta[at]).clone()
        optimizer.step()
        with torch.no_grad():
            for own, (at, piece), locals_ in zip(pieces, its, self.locals_of(fragment), strict=True):
                piece.of(self.weights[at]).copy_(own)
                if e.outer_momentum > 0:
                    piece.of(self.momenta[at]).copy_(optimizer.state[own]["momentum_buffer"])
                for node, local in enumerate(locals_):
                    if e.keep_progress:
                        local.copy_(local + (own - self.sent[node, fragment, at]))
                    else:
                        local.copy_(kept * local + (1 - kept) * own)

    def after(self, step: int) -> None:
        e = self.exchange
        kept = e.mixing if e.mixing is not None else 0.5 if e.overlap_steps else 0.0
        for fragment, (since, differences) in list(self.under_way.items()):
            if step == since + e.overlap_steps:
                self.outer_step(fragment, differences, kept)
                del self.under_way[fragment]
        for fragment in range(e.num_fragments):
            if (step + 1) % e.every != (fragment + 1) * e.every // e.num_fragments % e.every:
                continue
            if not e.overlap_steps:
                self.outer_step(fragment, self.difference(fragment), kept)
                continue
            self.under_way[fragment] = step, self.difference(fragment)
            for (at, _), locals_ in zip(self.fragments[fragment], self.locals_of(fragment), strict=True):
                for node, local in enumerate(locals_):
                    self.sent[node, fragment, at] = local.clone()

    def agree(self) -> None:
        """What is under way arrives; then the mean of the weights, or with "outer" a step of each fragment."""
        kept = self.exchange.mixing if self.exchange.mixing is not None else 0.5 if self.exchange.overlap_steps else 0.0
        for fragment, (_, differences) in self.under_way.items():
            self.outer_step(fragment, differences, kept)
        self.under_way.clear()
        if self.exchange.agree_by == "mean":
            super().agree()
            return
        for fragment in range(self.exchange.num_fragments):
            self.outer_step(fragment, self.difference(fragment), 0.0)


# ---- weights without a model


class Mixed(nn.Module):
    """Weights of many dtypes and shapes."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.narrow = nn.Parameter(torch.randn(5, 7).to(torch.bfloat16))
            self.thin = nn.Parameter(torch.randn(6).to(torch.float16))
            self.plain = nn.Parameter(torch.randn(33, 3))
            self.turned = nn.Parameter(torch.randn(8, 4).t())
            self.precise = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.pairs = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.number = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))


SHAPES: dict[str, tuple[int, ...]] = {"scale": (), "bias": (3,), "weight": (40, 25), "empty": (0, 2)}


def initial(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(7)
    found = {name: nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in SHAPES.items()}
    found["weight"].data = found["weight"].data.t().contiguous().t()  # not contiguous
    return found


def update(name: str, shape: Sequence[int], rank: int, step: int) -> Tensor:
    """What the optimizer of a rank does to a parameter in a step."""
    seed = sum(map(ord, name)) * 10_000 + rank * 500 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1 * (1 + rank)


@torch.no_grad()
def push(
    exchange: WeightExchange[Any], state: Any, weights: Mapping[str, Tensor], rank: int, steps: Sequence[int]
) -> None:
    """Steps without a model and an optimizer; ``rank`` says whose updates are made, -1 that none is."""
    for step in steps:
        exchange.before_step(state, step)
        for name, weight in weights.items() if rank >= 0 else ():
            weight += update(name, weight.shape, rank, step).to(weight.dtype)
        exchange.after_step(state, step)
