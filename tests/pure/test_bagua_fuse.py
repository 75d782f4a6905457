"""``fuse_optimizer``: one step for a group has the bits of the steps of its parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from guozhuang.compat.bagua.torch_api.contrib import fuse_optimizer
from guozhuang.compat.bagua.torch_api.contrib.fuse.optimizer import calculate_mutual_groups, is_fused_optimizer

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.2, "momentum": 0.9}),
    ("SGD", {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"lr": 0.2}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.2}),
    ("AdamW", {"amsgrad": True}),
    ("RMSprop", {}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.5}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("ASGD", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adadelta", {}),
    ("Adadelta", {"weight_decay": 0.1}),
]


def _net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4))


def _made(kind: str, options: dict[str, Any], lr: float = 0.01) -> tuple[nn.Sequential, Any]:
    net = _net()
    groups = [{"params": net[0].parameters()}, {"params": net[2:].parameters(), "lr": lr}]
    return net, getattr(torch.optim, kind)(groups, **options)


def _gradients(net: nn.Module, optimizer: Any, epoch: int, set_to_none: bool) -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(epoch))
    optimizer.zero_grad(set_to_none=set_to_none)
    net(x).square().mean().backward()


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("set_to_none", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "options"), SETTINGS)
def test_fused_steps_have_the_bits_of_steps(kind: str, options: dict[str, Any], set_to_none: bool) -> None:
    (plain, alone), (net, fused) = _made(kind, options), _made(kind, options)
    assert fuse_optimizer(fused) is fused and is_fused_optimizer(fused) and not is_fused_optimizer(alone)
    for epoch in range(101):
        for each, optimizer in ((plain, alone), (net, fused)):
            _gradients(each, optimizer, epoch, set_to_none)
        alone.step()
        fused.fuse_step() if epoch % 2 == 0 else fused.step()
        if epoch == 50:
            fused.load_state_dict(copy.deepcopy(fused.state_dict()))
    assert _same(plain, net)
    assert fused._bagua_fused_count == 102
    mine, theirs = fused.state_dict()["state"], alone.state_dict()["state"]
    assert mine.keys() == theirs.keys() and all(mine[i].keys() == theirs[i].keys() for i in mine)


def test_parameters_without_gradient_and_of_other_counts() -> None:
    (plain, alone), (net, fused) = _made("Adam", {}), _made("Adam", {})
    fuse_optimizer(fused)
    for epoch in range(6):
        for each, optimizer in ((plain, alone), (net, fused)):
            _gradients(each, optimizer, epoch, True)
            if epoch % 3 == 0:
                each[4].bias.grad = None  # type: ignore[union-attr]
        alone.step()
        fused.fuse_step()
    assert _same(plain, net)
    assert float(fused.state[net[4].bias]["step"]) == 4.0  # type: ignore[index]


def test_a_closure_schedulers_and_hooks() -> None:
    (plain, alone), (net, fused) = _made("SGD", {"lr": 0.1}), _made("SGD", {"lr": 0.1})
    fuse_optimizer(fused)
    calls: list[int] = []
    fused.register_step_post_hook(lambda *_: calls.append(1))
    losses = []
    for each, optimizer, step in ((plain, alone, alone.step), (net, fused, fused.fuse_step)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for epoch in range(3):

            def closure(each: nn.Module = each, optimizer: Any = optimizer, epoch: int = epoch) -> float:
                _gradients(each, optimizer, epoch, True)
                return float(epoch)

            losses.append(step(closure))
            scheduler.step()
    assert losses == [0.0, 1.0, 2.0] * 2 and _same(plain, net) and len(calls) == 3


def test_only_what_is_flat_already() -> None:
    net, optimizer = _made("SGD", {"lr": 0.1})
    fuse_optimizer(optimizer, do_flatten=False)
    before = [p.data_ptr() for p in net.parameters()]
    _gradients(net, optimizer, 0, True)
    optimizer.fuse_step()
    assert optimizer._bagua_fused_count == 0 and before == [p.data_ptr() for p in net.parameters()]


def test_what_cannot_be_fused(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = _made("SGD", {"lr": 0.1})
    with pytest.raises(RuntimeError, match="trying to fuse an optimizer twice!"):
        fuse_optimizer(fuse_optimizer(optimizer))

    class Whole(torch.optim.SGD):
        pass

    plain, whole = _net(), Whole(net.parameters(), lr=0.1)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    net.load_state_dict(plain.state_dict())
    fuse_optimizer(whole)
    assert "Whole may look at whole tensors" in caplog.text
    for each, opt in ((plain, alone), (net, whole)):
        _gradients(each, opt, 0, True)
    alone.step()
    whole.fuse_step()  # type: ignore[attr-defined]
    assert _same(plain, net) and whole._bagua_fused_count == 0  # type: ignore[attr-defined]


def test_mutual_groups() -> None:
    flat = torch.arange(40.0)
    one, two = flat[:20], flat[20:]
    spread = [torch.zeros(5) for _ in range(4)]
    assert calculate_mutual_groups([]) == []
    assert calculate_mutual_groups([[flat[0:2], flat[4:6]]]) == []
    order = [3, 1, 2, 0]
    mine = [one[5 * order.index(i) : 5 * order.index(i) + 5] for i in range(4)]
    theirs = [two[5 * order.index(i) : 5 * order.index(i) + 5] for i in range(4)]
    assert calculate_mutual_groups([mine, theirs]) == [order]
    assert calculate_mutual_groups([mine, spread]) == []
    pair = torch.zeros(4)
    more = [*mine, pair[:2], pair[2:]], [*theirs, torch.zeros(6)[:3], torch.zeros(6)[:3]]
    assert calculate_mutual_groups(more[:1]) in ([order, [4, 5]], [[4, 5], order])
    assert calculate_mutual_groups(more) == [order]
