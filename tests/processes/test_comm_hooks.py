"""PyTorch's communication hooks under our wrapper: the same numbers as under PyTorch's, and no crash where PyTorch's crashes.

Twins: PyTorch's DDP with the same hook in the same ranks where that works (one bucket, or hooks of one round); a group of one
rank on the joined batch where it does not (PowerSGD is linear in the gradients, error feedback included, so several ranks must
come to what one comes to); plain arithmetic for what PyTorch refuses on CPU (bf16).

Two hooks are not here because they raise by themselves in torch 2.13, whoever calls them: ``batched_powerSGD_hook`` (hands a
matrix to a function that asserts three dimensions) and the quantization hooks (index a tensor without dimensions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.optim import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.cast import Cast
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.warmup import WeightWarmup
from guozhuang.timeline import Timeline
from tests.processes.cases import as_tests, assert_equal_everywhere
from tests.threads.ranks import run_threads

ROWS = 3
SMALL = 0.002  # MiB: a bucket for each layer
Future = torch.futures.Future
Hook = Callable[[Any, dist.GradBucket], Future]


class Layers(nn.Module):
    def __init__(self, branches: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(20, 24)
        self.branches = nn.ModuleList(nn.Linear(24, 24) for _ in range(branches))
        self.last = nn.Linear(24, 16)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        return self.last(torch.tanh(self.branches[branch](torch.tanh(self.first(x)))))


def train(
    wrapper: type[nn.Module],
    group: dist.ProcessGroup,
    rows: Callable[[Tensor], Tensor],
    hook: tuple[Any, Hook] | None,
    *,
    cap: float = SMALL,
    steps: int = 4,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    learning_rate: float = 0.1,
    branch: Callable[[int], int] | None = None,
    timeline: bool = False,
) -> Tensor:
    """Train, and return all weights as one tensor."""
    torch.manual_seed(3)
    model = Layers(2 if branch else 1).to(dtype)
    ddp = wrapper(model, process_group=group, bucket_cap_mb=cap, find_unused_parameters=branch is not None)
    if hook is not None:
        ddp.register_comm_hook(*hook)
    if timeline:
        ddp.timeline = Timeline(group.rank())
    stepper = torch.optim.SGD(ddp.parameters(), learning_rate)
    for step in range(steps):
        stepper.zero_grad()
        for micro in range(micro_batches):
            torch.manual_seed(100 * step + micro)
            x = torch.randn(2 * ROWS, 20, dtype=dtype)
            target = torch.randn(2 * ROWS, 16, dtype=dtype)
            with ddp.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
                arguments = () if branch is None else (branch(step),)
                (F.mse_loss(ddp(rows(x), *arguments), rows(target)) / micro_batches).backward()
        stepper.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def own_rows(rank: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[rank * ROWS : (rank + 1) * ROWS]


def all_rows(tensor: Tensor) -> Tensor:
    return tensor


# ---- as under PyTorch's DDP -------------------------------------------------------------------------------------------------


def one_bucket_powersgd(**options: Any) -> tuple[Any, Hook]:
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5, **options), powerSGD_hook.powerSGD_hook


def case_hooks_give_what_they_give_under_torch_ddp(rank: int, size: int) -> None:
    """The same bits on two ranks, as a sum of two has one rounding, wherever a gradient lies in its bucket."""
    subgroup, _ = dist.new_subgroups(1)
    group = dist.group.WORLD
    half = default_hooks.fp16_compress_wrapper

    def local_sgd() -> tuple[Any, Hook]:
        state = post_localSGD_hook.PostLocalSGDState(group, subgroup, start_localSGD_iter=2)
        return state, post_localSGD_hook.post_localSGD_hook

    hooks: dict[str, tuple[Callable[[], tuple[Any, Hook]], dict[str, Any]]] = {
        "allreduce": (lambda: (None, default_hooks.allreduce_hook), {}),
        "allreduce, a group as its state": (lambda: (group, default_hooks.allreduce_hook), {}),
        "allreduce, no_sync": (lambda: (None, default_hooks.allreduce_hook), {"micro_batches": 3}),
        "noop": (lambda: (None, debugging_hooks.noop_hook), {}),
        "fp16": (lambda: (None, default_hooks.fp16_compress_hook), {}),
        "fp16 around allreduce": (lambda: (None, half(default_hooks.allreduce_hook)), {}),
        "post-local SGD": (local_sgd, {}),
        "PowerSGD": (one_bucket_powersgd, {"cap": 25, "steps": 6}),
        "PowerSGD, no_sync": (one_bucket_powersgd, {"cap": 25, "steps": 5, "micro_batches": 2}),
        "PowerSGD, cold start": (lambda: one_bucket_powersgd(warm_start=False), {"cap": 25, "steps": 5}),
        "fp16 around PowerSGD": (
            lambda: (one_bucket_powersgd()[0], half(powerSGD_hook.powerSGD_hook)),
            {"cap": 25, "steps": 6},
        ),
        "optimizer inside the hook": (
            lambda: (
                None,
                optimizer_overlap_hooks._hook_then_optimizer(
                    default_hooks.allreduce_hook,
                    optimizer_overlap_hooks._OptimizerHookState(
                        _FunctionalSGD([], lr=0.1, _allow_empty_param_list=True)
                    ),
                ),
            ),
            {"learning_rate": 0.0},
        ),
    }
    for name, (make, options) in hooks.items():
        ours = train(DistributedDataParallel, group, own_rows(rank), make(), **options)
        peer = train(TorchDDP, group, own_rows(rank), make(), **options)
        untrained = train(DistributedDataParallel, group, own_rows(rank), None, steps=0)
        assert not torch.equal(ours, untrained), f"{name} trained nothing"
        # matrix products depend on how their operands lie in memory
        torch.testing.assert_close(ours, peer, rtol=0, atol=1e-6 if "PowerSGD" in name else 0, msg=name)


# ---- where PyTorch's DDP crashes or refuses ---------------------------------------------------------------------------------


def case_powersgd_with_several_buckets_equals_one_rank_on_the_joined_batch(rank: int, size: int) -> None:
    """PyTorch's own DDP ends here with "Received data size doesn't match expected size"."""
    alone = [dist.new_group([r]) for r in range(size)][rank]
    for options in ({}, {"micro_batches": 2}, {"branch": lambda step: step % 2, "timeline": True}):
        weights = []
        for group, rows in ((dist.group.WORLD, own_rows(rank)), (alone, all_rows)):
            state = PowerSGDState(
                group,
                matrix_approximation_rank=2,
                start_powerSGD_iter=2,
                min_compression_rate=0.5,
                orthogonalization_epsilon=1e-30,  # an unused layer is a matrix of zeros
            )
            hook = (state, powerSGD_hook.powerSGD_hook)
            weights.append(train(DistributedDataParallel, group, rows, hook, steps=10, dtype=torch.float64, **options))
            assert state.compression_stats()[0] > 1.5, "it compressed nothing"
        assert_equal_everywhere(weights[0])
        assert torch.allclose(*weights, rtol=1e-7, atol=1e-9), options


def case_bf16_hooks_work_on_cpu(rank: int, size: int) -> None:
    group = dist.group.WORLD
    for hook in (
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        torch.manual_seed(0)
        model = Layers()
        twin = Layers()
        twin.load_state_dict(model.state_dict())
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        ddp.register_comm_hook(group, hook)
        for _ in range(3):
            x = torch.randn(2 * ROWS, 20)
            ddp.zero_grad()
            ddp(own_rows(rank)(x)).pow(2).mean().backward()
            parts = []
            for other in range(size):
                twin.zero_grad()
                twin(own_rows(other)(x)).pow(2).mean().backward()
                parts.append([p.grad.clone() for p in twin.parameters()])
            for parameter, *grads in zip(model.parameters(), *parts, strict=True):
                mean = sum(g.bfloat16() / size for g in grads)
                assert torch.equal(parameter.grad, mean.float())
                assert parameter.grad.dtype == torch.float32


# ---- hooks of several rounds that users write -------------------------------------------------------------------------------


def chained(state: tuple[int, int], bucket: dist.GradBucket) -> Future:
    """Average ``num_rounds`` times, each round issued by the callback of the one before, after it has computed something."""
    num_rounds, seed = state
    size = dist.get_world_size()
    moody = random.Random(f"{seed} {bucket.index()}")
    future = dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future()

    def again(done: Future, num_sums: int) -> Tensor:
        value = done.value()[0] if isinstance(done.value(), list) else done.value()
        for _ in range(num_sums):  # another time on every rank
            value.sum()
        # Another size in each round: whoever meets the wrong partner sees it.
        longer = torch.cat([value, value.new_zeros(bucket.index() + 1)]) / size
        return dist.all_reduce(longer, async_op=True).get_future().wait()[0][: value.numel()].clone()

    for _ in range(num_rounds - 1):
        future = future.then(functools.partial(again, num_sums=moody.choice([0, 200, 800])))
    return future


def case_chained_collectives_with_delays_keep_one_order(rank: int, size: int) -> None:
    group = dist.group.WORLD
    for options in (
        {},
        {"micro_batches": 2},
        {"branch": lambda step: step % 2},
        {"branch": lambda step: (step // 2 + rank) % 2},
        {"branch": lambda step: step % 2, "timeline": True},
    ):
        plain = train(DistributedDataParallel, group, own_rows(rank), None, steps=6, **options)
        for rounds in (2, 3):
            hook = ((rounds, rank), chained)
            weights = train(DistributedDataParallel, group, own_rows(rank), hook, steps=6, **options)
            assert torch.equal(weights, plain), options


def case_several_rounds_beside_synchronized_batch_norm(rank: int, size: int) -> None:
    """The model itself communicates in backward, between the rounds of the hook."""
    results = []
    for hook in (None, ((3, rank), chained)):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(9, 9), nn.BatchNorm1d(9))))
        ddp = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model), bucket_cap_mb=0.0001)
        if hook is not None:
            ddp.register_comm_hook(*hook)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(5, 9)).pow(3).mean().backward()
        results.append([p.grad.clone() for p in ddp.parameters()])
    for plain, hooked in zip(*results, strict=True):
        assert torch.allclose(plain, hooked, rtol=1e-5, atol=1e-7)


# ---- what a hook sees -------------------------------------------------------------------------------------------------------


def case_what_a_hook_sees_and_that_its_result_is_taken(rank: int, size: int) -> None:
    seen: list[tuple[int, bool, int, list[str]]] = []
    model = Layers()
    names = {id(p): name for name, p in model.named_parameters()}

    def hook(state: list[Any], bucket: dist.GradBucket) -> Future:
        assert state is seen
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1 and buffer.numel() == sum(p.numel() for p in parameters)
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert torch.equal(buffer, torch.cat([g.reshape(-1) for g in gradients]))
        buffer.fill_(5.0)
        assert all(bool((g == 5).all()) for g in bucket.gradients())
        seen.append((bucket.index(), bucket.is_last(), buffer.numel(), [names[id(p)] for p in parameters]))
        other = torch.arange(buffer.numel(), dtype=torch.float16)
        bucket.set_buffer(other)  # as a wrapping hook does; from then on all methods speak of the other tensor
        assert bucket.buffer() is other
        assert torch.equal(other, torch.cat([g.reshape(-1) for g in bucket.gradients()]))
        assert all(g.dtype == torch.float16 for g in bucket.gradients())
        bucket.gradients()[0].fill_(7.0)
        assert float(other.max()) >= 7.0
        future: Future = Future()
        future.set_result(torch.full((buffer.numel(),), float(bucket.index())))
        return future

    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    ddp.register_comm_hook(seen, hook)
    for _ in range(2):
        seen.clear()
        ddp(torch.randn(2, 20)).sum().backward()
        assert len(seen) >= 3
        assert [s[0] for s in seen] == list(range(len(seen)))
        assert [s[1] for s in seen] == [False] * (len(seen) - 1) + [True]
        assert sorted(name for s in seen for name in s[3]) == sorted(names.values())
        for index, _, _, members in seen:
            assert all(bool((model.get_parameter(name).grad == index).all()) for name in members)


def fused_list(state: None, bucket: dist.GradBucket) -> Future:
    """A list of one tensor is what ``work.get_future()`` holds."""
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()


def case_a_hook_may_return_the_future_of_its_work(rank: int, size: int) -> None:
    group = dist.group.WORLD
    plain = train(DistributedDataParallel, group, own_rows(rank), None)
    assert torch.equal(train(DistributedDataParallel, group, own_rows(rank), (None, fused_list)), plain)


# ---- wrong hooks ------------------------------------------------------------------------------------------------------------


def no_future(state: None, bucket: dist.GradBucket):
    return bucket.buffer()


def wrong_size(state: None, bucket: dist.GradBucket) -> Future:
    future: Future = Future()
    future.set_result(torch.zeros(1))
    return future


def two_tensors(state: None, bucket: dist.GradBucket) -> Future:
    future: Future = Future()
    future.set_result([bucket.buffer(), bucket.buffer()])
    return future


def no_tensor(state: None, bucket: dist.GradBucket) -> Future:
    future: Future = Future()
    future.set_result("done")
    return future


def raises(state: None, bucket: dist.GradBucket) -> Future:
    raise KeyError("the hook's own error")


def raises_later(state: None, bucket: dist.GradBucket) -> Future:
    def later(_: Future) -> Tensor:
        raise ArithmeticError("the callback's own error")

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(later)


def backward_with(rank: int, size: int, hook: Hook) -> None:
    ddp = DistributedDataParallel(Layers(), bucket_cap_mb=SMALL)
    ddp.register_comm_hook(None, hook)
    ddp(torch.randn(2, 20)).sum().backward()


def case_wrong_returns_and_errors_of_hooks_surface_on_every_rank(rank: int, size: int) -> None:
    """All in one run: a broken hook must leave the group usable for the next wrapper."""
    for hook, kind, text in (
        (no_future, TypeError, "no_future.*Future"),
        (wrong_size, ValueError, "wrong_size.*one tensor of"),
        (two_tensors, ValueError, "two_tensors.*one tensor of"),
        (no_tensor, ValueError, "no_tensor.*one tensor of"),
        (raises, KeyError, "the hook's own error"),
        (raises_later, Exception, "the callback's own error"),
    ):
        with pytest.raises(kind, match=text):
            backward_with(rank, size, hook)
        dist.barrier()


def not_a_bucket(state: None, bucket: int) -> Future: ...


def not_a_future(state: None, bucket: dist.GradBucket) -> int: ...


def no_bucket(state: None, gradients: dist.GradBucket) -> Future: ...


def case_wrong_registrations_are_refused(rank: int, size: int) -> None:
    plain: Any = default_hooks.allreduce_hook
    for hook, kind in ((3, TypeError), (not_a_bucket, UsageError), (not_a_future, UsageError), (no_bucket, TypeError)):
        ddp = DistributedDataParallel(Layers())
        with pytest.raises(kind):
            ddp.register_comm_hook(None, hook)
    ddp.register_comm_hook(None, plain)  # the refused one did not count
    with pytest.raises(RuntimeError):
        ddp.register_comm_hook(None, plain)
    late = DistributedDataParallel(Layers())
    late(torch.randn(2, 20)).sum().backward()
    with pytest.raises(RuntimeError):
        late.register_comm_hook(None, plain)


test_cases = as_tests(globals(), (2,))


@dataclasses.dataclass(frozen=True)
class Refusing(AllReduce):
    def prepare(self, buckets: Any, group: Any, before: None = None) -> None:
        raise UsageError("not these buckets")


@dataclasses.dataclass(frozen=True)
class RefusingWeights(WeightWarmup, inner="then"):
    def prepare(self, named: Any, group: Any) -> Any:
        raise UsageError("not these weights")


def chooses_again(rank: int, size: int) -> None:
    for has_reducer in (False, True):
        ddp = DistributedDataParallel(Layers())
        assert not has_reducer or ddp.reducer is not None
        with pytest.raises(UsageError, match="not these buckets"):
            ddp.use_exchange(Refusing())
        with pytest.raises(UsageError, match="not these weights"):
            ddp.use_weight_exchange(RefusingWeights(2, AllReduce(), LocalSGD(2)), torch.optim.SGD(ddp.parameters()))
        ddp.use_exchange(Cast(torch.bfloat16, AllReduce()))
        assert ddp.reducer is not None and ddp.reducer.exchange is ddp.exchange and isinstance(ddp.exchange, Cast)
        ddp(torch.ones(2, 20) * rank).sum().backward()
        assert_equal_everywhere(torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None]))


def test_after_a_refused_exchange_another_one_can_be_chosen() -> None:
    run_threads(chooses_again, 2)
