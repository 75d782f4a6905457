"""Training with the optimizer divided equals training in one process, whatever a script does around the step.

Every case runs over shared memory, where the weights exist once, and where they travel: on ranks that are threads, over gloo,
and over shared memory.
"""

from __future__ import annotations

import copy
import gc
import importlib
import io
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from guozhuang.errors import UsageError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.sharding import ShardedOptimizer, clip_grad_norm_, shard
from guozhuang.sharding.averaged import averaged_gradients
from guozhuang.sharding.carrier import Carrier
from tests.processes.cases import (
    adamw,
    assert_equal_across_ranks,
    batch,
    halve_in_other_memory,
    mean_loss,
    mlp,
    momentum,
    names_of_cases,
    results_of_cases,
    run_cases,
    seeded,
    twin_of,
)
from tests.processes.test_equivalence import TinyBert
from tests.threads.ranks import run_threads

STEPS = 6
Make = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach maximize": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, maximize=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Both:
    """A divided model and the boring twin that one process trains on the joined batch."""

    def __init__(self, make: Make = adamw, model: nn.Module | None = None, **options: Any) -> None:
        bare = mlp() if model is None else model
        self.twin = twin_of(bare)
        self.twin_optimizer = make(self.twin.parameters())
        self.inner = make(bare.parameters())
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        if PLAIN_GATHER:
            options = {"share_weights": False, **options}
        self.model, self.optimizer = shard(bare, self.inner, **options)

    def backward(self, step: int, scale: float = 1.0) -> None:
        (self.model(batch(self.rank, step)).pow(2).mean() * scale).backward()
        (mean_loss(self.twin, self.world_size, step) * scale).backward()

    def step(self, step: int, **options: Any) -> None:
        self.backward(step)
        self.update(**options)

    def update(self, **options: Any) -> None:
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
            optimizer.zero_grad(**options)

    def check(self, atol: float = 1e-6) -> None:
        for (name, found), (_, expected) in zip(
            self.model.named_parameters(), self.twin.named_parameters(), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
        assert_equal_across_ranks(self.model)


PLAIN_GATHER = False  # set by without_shared_weights


# ---- the step -------------------------------------------------------------------------------------------------------------


def case_gradients_are_given_other_memory(rank: int, world_size: int) -> None:
    """``p.grad.data = x`` before a step, and between the backwards of one."""
    both = Both(momentum)
    for step in range(8):
        both.backward(step)
        if step % 2:
            for model in (both.model, both.twin):
                halve_in_other_memory(model)
            both.backward(10 + step)
        for model in (both.model, both.twin):
            halve_in_other_memory(model)
        both.update(set_to_none=step % 3 == 0)
        both.check()


def case_exchanges_of_gradients_average_what_a_rank_updates(rank: int, world_size: int) -> None:
    """An exact one equals one process, a code is off by its error, and feedback goes on from a checkpoint."""
    both = Both(momentum, exchange=AllReduce())
    for step in range(STEPS):
        both.step(step)
        both.check()
    both = Both(momentum, exchange=Compressed(MinMax8()))
    for step in range(STEPS):
        both.step(step)
    both.check(atol=0.02)
    assert any(not torch.equal(p, q) for p, q in zip(both.model.parameters(), both.twin.parameters(), strict=True))
    first, again = (Both(momentum, exchange=Compressed(Dithering(bits=4), error_feedback=True)) for _ in range(2))
    for step in range(3):
        first.step(step)
    again.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    again.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    feedback = copy.deepcopy(first.optimizer.exchange_state_dict())
    again.optimizer.load_exchange_state_dict(feedback)
    for step in range(3, 5):
        for each in (first, again):
            each.step(step)
    for p, q in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(UsageError, match="saved with an exchange"):
        Both().optimizer.load_exchange_state_dict(feedback)
    with pytest.raises(UsageError, match="takes a GradientExchange"):
        Both(exchange=LocalSGD(2))


def case_every_optimizer_equals_one_process(rank: int, world_size: int) -> None:
    for name, make in OPTIMIZERS.items():
        both = Both(make)
        for step in range(STEPS):
            both.step(step)
        try:
            # RMSprop's centred variance is a difference of near equals: rounding shows earlier than elsewhere.
            both.check(atol=2e-6 if name == "rmsprop" else 1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def case_the_losses_are_those_of_torch_ddp(rank: int, world_size: int) -> None:
    for make in (adamw, momentum, OPTIMIZERS["adamw fused"]):
        bare = mlp()
        ddp = nn.parallel.DistributedDataParallel(twin_of(bare))
        ddp_optimizer = make(ddp.parameters())
        model, optimizer = shard(bare, make(bare.parameters()), share_weights=not PLAIN_GATHER)
        for step in range(20):
            losses = []
            for some, its in ((model, optimizer), (ddp, ddp_optimizer)):
                loss = some(batch(rank, step)).pow(2).mean()
                loss.backward()
                its.step()
                its.zero_grad()
                losses.append(loss.item())
            assert abs(losses[0] - losses[1]) < 1e-6
        assert_equal_across_ranks(model)


def case_bert_trains_as_under_torch_ddp(rank: int, world_size: int) -> None:
    bare = TinyBert()
    ddp = nn.parallel.DistributedDataParallel(twin_of(bare))
    ddp_optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    inner = torch.optim.AdamW(bare.parameters(), lr=1e-3, fused=True)
    model, optimizer = shard(bare, inner, share_weights=not PLAIN_GATHER)
    for step in range(20):
        torch.manual_seed(100 * step + rank)
        ids, labels = torch.randint(0, 97, (4, 12)), torch.randint(0, 4, (4,))
        losses = []
        for some, its in ((model, optimizer), (ddp, ddp_optimizer)):
            loss = nn.functional.cross_entropy(some(ids, 0), labels)
            loss.backward()
            its.step()
            its.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-6, (step, losses)
    assert_equal_across_ranks(model)


def case_weights_arrive_while_the_program_goes_on(rank: int, world_size: int) -> None:
    from guozhuang.sharding.gathered import Arriving

    for overlaps in (True, False):
        model = mlp()
        model, optimizer = shard(model, adamw(model.parameters()), share_weights=False, overlap_gather=overlaps)
        model(batch(rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        arriving = {type(p) is Arriving for p in model.parameters()}
        assert arriving == {overlaps}
        model(batch(rank))
        assert not any(type(p) is Arriving for p in model.parameters())
        optimizer.carrier.close()


def case_a_compiled_model_trains(rank: int, world_size: int) -> None:
    # No bias before the normalization: its gradient is rounding alone.
    both = Both(model=nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    compiled = torch.compile(both.model, backend="aot_eager")
    try:
        for step in range(4):
            compiled(batch(0, step)).pow(2).mean().backward()
            both.twin(batch(0, step)).pow(2).mean().backward()
            both.update()
        both.check(atol=1e-5)
    finally:
        torch._dynamo.reset()


def case_each_rank_keeps_its_part_of_the_state_only(rank: int, world_size: int) -> None:
    both = Both(model=nn.Linear(6, 9999))
    both.step(0)
    kept = sum(v.numel() for s in both.optimizer.inner.state.values() for v in s.values() if v.dim() > 0)
    everything = 2 * sum(p.numel() for p in both.twin.parameters())
    assert everything / world_size * 0.9 < kept < everything / world_size * 1.1
    shown = both.optimizer.state
    seen = sum(s["exp_avg"].numel() for s in shown.values())
    assert abs(seen - everything / 2 / world_size) <= 64
    assert set(shown) <= set(both.model.parameters())


def case_several_backwards_add_up(rank: int, world_size: int) -> None:
    both = Both()
    for step in range(8):
        for part in range(1 + step % 3):  # changes between one and several, so that buckets leave early in vain
            both.backward(10 * step + part, 0.5)
        both.update()
    both.check()


def case_gradients_changed_by_hand_count(rank: int, world_size: int) -> None:
    both = Both()
    for step in range(6):
        both.backward(step)
        with averaged_gradients(both.model) if step > 2 else nullcontext():
            for model in (both.model, both.twin):
                for i, p in enumerate(model.parameters()):
                    if step == 2 and i == 3:
                        p.grad.data.mul_(5.0)  # no version counter tells
                    elif (step + i) % 3 == 0 and step > 2:
                        p.grad.sign_()
                    elif (step + i) % 3 == 1 and step > 2:
                        p.grad = p.grad * p.grad.norm()
        both.update()
    both.check()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda g: g.sign_(),
    "another tensor": lambda g: g * 2,
    "many in place": lambda g: torch._foreach_mul_([g], 0.5)[0],
}


def case_changed_gradients_are_refused_by_name(rank: int, world_size: int) -> None:
    both = Both(momentum)
    for step, change in enumerate(CHANGES.values()):
        for clips_first in (False, True):
            both.backward(step)
            if clips_first:  # the step would use what was clipped, and not see the change
                clip_grad_norm_(both.model.parameters(), 1.0)
            weight = both.model[2].weight
            weight.grad = change(weight.grad)
            with pytest.raises(UsageError, match=r"gradient of 2\.weight was changed .*gz\.averaged_gradients"):
                both.optimizer.step()
            both.optimizer.zero_grad()
            both.twin_optimizer.zero_grad()
        both.step(step)
    for step in range(4):  # dropped gradients are no changed ones
        both.backward(step)
        for model in (both.model, both.twin):
            model.zero_grad(set_to_none=step % 2 == 0)
        both.update()
    both.check()


def case_pytorchs_clipping_is_of_the_mean(rank: int, world_size: int) -> None:
    """Alone, one after the other, by parts, with a given norm, and before further micro-batches."""
    both = Both(momentum)
    functions: list[Callable[[nn.Module], object]] = [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
        lambda m: nn.utils.clip_grad_norm_(list(m[0].parameters()), 0.01, math.inf),
        lambda m: (nn.utils.clip_grad_norm_(m.parameters(), 0.1), nn.utils.clip_grad_value_(m.parameters(), 1e-3)),
        lambda m: nn.utils.clip_grads_with_norm_(
            m.parameters(), 0.01, nn.utils.get_total_norm([p.grad for p in m.parameters()])
        ),
        lambda m: nn.utils.clip_grad_value_(m[0].weight, 1e-3),
    ]
    for step, function in enumerate(functions * 2):
        both.backward(step)
        found, expected = function(both.model), function(both.twin)
        if isinstance(found, Tensor):
            torch.testing.assert_close(found, expected)
        if step >= len(functions):
            both.backward(20 + step)
            function(both.model), function(both.twin)
        both.update()
        both.check()
    both.backward(0)
    clip_grad_norm_(both.model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"gz\.clip_grad_norm_ has averaged the gradients"):
        nn.utils.clip_grad_value_(both.model.parameters(), 0.1)


def case_averages_reach_ranks_without_a_gradient(rank: int, world_size: int) -> None:
    with seeded(3):
        parts = nn.ModuleList(nn.Linear(3, 2) for _ in range(world_size + 1))
    both = Both(momentum, parts)
    for _ in range(3):
        x = torch.ones(2, 3)
        both.model[rank](x).pow(2).mean().backward()
        sum(both.twin[r](x).pow(2).mean() / world_size for r in range(world_size)).backward()
        for model in (both.model, both.twin):
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            with averaged_gradients(model):
                assert [part.weight.grad is not None for part in model] == [True] * world_size + [False]
                for part in model[:-1]:
                    part.weight.grad.mul_(part.weight.grad.norm())
        both.update()
    both.check()


def case_gradients_set_to_zero_or_none_or_assigned(rank: int, world_size: int) -> None:
    both = Both(momentum)
    for step in range(6):
        both.step(step, set_to_none=step % 2 == 0)
    first = next(iter(both.model.parameters())), next(iter(both.twin.parameters()))
    for p in first:
        p.grad = torch.ones_like(p)  # no backward at all
    both.update()
    both.check()


def case_a_step_without_zero_grad_uses_the_same_gradients_again(rank: int, world_size: int) -> None:
    both = Both(momentum)
    for step in range(4):
        both.backward(step)
        for optimizer in (both.optimizer, both.twin_optimizer):
            optimizer.step()
            optimizer.step()
    both.check()


def case_model_zero_grad_drops_gradients_too(rank: int, world_size: int) -> None:
    both = Both()
    both.step(0)
    both.backward(1)
    clip_grad_norm_(both.model.parameters(), 1.0)
    both.model.zero_grad()
    both.twin.zero_grad()
    both.step(2)
    both.step(3)
    both.check()


def case_the_gradient_stays_the_ranks_own(rank: int, world_size: int) -> None:
    both = Both()
    alone = twin_of(both.model)
    alone(batch(rank, 0)).pow(2).mean().backward()
    both.backward(0)
    for p, own in zip(both.model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, own.grad)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.stem = nn.Linear(6, 8)
            self.ways = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])

    def forward(self, x: Tensor, way: int = 0) -> Tensor:
        return self.ways[way](torch.tanh(self.stem(x)))


def case_parameters_unused_on_some_or_all_ranks(rank: int, world_size: int) -> None:
    both = Both(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), Branches())
    for step in range(8):
        ways = [(step // 2 if r == 0 else step) % 2 for r in range(world_size)]  # the third is never used
        both.model(batch(rank, step), ways[rank]).pow(2).mean().backward()
        torch.stack([both.twin(batch(r, step), w).pow(2).mean() for r, w in enumerate(ways)]).mean().backward()
        both.update()
    both.check()
    start = Branches()
    assert torch.equal(both.model.ways[2].weight, start.ways[2].weight), "an unused weight must not decay"
    saved, expected = both.optimizer.state_dict()["state"], both.twin_optimizer.state_dict()["state"]
    assert saved.keys() == expected.keys()
    assert all(saved[i]["step"] == expected[i]["step"] for i in saved)


def case_closure_and_its_value(rank: int, world_size: int) -> None:
    both = Both(momentum)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            both.optimizer.zero_grad()
            loss = both.model(batch(rank, step)).pow(2).mean()
            loss.backward()
            return loss

        def twins(step: int = step) -> Tensor:
            both.twin_optimizer.zero_grad()
            loss = mean_loss(both.twin, world_size, step)
            loss.backward()
            return loss

        assert both.optimizer.step(closure).requires_grad
        both.twin_optimizer.step(twins)
    both.check()


# ---- models ---------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Numbers, empty tensors, tied weights, strides, two dtypes, a frozen part, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.shift = nn.Parameter(torch.tensor([0.5]))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)
            self.fine = nn.Linear(6, 6, dtype=torch.float64)
            self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = torch.tanh(self.second(self.frozen(self.first(x)))) * self.scale + self.shift + self.nothing.sum()
        images = x[:, None, :3].expand(-1, 3, -1)[:, :, :, None].expand(-1, -1, -1, 4)
        y = self.conv(images.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        return torch.cat([self.fine(x.double()).float(), x @ self.turned.t(), y], 1)


def case_odd_parameters(rank: int, world_size: int) -> None:
    for make in (adamw, OPTIMIZERS["nadam"]):
        both = Both(make, Odd())
        for step in range(STEPS):
            both.step(step)
        both.check()
        assert both.model.turned.stride() == both.twin.turned.stride()
        assert both.model.first.weight is both.model.second.weight
        saved, expected = both.optimizer.state_dict()["state"], both.twin_optimizer.state_dict()["state"]
        for i in saved:
            for key in saved[i]:
                assert saved[i][key].shape == expected[i][key].shape
                torch.testing.assert_close(saved[i][key], expected[i][key], rtol=1e-4, atol=1e-6)
        both.optimizer.load_state_dict(copy.deepcopy(expected_of(both)))
        both.step(STEPS)
        both.check()


def expected_of(both: Both) -> dict[str, Any]:
    return both.twin_optimizer.state_dict()


def case_ranks_begin_equal_and_buffers_follow_rank_0(rank: int, world_size: int) -> None:
    with seeded(rank):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model, optimizer = shard(model, adamw(model.parameters()), share_weights=not PLAIN_GATHER)
    assert_equal_across_ranks(model)
    for step in range(3):
        model(batch(rank, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(0, 9))  # equal inputs: what differs now was different before
    means = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(means, model[1].running_mean)
    assert all(torch.equal(mean, means[0]) for mean in means)
    model.eval()
    if rank == 0:
        model(batch(0, 1))  # alone: no collective


def case_synchronized_batch_norm(rank: int, world_size: int) -> None:
    with seeded(1):
        bare = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    twin = twin_of(bare)
    twin_optimizer = momentum(twin.parameters())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(bare)
    model, optimizer = shard(model, momentum(model.parameters()), share_weights=not PLAIN_GATHER)
    for step in range(4):
        model(batch(rank, step)).pow(2).mean().backward()
        twin(torch.cat([batch(r, step) for r in range(world_size)])).pow(2).mean().backward()
        for some in (optimizer, twin_optimizer):
            some.step()
            some.zero_grad()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def case_forgotten_parameters_are_named(rank: int, world_size: int) -> None:
    model = mlp()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shard(model, adamw(list(model.parameters())[:2]), share_weights=not PLAIN_GATHER)
    assert any("2.weight" in str(w.message) and "in no group" in str(w.message) for w in seen)


def case_what_cannot_be_divided_is_refused(rank: int, world_size: int) -> None:
    def refused(model: nn.Module, text: str, make: Make = momentum) -> None:
        with pytest.raises(UsageError, match=text):
            shard(model, make(model.parameters()))

    refused(nn.Embedding(4, 4, sparse=True), "weight has sparse gradients")
    refused(nn.Linear(2, 2, dtype=torch.complex64), "weight is complex")
    refused(mlp(), "LBFGS cannot step parts", torch.optim.LBFGS)
    both = Both()
    refused(both.model, "divided among ranks already")
    with pytest.raises(UsageError, match="steps through the ShardedOptimizer"):
        both.inner.step()
    for copier in (copy.deepcopy, lambda o: torch.save(o, io.BytesIO())):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copier(both.optimizer)
    assert isinstance(both.optimizer, Optimizer)
    both.step(0)
    both.check()


class RowSums(torch.optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sums"] = torch.zeros(3)
        return super().step(closure)


def case_state_of_neither_kind_is_refused(rank: int, world_size: int) -> None:
    both = Both(lambda p: RowSums(p, lr=0.1))
    both.backward(0)
    with pytest.raises(UsageError, match=r"RowSums keeps 'sums' of shape \(3,\)"):
        both.optimizer.step()


# ---- around the step ---------------------------------------------------------------------------------------------------------


def case_clipping_equals_torch(rank: int, world_size: int) -> None:
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for max_norm in (0.05, 100.0):
            both = Both(momentum)
            for step in range(3):
                both.backward(step)
                found = clip_grad_norm_(both.model.parameters(), max_norm, norm_type)
                expected = nn.utils.clip_grad_norm_(both.twin.parameters(), max_norm, norm_type)
                torch.testing.assert_close(found, expected)
                both.update()
            both.check()
    both = Both(momentum)
    both.backward(0)
    chosen = [list(m.parameters())[1:4] for m in (both.model, both.twin)]  # not all of a block
    torch.testing.assert_close(clip_grad_norm_(chosen[0], 0.01), nn.utils.clip_grad_norm_(chosen[1], 0.01))
    both.update()
    both.check()
    both.backward(1)
    torch.testing.assert_close(
        clip_grad_norm_(both.model[0].weight, 0.01), nn.utils.clip_grad_norm_(both.twin[0].weight, 0.01)
    )
    both.update()
    both.check()


def case_clipping_what_is_not_finite(rank: int, world_size: int) -> None:
    for norm_type in (2.0, float("inf")):
        both = Both()
        both.backward(0)
        if rank == 0:
            both.model[4].bias.grad.data[0] = float("nan")
        with pytest.raises(RuntimeError, match="not finite"):
            clip_grad_norm_(both.model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        assert clip_grad_norm_(both.model.parameters(), 1.0, norm_type).isnan()
        both.optimizer.zero_grad()
        both.twin_optimizer.zero_grad()
        both.step(1)
        both.check()


def case_a_backward_after_clipping_is_refused(rank: int, world_size: int) -> None:
    both = Both()
    both.backward(0)
    clip_grad_norm_(both.model.parameters(), 1.0)
    both.backward(1)
    with pytest.raises(UsageError, match="averaged already"):
        both.optimizer.step()


def case_clipping_works_alike_without_division(rank: int, world_size: int) -> None:
    model, twin = mlp(), mlp()
    for some in (model, twin):
        some(batch(0)).pow(2).mean().backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.01), expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def case_schedules_made_before_and_after(rank: int, world_size: int) -> None:
    for kind in ("before", "after"):
        for schedule in (
            lambda o: OneCycleLR(o, max_lr=0.2, total_steps=12, cycle_momentum=True),
            lambda o: CosineAnnealingLR(o, T_max=5),
            lambda o: StepLR(o, 2),
        ):
            bare = mlp()
            twin, inner = twin_of(bare), momentum(bare.parameters())
            twin_optimizer = momentum(twin.parameters())
            twins = schedule(twin_optimizer)
            ours = schedule(inner) if kind == "before" else None
            model, optimizer = shard(bare, inner, share_weights=not PLAIN_GATHER)
            ours = schedule(optimizer) if ours is None else ours
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*lr_scheduler.*")
                for step in range(6):
                    model(batch(rank, step)).pow(2).mean().backward()
                    mean_loss(twin, world_size, step).backward()
                    for some, its in ((optimizer, ours), (twin_optimizer, twins)):
                        some.step()
                        some.zero_grad()
                        its.step()
                    assert optimizer.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"]
                    assert optimizer.param_groups[0]["momentum"] == twin_optimizer.param_groups[0]["momentum"]
            for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(found, expected)


def case_edits_of_groups_take_effect(rank: int, world_size: int) -> None:
    both = Both()
    for step in range(4):
        for optimizer in (both.optimizer, both.twin_optimizer):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        both.step(step)
    both.check()
    assert [id(p) for p in both.optimizer.param_groups[0]["params"]] == [id(p) for p in both.model.parameters()]


def adagrad_takes_groups_later() -> bool:
    """PyTorch's own does not in older versions."""
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    later = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def case_groups_are_added_and_parameters_unfrozen_in_mid_training(rank: int, world_size: int) -> None:
    for make in (adamw, *[OPTIMIZERS["adagrad"]] * adagrad_takes_groups_later()):
        bare = mlp()
        bare[2].requires_grad_(False)
        twin = twin_of(bare)
        parameters = [list(m.parameters()) for m in (bare, twin)]
        optimizers = [make(p[:4]) for p in parameters]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizers[0] = shard(bare, optimizers[0], share_weights=not PLAIN_GATHER)
        for step in range(9):
            if step == 3:
                for optimizer, some in zip(optimizers, parameters, strict=True):
                    optimizer.add_param_group({"params": some[4:], "lr": 0.002})
                    for state in (optimizer.state_dict(),):
                        assert len(state["param_groups"]) == 2
            if step in (5, 7):
                for some in (model, twin):
                    some[2].requires_grad_(step == 5)
            model(batch(rank, step)).pow(2).mean().backward()
            mean_loss(twin, world_size, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step < 3:
                for some in (model, twin):
                    some[4].zero_grad()
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert_equal_across_ranks(model)
        with pytest.raises(UsageError, match="not the model's"):
            optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def case_a_grad_scaler_skips_together(rank: int, world_size: int) -> None:
    for unscales_first in (False, True):
        both = Both(momentum)
        scaler, twins = (torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule = StepLR(both.optimizer, 100)
            both.optimizer.step()  # nothing to do, but a schedule may go on
        for step in range(6):
            scaler.scale(both.model(batch(rank, step)).pow(2).mean()).backward()
            twins.scale(mean_loss(both.twin, world_size, step)).backward()
            if step == 2:  # one rank only
                both.twin[0].weight.grad[0, 0] = float("inf")
                if rank == world_size - 1:
                    both.model[0].weight.grad.data[0, 0] = float("inf")
            if unscales_first:
                scaler.unscale_(both.optimizer)
                twins.unscale_(both.twin_optimizer)
                if step != 2:
                    found = clip_grad_norm_(both.model.parameters(), 0.05)
                    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(both.twin.parameters(), 0.05))
            before = both.model[0].weight.detach().clone()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*lr_scheduler.*")
                scaler.step(both.optimizer)
                schedule.step()
            twins.step(both.twin_optimizer)
            scaler.update()
            twins.update()
            assert torch.equal(before, both.model[0].weight) == (step == 2)
            both.optimizer.zero_grad()
            both.twin_optimizer.zero_grad()
            scales: list[Any] = [None] * world_size
            dist.all_gather_object(scales, scaler.get_scale())
            assert set(scales) == {twins.get_scale()}
        both.check()


def case_hooks_of_the_optimizer_fire_once(rank: int, world_size: int) -> None:
    model, calls = mlp(), []
    inner = adamw(model.parameters())
    early = inner.register_step_pre_hook(lambda o, a, k: calls.append(("early", type(o))))
    model, optimizer = shard(model, inner, share_weights=not PLAIN_GATHER)
    optimizer.register_step_pre_hook(lambda o, a, k: calls.append(("pre", type(o))))
    optimizer.register_step_post_hook(lambda o, a, k: calls.append(("post", type(o))))
    model(batch(rank)).sum().backward()
    optimizer.step()
    assert calls == [("early", ShardedOptimizer), ("pre", ShardedOptimizer), ("post", ShardedOptimizer)]
    early.remove()
    optimizer.step()
    assert [name for name, _ in calls[3:]] == ["pre", "post"]


def case_the_model_can_be_copied_saved_loaded_and_averaged(rank: int, world_size: int) -> None:
    both = Both()
    averaged = torch.optim.swa_utils.AveragedModel(both.model)
    twin_averaged = torch.optim.swa_utils.AveragedModel(both.twin)
    for step in range(4):
        both.step(step)
        averaged.update_parameters(both.model)
        twin_averaged.update_parameters(both.twin)
        both.model.eval()
        torch.testing.assert_close(both.model(batch(0)), both.twin(batch(0)), rtol=1e-5, atol=1e-6)
        both.model.train()
    for found, expected in zip(averaged.parameters(), twin_averaged.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    copied = copy.deepcopy(both.model)
    file = io.BytesIO()
    torch.save(both.model, file)
    size = file.tell()
    assert size < 20_000, "only the weights, not a whole segment"
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    saved = {name: value.clone() for name, value in both.model.state_dict().items()}
    both.step(4)
    for some in (copied, loaded):
        assert all(torch.equal(value, saved[name]) for name, value in some.state_dict().items())
        if rank == 0:
            some(batch(0)).sum().backward()  # nothing of it talks to other ranks
    both.model.load_state_dict(saved)
    both.twin.load_state_dict(saved)
    both.step(5)
    both.check()
    both.model[0].weight.data = both.model[0].weight.data.clone()  # other memory, the same values
    both.step(6)
    both.check()


def case_a_parameter_is_laid_over_its_own_memory_in_another_order(rank: int, world_size: int) -> None:
    width = batch(rank).shape[1]
    with seeded(3):
        plain = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    both = Both(momentum, plain)
    both.step(0)
    weight, twin = both.model[0].weight, both.twin[0].weight
    weight.data = weight.data.t()
    twin.data = twin.data.t().clone(memory_format=torch.contiguous_format)
    both.step(1)
    both.step(2)
    both.check()


def case_a_graph_older_than_the_step_is_noticed(rank: int, world_size: int) -> None:
    both = Both()
    loss = both.model(batch(rank)).pow(2).mean()
    loss.backward(retain_graph=True)
    both.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def case_buckets_leave_early_and_only_when_nothing_changes(rank: int, world_size: int) -> None:
    feedback = Compressed(MinMax8(), error_feedback=True)
    for other in Carrier.alive():  # of the cases before, which are not collected yet: they would share the group
        other.close()
    for exchange, early in ((None, True), (Compressed(MinMax8()), True), (feedback, False)):
        both = Both(momentum, share_weights=False, exchange=exchange)
        model, carrier = both.model, both.optimizer.carrier
        found = []
        for step in range(4):
            both.backward(step)
            found.append(all(work is not None for work in carrier._reducer._now.works))
            if step == 2:
                for some in (model, both.twin):
                    some[0].weight.grad.data.mul_(2.0)
            both.update()
        assert found == [False, early, early, False]
        both.check(atol=1e-6 if exchange is None else 0.02)
        carrier.close()


def case_gradients_that_are_kept_do_not_change(rank: int, world_size: int) -> None:
    model = mlp()
    model, optimizer = shard(model, momentum(model.parameters()), share_weights=False)
    for step in range(3):
        model(batch(rank, step)).pow(2).mean().backward()
        kept = [p.grad for p in model.parameters()]
        values = [gradient.clone() for gradient in kept]
        optimizer.step()
        optimizer.zero_grad()
        model(batch(rank, 10 + step)).pow(2).mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
        optimizer.zero_grad()


def case_nothing_is_kept_of_a_model_that_is_dropped(rank: int, world_size: int) -> None:
    both = Both()
    both.step(0)
    kept = weakref.ref(both.optimizer.carrier)
    del both
    gc.collect()
    assert kept() is None


def case_several_buckets_and_groups(rank: int, world_size: int) -> None:
    import guozhuang.sharding.optimizer as facade
    from guozhuang.sharding.parts import lay_out

    whole = facade.lay_out
    facade.lay_out = lambda members, n: lay_out(members, n, cap_bytes=64, block_elements=32)
    try:
        both = Both(
            lambda p: torch.optim.AdamW([{"params": (q := list(p))[::2]}, {"params": q[1::2], "lr": 0.002}], lr=0.01)
        )
    finally:
        facade.lay_out = whole
    assert len(both.optimizer.carrier.layout.buckets) > 3
    for step in range(STEPS):
        both.step(step)
    both.check()


NAMES = names_of_cases(globals())
ONLY_PROCESSES = (  # the compiler, late imports, the garbage collector, filters of warnings and what is replaced in a module
    "case_a_compiled_model_trains",
    "case_a_grad_scaler_skips_together",
    "case_bert_trains_as_under_torch_ddp",
    "case_forgotten_parameters_are_named",
    "case_groups_are_added_and_parameters_unfrozen_in_mid_training",
    "case_nothing_is_kept_of_a_model_that_is_dropped",
    "case_schedules_made_before_and_after",
    "case_several_buckets_and_groups",
)


def without_shared_weights(rank: int, world_size: int, module_name: str, names: Sequence[str]) -> dict[str, str]:
    importlib.import_module(module_name).PLAIN_GATHER = True
    return run_cases(rank, world_size, module_name, names)


RESULTS = {
    "shm, 2": results_of_cases(__name__, 2, NAMES, backend="shm"),
    "gloo, 3": results_of_cases(__name__, 3, NAMES, backend="gloo"),
    "shm, weights on each rank, 3": results_of_cases(__name__, 3, NAMES, without_shared_weights, backend="shm"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "group", [name if name == "shm, 2" else pytest.param(name, marks=pytest.mark.slow) for name in RESULTS]
)
def test_cases(group: str, name: str) -> None:
    RESULTS[group](name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONLY_PROCESSES])
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_cases_on_threads(num_ranks: int, name: str) -> None:
    run_threads(globals()[name], num_ranks)
    gc.collect()  # parameters and carriers refer to each other, and some carriers hold threads
