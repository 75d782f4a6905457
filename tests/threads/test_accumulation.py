"""Gradients over several forwards and backwards: what is sent when, against PyTorch's wrapper and a single process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from tests.processes.cases import (
    Twins,
    as_tests,
    assert_equal_across_ranks,
    assert_same_grads,
    batch,
    grads,
    halve_in_other_memory,
    local_loss,
    mean_loss,
    mlp,
    seeded,
    twin_of,
)

UNUSED, STATIC, BATCHED = {"find_unused_parameters": True}, {"static_graph": True}, {"batched_grad_copy": True}
LAZY = {"lazy_bucket_allocation": True}
SMALL = {"bucket_cap_mb": 0.0001}


class TwoHeads(nn.Module):
    """A trunk and two heads; `use` names what takes part."""

    def __init__(self, trunk: bool = True) -> None:
        super().__init__()
        with seeded(2):
            self.trunk = nn.Linear(6, 6) if trunk else nn.Identity()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, use: str = "ab") -> Any:
        h = self.trunk(x)
        outputs = [getattr(self, name)(h) for name in use]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def loss_by(model: nn.Module, rank: int, step: int, use: str) -> Tensor:
    """The loss of one head, or the sum of both heads' losses."""
    outputs = model(batch(rank, step), use=use)
    return sum(o.pow(2).mean() for o in (outputs if isinstance(outputs, tuple) else [outputs]))


# ---- no_sync --------------------------------------------------------------------------------------------------------


def case_micro_batches_equal_one_large_batch(rank, world_size):
    for kind in ({}, UNUSED, STATIC, BATCHED, LAZY):
        twins = Twins(mlp(), **SMALL, **kind)
        for step in twins.steps(3):  # the layout changes after the first
            with twins.ddp.no_sync():
                for micro in range(3):
                    twins.backward(local_loss, 10 * step + micro, scale=1 / 4)
            twins.backward(local_loss, 10 * step + 3, scale=1 / 4)


def case_the_forward_decides_as_in_torch(rank, world_size):
    """A backward is synchronized if, and only if, its forward ran outside of no_sync."""

    def run(kind):
        found = []
        ddp = kind(mlp())
        with ddp.no_sync():
            inside = local_loss(ddp, rank)
        inside.backward()
        found.append(grads(ddp))  # local
        ddp.zero_grad()
        outside = local_loss(ddp, rank, 1)
        with ddp.no_sync():
            outside.backward()
        found.append(grads(ddp))  # synchronized
        ddp.zero_grad()
        with ddp.no_sync():
            first = local_loss(ddp, rank, 2)
        second = local_loss(ddp, rank, 3)
        (first + second).backward()
        found.append(grads(ddp))  # synchronized
        ddp.zero_grad()
        with ddp.no_sync(), ddp.no_sync():
            local_loss(ddp, rank, 4).backward()
        assert ddp.require_backward_grad_sync
        found.append(grads(ddp))
        return found

    for ours, theirs in zip(run(DistributedDataParallel), run(TorchDDP), strict=True):
        assert_same_grads(ours, theirs)


def case_no_sync_is_left_after_an_error(rank, world_size):
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync


def case_parameter_used_only_in_an_earlier_micro_batch_is_synchronized(rank, world_size):
    for options in (UNUSED, {}, {**UNUSED, **BATCHED}):
        for steps in (1, 3):
            twins = Twins(TwoHeads(), **SMALL, **options)
            for step in twins.steps(steps):
                with twins.ddp.no_sync():
                    twins.backward(loss_by, step, "a")
                twins.backward(loss_by, step + 5, "b")


def case_earlier_micro_batch_on_one_rank_only(rank, world_size):
    twins = Twins(TwoHeads(), **UNUSED)
    for step in twins.steps(3):
        with twins.ddp.no_sync():
            twins.backward(lambda model, r, at: loss_by(model, r, at, "ab"[r % 2]), step)
        twins.backward(loss_by, step + 5, "b")


# ---- backwards and forwards in other numbers ------------------------------------------------------------------------


def case_several_backwards_of_one_graph(rank, world_size):
    def twice(model, r, step):
        loss = local_loss(model, r, step)
        (loss / (1 if model is twins.ddp else world_size)).backward(retain_graph=True)
        return 3 * loss

    for kind in ({}, STATIC, UNUSED):
        twins = Twins(mlp(), **kind)
        for step in twins.steps(3):
            twins.backward(twice, step)


class Keeps(nn.Module):
    """Returns one result and keeps a loss of its own, perhaps of a part that is computed again in backward."""

    def __init__(self, checkpoint: bool | None = None) -> None:
        super().__init__()
        with seeded(4):
            self.lower, self.upper = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)
        self.checkpoint = checkpoint
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint is None:
            hidden = torch.tanh(self.lower(x))
        else:
            hidden = checkpoint(self.lower, x, use_reentrant=self.checkpoint)
        self.kept = hidden.pow(2).mean()
        return self.upper(hidden)


def kept_loss(model: nn.Module, bare: nn.Module, x: Tensor) -> None:
    model(x).pow(2).mean().backward(retain_graph=True)
    bare.kept.backward()


def only_the_kept_loss_twice(model: nn.Module, bare: nn.Module, x: Tensor) -> None:
    out = model(x)
    bare.kept.backward(retain_graph=True)
    (bare.kept * 2).backward(retain_graph=True)
    (out * 0).sum().backward()


def gradient_penalty(model: nn.Module, bare: nn.Module, x: Tensor) -> None:
    out = model(x)
    out.pow(2).mean().backward(retain_graph=True)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).pow(2).mean().backward()


def case_backwards_that_pass_no_output_are_averaged(rank, world_size):
    """Losses that the model keeps, penalties on gradients; also where a part is computed again."""
    table = [(kept_loss, None), (kept_loss, False), (kept_loss, True), (only_the_kept_loss_twice, None)]
    table += [(only_the_kept_loss_twice, False), (gradient_penalty, None), (gradient_penalty, "linear")]
    for way, kind in table:
        for options in ({}, UNUSED):
            with seeded(3):
                linear = nn.Sequential(nn.Linear(6, 3))
            bare = linear if kind == "linear" else Keeps(kind)
            twins = Twins(bare, **SMALL, **options)
            for step in twins.steps(4):
                way(twins.ddp, bare, batch(rank, step).requires_grad_())
                if step == 2 and kind is None:  # no gradient is accumulated, nothing is exchanged: the ranks may differ
                    for _ in range(rank):
                        torch.autograd.grad(twins.ddp(batch(rank, 7)).sum(), list(twins.ddp.parameters()))
                for r in range(world_size):
                    way(twins.twin, twins.twin, batch(r, step).requires_grad_())
                for p in twins.twin.parameters():
                    p.grad /= world_size


def case_a_joint_backward_of_forwards_inside_and_outside_of_no_sync(rank, world_size):
    """In either order, whether or not the two share all parameters: as PyTorch's wrapper."""
    for use in ("a", "b", "ab"):
        twins = Twins(TwoHeads(), **SMALL, **UNUSED)
        peer = TorchDDP(twin_of(twins.twin), find_unused_parameters=True)

        def both(model, r, step, use=use, twin=twins.twin):
            outside = loss_by(model, r, step, "a")
            if model is twin:
                return outside + loss_by(model, r, step + 5, use)
            with model.no_sync():
                return outside + loss_by(model, r, step + 5, use)

        for step in twins.steps(4):
            twins.backward(both, step)
            if use == "a":  # PyTorch's refuses other uses inside
                peer.zero_grad()
                both(peer, rank, step).backward()
                assert_same_grads(twins.ddp, peer)


def case_a_loss_kept_inside_no_sync_stays_local(rank, world_size):
    ddp = DistributedDataParallel(Keeps())
    ddp(batch(rank)).pow(2).mean().backward()
    ddp.zero_grad()
    alone = Keeps()
    with ddp.no_sync():
        kept_loss(ddp, ddp.module, batch(rank, 1))
    kept_loss(alone, alone, batch(rank, 1))
    assert_same_grads(ddp, alone)


def case_parameters_added_after_wrapping_are_found(rank, world_size):
    bare = mlp()
    ddp = DistributedDataParallel(bare)
    local_loss(ddp, rank).backward()
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    bare[4].register_parameter("extra", frozen)
    local_loss(ddp, rank).backward()  # not trained: nothing is amiss
    bare[2] = nn.Sequential(bare[2], nn.Linear(5, 5))
    with torch.no_grad():
        ddp(batch(rank))
    with pytest.raises(UsageError, match=rf"rank {rank}.*2\.1\.weight and 2\.1\.bias.*wrap it anew"):
        ddp(batch(rank))
    bare[2][1].requires_grad_(False)
    local_loss(ddp, rank).backward()
    frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"4\.extra"):
        ddp(batch(rank))
    bare[2] = bare[2][0]
    del bare[4].extra
    check = twin_of(bare)
    for model in (ddp, check):
        model.zero_grad()
    local_loss(ddp, rank, 3).backward()
    mean_loss(check, world_size, 3).backward()
    assert_same_grads(ddp, check)
    other = mlp()  # registrations of other modules, and other parameters for one call, are no additions
    torch.func.functional_call(ddp, {f"module.{n}": p for n, p in other.named_parameters()}, (batch(rank),))


def case_two_forwards_one_backward(rank, world_size):
    for kind in ({}, STATIC, UNUSED):
        twins = Twins(mlp(), **SMALL, **kind)
        for step in twins.steps(3):
            twins.backward(lambda model, r, at: local_loss(model, r, at) + local_loss(model, r, at + 7), step)


def case_two_forwards_then_two_backwards(rank, world_size):
    twins = Twins(mlp())
    for step in twins.steps(3):
        first, second = local_loss(twins.ddp, rank, step), local_loss(twins.ddp, rank, step + 7)
        first.backward()
        second.backward()
        (mean_loss(twins.twin, world_size, step) + mean_loss(twins.twin, world_size, step + 7)).backward()


def case_losses_with_disjoint_parameters_backwarded_one_by_one(rank, world_size):
    for trunk in (False, True):
        for options in ({}, UNUSED):
            twins = Twins(TwoHeads(trunk), **SMALL, **options)
            for step in twins.steps(3):
                a, b = twins.ddp(batch(rank, step))
                a.pow(2).mean().backward(retain_graph=trunk)
                b.pow(2).mean().backward()
                for r in range(world_size):
                    (loss_by(twins.twin, r, step, "ab") / world_size).backward()


def case_accumulation_over_synchronized_steps(rank, world_size):
    """No zero_grad at all: synchronized gradients add up, also those of parameters that a step does not use."""
    for options in ({}, BATCHED, UNUSED):
        twins = Twins(TwoHeads(), **SMALL, **options)
        for step in twins.steps(4, zero_grad=False):
            twins.backward(loss_by, step, ("ab", "a", "b", "ab")[step] if options is UNUSED else "ab")


# ---- what is done with gradients ------------------------------------------------------------------------------------


def case_training_with_zero_grad_of_both_kinds_and_clipping(rank, world_size):
    for set_to_none in (True, False):
        twins = Twins(mlp(), **SMALL)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in twins.both]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            twins.backward(local_loss, step)
            norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.05) for model in twins.both]
            for optimizer in optimizers:
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1])
        twins.check_weights()


def case_gradient_scaler(rank, world_size):
    twins = Twins(mlp())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in twins.both]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for model, optimizer, scaler in zip(twins.both, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = local_loss(model, rank, step) if model is twins.ddp else mean_loss(model, world_size, step)
            if step == 3 and (model is twins.twin or rank == 0):  # an overflow on one rank is one on all
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    twins.check_weights()


def case_older_scripts_detach_gradients_in_place(rank, world_size):
    ddp = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    for step in range(3):
        for p in ddp.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        local_loss(ddp, rank, step).backward()


def case_the_user_replaces_gradients(rank, world_size):
    """By a new tensor, before and after backward, and by what an earlier backward had left."""
    twins = Twins(mlp())
    for step in twins.steps(3):
        for p in (p for model in twins.both for p in model.parameters()):
            p.grad = torch.ones_like(p)
        twins.backward(local_loss, step)
        twins.check()
        for p in (p for model in twins.both for p in model.parameters()):
            p.grad = p.grad.clone().mul_(2)
        twins.backward(local_loss, step + 9)


def case_gradients_are_given_other_memory(rank, world_size):
    """``p.grad.data = x`` between backwards, before the step, and while a backward accumulates: as PyTorch's wrapper."""

    def delayed(bare):
        return {
            "delay_all_reduce_named_params": [("4.weight", bare[4].weight)],
            "param_to_hook_all_reduce": bare[0].bias,
        }

    for options in (lambda bare: {}, lambda bare: {"batched_grad_copy": True}, delayed):
        bare = mlp()
        twin, peer = twin_of(bare), TorchDDP(twin_of(bare))
        ddp = DistributedDataParallel(bare, bucket_cap_mb=0.0001, **options(bare))
        models = (ddp, peer, twin)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        held = []
        for step in range(8):
            for model, optimizer in zip(models, optimizers, strict=True):
                for micro in range(2):
                    at = 10 * step + micro
                    (mean_loss(twin, world_size, at) if model is twin else local_loss(model, rank, at)).backward()
                    if micro or step % 2:
                        if model is ddp:
                            held.append([(p.grad.data, p.grad.data.clone()) for p in model.parameters()])
                        halve_in_other_memory(model)
                if step == 3:  # in the middle of a backward that accumulates
                    handles = [
                        p.register_post_accumulate_grad_hook(lambda p: setattr(p.grad, "data", p.grad.data.clone()))
                        for p in model.parameters()
                    ]
                    (mean_loss(twin, world_size, 9) if model is twin else local_loss(model, rank, 9)).backward()
                    for handle in handles:
                        handle.remove()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 3 == 0)
            for ours, theirs, alone in zip(*(m.parameters() for m in models), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
            assert all(torch.equal(kept, then) for some in held for kept, then in some), "the program's own memory"
            assert_equal_across_ranks(ddp)


def case_gradients_kept_by_the_user_do_not_change(rank, world_size):
    """Multi-task code takes p.grad of one loss, sets it to None, and adds it to that of the next."""
    ways = (lambda g: g, Tensor.detach, lambda g: g.view(-1).view(g.shape), lambda g: torch.from_numpy(g.numpy()))
    for keep, kind in ((keep, kind) for keep in ways for kind in ({}, LAZY)):
        twins = Twins(mlp(), **kind)
        for step in twins.steps(3):
            kept = []
            for task in range(2):
                for model in twins.both:
                    model.zero_grad(set_to_none=True)
                twins.backward(local_loss, 10 * step + task)
                kept.append([keep(p.grad) for model in twins.both for p in model.parameters()])
            parameters = [p for model in twins.both for p in model.parameters()]
            for p, first, second in zip(parameters, *kept, strict=True):
                p.grad = first + 2 * second


def case_buckets_keep_their_memory_when_nobody_else_holds_it(rank, world_size):
    ddp = DistributedDataParallel(mlp())
    places = set()
    for step in range(6):
        ddp.zero_grad()
        local_loss(ddp, rank, step).backward()
        if step >= 2:  # the layout changes after the first
            places.add(tuple(bucket.flat.data_ptr() for bucket in ddp.reducer.buckets))
    assert len(places) == 1


def case_lazy_buckets_have_memory_only_while_gradients_lie_in_them(rank, world_size):
    for kind in ({}, BATCHED, UNUSED):
        ddp = DistributedDataParallel(mlp(), **LAZY, **SMALL, **kind)
        seen: list[list[bool]] = []

        def look(*_, ddp=ddp, seen=seen):
            seen.append([bucket.flat.untyped_storage().nbytes() > 0 for bucket in ddp.reducer.buckets])

        ddp.module.register_forward_hook(look)
        next(ddp.module.parameters()).register_post_accumulate_grad_hook(look)  # the last gradient of a backward
        for step in range(4):
            ddp.zero_grad()
            local_loss(ddp, rank, step).backward()
            look()
        for in_forward, in_backward, after in zip(seen[3::3], seen[4::3], seen[5::3], strict=True):
            assert not any(in_forward) and any(in_backward) and not all(in_backward) and all(after)
        local_loss(ddp, rank, 4).backward()  # gradients that are kept keep their memory
        assert all(seen[-2])


def case_lazy_buckets_have_no_memory_where_training_takes_turns_or_in_evaluation(rank, world_size):
    ddp = DistributedDataParallel(TwoHeads(), **LAZY, **SMALL)
    seen: list[int] = []

    def look(*_):
        every = [bucket for each in ddp.reducer._selections.values() for bucket in each.placement.buckets]
        seen.append(sum(bucket.flat.untyped_storage().nbytes() for bucket in every))

    ddp.module.register_forward_hook(look)
    for step in range(6):
        ddp.module.a.requires_grad_(step % 2 == 0)
        loss_by(ddp, rank, step, "ab").backward()
        look()
        ddp.zero_grad()
        if step >= 4:
            with torch.no_grad():
                ddp(batch(rank, step))
    after = [1, 3, 5, 7, 9, 12]
    assert [place for place, num_bytes in enumerate(seen) if num_bytes] == after and len(seen) == 14


def case_micro_batches_around_a_change_of_what_is_trained(rank, world_size):
    """A gradient of an unsynchronized backward is sent in the next pass, though another parameter was frozen in between."""
    bare = TwoHeads()
    twins = Twins(bare, **UNUSED)
    for step in twins.steps(4):
        bare.trunk.requires_grad_(True), twins.twin.trunk.requires_grad_(True)
        with twins.ddp.no_sync():
            twins.backward(loss_by, step, "a")
        for each in (bare, twins.twin):
            each.trunk.requires_grad_(False).zero_grad()
        twins.backward(loss_by, step + 1, "b")


def case_backward_for_some_parameters_only(rank, world_size):
    twins = Twins(mlp(), **UNUSED)
    for step in twins.steps(3):
        for model in twins.both:
            loss = local_loss(model, rank, step) if model is twins.ddp else mean_loss(model, world_size, step)
            loss.backward(inputs=list(model.parameters())[:2])


def case_backward_through_the_bare_module_stays_local_as_in_torch(rank, world_size):
    """Calls past the wrapper are not exchanged, so ranks may make them unequally often."""

    def run(kind):
        ddp = kind(mlp())
        found = []
        if rank == 0:
            local_loss(ddp.module, rank).backward()  # before any forward of the wrapper
        found.append(grads(ddp))
        ddp.zero_grad()
        local_loss(ddp, rank, 1).backward()
        found.append(grads(ddp))
        if rank == world_size - 1:
            local_loss(ddp.module, rank, 2).backward()
        found.append(grads(ddp))
        ddp.zero_grad()
        local_loss(ddp, rank, 3).backward()
        found.append(grads(ddp))
        return found

    for ours, theirs in zip(run(DistributedDataParallel), run(TorchDDP), strict=True):
        assert_same_grads(ours, theirs)


def case_two_wrappers_of_one_module_alive(rank, world_size):
    """The wrapper whose forward ran synchronizes; the other one stays out of it, as PyTorch's does."""
    bare = mlp()
    twin = twin_of(bare)
    first, second = DistributedDataParallel(bare), DistributedDataParallel(bare)
    for step, ddp in enumerate((first, first, second, second, first)):
        for each in (ddp, twin):
            each.zero_grad()
        local_loss(ddp, rank, step).backward()
        mean_loss(twin, world_size, step).backward()
        assert_same_grads(ddp, twin)


def case_generator_and_discriminator(rank, world_size):
    """Two wrapped models in one graph, and one of them frozen by hand for half of the step."""
    with seeded(5):
        bare = [
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
            nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 1)),
        ]
    twins = [twin_of(m) for m in bare]
    wrapped = [DistributedDataParallel(m) for m in bare]

    def step_of(models, batches, step, scale):
        generator, critic = models
        for r in batches:
            z, real = batch(r, step), batch(r, step + 50)[:, :3]
            loss = critic(generator(z).detach()).mean() - critic(real).pow(2).mean()
            (loss * scale).backward()
        found = [grads(critic)]
        for model in models:
            model.zero_grad()
        critic.requires_grad_(False)
        for r in batches:
            (-critic(generator(batch(r, step))).pow(2).mean() * scale).backward()
        critic.requires_grad_(True)
        found.append(grads(generator))
        generator.zero_grad()
        return found

    for step in range(3):
        ours = step_of(wrapped, [rank], step, 1.0)
        theirs = step_of(twins, range(world_size), step, 1.0 / world_size)
        for a, b in zip(ours, theirs, strict=True):
            assert_same_grads(a, b)


def case_an_error_in_the_middle_of_backward_is_told_at_the_next_forward(rank, world_size):
    """On all ranks: before and after the first exchange was started."""
    for steps_before in (0, 2):  # nothing is sent before the end of the first backward
        ddp = DistributedDataParallel(mlp(), **SMALL)
        for step in range(steps_before):
            ddp.zero_grad()
            local_loss(ddp, rank, step).backward()

        def stop(gradient: Tensor) -> None:
            raise KeyError("the user's own error")

        handle = next(ddp.parameters()).register_hook(stop)
        with pytest.raises(KeyError, match="own error"):
            local_loss(ddp, rank).backward()
        handle.remove()
        ddp.zero_grad()
        if steps_before:
            with pytest.raises(RuntimeError, match=r"broken off.*Fix:"):
                local_loss(ddp, rank, 7)
            continue
        twin = copy.deepcopy(ddp.module)  # nothing had been sent: training goes on
        for loss in (local_loss(ddp, rank, 7), mean_loss(twin, world_size, 7)):
            loss.backward()
        assert_same_grads(ddp, twin)


test_cases = as_tests(globals(), (2, 3), on="threads")
