"""What the wrapper does for any weight exchange, with the simplest one: the mean of all weights after every second step."""

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import MismatchError, UsageError, WorldError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.groups.agreement import store_of
from guozhuang.weights.around import AroundSteps
from tests.processes.cases import (
    as_tests,
    assert_equal_everywhere,
    everybodys,
    flat,
    seeded,
)
from tests.processes.expiring import expires_soon
from tests.processes.mean_of_two import (
    MeanOfTwo,
    average,
    batch,
    made,
    train,
    twins,
    wrapped,
)
from tests.ranks import RankError, run_ranks
from tests.waiting import EXPIRES_S, LIMIT_S


def case_gradients_stay_local_and_weights_meet(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(5))
    assert torch.allclose(flat(ddp), flat(twins(size, 5)[rank]), atol=1e-6)
    assert not torch.equal(*everybodys(flat(ddp))[:2])  # the fifth step is each rank's own


def case_gradients_are_averaged_in_the_first_steps(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(start_step=3)
    train(ddp, optimizer, rank, range(3))
    assert_equal_everywhere(flat(ddp))
    train(ddp, optimizer, rank, range(3, 5))
    assert torch.allclose(flat(ddp), flat(twins(size, 5, start_step=3)[rank]), atol=1e-6)


def agrees_by(what: Callable[[DistributedDataParallel], object]) -> Callable[[int, int], None]:
    def check(rank: int, size: int) -> None:
        ddp, optimizer = wrapped()
        train(ddp, optimizer, rank, range(5))
        twin = twins(size, 5)
        average(twin)
        what(ddp)
        assert torch.allclose(flat(ddp), flat(twin[0]), atol=1e-6)
        assert_equal_everywhere(flat(ddp))
        if rank == 0:
            ddp.eval()  # nothing to agree on: no other rank is needed
            ddp.state_dict()
            ddp.module.state_dict()

    return check


case_evaluation = agrees_by(lambda ddp: ddp.eval())
case_state_dict = agrees_by(lambda ddp: ddp.state_dict())
case_state_dict_of_the_bare_module = agrees_by(lambda ddp: ddp.module.state_dict())
case_agreement_when_asked_for = agrees_by(lambda ddp: ddp.agree())


def case_training_goes_on_after_evaluation(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(2))
    ddp.eval()
    assert not ddp.training and not ddp.module.training
    ddp.train()
    assert ddp.module.training
    train(ddp, optimizer, rank, range(2, 4))
    assert torch.allclose(flat(ddp), flat(twins(size, 4)[rank]), atol=1e-6)


def case_buffers_are_averaged(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(norm=True)
    train(ddp, optimizer, rank, range(3))
    before = ddp.module[1].running_mean.clone()
    mean = torch.stack(everybodys(before)).mean(0)
    assert not torch.equal(before, mean)
    ddp.eval()
    assert torch.allclose(ddp.module[1].running_mean, mean, atol=1e-6)
    assert int(ddp.module[1].num_batches_tracked) == 3


def case_no_wrapper_and_no_bucket_is_needed(rank: int, size: int) -> None:
    """Around a bare module and its optimizer the same happens as with the wrapper, which then makes no buckets either."""
    ddp, optimizer = wrapped()
    bare = made()
    alone = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    assert dist.group.WORLD is not None
    around = AroundSteps(bare, alone, MeanOfTwo(), dist.group.WORLD)
    train(ddp, optimizer, rank, range(3))
    train(bare, alone, rank, range(3))
    assert torch.equal(flat(ddp), flat(bare)) and ddp.reducer is None
    assert all(not p._post_accumulate_grad_hooks for p in (*ddp.parameters(), *bare.parameters()))
    state = bare.state_dict()  # the ranks agree first
    assert_equal_everywhere(flat(bare))
    assert all(torch.equal(state[name], value) for name, value in ddp.module.state_dict().items())
    assert around.step == 3


def case_gradients_that_overflow_on_one_rank(rank: int, size: int) -> None:
    """GradScaler calls step() of a fused optimizer also where it changes nothing, so ranks stay in step."""
    ddp = DistributedDataParallel(made())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, fused=True)
    ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        scaler.scale(loss * (torch.inf if rank == 1 and step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert ddp.around is not None and ddp.around.step == 4
    assert_equal_everywhere(flat(ddp))
    assert bool(flat(ddp).isfinite().all())


def case_uneven_inputs(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    with ddp.join():
        train(ddp, optimizer, rank, range(2 + 3 * rank))
    assert ddp.around is not None and ddp.around.step == 2 + 3 * (size - 1)
    assert_equal_everywhere(flat(ddp))


def case_uneven_inputs_while_gradients_are_averaged(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(start_step=4)
    with ddp.join():
        train(ddp, optimizer, rank, range(2 + 3 * rank))
    assert_equal_everywhere(flat(ddp))


def case_accumulation(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(start_step=1)
    twin, its = wrapped(start_step=1)
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with ddp.no_sync():
            (nn.functional.mse_loss(ddp(x[:4]), y[:4]) / 2).backward()
        (nn.functional.mse_loss(ddp(x[4:]), y[4:]) / 2).backward()
        optimizer.step()
    train(twin, its, rank, range(3))
    assert torch.allclose(flat(ddp), flat(twin), atol=1e-6)


def case_a_checkpoint_goes_on_exactly(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(3))
    exchange = ddp.exchange_state_dict()
    saved = copy.deepcopy((exchange, ddp.state_dict(), optimizer.state_dict()))
    assert saved[0]["weights"]["step"] == 3 and saved[0]["weights"]["exchange"]["num_steps"] == 3
    train(ddp, optimizer, rank, range(3, 6))
    again, its = wrapped()
    again.load_state_dict(saved[1])
    its.load_state_dict(saved[2])
    again.load_exchange_state_dict(saved[0])
    train(again, its, rank, range(3, 6))
    assert torch.equal(flat(again), flat(ddp))


def case_other_weights_begin_anew(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    around = ddp.around
    assert around is not None
    before = around._state
    ddp.load_state_dict({name: torch.zeros_like(t) for name, t in ddp.state_dict().items()})
    train(ddp, optimizer, rank, range(1, 2))
    assert before.closed and around._state is not before


def case_loaded_weights_stay_at_evaluation_those_of_rank_0(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(norm=True)
    train(ddp, optimizer, rank, range(3))
    loaded = {name: torch.full_like(t, 7.0 + rank) for name, t in ddp.state_dict().items()}
    train(ddp, optimizer, rank, range(3, 4))
    ddp.load_state_dict(loaded)
    ddp.eval()
    assert bool((flat(ddp) == 7).all()) and bool((ddp.module[1].running_mean == 7).all())
    ddp.eval()
    assert bool((flat(ddp) == 7).all())


def case_who_loaded_alone_is_told_on_all_ranks(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    saved = {name: t.detach().clone() for name, t in ddp.named_parameters()}
    if rank == 0:
        ddp.load_state_dict(saved)
    with pytest.raises(MismatchError, match="weights were loaded"):
        ddp.eval()


def case_loaded_and_then_no_batch_in_a_join(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    ddp.load_state_dict(ddp.state_dict())
    with ddp.join():
        train(ddp, optimizer, rank, range(1, 1 if rank == size - 1 else 4))
    assert_equal_everywhere(flat(ddp))


def case_only_no_sync_in_a_join_and_a_rank_without_batch(rank: int, size: int) -> None:
    ddp, _ = wrapped()
    with ddp.join(), ddp.no_sync():
        if rank != size - 1:
            ddp(batch(rank, 0)[0]).sum().backward()
    assert_equal_everywhere(flat(ddp))


def case_copies_of_the_module_are_on_their_own(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    for other in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
        assert ddp.around is not None
        if rank == 0:  # nobody else is needed
            other.load_state_dict(other.state_dict())
        assert not ddp.around._loaded
    apart = everybodys(flat(ddp))
    assert not torch.equal(*apart[:2])


def case_parameters_with_other_memory(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(3))
    mean = torch.stack(everybodys(flat(ddp))).mean(0)
    nn.utils.vector_to_parameters(flat(ddp).clone(), ddp.parameters())
    ddp.eval()
    assert_equal_everywhere(flat(ddp))
    assert torch.allclose(flat(ddp), mean, atol=1e-6)
    nn.utils.vector_to_parameters(flat(ddp).clone(), ddp.parameters())
    train(ddp, optimizer, rank, range(3, 4))
    assert_equal_everywhere(flat(ddp))  # the means of MeanOfTwo are made in the new memory


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.finfo(torch.float32).min]))
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 64, 2) / 64))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def case_constants_in_buffers_stay(rank: int, size: int) -> None:
    model = Constants()
    before = {name: b.clone() for name, b in model.named_buffers()}
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    train(ddp, optimizer, rank, range(1))
    model.mean += rank
    ddp.eval()
    assert torch.equal(model.mask, before["mask"]) and torch.equal(model.frequencies, before["frequencies"])
    assert torch.allclose(model.mean, torch.full((2,), (size - 1) / 2))


def case_sparse_gradients_stay_local(rank: int, size: int) -> None:
    with seeded(0):
        model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    ddp(torch.tensor([rank])).sum().backward()
    gradient = ddp.module[0].weight.grad
    assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [[rank]]


def case_what_cannot_work(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(made())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="takes a WeightExchange"):
        ddp.use_weight_exchange(AllReduce(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="holds no parameter of the wrapped module"):
        ddp.use_weight_exchange(MeanOfTwo(), torch.optim.SGD(made().parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"all trained parameters.*'2.weight, 2.bias'"):
        ddp.use_weight_exchange(MeanOfTwo(), torch.optim.SGD(ddp.module[0].parameters(), lr=0.1))
    assert ddp.forward_sync_buffers and ddp.around is None
    frozen = made()
    frozen[2].requires_grad_(False)
    DistributedDataParallel(frozen).use_weight_exchange(MeanOfTwo(), torch.optim.SGD(frozen[0].parameters(), lr=0.1))
    model = made()
    delayed = {
        "delay_all_reduce_named_params": [("0.weight", model[0].weight)],
        "param_to_hook_all_reduce": model[0].bias,
    }
    with pytest.raises(UsageError, match="delay_all_reduce_named_params"):
        DistributedDataParallel(model, **delayed).use_weight_exchange(
            MeanOfTwo(), torch.optim.SGD(model.parameters(), lr=0.1)
        )
    ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    with pytest.raises(RuntimeError, match="only once"):
        ddp.use_weight_exchange(MeanOfTwo(), optimizer)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(ddp)
    with pytest.raises(UsageError, match="without a weight exchange"):
        ddp.load_exchange_state_dict({"step": 0, "exchange": {}})
    plain = DistributedDataParallel(made())
    with pytest.raises(UsageError, match="with a weight exchange"):
        plain.load_exchange_state_dict({"step": 0, "exchange": {}, "weights": {}})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    ddp(batch(rank, 0)[0]).sum().backward()
    with pytest.raises(UsageError, match="added to the optimizer"):
        optimizer.step()
    assert plain.around is None
    plain.agree()


test_cases = as_tests(globals(), (2, 3), on="threads")


def evaluate_alone(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    store = store_of(dist.group.WORLD)
    if rank == 0:
        expires_soon()
        try:
            ddp.eval()
        finally:
            store.set("gave up", "")
    else:
        store.wait(["gave up"], datetime.timedelta(seconds=LIMIT_S))


def test_who_evaluates_alone_is_told_whom_it_waited_for() -> None:
    results = run_ranks(evaluate_alone, 2, collect_errors=True)
    assert isinstance(results[0], RankError)
    assert results[0].type_name == WorldError.__name__
    assert f"ranks [1] did not come within {EXPIRES_S:g} s" in results[0].message
    assert "on every rank" in results[0].message


def alone(rank: int, size: int) -> float:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(3))
    ddp.eval()
    return float((flat(ddp) - flat(twins(1, 3)[0])).abs().max())


def test_one_rank() -> None:
    assert run_ranks(alone, 1)[0] < 1e-6
