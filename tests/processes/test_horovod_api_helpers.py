"""Horovod's interface among real ranks: parameters, optimizer state, objects and batch normalization."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.torch import functions, handles
from guozhuang.errors import UsageError
from tests.processes.horovod_cases import as_tests, of_all, of_rank


def case_parameters_of_a_dictionary(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    with torch.no_grad():
        for each in model.state_dict().values():
            each.fill_(rank + 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    assert all((each == size).all() for each in model.state_dict().values())
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
    hvd.broadcast_parameters({"none": None, "some": (some := torch.tensor([rank]))}, root_rank=1)
    assert some.item() == 1


def case_parameters_of_a_list(rank: int, size: int) -> None:
    model = nn.Linear(3, 4)
    for params in (list(model.named_parameters()), list(model.parameters())):
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(rank + 5)
        hvd.broadcast_parameters(params, root_rank=1)
        assert all((each == 6).all() for each in model.parameters())
    for wrong in (model.named_parameters(), model.parameters(), 5, {"a": 5}):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(wrong, root_rank=0)


def case_parameters_that_cannot_be_sent(rank: int, size: int) -> None:
    """Refused before any of them is sent."""
    good = torch.ones(2)
    for wrong in ([("b", torch.ones(1, dtype=torch.complex64))], [("b", good.to_sparse())], [("a", good)]):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters([("a", good), *wrong], root_rank=0)
    hvd.broadcast_parameters([("a", good)], root_rank=0)


def case_no_optimizer(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="no optimizer: an object of Linear"):
        hvd.broadcast_optimizer_state(torch.nn.Linear(1, 1), 0)


def case_parameters_that_differ(rank: int, size: int) -> None:
    """Nothing is under way afterwards: it can be called again at once, with the same names."""
    names = [f"p.{number:03}" for number in range(200)]
    params = {name: torch.full((3,), float(rank)) for name in names}
    params["p.010"] = torch.zeros(3 + (rank == 1))
    for _ in range(3):
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched broadcast tensor shapes"):
            hvd.broadcast_parameters(params, root_rank=1)
        number = hvd.allreduce_async(torch.ones(1))
        for before in range(number - len(params), number):
            with pytest.raises(ValueError, match="handle"):
                hvd.poll(before)  # it was waited for
        hvd.synchronize(number)
        assert all((params[name] == 1).all() for name in names if name != "p.010")  # all others have come
    params["p.010"] = torch.zeros(3)
    hvd.broadcast_parameters({name: each.add_(rank) for name, each in params.items()}, root_rank=size - 1)
    assert all((params[name] == size).all() for name in names if name != "p.010")


def case_optimizers_after_a_failure(rank: int, size: int) -> None:
    """What root described is put in place when all of it is there, and not before."""
    model, optimizer = model_and_optimizer("adamw", seed=0)
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    if rank == 0:
        take_steps(model, optimizer, 1)

    def failing(started):
        handles.synchronize_all(started)
        raise hvd.HorovodInternalError("a peer is lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "synchronize_all", failing)
        with pytest.raises(hvd.HorovodInternalError, match="lost"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.5 + rank
    assert bool(optimizer.state) == (rank == 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.5 and len(optimizer.state) == 4


def model_and_optimizer(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    if kind == "bfloat16":
        model = model.bfloat16()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.03}]
    makers = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
        "amsgrad": lambda: torch.optim.Adam(groups, lr=torch.tensor(0.1), amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.1),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=0.1, centered=True, momentum=0.5),
        "bfloat16": lambda: torch.optim.AdamW(groups, lr=0.1),
    }
    return model, makers[kind]()


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for step in range(number):
        optimizer.zero_grad()
        x = of_rank(step, 6, 5, dtype=next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()


def case_fresh_optimizers_change_nothing(rank: int, size: int) -> None:
    """No step is made: neither weights nor counters move."""
    for kind in ("sgd", "adamw"):
        model, optimizer = model_and_optimizer(kind, seed=0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.1 + rank
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert not optimizer.state_dict()["state"]
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.param_groups[0]["lr"] == 1.1


def case_training_goes_on_as_on_root(rank: int, size: int) -> None:
    """Only root has trained; after the broadcast all ranks go on to the very same weights as one process would."""
    for kind in ("sgd", "adamw", "amsgrad", "adagrad", "rmsprop", "bfloat16"):
        alone, alone_optimizer = model_and_optimizer(kind, seed=0)
        take_steps(alone, alone_optimizer, 3)
        if kind == "bfloat16":  # state that is wider than its parameter
            for entries in alone_optimizer.state.values():
                entries["exp_avg"] = entries["exp_avg"].float() + 1e-6
        model, optimizer = model_and_optimizer(kind, seed=rank)
        if rank == 0:
            model.load_state_dict(alone.state_dict())
            for group, other in zip(optimizer.param_groups, alone_optimizer.param_groups, strict=True):
                for p, q in zip(group["params"], other["params"], strict=True):
                    optimizer.state[p] = {k: v.clone() for k, v in alone_optimizer.state[q].items()}
        elif rank == 1:
            take_steps(model, optimizer, 1)  # has state of its own, which gives way
        optimizer.param_groups[1]["lr"] = 0.03 if rank == 0 else 0.5
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert optimizer.param_groups[1]["lr"] == 0.03
        for group, other in zip(optimizer.param_groups, alone_optimizer.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                for key, value in alone_optimizer.state[q].items():
                    found = optimizer.state[p][key]
                    assert found.dtype == value.dtype and torch.equal(found, value), (kind, key)
        if kind == "bfloat16":
            continue
        take_steps(alone, alone_optimizer, 2)
        take_steps(model, optimizer, 2)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True)), kind


def case_optimizers_that_differ(rank: int, size: int) -> None:
    model = nn.Linear(3 + (rank == 1), 2)
    with pytest.raises(ValueError, match="different parameters"):
        hvd.broadcast_optimizer_state(torch.optim.Adam(model.parameters()), root_rank=0)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)


def case_state_that_is_no_tensor(rank: int, size: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["note"] = {"rank": rank}
    if rank != 0:
        optimizer.param_groups[0]["surplus"] = 1
        optimizer.state[model.bias]["old"] = torch.ones(2)
    else:
        optimizer.state[model.weight]["history"] = [torch.arange(40.0), 7, (None, torch.ones(1))]
        optimizer.state["steps"] = 12
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["note"] == {"rank": 0}
    assert "surplus" not in optimizer.param_groups[0]
    assert model.bias not in optimizer.state
    history = optimizer.state[model.weight]["history"]
    assert torch.equal(history[0], torch.arange(40.0)) and history[1] == 7 and history[2][1].item() == 1
    assert optimizer.state["steps"] == 12


def case_objects(rank: int, size: int) -> None:
    secret = {"rank": rank, "text": "x" * 10000, "tensor": of_rank(rank, 5)}
    found = hvd.broadcast_object(secret if rank == 1 else None, root_rank=1)
    assert found["rank"] == 1 and torch.equal(found["tensor"], of_rank(1, 5))
    assert (found is secret) == (rank == 1)
    assert hvd.broadcast_object([rank], 0, name="a list") == [0]
    assert hvd.broadcast_object(None) is None
    assert hvd.allgather_object({"rank": rank, "pad": "y" * rank * 100})[-1] == {
        "rank": size - 1,
        "pad": "y" * (size - 1) * 100,
    }
    assert hvd.allgather_object(rank, name="ranks") == list(range(size))
    function = hvd.broadcast_object((lambda x: x + rank) if rank == 0 else None, 0)
    assert function(5) == 5


def case_objects_that_cannot_be_sent(rank: int, size: int) -> None:
    import threading

    with pytest.raises(UsageError if rank == 0 else ValueError, match="pickle"):
        hvd.broadcast_object(threading.Lock() if rank == 0 else None, 0)
    with pytest.raises(UsageError if rank == 1 else ValueError, match="pickle"):
        hvd.allgather_object(threading.Lock() if rank == 1 else 5)
    assert hvd.allgather_object(rank) == list(range(size))


def case_batch_normalization(rank: int, size: int) -> None:
    """As torch's BatchNorm over the joined batch: outputs, gradients, running statistics; uneven batches, none on one rank."""
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        for shape in ((4,), (4, 3, 2)):
            counts = [2 + each for each in range(size - 1)] + [0 if shape == (4,) else 3]
            inputs = [of_rank(each, counts[each], *shape) + 100 for each in range(size)]
            weights = [of_rank(each + 50, counts[each], *shape) for each in range(size)]
            twin = (nn.BatchNorm1d if shape == (4,) else nn.BatchNorm2d)(4, **options)
            layer = hvd.SyncBatchNorm(4, **options)
            assert layer.state_dict().keys() == twin.state_dict().keys()
            for _ in range(2):
                joined = torch.cat(inputs).requires_grad_()
                expected = twin(joined)
                (expected * torch.cat(weights)).sum().backward()
                mine = inputs[rank].clone().requires_grad_()
                found = layer(mine)
                (found * weights[rank]).sum().backward()
                close = {"rtol": 2e-4, "atol": 2e-4}
                torch.testing.assert_close(found, expected.split(counts)[rank], **close)
                torch.testing.assert_close(mine.grad, joined.grad.split(counts)[rank], **close)
            if layer.affine:  # each rank has its own part of the sum
                total = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
                torch.testing.assert_close(total, twin.weight.grad, rtol=2e-4, atol=2e-3)
                total = hvd.allreduce(layer.bias.grad, op=hvd.Sum)
                torch.testing.assert_close(total, twin.bias.grad, rtol=2e-4, atol=2e-3)
            if layer.track_running_stats:
                torch.testing.assert_close(layer.running_mean, twin.running_mean)
                torch.testing.assert_close(layer.running_var, twin.running_var, rtol=2e-4, atol=2e-4)
                layer.eval(), twin.eval()
                torch.testing.assert_close(layer(inputs[0]), twin(inputs[0]), rtol=2e-4, atol=2e-4)


def case_normalization_in_lower_precision(rank: int, size: int) -> None:
    """bfloat16 in and out, float32 between."""
    layer, twin = hvd.SyncBatchNorm(4), nn.BatchNorm1d(4)
    inputs = [each.bfloat16() for each in of_all(size, 6, 4)]
    mine = inputs[rank].requires_grad_()
    found = layer(mine)
    found.square().sum().backward()
    assert (found.dtype, mine.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    expected = twin(torch.cat(inputs).float().detach()).split(6)[rank]
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer.running_var, twin.running_var)


def case_batches_that_cannot_be_normalized(rank: int, size: int) -> None:
    layer = hvd.SyncBatchNorm(4)
    for wrong in (torch.zeros(4), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"shape|channels"):
            layer(wrong)
    with pytest.raises(ValueError, match="more than one value"):
        layer(torch.zeros(1 if rank == 0 else 0, 4))


def case_names_in_flight(rank: int, size: int) -> None:
    """Objects and tensors of one name do not get into each other's way."""
    handle = hvd.allreduce_async(torch.ones(3), name="both", op=hvd.Sum)
    assert hvd.broadcast_object("both", name="both") == "both"
    assert torch.equal(hvd.synchronize(handle), torch.stack(of_all(size, 3)).mul(0).add(1).sum(0))


test_ranks = as_tests(globals())
