"""``--strategy auto``: while a race changes the way of training, the training is that of ddp, bit by bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.compat.prepared import clip_grad_value_
from guozhuang.cost.race import Race
from guozhuang.errors import UsageError
from guozhuang.optim import LAMB, LARS
from guozhuang.sharding import shard
from guozhuang.sharding.resting import RestingOptimizer
from guozhuang.strategies import auto
from guozhuang.strategies.ways import Setup, ddp
from guozhuang.world import World
from tests.threads.ranks import GENERATOR, run_threads

NUM_STEPS = 50  # in which the two rounds of three contenders end
LATE = 40  # a step after the race of two contenders


class OrderedRace(Race):
    """Ends after two rounds, and says then that the last contender was the fastest."""

    @property
    def is_over(self) -> bool:
        return len(self.alive) < 2 or self.num_rounds >= 2

    def add(self, seconds: Any) -> None:
        assert set(seconds) == set(self.alive)
        self.num_rounds += 1
        for name in self.alive:
            self._logs[name].append(0.0)
        while self.is_over and len(self.alive) > 1:
            self.drop(self.alive[0], "slower")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.parts(x)
        return found


class Unnormalized(Model):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.parts = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def two_groups(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": p[:3], "lr": 0.1}, {"params": p[3:], "weight_decay": 0.3}], 0.01)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, 0.05),
    "groups": two_groups,
    "part": lambda p: torch.optim.AdamW(p[1:4], 0.01),  # the model has parameters that it does not hold
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
    "lamb": lambda p: LAMB(p, 0.01),
    "lars": lambda p: LARS(p, 0.1, momentum=0.9),
}


def made(name: str, kind: type[nn.Module] = Model) -> tuple[nn.Module, torch.optim.Optimizer]:
    with GENERATOR:
        torch.manual_seed(3)
        model = kind()
    return model, OPTIMIZERS[name](list(model.parameters()))


def prepared(prepare: Any, rank: int, size: int, model: nn.Module, optimizer: Any, nodes: int = 1, **more: Any) -> Any:
    world = mock.Mock(spec=World, rank=rank, size=size, num_nodes=nodes, device=torch.device("cpu"))
    return prepare(model, optimizer, Setup(world, ddp_options=more))


def divided_step(rank: int, size: int) -> None:
    """Make an optimizer of the base class: PyTorch wraps the step of a class when its first object is made."""
    model, optimizer = made("adamw")
    shard(model, optimizer)


@pytest.fixture
def ordered(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Races end after two rounds, and the last contender wins; returns what was logged."""
    run_threads(divided_step, 2)
    with mock.patch.object(auto, "Race", OrderedRace), caplog.at_level(logging.WARNING, "guozhuang"):
        yield lambda: " / ".join(r.getMessage() for r in caplog.records if "strategy auto" in r.getMessage())


class Loop:
    """A training loop; a subclass says what its script does otherwise."""

    kind: type[nn.Module] = Model

    def __init__(self, model: Any, optimizer: Any, generator: torch.Generator, rank: int, size: int) -> None:
        self.model, self.optimizer, self.generator, self.rank, self.size = model, optimizer, generator, rank, size
        self.parameters = list(model.parameters())
        self.begin()

    def begin(self) -> None: ...

    def between(self, step: int) -> None:
        """Do something between backward and step."""

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def backward(self) -> Tensor:
        x = torch.randn(4 * self.size, 7, generator=self.generator)[self.rank :: self.size]
        loss: Tensor = self.model(x).square().mean()
        self.scaled(loss).backward()
        return loss

    def step(self, step: int) -> None:
        self.backward()
        self.between(step)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Accumulated(Loop):
    def step(self, step: int) -> None:
        with self.model.no_sync():
            self.backward()
        super().step(step)


class TwoForwards(Loop):
    def step(self, step: int) -> None:
        self.backward()
        super().step(step)


class Kept(Loop):
    def step(self, step: int) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class Evaluated(Loop):
    def between(self, step: int) -> None:
        with torch.no_grad():
            self.model(torch.ones(4, 7))
        self.model.eval()
        self.model(torch.ones(4, 7))  # with a graph, and no backward
        self.model.train()


class Clipped(Loop):
    def between(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 0.1)


class ClippedByUs(Loop):
    def between(self, step: int) -> None:
        assert gz.clip_grad_norm_(self.parameters, 0.1) > 0


class Values(Loop):
    def between(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.parameters, 0.01)


class ValuesByUs(Loop):
    def between(self, step: int) -> None:
        clip_grad_value_(self.parameters, 0.01, [self.optimizer])


class ThroughData(Loop):
    def between(self, step: int) -> None:
        for p in self.parameters:
            p.grad.data.mul_(1.5)  # type: ignore[union-attr]  # which no version counter shows


class Late(Loop):
    def between(self, step: int) -> None:
        if step >= LATE:
            self.parameters[0].grad = self.parameters[0].grad.sign()  # type: ignore[union-attr]
            self.parameters[1].grad = None


class WeightsChanged(Loop):
    def between(self, step: int) -> None:
        if not step:
            self.kept = [p.data for p in self.parameters]  # the memory of a parameter stays the same
        for kept in self.kept:
            kept.mul_(0.99)


class Frozen(Loop):
    def between(self, step: int) -> None:
        if step in (12, 27):
            self.parameters[0].requires_grad_(step == 27)


class Closure(Loop):
    def step(self, step: int) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            return self.backward()

        assert isinstance(self.optimizer.step(closure), Tensor)


class Scaled(Loop):
    def begin(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)

        self.factor = 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) * self.factor  # type: ignore[no-any-return]

    def step(self, step: int) -> None:
        self.factor = float("inf") if step in (4, 13, 43) else 1.0
        self.backward()
        if step % 2:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Loaded(Loop):
    def between(self, step: int) -> None:
        if step % 9 == 8:
            self.optimizer.load_state_dict(self.optimizer.state_dict())


class Grown(Loop):
    def between(self, step: int) -> None:
        if step in (14, 32):
            self.optimizer.add_param_group({"params": [self.parameters[4 if step == 14 else 0]], "lr": 0.2})


class One(Loop):
    kind = OneWeight


class Normless(Loop):  # a bias before a normalization has a gradient of rounding errors, which these optimizers magnify
    kind = Unnormalized


def train(rank: int, size: int, prepare: Any, name: str, loop: type[Loop], nodes: int) -> list[Tensor]:
    """Train; return all weights, running statistics and now and then the optimizer's state, each as one vector."""
    model, optimizer = made(name, loop.kind)
    model, optimizer = prepared(prepare, rank, size, model, optimizer, nodes)
    scheduler, found = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5), []
    going = loop(model, optimizer, torch.Generator().manual_seed(5), rank, size)
    for step in range(NUM_STEPS):
        going.step(step)
        scheduler.step()
        if step % 9 == 8:  # a checkpoint, also while the state is divided
            state = optimizer.state_dict()["state"]
            values = [v for s in state.values() for v in s.values() if isinstance(v, Tensor)]
            found.append(torch.cat([torch.zeros(1), *(v.flatten() for v in values)]))
        found.append(torch.cat([t.detach().flatten().double() for t in model.state_dict().values()]))
    return found


@pytest.mark.parametrize(
    ("size", "name", "loop", "nodes"),
    [
        (2, "adamw", Loop, 1),
        (2, "plain", Loop, 1),
        (2, "muon", Loop, 1),
        (2, "lamb", Normless, 1),
        (3, "momentum", Accumulated, 1),
        (2, "adamw", Evaluated, 1),
        (2, "momentum", ClippedByUs, 1),
        (2, "momentum", ValuesByUs, 1),
        (2, "momentum", Late, 1),
        (2, "momentum", Frozen, 1),
        (2, "adamw", Closure, 1),
        (2, "momentum", Scaled, 1),
        (2, "groups", Loaded, 1),
        (2, "part", Grown, 1),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (2, "adamw", Loop, 2),
                (2, "groups", Loop, 1),
                (2, "part", Loop, 1),
                (2, "lars", Normless, 1),
                (4, "adamw", One, 1),
                (2, "adamw", TwoForwards, 1),
                (2, "momentum", Kept, 1),
                (2, "momentum", Clipped, 1),
                (2, "momentum", Values, 1),
                (2, "momentum", ThroughData, 1),
                (2, "adamw", WeightsChanged, 1),
                (2, "adamw", Scaled, 1),
            )
        ),
    ],
)
def test_the_training_is_that_of_ddp_in_every_bit(
    size: int, name: str, loop: type[Loop], nodes: int, ordered: Callable[[], str]
) -> None:
    with mock.patch.object(auto, "MIB", 256):  # so that this model has several buckets
        raced = run_threads(train, size, auto.prepare_auto, name, loop, nodes)
    plain = run_threads(train, size, ddp, name, loop, nodes)
    for mine, theirs in zip(raced, plain, strict=True):
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if size == 2 and name not in ("lamb", "lars"):
                assert torch.equal(a, b), f"value {step}, apart by {(a - b).abs().max()}"
            else:  # gradients, or norms of parameters, are sums in another order
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    won = "ddp with a divided step" if nodes == 1 else "ddp with buckets of 4 MiB"
    assert f"strategy auto: {won}" in ordered() and ordered().count("strategy auto") == 1
    assert ("every rank" in ordered()) == (nodes == 1)


def steps(loop: type[Loop], num_steps: int, **more: Any) -> Callable[[int, int], Any]:
    """Return a function of a rank that makes some steps under auto."""

    def run(rank: int, size: int) -> Any:
        model, optimizer = prepared(auto.prepare_auto, rank, size, *made("adamw", loop.kind), **more)
        going = loop(model, optimizer, torch.Generator().manual_seed(5), rank, size)
        for step in range(num_steps):
            going.step(step)
        return model, optimizer, torch.cat([p.detach().flatten() for p in model.parameters()])

    return run


class Local(Loop):
    first = 0

    def step(self, step: int) -> None:
        if step < self.first:
            super().step(step)
            return
        with self.model.no_sync():
            super().step(step)


class LocalLate(Local):
    first = LATE


class OwnWeights(Loop):
    def between(self, step: int) -> None:
        self.parameters[0].data[0] += 0.1 * self.rank


class ReadsState(Loop):
    def between(self, step: int) -> None:
        assert step == 0 or self.optimizer.state[self.parameters[0]]


class ReadsStateLate(Loop):
    def between(self, step: int) -> None:
        assert step < LATE or self.optimizer.state


class Hooked(Loop):
    def begin(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        self.model.register_comm_hook(None, default_hooks.allreduce_hook)


class Tied(Loop):
    def begin(self) -> None:
        self.parameters[1].data = self.parameters[2].data  # both of 33 elements


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (Local, "gradients of no_sync()"),
        (ReadsState, "reads optimizer.state"),
        (Hooked, "a communication hook of its own"),
        (Tied, "share memory"),
    ],
)
def test_the_step_stays_whole_where_dividing_it_would_train_otherwise(
    loop: type[Loop], said: str, ordered: Callable[[], str]
) -> None:
    for _, optimizer, _ in run_threads(steps(loop, NUM_STEPS), 2):
        assert optimizer.is_resting
    assert "strategy auto: ddp" in ordered() and said in ordered()


def test_weights_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(AssertionError, match="the weights of the ranks have gone apart"):
        run_threads(steps(OwnWeights, NUM_STEPS), 2)


@pytest.mark.parametrize(("loop", "said"), [(LocalLate, "no_sync"), (ReadsStateLate, "state_dict")])
def test_what_comes_late_raises_before_it_acts(loop: type[Loop], said: str, ordered: Callable[[], str]) -> None:
    with pytest.raises(AssertionError, match=said):
        run_threads(steps(loop, NUM_STEPS), 2)


def test_parameters_that_are_not_averaged_are_no_part_of_a_divided_step(ordered: Callable[[], str]) -> None:
    def run(rank: int, size: int) -> Any:
        model, optimizer = made("adamw")
        model._ddp_params_and_buffers_to_ignore = ["parts.0.weight"]  # type: ignore[assignment]
        model, optimizer = prepared(auto.prepare_auto, rank, size, model, optimizer)
        assert not isinstance(optimizer, RestingOptimizer)

    run_threads(run, 2)
    assert "nothing else to choose from: gradients of parameters" in ordered() and "parts.0.weight" in ordered()


def test_the_ranks_of_a_given_group_race_alone(ordered: Callable[[], str]) -> None:
    def run(rank: int, size: int) -> Any:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return steps(Loop, NUM_STEPS, process_group=groups[rank // 2])(rank % 2, 2)[2]

    found = run_threads(run, 4)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and torch.equal(found[2], found[3])
    assert ordered().count("divided step") == 2


@pytest.mark.parametrize("prepare", [auto.prepare_auto, ddp])
@pytest.mark.parametrize("step", [12, LATE])
def test_a_checkpoint_of_a_divided_step_goes_on_in_any_run(step: int, prepare: Any, ordered: Callable[[], str]) -> None:
    def run(rank: int, size: int) -> None:
        model, optimizer, _ = steps(Normless, step)(rank, size)
        assert not optimizer.is_resting
        again, stepped = prepared(prepare, rank, size, *made("adamw", Unnormalized))
        again.load_state_dict(copy.deepcopy(model.state_dict()))
        stepped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, by in ((model, optimizer), (again, stepped)):
            loop = Normless(each, by, torch.Generator().manual_seed(7), rank, size)
            for number in range(20):
                loop.step(number)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    run_threads(run, 2)


@pytest.mark.parametrize("step", [5, 12, LATE])
def test_join_makes_the_step_whole_at_any_time(step: int, ordered: Callable[[], str]) -> None:
    def run(rank: int, size: int) -> Any:
        model, optimizer, _ = steps(Normless, step)(rank, size)
        with model.join():
            for _ in range(3 + rank):
                model(torch.ones(2, 7)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return optimizer.is_resting, torch.cat([p.detach().flatten() for p in model.parameters()])

    found = run_threads(run, 2)
    assert all(is_resting for is_resting, _ in found)
    assert "inside join()" in ordered()


def test_a_contender_that_fails_on_all_ranks_is_dropped_and_nothing_changes(ordered: Callable[[], str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory left")

    plain = run_threads(train, 2, ddp, "adamw", Loop, 1)
    with mock.patch("guozhuang.sharding.resting.zeros_for", fail_later(fail)):
        raced = run_threads(train, 2, auto.prepare_auto, "adamw", Loop, 1)
    assert all(
        torch.equal(a, b) for mine, theirs in zip(raced, plain, strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    assert "strategy auto: ddp: no difference" in ordered() and "no memory left" in ordered()


def test_a_contender_that_fails_on_one_rank_ends_the_training(ordered: Callable[[], str]) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory left")
        return torch.zeros(_[0], dtype=_[1])

    with (
        mock.patch("guozhuang.sharding.resting.zeros_for", fail_later(fail)),
        pytest.raises(AssertionError, match="1 of 2 ranks could not divide"),
    ):
        run_threads(steps(Loop, NUM_STEPS), 2)


def fail_later(fail: Any) -> Any:
    return lambda group: fail


def test_the_clock_starts_with_the_first_step_and_ends_the_race(caplog: pytest.LogCaptureFixture) -> None:
    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            cls.now += 20.0
            return cls.now

    def run(rank: int, size: int) -> Any:
        model, optimizer = prepared(auto.prepare_auto, rank, size, *made("adamw"))
        assert Clock.now == 0.0  # what comes before the first step costs the race nothing
        dist.barrier()
        going = Loop(model, optimizer, torch.Generator().manual_seed(5), rank, size)
        for step in range(40):
            going.step(step)
        return model._race._num_steps, model._race._turn_at

    run_threads(divided_step, 2)
    with mock.patch.object(auto, "time", Clock), caplog.at_level(logging.WARNING, "guozhuang"):
        found = run_threads(run, 2)
    said = [r.getMessage() for r in caplog.records if "strategy auto" in r.getMessage()]
    assert len(said) == 1 and all(turn_at == float("inf") for _, turn_at in found)
    assert "no difference that counts" in said[0] and "after 3 rounds" in said[0]


def test_an_optimizer_that_cannot_be_divided_is_left_alone(ordered: Callable[[], str]) -> None:
    def run(rank: int, size: int) -> None:
        model, _ = made("adamw")
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        assert prepared(auto.prepare_auto, rank, size, model, optimizer)[1] is optimizer

    run_threads(run, 2)
    assert "LBFGS" in ordered()


def test_a_new_group_of_other_parameters_is_refused() -> None:
    def run(rank: int, size: int) -> None:
        _, optimizer = prepared(auto.prepare_auto, rank, size, *made("adamw"))
        with pytest.raises(UsageError, match="are not the model's"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 1

    run_threads(run, 2)
