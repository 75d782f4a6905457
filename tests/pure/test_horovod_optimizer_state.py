"""Every optimizer of PyTorch: it trains under DistributedOptimizer as alone, and its state goes from root to the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from guozhuang.compat.horovod.torch import functions
from guozhuang.compat.horovod.torch.mpi_ops import Adasum, Average

from .horovod_alone import MirrorChannel, assert_equal, distributed, net_of_three, train

Make = Callable[[Any], torch.optim.Optimizer]


class HoldsNone(torch.optim.SGD):
    """An optimizer that has None among its state and its options."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            group["bound"] = None
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("bound", None)
                    self.state[param].setdefault("bounds", [None, {"low": None}])
                    assert self.state[param]["bound"] is None and self.state[param]["bounds"][1]["low"] is None
        return result


MAKERS: dict[str, Make] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam, amsgrad, tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Adamax, foreach": lambda params: torch.optim.Adamax(params, foreach=True),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "holds None": lambda params: HoldsNone(params, lr=0.1, momentum=0.9),
    "named": lambda params: torch.optim.SGD([(f"p{i}", p) for i, p in enumerate(params)], lr=0.1, momentum=0.9),
}


class Wire:
    """Stands for the engine: takes what root sends in one call, and brings it in the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.described, self.tensors = b"", dict[str, Tensor]()
        for name in ("broadcast_object", "broadcast_async_", "allreduce_", "synchronize_all"):
            monkeypatch.setattr(functions, name, getattr(self, name))

    def broadcast_object(self, described: Any, root: int, _: str) -> Any:
        if root == 0:  # this process is rank 0
            self.described = pickle.dumps(described)
        return pickle.loads(self.described)

    def broadcast_async_(self, tensor: Tensor, root: int, name: str) -> None:
        if root == 0:
            self.tensors[name] = tensor.clone()
        else:
            tensor.copy_(self.tensors.pop(name))

    def allreduce_(self, tensor: Tensor, **_: Any) -> Tensor:
        return tensor

    def synchronize_all(self, started: Sequence[None]) -> None:
        list(started)


@pytest.mark.parametrize("op", [Average, Adasum])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_is_that_of_the_optimizer_itself(channel: MirrorChannel, maker: str, op: int) -> None:
    ours, theirs = net_of_three(), net_of_three()
    made = distributed(ours, MAKERS[maker](list(ours.parameters())), op=op)
    assert_equal(train(ours, made), train(theirs, MAKERS[maker](list(theirs.parameters()))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_elsewhere_as_it_would_here(
    channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch, maker: str
) -> None:
    wire, root, other = Wire(monkeypatch), net_of_three(), net_of_three()
    of_root, of_other = (distributed(net, MAKERS[maker](list(net.parameters()))) for net in (root, other))
    root.second.bias.requires_grad_(False)  # the optimizer has no state for it
    train(root, of_root, 2)
    root.second.bias.requires_grad_(True)
    train(other, of_other, 1)
    other.load_state_dict(root.state_dict())
    before = [p.detach().clone() for p in root.parameters()]
    functions.broadcast_optimizer_state(of_root, root_rank=0)
    functions.broadcast_optimizer_state(of_other, root_rank=1)
    assert not wire.tensors
    assert all(torch.equal(p, b) for p, b in zip(other.parameters(), before, strict=True))
    for found, expected in zip(train(other, of_other, 3), train(root, of_root, 3), strict=True):
        assert torch.equal(found, expected)
