"""Weight exchanges step by step, among ranks and between nodes, against one process that plays all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.average import Average
from guozhuang.exchange.cast import Cast
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.decentralized import Decentralized, partner
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized, RingState
from guozhuang.exchange.node_groups import num_groups
from guozhuang.exchange.warmup import WeightWarmup
from guozhuang.exchange.weight_hierarchical import WeightHierarchical
from guozhuang.exchange.weights import WeightExchange
from tests.processes.cases import (
    adamw,
    as_tests,
    assert_equal_across_ranks,
    everybodys,
    flat,
    mlp,
    momentum,
    names_of_cases,
)
from tests.pure.test_codecs import bagua_uint8
from tests.threads.ranks import ThreadGroup, run_threads
from tests.threads.twins import (
    SHAPES,
    Gossip,
    Means,
    Optimizers,
    Outer,
    Twin,
    between,
    equal_inside,
    initial,
    loss_of,
    members,
    named,
    near,
    near_row,
    push,
    train,
    update,
    wrapped,
)


@dataclass(frozen=True)
class Plan:
    """An exchange, what it does in one process, and how near the two come; ``parts`` are the backwards of a step."""

    exchange: WeightExchange[Any]
    twin: Callable[[str], Twin]
    atol: float = 1e-6
    make: Optimizers = momentum
    parts: tuple[float, ...] = (1.0,)
    syncs: bool = True


def means(exchange: WeightExchange[Any], every: int, start_step: int = 0, **options: Any) -> Plan:
    return Plan(
        exchange, lambda layout: Means(layout, every, start_step, options.get("make", momentum)), 1e-5, **options
    )


def outer(exchange: DiLoCo, make: Optimizers = momentum) -> Plan:
    return Plan(exchange, lambda layout: Outer(layout, exchange, make), 1e-4, make)


def gossip(exchange: Decentralized) -> Plan:
    return Plan(exchange, lambda layout: Gossip(layout, exchange), 1e-5)


PLANS = {
    "local-sgd": means(LocalSGD(3), 3, make=adamw),
    "every": means(Every(3, Average()), 3, make=adamw),
    "each-step": means(LocalSGD(1), 1),
    "average": means(Average(), 1),
    "post-local": means(LocalSGD(2, start_step=3), 2, 3),
    "warmup": means(WeightWarmup(3, AllReduce(), LocalSGD(2)), 2, 3),
    "warmup-between": means(WeightWarmup(2, AllReduce(), LocalSGD(2, start_step=1)), 2, 3),
    "accumulated": means(LocalSGD(2, start_step=1), 2, 1, parts=(0.25, 0.75), syncs=False),
    "several-backwards": means(LocalSGD(2, start_step=3), 2, 3, parts=(0.25, 0.75)),
    "decentralized": gossip(Decentralized()),
    "decentralized-3": gossip(Decentralized(every=3)),
    "shift-one": gossip(Decentralized("shift_one")),
    "shift-one-2": gossip(Decentralized("shift_one", 2)),
    "diloco": outer(DiLoCo(3)),
    "diloco-adamw": outer(DiLoCo(3), adamw),
    "diloco-plain": outer(DiLoCo(4, outer_lr=0.5, outer_momentum=0.0)),
    "diloco-fragments": outer(DiLoCo(4, num_fragments=2, overlap_steps=1)),
    "diloco-agree-by-outer": outer(DiLoCo(4, num_fragments=2, overlap_steps=1, agree_by="outer")),
    "diloco-overlap": outer(DiLoCo(5, num_fragments=3, overlap_steps=4, mixing=0.25, outer_momentum=0.5)),
    "diloco-four": outer(DiLoCo(4, num_fragments=4)),
    "diloco-keeps": outer(
        DiLoCo(5, num_fragments=2, overlap_steps=2, keep_progress=True, outer_lr=1.0, outer_momentum=0.0)
    ),
    "diloco-keeps-momentum": outer(DiLoCo(4, overlap_steps=3, keep_progress=True, outer_momentum=0.5)),
    "diloco-is-local-sgd": means(DiLoCo(3, outer_lr=1.0, outer_momentum=0.0), 3),
}
LAYOUTS = ("ab", "abc", "aabb")
MORE = ("a", "aa", "abb", "abcd", "aaab", "abba", "aabbb", "abbac", "abcde", "aaabbbbc")


@dataclass(frozen=True)
class Moment:
    """What one process that plays all ranks has after a step: the weights of each rank in one row, and whether all have met."""

    weights: list[Tensor]
    has_met: bool


def story(twin: Twin) -> dict[int | str, Moment]:
    """The moments after each step of the first part, after the agreement that ends it, and after each step of the second."""
    found: dict[int | str, Moment] = {}

    def note(when: int | str) -> None:
        found[when] = Moment([flat(twin.of(rank)) for rank in range(twin.size)], twin.has_met)

    for step in first_steps(type(twin)):
        twin.step(step)
        note(step)
    twin.agree()
    note("agreed")
    for step in later_steps(type(twin)):
        twin.step(step)
        note(step)
    return found


def first_steps(kind: type[Twin]) -> range:
    return range(14 if issubclass(kind, Outer) else 8)


def later_steps(kind: type[Twin]) -> range:
    return range(14, 18) if issubclass(kind, Outer) else range(8, 11)


def follows(rank: int, size: int, name: str, layout: str, kind: type[Twin], moments: dict[int | str, Moment]) -> None:
    plan = PLANS[name]
    ddp, optimizer = wrapped(between(layout, plan.exchange), plan.make)

    def go_on(steps: range) -> None:
        for step in steps:
            train(ddp, optimizer, rank, [step], plan.parts, plan.syncs)
            now = moments[step]
            near_row(ddp.module, now.weights[rank], plan.atol)
            equal_inside(ddp.module, layout, apart=issubclass(kind, Means) and not now.has_met)
            if now.has_met:
                assert_equal_across_ranks(ddp.module)

    go_on(first_steps(kind))
    ddp.eval()
    near_row(ddp.module, moments["agreed"].weights[rank], plan.atol)
    assert_equal_across_ranks(ddp.module)
    if issubclass(kind, Outer) and len(set(layout)) == size:
        kept = ddp.exchange_state_dict()["weights"]["exchange"]["global"]
        same = all(torch.equal(p, kept[name]) for name, p in ddp.module.named_parameters())
        assert same or plan.exchange.agree_by == "mean"  # type: ignore[attr-defined]
    ddp.train()
    go_on(later_steps(kind))
    ddp.eval()  # waits for what is in flight: the groups are about to end


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
@pytest.mark.parametrize("name", PLANS)
def test_every_step_is_the_formula(name: str, layout: str) -> None:
    twin = PLANS[name].twin(layout)
    run_threads(follows, len(layout), name, layout, type(twin), story(twin))


def joined(rank: int, size: int, name: str, layout: str, lengths: list[int]) -> None:
    """Rank 0 ends first, or a node before others, or a rank has nothing at all; its weights count to the end."""
    plan = PLANS[name]
    (ddp, optimizer), twin = wrapped(between(layout, plan.exchange), plain), plan.twin(layout)
    twin.optimizers = [plain(m.parameters()) for m in twin.models]
    with ddp.join():
        train(ddp, optimizer, rank, range(lengths[rank]))
    for step in range(max(lengths[:size])):
        twin.step(step, but=[r for r in range(size) if lengths[r] <= step])
    twin.agree()
    assert_equal_across_ranks(ddp.module)
    near(ddp.module, twin.of(rank), plan.atol)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("lengths", [[2, 5, 3, 7, 4], [6, 1, 1, 2, 1], [0, 2, 4, 5, 3]], ids=str)
@pytest.mark.parametrize("layout", ["abb", "aabb", pytest.param("aabbb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["local-sgd", "post-local", "diloco"])
def test_uneven_inputs_of_nodes(name: str, layout: str, lengths: list[int]) -> None:
    run_threads(joined, len(layout), name, layout, lengths)


@pytest.mark.parametrize("layout", ["ab", "abc"])
@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_uneven_inputs(name: str, layout: str) -> None:
    run_threads(joined, len(layout), name, layout, [2, 5, 3])


class Raised(nn.Module):
    """One weight, raised by 1 in each step of SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def case_a_rank_that_shadowed_averaged_gradients_takes_the_weights_of_one_that_stepped(rank: int, size: int) -> None:
    exchanges = (LocalSGD(4, start_step=1000), LocalSGD(50, start_step=6), WeightWarmup(6, AllReduce(), LocalSGD(3)))
    for exchange, held in zip(exchanges, (10.0, None, None), strict=True):
        ddp = DistributedDataParallel(Raised())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        ddp.use_weight_exchange(exchange, optimizer)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(2 if rank == 0 else 10):
                optimizer.zero_grad()
                (-ddp(torch.ones(1))).sum().backward()
                optimizer.step()
        assert_equal_across_ranks(ddp.module)
        if size > 1:
            # After step 6 rank 0 holds 6, too; it then takes part with that, while the others make 4 more steps.
            assert ddp.module.weight.item() == pytest.approx(held or 10 - 4 / size, abs=1e-5), exchange


def case_agreement_is_not_made_twice(rank: int, size: int) -> None:
    for exchange in (LocalSGD(2), DiLoCo(2)):
        model = mlp()
        state = exchange.prepare(named(model), dist.group.WORLD)
        push(exchange, state, dict(named(model)), rank, range(2))
        before = ThreadGroup.sent_by_this_rank()
        exchange.agree(state)
        assert ThreadGroup.sent_by_this_rank() == before
        assert_equal_across_ranks(model)


def case_warm_up_before_diloco_starts_it_from_the_weights_of_then(rank: int, size: int) -> None:
    (ours, optimizer), (theirs, other) = wrapped(WeightWarmup(3, AllReduce(), DiLoCo(2)), plain), wrapped(None, plain)
    train(ours, optimizer, rank, range(2))
    assert ours.exchange_state_dict()["weights"]["exchange"] == {}
    train(ours, optimizer, rank, range(2, 3))
    theirs.module.load_state_dict(ours.module.state_dict())
    theirs.use_weight_exchange(DiLoCo(2), other)
    for ddp, its in ((ours, optimizer), (theirs, other)):
        train(ddp, its, rank, range(3, 8))
    near(ours.module, theirs.module)


# ---- DiLoCo


def case_the_outer_step_is_that_of_torch_bit_for_bit(rank: int, size: int) -> None:
    exchange, ours = DiLoCo(2), mlp()
    inner = torch.optim.SGD(ours.parameters(), lr=0.1)
    state = exchange.prepare(named(ours), dist.group.WORLD)
    row = flat(ours).clone().requires_grad_()
    outer = torch.optim.SGD([row], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(9):
        inner.zero_grad()
        loss_of(ours, rank, step).backward()
        exchange.before_step(state, step)
        inner.step()
        if step % 2 == 1:
            row.grad = (row.detach() - flat(ours)) * (1 / size)
            dist.all_reduce(row.grad)
            outer.step()
        exchange.after_step(state, step)
        if step % 2 == 1:
            assert torch.equal(flat(ours), row)
    [part] = state.fragments[0].parts
    assert torch.equal(part.momentum, outer.state[row]["momentum_buffer"])
    bare = DiLoCo(3, outer_lr=1.0, outer_momentum=0.0).prepare(named(ours), dist.group.WORLD)
    assert bare.fragments[0].parts[0].momentum is None  # no memory for what is not used


def case_coded_differences_come_near(rank: int, size: int) -> None:
    for codec, feedback, tolerance in ((MinMax8(), False, 0.02), (Dithering(8, block=8), True, 0.05)):
        exchange = DiLoCo(2, num_fragments=2, overlap_steps=1, codec=codec, error_feedback=feedback)
        (ours, optimizer), twin = wrapped(exchange), Outer("abcdefgh"[:size], exchange)
        start = flat(ours).clone()
        for step in range(4):
            train(ours, optimizer, rank, [step])
            twin.step(step)
        ours.agree()
        assert_equal_across_ranks(ours)
        twin.agree()
        wanted = flat(twin.of(rank))
        assert float((flat(ours) - wanted).abs().max()) < tolerance * float((wanted - start).abs().max()) + 1e-6
        if size > 1:
            assert not torch.equal(flat(ours), wanted)


@dataclass(frozen=True)
class InNumpy(MinMax8):
    """Looks at the rows through numpy, whose memory PyTorch then lets nobody free."""

    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        assert np.isfinite(rows.numpy()).all()
        super().encode(rows, codes, random)


def case_a_codec_may_use_numpy(rank: int, size: int) -> None:
    exchange, model = DiLoCo(1, codec=InNumpy()), nn.Linear(24, 1, bias=False)  # as many for each rank: coded in place
    nn.init.ones_(model.weight)
    state = exchange.prepare(named(model), dist.group.WORLD)
    for step in range(2):
        push(exchange, state, dict(named(model)), rank, [step])
        parts = [part for fragment in state.fragments for part in fragment.parts]
        assert not any(part.bucket.flat.untyped_storage().nbytes() for part in parts)
    assert_equal_across_ranks(model)
    exchange.close(state)


def case_a_checkpoint_fits_another_number_of_fragments(rank: int, size: int) -> None:
    one, three, model = DiLoCo(3, num_fragments=1), DiLoCo(3, num_fragments=3), mlp()
    state = one.prepare(named(model), dist.group.WORLD)
    push(one, state, dict(named(model)), rank, range(4))
    one.agree(state)
    saved = one.state_dict(state)
    fresh = three.prepare(named(model), dist.group.WORLD)
    three.load_state_dict(fresh, saved)
    again = three.state_dict(fresh)
    for key in ("global", "momentum"):
        assert again[key].keys() == dict(named(model)).keys()
        assert all(torch.equal(again[key][name], saved[key][name]) for name in again[key])
    with pytest.raises(UsageError, match="of other parameters"):
        one.load_state_dict(state, saved | {"global": {"0.weight": torch.zeros(2)}})
    bare = DiLoCo(2, outer_momentum=0.0)
    with pytest.raises(UsageError, match="momentum"):
        one.load_state_dict(state, bare.state_dict(bare.prepare(named(model), dist.group.WORLD)))


# ---- in a ring, and in pairs


def case_both_of_a_pair_hold_equal_bits(rank: int, size: int) -> None:
    exchange, weights = Decentralized("shift_one"), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(4):
        push(exchange, state, weights, rank, [step])
        exchange.before_step(state, step + 1)
        found = everybodys(weights["weight"].detach().contiguous())
        other = partner(step + 1, rank, size) if size > 1 else None
        assert other is None or torch.equal(found[other], found[rank])


class BaguasRing:
    """The formula, in numpy, for all ranks at once; the order of operations is the method's."""

    def __init__(self, size: int, x: np.ndarray) -> None:
        self.size = size
        self.own, self.left, self.right = ([x.copy() for _ in range(size)] for _ in range(3))

    def exchange(self, xs: list[np.ndarray]) -> list[np.ndarray]:
        f, codes = np.float32, []
        for x, w, left, right in zip(xs, self.own, self.left, self.right, strict=True):
            t = (left + right - f(2) * w) / f(3) + (x - w)
            plain = x.astype(np.float64) + left / 3 + right / 3 - 5 * w.astype(np.float64) / 3
            np.testing.assert_allclose(t, plain, atol=1e-5)
            codes.append(bagua_uint8(t))
        for r in range(self.size):
            self.own[r] = self.own[r] + codes[r]
            self.left[r] = self.left[r] + codes[r - 1]
            self.right[r] = self.right[r] + codes[(r + 1) % self.size]
        return [w.copy() for w in self.own]


def together(values: dict[str, Tensor] | dict[str, nn.Parameter]) -> np.ndarray:
    return torch.cat([values[name].detach().reshape(-1) for name in SHAPES]).numpy().copy()


def case_low_precision_is_baguas(rank: int, size: int) -> None:
    if size == 1:
        return
    for every in (1, 2):
        exchange, weights = LowPrecisionDecentralized(every=every), initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        xs = [together(weights) for _ in range(size)]
        ring = BaguasRing(size, xs[0])
        for step in range(9):
            push(exchange, state, weights, rank, [step])
            added = [{name: update(name, shape, r, step) for name, shape in SHAPES.items()} for r in range(size)]
            xs = [x + together(each) for x, each in zip(xs, added, strict=True)]
            if step % every == 0:
                xs = ring.exchange(xs)
            np.testing.assert_array_equal(together(weights), xs[rank])
        assert_ring(state, size)


def assert_ring(state: RingState, size: int) -> None:
    """A rank's W is its right neighbour's L and its left neighbour's R, bit for bit."""
    own, left, right = ([everybodys(flat) for flat in state.replicas[name]] for name in ("own", "left", "right"))
    for r in range(size):
        for i in range(len(own)):
            assert torch.equal(own[i][r], left[i][(r + 1) % size])
            assert torch.equal(own[i][r], right[i][r - 1])


def case_the_ring_holds_for_long_and_with_random_codes(rank: int, size: int) -> None:
    if size == 1:
        return
    for codec in (MinMax8(), Dithering(bits=4)):
        exchange, weights = LowPrecisionDecentralized(codec=codec), initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        push(exchange, state, weights, rank, range(40))
        assert_ring(state, size)
        assert not torch.equal(state.replicas["own"][0], state.replicas["left"][0])
        saved = copy.deepcopy((exchange.state_dict(state), {name: w.detach() for name, w in weights.items()}))
        again = initial()
        fresh = exchange.prepare(list(again.items()), dist.group.WORLD)
        push(exchange, fresh, again, rank, range(2))
        for name, weight in again.items():  # also without an agreement a resumed run is exact
            weight.data.copy_(saved[1][name])
        exchange.load_state_dict(fresh, saved[0])
        for of_these, its in ((weights, state), (again, fresh)):
            push(exchange, its, of_these, rank, range(40, 44))
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        exchange.agree(state)
        assert_ring(state, size)


def case_low_precision_evens_out(rank: int, size: int) -> None:
    """Without updates all weights come near the mean of where they stood; the sum is kept to what codes lose."""
    exchange, weights = LowPrecisionDecentralized(), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    push(exchange, state, weights, rank, [0])
    before = weights["weight"].detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(before)
    push(exchange, state, weights, -1, range(1, 60))
    torch.testing.assert_close(weights["weight"].detach(), before / size, rtol=0, atol=0.01)


def case_other_checkpoints_of_a_ring_are_refused(rank: int, size: int) -> None:
    exchange, weights = LowPrecisionDecentralized(), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    push(exchange, state, weights, rank, range(2))
    saved = exchange.state_dict(state)
    if size > 1:
        with pytest.raises(UsageError, match="ring of 77 ranks"):
            exchange.load_state_dict(state, {**saved, "ranks": 77})
        del saved["replicas"]["left"]["bias"]
        with pytest.raises(UsageError, match="bias"):
            exchange.load_state_dict(state, saved)


# ---- nodes

NODES = {1: ("a",), 2: ("aa", "ab"), 3: ("abb", "aaa"), 4: ("aabb", "aaab"), 5: ("aabbb", "abbac")}


def ours(layout: str, exchange: WeightExchange[Any]) -> WeightHierarchical:
    return WeightHierarchical(AllReduce(), exchange, tuple(layout))


def node_case_any_method_acts_as_among_so_many_ranks(rank: int, size: int) -> None:
    """Both ranks of a node get one batch, whose mean is exact: what happens is then what two ranks alone would do."""
    if size != 4:
        return
    outers: list[WeightExchange[Any]] = [
        LocalSGD(2),
        Decentralized("shift_one", every=2),
        LowPrecisionDecentralized(),
        DiLoCo(4, num_fragments=2, overlap_steps=1),
        DiLoCo(3, codec=MinMax8()),
    ]
    for layout in ("aabb", "abba"):
        leads = [ranks[0] for ranks in members(layout)]
        node = next(i for i, ranks in enumerate(members(layout)) if rank in ranks)
        pair = dist.new_group(leads)
        for exchange in outers if layout == "aabb" else outers[2:3]:
            ddp, optimizer = wrapped(ours(layout, exchange))
            alone = mlp()
            its = momentum(alone.parameters())
            state = exchange.prepare(named(alone), pair) if rank in leads else None
            for step in range(9):
                train(ddp, optimizer, node, [step])
                if state is not None:
                    its.zero_grad()
                    loss_of(alone, node, step).backward()
                    exchange.before_step(state, step)
                    its.step()
                    exchange.after_step(state, step)
                    assert torch.equal(flat(alone), flat(ddp.module)), (layout, exchange, step)
                equal_inside(ddp.module, layout)
            ddp.eval()
            assert_equal_across_ranks(ddp.module)
            if state is not None:
                exchange.agree(state)
                assert torch.equal(flat(alone), flat(ddp.module)), (layout, exchange)


def node_case_one_rank_per_node_is_the_outer_exchange_and_one_node_is_plain(rank: int, size: int) -> None:
    apart = "abcde"[:size]
    coded = (LocalSGD(2), Decentralized("shift_one"), DiLoCo(3, codec=MinMax8()), LowPrecisionDecentralized())
    pairs = [(ours(apart, each), each) for each in coded] + [(ours("a" * size, LocalSGD(2)), None)]
    for exchange, alone in pairs:
        (ddp, optimizer), (bare, its) = wrapped(exchange), wrapped(alone)
        for step in range(7):
            train(ddp, optimizer, rank, [step])
            train(bare, its, rank, [step])
            assert torch.equal(flat(ddp.module), flat(bare.module)), (alone, step)
        ddp.eval()
        bare.eval()
        assert torch.equal(flat(ddp.module), flat(bare.module)), alone


def node_case_gradients_of_other_kinds(rank: int, size: int) -> None:
    """Narrow numbers inside nodes; a warm-up whose gradients take two levels themselves; one around the two levels."""
    layout = NODES[size][0]
    inside = WeightHierarchical(Cast(torch.bfloat16, AllReduce()), LocalSGD(2), tuple(layout))
    levels = WeightWarmup(3, Hierarchical(AllReduce(), AllReduce(), tuple(layout)), LocalSGD(2))
    late = WeightWarmup(2, AllReduce(), ours(layout, LocalSGD(2, start_step=1)))
    for exchange, start, atol in ((inside, 0, 2e-2), (ours(layout, levels), 3, 1e-5), (late, 3, 1e-5)):
        (ddp, optimizer), twin = wrapped(exchange), Means(layout, 2, start)
        for step in range(7):
            train(ddp, optimizer, rank, [step])
            twin.step(step)
            near(ddp.module, twin.of(rank), atol)
            equal_inside(ddp.module, layout, apart=not twin.has_met)


def node_case_bits_stay_equal_inside_a_node_whose_leader_has_no_data(rank: int, size: int) -> None:
    layout = NODES[size][0]
    exchange, model = ours(layout, Every(100, Average())), mlp()
    state = exchange.prepare(named(model), dist.group.WORLD)
    leads = [ranks[0] for ranks in members(layout) if len(ranks) > 1]
    for step in range(3):
        if rank in leads:
            exchange.miss_step(state, step)
        exchange.before_step(state, step)
        if rank not in leads:
            with torch.no_grad():
                for p in model.parameters():
                    p += 1
        exchange.after_step(state, step)
        equal_inside(model, layout)
        torch.testing.assert_close(flat(model), flat(mlp()) + step + 1)


def node_case_a_checkpoint_of_other_nodes(rank: int, size: int) -> None:
    for exchange, fits in ((LocalSGD(3), True), (DiLoCo(3), False)):
        ddp, optimizer = wrapped(ours("a" * size, exchange))
        train(ddp, optimizer, rank, range(2))
        saved = copy.deepcopy((ddp.exchange_state_dict(), ddp.state_dict()))
        again, its = wrapped(ours("abcde"[:size], exchange))
        again.load_state_dict(saved[1])
        if fits or size == 1:
            again.load_exchange_state_dict(saved[0])
            train(again, its, rank, range(4))
        else:
            with pytest.raises(UsageError, match="on other nodes"):
                again.load_exchange_state_dict(saved[0])
            assert again.around.step == 0  # what was refused leaves nothing behind


def assert_as_many_groups_everywhere(made: int, what: str) -> None:
    here = torch.tensor([made, -made])
    dist.all_reduce(here, dist.ReduceOp.MAX)
    assert here[0] == -here[1], f"{what}: {-int(here[1])} to {int(here[0])}"


def node_case_groups_are_as_many_everywhere_and_end(rank: int, size: int) -> None:
    """Also past a warm-up, at whose end the leaders make groups, and where a state past it is loaded."""
    outers = (
        Decentralized(),
        WeightWarmup(1, AllReduce(), LowPrecisionDecentralized()),
        WeightWarmup(0, AllReduce(), Decentralized()),
        DiLoCo(2, codec=MinMax8()),
    )
    for layout in NODES[size]:
        before = num_groups()
        state: Any = ours(layout, LocalSGD(2)).gradients().prepare([], dist.group.WORLD)
        assert num_groups() - before == (len(members(layout)) < size), "gradients need no group between nodes"
        if state.node is not None:
            dist.destroy_process_group(state.node)
        for outer in outers:
            before, model = num_groups(), mlp()
            exchange = ours(layout, outer)
            state = exchange.prepare(named(model), dist.group.WORLD)
            assert_as_many_groups_everywhere(num_groups() - before, f"{layout} {outer}")
            for step in range(2):
                push(exchange, state, {}, -1, [step])
                assert_as_many_groups_everywhere(num_groups() - before, f"{layout} {outer} step {step}")
            exchange.agree(state)
            loaded = exchange.prepare(named(model), dist.group.WORLD)
            exchange.load_state_dict(loaded, exchange.state_dict(state))
            assert_as_many_groups_everywhere(num_groups() - before, f"{layout} {outer} loaded")
            exchange.end(loaded)
            exchange.end(state)
            assert num_groups() == before, f"{layout} {outer}"


def node_case_a_leader_that_cannot_load_holds_up_nobody(rank: int, size: int) -> None:
    exchange = ours(NODES[size][0], DiLoCo(2))
    state = exchange.prepare(named(mlp()), dist.group.WORLD)
    saved = exchange.state_dict(state)
    saved["outer"] = {"of": "another method"}
    with pytest.raises(UsageError):  # on the other ranks of its node too
        exchange.load_state_dict(state, saved)
    exchange.end(state)


class RefusesToBegin(LocalSGD):
    """An exchange that cannot begin, on ranks that exchange between nodes."""

    def prepare(self, parameters: Any, group: dist.ProcessGroup) -> Any:
        raise UsageError("these weights cannot be exchanged")


def node_case_weights_that_outer_refuses_are_refused_on_every_rank(rank: int, size: int) -> None:
    for layout in NODES[size]:
        with pytest.raises(UsageError, match="these weights cannot be exchanged"):
            ours(layout, RefusesToBegin(2)).prepare(named(mlp()), dist.group.WORLD)


def node_case_nodes_are_found_by_the_ranks_and_wrong_ones_refused(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(WeightHierarchical(AllReduce(), LocalSGD(2)))
    train(ddp, optimizer, rank, range(3))
    assert ddp.around is not None and ddp.around._state.members == [list(range(size))]
    assert_equal_across_ranks(ddp.module)
    with pytest.raises(UsageError, match=f"each of the {size} ranks"):
        wrapped(ours("ab" * size, LocalSGD(2)))


def node_case_part_of_the_world(rank: int, size: int) -> None:
    ranks = list(range(1, size))
    group = dist.new_group(ranks) if ranks else None
    if rank not in ranks:
        return
    layout = "".join("ab"[i % 2] for i in range(size - 1))
    exchange, model = ours(layout, LocalSGD(1)), mlp()
    state = exchange.prepare(named(model), group)
    exchange.before_step(state, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 + ord(layout[rank - 1]) - ord("a"))
    exchange.after_step(state, 0)
    assert bool((flat(model) == (1.5 if "b" in layout else 1.0)).all())


test_cases = as_tests(globals(), (2, 3), slow=(1, 4, 8), on="threads")


@pytest.mark.parametrize("size", [3, 4, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 5))])
@pytest.mark.parametrize("name", names_of_cases(globals(), "node_case_"))
def test_nodes(name: str, size: int) -> None:
    run_threads(globals()[name], size)
