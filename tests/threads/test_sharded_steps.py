"""``sharded``: gradients between clipping and the step, several optimizers, memory and numbers that a step must stand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.errors import MismatchError, UsageError
from guozhuang.exchange import AllReduce
from guozhuang.groups.subgroups import subgroup
from guozhuang.registry import registry
from guozhuang.sharding import shard
from tests.threads.ranks import run_threads


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()


def rows(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def both_ways(
    rank: int,
    size: int,
    plain: nn.Module,
    before_step: Callable[[Any, int], object],
    before_forward: Callable[[Any, int], object] = lambda model, step: None,
) -> list[list[Tensor]]:
    """The weights after four steps in one process and on a rank of ``sharded``; the script does something around backward."""
    found = []
    for is_alone in (True, False):
        model: Any = copy.deepcopy(plain)
        optimizer: Any = sgd(model)
        if not is_alone:
            model, optimizer = shard(model, optimizer)
        for step in range(4):
            before_forward(model, step)
            model(rows(step) if is_alone else rows(step)[rank::size]).square().mean().backward()
            before_step(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


def drops(rank: int, size: int, plain: nn.Module, sets_to_none: bool) -> list[list[Tensor]]:
    """As of a norm that is not finite; the step after it is as any other."""

    def clip_and_drop(model: Any, step: int) -> None:
        gz.clip_grad_norm_(model.parameters(), 0.1)
        if step == 2:
            model.zero_grad(set_to_none=sets_to_none)

    return both_ways(rank, size, plain, clip_and_drop)


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_dropped_after_clipping_are_not_used(num_ranks: int, sets_to_none: bool) -> None:
    for alone, found in run_threads(drops, num_ranks, two_layers(), sets_to_none):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def drop_one(model: nn.Module) -> None:
    gz.clip_grad_norm_(model.parameters(), 1.0)
    model[1].weight.grad = None  # type: ignore[index]


def limit_clipped_ones(model: nn.Module) -> None:
    gz.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.clamp_(-1e-3, 1e-3)


def use_both_functions(model: nn.Module) -> None:
    gz.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clip_between(model: nn.Module) -> None:
    model.zero_grad()
    (1000 * model[0](rows(0)).sum()).backward()  # type: ignore[index]
    gz.clip_grad_norm_(model.parameters(), 1.0)
    model[1](rows(0)).sum().backward()  # type: ignore[index]


def freeze_after_clipping(model: nn.Module) -> None:
    gz.clip_grad_norm_(model.parameters(), 1.0)
    model[1].requires_grad_(False)  # type: ignore[index]


REFUSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "one dropped": (drop_one, r"the gradient of 1\.weight was dropped after gz\.clip_grad_norm_"),
    "changed by hand": (limit_clipped_ones, "was changed after the last backward"),
    "PyTorch's after ours": (use_both_functions, r"call gz\.clip_grad_norm_ last"),
    "frozen after it": (freeze_after_clipping, r"frozen, thawed or added after gz\.clip_grad_norm_"),
    "a backward after it": (clip_between, "a backward has added to gradients that were averaged already"),
}


def is_refused(rank: int, size: int, plain: nn.Module, what: str) -> None:
    change, text = REFUSED[what]
    model, optimizer = shard(plain := copy.deepcopy(plain), sgd(plain))
    model(rows(rank)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=text):
        change(model)
        optimizer.step()
    assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_changes_after_clipping_are_refused_on_any_number_of_ranks(num_ranks: int, what: str) -> None:
    run_threads(is_refused, num_ranks, two_layers(), what)


def clips_what_no_optimizer_holds(rank: int, size: int, plain: nn.Module, clip: Callable[..., object]) -> None:
    model: Any = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match=r"in no group of the optimizer"):
        model, _ = shard(model, sgd(model[0]))
    model(rows(rank)).square().mean().backward()
    with pytest.raises(UsageError, match=r"no prepared optimizer holds parameter 1 of them.*\(got \(4, 4\)\)"):
        clip(model.parameters(), 0.1)
    model[1].requires_grad_(False)
    model[1].zero_grad(set_to_none=False)
    clip(model.parameters(), 0.1)  # zeros are nothing


@pytest.mark.parametrize("clip", [gz.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_a_norm_is_not_of_averages_and_of_own_gradients(clip: Callable[..., object]) -> None:
    run_threads(clips_what_no_optimizer_holds, 2, two_layers(), clip)


def limit_averages(model: Any) -> None:
    with gz.averaged_gradients(model):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.002, 0.002)


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


LIMITS: dict[str, Callable[[Any], object]] = {
    "gz.clip_grad_norm_": lambda m: gz.clip_grad_norm_(trained(m), 0.05),
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(trained(m), 0.05),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(trained(m), 0.002),
    "of what was thawed alone": lambda m: (
        gz.clip_grad_norm_([m[0].weight], 0.01) if m[0].weight.requires_grad else None
    ),
    "averaged_gradients": limit_averages,
}


def clips_what_is_thawed(rank: int, size: int, plain: nn.Module, how: str) -> list[list[Tensor]]:
    return both_ways(
        rank,
        size,
        plain,
        lambda model, _: LIMITS[how](model),
        lambda model, step: model[0].requires_grad_(step in (1, 3)),
    )


@pytest.mark.parametrize("how", LIMITS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_frozen_and_thawed_is_clipped_with_the_rest(num_ranks: int, how: str) -> None:
    for alone, found in run_threads(clips_what_is_thawed, num_ranks, two_layers(), how):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != left_out else x
        return x


def two_optimizers(model: Layers) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([model.layers[i].weight for i in which], lr=0.1) for which in ((3, 1), (2, 0))]


def trains_by_two(rank: int, size: int, plain: Layers) -> list[list[Tensor]]:
    """Rank 1 leaves a layer out once, so that its gradients come in another order."""
    alone = copy.deepcopy(plain)
    model: Any = copy.deepcopy(plain)
    model, optimizers = shard(model, two_optimizers(model))
    own = two_optimizers(alone)
    for step in range(6):

        def loss(made: Any, of: int, step: int = step) -> Tensor:
            found: Tensor = made(rows(10 * step + of), 1 if (step, of) == (3, 1) else -1).tanh().sum()
            return found

        loss(model, rank).backward()
        (sum(loss(alone, of) for of in range(size)) / size).backward()  # type: ignore[union-attr]
        for each in (*optimizers, *own):
            each.step()
            each.zero_grad()
    return [[p.detach() for p in made.parameters()] for made in (model, alone)]


def test_buckets_of_two_optimizers_do_not_mix() -> None:
    torch.manual_seed(0)
    for found, alone in run_threads(trains_by_two, 2, Layers().double()):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


CLIPS: list[Callable[..., Any]] = [gz.clip_grad_norm_, nn.utils.clip_grad_norm_]


def clips_two_models(rank: int, size: int, plain: nn.Module, members: list[list[int]], clips: Any) -> Any:
    """Each of two models is sharded over some ranks, which clip all that they have together; and the same in one process."""
    world = dist.group.WORLD
    assert world is not None
    alone, groups = copy.deepcopy(plain), [subgroup(world, some) if rank in some else None for some in members]
    held: list[Any] = []
    for group, model in zip(groups, (copy.deepcopy(plain), copy.deepcopy(plain)), strict=True):
        if group is not None:
            held.append(shard(model, sgd(model), group))
            model(rows(group.rank())).sum().backward()
    clips([p for model, _ in held for p in model.parameters()], 0.1)
    for _, optimizer in held:
        optimizer.step()
    (sum(alone(rows(of)).sum() for of in range(size)) / size).backward()  # type: ignore[union-attr]
    twice = [p for p in alone.parameters() for _ in held]  # the norm of two equal models
    nn.utils.clip_grads_with_norm_(alone.parameters(), 0.1, nn.utils.get_total_norm([p.grad for p in twice]))
    sgd(alone).step()
    return [[p.detach() for p in model.parameters()] for model in (alone, *(model for model, _ in held))]


@pytest.mark.parametrize("clips", CLIPS)
def test_two_models_of_two_groups_of_the_same_ranks_are_clipped_together(clips: Any) -> None:
    for alone, *both in run_threads(clips_two_models, 2, two_layers(), [[0, 1], [0, 1]], clips):
        for found in both:
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("members", [[[0, 1], [0]], [[0], [0, 1]]])
def test_models_of_different_ranks_are_not_clipped_together(members: list[list[int]], clips: Any) -> None:
    with pytest.raises(AssertionError, match=r"rank 0[\s\S]*sharded over different ranks"):
        run_threads(clips_two_models, 2, two_layers(), members, clips)


def skips_a_backward(rank: int, size: int, plain: nn.Module, reduces: bool) -> tuple[str, int]:
    """Rank 1 leaves out the backward of one step; the script's own all-reduce is of the same size as the bucket."""
    model, optimizer = shard(plain := copy.deepcopy(plain), sgd(plain), exchange=AllReduce())
    num_elements = sum(p.numel() for p in model.parameters())
    for step in range(6):
        loss = model(rows(step)).sum()
        if rank != 1 or step != 4:
            loss.backward()
        if reduces:
            dist.all_reduce(torch.full((num_elements,), step, dtype=torch.float64))
        try:
            optimizer.step()
        except MismatchError as error:
            return str(error), step
        optimizer.zero_grad()
    return "", 6


@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_that_met_gradients_of_others_is_named_in_its_step(size: int) -> None:
    for rank, (text, step) in enumerate(run_threads(skips_a_backward, size, two_layers(), True)):
        assert step == 4, text
        assert f"[rank {rank}]" in text and "a collective, which was paired with gradients" in text


def test_without_one_a_rank_without_gradients_counts_as_zeros_until_it_is_known_to_have_left_out_a_batch() -> None:
    for text, step in run_threads(skips_a_backward, 2, two_layers(), False):
        assert step == 5 and "ranks differ in their steps" in text


def is_scaled_once(rank: int, size: int, plain: nn.Module) -> float:
    model, optimizer = shard(plain := copy.deepcopy(plain), sgd(plain))
    optimizer.carrier.close()  # still held, as by a script
    model, again = shard(model, sgd(model))
    model(rows(rank)).sum().backward()
    before = model[1].weight.grad.clone()
    registry.weight.set(0.5, 1)
    found = float((model[1].weight.grad / before).max())
    registry.weight.set(1.0, 0)
    assert torch.equal(model[1].weight.grad, before) and again.carrier.averages
    return found


def test_a_closed_carrier_changes_nothing() -> None:
    assert run_threads(is_scaled_once, 1, two_layers()) == [2.0]
    assert registry.weight.value == 1.0


def is_laid_over_itself(rank: int, size: int, plain: nn.Linear) -> list[Tensor]:
    alone, model = copy.deepcopy(plain), copy.deepcopy(plain)
    model, optimizer = shard(model, sgd(model))
    alone.weight.data = alone.weight.data.t().clone()
    model.weight.data = model.weight.data.t()  # in the memory that it has
    own = sgd(alone)
    for made, stepped, x in ((model, optimizer, rows(0)[rank::size]), (alone, own, rows(0))):
        made(x).square().mean().backward()
        stepped.step()
    return [model.weight.detach(), alone.weight.detach()]


def test_a_parameter_may_be_laid_over_its_own_memory_in_another_order() -> None:
    torch.manual_seed(0)  # here: the ranks' threads share one generator
    for found, alone in run_threads(is_laid_over_itself, 2, nn.Linear(4, 4, bias=False).double()):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def has_large_halves(rank: int, size: int) -> Tensor:
    model: Any = nn.Linear(4, 4, bias=False).half()
    nn.init.zeros_(model.weight)
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=2.0**-10))
    model.weight.grad = torch.full((4, 4), 40_000.0, dtype=torch.float16)
    optimizer.step()
    found: Tensor = model.weight.detach()
    return found


def test_a_sum_of_halves_does_not_overflow_where_their_mean_does_not() -> None:
    for found in run_threads(has_large_halves, 2):
        torch.testing.assert_close(found, torch.full((4, 4), -40_000 * 2.0**-10).half(), rtol=1e-3, atol=0)
