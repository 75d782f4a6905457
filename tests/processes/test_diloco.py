"""DiLoCo on real ranks, against one process that plays all of them with torch's own SGD outside."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.fragments import cut
from guozhuang.exchange.weight_lane import as_real
from guozhuang.lab.measure import tcp_sent_bytes
from tests.processes.cases import as_tests, assert_equal_across_ranks, mlp, sent_per_step
from tests.processes.test_local_sgd import LR, Mixed, Ranks, assert_near, bits, loss_of, named, push, said, train
from tests.ranks import run_ranks


class Outer:
    """Global weights and torch's optimizer on them, and the models of all ranks; a few lines of the papers."""

    def __init__(self, exchange: DiLoCo, size: int, made: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.exchange, self.ranks = exchange, Ranks(size, made)
        self.weights = [p.detach().clone().requires_grad_() for p in self.ranks.models[0].parameters()]
        self.optimizer = torch.optim.SGD(
            self.weights,
            lr=exchange.outer_lr,
            momentum=exchange.outer_momentum,
            nesterov=exchange.outer_momentum > 0,
        )
        names = [name for name, _ in named(self.ranks.models[0])]
        self.fragments = [
            [(names.index(piece.parameter), piece) for piece in pieces]
            for pieces in cut(as_real(named(self.ranks.models[0])), exchange.num_fragments)
        ]
        self.momenta = [torch.zeros_like(w) for w in self.weights]
        self.under_way: dict[int, tuple[int, list[Tensor]]] = {}
        self.sent: dict[tuple[int, int, int], Tensor] = {}  # by rank, fragment and parameter

    @torch.no_grad()
    def difference(self, fragment: int) -> list[Tensor]:
        found = []
        for at, piece in self.fragments[fragment]:
            locals_ = torch.stack([piece.of(list(m.parameters())[at].detach()) for m in self.ranks.models])
            found.append((piece.of(self.weights[at]) - locals_).mean(0))
        return found

    def outer_step(self, fragment: int, differences: list[Tensor], kept: float) -> None:
        """One step of a torch optimizer of the fragment's own, with the momentum that it had."""
        pieces = [
            piece.of(self.weights[at].detach()).clone().requires_grad_() for at, piece in self.fragments[fragment]
        ]
        e = self.exchange
        optimizer = torch.optim.SGD(pieces, lr=e.outer_lr, momentum=e.outer_momentum, nesterov=e.outer_momentum > 0)
        for own, difference, (at, piece) in zip(pieces, differences, self.fragments[fragment], strict=True):
            own.grad = difference
            if e.outer_momentum > 0:
                optimizer.state[own]["momentum_buffer"] = piece.of(self.momenta[at]).clone()
        optimizer.step()
        with torch.no_grad():
            for own, (at, piece) in zip(pieces, self.fragments[fragment], strict=True):
                piece.of(self.weights[at]).copy_(own)
                if e.outer_momentum > 0:
                    piece.of(self.momenta[at]).copy_(optimizer.state[own]["momentum_buffer"])
                for rank, model in enumerate(self.ranks.models):
                    local = piece.of(list(model.parameters())[at])
                    if e.keep_progress:
                        local.copy_(local + (own - self.sent[rank, fragment, at]))
                    else:
                        local.copy_(kept * local + (1 - kept) * own)

    def step(self, step: int, but: Sequence[int] = ()) -> None:
        self.ranks.step(step, but=but)
        e = self.exchange
        kept = e.mixing if e.mixing is not None else 0.5 if e.overlap_steps else 0.0
        for fragment, (since, differences) in list(self.under_way.items()):
            if step == since + e.overlap_steps:
                self.outer_step(fragment, differences, kept)
                del self.under_way[fragment]
        for fragment in range(e.num_fragments):
            if (step + 1) % e.every == (fragment + 1) * e.every // e.num_fragments % e.every:
                if e.overlap_steps:
                    self.under_way[fragment] = step, self.difference(fragment)
                    for rank, model in enumerate(self.ranks.models):
                        for at, piece in self.fragments[fragment]:
                            sent = piece.of(list(model.parameters())[at].detach())
                            self.sent[rank, fragment, at] = sent.clone()
                else:
                    self.outer_step(fragment, self.difference(fragment), kept)


PLANS = (
    DiLoCo(3),
    DiLoCo(4, outer_lr=0.5, outer_momentum=0.0),
    DiLoCo(4, num_fragments=2, overlap_steps=1),
    DiLoCo(5, num_fragments=3, overlap_steps=4, mixing=0.25, outer_momentum=0.5),
    DiLoCo(4, num_fragments=4),
    DiLoCo(5, num_fragments=2, overlap_steps=2, keep_progress=True, outer_lr=1.0, outer_momentum=0.0),
    DiLoCo(4, overlap_steps=3, keep_progress=True, outer_momentum=0.5),
)


def case_it_is_what_the_papers_say(rank: int, size: int) -> None:
    for exchange in PLANS:
        made = torch.optim.SGD if size == 2 else torch.optim.AdamW
        ours, twin = mlp(), Outer(exchange, size, made)
        optimizer = made(ours.parameters(), lr=LR if made is torch.optim.SGD else 0.01)
        for group in [g for o in twin.ranks.optimizers for g in o.param_groups]:
            group["lr"] = optimizer.param_groups[0]["lr"]
        state = exchange.prepare(named(ours), dist.group.WORLD)
        for step in range(14):
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step)
            assert_near(ours, twin.ranks.models[rank], atol=1e-4)
        exchange.agree(state)
        assert_equal_across_ranks(ours)


def case_the_outer_step_is_that_of_torch_bit_for_bit(rank: int, size: int) -> None:
    exchange, ours = DiLoCo(2), mlp()
    inner = torch.optim.SGD(ours.parameters(), lr=LR)
    state = exchange.prepare(named(ours), dist.group.WORLD)
    flat = bits(ours).clone().requires_grad_()
    outer = torch.optim.SGD([flat], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(9):
        inner.zero_grad()
        loss_of(ours, rank, step).backward()
        exchange.before_step(state, step)
        inner.step()
        if step % 2 == 1:
            flat.grad = (flat.detach() - bits(ours)) * (1 / size)
            dist.all_reduce(flat.grad)
            outer.step()
        exchange.after_step(state, step)
        if step % 2 == 1:
            assert torch.equal(bits(ours), flat)
    [part] = state.fragments[0].parts
    assert torch.equal(part.momentum, outer.state[flat]["momentum_buffer"])


def case_lr_one_without_momentum_is_local_sgd(rank: int, size: int) -> None:
    exchange, ours, twin = DiLoCo(3, outer_lr=1.0, outer_momentum=0.0), mlp(), Ranks(size)
    optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
    state = exchange.prepare(named(ours), dist.group.WORLD)
    for step in range(7):
        train(exchange, state, ours, optimizer, rank, [step])
        twin.step(step)
        if step % 3 == 2:
            twin.average()
        assert_near(ours, twin.models[rank])
    assert state.fragments[0].parts[0].momentum is None  # no memory for what is not used


def case_agreement(rank: int, size: int) -> None:
    """The mean leaves the outer steps alone; "outer" makes them; right after an outer step there is nothing to do."""
    for by in ("mean", "outer"):
        exchange, ours = DiLoCo(4, num_fragments=2, overlap_steps=1, agree_by=by), mlp()
        twin = Outer(exchange, size)
        optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        for step in range(8):  # the second fragment is under way
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step)
        exchange.agree(state)
        for fragment, (_, differences) in twin.under_way.items():
            twin.outer_step(fragment, differences, 0.5)
        twin.under_way.clear()
        for fragment in range(2):
            if by == "outer":
                twin.outer_step(fragment, twin.difference(fragment), 0.0)
        if by == "mean":
            twin.ranks.average()
        assert_near(ours, twin.ranks.models[rank], atol=1e-5)
        assert_equal_across_ranks(ours)
        kept = exchange.state_dict(state)
        same = all(torch.equal(p, kept["global"][name]) for name, p in ours.named_parameters())
        assert same == (by == "outer")
        for step in range(8, 12):
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step)
        assert_near(ours, twin.ranks.models[rank], atol=1e-4)
    exchange, ours = DiLoCo(2), mlp()
    state = exchange.prepare(named(ours), dist.group.WORLD)
    train(exchange, state, ours, torch.optim.SGD(ours.parameters(), lr=LR), rank, range(2))
    before = tcp_sent_bytes()
    exchange.agree(state)
    assert tcp_sent_bytes() == before


def case_uneven_steps(rank: int, size: int) -> None:
    exchange, ours = DiLoCo(2), mlp()
    twin, optimizer = Outer(exchange, size), torch.optim.SGD(ours.parameters(), lr=LR)
    state = exchange.prepare(named(ours), dist.group.WORLD)
    for step in range(8):
        train(exchange, state, ours, optimizer, rank, [step], shadows=rank == 0 and step > 2)
        twin.step(step, but=[0] if step > 2 else [])
        assert_near(ours, twin.ranks.models[rank], atol=1e-4)


def resumed(exchange: DiLoCo, rank: int, other: DiLoCo | None = None) -> tuple[Tensor, Tensor]:
    """The weights after 9 steps with an agreement after the fifth: in one go, and through a checkpoint."""
    ends = []
    for interrupted in (False, True):
        model, now = mlp(), exchange
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = now.prepare(named(model), dist.group.WORLD)
        train(now, state, model, optimizer, rank, range(5))
        now.agree(state)
        if interrupted:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), now.state_dict(state)))
            model, now = mlp(seed=9), other or exchange
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            state = now.prepare(named(model), dist.group.WORLD)
            now.load_state_dict(state, saved[2])
        train(now, state, model, optimizer, rank, range(5, 9))
        now.agree(state)
        ends.append(bits(model))
        now.close(state)
    return ends[0], ends[1]


def case_resume_is_exact(rank: int, size: int) -> None:
    plans = [
        DiLoCo(3),
        DiLoCo(4, num_fragments=2, overlap_steps=2),
        DiLoCo(4, num_fragments=2, overlap_steps=2, agree_by="outer"),
        DiLoCo(3, num_fragments=2, codec=Dithering(4, block=8), error_feedback=True),
    ]
    for exchange in plans:
        straight, again = resumed(exchange, rank)
        assert torch.equal(straight, again), exchange
    straight, again = resumed(DiLoCo(4), rank, DiLoCo(4, num_fragments=1, overlap_steps=0, mixing=0.0))
    assert torch.equal(straight, again)


def case_a_checkpoint_fits_another_number_of_fragments(rank: int, size: int) -> None:
    one, three = DiLoCo(3, num_fragments=1), DiLoCo(3, num_fragments=3)
    model = mlp()
    state = one.prepare(named(model), dist.group.WORLD)
    train(one, state, model, torch.optim.SGD(model.parameters(), lr=LR), rank, range(4))
    one.agree(state)
    saved = one.state_dict(state)
    fresh = three.prepare(named(model), dist.group.WORLD)
    three.load_state_dict(fresh, saved)
    again = three.state_dict(fresh)
    for key in ("global", "momentum"):
        assert again[key].keys() == dict(named(model)).keys()
        assert all(torch.equal(again[key][name], saved[key][name]) for name in again[key])


def case_what_does_not_fit_is_refused(rank: int, size: int) -> None:
    exchange, model = DiLoCo(2), mlp()
    state = exchange.prepare(named(model), dist.group.WORLD)
    with pytest.raises(UsageError, match="no state of DiLoCo"):
        exchange.load_state_dict(state, {})
    saved = exchange.state_dict(state)
    with pytest.raises(UsageError, match="of other parameters"):
        exchange.load_state_dict(state, saved | {"global": {"0.weight": torch.zeros(2)}})
    plain = DiLoCo(2, outer_momentum=0.0)
    with pytest.raises(UsageError, match="momentum"):
        exchange.load_state_dict(state, plain.state_dict(plain.prepare(named(model), dist.group.WORLD)))


def case_coded_differences_come_near(rank: int, size: int) -> None:
    for codec, feedback, tolerance in ((MinMax8(), False, 0.02), (Dithering(8, block=8), True, 0.05)):
        exchange = DiLoCo(2, num_fragments=2, overlap_steps=1, codec=codec, error_feedback=feedback)
        ours, twin = mlp(), Outer(exchange, size)
        optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        start = bits(ours).clone()
        for step in range(4):
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step)
        exchange.agree(state)
        assert_equal_across_ranks(ours)
        for fragment, (_, differences) in twin.under_way.items():
            twin.outer_step(fragment, differences, 0.5)
        twin.ranks.average()
        wanted = bits(twin.ranks.models[rank])
        assert float((bits(ours) - wanted).abs().max()) < tolerance * float((wanted - start).abs().max()) + 1e-6
        if size > 1:
            assert not torch.equal(bits(ours), wanted)


def case_every_dtype_and_shape(rank: int, size: int) -> None:
    """With lr 1 and no momentum every weight ends in the mean, rounded once; nothing drifts while nobody steps."""
    for exchange in (DiLoCo(2, outer_lr=1.0, outer_momentum=0.0, num_fragments=2), DiLoCo(4, num_fragments=3)):
        ours = Mixed()
        state = exchange.prepare(named(ours), dist.group.WORLD)
        first = copy.deepcopy(ours)
        for step in range(4):
            exchange.before_step(state, step)
            exchange.after_step(state, step)
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), first.parameters(), strict=True))
        if exchange.outer_momentum:
            continue
        push(ours, rank, 0)
        for step in range(4, 6):
            exchange.before_step(state, step)
            exchange.after_step(state, step)
        others = [Mixed() for _ in range(size)]
        for other, twin in enumerate(others):
            push(twin, other, 0)
        for name, p in ours.named_parameters():
            same = [dict(twin.named_parameters())[name].detach() for twin in others]
            mean = sum(q.to(torch.promote_types(p.dtype, torch.float32)) for q in same) / size
            assert isinstance(mean, Tensor)
            tolerance = {"rtol": 1e-2, "atol": 1e-2} if p.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(p.detach().to(mean.dtype), mean, **tolerance)


def case_what_is_not_finite_is_said(rank: int, size: int) -> None:
    for codec in (None, MinMax8()):
        exchange, ours = DiLoCo(1, codec=codec), mlp()
        state = exchange.prepare(named(ours), dist.group.WORLD)
        exchange.before_step(state, 0)
        if rank == size - 1:
            with torch.no_grad():
                ours[2].weight[0, 1] = math.inf
        with said() as texts:
            exchange.after_step(state, 0)
        assert not bool(ours[2].weight[0, 1].isfinite())
        if rank == size - 1:
            assert "'2.weight'" in texts[0] and f"rank {rank}" in texts[0] and "NaN" in texts[0], texts
        else:
            assert not texts


def case_other_collectives_do_not_meet_it(rank: int, size: int) -> None:
    """While a fragment travels the program sends what it likes, in the group that was handed over."""
    for codec in (None, MinMax8()):
        exchange, ours = DiLoCo(4, num_fragments=4, overlap_steps=3, codec=codec), mlp()
        optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        for step in range(9):
            train(exchange, state, ours, optimizer, rank, [step])
            total = torch.full((3,), float(rank))
            dist.all_reduce(total)
            assert float(total[0]) == size * (size - 1) / 2
        exchange.agree(state)
        assert_equal_across_ranks(ours)


def steps_go_on_while_a_fragment_travels(rank: int, size: int) -> None:
    """Rank 0 sends, and makes a step more, before the others come to send theirs."""
    for codec in (None, MinMax8()):
        exchange, ours = DiLoCo(3, overlap_steps=2, codec=codec), mlp()
        optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        train(exchange, state, ours, optimizer, rank, range(4 if rank == 0 else 2))
        dist.barrier()
        train(exchange, state, ours, optimizer, rank, range(4 if rank == 0 else 2, 5))
        exchange.agree(state)
        assert_equal_across_ranks(ours)


def case_under_the_wrapper(rank: int, size: int) -> None:
    exchange = DiLoCo(2, num_fragments=2, overlap_steps=1)
    ddp, twin = DistributedDataParallel(mlp()), Outer(exchange, size)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    ddp.use_weight_exchange(exchange, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        twin.step(step)
        assert_near(ddp.module, twin.ranks.models[rank], atol=1e-4)
    ddp.eval()
    assert_equal_across_ranks(ddp.module)
    ddp.train()
    with ddp.join():
        for step in range(5, 7 + rank):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
    assert_equal_across_ranks(ddp.module)


test_cases = as_tests(globals(), (3,), slow=(1, 2, 4, 8))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_steps_go_on_while_a_fragment_travels(num_ranks: int) -> None:
    run_ranks(steps_go_on_while_a_fragment_travels, num_ranks)


def counted(rank: int, size: int) -> list[tuple[float, float | None]]:
    model: Any = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    num_elements, found = sum(p.numel() for p in model.parameters()), []
    for codec in (None, MinMax8(), Dithering(4)):
        exchange = DiLoCo(4, num_fragments=2, codec=codec)
        found.append((sent_per_step(exchange, named(model), 4), exchange.traffic(num_elements, 4, size)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_sends_what_it_says(num_ranks: int) -> None:
    for found in run_ranks(counted, num_ranks):
        for sent, told in found:
            assert told is not None and 0.99 * told <= sent <= told * 1.02 + 4096  # fragments are not quite equal


def lost(rank: int, size: int) -> str:
    exchange, model = DiLoCo(2, overlap_steps=1), mlp()
    state = exchange.prepare(named(model), dist.group.WORLD)
    if rank == 1:
        return "ended"
    try:
        train(exchange, state, model, torch.optim.SGD(model.parameters(), lr=LR), rank, range(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_rank_that_does_not_come_is_named() -> None:
    results = run_ranks(lost, 2, collect_errors=True, group_timeout_s=3.0)
    assert results[0].startswith("WorldError") and "other ranks (1)" in results[0], results[0]
