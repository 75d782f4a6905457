"""What a DistributedOptimizer is, and what it sends when."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guozhuang.compat.horovod.common.autotune import AutotuneSettings
from guozhuang.compat.horovod.common.process_sets import ProcessSet
from guozhuang.compat.horovod.torch.compression import Compression, Compressor
from guozhuang.compat.horovod.torch.mpi_ops import Adasum, Average, Max, Sum
from guozhuang.gradients.named import Kind, Reduction, Settings

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

# ---- what it is ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Average, Adasum])
def test_it_is_an_optimizer_of_the_same_class_with_the_same_state(channel: MirrorChannel, op: int) -> None:
    net = net_of_three()
    plain = sgd(net)
    train(net, plain, 1)
    made = distributed(net, plain, op=op)
    assert isinstance(made, torch.optim.SGD) and type(made).__name__ == "SGD"
    assert made.param_groups is plain.param_groups and made.state is plain.state
    assert made.defaults == plain.defaults
    assert set(made._parameter_names.values()) == set(NAMES)
    assert made.op == op and made.process_set.process_set_id == 0
    assert made.backward_passes_per_step == 1 and set(made._allreduce_delay.values()) == {1}
    assert made._handles == {}


def test_it_cannot_be_wrapped_twice_and_copies_are_plain(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    train(net, made, 1)
    with pytest.raises(ValueError, match="distributed already"):
        distributed(net, made)
    for plain in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(plain) is torch.optim.SGD
        assert plain.state_dict()["param_groups"] == made.state_dict()["param_groups"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": Sum}, ValueError, "op != Average"),
        ({"gradient_predivide_factor": 0.0}, ValueError, "must be > 0"),
        ({"op": 6}, ValueError, "no way to combine"),
        ({"op": Max}, ValueError, "use hvd.Average, Sum or Adasum"),
        ({"compression": "fp16"}, ValueError, "no compress and decompress"),
        ({"optimizer": net_of_three()}, ValueError, "wraps an optimizer"),
        ({"groups": -1}, ValueError, "positive integer or a list"),
    ],
)
def test_what_cannot_be_is_refused(
    channel: MirrorChannel, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        distributed(net_of_three(), **options)


def test_adasum_is_among_all_ranks_and_by_parameter(channel: MirrorChannel) -> None:
    some = ProcessSet([0])
    with pytest.raises(NotImplementedError, match="global one"):
        distributed(net_of_three(), op=Adasum, process_set=some)
    net = net_of_three()
    with pytest.raises(ValueError, match="LBFGS cannot step on one parameter"):
        distributed(net, torch.optim.LBFGS(net.parameters()), op=Adasum)
    with pytest.warns(UserWarning, match="groups are not used with op=Adasum"):
        distributed(net_of_three(), op=Adasum, groups=2)


def test_before_init_there_is_no_optimizer() -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        distributed(net_of_three())


# ---- what is sent, and when -----------------------------------------------------------------------------------------------


def test_each_gradient_is_sent_once_while_backward_runs(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    loss_of(net).backward()
    assert sorted(sent(channel)) == sorted(NAMES)
    assert set(made._handles) == set(net.parameters())
    made.step()
    assert not sent(channel) and made._handles == {}


def test_the_engine_is_told_when_the_last_gradient_has_come(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    for step in range(2):
        loss_of(net, step, False).backward()
        assert not channel.hurried
        made.step()
        made.zero_grad()
        loss_of(net, step).backward()
        assert channel.hurried == [channel.names[-1]]
        made.step()
        made.zero_grad()
        channel.hurried.clear()


def test_sparse_gradients_take_no_flat_memory(channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse: list[Tensor] = []

    def gather(tensor: Tensor, *_: Any) -> Any:
        sparse.append(tensor)
        return lambda: tensor

    monkeypatch.setattr("guozhuang.compat.horovod.torch.gradient_units.sparse_allreduce_async", gather)
    monkeypatch.setattr(channel, "allocate", None)
    table = torch.nn.Embedding(5, 3, sparse=True)
    made = distributed(table, torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert [(one.name, one.kind) for one in channel.last.values()] == [
        ("allreduce.weight", Kind.BARRIER)
    ] and not sparse
    made.step()  # now all know
    made.zero_grad()
    made.synchronize()  # no gradient this time: no rows
    made.zero_grad()
    table.weight.square().sum().backward()  # a dense one
    made.synchronize()
    assert [tensor._nnz() for tensor in sparse] == [3, 0, 5] and len(channel.names) == 1
    assert table.weight.grad is not None and table.weight.grad.is_sparse


def test_what_has_no_gradient_is_sent_as_zeros_when_the_step_comes(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    loss_of(net, 0, False).backward()
    assert sorted(sent(channel)) == ["first.bias", "first.weight", "last.bias", "last.weight"]
    made.step()
    assert sorted(sent(channel)) == ["second.bias", "second.weight"]
    assert torch.equal(net.second.weight.grad, torch.zeros(4, 4))


def test_gradients_lie_in_one_flat_tensor_in_reverse_and_are_divided_in_the_copy(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    loss_of(net).backward()
    wires = [channel.last[f"allreduce.{name}"] for name in reversed(NAMES)]
    offset = 0
    for one in wires:
        (wire,) = one.tensors
        assert one.outputs is not None and one.outputs[0] is wire
        assert (one.reduction, one.prescale, one.postscale) == (Reduction.SUM, 1.0, 1.0)
        assert wire.storage_offset() == offset
        offset += wire.numel()
    assert len({one.tensors[0].untyped_storage().data_ptr() for one in wires}) == 1
    local = torch.autograd.grad(loss_of(net), net.last.weight)[0]
    torch.testing.assert_close(wires[1].tensors[0], local / 2)
    made.step()
    assert net.last.weight.grad.data_ptr() == wires[1].tensors[0].data_ptr()


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_ranks_that_have_the_same_parameters_send_whole_buckets_from_the_second_step_on(
    channel: MirrorChannel, compression: Any
) -> None:
    channel.agrees = True
    ours, theirs = net_of_three(), net_of_three()
    made = distributed(ours, compression=compression)
    train(ours, made, 1)
    assert sorted(sent(channel)) == sorted(NAMES)
    for step in range(1, 4):
        made.zero_grad()
        loss_of(ours, step).backward()
        assert channel.hurried[-1] == "allreduce.last.bias and 5 more"
        assert set(made._handles) == set(ours.parameters())
        made.step()
        assert sent(channel) == ["last.bias and 5 more"]
    trained = [p.detach() for p in ours.parameters()]
    assert_equal(
        trained, train(theirs, sgd(theirs)), **({} if compression is Compression.none else {"rtol": 2e-3, "atol": 2e-3})
    )
    ours.first.double()  # another layout, on which the ranks have to agree again
    made.zero_grad()
    ours.last(ours.first(torch.randn(3, 4, dtype=torch.float64)).float()).sum().backward()
    made.step()
    assert sorted(sent(channel)) == sorted(NAMES)


@pytest.mark.parametrize(
    ("settings", "second"),
    [
        (Settings(fusion_threshold_bytes=0), NAMES),
        (Settings(autotune=AutotuneSettings()), NAMES),
        (Settings(fusion_threshold_bytes=100), ["first.weight", "last.bias and 2 more", "second.weight and 1 more"]),
    ],
)
def test_the_threshold_bounds_buckets_and_a_tuner_sees_each_gradient(
    channel: MirrorChannel, settings: Settings, second: list[str]
) -> None:
    channel.agrees, channel.settings = True, settings
    net = net_of_three()
    made = distributed(net)
    train(net, made, 1)
    channel.names.clear()
    train(net, made, 1)
    assert sorted(sent(channel)) == sorted(second)


def test_a_sparse_gradient_splits_the_bucket_it_is_in(channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "guozhuang.compat.horovod.torch.gradient_units.sparse_allreduce_async", lambda rows, *_: lambda: rows
    )
    channel.agrees = True
    nets = [nn.ModuleList([nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)]) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    made = distributed(nets[0], torch.optim.SGD(nets[0].parameters(), lr=0.1))
    optimizers = [made, torch.optim.SGD(nets[1].parameters(), lr=0.1)]
    single = ["0.weight", "1.bias", "1.weight"]
    # In step 2 a barrier under the bucket's name says so; then each is sent by itself, but for the rows.
    expected = [single, ["1.bias and 2 more"], [*single[:2], "1.bias and 2 more", single[2]], ["1.bias and 1 more"]]
    for step in range(4):
        for (table, layer), optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            layer(table(torch.tensor([1, 4])) if step >= 2 else table.weight[:2] * 1.0).square().sum().backward()
            optimizer.step()
        assert sorted(sent(channel)) == expected[step]
    assert_equal(list(nets[0].parameters()), list(nets[1].parameters()))


def test_gradients_of_several_backwards_are_added_up_here(channel: MirrorChannel) -> None:
    def program(net: nn.Module, optimizer: Any, step: int) -> None:
        for part in range(2):
            loss_of(net, 2 * step + part).backward()
            if is_distributed(optimizer):
                assert bool(sent(channel)) == (part == 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)

    beside(channel, program, backward_passes_per_step=2)


@pytest.mark.filterwarnings("ignore:the gradient of")  # the second backward did add to it
def test_a_backward_too_many_is_refused_and_more_can_be_allowed(channel: MirrorChannel) -> None:
    net = net_of_three()
    made = distributed(net)
    loss_of(net).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(net).backward()
    made.step()
    made.set_backward_passes_per_step(2)
    assert set(made._allreduce_delay.values()) == {2}
    loss_of(net).backward()
    assert set(made._allreduce_delay.values()) == {1}
    loss_of(net).backward()
    made.step()
    with pytest.raises(ValueError, match="> 0"):
        made.set_backward_passes_per_step(0)


def test_a_step_may_come_before_the_last_backward(channel: MirrorChannel) -> None:
    net, twin = net_of_three(), net_of_three()
    made = distributed(net, backward_passes_per_step=3)
    loss_of(net).backward()
    assert set(made._handles.values()) == {(None, None)}
    made.step()
    assert_equal(list(net.parameters()), train(twin, sgd(twin), 1))


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_works_between_steps_only(channel: MirrorChannel, to_none: bool) -> None:
    def program(net: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(net, step).backward()
        if is_distributed(optimizer):
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
        optimizer.step()

    beside(channel, program)


# ---- groups, factors, compression -------------------------------------------------------------------------------------------


def test_groups_are_sent_when_their_last_gradient_comes(
    channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guozhuang.compat.horovod.torch.optimizer.broadcast_object", lambda told, **_: told)
    ours, theirs = net_of_three(), net_of_three()
    made = distributed(ours, groups=2)
    loss_of(ours).backward()
    assert channel.names == ["grouped_allreduce.second.bias", "grouped_allreduce.first.weight"]
    assert len(channel.last["grouped_allreduce.first.weight"].tensors) == 3
    assert {len(key) for key in made._handles} == {3}
    made.step()
    assert_equal(list(ours.parameters()), train(theirs, sgd(theirs), 1))
    channel.names.clear()
    loss_of(ours, 1, False).backward()  # the first group is complete, the second is not
    assert channel.names == []
    made.step()
    assert len(channel.names) == 2


def test_chosen_groups_leave_others_alone(channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guozhuang.compat.horovod.torch.optimizer.broadcast_object", lambda told, **_: told)
    net = net_of_three()
    made = distributed(net, groups=[[net.last.weight, net.first.weight]])
    loss_of(net).backward()
    made.step()
    assert channel.names.count("grouped_allreduce.first.weight") == 1 and len(channel.names) == 5


def test_num_groups_is_the_older_word(channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guozhuang.compat.horovod.torch.optimizer.broadcast_object", lambda told, **_: told)
    net = net_of_three()
    with pytest.warns(DeprecationWarning, match="num_groups"):
        made = distributed(net, num_groups=3)
    loss_of(net).backward()
    made.step()
    assert len(channel.names) == 3


def test_sum_and_the_factor_of_a_mean(channel: MirrorChannel) -> None:
    net = net_of_three()
    local = torch.autograd.grad(loss_of(net), net.last.weight)[0]
    made = distributed(net, op=Sum)
    loss_of(net).backward()
    made.synchronize()
    torch.testing.assert_close(net.last.weight.grad, 2 * local)
    made.zero_grad()
    made = distributed(net, gradient_predivide_factor=4.0)
    loss_of(net).backward()
    torch.testing.assert_close(channel.last["allreduce.last.weight"].tensors[0], local / 4)
    made.synchronize()
    torch.testing.assert_close(net.last.weight.grad, local)


def test_half_precision_is_on_the_wire_only(channel: MirrorChannel) -> None:
    ours, theirs = net_of_three(), net_of_three()
    made = distributed(ours, compression=Compression.fp16)
    found = train(ours, made, 3)
    assert channel.last["allreduce.first.weight"].tensors[0].dtype == torch.float16
    assert ours.first.weight.grad is not None and ours.first.weight.grad.dtype == torch.float32
    assert_equal(found, train(theirs, sgd(theirs), 3), rtol=2e-3, atol=2e-3)
    assert torch.equal(ours.last.bias.grad, ours.last.bias.grad.half().float())
    made.zero_grad()
    loss_of(ours, 9, False).backward()
    made.step()
    assert torch.equal(ours.second.bias.grad, torch.zeros(4))


class _Doubled(Compressor):
    """A compressor of the user's own: float64 on the wire."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.double().t() if tensor.dim() == 2 else tensor.double(), tensor.dim()

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.float().t() if ctx == 2 else tensor.float()


def test_a_compressor_of_the_users_own_is_called(channel: MirrorChannel) -> None:
    ours, theirs = net_of_three(), net_of_three()
    ours.first.weight.data = ours.first.weight.data.t().contiguous().t()
    made = distributed(ours, compression=_Doubled, gradient_predivide_factor=2.0)
    assert_equal(train(ours, made), train(theirs, sgd(theirs)))
    assert channel.last["allreduce.first.weight"].tensors[0].dtype == torch.float64
    for parameter in ours.parameters():  # what fused optimizers take for granted
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
