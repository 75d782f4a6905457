"""Gradients averaged inside nodes and weights exchanged between them, against one process. Letters stand for nodes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.average import Average
from guozhuang.exchange.cast import Cast
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.decentralized import Decentralized
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized
from guozhuang.exchange.node_groups import num_groups
from guozhuang.exchange.warmup import WeightWarmup
from guozhuang.exchange.weight_hierarchical import InsideNodes, WeightHierarchical
from guozhuang.exchange.weights import WeightExchange
from tests.processes.cases import as_tests, assert_equal_across_ranks, mlp, sent_per_step
from tests.processes.test_hierarchical_exchange import members
from tests.processes.test_local_sgd import Mixed, assert_near, bits, loss_of, named, push
from tests.ranks import run_ranks

LR = 0.1
# By number of ranks: even, uneven, one node, one rank per node. Those of 4 always run, so they are few.
LAYOUTS = {1: ("a",), 2: ("aa", "ab"), 3: ("abb", "aaa", "abc"), 4: ("aabb", "aaab"), 5: ("aabbb", "abbac", "abcde")}


def ours(layout: str, outer: WeightExchange[Any]) -> WeightHierarchical:
    return WeightHierarchical(AllReduce(), outer, tuple(layout))


def wrapped(exchange: WeightExchange[Any] | None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9)
    if exchange is not None:
        ddp.use_weight_exchange(exchange, optimizer)
    return ddp, optimizer


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()


class Nodes:
    """A model and an optimizer for each node, in one process."""

    def __init__(self, layout: str) -> None:
        self.members = members(layout)
        self.models = [mlp() for _ in self.members]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9) for m in self.models]

    def step(self, step: int, but: Sequence[int] = (), together: bool = False) -> None:
        """``but`` are ranks without data; ``together`` averages over all ranks."""
        size = sum(len(ranks) for ranks in self.members)
        for model, ranks in zip(self.models, self.members, strict=True):
            model.zero_grad()
            num = size if together else len(ranks)
            for rank in range(size) if together else ranks:
                if rank not in but:
                    (loss_of(model, rank, step) / num).backward()
        for optimizer, ranks in zip(self.optimizers, self.members, strict=True):
            if together or not set(ranks) <= set(but):
                optimizer.step()

    @torch.no_grad()
    def average(self) -> None:
        for same in zip(*[m.parameters() for m in self.models], strict=True):
            mean = torch.stack(list(same)).mean(0)
            for p in same:
                p.copy_(mean)

    def of(self, rank: int) -> nn.Module:
        return next(m for m, ranks in zip(self.models, self.members, strict=True) if rank in ranks)


def everybodys(model: nn.Module) -> list[Tensor]:
    mine = bits(model)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def assert_equal_inside(model: nn.Module, layout: str, apart: bool = False) -> None:
    found = everybodys(model)
    for ranks in members(layout):
        assert all(torch.equal(found[rank], found[ranks[0]]) for rank in ranks), f"{layout}: {ranks} differ"
    firsts = [ranks[0] for ranks in members(layout)]
    if apart:
        assert not any(torch.equal(found[a], found[b]) for a in firsts for b in firsts if a < b), f"{layout}: all agree"


def case_local_sgd_between_nodes(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        for outer in (LocalSGD(3), Every(3, Average()))[: 2 if layout == LAYOUTS[size][0] else 1]:
            (ddp, optimizer), twin = wrapped(ours(layout, outer)), Nodes(layout)
            for step in range(7):
                train(ddp, optimizer, rank, [step])
                twin.step(step)
                if step % 3 == 2:
                    twin.average()
                    assert_equal_across_ranks(ddp.module)
                assert_near(ddp.module, twin.of(rank))
                assert_equal_inside(ddp.module, layout, apart=step % 3 != 2)
            ddp.eval()
            twin.average()
            assert_near(ddp.module, twin.of(rank))
            assert_equal_across_ranks(ddp.module)


def case_diloco_between_nodes(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        exchange = ours(layout, DiLoCo(2, outer_lr=0.7, outer_momentum=0.9))
        (ddp, optimizer), twin = wrapped(exchange), Nodes(layout)
        outer_weights = [p.detach().clone().requires_grad_() for p in mlp().parameters()]
        outer = torch.optim.SGD(outer_weights, lr=0.7, momentum=0.9, nesterov=True)
        for step in range(6):
            train(ddp, optimizer, rank, [step])
            twin.step(step)
            if step % 2:
                for w, *same in zip(outer_weights, *[m.parameters() for m in twin.models], strict=True):
                    w.grad = torch.stack([(w - p).detach() for p in same]).mean(0)
                outer.step()
                with torch.no_grad():
                    for w, *same in zip(outer_weights, *[m.parameters() for m in twin.models], strict=True):
                        for p in same:
                            p.copy_(w)
            assert_near(ddp.module, twin.of(rank), atol=1e-5)
            assert_equal_inside(ddp.module, layout)


def case_any_method_acts_as_among_so_many_ranks(rank: int, size: int) -> None:
    """Both ranks of a node get one batch, whose mean is exact: what happens is then what two ranks alone would do."""
    if size != 4:
        return
    outers: list[WeightExchange[Any]] = [
        LocalSGD(2),
        Every(2, Average()),
        Decentralized("all"),
        Decentralized("shift_one", every=2),
        LowPrecisionDecentralized(),
        DiLoCo(4, num_fragments=2, overlap_steps=1),
        DiLoCo(3, codec=MinMax8()),
    ]
    for layout in ("aabb", "abba"):
        leads = [ranks[0] for ranks in members(layout)]
        node = next(i for i, ranks in enumerate(members(layout)) if rank in ranks)
        pair = dist.new_group(leads)
        for outer in outers if layout == "aabb" else outers[2:3]:
            ddp, optimizer = wrapped(ours(layout, outer))
            alone = mlp()
            its = torch.optim.SGD(alone.parameters(), lr=LR, momentum=0.9)
            state = outer.prepare(named(alone), pair) if rank in leads else None
            for step in range(9):
                train(ddp, optimizer, node, [step])
                if state is not None:
                    its.zero_grad()
                    loss_of(alone, node, step).backward()
                    outer.before_step(state, step)
                    its.step()
                    outer.after_step(state, step)
                    assert torch.equal(bits(alone), bits(ddp.module)), (layout, outer, step)
                assert_equal_inside(ddp.module, layout)
            ddp.eval()
            assert_equal_across_ranks(ddp.module)
            if state is not None:
                outer.agree(state)
                assert torch.equal(bits(alone), bits(ddp.module)), (layout, outer)
                outer.close(state)


def case_one_rank_per_node_is_the_outer_exchange_alone(rank: int, size: int) -> None:
    layout = "abcde"[:size]
    for outer in (LocalSGD(2), Decentralized("shift_one"), DiLoCo(3, codec=MinMax8()), LowPrecisionDecentralized()):
        (ddp, optimizer), (bare, its) = wrapped(ours(layout, outer)), wrapped(outer)
        for step in range(7):
            train(ddp, optimizer, rank, [step])
            train(bare, its, rank, [step])
            assert torch.equal(bits(ddp.module), bits(bare.module)), (outer, step)
        ddp.eval()
        bare.eval()
        assert torch.equal(bits(ddp.module), bits(bare.module)), outer


def case_one_node_is_plain(rank: int, size: int) -> None:
    (ddp, optimizer), (plain, its) = wrapped(ours("a" * size, LocalSGD(2))), wrapped(None)
    for step in range(5):
        train(ddp, optimizer, rank, [step])
        train(plain, its, rank, [step])
        assert torch.equal(bits(ddp.module), bits(plain.module)), step
    ddp.eval()
    assert torch.equal(bits(ddp.module), bits(plain.module))


def case_accumulation(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        (ddp, optimizer), twin = wrapped(ours(layout, LocalSGD(2))), Nodes(layout)
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                (loss_of(ddp, rank, step) / 4).backward()
            (loss_of(ddp, rank, step) * 3 / 4).backward()
            optimizer.step()
            twin.step(step)
            if step % 2:
                twin.average()
            assert_near(ddp.module, twin.of(rank))
            assert_equal_inside(ddp.module, layout)


def case_narrow_numbers_inside(rank: int, size: int) -> None:
    layout = LAYOUTS[size][0]
    exchange = WeightHierarchical(Cast(torch.bfloat16, AllReduce()), LocalSGD(2), tuple(layout))
    (ddp, optimizer), twin = wrapped(exchange), Nodes(layout)
    for step in range(4):
        train(ddp, optimizer, rank, [step])
        twin.step(step)
        if step % 2:
            twin.average()
        assert_near(ddp.module, twin.of(rank), atol=2e-2)
        assert_equal_inside(ddp.module, layout)


def case_gradients_are_averaged_over_all_ranks_first(rank: int, size: int) -> None:
    outers = (
        LocalSGD(2, start_step=3),
        WeightWarmup(3, AllReduce(), LocalSGD(2)),
        WeightWarmup(3, Hierarchical(AllReduce(), AllReduce(), tuple(LAYOUTS[size][0])), LocalSGD(2)),
    )
    for layout, some in zip(LAYOUTS[size], (outers, outers[:1], outers[1:2], outers[:1]), strict=False):
        for outer in some:
            (ddp, optimizer), twin = wrapped(ours(layout, outer)), Nodes(layout)
            for step in range(7):
                train(ddp, optimizer, rank, [step])
                twin.step(step, together=step < 3)
                if step in (4, 6):
                    twin.average()
                assert_near(ddp.module, twin.of(rank), atol=1e-5)
                assert_equal_inside(ddp.module, layout, apart=step in (3, 5))


def case_several_backwards_of_a_step_are_one_step(rank: int, size: int) -> None:
    """Averages over all ranks end where the optimizer's steps say so, and what follows a warm-up counts from its end."""
    layout = LAYOUTS[size][0]
    late = WeightWarmup(2, AllReduce(), ours(layout, LocalSGD(2, start_step=1)))
    for exchange, parts in ((ours(layout, LocalSGD(2, start_step=3)), (0.25, 0.75)), (late, (1.0,))):
        (ddp, optimizer), twin = wrapped(exchange), Nodes(layout)
        for step in range(7):
            optimizer.zero_grad()
            for part in parts:
                (loss_of(ddp, rank, step) * part).backward()
            optimizer.step()
            twin.step(step, together=step < 3)
            if step in (4, 6):
                twin.average()
            assert_near(ddp.module, twin.of(rank), atol=1e-5)
            assert_equal_inside(ddp.module, layout, apart=step in (3, 5))


def case_uneven_inputs(rank: int, size: int) -> None:
    """The leader of a node ends first, whole nodes end before others; every second step is a mean."""
    for lengths in ([2, 5, 3, 7, 4], [6, 1, 1, 2, 1], [0, 2, 4, 5, 3]):
        longest = max(lengths[:size])
        for layout in LAYOUTS[size][: 1 if size == 4 and lengths[0] != 2 else 3]:
            for start in (0, 4) if layout == LAYOUTS[size][0] and lengths[0] == 2 else (0,):
                (ddp, optimizer), twin = wrapped(ours(layout, LocalSGD(2, start_step=start))), Nodes(layout)
                with ddp.join():
                    train(ddp, optimizer, rank, range(lengths[rank]))
                for step in range(longest):
                    twin.step(step, but=[r for r in range(size) if lengths[r] <= step], together=step < start)
                    if step >= start and (step + 1 - start) % 2 == 0:
                        twin.average()
                twin.average()
                assert_equal_across_ranks(ddp.module)
                assert_near(ddp.module, twin.of(rank), atol=1e-5)


def case_bits_stay_equal_inside_a_node_whose_leader_has_no_data(rank: int, size: int) -> None:
    layout = LAYOUTS[size][0]
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
        assert_equal_inside(model, layout)
        expected = torch.cat([p.detach().flatten() for p in mlp().parameters()]) + step + 1
        torch.testing.assert_close(bits(model), expected)


def saved_of(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    exchange = ddp.exchange_state_dict()
    return copy.deepcopy((exchange, ddp.state_dict(), optimizer.state_dict()))


def case_a_checkpoint_goes_on_exactly(rank: int, size: int) -> None:
    warm = WeightWarmup(2, AllReduce(), DiLoCo(3))
    outers = (DiLoCo(3, codec=MinMax8()), warm, LowPrecisionDecentralized(), LocalSGD(3))
    for layout in LAYOUTS[size][:3]:
        for outer in outers[: (3 if size == 4 else 4) if layout == LAYOUTS[size][0] else 1]:
            ddp, optimizer = wrapped(ours(layout, outer))
            train(ddp, optimizer, rank, range(4))
            saved = saved_of(ddp, optimizer)
            train(ddp, optimizer, rank, range(4, 8))
            again, its = wrapped(ours(layout, outer))
            again.load_state_dict(saved[1])
            its.load_state_dict(saved[2])
            again.load_exchange_state_dict(saved[0])
            train(again, its, rank, range(4, 8))
            assert torch.equal(bits(again.module), bits(ddp.module)), (layout, outer)


def case_a_checkpoint_of_other_nodes(rank: int, size: int) -> None:
    for outer, fits in ((LocalSGD(3), True), (DiLoCo(3), False)):
        ddp, optimizer = wrapped(ours("a" * size, outer))
        train(ddp, optimizer, rank, range(2))
        saved = saved_of(ddp, optimizer)
        again, its = wrapped(ours("abcde"[:size], outer))
        again.load_state_dict(saved[1])
        if fits or size == 1:
            again.load_exchange_state_dict(saved[0])
            train(again, its, rank, range(4))
        else:
            with pytest.raises(UsageError, match="on other nodes"):
                again.load_exchange_state_dict(saved[0])


def case_every_dtype_and_shape(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        exchange, model = ours(layout, LocalSGD(1)), Mixed()
        state = exchange.prepare(named(model), dist.group.WORLD)
        firsts = [ranks[0] for ranks in members(layout)]
        mine = next(ranks[0] for ranks in members(layout) if rank in ranks)
        exchange.before_step(state, 0)
        push(model, mine, 0)
        exchange.after_step(state, 0)
        others = [Mixed() for _ in firsts]
        for first, twin in zip(firsts, others, strict=True):
            push(twin, first, 0)
        for name, p in model.named_parameters():
            same = [dict(twin.named_parameters())[name].detach() for twin in others]
            mean = sum(q.to(torch.promote_types(p.dtype, torch.float32)) for q in same) / len(firsts)
            torch.testing.assert_close(p.detach(), mean.to(p.dtype), msg=lambda text, n=name: f"{n}: {text}")


def assert_as_many_groups_everywhere(made: int, what: str) -> None:
    here = torch.tensor([made, -made])
    dist.all_reduce(here, dist.ReduceOp.MAX)
    assert here[0] == -here[1], f"{what}: {-int(here[1])} to {int(here[0])}"


def case_groups_are_as_many_everywhere_and_end(rank: int, size: int) -> None:
    """Also past a warm-up, at whose end the leaders make groups, and where a state past it is loaded."""
    outers = (
        Decentralized(),
        WeightWarmup(1, AllReduce(), LowPrecisionDecentralized()),
        WeightWarmup(0, AllReduce(), Decentralized()),
        DiLoCo(2, codec=MinMax8()),
    )
    for layout in LAYOUTS[size]:
        for outer in outers[: 4 if layout == LAYOUTS[size][0] else 2]:
            before, model = num_groups(), mlp()
            exchange = ours(layout, outer)
            state = exchange.prepare(named(model), dist.group.WORLD)
            assert_as_many_groups_everywhere(num_groups() - before, f"{layout} {outer}")
            for step in range(2):
                exchange.before_step(state, step)
                exchange.after_step(state, step)
                assert_as_many_groups_everywhere(num_groups() - before, f"{layout} {outer} step {step}")
            exchange.agree(state)
            loaded = exchange.prepare(named(model), dist.group.WORLD)
            exchange.load_state_dict(loaded, exchange.state_dict(state))
            assert_as_many_groups_everywhere(num_groups() - before, f"{layout} {outer} loaded")
            exchange.end(loaded)
            exchange.end(state)
            assert num_groups() == before, f"{layout} {outer}"


def case_gradients_need_no_group_between_nodes(rank: int, size: int) -> None:
    for layout in LAYOUTS[size]:
        before = num_groups()
        state = ours(layout, LocalSGD(2)).gradients().prepare([], dist.group.WORLD)
        assert num_groups() - before == (len(members(layout)) < size), layout
        if state.node is not None:
            dist.destroy_process_group(state.node)


def case_a_leader_that_cannot_load_holds_up_nobody(rank: int, size: int) -> None:
    layout = LAYOUTS[size][0]
    exchange = ours(layout, DiLoCo(2))
    state = exchange.prepare(named(mlp()), dist.group.WORLD)
    saved = exchange.state_dict(state)
    saved["outer"] = {"of": "another method"}
    if state.acts:
        with pytest.raises(UsageError):
            exchange.load_state_dict(state, saved)
    else:
        exchange.load_state_dict(state, saved)
    exchange.end(state)


def case_nodes_are_found_by_the_ranks(rank: int, size: int) -> None:
    exchange = WeightHierarchical(AllReduce(), LocalSGD(2))
    ddp, optimizer = wrapped(exchange)
    train(ddp, optimizer, rank, range(3))
    assert ddp.around is not None and ddp.around._state.members == [list(range(size))]
    assert_equal_across_ranks(ddp.module)


def case_wrong_uses_are_refused(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match="plainly inside a node"):
        WeightHierarchical(Compressed(MinMax8()), LocalSGD(2))
    with pytest.raises(UsageError, match=r"Hierarchical\(inner, outer\) is for two exchanges of gradients"):
        WeightHierarchical(AllReduce(), AllReduce())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="WeightHierarchical"):
        Hierarchical(AllReduce(), LocalSGD(2))  # type: ignore[arg-type]
    for outer in (AsyncModelAverage(), WeightWarmup(3, AllReduce(), AsyncModelAverage())):
        with pytest.raises(UsageError, match="overlap_steps"):
            WeightHierarchical(AllReduce(), outer)
    once = WeightHierarchical(AllReduce(), LocalSGD(2))
    for each in (once, WeightWarmup(3, AllReduce(), once)):
        with pytest.raises(UsageError, match="two levels"):
            WeightHierarchical(AllReduce(), each)
        with pytest.raises(UsageError, match="put Every inside"):
            Every(3, each)
    with pytest.raises(UsageError, match=f"each of the {size} ranks"):
        wrapped(ours("ab" * size, LocalSGD(2)))
    exchange = ours(LAYOUTS[size][0], LocalSGD(2))
    state = exchange.prepare(named(mlp()), dist.group.WORLD)
    with pytest.raises(UsageError, match="no state of WeightHierarchical"):
        exchange.load_state_dict(state, {"global": {}})


def case_part_of_the_world(rank: int, size: int) -> None:
    """The last case: rank 0 is in fewer groups then."""
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
    assert bool((bits(model) == (1.5 if "b" in layout else 1.0)).all())


test_cases = as_tests(globals(), (4,), slow=sorted(LAYOUTS.keys() - {4}))


def counted(rank: int, size: int, layout: str, outer: WeightExchange[Any]) -> tuple[float, float]:
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    sent = sent_per_step(ours(layout, outer), named(model), 4)
    dist.barrier()  # a rank that leaves takes its sockets, and what they have counted, from the others
    return sent, float(sum(p.numel() for p in model.parameters()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize("layout", ["aaab", *(pytest.param(each, marks=pytest.mark.slow) for each in ("aabb", "abcd"))])
def test_leaders_send_what_outer_says_and_their_node_the_weights_once_a_round(layout: str) -> None:
    outer = LocalSGD(2)
    for rank, (sent, n) in enumerate(run_ranks(counted, 4, layout, outer)):
        here = next(ranks for ranks in members(layout) if rank in ranks)
        between = outer.traffic(int(n), 4, len(members(layout))) if rank == here[0] else 0
        # A broadcast inside a node of two is one message; of three, two, sent by the first or by one each.
        least = {1: 0, 2: 1, 3: 1}[len(here)] if rank == here[0] else 0
        most = {1: 0, 2: 1, 3: 2}[len(here)] if rank == here[0] else len(here) - 2
        assert between + least * 4 * n / 2 <= sent <= between + most * 4 * n / 2 + 20_000, (layout, rank)


def test_what_it_says_that_it_sends() -> None:
    assert ours("abcd", LocalSGD(2)).traffic(100, 4, 4) == LocalSGD(2).traffic(100, 4, 4)
    assert ours("aabb", LocalSGD(2)).traffic(100, 4, 4) is None
    assert WeightHierarchical(AllReduce(), LocalSGD(2)).traffic(100, 4, 4) is None
    assert InsideNodes(AllReduce(), LocalSGD(2), "aabb").traffic(100, 4, 4) == AllReduce().traffic(100, 4, 2)
    assert InsideNodes(AllReduce(), LocalSGD(2), "abcd").traffic(100, 4, 4) == 0
    assert InsideNodes(AllReduce(), LocalSGD(2), "aaab").traffic(100, 4, 4) is None
