"""Ranks with different numbers of batches: against PyTorch's wrapper in the same ranks, and against a single process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from guozhuang import DistributedDataParallel, SyncBatchNorm
from guozhuang.errors import UsageError
from guozhuang.exchange.local_sgd import LocalSGD
from tests.processes.cases import (
    as_tests,
    assert_equal_across_ranks,
    assert_same_grads,
    batch,
    local_loss,
    mlp,
    normed,
    seeded,
    twin_of,
)
from tests.ranks import RankError, run_ranks
from tests.waiting import NEVER_S

SMALL_CAP_MB = 0.0001
UNEVEN = ([3, 5], [5, 3], [0, 4], [4, 0], [1, 1], [0, 0])


Loss = Callable[[nn.Module, int, int], Tensor]


def train(
    ddp: nn.Module, rank: int, num_batches: list[int], optimizer: Any = None, loss: Loss = local_loss, **join: Any
) -> None:
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with ddp.join(**join):
        for step in range(num_batches[rank]):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()


def train_alone(
    twin: nn.Module, num_batches: list[int], optimizer: Any, *, initial: bool = True, loss: Loss = local_loss
) -> None:
    """The steps of all ranks in one process; ``initial``: the mean is over all ranks, also those without data."""
    for step in range(max(num_batches)):
        active = [r for r in range(len(num_batches)) if step < num_batches[r]]
        optimizer.zero_grad()
        for r in active:
            (loss(twin, r, step) / (len(num_batches) if initial else len(active))).backward()
        optimizer.step()


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def case_the_same_as_torch(rank, world_size):
    for num_batches in UNEVEN:
        for initial in (True, False):
            for make in (mlp, normed):
                models = [DistributedDataParallel(make()), TorchDDP(make())]
                for model in models:
                    train(model, rank, num_batches, divide_by_initial_world_size=initial)
                    dist.barrier()
                assert_same_state(*models)
                assert_equal_across_ranks(models[0])


def case_the_same_as_a_single_process(rank, world_size):
    for num_batches in UNEVEN:
        for initial in (True, False):
            bare = mlp()
            twin, ddp = twin_of(bare), DistributedDataParallel(bare, bucket_cap_mb=SMALL_CAP_MB)
            train(ddp, rank, num_batches, divide_by_initial_world_size=initial)
            train_alone(twin, num_batches, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), initial=initial)
            assert_same_state(ddp.module, twin)
            assert_equal_across_ranks(ddp)


OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"batched_grad_copy": True, "lazy_bucket_allocation": True},
    {"forward_sync_buffers": False},
    {"bucket_cap_mb": 25},
]


def case_several_rounds_with_every_option(rank, world_size):
    """Who runs out first changes between rounds; a rank may have had nothing at all in the first."""
    for options in OPTIONS:
        for rounds in (UNEVEN, ([0, 3], [3, 0], [2, 4]), ([3, 0], [0, 3], [4, 2])):
            bare = mlp()
            twin = twin_of(bare)
            ddp = DistributedDataParallel(bare, **{"bucket_cap_mb": SMALL_CAP_MB, **options})
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, twin)]
            for num_batches in rounds:
                train(ddp, rank, num_batches, optimizers[0])
                train_alone(twin, num_batches, optimizers[1])
                assert_same_state(ddp.module, twin)
            # and on without join
            for each in (ddp, twin):
                each.zero_grad()
            ddp(batch(rank, 99)).pow(2).mean().backward()
            for r in range(world_size):
                (twin(batch(r, 99)).pow(2).mean() / world_size).backward()
            assert_same_grads(ddp, twin)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        return sum(self.branches[int(name)](x) for name in use)


def case_accumulation_inside(rank, world_size):
    """What a rank has accumulated when its data end counts in the next step of the others, and once. (PyTorch's loses it.)"""
    num_batches, uses = [3, 7], [["0", "01", "2"], ["01", "0", "1", "0", "0", "1", "0"]]

    def rows(r: int, step: int, *use: str) -> tuple[Any, ...]:
        return batch(r, step), *use

    with seeded(3):
        table = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    kinds = [(mlp(), {"bucket_cap_mb": SMALL_CAP_MB, **options}, rows) for options in OPTIONS]
    kinds += [(table, {}, lambda r, step: ((torch.arange(6).view(3, 2) * (r + 2) + step) % 7,))]
    kinds += [(mlp(), {"skip_all_reduce_unused_params": True}, rows)]
    kinds += [(Branches(), {"find_unused_parameters": True}, lambda r, step: rows(r, step, uses[r][step]))]
    for (bare, options, given), initial in itertools.product(kinds, (True, False)):
        twin, ddp = twin_of(bare), DistributedDataParallel(twin_of(bare), **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, twin)]
        with ddp.join(divide_by_initial_world_size=initial):
            for step in range(num_batches[rank]):
                with contextlib.nullcontext() if step % 2 else ddp.no_sync():
                    ddp(*given(rank, step)).pow(2).mean().backward()
                if step % 2:
                    optimizers[0].step()
                    optimizers[0].zero_grad(set_to_none=initial)
        for step in range(1, 7, 2):
            optimizers[1].zero_grad()
            adding = [(r, at) for r in range(world_size) for at in (step - 1, step) if at < num_batches[r]]
            for r, at in adding:
                divisor = world_size if initial else len({r for r, _ in adding})
                (twin(*given(r, at)).pow(2).mean() / divisor).backward()
            optimizers[1].step()
        assert_same_state(ddp.module, twin)


def case_unused_parameters_inside(rank, world_size):
    uses = (["0", "1", "0"], ["01", "1", "0", "1", "2"])
    bare = Branches()
    twin = twin_of(bare)
    ddp = DistributedDataParallel(bare, find_unused_parameters=True, bucket_cap_mb=SMALL_CAP_MB)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ddp, twin)]

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        return model(batch(r, step), uses[r][step]).pow(2).mean()

    train(ddp, rank, [3, 5], optimizers[0], loss)
    train_alone(twin, [3, 5], optimizers[1], loss=loss)
    assert_same_state(ddp.module, twin)


def case_sparse_gradients_inside(rank, world_size):
    with seeded(3):
        bare = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        return model((torch.arange(6).view(3, 2) * (r + 2) + step) % 7).pow(2).mean()

    for initial in (True, False):
        twin, ddp = twin_of(bare), DistributedDataParallel(twin_of(bare))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, twin)]
        train(ddp, rank, [1, 4], optimizers[0], loss, divide_by_initial_world_size=initial)
        train_alone(twin, [1, 4], optimizers[1], initial=initial, loss=loss)
        assert_same_state(ddp.module, twin)


def case_disabled(rank, world_size):
    models = [DistributedDataParallel(normed()), TorchDDP(normed())]
    for model in models:
        train(model, rank, [3, 3], enable=False)
    assert_same_state(*models)


def case_early_termination(rank, world_size):
    ddp = DistributedDataParallel(normed())
    with pytest.raises(RuntimeError, match="exhausted"):
        train(ddp, rank, [2, 4], throw_on_early_termination=True)
    train(ddp, rank, [2, 2], throw_on_early_termination=True)  # and it goes on afterwards
    assert_equal_across_ranks(ddp)


def case_evaluation_inside(rank, world_size):
    """A forward without gradients is no step. (PyTorch's joined ranks take it for one, and gloo aborts.)"""
    models = [DistributedDataParallel(normed()), TorchDDP(normed())]
    num_batches = [2, 4]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(num_batches[rank]):
                optimizer.zero_grad()
                model(batch(rank, step)).pow(2).mean().backward()
                optimizer.step()
                if model is models[0]:
                    model.eval()
                    with torch.no_grad():
                        model(batch(rank, step + 10))
                    model.train()
    assert_same_state(*models)


def case_with_a_sharded_optimizer(rank, world_size):
    """It steps on ranks without data too, with the gradient of the others. (With PyTorch's wrapper: with an old one.)"""
    for num_batches in ([2, 4], [3, 1], [0, 2], [4, 0]):
        for initial in (True, False):
            bare = mlp()
            twin, ddp = twin_of(bare), DistributedDataParallel(bare, bucket_cap_mb=SMALL_CAP_MB)
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
            with Join([ddp, optimizer], divide_by_initial_world_size=initial):
                for step in range(num_batches[rank]):
                    optimizer.zero_grad()
                    ddp(batch(rank, step)).pow(2).mean().backward()
                    optimizer.step()
            train_alone(twin, num_batches, torch.optim.AdamW(twin.parameters(), lr=0.01), initial=initial)
            assert_same_state(ddp.module, twin)


def case_delayed_parameters_are_shadowed(rank, world_size):
    bare = mlp()
    plain = DistributedDataParallel(twin_of(bare))
    ddp = DistributedDataParallel(
        bare,
        delay_all_reduce_named_params=[("2.weight", bare[2].weight)],
        param_to_hook_all_reduce=bare[0].weight,
    )
    for model in (ddp, plain):
        train(model, rank, [2, 4])
    assert_same_state(ddp.module, plain.module)


def case_sync_batch_norm_is_refused(rank, world_size):
    for kind in (nn.SyncBatchNorm, SyncBatchNorm):
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), kind(8)))
        with pytest.raises(ValueError, match=r"SyncBatchNorm.*Fix:.*throw_on_early_termination"):
            ddp.join()
        with pytest.raises(ValueError, match="SyncBatchNorm"), Join([ddp]):
            ddp(batch(rank))
        train(ddp, rank, [2, 2], throw_on_early_termination=True)
        train(ddp, rank, [2, 2], enable=False)


def case_buffer_hooks_inside(rank, world_size):
    """A rank without data calls the hook as often as the others, wherever it is called. (PyTorch's does not.)"""
    for place in _BufferCommHookLocation:
        models = [DistributedDataParallel(normed()) for _ in range(2)]
        calls: list[int] = []

        def hook(state: list[int], buffers: dict[str, Tensor]) -> list[torch.futures.Future[Tensor]]:
            state.append(len(buffers))
            return [dist.all_reduce(b.data, dist.ReduceOp.MAX, async_op=True).get_future() for b in buffers.values()]

        models[0]._register_buffer_comm_hook(calls, hook, place)
        for model in models:
            train(model, rank, [1, 4])
        assert len(calls) == 4
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(p, q)
        assert_equal_across_ranks(models[0])


def case_each_forward_has_one_backward(rank, world_size):
    """Ranks without data take part in one; with more or fewer the ranks would go apart when one has run out."""
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(UsageError, match=r"second forward.*Fix:.*no_sync"), ddp.join():
        (local_loss(ddp, rank) + local_loss(ddp, rank, 1)).backward()
    for options in ({}, {"bucket_cap_mb": SMALL_CAP_MB}, {"find_unused_parameters": True}):
        ddp = DistributedDataParallel(mlp(), **options)
        with pytest.raises(UsageError, match=r"without a synchronized forward.*Fix:.*add the losses"), ddp.join():
            loss = local_loss(ddp, rank)
            loss.backward(retain_graph=True)
            assert torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)  # no backward
            loss.backward()
    ddp, together = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, together)]
    with ddp.join():
        for step in range([1, 3][rank]):
            with ddp.no_sync():
                first = local_loss(ddp, rank, step)
            optimizers[0].zero_grad()
            (first + local_loss(ddp, rank, step + 10)).backward()
            optimizers[0].step()

    def both(model: nn.Module, rank: int, step: int) -> Tensor:
        x = torch.cat([batch(rank, step), batch(rank, step + 10)])
        return model(x).pow(2).mean() * 2

    train(together, rank, [1, 3], optimizers[1], both)
    assert_same_state(ddp, together)
    for options in ({"enable": False}, {"throw_on_early_termination": True}):
        ddp = DistributedDataParallel(mlp())
        with ddp.join(**options):  # nobody takes part without data
            (local_loss(ddp, rank) + local_loss(ddp, rank, 1)).backward()
            loss = local_loss(ddp, rank)
            loss.backward(retain_graph=True)
            loss.backward()


def case_nothing_of_the_context_is_left_behind_it(rank, world_size):
    """Also where an exception ends it, in the script or as data end early: the forwards that follow meet nobody."""
    kinds: list[tuple[dict[str, Any], type[Exception] | None, list[int]]] = [
        ({}, None, [1, 2]), ({}, KeyError, [1, 1]), ({"enable": False}, None, [1, 1]),
        ({"throw_on_early_termination": True}, RuntimeError, [1, 2]),
    ]  # fmt: skip
    makers: list[Callable[..., Any]] = [
        lambda made, **options: made.join(**options),
        lambda made, **o: Join([made], **o),
    ]
    for make, (options, error, num_batches) in itertools.product(makers, kinds):
        ddp = DistributedDataParallel(mlp())
        context = make(ddp, **options)  # and it is held
        with pytest.raises(error) if error else contextlib.nullcontext(), context:
            for step in range(num_batches[rank]):
                local_loss(ddp, rank, step).backward()
            if error is KeyError:
                raise KeyError
        if rank == 0:
            with torch.no_grad():
                ddp(batch(rank))
        dist.barrier()  # and not what a forward of rank 0 sends
        (local_loss(ddp, rank) + local_loss(ddp, rank, 1)).backward()
        assert ddp.reducer.compares
        loss = local_loss(ddp, rank)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_equal_across_ranks(ddp, lambda p: p.grad)


def case_a_step_that_an_exception_has_ended_is_not_awaited(rank, world_size):
    """A forward without its step, where an exception has ended the context: the next context begins with a forward again."""
    for make in (lambda made: made.join(), lambda made: Join([made])):
        ddp = DistributedDataParallel(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.use_weight_exchange(LocalSGD(1), optimizer)
        with pytest.raises(KeyError), make(ddp):
            local_loss(ddp, rank)
            raise KeyError
        with make(ddp):
            for step in range([1, 3][rank]):
                optimizer.zero_grad()
                local_loss(ddp, rank, step).backward()
                optimizer.step()
        assert_equal_across_ranks(ddp)


def case_switching_requires_grad_between_contexts(rank, world_size):
    bare = mlp()
    twin, ddp = twin_of(bare), DistributedDataParallel(bare)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, twin)]
    for num_batches, trained in (([1, 3], True), ([3, 1], False), ([2, 0], True)):
        for model in (bare, twin):
            model[2].requires_grad_(trained)
        train(ddp, rank, num_batches, optimizers[0])
        train_alone(twin, num_batches, optimizers[1])
        assert_same_state(ddp.module, twin)
    for model in (bare, twin):
        model.zero_grad()
        model[4].requires_grad_(False)  # after the contexts
    local = ddp(batch(rank, 9)).pow(2).mean()
    local.backward()
    for r in range(world_size):
        (twin(batch(r, 9)).pow(2).mean() / world_size).backward()
    assert_same_grads(ddp, twin)


def case_everything_is_frozen(rank, world_size):
    ddp = DistributedDataParallel(normed())
    train(ddp, rank, [1, 2])
    before = ddp.module[0].weight.clone()
    ddp.requires_grad_(False)
    with ddp.join():
        for step in range([1, 3][rank]):
            ddp(batch(rank, step))
    assert torch.equal(before, ddp.module[0].weight)
    ddp.requires_grad_(True)
    train(ddp, rank, [2, 1])
    assert_equal_across_ranks(ddp)


test_cases = as_tests(
    globals(),
    (2,),
    on="threads",
    in_processes=[
        case_the_same_as_torch,
        case_disabled,
        case_evaluation_inside,
    ],  # PyTorch's own waits with Python's lock
)


def three_ranks(rank, world_size):
    for num_batches in ([1, 4, 0], [0, 2, 5], [3, 0, 0]):
        models = [DistributedDataParallel(normed()), TorchDDP(normed())]
        for model in models:
            train(model, rank, num_batches, divide_by_initial_world_size=False)
            dist.barrier()
        assert_same_state(*models)
    return True


def test_on_three_ranks():
    assert run_ranks(three_ranks, 3) == [True] * 3


def freezes_inside(rank, world_size):
    ddp = DistributedDataParallel(mlp())
    with ddp.join():
        for step in range([1, 4][rank]):
            if step == 2:
                ddp.module[0].requires_grad_(False)
            ddp(batch(rank, step)).pow(2).mean().backward()


def test_freezing_inside_is_refused_at_once():
    # The rank that has joined waits for its peer, and nobody waits for the time-out of the group.
    joined, active = run_ranks(freezes_inside, 2, collect_errors=True, group_timeout_s=NEVER_S)
    assert isinstance(joined, RankError) and joined.exit_code is not None  # its peer has gone, and it did not hang
    assert active.type_name == "UsageError" and "0.weight" in active.message and "Fix:" in active.message
