"""What holds for every exchange of weights: a table of methods and properties. Formulas stand in test_weight_formulas.py."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce, decentralized, low_precision_decentralized
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.average import Average
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.decentralized import Decentralized
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized
from guozhuang.exchange.parameter_server import AsyncParameterServer
from guozhuang.exchange.warmup import WeightWarmup
from guozhuang.exchange.weight_hierarchical import WeightHierarchical
from guozhuang.exchange.weights import WeightExchange
from guozhuang.groups.hierarchical.nodes import Nodes
from guozhuang.weights.equal_start import different
from tests.processes.cases import adamw, as_table, assert_equal_across_ranks, flat, mlp, said, seeded
from tests.processes.gradient_methods import nodes_of
from tests.threads.ranks import run_threads
from tests.threads.twins import Mixed, initial, named, push, train, update, wrapped


@dataclass(frozen=True)
class Method:
    """An exchange in the table.

    Attributes:
        make: a new one, for so many ranks.
        has_nodes: whether ranks of a node act as one.
        is_timed: whether clocks decide what is exchanged when, so that two runs differ.
        says_once: whether a NaN that stays in the weights is said in one step only.
        lasts: whether it goes on from a NaN of one rank without spoiling weights that were finite.
        near: how far from the mean the weights may be that ranks agree on after a step.
        loss: the greatest loss after 60 steps of a task, as a multiple of that of averaged gradients; None if not compared.
    """

    make: Callable[[int], WeightExchange[Any]]
    has_nodes: bool = False
    is_timed: bool = False
    says_once: bool = True
    lasts: bool = True
    near: float = 1e-5
    loss: float | None = 1.3

    def voice(self, rank: int, size: int) -> int:
        """The rank whose updates this one makes: the ranks of a node make equal ones."""
        nodes = nodes_of(size)
        return nodes.index(nodes[rank]) if self.has_nodes else rank


def of(exchange: WeightExchange[Any], **options: Any) -> Method:
    return Method(lambda size: exchange, **options)


def nodes(exchange: WeightExchange[Any], **options: Any) -> Method:
    def make(size: int) -> WeightExchange[Any]:
        return WeightHierarchical(AllReduce(), exchange, nodes_of(size))

    return Method(make, has_nodes=True, **options)


METHODS: dict[str, Method] = {
    "local-sgd": of(LocalSGD(2)),
    "post-local": of(LocalSGD(2, start_step=2)),
    "average": of(Average()),
    "every": of(Every(3, Average())),
    "warmup": of(WeightWarmup(2, AllReduce(), LocalSGD(3))),
    "warmup-diloco": of(WeightWarmup(2, AllReduce(), DiLoCo(3)), loss=None),
    "decentralized": of(Decentralized()),
    "decentralized-3": of(Decentralized(every=3)),
    "shift-one": of(Decentralized("shift_one")),
    "ring": of(LowPrecisionDecentralized(), says_once=False, lasts=False, near=0.02),
    "ring-random": of(
        LowPrecisionDecentralized(every=2, codec=Dithering(bits=4)), says_once=False, lasts=False, near=0.2, loss=None
    ),
    "diloco": of(DiLoCo(3), loss=None),
    "diloco-overlap": of(DiLoCo(4, num_fragments=2, overlap_steps=2), loss=None),
    "diloco-outer": of(DiLoCo(4, num_fragments=2, overlap_steps=2, agree_by="outer", outer_lr=1.0, outer_momentum=0.0)),
    "diloco-coded": of(
        DiLoCo(3, num_fragments=2, codec=Dithering(4, block=8), error_feedback=True),
        says_once=False,
        lasts=False,
        near=0.4,
        loss=None,
    ),
    "async": of(AsyncModelAverage(interval_ms=0), is_timed=True, says_once=False, loss=40.0),
    "servers": of(AsyncParameterServer(0, average=True, part_bytes=512), is_timed=True),
    "servers-stale": of(AsyncParameterServer(2, average=True, part_bytes=512), is_timed=True),
    "nodes": nodes(LocalSGD(2)),
    "nodes-warmup": nodes(WeightWarmup(2, AllReduce(), DiLoCo(3)), loss=None),
    "nodes-ring": nodes(LowPrecisionDecentralized(), says_once=False, lasts=False, near=0.02),
    "nodes-coded": nodes(DiLoCo(3, codec=MinMax8()), says_once=False, lasts=False, near=0.05, loss=None),
}


def case_all_agree_on_the_mean_of_every_dtype_and_shape(method: Method, rank: int, size: int) -> None:
    exchange, model = method.make(size), Mixed()
    weights = dict(named(model))
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    push(exchange, state, weights, method.voice(rank, size), [0])
    exchange.agree(state)
    voices = sorted({method.voice(r, size) for r in range(size)})
    for name, start in Mixed().named_parameters():
        wide = torch.promote_types(start.dtype, torch.float32)
        ends = [start.detach() + update(name, start.shape, voice, 0).to(start.dtype) for voice in voices]
        mean = torch.stack([each.to(wide) for each in ends]).mean(0)
        close = max(method.near * (1 + max(voices)), {torch.bfloat16: 0.02, torch.float16: 2e-3}.get(start.dtype, 0.0))
        torch.testing.assert_close(weights[name].detach().to(wide), mean, rtol=close, atol=close, msg=name)
    for step in (*range(1, 5), 5):  # training goes on, and the last time after a single step
        push(exchange, state, weights, method.voice(rank, size), [step])
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)  # the program's own, in the group that was handed over
        assert float(total[0]) == size * (size - 1) / 2
        if step >= 4:
            exchange.agree(state)
            assert_equal_across_ranks(model)
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    exchange.close(state)


def case_equal_weights_stay_and_narrow_ones_do_not_overflow(method: Method, rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        exchange = method.make(size)
        weight = nn.Parameter(torch.tensor([40000.0, 1.2345, -3.3333, 0.0007]).to(dtype))
        start = weight.detach().clone()
        state = exchange.prepare([("w", weight)], dist.group.WORLD)
        push(exchange, state, {}, -1, range(4))
        exchange.agree(state)
        assert torch.equal(weight.detach(), start), weight
        exchange.close(state)


def case_resumed_is_exact(method: Method, rank: int, size: int) -> None:
    """Something else was trained and is under way when the checkpoint comes."""
    if method.is_timed:
        return
    for stop in (1, 5):
        ddp, optimizer = wrapped(method.make(size), adamw)
        train(ddp, optimizer, rank, range(stop))
        saved = copy.deepcopy((ddp.exchange_state_dict(), ddp.state_dict(), optimizer.state_dict()))
        train(ddp, optimizer, rank, range(stop, 9))
        again, its = wrapped(method.make(size), adamw)
        train(again, its, rank, range(2))
        again.load_state_dict(saved[1])
        its.load_state_dict(saved[2])
        again.load_exchange_state_dict(saved[0])
        train(again, its, rank, range(stop, 9))
        assert torch.equal(flat(again.module), flat(ddp.module)), stop
        ddp.eval()
        again.eval()
        assert torch.equal(flat(again.module), flat(ddp.module)), stop


def case_uneven_inputs(method: Method, rank: int, size: int) -> None:
    ddp, optimizer = wrapped(method.make(size))
    with ddp.join():
        train(ddp, optimizer, rank, range(2 + 3 * rank))
    assert_equal_across_ranks(ddp.module)
    assert ddp.around is not None
    assert ddp.around.step == 2 + 3 * (rank if method.is_timed else size - 1)


def case_what_is_not_finite_is_said_by_the_rank_that_has_it(method: Method, rank: int, size: int) -> None:
    """Once, with its name; it is not hidden, and reaches all."""
    if size == 1:
        return
    exchange, weights, node_of = method.make(size), initial(), nodes_of(size)
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    push(exchange, state, weights, method.voice(rank, size), range(3))
    exchange.agree(state)
    who = node_of.index(node_of[-1]) if method.has_nodes else size - 1  # the first rank speaks for its node
    with said() as texts:
        exchange.before_step(state, 3)
        if rank == who or (method.has_nodes and node_of[rank] == node_of[-1]):
            weights["bias"].data[1] = float("nan")
        exchange.after_step(state, 3)
        assert rank == who or not texts, texts
        push(exchange, state, {}, -1, range(4, 4 + 3 * size))
        assert rank != who or len(texts) == 1 or not method.says_once, texts
        exchange.agree(state)
    assert weights["bias"].isnan().any(), "hidden"
    if method.lasts:
        assert weights["bias"].isnan().tolist() == [False, True, False] and bool(weights["weight"].isfinite().all())
        assert all("'bias'" in text and "NaN or infinity" in text for text in texts), texts
    if rank == who:
        assert "'bias'" in texts[0] and "NaN or infinity" in texts[0] and f"rank {rank}" in texts[0], texts
    exchange.close(state)


def case_other_checkpoints_are_refused(method: Method, rank: int, size: int) -> None:
    exchange = method.make(size)
    state = exchange.prepare(named(mlp()), dist.group.WORLD)
    push(exchange, state, {}, -1, range(3))
    exchange.agree(state)
    fits = "keeps no state|no state of|not saved by this method|other parameters"
    with pytest.raises(UsageError, match=fits):
        exchange.load_state_dict(state, {"of": {"another": torch.zeros(1)}})
    exchange.load_state_dict(state, exchange.state_dict(state))
    exchange.close(state)


def case_evaluation_in_inference_mode(method: Method, rank: int, size: int) -> None:
    ddp, optimizer = wrapped(method.make(size))
    for loads in (False, True, False):
        train(ddp, optimizer, rank, range(3))
        if loads:
            ddp.load_state_dict({name: t.detach().clone() for name, t in ddp.named_parameters()})
        with torch.inference_mode():
            ddp.eval()
        ddp.train()


NUM_STEPS = 60
_ONE_AT_A_TIME = threading.Lock()


def first_model() -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))


def two_groups(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}], lr=0.02)


def loss_of_part(model: nn.Module, rank: int, size: int, step: int, rows: slice) -> Tensor:
    x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step * size + rank))[rows]
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


@torch.no_grad()
def loss_on_others(model: nn.Module) -> float:
    test = torch.randn(256, 10, generator=torch.Generator().manual_seed(99_999))
    return float((model(test) - test.sum(1, keepdim=True)).square().mean())


@functools.cache
def loss_of_averaged_gradients(size: int) -> float:
    """Of one process on the batches of all ranks; a rank whose batches have ended gives nothing to the mean."""
    model = first_model()
    optimizer = two_groups(model)
    for step in range(NUM_STEPS + size - 1):
        for rank in (rank for rank in range(size) if step < NUM_STEPS + rank):
            for rows in (slice(8), slice(8, 16)):
                (loss_of_part(model, rank, size, step, rows) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss_on_others(model)


def case_it_trains_about_as_well_as_averaged_gradients(method: Method, rank: int, size: int) -> None:
    """Several parameter groups, accumulation and uneven inputs."""
    if method.loss is None:
        return
    model = first_model()
    ddp, optimizer = DistributedDataParallel(model), two_groups(model)
    ddp.use_weight_exchange(method.make(size), optimizer)
    with ddp.join():
        for step in range(NUM_STEPS + rank):
            with ddp.no_sync():
                loss_of_part(ddp, rank, size, step, slice(8)).backward()
            loss_of_part(ddp, rank, size, step, slice(8, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    ddp.eval()
    with _ONE_AT_A_TIME:
        averaged = loss_of_averaged_gradients(size)
    assert loss_on_others(ddp) < method.loss * averaged + 0.05, (loss_on_others(ddp), averaged)  # 10 at the start
    assert_equal_across_ranks(ddp.module)


test_holds = as_table(globals(), METHODS, long=case_it_trains_about_as_well_as_averaged_gradients)


def agrees_on_nan(rank: int, size: int, exchange: WeightExchange[Any]) -> None:
    weights = initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    if rank == size - 1:
        weights["bias"].data[1] = float("nan")
    with said() as texts:
        exchange.agree(state)
    assert weights["bias"].isnan().any()
    assert len(texts) == (rank == size - 1) and all("'bias'" in text for text in texts), (exchange, texts)
    exchange.close(state)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "exchange",
    [Decentralized(every=8), LowPrecisionDecentralized(every=8), AsyncModelAverage(interval_ms=1e7)],
    ids=str,
)
def test_what_is_not_finite_is_said_where_ranks_agree(exchange: WeightExchange[Any], size: int) -> None:
    run_threads(agrees_on_nan, size, exchange)


def agrees_on_the_mean(rank: int, size: int, exchange: WeightExchange[Any]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    state = exchange.prepare([("weight", weight)], dist.group.WORLD)
    weight.data += rank
    exchange.agree(state)
    torch.testing.assert_close(weight.detach(), torch.full((3,), (size - 1) / 2))
    exchange.end(state)


@pytest.mark.parametrize("layout", ["aa", "aabb", "abb"])
@pytest.mark.parametrize(
    "exchange",
    [Decentralized(every=4, nodes_first=True), LowPrecisionDecentralized(every=4, nodes_first=True)],
    ids=str,
)
def test_ranks_of_nodes_agree_on_the_mean_of_all(
    exchange: WeightExchange[Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decentralized, low_precision_decentralized):
        monkeypatch.setattr(module, "find_nodes", lambda group, _: Nodes.of(list(layout), group.rank()))
    run_threads(agrees_on_the_mean, len(layout), exchange)


def _start(rank: int, size: int) -> list[float]:
    """Ranks differ in the second tensor, of bfloat16, by one bit, and in the third, of no elements, not at all."""
    group = dist.group.WORLD
    assert group is not None
    tensors = [
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(4, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor(True),
    ]
    if rank == 1:
        tensors[1].view(torch.int16)[2] += 1
    return [float(each.sum()) for each in different(tensors, group)]


def test_only_tensors_that_differ_are_sent_at_the_start() -> None:
    first, other, last = run_threads(_start, 3)
    assert first == last == [4.0] and len(other) == 1
