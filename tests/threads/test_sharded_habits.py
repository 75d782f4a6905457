"""Habits of training scripts under the strategies that average gradients: equal to one process, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guozhuang import DistributedDataParallel
from guozhuang.errors import MismatchError, UsageError
from guozhuang.sharding import shard
from guozhuang.sharding.fully import shard_fully
from guozhuang.sharding.fully.together import History
from tests.processes.habits import Spectral
from tests.threads.ranks import run_threads

Pair = tuple[nn.Module, Optimizer]

STRATEGIES: dict[str, Callable[[nn.Module, Optimizer], Pair]] = {
    "ddp": lambda m, o: (DistributedDataParallel(m, find_unused_parameters=True), o),
    "sharded": shard,
    "sharded-gradients": lambda m, o: shard_fully(m, o, keep_weights=True),
    "sharded-weights": lambda m, o: shard_fully(m, o, keep_weights=False),
}
FULLY = ("sharded-gradients", "sharded-weights")


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def whole(tensor: Any) -> Tensor:
    """A whole weight; DTensor gathers by functions of C++ that know the groups of processes alone."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach()
    size = dist.get_world_size()
    rows = -(-tensor.shape[0] // size)
    padded = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)
    padded[: len(tensor.to_local())] = tensor.to_local().detach()
    parts = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return torch.cat(parts)[: tensor.shape[0]]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A model made before there are ranks, which draw from one generator where they are threads."""
    torch.manual_seed(0)
    return make().double()


def some_quick(table: dict[str, Any], *quick: str) -> list[Any]:
    """The rows of a table, all but a few of them slow tests."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in table]


def same_as_one(model: nn.Module, one: nn.Module) -> None:
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    for (name, p), q in zip(inside.named_parameters(), one.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p), q[1].detach(), rtol=0, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def trained(
    rank: int,
    size: int,
    strategy: str,
    plain: nn.Module,
    train: Callable[[nn.Module, Optimizer, Callable[[Tensor], Tensor]], None],
) -> None:
    """Train as one process on all rows and as ranks on their own, and compare the weights."""
    one, model, optimizer = copy.deepcopy(plain), copy.deepcopy(plain), adam
    train(one, optimizer(one), lambda rows: rows)
    prepared = STRATEGIES[strategy](model, optimizer(model))
    train(*prepared, lambda rows: rows[rank::size])
    same_as_one(prepared[0], one)


# ---- what a unit returns, and how a backward reaches it -------------------------------------------------------------------


class Result:
    def __init__(self, y: Tensor, more: Any) -> None:
        self.y, self.more = y, more


class OwnBlock(nn.Module):
    """Returns an object of its own class; its loss may be kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.kept, self.losses = nn.Linear(4, 4), torch.zeros(()), {"aux": []}

    def forward(self, x: Any) -> Result:
        y = torch.tanh(self.inside(x.y if isinstance(x, Result) else x))
        self.kept, self.losses = y.pow(4).mean(), {"aux": [y.pow(2).mean()]}
        return Result(y, [{"deep": y * 2}])


class OwnNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(OwnBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Result:
        found: Any = self.first(x)
        for block in self.blocks:
            found = block(found)
        return found


def by_own_class(model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    for step in range(3):
        found = model(mine(batch(step)))
        (found.y.pow(2).mean() if step % 2 else found.more[0]["deep"].pow(4).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_attributes(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    blocks = (model.module if isinstance(model, DistributedDataParallel) else model).blocks
    for step in range(3):
        found = model(mine(batch(step)))
        loss = [found.y.mean() + blocks[0].kept, blocks[1].kept, blocks[2].losses["aux"][0]][step]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def smooth() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        *(nn.Sequential(nn.Linear(6, 6), nn.Softplus()) for _ in range(2)),
        nn.Linear(6, 1),
    )


def by_penalties(model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """Gradient penalties with the loss, alone, in two backwards, and between two forwards."""
    for step in range(6):
        x = mine(batch(step)).clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        if step % 3 == 0:
            (penalty + y.mean()).backward()
        elif step % 3 == 1:
            penalty.backward()
        else:
            penalty.backward(retain_graph=True)
            (model(mine(batch(step + 10))).pow(2).mean() + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_micro_batches(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """Two backwards in a step, of which the first exchanges nothing where gradients are exchanged in backward."""
    for step in range(4):
        for micro in range(2):
            waits = model.no_sync() if micro == 0 and hasattr(model, "no_sync") else contextlib.nullcontext()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 1)
            x = mine(batch(10 * step + micro)).clone().requires_grad_()
            with waits:
                y = model(x)
                slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0] if step % 2 else y
                (slope.pow(2).mean() + y.pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_penalty_on_weights(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """A penalty on the weights, which the script computes from the parameters between forward and backward."""
    for step in range(3):
        loss = model(mine(batch(step))).pow(2).mean()
        (loss + 0.1 * sum(squared(p) for p in model.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()


def squared(parameter: Any) -> Any:
    return Squared.apply(parameter) if hasattr(parameter, "to_local") else parameter.pow(2).sum()


class Squared(torch.autograd.Function):
    """What DTensor computes by functions of C++ that know the groups of processes alone: its gradient comes undivided."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.parameter = parameter
        return whole(parameter).pow(2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        undivided = 2 * gradient * whole(ctx.parameter)
        return DTensor.from_local(undivided, ctx.parameter.device_mesh, [Replicate()], run_check=False)


def by_closures(model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """The step's gradients are there when its closure has run; some have a penalty, and an evaluation comes between steps."""
    for step in range(4):
        x = mine(batch(step)).clone().requires_grad_()

        def closure(x: Tensor = x, step: int = step) -> Tensor:
            optimizer.zero_grad()
            y = model(x)
            slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0] if step % 2 == 0 else y
            loss = slope.pow(2).mean() + y.pow(2).mean()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        if step < 2:
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch(step))


def by_thawing(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """Parts are frozen and trained again, as in stages of a fine-tuning."""
    for step in range(4):
        for name, parameter in model.named_parameters():
            if "1.0." in name:
                parameter.requires_grad_(step in (1, 2))
        model(mine(batch(step))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def channels_last() -> nn.Module:
    """Weights that do not lie in the order of their dimensions."""
    parts = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.Flatten()]
    model = nn.Sequential(*parts).to(memory_format=torch.channels_last)
    model.append(nn.Linear(3, 2))
    model[-1].weight = nn.Parameter(torch.randn(3, 2).t())
    assert not all(p.is_contiguous() for p in model.parameters())
    return model


def plainly(model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    for step in range(3):
        model(mine(batch(step))).abs().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_inference_first(model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """An evaluation comes before the first step, as a check of the loop does."""
    for step in range(3):
        model.eval()
        with torch.inference_mode():
            model(batch(10 + step))
        model.train()
        model(mine(batch(step))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_a_group_added_later(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """The last layer is trained from the third step on; forwards without a backward come before."""
    last = (model.module if isinstance(model, DistributedDataParallel) else model)[-1]
    del optimizer.param_groups[0]["params"][-2:]
    for step in range(4):
        if step == 1:
            with torch.no_grad():
                model(mine(batch(20)))
        if step == 2:
            model(mine(batch(21)))
            optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.02})
        model(mine(batch(step))).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()


HABITS = {
    "an evaluation first": (smooth, by_inference_first),
    "a group added later": (smooth, by_a_group_added_later),
    "channels_last": (channels_last, plainly),
    "micro-batches": (smooth, by_micro_batches),
    "closures": (smooth, by_closures),
    "frozen and thawed": (smooth, by_thawing),
    "a penalty on weights": (smooth, by_penalty_on_weights),
    "own class": (OwnNet, by_own_class),
    "attributes": (OwnNet, by_attributes),
    "penalties": (smooth, by_penalties),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("habit", HABITS)
def test_it_is_equal_to_one_process(habit: str, strategy: str) -> None:
    make, train = HABITS[habit]
    run_threads(trained, 2, strategy, made(make), train)


def by_limits_after_penalties(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """What a script reads between a backward through a backward and the step has the gradients."""
    for step in range(3):
        x = mine(batch(step)).clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope.pow(2).mean() + y.mean()).backward()
        with torch.no_grad():
            model(batch(10 + step))
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-1e-3, 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def by_an_average_of_skipped_steps(model: Any, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    """The average goes on where the script has thought better of a backward; the model becomes it in the end."""
    average = copy.deepcopy(model)
    for step in range(4):
        loss = model(mine(batch(step))).pow(2).mean()
        if step % 2 == 0:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            by_zip(average, model)
    with torch.no_grad():
        for a, b in zip(average.parameters(), model.parameters(), strict=True):
            b.copy_(a)


@pytest.mark.parametrize("strategy", FULLY)
@pytest.mark.parametrize("train", [by_limits_after_penalties, by_an_average_of_skipped_steps])
def test_divided_parameters_are_read_between_forward_and_step(
    train: Callable[[nn.Module, Optimizer, Callable[[Tensor], Tensor]], None], strategy: str
) -> None:
    run_threads(trained, 2, strategy, made(smooth), train)


# ---- copies ------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tied weights, frozen ones, a buffer, a hook and an attribute of the script, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.out.weight = self.inp.weight
        self.blocks[0][0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((), 2.0))
        self.count, self.known = 0, [self.blocks]
        self.register_forward_hook(counts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def counts(module: Any, inputs: Any, output: Any) -> None:
    module.count += 1


def by_zip(average: nn.Module, model: nn.Module) -> None:
    for a, b in zip(average.parameters(), model.parameters(), strict=True):
        a.mul_(0.9).add_(b, alpha=0.1)


def by_foreach(average: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


def by_state(average: nn.Module, model: nn.Module) -> None:
    now = model.state_dict()
    for name, value in average.state_dict().items():
        value.lerp_(now[name], 0.1)


def by_class(average: Any, model: nn.Module) -> None:
    average.update_parameters(model)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))


AVERAGES = {
    "zip": (copy.deepcopy, by_zip),
    "foreach": (copy.deepcopy, by_foreach),
    "state_dict": (copy.deepcopy, by_state),
    "AveragedModel": (averaged, by_class),
}


def averages(rank: int, size: int, strategy: str, how: str, plain: nn.Module) -> None:
    start, update = AVERAGES[how]
    outputs = []
    for is_alone in (True, False):
        model, x = copy.deepcopy(plain), batch(99)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if not is_alone:
            model, optimizer = STRATEGIES[strategy](model, optimizer)
        average, best = start(model), None
        for step in range(4):
            rows = batch(step)
            model(rows if is_alone else rows[rank::size]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                update(average, model)
                outputs.append(average(x))  # evaluated, then averaged again
                outputs.append(model(x))
            best = copy.deepcopy(model) if step == 1 else best
        outputs.append(best(x).detach())
        inside = best.module if isinstance(best, DistributedDataParallel) else best
        assert inside.out.weight is inside.inp.weight and not inside.blocks[0][0].bias.requires_grad
        assert inside.known[0] is inside.blocks
        best(x).sum().backward()  # a copy may be trained on, by another optimizer
    half = len(outputs) // 2
    for alone, ours in zip(outputs[:half], outputs[half:], strict=True):
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", some_quick(AVERAGES, "zip", "AveragedModel"))
def test_averages_of_weights_are_those_of_one_process(how: str, strategy: str) -> None:
    run_threads(averages, 2, strategy, how, made(Tied))


def refuses_copies(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    model, _ = STRATEGIES[strategy](model, adam(model))
    with pytest.raises(UsageError, match=r"cannot be copied without the model.*copy\.deepcopy\(model\)"):
        copy.deepcopy(model.blocks[0])
    with pytest.raises(UsageError, match=r"a pickle of the module.*gz\.save"):
        pickle.dumps(model)
    if strategy == "sharded-gradients":
        model(batch(0))
        with torch.no_grad():
            model.out.bias.zero_()  # gathered now, so that the change would be lost
            with pytest.raises(UsageError, match=r"out\.bias was changed while it was gathered"):
                list(model.parameters())
    with torch.no_grad():
        model(batch(0))
        for parameter in model.parameters():
            parameter.zero_()
        assert not model(batch(0)).any()


@pytest.mark.parametrize("strategy", FULLY)
def test_what_cannot_be_copied_or_would_be_lost_is_refused(strategy: str) -> None:
    run_threads(refuses_copies, 2, strategy, made(Tied))


# ---- a model that changes after prepare -----------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Any], object]] = {
    "a layer replaced": lambda m: setattr(m, "out", nn.Linear(4, 4).double()),
    "a block replaced": lambda m: m.blocks.__setitem__(1, nn.Sequential(nn.Linear(4, 4)).double()),
    "a layer inside of a block replaced": lambda m: m.blocks[1].__setitem__(0, nn.Linear(4, 4).double()),
    "a parameter replaced": lambda m: setattr(m.out, "bias", nn.Parameter(torch.zeros(4).double())),
    "a parametrization added": lambda m: nn.utils.parametrizations.weight_norm(m.blocks[0][0]),
}


def changes(rank: int, size: int, strategy: str, change: str, plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, adam(model))
    model(batch(rank)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    CHANGES[change](model.module if isinstance(model, DistributedDataParallel) else model)
    with pytest.raises(
        UsageError, match=r"added to the model after it was prepared.*(out|blocks\.[01]).*prepare it then"
    ):
        model(batch(rank))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", some_quick(CHANGES, "a layer inside of a block replaced"))
def test_a_model_that_changes_after_prepare_is_refused(change: str, strategy: str) -> None:
    run_threads(changes, 2, strategy, change, made(Tied))


def of_dropped(rank: int, size: int, strategy: str, plain: nn.Module) -> list[Any]:
    model = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, adam(model))
    best = copy.deepcopy(model)
    for each in (model, best):
        each(batch(rank)).mean().backward()
    optimizer.step()
    left = [weakref.ref(each) for each in (model, best)]
    return left


@pytest.mark.parametrize("strategy", FULLY)
@pytest.mark.parametrize("make", [Tied, smooth])
def test_models_and_their_copies_are_freed(make: Callable[[], nn.Module], strategy: str) -> None:
    left = run_threads(of_dropped, 2, strategy, made(make))
    gc.collect()
    assert [ref() is None for refs in left for ref in refs] == [True] * 4


# ---- parts of the model that ranks use differently ---------------------------------------------------------------------------


class Experts(nn.Module):
    """One of equal experts for each sample; ``calls``: "chosen" ones alone, or "all", without samples where nobody chose it."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls, self.gate = calls, nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        weights, y = self.gate(x).softmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if self.calls == "all" or mask.any():
                places = mask.nonzero().squeeze(1)
                y = y.index_put((places,), expert(x[mask]) * weights[mask, i : i + 1])
        return y


CHOICES = {
    "other experts on each rank": [0, 1] * 4,
    "one expert more on one rank": [0, 0, 0, 1] * 2,
    "a later one on one rank": [0, 1, 2, 2] * 2,
}


def by_choice(
    model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor], choice: list[int] | None = None
) -> None:
    for step in range(3):
        x, chosen = batch(step), torch.tensor(choice or [0, 1, 2, 1, 0, 0, 1, 2])
        model(mine(x), mine(chosen)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Branches(nn.Module):
    """Layers of one shape inside of one unit, of which each rank uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, is_second: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number, part in enumerate((self.first, self.second)):
            if (is_second == number).any():
                found = found + part(x) * (is_second == number)[:, None]
        return found


def by_branch(model: nn.Module, optimizer: Optimizer, mine: Callable[[Tensor], Tensor]) -> None:
    for step in range(3):
        model(mine(batch(step)), mine(torch.tensor([0, 1] * 4))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_that_are_called_on_every_rank_are_equal(strategy: str) -> None:
    run_threads(trained, 2, strategy, made(lambda: Experts("all")), by_choice)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_branches_inside_a_unit_are_equal(strategy: str) -> None:
    run_threads(trained, 2, strategy, made(Branches), by_branch)


def chooses(rank: int, size: int, strategy: str, plain: nn.Module, choice: list[int]) -> str:
    if strategy not in FULLY:
        trained(rank, size, strategy, plain, lambda *given: by_choice(*given, choice))
        return ""
    with pytest.raises(MismatchError, match=r"with an empty batch.*the strategy sharded") as error:
        trained(rank, size, strategy, plain, lambda *given: by_choice(*given, choice))
    return str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("choice", some_quick(CHOICES, "other experts on each rank"))
def test_experts_chosen_by_the_samples_are_equal_or_named(choice: str, strategy: str) -> None:
    for rank, text in enumerate(run_threads(chooses, 2, strategy, made(lambda: Experts("chosen")), CHOICES[choice])):
        if strategy in FULLY:
            assert text.startswith(f"[rank {rank}] ranks do different things")
            assert (
                len(re.findall(r"^ +[01] +the (gathering of the weights|sum of the gradients) of \S", text, re.M)) == 2
            )
            assert "experts." in text


def without_a_loss(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, adam(model))
    loss = model(batch(rank)).pow(2).mean() if rank == 0 else torch.zeros((), requires_grad=True) * 2
    with pytest.raises(MismatchError, match="let every rank's loss come from the model"):
        if rank == 1:
            model(batch(rank))
        loss.backward()
        optimizer.step()
        model(batch(rank))


@pytest.mark.parametrize("strategy", FULLY)
def test_a_rank_whose_loss_is_not_of_the_model_is_named(strategy: str) -> None:
    run_threads(without_a_loss, 2, strategy, made(smooth))


def compares_at_the_end(rank: int, size: int) -> None:
    history = History(dist.group.WORLD, torch.device("cpu"))
    for unit in (0, 1 + rank):
        history.before_gather(unit)
        assert history.before_sum(unit, [True, False]) == [True, False]
    history.end_step()
    history.before_gather(0)
    with pytest.raises(MismatchError, match="in the last step ranks have used different parts") as error:
        history.end_step()
    assert len(set(re.findall(r"[0-9a-f]{8}$", str(error.value), re.M))) == 2


def test_without_comparisons_on_the_way_a_step_is_compared_at_its_end() -> None:
    run_threads(compares_at_the_end, 2)


def with_hooks(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, adam(model))
    seen: list[Any] = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model(batch(rank)).mean().backward()
    optimizer.step()
    assert len(seen) == 1
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    model(batch(rank)).mean().backward()
    with pytest.raises(UsageError, match=r"the hooks of register_hook do not see.*0\.weight"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    model(batch(rank)).mean().backward()
    with pytest.raises(UsageError, match=r"not averaged, of .*0\.weight"):
        optimizer.step()


def is_complex(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    expected = pytest.raises(UsageError, match=r"complex.*the strategy ddp")
    with contextlib.nullcontext() if strategy == "ddp" else expected:
        trained(rank, size, strategy, plain, plainly)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_complex_parameters_are_equal_or_refused(strategy: str) -> None:
    torch.manual_seed(0)
    run_threads(is_complex, 2, strategy, Spectral())


def with_gradients_by_hand(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, adam(model))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(batch(rank)).mean(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(UsageError, match=r"no parameter of the model has a gradient.*torch\.autograd\.grad"):
        optimizer.step()


@pytest.mark.parametrize("strategy", FULLY)
def test_gradients_that_autograd_does_not_find_are_refused(strategy: str) -> None:
    run_threads(with_gradients_by_hand, 2, strategy, made(smooth))


def asks_for_gradients(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    model, _ = STRATEGIES[strategy](model, adam(model))
    parameters = list(model.parameters())
    for asked in (parameters, {"first": parameters[0]}, parameters[-1]):
        loss = model(batch(rank)).mean()
        with pytest.raises(
            UsageError, match=r"asked for gradients of weights that are divided.*Fix: call loss\.backward"
        ):
            torch.autograd.grad(loss, asked)  # type: ignore[arg-type]
        loss.backward()
    other = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="allow_unused=True"):  # PyTorch's own, where it is right
        torch.autograd.grad(torch.ones(2, requires_grad=True).sum(), other)


@pytest.mark.parametrize("strategy", FULLY)
def test_who_asks_autograd_for_gradients_of_divided_weights_is_told_what_to_do(strategy: str) -> None:
    run_threads(asks_for_gradients, 2, strategy, made(smooth))


@pytest.mark.parametrize("strategy", FULLY)
def test_hooks_that_pytorch_would_not_call_are_refused(strategy: str) -> None:
    run_threads(with_hooks, 2, strategy, made(smooth))
