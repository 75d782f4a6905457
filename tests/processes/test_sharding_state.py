"""Checkpoints of a divided optimizer: in torch's ordinary format, from and to any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from guozhuang.errors import MismatchError
from guozhuang.sharding import ShardedOptimizer, shard
from tests.processes.cases import as_tests, batch, mlp
from tests.processes.expiring import expires_soon
from tests.ranks import RankError, run_ranks
from tests.waiting import EXPIRES_S

KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def make(kind: str, model: nn.Module) -> Optimizer:
    """Two groups, named parameters, one of them never used in the first half of training."""
    named = list(model.named_parameters())
    return KINDS[kind]([{"params": named[:3]}, {"params": named[3:], "lr": 0.02}])


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Equal batches on every rank, so that the number of ranks does not matter. The last bias is late."""
    for step in steps:
        model(batch(0, step)).pow(2).mean().backward()
        if step < 2:
            model[4].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()


def alone(kind: str, saved: dict[str, Any] | None, steps: range) -> dict[str, Any]:
    model = mlp()
    optimizer = make(kind, model)
    if saved is not None:
        saved = copy.deepcopy(saved)  # torch goes on counting in the tensors that it is given
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, steps)
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def divided(
    rank: int, world_size: int, kinds: list[str], saved: dict[str, Any], steps: range, loads: str
) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        model = mlp()
        optimizer = make(kind, model)
        if saved:
            model.load_state_dict(saved[kind]["model"])
        if saved and loads == "before":
            optimizer.load_state_dict(saved[kind]["optimizer"])
        model, optimizer = shard(model, optimizer)
        if saved and loads == "after":
            optimizer.load_state_dict(saved[kind]["optimizer"])
        train(model, optimizer, steps)
        found[kind] = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return found


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    state, wanted = found["optimizer"]["state"], expected["optimizer"]["state"]
    assert list(state) == list(wanted)
    for i in wanted:
        assert list(state[i]) == list(wanted[i])
        for key, value in wanted[i].items():
            if isinstance(value, torch.Tensor):
                assert state[i][key].dtype == value.dtype
                torch.testing.assert_close(state[i][key], value, rtol=1e-5, atol=1e-7)
            else:
                assert state[i][key] == value
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shm"])
@pytest.mark.parametrize("loads", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_checkpoints_travel_between_numbers_of_ranks(loads: str, backend: str) -> None:
    kinds = list(KINDS)
    start = {kind: alone(kind, None, range(4)) for kind in kinds}
    on_three = run_ranks(divided, 3, kinds, start, range(4, 7), loads, backend=backend)
    for kind in kinds:
        assert_alike(on_three[0][kind], alone(kind, start[kind], range(4, 7)))
        for other in on_three[1:]:
            assert_alike(other[kind], on_three[0][kind])
    on_two = run_ranks(divided, 2, kinds, on_three[0], range(7, 9), loads, backend=backend)
    for kind in kinds:
        assert_alike(on_two[1][kind], alone(kind, start[kind], range(4, 9)))
        back = alone(kind, on_two[0][kind], range(9, 11))  # a divided checkpoint on one process
        assert_alike(back, alone(kind, start[kind], range(4, 11)))


def from_the_beginning(rank: int, world_size: int, kinds: list[str]) -> dict[str, Any]:
    return divided(rank, world_size, kinds, {}, range(5), "")


def test_a_state_made_here_is_that_of_one_process() -> None:
    kinds = list(KINDS)
    for results in (run_ranks(from_the_beginning, 4, kinds),):
        for kind in kinds:
            assert_alike(results[0][kind], alone(kind, None, range(5)))


def one_does_not_come(rank: int, world_size: int) -> None:
    model = mlp()
    _, optimizer = shard(model, make("adamw", model))
    expires_soon()
    if rank == 0:
        optimizer.state_dict()


def test_a_rank_that_does_not_come_is_named() -> None:
    result = run_ranks(one_does_not_come, 3, collect_errors=True)[0]
    assert isinstance(result, RankError) and result.type_name == "WorldError"
    assert f"ranks [1, 2] did not come within {EXPIRES_S:g} s to optimizer.state_dict()" in result.message


def case_what_cannot_be_loaded_is_refused_on_every_rank(rank: int, world_size: int) -> None:
    model = mlp()
    optimizer: Any
    model, optimizer = shard(model, make("adamw", model))
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    fewer = copy.deepcopy(saved)
    fewer["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"groups of \[2, 3\] parameters, this optimizer groups of \[3, 3\]"):
        optimizer.load_state_dict(fewer)
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})
    if rank == 1:
        saved["state"][0]["step"] += 1
    with pytest.raises(MismatchError, match="differ in the optimizer's state to load"):
        optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 3))


def case_hooks_of_checkpoints_and_state_of_frozen_parameters(rank: int, world_size: int) -> None:
    calls: list[str] = []
    model = mlp()
    inner = make("adamw", model)
    train(model, inner, range(3))
    model[0].requires_grad_(False)  # its state is kept, though nothing steps it
    optimizer: Any
    model, optimizer = shard(model, inner)
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    saved = optimizer.state_dict()
    assert saved["mine"] == 1 and set(saved["state"]) == set(range(6))
    optimizer.load_state_dict(saved)
    assert calls == ["pre", "load pre", "load post"]
    assert set(optimizer.state_dict()["state"]) == set(range(6))
    assert optimizer.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.inner.param_groups is optimizer.param_groups
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    model[0].requires_grad_(True)
    train(model, optimizer, range(3, 4))
    assert float(optimizer.state_dict()["state"][0]["step"]) == 4.0


def by_distributed_checkpoint(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    states = []
    for round in range(2):
        model = mlp()
        optimizer: Any = make("adamw", model)
        model, optimizer = shard(model, optimizer)
        assert isinstance(optimizer, ShardedOptimizer)
        if round == 0:
            train(model, optimizer, range(3))
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        else:
            train(model, optimizer, range(3))
            held = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            for values in held["optimizer"]["state"].values():
                for value in values.values():
                    value.zero_()
            dcp.load(held, checkpoint_id=folder)
            set_optimizer_state_dict(model, optimizer, held["optimizer"])
        states.append(optimizer.state_dict())
    for i, values in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][i][key]) for key, value in values.items())
    dist.barrier()


def test_torchs_distributed_checkpoint_works_on_it(tmp_path: Any) -> None:
    run_ranks(by_distributed_checkpoint, 2, str(tmp_path))


test_cases = as_tests(globals(), (2,))
