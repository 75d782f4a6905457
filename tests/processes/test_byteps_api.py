"""BytePS's interface among real ranks: the acceptance cases of its documentation, against plain torch expressions."""

from __future__ import annotations

import copy
import itertools
import os
import time
import warnings

import pytest
import torch
from torch import Tensor, nn

import guozhuang.compat.byteps.torch as bps
from guozhuang.compat.byteps.common import BytePSBasics
from guozhuang.compat.byteps.torch import cross_barrier, ops, session
from guozhuang.compat.byteps.torch.parallel import DistributedDataParallel
from guozhuang.compat.byteps.torch.session import declared
from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.errors import UsageError
from tests.processes.horovod_cases import GLOO, USUAL, as_tests
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S, until


def case_who_am_i(rank: int, size: int) -> None:
    bps.init()  # a second call changes nothing
    assert (bps.rank(), bps.size(), bps.local_rank(), bps.local_size()) == (rank, size, rank, size)


def case_push_pull_in_every_form(rank: int, size: int) -> None:
    mean, total = (size + 1) / 2, size * (size + 1) / 2
    for average, expected in ((True, mean), (False, total)):
        given = torch.full((3,), rank + 1.0)
        assert torch.equal(bps.push_pull(given, average, name="a"), torch.full((3,), expected))
        assert torch.equal(bps.synchronize(ops.push_pull_async(given, average, name="a")), torch.full((3,), expected))
        assert torch.equal(given, torch.full((3,), rank + 1.0)), "the input is unchanged"
        assert ops.push_pull_inplace(given, average, name="a") is given
        assert torch.equal(given, torch.full((3,), expected))
    given = torch.full((3,), rank + 1.0)
    place = given.data_ptr()
    handle = bps.byteps_push_pull(given, name="a")
    assert isinstance(handle, int)
    until(lambda: bps.poll(handle), LIMIT_S)
    assert bps.synchronize(handle) is given and given.data_ptr() == place and given[0] == mean
    assert bps.synchronize(handle) is None
    with pytest.raises(ValueError, match="handle"):
        bps.poll(handle)


def case_fp16_travels_and_the_dtype_comes_back(rank: int, size: int) -> None:
    found = bps.push_pull(torch.full((4,), rank + 0.5), name="half", compression=bps.Compression.fp16)
    assert found.dtype == torch.float32 and torch.equal(found, torch.full((4,), size / 2))


def case_equal_tensors_average_to_themselves(rank: int, size: int) -> None:
    torch.manual_seed(1234)
    for dtype, num_dims in itertools.product((torch.float16, torch.float32, torch.float64), (1, 2, 3)):
        given = torch.empty((17,) * num_dims, dtype=torch.float64).uniform_(-100, 100).to(dtype)
        found = bps.push_pull(given, name=f"equal{num_dims}{dtype}")
        # BytePS's own test compares the sum, which is exact for up to three ranks: 2 x is, and then one addition rounds once.
        total = bps.push_pull(given, average=False, name=f"sum{num_dims}{dtype}")
        assert size > 3 or torch.equal(total, given * size), (dtype, num_dims)
        # The mean is that sum divided in its own dtype: exactly by 2 and 4, and to a rounding by 3.
        difference = ((found.double() - given.double()) / given.double()).abs().max().item()
        assert difference <= (0 if size in (1, 2, 4) else torch.finfo(dtype).eps), (dtype, num_dims, difference)


def case_integers_are_cut_towards_zero_and_scalars_stay(rank: int, size: int) -> None:
    parts = [[-3, 7], *([[0, 0]] * (size - 1))]
    expected = [int(-3 / size), int(7 / size)]
    for dtype in (torch.int32, torch.int64):
        assert bps.push_pull(torch.tensor(parts[rank], dtype=dtype), name=f"{dtype}").tolist() == expected
    assert bps.push_pull(torch.tensor([7 * (rank == 0)], dtype=torch.uint8), name="bytes").tolist() == [7 // size]
    assert bps.push_pull(torch.ones(0, 2), name="nothing").shape == (0, 2)
    found = bps.push_pull(torch.tensor(0.25 + 0.5 * rank), name="loss")
    assert found.dim() == 0 and found.item() == 0.25 * size


def case_what_cannot_be_sent(rank: int, size: int) -> None:
    for call in (bps.push_pull, bps.byteps_push_pull, ops.push_pull_async, ops.push_pull_inplace):
        with pytest.raises(AssertionError, match="you must specify a name by name="):
            call(torch.ones(1))
        with pytest.raises(ValueError, match=r"Tensor type torch.BoolTensor is not supported\."):
            call(torch.ones(1, dtype=torch.bool), name="x")
        with pytest.raises(ValueError, match=r"Tensor is required to be contiguous\."):
            call(torch.ones(2, 3).t(), name="x")
        with pytest.raises(ValueError, match="push_pull takes a tensor"):
            call([1.0], name="x")
    bps.push_pull(torch.ones(1), name="x")  # a refused call has taken no turn


def case_unknown_compressors(rank: int, size: int) -> None:
    p = nn.Parameter(torch.zeros(1))
    calls = (
        lambda: bps.push_pull(torch.ones(1), name="x", compression="onebit"),
        lambda: bps.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression="onebit"),
        lambda: DistributedDataParallel(nn.Linear(1, 1), device_ids=[0], compression="onebit"),
        lambda: cross_barrier.CrossBarrier(nn.Linear(1, 1), torch.optim.SGD([p], lr=1.0), compression="onebit"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"compression has no compress and decompress.*onebit"):
            call()


def case_differentiable(rank: int, size: int) -> None:
    for average, expected in ((True, 1.0), (False, float(size))):
        x = torch.full((3,), rank + 1.0, requires_grad=True)
        bps.push_pull(x, average, name="a").sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((3,), expected))


def case_many_of_one_name_under_way(rank: int, size: int) -> None:
    """See [Note: one name, several operations] in turns.py. The first rank begins all of them before any other rank does."""
    if rank:
        bps.push_pull(torch.ones(1), name="begun")
    handles = [bps.byteps_push_pull(torch.full((2,), float(i + rank)), False, name="same") for i in range(3)]
    if rank == 0:
        bps.push_pull(torch.ones(1), name="begun")
    more = [bps.byteps_push_pull(torch.full((2,), float(i + rank)), False, name="same") for i in range(3, 9)]
    others = sum(range(size))
    assert [bps.synchronize(each)[0].item() for each in handles + more] == [i * size + others for i in range(9)]


def case_ranks_differ_and_go_on(rank: int, size: int) -> None:
    if size > 1:
        with pytest.raises(RuntimeError, match="shape") as raised:
            bps.push_pull(torch.ones(2 + rank), name="differs")
        assert isinstance(raised.value, HorovodInternalError)
    assert bps.push_pull(torch.ones(2), False, name="differs")[0] == size


def case_groups_are_counted(rank: int, size: int) -> None:
    assert ops.byteps_torch_set_num_grads(3) == 0
    found = [ops.push_pull_group_sync_inplace(torch.ones(1), False, name=f"g{i}") for i in range(7)]
    assert [count for _, count in found] == [1, 2, 3, 1, 2, 3, 1]
    assert all(bps.synchronize(handle).item() == size for handle, _ in found)
    with pytest.raises(ValueError, match="at least 1"):
        ops.byteps_torch_set_num_grads(0)


def _one(lr: float = 1.0, **options: object) -> tuple[nn.Parameter, object]:
    p = nn.Parameter(torch.zeros(1))
    return p, bps.DistributedOptimizer(torch.optim.SGD([p], lr=lr), named_parameters=[("p", p)], **options)


def _gradient(p: Tensor, value: float) -> None:
    (p * value).sum().backward()


def case_steps_accumulation_and_clipping(rank: int, size: int) -> None:
    mean, own = float(size), 1.0 + 2 * rank  # 1, 3, 5, ...: their mean is their number
    p, optimizer = _one()
    assert type(optimizer).__name__ == "SGD" and isinstance(optimizer, torch.optim.SGD)
    assert size == 1 or not p.grad.any(), "gradients are zeros from the start"
    assert optimizer._parameter_names == {hash(p): "p"} and optimizer.find_duplicates(["a", "b", "a"]) == {"a"}
    _gradient(p, own)
    optimizer.step()
    assert p.item() == -mean
    if size > 1:
        p, optimizer = _one(backward_passes_per_step=2)
        for _ in range(2):
            _gradient(p, own)
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            _gradient(p, own)
        optimizer.synchronize()  # what was sent comes to its end
    p, optimizer = _one(backward_passes_per_step=2)
    for _ in range(2):
        _gradient(p, own)
    optimizer.step()
    assert p.item() == -2 * mean
    p, optimizer = _one()
    _gradient(p, own)
    optimizer.synchronize()
    p.grad.mul_(0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert p.item() == -mean / 2
    optimizer.zero_grad()
    _gradient(p, own)
    optimizer.synchronize()
    optimizer.step()  # sends the mean again, in silence
    assert p.item() == -1.5 * mean


def case_gradients_are_zeroed_at_any_time(rank: int, size: int) -> None:
    for set_to_none in (False, True):
        p, optimizer = _one(backward_passes_per_step=2)
        _gradient(p, 5.0)
        optimizer.zero_grad(set_to_none=set_to_none)  # what was not sent is forgotten
        _gradient(p, 1.0 + 2 * rank)
        if size > 1:
            optimizer.zero_grad(set_to_none=set_to_none)  # what was sent is what the step uses
        optimizer.step()
        assert p.item() == -size, set_to_none
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            _gradient(p, 1.0)
        optimizer.step()
        assert p.item() == -size - 2, set_to_none


def case_groups_without_names(rank: int, size: int) -> None:
    a, b = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0))
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        (a.sum() * (1.0 + 2 * rank) + b.sum()).backward()
    optimizer.step()
    assert a[0].item() == -2 * size and b[0].item() == -4
    with pytest.raises(ValueError, match="duplicates: w"):
        bps.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), named_parameters=[("w", a), ("w", b)])


def case_order_of_declaration(rank: int, size: int) -> None:
    a, b = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    bps.suspend()
    assert (bps.rank(), bps.size(), bps.local_rank(), bps.local_size()) == (rank, size, rank, size)
    with pytest.raises(RuntimeError, match=r"BytePS has not been initialized; use bps.init\(\)\."):
        bps.push_pull(torch.ones(1), name="while suspended")
    declared.names.clear()
    declared.keys.clear()
    bps.init()
    bps.DistributedOptimizer(torch.optim.SGD([b, a], lr=1.0), named_parameters=[("b", b), ("a", a)])
    expected = [f"byteps.{name}" for name in ("Gradient.a", "Gradient.b", "Parameter.a", "Parameter.b")]
    assert list(declared.keys) == expected
    bps.suspend()
    assert not declared.keys and bps.declare("late") == 0
    bps.shutdown()
    bps.resume(1, 0, rank)
    assert list(declared.keys) == [*expected, "byteps.late"] and list(declared.keys.values()) == list(range(5))
    assert bps.push_pull(torch.ones(1), False, name="after").item() == size
    with pytest.raises(UsageError, match=r"suspend\(\) first"):
        bps.resume(1, 0, rank)
    bps.suspend()
    with pytest.raises(UsageError, match="DMLC_PS_ROOT_URI"):
        bps.resume(size + 1, 1, rank)
    with pytest.raises(UsageError, match=r"rank that bps\.rank"):
        bps.resume(1, 1, rank + 1)
    with pytest.raises(UsageError, match="at least 1 as num_workers"):
        bps.resume(0, 1, rank)
    for name in ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "BYTEPS_GLOBAL_RANK"):
        os.environ.pop(name, None)
    bps.init()


def case_speed(rank: int, size: int) -> None:
    basics = BytePSBasics("c_lib", "x")
    assert (basics.rank(), basics.size(), basics.local_rank()) == (rank, size, rank)
    bps.suspend()
    basics.init()
    assert basics.get_pushpull_speed() == (0, 0.0), "less than ten seconds have passed"
    bps.push_pull(torch.ones(500_000), name="two megabytes")
    session.speed.since_s -= 20
    before_ms = int(time.time() * 1e3)
    when_ms, speed = basics.get_pushpull_speed()
    assert before_ms <= when_ms <= time.time() * 1e3
    assert 2 / 60 < speed < 2.5 / 20 if size > 1 else speed >= 0
    assert basics.get_pushpull_speed() == (when_ms, speed)
    os.environ["BYTEPS_TELEMETRY_ON"] = "0"
    assert basics.get_pushpull_speed() == (0, 0.0)
    del os.environ["BYTEPS_TELEMETRY_ON"]


def case_parameters_arrive_by_name(rank: int, size: int) -> None:
    ones, zeros = torch.full((3,), 1.0 if rank == 0 else torch.nan), torch.full((2,), 0.0 if rank == 0 else 7.0)
    named = {"ones_weight": ones, "zeros_weight": zeros, "count": torch.tensor(3 if rank == 0 else 9)}
    if rank % 2:
        named = dict(reversed(named.items()))
    bps.broadcast_parameters(named, root_rank=0)
    assert torch.equal(ones, torch.ones(3)) and torch.equal(zeros, torch.zeros(2)) and named["count"].item() == 3
    plain = [torch.full((2,), float(i + 10 * rank)) for i in range(3)]
    bps.broadcast_parameters(plain, root_rank=size - 1, prefix="Other.")
    assert [each[0].item() for each in plain] == [i + 10.0 * (size - 1) for i in range(3)]
    with pytest.raises(ValueError, match=r"invalid params of type: .*generator"):
        bps.broadcast_parameters(nn.Linear(1, 1).named_parameters(), root_rank=0)


def case_optimizer_state_without_a_step(rank: int, size: int) -> None:
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.1}), (torch.optim.SGD, {})):
        p = nn.Parameter(torch.arange(20.0))
        optimizer = kind([p], lr=0.1 + rank, **options)
        if kind is not torch.optim.SGD:
            optimizer.param_groups[0]["betas"] = (0.5 + rank / 10, 0.9)
        bps.broadcast_optimizer_state(optimizer, root_rank=0)
        assert torch.equal(p, torch.arange(20.0)) and optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0].get("betas", (0.5, 0.9)) == (0.5, 0.9) and not optimizer.state
        if rank == 0:
            p.grad = torch.ones(20)
            optimizer.step()
            p.data.copy_(torch.arange(20.0))
        bps.broadcast_optimizer_state(optimizer, root_rank=0)
        if kind is not torch.optim.SGD:
            assert (
                optimizer.state[p]["step"] == 1
                and (optimizer.state[p]["exp_avg"] == optimizer.state[p]["exp_avg"][0]).all()
            )
    with pytest.raises(ValueError, match="LBFGS"):
        bps.broadcast_optimizer_state(torch.optim.LBFGS([p]), root_rank=0)


def case_objects(rank: int, size: int) -> None:
    mine = {"epoch": rank}
    found = bps.broadcast_object(mine, root_rank=size - 1, name="resume")
    assert found == {"epoch": size - 1} and (found is mine) == (rank == size - 1)
    assert bps.broadcast_object([rank] if rank == 0 else None) == [0]


class TwoWays(nn.Module):
    """Uses its second layer only if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self.norm(self.first(x))
        return self.second(x) if both else x


def case_data_parallel(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    net = TwoWays()
    with pytest.raises(AssertionError, match="exactly one device"):
        DistributedDataParallel(net)
    model = DistributedDataParallel(net, device_ids=[bps.local_rank()])
    assert model.device_ids == [rank] and model.broadcast_buffers and model.module is net
    assert set(model.state_dict()) == {f"module.{name}" for name in net.state_dict()}
    assert size == 1 or all(p.grad is not None and not p.grad.any() for p in model.parameters())
    inputs = [torch.randn(4, 2, generator=torch.Generator().manual_seed(each)) for each in range(size)]

    def gradients_of(each: int, twin: TwoWays, both: bool = True) -> list[Tensor]:
        loss = twin(inputs[each], both).pow(2).sum()
        names = [p for p in twin.parameters() if both or not any(p is q for q in twin.second.parameters())]
        return list(torch.autograd.grad(loss, names))

    twins = [copy.deepcopy(net).train() for _ in range(size)]
    means = [torch.stack(each).mean(0) for each in zip(*(gradients_of(i, twins[i]) for i in range(size)), strict=True)]
    model(inputs[rank]).pow(2).sum().backward()
    for p, mean in zip(net.parameters(), means, strict=True):
        torch.testing.assert_close(p.grad, mean)
    # A layer that is skipped, with gradients of None before.
    for p in net.parameters():
        p.grad = None
    model(inputs[rank], both=False).pow(2).sum().backward()
    model.synchronize()
    assert all(p.grad is not None and not p.grad.any() for p in net.second.parameters())
    assert net.first.weight.grad is not None and net.norm.weight.grad.any()
    # Twice on this rank, and once outside: the mean of the sums.
    for p in net.parameters():
        p.grad = None
    twins = [copy.deepcopy(net) for _ in range(size)]
    sums = [[torch.stack([g] * 3).sum(0) for g in gradients_of(i, twins[i])] for i in range(size)]
    with model.no_sync():
        for _ in range(2):
            model(inputs[rank]).pow(2).sum().backward()
    model(inputs[rank]).pow(2).sum().backward()
    for p, *each in zip(net.parameters(), *sums, strict=True):
        torch.testing.assert_close(p.grad, torch.stack(each).mean(0))
    # Buffers are those of rank 0 before each forward, also in evaluation.
    for mode, grad in ((True, True), (False, False), (False, False)):
        model.train(mode)
        net.norm.running_mean.fill_(10.0 + rank)
        seen: list[float] = []
        hook = net.norm.register_forward_pre_hook(lambda norm, _, seen=seen: seen.append(norm.running_mean[0].item()))
        with torch.set_grad_enabled(grad):
            out = model(inputs[rank])
        if grad:
            out.sum().backward()
        hook.remove()
        assert seen == [10.0]


def case_data_parallel_with_buffers_of_its_own(rank: int, size: int) -> None:
    net = TwoWays()
    net.norm.running_mean.fill_(10.0 + rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(net, device_ids=[rank], broadcast_buffers=False)
    assert net.norm.running_mean[0].item() == 10.0 and not model.broadcast_buffers
    net.norm.running_mean.fill_(10.0 + rank)
    model.eval()(torch.ones(4, 2))
    assert net.norm.running_mean[0].item() == 10.0 + rank


def case_data_parallel_compressed(rank: int, size: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    model = DistributedDataParallel(net, device_ids=[rank], compression=bps.Compression.fp16)
    model(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward()
    assert torch.equal(net.weight.grad, torch.full((2, 3), float(size)))


def _trained(kind: str, crossing: bool, rank: int, num_steps: int, told: int) -> list[Tensor]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    options = {"lr": 0.01, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01}
    plain = getattr(torch.optim, kind)(net.parameters(), **options)
    if crossing:
        optimizer = cross_barrier.CrossBarrier(net, plain, net.named_parameters(), num_steps=told)
    else:
        optimizer = bps.DistributedOptimizer(plain, net.named_parameters())
    cross_barrier.broadcast_parameters(net.state_dict(), root_rank=0)
    cross_barrier.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.Generator().manual_seed(rank)
    for step in range(num_steps):
        if not crossing or step % 2:
            optimizer.zero_grad()  # CrossBarrier zeroes gradients by itself
        net(torch.randn(6, 4, generator=data)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def case_cross_barrier(rank: int, size: int) -> None:
    for kind, (num_steps, told) in itertools.product(("SGD", "Adam", "RMSprop"), ((20, 20), (10, 20))):
        synchronous, crossing = (_trained(kind, each, rank, num_steps, told) for each in (False, True))
        for one, other in zip(synchronous, crossing, strict=True):
            assert torch.equal(one, other), kind
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="SGD, Adam or RMSprop"):
        cross_barrier.CrossBarrier(nn.Linear(1, 1), torch.optim.Adagrad([p]))


test_cases = as_tests(globals(), {"1": {}, **USUAL, "2 over gloo": GLOO}, system=bps)


def _by_another_name(rank: int, size: int) -> str:
    bps.init()
    try:
        with pytest.raises(RuntimeError) as raised:
            bps.push_pull(torch.ones(1), name=f"of_{rank}")
        return str(raised.value)
    finally:
        bps.shutdown()


@pytest.mark.slow
def test_names_that_differ_end_all_ranks_with_one_error() -> None:
    """The first that has waited as long as it may says whom it misses for which name, and the other rank says the same."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    for text in run_ranks(_by_another_name, 2, init=False, env=limits):
        assert "every rank must ask for the same names" in text, text
        assert any(f"missing: rank {1 - each} for allreduce.byteps.of_{each}" in text for each in (0, 1)), text
