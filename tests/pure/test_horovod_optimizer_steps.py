"""What programs do to gradients and parameters of a DistributedOptimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.compat.horovod.torch.mpi_ops import Adasum, Average, Sum
from guozhuang.compat.horovod.torch.optimizer import DistributedOptimizer

from .horovod_alone import (
    NAMES,
    MirrorChannel,
    assert_equal,
    beside,
    distributed,
    is_distributed,
    loss_of,
    net_of_three,
    sent,
    sgd,
    train,
)

# ---- synchronize and step ---------------------------------------------------------------------------------------------------


def test_a_step_that_synchronizes_again_warns_once(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    loss_of(net).backward()
    made.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made.step()
    assert [one.category for one in seen] == [UserWarning]
    assert "optimizer.step() called without optimizer.skip_synchronize() context" in str(seen[0].message)
    made.synchronize()
    made.zero_grad()  # gradients were infinite, say, and no step was made
    loss_of(net).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.step()


def test_a_gradient_changed_on_its_way_is_told_once(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    for _ in range(2):
        loss_of(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.001)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            made.step()
        made.zero_grad()
        assert len(seen) <= 1
        if seen:
            assert "was changed in place after backward()" in str(seen[0].message)
            assert seen[0].filename == __file__
    assert not seen


def test_gradients_of_a_closure_are_exchanged(channel: MirrorChannel) -> None:
    def program(net: nn.Module, optimizer: Any, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, step)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None

    beside(channel, program)
    assert len(channel.names) == 3 * len(NAMES) + len(NAMES) + 2  # the latter with two steps of one bucket


@pytest.mark.parametrize("skip", [True, False])
def test_a_closure_may_synchronize_itself(channel: MirrorChannel, skip: bool) -> None:
    """A sum would be twice what it is if it were exchanged twice, and is half done if it is not waited for."""
    ours, theirs = net_of_three(), net_of_three()
    made, plain = distributed(ours, op=Sum), sgd(theirs)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            made.zero_grad()
            loss = loss_of(ours, step)
            loss.backward()
            if step < 2:
                made.synchronize()
            return loss

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with made.skip_synchronize() if skip else nullcontext():
                made.step(closure)
        plain.zero_grad()
        (2 * loss_of(theirs, step)).backward()
        plain.step()
    assert len(channel.names) == 3 * len(NAMES) and not channel.under_way
    assert_equal(list(ours.parameters()), list(theirs.parameters()))


def test_what_a_program_does_to_gradients_after_synchronize_counts(channel: MirrorChannel) -> None:
    def program(net: Any, optimizer: Any, step: int) -> None:
        loss_of(net, step).backward()
        if is_distributed(optimizer):
            optimizer.synchronize()
        net.first.weight.grad = net.first.weight.grad * 2
        net.second.weight.grad = None
        with optimizer.skip_synchronize() if is_distributed(optimizer) else nullcontext():
            optimizer.step()
        optimizer.zero_grad()

    beside(channel, program)


def test_a_gradient_that_is_kept_stays_as_it_was(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    train(net, made, 1)
    kept = net.first.weight.grad
    assert kept is not None
    value = kept.clone()
    train(net, made, 2)
    assert torch.equal(kept, value)
    assert net.first.weight.grad is not kept


def test_what_shares_memory_with_a_gradient_that_is_gone_stays_as_it_was(channel: MirrorChannel) -> None:
    kept: dict[bool, list[Tensor]] = {True: [], False: []}

    def program(net: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        if step < 2:
            kept[is_distributed(optimizer)].append(net.second.weight.grad.detach())

    beside(channel, program, steps=4)
    assert_equal(kept[True], kept[False])


def test_a_gradient_may_be_given_other_memory(channel: MirrorChannel) -> None:
    def program(net: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=step in (2, 3))
        loss_of(net, step).backward()
        optimizer.step()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()

    beside(channel, program, steps=6)


def test_what_nobody_keeps_is_not_copied(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    train(net, made, 1)
    before = [id(p.grad) for p in net.parameters()]
    train(net, made, 2)
    assert [id(p.grad) for p in net.parameters()] == before


def test_a_graph_that_is_kept_can_be_gone_through_again(channel: MirrorChannel) -> None:
    def program(net: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    beside(channel, program, backward_passes_per_step=2)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_penalty_works_and_gradients_with_graphs_are_refused(channel: MirrorChannel) -> None:
    ours, theirs = net_of_three(), net_of_three()
    made, plain = distributed(ours), sgd(theirs)
    for net, optimizer in ((ours, made), (theirs, plain)):
        gradients = torch.autograd.grad(loss_of(net), list(net.parameters()), create_graph=True)
        assert not channel.names or optimizer is plain
        sum(gradient.square().sum() for gradient in gradients).backward()
        optimizer.step()
    assert_equal(list(ours.parameters()), list(theirs.parameters()))
    made.zero_grad()
    with pytest.raises(AssertionError, match="create_graph"):
        loss_of(ours).backward(create_graph=True)
    gc.collect()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_computed_again(channel: MirrorChannel, reentrant: bool) -> None:
    def program(net: Any, optimizer: Any, step: int) -> None:
        torch.manual_seed(step)
        optimizer.zero_grad()
        x = checkpoint(net.first, torch.randn(5, 4, requires_grad=True), use_reentrant=reentrant)
        net.last(checkpoint(net.second, x, use_reentrant=reentrant)).square().mean().backward()
        optimizer.step()

    beside(channel, program)


def test_copies_of_the_model_have_no_part_in_it(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    train(net, made, 1)
    channel.names.clear()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        loss_of(other).backward()
    assert not channel.names


# ---- parameters that change -------------------------------------------------------------------------------------------------


def test_parameters_added_later_are_exchanged(channel: MirrorChannel) -> None:
    ours, theirs = net_of_three(), net_of_three()
    made = DistributedOptimizer(torch.optim.SGD(ours.first.parameters(), lr=0.1))
    plain = torch.optim.SGD(theirs.first.parameters(), lr=0.1)
    train(ours, made, 1)
    train(theirs, plain, 1)
    made.add_param_group({"params": list(ours.last.parameters()), "lr": 0.01})
    plain.add_param_group({"params": list(theirs.last.parameters()), "lr": 0.01})
    channel.names.clear()
    assert_equal(train(ours, made, 2), train(theirs, plain, 2))
    assert len(set(channel.names)) == 4


def test_a_model_may_change_its_dtype(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net, sgd(net, momentum=0.0))
    train(net, made, 1)
    made.zero_grad()
    net.double()
    net(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    made.step()
    assert channel.last["allreduce.first.weight"].tensors[0].dtype == torch.float64


def test_parameters_may_differ_in_dtype_and_their_gradients_from_them(channel: MirrorChannel) -> None:
    ours, theirs = net_of_three(), net_of_three()
    for net in (ours, theirs):
        net.second.double()
        net.first.bias.data = net.first.bias.data.bfloat16()
        net.first.bias.grad_dtype = torch.float32
    made, plain = distributed(ours, sgd(ours, momentum=0.0)), sgd(theirs, momentum=0.0)
    for step in range(3):
        for net, optimizer in ((ours, made), (theirs, plain)):
            torch.manual_seed(step)
            optimizer.zero_grad()
            x = torch.tanh(net.first.weight @ torch.randn(4) + net.first.bias)
            net.last(net.second(x.double()).float()).square().mean().backward()
            optimizer.step()
    wires = {name.removeprefix("allreduce."): one.tensors[0].dtype for name, one in channel.last.items()}
    assert wires["second.bias"] == torch.float64 and wires["first.bias"] == torch.float32
    assert_equal(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("op", [Average, Adasum])
def test_a_parameter_may_change_its_shape_or_format(channel: MirrorChannel, op: int) -> None:
    def program(net: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        if step == 2:
            net.first.weight.data = net.first.weight.data.t().contiguous().t()
        if step == 3:
            net.first.weight.data = torch.cat([net.first.weight.data] * 2, 1)
        torch.manual_seed(step)
        net(torch.randn(5, net.first.weight.shape[1])).square().mean().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a result that does not fit its output is one
        beside(channel, program, steps=6, make=lambda net: sgd(net, momentum=0.0), op=op)
    assert channel.last["allreduce.first.weight"].tensors[0].numel() == 32


def test_a_shared_weight_is_sent_once(channel: MirrorChannel) -> None:
    net = net_of_three()
    net.second.weight = net.first.weight
    made = distributed(net)
    twin = net_of_three()
    twin.second.weight = twin.first.weight
    assert_equal(train(net, made), train(twin, sgd(twin)))
    assert sorted(sent(channel)[:5]) == ["first.bias", "first.weight", "last.bias", "last.weight", "second.bias"]
