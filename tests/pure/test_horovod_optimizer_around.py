"""Schedulers, scalers, checkpoints, worlds and failures around a DistributedOptimizer; and the one of Adasum."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guozhuang.compat.horovod.common.process_sets import ProcessSet
from guozhuang.compat.horovod.common.state import SetMember, required
from guozhuang.compat.horovod.torch.compression import Compression
from guozhuang.compat.horovod.torch.mpi_ops import Adasum, Average, HorovodInternalError
from guozhuang.gradients.named import Reduction, Submission

from .horovod_alone import (
    NAMES,
    MirrorChannel,
    assert_equal,
    beside,
    distributed,
    is_distributed,
    loss_of,
    mirror_world,
    net_of_three,
    sent,
    sgd,
    train,
)

# ---- what stands around it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_first", [True, False])
def test_a_scheduler_works_whether_it_was_made_before_or_after(channel: MirrorChannel, made_first: bool) -> None:
    net, twin = net_of_three(), net_of_three()
    plain, other = sgd(net), sgd(twin)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5) if made_first else None
    made = distributed(net, plain)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
    theirs = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            for one, optimizer, schedule in ((net, made, scheduler), (twin, other, theirs)):
                optimizer.zero_grad()
                loss_of(one, step).backward()
                optimizer.step()
                schedule.step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert len(channel.names) == 3 * len(NAMES)
    assert_equal(list(net.parameters()), list(twin.parameters()))
    made.load_state_dict(made.state_dict())
    scheduler.step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


@pytest.mark.parametrize("op", [Average, Adasum])
def test_hooks_of_a_step_run_once_also_after_loading(channel: MirrorChannel, op: int) -> None:
    net = net_of_three()
    made = distributed(net, op=op)
    calls: list[str] = []
    made.register_step_pre_hook(lambda *_: calls.append("before"))
    made.register_step_post_hook(lambda *_: calls.append("after"))
    train(net, made, 1)
    made.load_state_dict(made.state_dict())
    train(net, made, 1)
    assert calls == ["before", "after"] * 2


def test_state_goes_to_a_checkpoint_and_back(channel: MirrorChannel) -> None:
    ours, theirs = net_of_three(), net_of_three()
    made, plain = distributed(ours), sgd(theirs)
    train(ours, made, 2)
    train(theirs, plain, 2)
    again = distributed(ours)
    again.load_state_dict(copy.deepcopy(made.state_dict()))
    del made
    gc.collect()
    assert_equal(train(ours, again, 2), train(theirs, plain, 2))


def test_loading_gives_up_what_is_under_way(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    state = copy.deepcopy(made.state_dict())
    loss_of(net).backward()
    made.load_state_dict(state)
    assert not channel.under_way and made._handles == {}
    made.zero_grad()
    loss_of(net).backward()
    made.step()


def test_a_scaler_of_gradients_steps_after_synchronize(channel: MirrorChannel) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def program(net: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        if not is_distributed(optimizer):
            loss_of(net, step).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            return
        scaler.scale(loss_of(net, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    beside(channel, program)


@pytest.mark.parametrize(("size", "elastic", "hooked"), [(1, False, False), (1, True, True), (3, False, True)])
def test_one_rank_sends_nothing_unless_others_may_come(
    monkeypatch: pytest.MonkeyPatch, size: int, elastic: bool, hooked: bool
) -> None:
    monkeypatch.setattr(
        "guozhuang.compat.horovod.common.elastic_variables.driver", lambda: object() if elastic else None
    )
    with mirror_world(size) as channel:
        ours, theirs = net_of_three(), net_of_three()
        made = distributed(ours, op=Adasum if size == 1 and not elastic else Average)
        assert_equal(train(ours, made), train(theirs, sgd(theirs)))
        assert bool(channel.names) == hooked


def test_a_rank_outside_of_the_process_set_steps_alone(channel: MirrorChannel) -> None:
    other = ProcessSet([1])
    with pytest.raises(ValueError, match="not registered"):
        distributed(net_of_three(), process_set=other)
    other.process_set_id = 7
    required().sets[7] = SetMember(MirrorChannel(1), (1,), [])  # type: ignore[arg-type]
    ours, theirs = net_of_three(), net_of_three()
    made = distributed(ours, process_set=other)
    assert_equal(train(ours, made), train(theirs, sgd(theirs)))
    made.synchronize()
    assert not channel.names


def test_after_a_failure_the_next_step_works(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    channel.broken = {"allreduce.second.weight"}
    loss_of(net).backward()
    with pytest.raises(HorovodInternalError, match=r"Mismatched data types.*second.weight"):
        made.step()
    assert not channel.under_way
    channel.broken = set()
    made.zero_grad()
    loss_of(net).backward()
    made.step()


def test_an_interrupt_waits_for_nothing(channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    net, twin = net_of_three(), net_of_three()
    made = distributed(net)
    loss_of(net).backward()
    waits: list[str] = []

    def interrupted(submission: Submission) -> list[Tensor]:
        waits.append(submission.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(channel, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.step()
    assert len(waits) == 1 and len(channel.under_way) == len(NAMES)
    made.step()  # who goes on nevertheless gets what was sent
    assert_equal(list(net.parameters()), train(twin, sgd(twin), 1))


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_an_exception_in_backward_leaves_a_step_that_can_be_made(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    handle = net.first.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net).backward()
    handle.remove()
    assert 0 < len(channel.names) < len(NAMES)
    made.step()  # as all ranks do: what did not come is sent as zeros
    assert sorted(sent(channel)) == sorted(NAMES)
    made.zero_grad()
    loss_of(net).backward()
    made.step()
    assert sorted(sent(channel)) == sorted(NAMES)


def test_an_optimizer_that_is_gone_sends_nothing(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    del made
    gc.collect()
    loss_of(net).backward()
    assert not channel.names


def test_in_a_new_world_gradients_lie_in_its_memory() -> None:
    net = net_of_three()
    with mirror_world():
        made = distributed(net)
        train(net, made, 1)
    with mirror_world(3) as second:
        twin = net_of_three()
        twin.load_state_dict(net.state_dict())
        plain = sgd(twin)
        plain.load_state_dict(copy.deepcopy(made.state_dict()))
        assert_equal(train(net, made, 2), train(twin, plain, 2))
        assert len(second.names) == 2 * len(NAMES)


# ---- adasum -----------------------------------------------------------------------------------------------------------------


def test_adasum_sends_steps_and_leaves_the_weights_until_the_end(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net, sgd(net, momentum=0.0), op=Adasum)
    before = net.first.weight.detach().clone()
    local = torch.autograd.grad(loss_of(net), net.first.weight)[0]
    loss_of(net).backward()
    assert torch.equal(net.first.weight, before)
    assert {one.reduction for one in channel.last.values()} == {Reduction.ADASUM}
    torch.testing.assert_close(channel.last["allreduce.first.weight"].tensors[0], -0.1 * local)
    with pytest.raises(AssertionError, match="zero_grad"):
        made.zero_grad()
    made.synchronize()
    with pytest.raises(AssertionError, match="not supported when using Adasum"), made.skip_synchronize():
        pass
    made.step()
    torch.testing.assert_close(net.first.weight.detach(), before - 0.1 * local)


def test_adasum_takes_compression_several_backwards_and_unused_parameters(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net, op=Adasum, compression=Compression.fp16, backward_passes_per_step=2)
    before = net.second.weight.detach().clone()
    for _ in range(2):
        loss_of(net, 0, False).backward()
    assert channel.last["allreduce.first.weight"].tensors[0].dtype == torch.float16
    made.step()
    assert torch.equal(net.second.weight, before)
    assert len(channel.names) == len(NAMES)
    made.zero_grad()
    loss_of(net, 0, False).backward()
    made.step()  # before the second backward
    assert len(channel.names) == 2 * len(NAMES)


def test_each_optimizer_counts_the_steps_in_which_it_looks_for_nan(channel: MirrorChannel) -> None:
    for num_steps in (2, 1):
        net = net_of_three()
        train(net, distributed(net), num_steps)
    assert [sorted(set(steps)) for steps in channel.watches] == [[0, 1], [0]]
