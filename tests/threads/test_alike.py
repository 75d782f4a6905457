"""Ranks that go apart are named; programs in which they only look as if they did train on."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guozhuang import DistributedDataParallel
from guozhuang.errors import MismatchError, UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.cast import Cast
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.gradients.alike import Alike
from guozhuang.sharding import shard
from guozhuang.sharding.fully import shard_fully
from guozhuang.strategies.prepared import PreparedDDP
from tests.threads.ranks import run_threads

Pair = tuple[Any, Optimizer]
STEPS = 70  # 64 steps see all weights


def cast(model: nn.Module, optimizer: Optimizer) -> Pair:
    """An exchange that does not carry the ranks' numbers, so that these are compared now and then."""
    wrapped = PreparedDDP(model)
    wrapped.use_exchange(Cast(torch.float64, AllReduce()))
    return wrapped, optimizer


STRATEGIES: dict[str, Callable[[nn.Module, Optimizer], Pair]] = {
    "ddp": lambda m, o: (PreparedDDP(m), o),
    "small buckets": lambda m, o: (PreparedDDP(m, bucket_cap_mb=0.0001), o),
    "frees": lambda m, o: (PreparedDDP(m, lazy_bucket_allocation=True), o),
    "cast": cast,
    "drop-in": lambda m, o: (DistributedDataParallel(m), o),
    "sharded": shard,
    "sharded-gradients": lambda m, o: shard_fully(m, o, keep_weights=True),
    "sharded-weights": lambda m, o: shard_fully(m, o, keep_weights=False),
}
FULLY = ("sharded-gradients", "sharded-weights")


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


class Training:
    """A training of some steps; a fault or a habit acts in it on some ranks."""

    def __init__(self, strategy: str, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.bare = copy.deepcopy(model)
        self.model, self.optimizer = STRATEGIES[strategy](
            self.bare, torch.optim.SGD(self.bare.parameters(), lr=0.01, momentum=0.5)
        )
        self.step = -1
        self.kept: list[Tensor] = []

    def loss(self) -> Tensor:
        found: Tensor = self.model(batch(self.rank, self.step)).pow(2).mean()
        return found

    def train(self, act: Callable[[Training], bool | None], steps: int = STEPS) -> None:
        """Train; ``act`` is called before each forward, and returns whether the batch is left out."""
        while self.step < steps:
            self.step += 1
            if act(self):
                continue
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def one_leaves_out(training: Training) -> bool:
    return training.rank == 1 and training.step == 5 and bool(training.loss() > -1)


def one_skips_its_step(training: Training) -> bool:
    if training.rank != 1 or training.step != 5:
        return False
    training.loss().backward()
    training.optimizer.zero_grad()
    return True


def rates_differ(training: Training) -> None:
    if training.step == 5 and training.rank == 1:
        training.optimizer.param_groups[0]["lr"] *= 0.5


def one_loads(training: Training) -> None:
    if training.step == 5 and training.rank == 0:
        training.bare.load_state_dict({name: 2 * value for name, value in training.bare.state_dict().items()})


def one_writes_past_autograd(training: Training) -> None:
    if training.step == 20 and training.rank == 1:
        training.bare[2].weight.data.mul_(2)


def steps_in_no_sync(training: Training) -> None:
    if training.step == 5:
        with training.model.no_sync():
            training.loss().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


APART = "the weights of the ranks have gone apart"
HIDDEN = "differ in their steps"
# By fault: what it says, in which step at the latest, and under which strategies it is tried.
DDP = ("ddp", "small buckets", "frees", "cast", "drop-in")
FAULTS: dict[Any, tuple[str, int, tuple[str, ...]]] = {
    one_leaves_out: (HIDDEN, 6, tuple(STRATEGIES)),
    one_skips_its_step: (HIDDEN, 6, tuple(STRATEGIES)),
    rates_differ: ("hyper-parameters of their optimizers", 5, tuple(STRATEGIES)),
    one_loads: (APART, 5, DDP),
    one_writes_past_autograd: (APART, 20 + 64, DDP),
    steps_in_no_sync: (APART, 64, DDP),
}


def fails_by(rank: int, size: int, strategy: str, fault: Callable[[Training], bool | None], model: nn.Module) -> Any:
    training = Training(strategy, model, rank)
    try:
        training.train(fault, steps=90)
    except (MismatchError, UsageError) as error:
        return str(error), training.step
    return "", training.step


def of_both_speeds(cases: Iterable[tuple[Any, str, int]]) -> list[Any]:
    """The strategies that differ most, on 2 ranks, in each run of the tests; all of them in the slow ones."""
    quick = ("ddp", "drop-in", "sharded")
    return [
        pytest.param(*case, marks=() if case[1:] in [(each, 2) for each in quick] else pytest.mark.slow)
        for case in cases
    ]


@pytest.mark.parametrize(
    ("fault", "strategy", "size"),
    of_both_speeds((fault, each, size) for fault, (_, _, ways) in FAULTS.items() for each in ways for size in (2, 3)),
)
def test_ranks_that_go_apart_are_named(fault: Any, strategy: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    says, latest, _ = FAULTS[fault]
    if strategy == "cast":
        latest = 64
    if strategy in FULLY and fault is one_leaves_out:
        says, latest = "ranks do different things", 6
    caplog.set_level(logging.WARNING, "guozhuang")
    found = run_threads(fails_by, size, strategy, fault, made())
    if strategy == "drop-in" and says != HIDDEN:
        assert [text for text, _ in found] == [""] * size
        assert says in caplog.text
        assert caplog.text.count(says) == 1  # said once, by one rank
        return
    for rank, (text, step) in enumerate(found):
        assert says in text
        assert f"[rank {rank}]" in text
        assert "Fix: " in text
        assert step <= latest + 1  # the rank that left out a batch is one ahead
    if fault is one_leaves_out:
        assert strategy in ("cast", *FULLY) or re.search(r"\n +0 +5 +0 +1\n +1 +5 +1 +1", found[0][0])
    if fault is rates_differ:
        assert "lr 0.005" in found[0][0]


# ---- right programs -----------------------------------------------------------------------------------------------------


def average_for_evaluation(training: Training) -> None:
    """Rank 0 evaluates an average of the weights, and puts its own back."""
    if training.rank == 0 and training.step % 3 == 0:
        with torch.no_grad():
            own = [p.clone() for p in training.bare.parameters()]
            for p in training.bare.parameters():
                p.mul_(0.5)
            training.bare(batch(0, 1))
            for p, value in zip(training.bare.parameters(), own, strict=True):
                p.copy_(value)


def one_evaluates(training: Training) -> None:
    if training.rank == 0:
        training.bare.eval()
        training.bare(batch(0, 1)).sum()
        training.bare.train()
        with torch.no_grad():
            training.bare(batch(0, 1))


def all_leave_out(training: Training) -> bool:
    return training.step % 7 == 3 and bool(training.loss() > -1)


def another_number_of_forwards(training: Training) -> None:
    """One backward through as many forwards as a rank has parts of its batch."""
    sum(training.loss() for _ in range(1 + training.rank)).backward()  # type: ignore[union-attr]
    training.optimizer.step()
    training.optimizer.zero_grad()


def another_number_of_micro_batches(training: Training) -> None:
    no_sync = getattr(training.model, "no_sync", contextlib.nullcontext)
    for _ in range(training.rank):
        with no_sync():
            (training.loss() / 4).backward()


def one_keeps_outputs(training: Training) -> bool:
    """All leave out the same batches, and one keeps its losses, as for a log."""
    if training.step % 7 != 3:
        return False
    loss = training.loss()
    if training.rank == 0:
        training.kept.append(loss)
        del training.kept[:-3]
    return True


def outputs_in_cycles(training: Training) -> None:
    """Forwards without a backward whose outputs the collector of cycles frees, at any time."""
    kept: list[Any] = [training.loss()]
    kept.append(kept)


def frozen_in_turn(training: Training) -> None:
    if isinstance(training.model, DistributedDataParallel):
        training.bare[0].requires_grad_(training.step % 2 == 0)


def stepped_in_other_ways(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["foreach"] = bool(training.rank)


def scheduled_alike(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] *= 0.99


HABITS = [
    average_for_evaluation,
    one_evaluates,
    all_leave_out,
    another_number_of_forwards,
    another_number_of_micro_batches,
    one_keeps_outputs,
    outputs_in_cycles,
    frozen_in_turn,
    scheduled_alike,
    stepped_in_other_ways,
]


def trains(rank: int, size: int, strategy: str, habit: Callable[[Training], bool | None], model: nn.Module) -> int:
    training = Training(strategy, model, rank)
    training.train(habit)
    return training.step


@pytest.mark.parametrize(
    ("habit", "strategy", "size"),
    of_both_speeds((habit, each, 2) for habit in HABITS for each in STRATEGIES if each not in FULLY),
)
def test_right_programs_train_on(habit: Any, strategy: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    if strategy == "sharded" and habit is average_for_evaluation:
        pytest.skip("weights are divided there: a rank changes its own part of them")
    caplog.set_level(logging.WARNING, "guozhuang")
    assert run_threads(trains, size, strategy, habit, made()) == [STEPS] * size
    assert not caplog.records


def joins(rank: int, size: int, momentum: float, hands_over: bool, model: nn.Module) -> int:
    training = Training("ddp", model, rank)
    training.optimizer.param_groups[0]["momentum"] = momentum
    with training.model.join():
        training.train(lambda _: False, steps=5 + 3 * rank)
    if hands_over:
        states: list[Any] = [training.optimizer.state_dict()]
        dist.broadcast_object_list(states, src=size - 1)
        training.optimizer.load_state_dict(states[0])
    training.step = -1
    training.train(lambda _: False, steps=5)
    return training.step


@pytest.mark.parametrize(("momentum", "hands_over"), [(0.0, False), (0.5, False), (0.5, True)])
def test_uneven_inputs_are_no_fault(momentum: float, hands_over: bool, caplog: pytest.LogCaptureFixture) -> None:
    """But ranks without data have made no steps of the optimizer: momenta differ afterwards, and the warning says the cure."""
    caplog.set_level(logging.WARNING, "guozhuang")
    assert run_threads(joins, 3, momentum, hands_over, made()) == [5, 5, 5]
    goes_apart = momentum > 0 and not hands_over
    assert (APART in caplog.text) == ("after a join()" in caplog.text) == goes_apart


def rounds(rank: int, size: int, model: nn.Module) -> int:
    """Unlike processors round differently."""
    training = Training("ddp", model, rank)

    def act(_: Training) -> None:
        if rank == 1:
            with torch.no_grad():
                training.bare[0].weight[0, 0].mul_(1 + 4e-16)

    training.train(act)
    return training.step


def test_rounding_is_no_fault() -> None:
    assert run_threads(rounds, 2, made()) == [STEPS, STEPS]


def trains_apart(rank: int, size: int, model: nn.Module) -> bool:
    """An exchange of weights lets replicas differ between its exchanges."""
    bare = copy.deepcopy(model)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(bare)
    wrapped.use_weight_exchange(LocalSGD(100), optimizer)
    for step in range(10):
        wrapped(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.reducer is None or wrapped.reducer.alike is None


def test_replicas_that_differ_on_purpose_are_not_compared() -> None:
    assert run_threads(trains_apart, 2, made()) == [True, True]


def looks(rank: int, size: int) -> int:
    """How many elements all checksums of 64 passes read of a large parameter, and whether they saw each small one."""
    parameters = [nn.Parameter(torch.zeros(300_000)), *(nn.Parameter(torch.zeros(3)) for _ in range(9))]
    alike = Alike(torch.distributed.group.WORLD, parameters, lambda: (0, 0))  # type: ignore[arg-type]
    alike.follow([str(i) for i in range(10)], parameters)
    found = 0
    for i, parameter in enumerate(parameters):
        before = [alike.digest(number) for number in range(64, 128)]
        parameter.data.add_(1)
        found += before != [alike.digest(number) for number in range(64, 128)]
        parameter.data.sub_(1)
        assert i < 10
    return found


def test_sixty_four_passes_see_every_parameter() -> None:
    assert run_threads(looks, 1)[0] == 10
