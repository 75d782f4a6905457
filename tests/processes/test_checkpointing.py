"""Graphs that are not a plain forward and backward: recomputation, backward inside backward, gradients of gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from guozhuang import DistributedDataParallel
from tests.processes.cases import (
    Twins,
    as_tests,
    assert_equal_across_ranks,
    assert_same_grads,
    batch,
    grads,
    mlp,
    seeded,
    twin_of,
)

SMALL = {"bucket_cap_mb": 0.0001}


class Layers(nn.Module):
    """Layers of which some are recomputed in backward.

    Args:
        plan: one token per call: the layer's number, then "r" (re-entrant checkpoint), "n" (not re-entrant) or nothing.
    """

    def __init__(self, plan: str, num_layers: int = 3) -> None:
        super().__init__()
        with seeded(5):
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))
        self.plan = plan

    def forward(self, x: Tensor, plan: str | None = None) -> Tensor:
        for token in (self.plan if plan is None else plan).split():
            layer, kind = self.layers[int(token[0])], token[1:]
            x = checkpoint(layer, x, use_reentrant=kind == "r", preserve_rng_state=False) if kind else layer(x)
            x = torch.tanh(x)
        return x


def inputs(rank: int, step: int) -> Tensor:
    return batch(rank, step).requires_grad_()  # re-entrant checkpoints need an input with a gradient


def loss_of(model: nn.Module, rank: int, step: int, **options: Any) -> Tensor:
    return model(inputs(rank, step), **options).pow(2).mean()


KINDS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"batched_grad_copy": True, "static_graph": True},
]


def over_kinds(make, kinds=KINDS):
    for kind in kinds:
        for cap in (SMALL, {}):
            Twins(make(), **cap, **kind).train(3, loss_of)


def case_parts_of_the_model(rank, world_size):
    for plan in ("0r 1 2r", "0n 1 2n", "0r 1n 2", "0r 1r 2r", "0n 1n 2n"):
        over_kinds(lambda p=plan: Layers(p), KINDS if plan == "0r 1 2r" else KINDS[:1])


def case_a_layer_in_two_checkpointed_segments(rank, world_size):
    for plan in ("0r 1r 0r 2", "0n 1n 0n 2", "0r 0n 1 2"):
        over_kinds(lambda p=plan: Layers(p))


def case_a_layer_inside_and_outside_of_a_checkpoint(rank, world_size):
    for plan in ("0 1 0r 2", "0r 1 0 2", "0 0r 0 1 0r 2"):
        over_kinds(lambda p=plan: Layers(p))


def case_the_whole_model_in_one(rank, world_size):
    class Whole(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = mlp(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant in (True, False):
        over_kinds(lambda r=reentrant: Whole(r))


def case_checkpoint_around_the_wrapper(rank, world_size):
    for reentrant in (True, False):
        Twins(mlp(), **SMALL).train(
            3, lambda model, r, step, e=reentrant: checkpoint(model, inputs(r, step), use_reentrant=e).pow(2).mean()
        )


def case_nested(rank, world_size):
    class Nested(Layers):
        def inner(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layers[1](x))
            return checkpoint(self.layers[2], x, use_reentrant=self.kinds[1])

        def outer(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.layers[0](x))) + self.layers[1](x)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.outer, x, use_reentrant=self.kinds[0]) + self.layers[0](x)

    for kinds in ((True, True), (False, False), (True, False)):

        def make(kinds=kinds):
            model = Nested("")
            model.kinds = kinds
            return model

        over_kinds(make)


def case_with_unused_layers(rank, world_size):
    for plan in ("0r 2r", "0n 2n", "2 0r"):
        over_kinds(lambda p=plan: Layers(p), KINDS[1:])


def case_accumulation_with_recomputation(rank, world_size):
    for plan in ("0r 1r 0r 2", "0 1n 0n 2r"):
        for kind in KINDS:
            twins = Twins(Layers(plan), **SMALL, **kind)
            for step in twins.steps(3):
                with twins.ddp.no_sync():
                    twins.backward(loss_of, step)
                twins.backward(loss_of, step + 5)


def case_dropped_layers_differ_by_rank_and_step(rank, world_size):
    plans = [["0r 1r 2r", "0r 2r"], ["1r", "0r 1r"], ["0r 1r 2r", "0r 1r 2r"], ["2r", "2r"], ["0r 1r 2r", "0r 1r"]]
    for kind in "rn":
        Twins(Layers(""), find_unused_parameters=True, **SMALL).train(
            len(plans), lambda model, r, step, k=kind: loss_of(model, r, step, plan=plans[step][r].replace("r", k))
        )


def case_recomputation_begins_after_some_steps(rank, world_size):
    """A layer that is first seen in an inner backward later is ready at the end only, or raises; never a wrong sum."""
    plans = ["0 1 2", "0 1 2", "0r 1r 2r", "0 1r 2", "0r 1n 2"]
    Twins(Layers(""), **SMALL).train(len(plans), lambda model, r, step: loss_of(model, r, step, plan=plans[step]))
    with pytest.raises(RuntimeError, match=r"parameter 'layers\.\d.*inner"):
        ddp = DistributedDataParallel(Layers("0 1 2"), **SMALL)
        for plan in ("0 1 2", "0 1 2", "0r 1 0 2"):  # from plain to inside and outside
            ddp.zero_grad()
            ddp(inputs(rank, 0), plan=plan).pow(2).mean().backward()


class InnerBackward(torch.autograd.Function):
    """x -> layer(x), whose backward calls backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        return x.grad, None


def case_backward_inside_a_custom_function(rank, world_size):
    class Custom(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = InnerBackward.apply(x, self.layers[0])
            h = self.layers[1](h)
            return InnerBackward.apply(h, self.layers[2]) + InnerBackward.apply(h, self.layers[0])

    over_kinds(lambda: Custom(""))


# ---- gradients of gradients -----------------------------------------------------------------------------------------


def case_penalty_on_the_norm_of_the_gradient(rank, world_size):
    """backward(create_graph=True), then a function of the synchronized gradients is differentiated too."""
    for kind in ({}, {"batched_grad_copy": True}, {"static_graph": True}):
        bare = mlp()
        twin, ddp = twin_of(bare), DistributedDataParallel(bare, **SMALL, **kind)
        for step in range(3):
            for model in (ddp, twin):
                for p in model.parameters():
                    p.grad = None
            ddp(batch(rank, step)).pow(2).mean().backward(create_graph=True)
            torch.stack([twin(batch(r, step)).pow(2).mean() for r in range(world_size)]).mean().backward(
                create_graph=True
            )
            assert_same_grads(ddp, twin)
            norms = [torch.stack([p.grad.pow(2).sum() for p in m.parameters()]).sum() for m in (ddp, twin)]
            torch.testing.assert_close(norms[0], norms[1])
            for model, norm in zip((ddp, twin), norms, strict=True):
                first = [p.grad for p in model.parameters()]
                for p in model.parameters():
                    p.grad = None
                norm.backward()
                for p, g in zip(model.parameters(), first, strict=True):
                    p.grad = g.detach() + (0 if p.grad is None else p.grad)
            assert_same_grads(ddp, twin)


def case_penalty_added_to_the_gradient_that_is_there(rank, world_size):
    bare = mlp()
    twin, ddp = twin_of(bare), DistributedDataParallel(bare)
    for step in range(2):
        for model in (ddp, twin):
            for p in model.parameters():
                p.grad = None
        ddp(batch(rank, step)).pow(2).mean().backward(create_graph=True)
        torch.stack([twin(batch(r, step)).pow(2).mean() for r in range(world_size)]).mean().backward(create_graph=True)
        for model in (ddp, twin):
            torch.stack([p.grad.pow(2).sum() for p in model.parameters()]).sum().backward()
        assert_same_grads(ddp, twin)
        assert_equal_across_ranks(ddp, lambda p: p.grad)


def case_penalty_on_the_gradient_of_the_input(rank, world_size):
    """WGAN-GP: autograd.grad inside the loss. It is no pass of its own."""

    def with_penalty(model: nn.Module, r: int, step: int) -> Tensor:
        x = inputs(r, step)
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.pow(2).mean() + (g.norm(dim=1) - 1).pow(2).mean()

    for kind in KINDS:
        Twins(mlp(), **SMALL, **kind).train(4, with_penalty)


def case_autograd_grad_of_parameters_stays_local(rank, world_size):
    """torch.autograd.grad accumulates nothing, so nothing is exchanged and ranks may differ in it."""
    ddp = DistributedDataParallel(mlp())
    twin = twin_of(ddp.module)
    for step in range(3):
        ddp.zero_grad()
        if rank == 0:
            loss = ddp(batch(rank, step)).pow(2).mean()
            ours = torch.autograd.grad(loss, list(ddp.parameters()))
            theirs = torch.autograd.grad(twin(batch(rank, step)).pow(2).mean(), list(twin.parameters()))
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)
        assert all(p.grad is None for p in ddp.parameters())


# ---- what is done with outputs --------------------------------------------------------------------------------------


def case_functional_call(rank, world_size):
    ddp = DistributedDataParallel(mlp())
    twin = twin_of(ddp.module)
    halves = {name: p.detach() * 0.5 for name, p in ddp.named_parameters()}
    out = torch.func.functional_call(ddp, halves, (batch(rank),))
    plain = {name.removeprefix("module."): value for name, value in halves.items()}
    torch.testing.assert_close(out, torch.func.functional_call(twin, plain, (batch(rank),)))

    def scaled(model: nn.Module, r: int, step: int) -> Tensor:
        doubled = {name: p * 2 for name, p in model.named_parameters()}
        return torch.func.functional_call(model, doubled, (batch(r, step),)).pow(2).mean()

    Twins(mlp()).train(3, scaled)  # gradients of functions of the parameters reach the parameters, and are exchanged

    def loss(parameters: dict[str, Tensor], model: nn.Module) -> Tensor:
        return torch.func.functional_call(model, parameters, (batch(rank),)).pow(2).mean()

    ours = torch.func.grad(loss)({n: p.detach() for n, p in ddp.named_parameters()}, ddp)
    theirs = torch.func.grad(loss)({n: p.detach() for n, p in twin.named_parameters()}, twin)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[f"module.{name}"], value)


def case_output_is_used_twice_or_changed_in_place(rank, world_size):
    def twice(out: Tensor) -> Tensor:
        return out.pow(2).mean() + F.relu(out).sum()

    def in_place(out: Tensor) -> Tensor:
        out += 1
        return out.mul_(2).relu_().pow(2).mean()

    def a_part_in_place(out: Tensor) -> Tensor:
        out[:, 0] = 0
        return out.pow(2).mean()

    def given_a_hook(out: Tensor) -> Tensor:
        out.register_hook(lambda g: g * 3)
        out.retain_grad()
        loss = out.pow(2).mean()
        loss.register_hook(lambda g: g * 2)
        return loss

    for loss in (twice, in_place, a_part_in_place, given_a_hook):
        for kind in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            Twins(mlp(), **SMALL, **kind).train(3, lambda model, r, step, loss=loss: loss(model(batch(r, step))))


def case_hooks_of_the_user_run_and_change_what_is_exchanged(rank, world_size):
    """As in PyTorch: hooks on parameters see and may change this rank's own gradient, before it is averaged."""
    for before, kind in itertools.product((True, False), (TorchDDP, DistributedDataParallel)):
        bare, calls = mlp(), []
        twin = twin_of(bare)

        def add_hooks(model: nn.Module, calls=calls) -> None:
            p, q = list(model.parameters())[:2]
            p.register_hook(lambda g: (calls.append("tensor"), g.sign())[1])

            def clamp(parameter: nn.Parameter) -> None:
                calls.append("accumulated")
                parameter.grad.clamp_(-0.01, 0.01)

            q.register_post_accumulate_grad_hook(clamp)

        if before:
            add_hooks(bare)
        ddp = kind(bare, **SMALL)
        if not before:
            add_hooks(bare)
        for step in range(3):
            ddp.zero_grad()
            calls.clear()
            ddp(batch(rank, step)).pow(2).mean().backward()
            # Hooks that change a gradient are tried with other numbers too, the first time.
            assert sorted(calls if step else set(calls)) == ["accumulated", "tensor"]
            expected = []
            for r in range(world_size):
                copy_r = twin_of(twin)
                copy_r.zero_grad()
                add_hooks(copy_r)
                copy_r(batch(r, step)).pow(2).mean().backward()
                expected.append(grads(copy_r))
            mean = {name: sum(e[name] for e in expected) / world_size for name in expected[0]}
            assert_same_grads(ddp, mean)


test_cases = as_tests(
    globals(), (2,), on="threads", in_processes=[case_hooks_of_the_user_run_and_change_what_is_exchanged]
)
