"""A model divided by hand: states are whole and load on any layout, norms are one process's, all ranks step or none."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.checkpoint.trained import _owner
from guozhuang.errors import UsageError
from guozhuang.optim.divided import DividedOptimizer
from guozhuang.parallel.axes import Axes, make_axes
from guozhuang.parallel.clipping import watch_norms
from guozhuang.parallel.division import disown, divide
from guozhuang.parallel.state import gather_states
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.table import get
from guozhuang.strategies.ways import Setup
from guozhuang.world import World
from guozhuang.world.layout import MODEL_AXES, Layout

from . import test_hybrid_strategies as hybrid
from .ranks import GENERATOR, run_threads

STEPS = 3


class Tied(nn.Module):
    """The first and the last matrix are one; a running statistic belongs to the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(6, 5, bias=False)
        self.last.weight = self.first.weight
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) + i).view_as(parameter))


OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)


def gradient_of(name: str, whole: Tensor, step: int) -> Tensor:
    return torch.cos(torch.arange(whole.numel(), dtype=whole.dtype) * (step + 2) + len(name)).view_as(whole)


def one_process(make: Callable[[Any], torch.optim.Optimizer], steps: range) -> tuple[nn.Module, Any, list[float]]:
    model = Tied()
    optimizer = make(model.parameters())
    norms = []
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = gradient_of(name, parameter, step)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return model, optimizer, norms


def divided(model: nn.Module, axes: Axes) -> None:
    """Cut the matrix unevenly along tp; the second of two stages holds the norm and, with the first one, the matrix."""
    gather_states(model)
    watch_norms(model)
    spans = (((0, 2),), ((2, 5),))[axes.index("tp")]
    divide(model.first.weight, 0, spans, axes.group("tp"))
    divide(model.first.bias, 0, spans, axes.group("tp"))
    both, second = (0, 1), (1,)
    stages = axes.group("pp")
    for parameter, owners in ((model.first.weight, both), (model.first.bias, (0,)), (model.norm.weight, second)):
        disown(parameter, owners, stages)
    disown(model.norm.bias, second, stages)
    for buffer in model.norm.buffers():
        disown(buffer, second, stages, keep=True)
    if axes.index("pp") == axes.size("pp") - 1:
        model.norm.running_mean += 3.0


def own_gradients(model: nn.Module, axes: Axes, step: int) -> None:
    whole = dict(Tied().named_parameters())
    low, high = ((0, 2), (2, 5))[axes.index("tp")] if axes.size("tp") == 2 else (0, 5)
    for name, parameter in model.named_parameters():
        if parameter.numel():
            gradient = gradient_of(name, whole[name], step)
            parameter.grad = gradient[low:high].clone() if name.startswith("first") else gradient


def equal(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            equal(found[key], value)
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-7)


LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(pp=2, tp=2), Layout(pp=2, dp=2, tp=2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_steps_and_norms_are_those_of_one_process(layout: Layout) -> None:
    def on_rank(rank: int, size: int) -> None:
        axes = make_axes(layout)
        peers = [group for group in (axes.group(*MODEL_AXES),) if group is not None]
        for make in OPTIMIZERS:
            plain, plain_optimizer, norms = one_process(make, range(STEPS))
            model = Tied()
            inner = make(model.parameters())
            divided(model, axes)
            optimizer = DividedOptimizer(inner, peers)
            found = []
            for step in range(STEPS):
                own_gradients(model, axes, step)
                found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
            torch.testing.assert_close(found, norms, rtol=1e-6, atol=0.0)
            state, saved = model.state_dict(), optimizer.state_dict()
            wanted = plain.state_dict()
            wanted["norm.running_mean"] = wanted["norm.running_mean"] + 3.0
            equal(state, wanted)
            equal(saved["state"], plain_optimizer.state_dict()["state"])
            assert saved["param_groups"] == plain_optimizer.state_dict()["param_groups"]
            assert state["last.weight"] is state["first.weight"]
            # It loads into one process, and on this layout again, and goes on as if nothing had happened.
            alone = Tied()
            alone.load_state_dict(state)
            make(alone.parameters()).load_state_dict(copy.deepcopy(saved))
            again = Tied()
            inner = make(again.parameters())
            divided(again, axes)
            resumed = DividedOptimizer(inner, peers)
            assert again.load_state_dict(state).missing_keys == []
            resumed.load_state_dict(copy.deepcopy(saved))
            for one, stepped in ((model, optimizer), (again, resumed)):
                own_gradients(one, axes, STEPS)
                stepped.step()
            equal(again.state_dict(), model.state_dict())
            equal(resumed.state_dict()["state"], optimizer.state_dict()["state"])
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            with pytest.raises(
                RuntimeError, match=r"size mismatch for first.weight: .*\[4, 6\].*current model is .*\[5, 6\]"
            ):
                model.load_state_dict({**state, "first.weight": torch.zeros(4, 6)})

    run_threads(on_rank, layout.size)


def test_a_state_from_before_prepare_is_divided_too() -> None:
    def on_rank(rank: int, size: int) -> None:
        axes = make_axes(Layout(pp=2, tp=2))
        model, inner, _ = one_process(OPTIMIZERS[0], range(2))
        wanted = copy.deepcopy(inner.state_dict()["state"])
        divided(model, axes)
        optimizer = DividedOptimizer(inner, [])
        assert all(p.numel() for p in optimizer.state)
        equal(optimizer.state_dict()["state"], wanted)

    run_threads(on_rank, 4)


def test_all_ranks_skip_a_step_if_one_found_an_infinity() -> None:
    def on_rank(rank: int, size: int) -> list[float]:
        axes = make_axes(Layout(pp=2, tp=2))
        model = Tied()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        divided(model, axes)
        group = axes.group(*MODEL_AXES)
        assert group is not None
        optimizer = DividedOptimizer(inner, [group])
        scales = []
        for unscales in (True, False):
            for bad in (3, None):
                scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
                scaler.scale(torch.ones(1))
                own_gradients(model, axes, 0)
                before = [p.detach().clone() for p in model.parameters()]
                if rank == bad:
                    next(p for p in model.parameters() if p.grad is not None).grad[0] = float("inf")
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True) if p.numel()]
                assert not any(moved) if bad is not None else all(moved)
                scales.append(scaler.get_scale())
        return scales

    assert run_threads(on_rank, 4) == [[32.0, 64.0, 32.0, 64.0]] * 4


def test_a_state_of_another_shape_has_no_whole_form() -> None:
    def on_rank(rank: int, size: int) -> None:
        axes = make_axes(Layout(tp=2))
        model = Tied()
        inner = torch.optim.Adafactor(model.parameters())
        divided(model, axes)
        optimizer = DividedOptimizer(inner, [])
        own_gradients(model, axes, 0)
        optimizer.step()
        with pytest.raises(UsageError, match="has a shape of its own"):
            optimizer.state_dict()

    run_threads(on_rank, 2)


@pytest.mark.slow
def test_the_state_of_an_exchange_waits_for_the_stages() -> None:
    """It is saved again as it was loaded, and by a checkpoint as that of the sharded optimizer."""

    def on_rank(rank: int, size: int) -> None:
        layout, saved = hybrid.of("pp=2,dp=2"), []
        for _ in range(2):
            model = hybrid.made()
            wrapped, stepped = hybrid.prepared(rank, model, hybrid.SGD(model.parameters()), "sharded-quantize8", layout)
            assert _owner(wrapped, stepped) is stepped
            if saved:
                stepped.load_exchange_state_dict(saved[0])
                assert stepped.exchange_state_dict() == saved[0]
            hybrid.norm_of_step(wrapped, 0, layout.coordinate(rank)["dp"], layout.dp)
            stepped.step()
            saved.append(stepped.exchange_state_dict())
        assert [each["step"] for each in saved] == [1, 2]

    run_threads(on_rank, 4)


def with_gradients(parameters: Any) -> list[Tensor]:
    return [p for p in parameters if p.grad is not None]


#: What a script clips together, one list after the other; each stage has two layers.
TOGETHER: dict[str, Callable[[Any], list[Any]]] = {
    "all": lambda m: [m.parameters()],
    "all with a gradient": lambda m: [with_gradients(m.parameters())],
    "a stage": lambda m: [m[2:].parameters()],
    "each stage": lambda m: [list(m[:2].parameters()), list(m[2:].parameters())],
    "a layer": lambda m: [m[2].parameters()],
    "one of a stage, with a gradient": lambda m: [with_gradients([m[0].weight, *m[2].parameters()])],
    "each in a list": lambda m: [[p] for p in m.parameters()],
    "matrices with a gradient": lambda m: [with_gradients(p for p in m.parameters() if p.dim() == 2)],
    "each": lambda m: list(m.parameters()),
    "each with a gradient": lambda m: with_gradients(m.parameters()),
}


TWO_BY_TWO = Layout(pp=2, dp=2)


def linears() -> nn.Sequential:
    with GENERATOR:
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))


def in_two_stages(rank: int, model: nn.Sequential, strategy: str) -> Any:
    world = World(rank, 4, rank, 4, 0, 1, torch.device("cpu"), "threads", TWO_BY_TWO)
    setup = Setup(world, wishes={"cut": ["2"], "proof": False})
    return prepare_divided(model, torch.optim.SGD(model.parameters(), lr=1.0), setup, get(strategy))


ROWS = torch.linspace(-1, 1, 40).view(8, 5)


def share(rank: int) -> Tensor:
    return ROWS.chunk(2)[TWO_BY_TWO.coordinate(rank)["dp"]]


def backward(rank: int, alone: nn.Module, prepared: nn.Module) -> None:
    alone(ROWS).pow(2).mean().backward()
    prepared(share(rank)).pow(2).mean().backward()


@pytest.mark.parametrize("strategy", ["hybrid", "sharded"])
def test_all_stages_take_a_clipped_list_for_the_same(strategy: str) -> None:
    def on_rank(rank: int, size: int) -> None:
        alone, model = linears(), linears()
        stepped = torch.optim.SGD(alone.parameters(), lr=1.0)
        prepared, optimizer = in_two_stages(rank, model, strategy)
        for name, lists in TOGETHER.items():
            for function in (gz.clip_grad_norm_, nn.utils.clip_grad_norm_):
                backward(rank, alone, prepared)
                for each in lists(alone):
                    nn.utils.clip_grad_norm_(each, 0.01)
                for each in lists(model):
                    function(each, 0.01)
                for optim in (stepped, optimizer):
                    optim.step()
                    optim.zero_grad()
                found, wanted = prepared.state_dict(), alone.state_dict()
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")

    run_threads(on_rank, 4)


def clips_otherwise(rank: int, size: int, strategy: str, leaves_out: bool, function: Any) -> None:
    """The first stage leaves the norm out, or each clips a list of one."""
    prepared, _ = in_two_stages(rank, model := linears(), strategy)
    backward(rank, linears(), prepared)
    given = with_gradients(model.parameters())
    if leaves_out and TWO_BY_TWO.coordinate(rank)["pp"] == 0:
        prepared(share(rank))
    else:
        function(given if leaves_out else given[:1], 0.01)


@pytest.mark.parametrize("function", [gz.clip_grad_norm_, nn.utils.clip_grad_norm_])
@pytest.mark.parametrize("strategy", ["hybrid", "sharded"])
def test_a_stage_that_leaves_out_the_norm_is_named(strategy: str, function: Any) -> None:
    told = r"call clip_grad_norm_\(\), and others have gone on\. Fix: call"
    table = r"\n +0 +a forward of the model \(training\)\n +[1-3] +clip_grad_norm_\(\)"
    with pytest.raises(AssertionError, match=rf"{told}.*\n.*{table}"):
        run_threads(clips_otherwise, 4, strategy, True, function)


@pytest.mark.parametrize("function", [gz.clip_grad_norm_, nn.utils.clip_grad_norm_])
@pytest.mark.parametrize("strategy", ["hybrid", "sharded"])
def test_lists_of_one_parameter_of_each_stage_are_refused(strategy: str, function: Any) -> None:
    with pytest.raises(AssertionError, match=r"each stage clips a list of one parameter.*Fix: .*clip_grad_norm_\(p, "):
        run_threads(clips_otherwise, 4, strategy, False, function)


def test_what_is_frozen_may_keep_a_gradient() -> None:
    """A part of a stage, then all of it, then nothing any more."""

    def on_rank(rank: int, size: int) -> None:
        alone, model = linears(), linears()
        stepped = torch.optim.SGD(alone.parameters(), lr=1.0)
        prepared, optimizer = in_two_stages(rank, model, "hybrid")
        for step in range(4):
            for each in (alone, model):
                each.requires_grad_(True)
                each[:2].requires_grad_(step != 2)
                each[0].bias.requires_grad_(step not in (1, 2))
            backward(rank, alone, prepared)
            stepped.step()
            optimizer.step()
            torch.testing.assert_close(prepared.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-6)
            for optim in (stepped, optimizer):
                optim.zero_grad(set_to_none=False)

    run_threads(on_rank, 4)


@pytest.mark.parametrize("left_out", [["0.bias", "2.weight"], ["0.weight", "0.bias", "1.weight", "1.bias"]], ids=str)
def test_what_a_script_leaves_out_is_not_averaged_in_stages(left_out: list[str]) -> None:
    def on_rank(rank: int, size: int) -> None:
        alone, own, model = linears(), linears(), linears()
        model._ddp_params_and_buffers_to_ignore = left_out  # type: ignore[assignment]
        prepared, _ = in_two_stages(rank, model, "hybrid")
        backward(rank, alone, prepared)
        own(share(rank)).pow(2).mean().backward()
        wanted = {name: p.grad for name, p in alone.named_parameters()}
        wanted |= {name: p.grad for name, p in own.named_parameters() if name in left_out}
        with torch._C.DisableTorchFunctionSubclass():  # parts of this rank, which scripts cannot read
            for name, p in model.named_parameters():
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-6, msg=name)

    run_threads(on_rank, 4)
