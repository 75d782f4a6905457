"""What a program does with the wrapper besides stepping: state, copies, options, groups, outputs of every shape, errors."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import gc
import io
import pickle
import types
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from guozhuang import DistributedDataParallel
from guozhuang.distributed.arguments import choose_devices
from guozhuang.errors import MismatchError
from guozhuang.gradients.forwards import tensors_with_graph
from guozhuang.groups.agreement import agree, store_of
from guozhuang.weights.equal_start import describe, sparse_names
from tests.processes.cases import (
    as_tests,
    assert_equal_across_ranks,
    assert_same_grads,
    batch,
    grads,
    local_loss,
    mean_loss,
    mlp,
    normed,
    twin_of,
)
from tests.ranks import RankError, run_ranks
from tests.waiting import EXPIRES_S, NEVER_S

SMALL_CAP_MB = 0.0001


def check_steps(ddp: nn.Module, twin: nn.Module, rank: int, world_size: int, steps: range, **tolerance: float) -> None:
    for step in steps:
        ddp.zero_grad()
        twin.zero_grad()
        local_loss(ddp, rank, step).backward()
        mean_loss(twin, world_size, step).backward()
        assert_same_grads(ddp, twin, **tolerance)


# ---- state, copies, life --------------------------------------------------------------------------------------------


def case_copies_in_the_middle_of_training_stay_synchronized(rank, world_size):
    def by_pickle(model):
        return pickle.loads(pickle.dumps(model))

    def by_torch_save(model):
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    for duplicate in (copy.deepcopy, by_pickle, by_torch_save, copy.copy):
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            bare = mlp()
            twin, ddp = twin_of(bare), DistributedDataParallel(bare, bucket_cap_mb=SMALL_CAP_MB, **options)
            check_steps(ddp, twin, rank, world_size, range(2))
            other = duplicate(ddp)
            check_steps(other, twin, rank, world_size, range(2, 5))
            check_steps(ddp, twin, rank, world_size, range(5, 7))
            assert_equal_across_ranks(other, lambda p: p.grad)


def case_nothing_keeps_a_wrapper_alive(rank, world_size):
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, "delayed"):
        bare = mlp()
        if options == "delayed":
            options = {
                "delay_all_reduce_named_params": [("4.weight", bare[4].weight)],
                "param_to_hook_all_reduce": bare[0].weight,
            }
        ddp = DistributedDataParallel(bare, **options)
        for step in range(3):
            local_loss(ddp, rank, step).backward()
        reducer, wrapper = weakref.ref(ddp.reducer), weakref.ref(ddp)
        del ddp
        gc.collect()
        assert wrapper() is None and reducer() is None, options
        bare.zero_grad()
        local_loss(bare, rank).backward()  # the bare module is local again
        expected = grads(bare)
        twin = mlp()
        local_loss(twin, rank).backward()
        assert_same_grads(expected, twin)
        del options
        module = weakref.ref(bare)
        del bare
        gc.collect()
        assert module() is None


def case_wrapped_again_after_the_first_wrapper_is_gone(rank, world_size):
    bare = mlp()
    for options in ({}, {"static_graph": True}, {"bucket_cap_mb": SMALL_CAP_MB}):
        ddp = DistributedDataParallel(bare, **options)
        check_steps(ddp, twin_of(bare), rank, world_size, range(3))
        del ddp
    assert all(not p._backward_hooks for p in bare.parameters())


# ---- options --------------------------------------------------------------------------------------------------------


def case_ignored_parameters_and_buffers(rank, world_size):
    found = []
    for kind in (DistributedDataParallel, TorchDDP):
        bare = normed(rank)
        kind._set_params_and_buffers_to_ignore_for_model(bare, ["0.weight", "1.running_mean"])
        ddp = kind(bare)
        local_loss(ddp, rank).backward()
        with torch.no_grad():
            ddp(batch(0, 5))
        found.append((grads(ddp), {n: b.clone() for n, b in bare.named_buffers()}, bare.state_dict()))
    assert_same_grads(found[0][0], found[1][0])
    for i in (1, 2):
        for name, value in found[0][i].items():
            torch.testing.assert_close(value, found[1][i][name])
    assert torch.equal(found[0][2]["0.weight"], normed(rank)[0].weight)


def case_delayed_all_reduce(rank, world_size):
    for some in (True, False):
        bare = mlp(seed=rank)
        names = ["2.weight", "2.bias"] if some else [n for n, _ in bare.named_parameters()]
        named = [(n, p) for n, p in bare.named_parameters() if n in names]
        trigger = bare[0].weight
        ddp = DistributedDataParallel(bare, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger)
        assert_equal_across_ranks(ddp)
        twin = twin_of(bare)
        check_steps(ddp, twin, rank, world_size, range(3))
        for model in (ddp, twin):
            model.zero_grad()
        with ddp.no_sync():
            local_loss(ddp, rank, 5).backward()
            outside = local_loss(ddp, rank, 6)
        outside.backward()  # its forward was inside
        local = twin_of(twin)
        local_loss(local, rank, 5).backward()
        local_loss(local, rank, 6).backward()
        assert_same_grads(ddp, local)
        local_loss(ddp, rank, 7).backward()
        for step in (5, 6, 7):
            mean_loss(twin, world_size, step).backward()
        assert_same_grads(ddp, twin)


def case_mixed_precision(rank, world_size):
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(normed(), mixed_precision=precision)
    reference = DistributedDataParallel(normed())
    seen = []
    ddp.module[0].register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    for step in range(3):
        for model in (ddp, reference):
            model.zero_grad()
        out = ddp(batch(rank, step))
        assert out.dtype == torch.bfloat16 and seen[-1] == (torch.bfloat16, torch.bfloat16)
        out.float().pow(2).mean().backward()
        local_loss(reference, rank, step).backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())
        assert_same_grads(ddp, reference, rtol=0.2, atol=0.01)
        assert_equal_across_ranks(ddp, lambda p: p.grad)
    assert all(b.dtype == torch.bfloat16 for b in ddp.module[1].buffers() if b.is_floating_point())
    torch.optim.AdamW(ddp.parameters()).step()


def delayed_peer_leaves(rank, world_size):
    bare = mlp()
    named = list(bare.named_parameters())
    ddp = DistributedDataParallel(bare, delay_all_reduce_named_params=named, param_to_hook_all_reduce=bare[0].weight)
    if rank == 0:
        local_loss(ddp, rank).backward()


def test_delayed_parameters_of_a_lost_rank():
    outcomes = run_ranks(delayed_peer_leaves, 2, collect_errors=True, group_timeout_s=NEVER_S)
    assert outcomes[0].type_name == "WorldError", outcomes[0]
    assert "the exchange of bucket 0 of 1" in outcomes[0].message and "Fix:" in outcomes[0].message


def case_mixed_precision_of_an_lstm(rank, world_size):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.lstm, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x.unsqueeze(1))[0][:, -1])

    ddp = DistributedDataParallel(Recurrent(), mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32))
    reference = DistributedDataParallel(Recurrent())
    for model in (ddp, reference):
        model(batch(rank)).float().pow(2).mean().backward()
    assert_same_grads(ddp, reference, rtol=0.2, atol=0.01)
    x = batch(rank)
    assert torch.equal(ddp.module(x), reference.module(x)), "the bare module still computes in the narrow dtype"
    torch.optim.SGD(ddp.parameters(), lr=1.0).step()
    assert not torch.equal(ddp.module(x), reference.module(x)), "the layer reads weights that no optimizer steps"


def case_device_mesh(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    ddp = DistributedDataParallel(mlp(), device_mesh=mesh)
    check_steps(ddp, twin_of(ddp.module), rank, world_size, range(3))
    assert ddp.device_mesh is mesh
    with pytest.raises(RuntimeError, match="device_mesh"):
        DistributedDataParallel(mlp(), device_mesh=mesh, process_group=dist.group.WORLD)
    square = dist.init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))
    with pytest.raises(RuntimeError, match="axis"):
        DistributedDataParallel(mlp(), device_mesh=square)
    ddp = DistributedDataParallel(mlp(), device_mesh=square["b"])
    check_steps(ddp, twin_of(ddp.module), rank, world_size, range(2))


def case_init_sync(rank, world_size):
    for kind in (DistributedDataParallel, TorchDDP):
        assert torch.equal(kind(normed(rank), init_sync=False).module[0].weight, normed(rank)[0].weight)
        assert torch.equal(kind(normed(rank)).module[0].weight, normed(0)[0].weight)


def case_buffers_are_sent_when_torch_sends_them(rank, world_size):
    def run(kind, **options):
        bare = normed()
        bare[1].running_mean.fill_(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            ddp = kind(bare, **options)
        found = [bare[1].running_mean.clone()]
        for step in range(2):
            local_loss(ddp, rank, step).backward()
            found.append(bare[1].running_mean.clone())
        with torch.no_grad():
            ddp(batch(rank, 3))  # still begins with a broadcast
            found.append(bare[1].running_mean.clone())
            bare[1].running_mean.fill_(rank)
            ddp(batch(rank, 4))  # does not
            found.append(bare[1].running_mean.clone())
        bare[1].running_mean = torch.full((8,), float(rank))  # another tensor in its place
        local_loss(ddp, rank, 5).backward()
        found.append(bare[1].running_mean.clone())
        local_loss(ddp, rank, 5).backward()
        found.append(bare[1].running_mean.clone())
        with ddp.no_sync():
            local_loss(ddp, rank, 6).backward()
        local_loss(ddp, rank, 7).backward()
        found.append(bare[1].running_mean.clone())
        return found

    for options in ({}, {"broadcast_buffers": False}, {"broadcast_buffers": True}, {"forward_sync_buffers": False},
                    {"forward_sync_buffers": True, "broadcast_buffers": False}):  # fmt: skip
        ours, theirs = run(DistributedDataParallel, **options), run(TorchDDP, **options)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(a, b, msg=lambda text, i=i, o=options: f"{o}, moment {i}: {text}")


def case_deprecated_arguments_warn(rank, world_size):
    for options in ({"broadcast_buffers": True}, {"check_reduction": True}):
        with pytest.warns(FutureWarning):
            DistributedDataParallel(mlp(), **options)


def case_bucket_sizes_and_batched_copies_change_no_result(rank, world_size):
    reference = DistributedDataParallel(mlp())
    models = [
        DistributedDataParallel(mlp(), **options)
        for options in (
            {"bucket_cap_mb": 1},
            {"bucket_cap_mb": SMALL_CAP_MB},
            {"bucket_cap_mb_list": [SMALL_CAP_MB, 1]},
            {"bucket_cap_mb_list": [SMALL_CAP_MB / 10]},
            {"batched_grad_copy": True},
            {"batched_grad_copy": True, "bucket_cap_mb": SMALL_CAP_MB},
            {"gradient_as_bucket_view": True},
            {"lazy_bucket_allocation": True},
        )
    ]
    for set_to_none in (True, False):
        for step in range(3):
            for model in (reference, *models):
                model.zero_grad(set_to_none=set_to_none)
                local_loss(model, rank, step).backward()
            for model in models:
                assert_same_grads(model, reference, rtol=0, atol=0)


def case_wrong_arguments(rank, world_size):
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb": -1}, {"bucket_cap_mb_list": [1, 0]},
                    {"device_ids": [0, 1]}, {"device_ids": [0]}, {"output_device": "cuda:0"},
                    {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}):  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            DistributedDataParallel(mlp(), **options)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        DistributedDataParallel(mlp().requires_grad_(False))
    with pytest.raises(RuntimeError, match="uninitialized"):
        DistributedDataParallel(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="same type of devices"):
        choose_devices([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))], None, None)
    assert choose_devices([nn.Parameter(torch.ones(1))], None, None) == (None, None)
    assert choose_devices([nn.Parameter(torch.ones(1))], [], None) == (None, None)


def case_builtin_communication_hooks(rank, world_size):
    for kind, tolerance in ((dist.BuiltinCommHookType.ALLREDUCE, 0.0), (dist.BuiltinCommHookType.FP16_COMPRESS, 1e-2)):
        bare = mlp()
        twin, ddp = twin_of(bare), DistributedDataParallel(bare, bucket_cap_mb=SMALL_CAP_MB)
        ddp._register_builtin_comm_hook(kind)
        check_steps(ddp, twin, rank, world_size, range(3), **({"rtol": tolerance, "atol": 1e-3} if tolerance else {}))
        with pytest.raises(RuntimeError, match="once"):
            ddp._register_builtin_comm_hook(kind)
    with pytest.raises(ValueError, match="FP16_COMPRESS"):
        DistributedDataParallel(mlp())._register_builtin_comm_hook("fp8")


def case_hooks_removed_and_backward_checked(rank, world_size):
    ddp, alone = DistributedDataParallel(mlp()), mlp()
    local_loss(ddp, rank).backward()
    ddp._check_reducer_finalized()
    ddp.zero_grad()
    ddp._remove_autograd_hooks()
    for model in (ddp, alone):
        for step in range(2):
            local_loss(model, rank, step).backward()
    assert_same_grads(ddp, alone)
    broken = DistributedDataParallel(mlp())

    def refuse(_: Tensor) -> None:
        raise KeyError("the user's own error")

    out = broken(batch(rank))
    next(iter(broken.module.parameters())).register_hook(refuse)
    with pytest.raises(KeyError):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="did not come to its end"):
        broken._check_reducer_finalized()


def case_agreements_leave_no_keys_behind(rank, world_size):
    group = dist.new_group()
    with pytest.raises(MismatchError):
        agree(group, "something", [str(rank)], 5.0, "do nothing")
    for _ in range(4):
        agree(group, "something", ["equal"], 5.0, "do nothing")
    dist.barrier()
    keys = [f"{turn}/{kind}/{who}" for turn in range(1, 6) for kind in ("digest", "text") for who in (rank, "all")]
    kept = [key for key in keys if store_of(group).check([f"guozhuang/agree/{key}"])]
    assert kept == [f"{turn}/digest/{who}" for turn in (4, 5) for who in (rank, "all")]
    dist.barrier()


# ---- forwards -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    loss: Tensor
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Tensor


class Custom:
    def __init__(self, loss: Tensor) -> None:
        self.inner = {"deep": [loss]}
        self.me = self  # a cycle


class Slots:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def _model_output(loss: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(loss=loss, logits=loss * 2)


SHAPES: dict[str, tuple[Any, Any]] = {
    "nested": (lambda t: {"a": [(t, None, 3)], "b": {"c": t * 2}}, lambda o: o["a"][0][0] + o["b"]["c"]),
    "tuple": (lambda t: (None, t), lambda o: o[1]),
    "named": (lambda t: Pair(t, {"x": t * 2}), lambda o: o.first + o.second["x"]),
    "dataclass": (lambda t: Record(t, [Record(t * 3)]), lambda o: o.rest[0].loss + o.loss),
    "frozen": (Frozen, lambda o: o.loss),
    "ordered": (lambda t: collections.OrderedDict(x=t), lambda o: o["x"]),
    "custom": (Custom, lambda o: o.inner["deep"][0]),
    "slots": (Slots, lambda o: o.loss),
    "closure": (lambda t: lambda: t, lambda o: o()),
    "transformers": (_model_output, lambda o: o.loss + o.logits),
    "a scalar": (lambda t: t.sum(), lambda o: o),
    "a view": (lambda t: t.view(-1)[1:3], lambda o: o),
    "also the input": (lambda t: (t, torch.ones(2)), lambda o: o[0]),
}


class Shaped(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.inner, self.shape = mlp(), shape

    def forward(self, x: Tensor) -> Any:
        return SHAPES[self.shape][0](self.inner(x))


def case_outputs_of_every_shape(rank, world_size):
    for shape, (_, tensor_of) in SHAPES.items():
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            bare = Shaped(shape)
            twin, ddp = twin_of(bare), DistributedDataParallel(bare, bucket_cap_mb=SMALL_CAP_MB, **options)
            for step in range(3):
                for model in (ddp, twin):
                    model.zero_grad()
                out = ddp(batch(rank, step))
                assert type(out) is type(bare(batch(rank, step)))
                tensor_of(out).pow(2).mean().backward()
                for r in range(world_size):
                    (tensor_of(twin(batch(r, step))).pow(2).mean() / world_size).backward()
                assert_same_grads(ddp, twin)


def case_the_loss_is_not_among_the_outputs(rank, world_size):
    """Kept on the module, as models with auxiliary losses do; forward returns None or something without a gradient."""

    class Keeps(nn.Module):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self.inner, self.result = mlp(), result

        def forward(self, x: Tensor) -> Any:
            self.loss = self.inner(x).pow(2).mean()
            return self.result

    for result in (None, 3.0, torch.ones(2)):
        bare = Keeps(result)
        twin, ddp = twin_of(bare.inner), DistributedDataParallel(bare)
        for step in range(3):
            for model in (ddp, twin):
                model.zero_grad()
            ddp(batch(rank, step))
            bare.loss.backward()
            mean_loss(twin, world_size, step).backward()
            assert_same_grads(bare.inner, twin)


def case_forward_without_gradients(rank, world_size):
    bare = normed()
    ddp = DistributedDataParallel(bare)
    for mode in (torch.no_grad, torch.inference_mode):
        local_loss(ddp, rank).backward()
        ddp.eval()
        with mode():
            everyone = ddp(batch(0))
            assert not everyone.requires_grad
            if rank == 0:
                for step in range(3):
                    ddp(batch(0, step))
        ddp.train()
        ddp.zero_grad()
        local_loss(ddp, rank, 7).backward()
        assert_equal_across_ranks(ddp, lambda p: p.grad)


def case_empty_and_scalar_parameters(rank, world_size):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0, 3))
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale + self.nothing.sum()

    for cap_mb in (1e-6, 25):
        ddp = DistributedDataParallel(Odd(), bucket_cap_mb=cap_mb)
        check_steps(ddp, twin_of(ddp.module), rank, world_size, range(3))


def as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend of ``torch.compile`` that compiles nothing; to look up "eager" torch would import all backends, for seconds."""
    return graph


def case_compiled(rank, world_size):
    for inside in (False, True):
        bare = mlp()
        twin = twin_of(bare)
        if inside:
            model: Any = DistributedDataParallel(torch.compile(bare, backend=as_it_is), bucket_cap_mb=SMALL_CAP_MB)
        else:
            model = torch.compile(DistributedDataParallel(bare, bucket_cap_mb=SMALL_CAP_MB), backend=as_it_is)
        for step in range(4):
            for each in (bare, twin):
                each.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            mean_loss(twin, world_size, step).backward()
            assert_same_grads(bare, twin)


test_on_two_ranks = as_tests(globals(), (2,))


# ---- other numbers of ranks -----------------------------------------------------------------------------------------


def in_a_subgroup(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(normed(rank), process_group=groups[rank // 2])
    twin = normed(rank // 2 * 2)
    assert torch.equal(ddp.module[0].weight, twin[0].weight)
    ddp = DistributedDataParallel(mlp(seed=rank), process_group=groups[rank // 2], bucket_cap_mb=SMALL_CAP_MB)
    twin = mlp(seed=rank // 2 * 2)
    first = rank // 2 * 2
    for step in range(3 if rank < 2 else 5):  # the groups do not wait for each other
        for each in (ddp, twin):
            each.zero_grad()
        local_loss(ddp, rank, step).backward()
        for r in (first, first + 1):
            (twin(batch(r, step)).pow(2).mean() / 2).backward()
        assert_same_grads(ddp, twin)
    return True


def compiled_steps(rank, world_size):
    counts: list[int] = []
    for kind in (TorchDDP, DistributedDataParallel):
        bare = Deep()
        twin, ddp, graphs = twin_of(bare), kind(bare, bucket_cap_mb=1), []

        def keep(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph

        forward = torch.compile(ddp, backend=keep)

        @torch.compile(backend=as_it_is)
        def whole_step(ddp: nn.Module = ddp) -> None:
            ddp.zero_grad()
            ddp(torch.full((2, 400), 1.0 + rank)).pow(2).mean().backward()

        for step in range(4):
            if step < 2:
                ddp.zero_grad()
                forward(torch.full((2, 400), 1.0 + rank)).pow(2).mean().backward()
            else:
                whole_step()
            twin.zero_grad()
            sum(twin(torch.full((2, 400), 1.0 + r)).pow(2).mean() for r in range(world_size)).div(world_size).backward()
            assert_same_grads(ddp, twin, rtol=1e-4, atol=1e-6)
        counts.append(len(graphs))
        torch._dynamo.reset()
    assert counts[0] == counts[1] > 1, counts


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.slow
def test_compiled_steps_on_shm_are_cut_at_the_buckets_as_with_torchs_class():
    run_ranks(compiled_steps, 2, backend="shm")


def test_subgroups():
    assert run_ranks(in_a_subgroup, 4) == [True] * 4


def alone(rank, world_size):
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"batched_grad_copy": True}):
        ddp = DistributedDataParallel(normed(), **options)
        twin = twin_of(ddp.module)
        for step in range(3):
            ddp.zero_grad()
            twin.zero_grad()
            local_loss(ddp, rank, step).backward()
            local_loss(twin, rank, step).backward()
            assert_same_grads(ddp, twin)
    ddp = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
    ddp(torch.tensor([1, 1, 4])).sum().backward()
    assert ddp.module.weight.grad.is_sparse and ddp.module.weight.grad.to_dense()[1, 0] == 2
    with ddp.join():
        ddp(torch.tensor([1, 1, 4])).sum().backward()
    return True


def test_a_world_of_one():
    assert run_ranks(alone, 1) == [True]


# ---- ranks that differ ----------------------------------------------------------------------------------------------


def differs(rank, world_size, kind):
    store, bare, options = store_of(dist.group.WORLD), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {}
    if kind == "layout":
        bare.append(nn.Conv2d(2, 3, 3))
    if rank == 1:
        if kind == "shape":
            bare[0] = nn.Linear(5, 3)
        elif kind == "dtype":
            bare[0].double()
        elif kind == "count":
            bare.append(nn.Linear(3, 3))
        elif kind == "name":
            bare = nn.Sequential(collections.OrderedDict(other=bare[0], norm=bare[1]))
        elif kind == "trained":
            bare[0].bias.requires_grad_(False)
        elif kind == "buffer":
            bare[1].register_buffer("extra", torch.zeros(2))
        elif kind == "layout":
            bare.to(memory_format=torch.channels_last)
        elif kind == "sparse":
            bare[0].sparse = True
        elif kind == "option":
            options = {"find_unused_parameters": True}
        elif kind == "cap":
            options = {"bucket_cap_mb": 3}
        elif kind == "absent":
            store.wait(["gave up/0", "gave up/2"], datetime.timedelta(seconds=NEVER_S))
            raise KeyError("the user's own error")
    if kind == "absent":
        store.set(f"guozhuang/agree/1/digest/{rank}", "will be another one")  # so that rank 1 alone is missing
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=EXPIRES_S), dist.group.WORLD)
    try:
        DistributedDataParallel(bare, **options)
    finally:
        store.set(f"gave up/{rank}", "")


@pytest.mark.parametrize(
    "kind", ["shape", "dtype", "count", "name", "trained", "layout", "sparse", "buffer", "option", "cap"]
)
def test_ranks_that_differ_all_raise(kind):
    outcomes = run_ranks(differs, 3, kind, collect_errors=True, group_timeout_s=NEVER_S)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, RankError) and outcome.type_name == "MismatchError", outcome
        assert f"[rank {rank}]" in outcome.message and "Fix:" in outcome.message
        lines = [line.split()[0] for line in outcome.message.splitlines() if line.strip()[:1].isdigit()]
        assert lines == ["0", "1", "2"], outcome.message


def test_a_rank_that_never_comes_is_named():
    outcomes = run_ranks(differs, 3, "absent", collect_errors=True)
    assert outcomes[1].type_name == "KeyError"
    for rank in (0, 2):
        assert outcomes[rank].type_name == "WorldError", outcomes[rank]
        assert "[1]" in outcomes[rank].message


def test_a_line_names_strides_only_where_they_matter():
    ordinary, turned = torch.ones(3, 2, 4, 4), torch.ones(3, 2, 4, 4).to(memory_format=torch.channels_last)
    thin = torch.ones(3, 1, 1, 1)
    named = [
        (str(i), nn.Parameter(t))
        for i, t in enumerate((ordinary, turned, thin, thin.as_strided((3, 1, 1, 1), (1, 9, 7, 5))))
    ]
    lines = [line.partition(" ")[2] for line in describe(named)]
    assert "strides" not in lines[0] and "strides (32, 1, 8, 2)" in lines[1]
    assert lines[2] == lines[3] == "(3, 1, 1, 1) float32 cpu trained"
    assert describe(named[:1], frozenset({"0"}))[0].endswith("trained, sparse gradient")


def test_a_device_without_an_index_is_that_of_the_parameters():
    parameters: Any = [types.SimpleNamespace(device=torch.device("cuda", 3))]
    assert choose_devices(parameters, [torch.device("cuda")], None) == ([3], 3)
    assert choose_devices(parameters, ["cuda"], "cuda") == ([3], 3)
    assert choose_devices(parameters, ["cuda:1"], None) == ([1], 1)
    assert choose_devices(parameters, [0], torch.device("cuda", 2)) == ([0], 2)


def test_a_shared_sparse_embedding_has_its_first_name():
    model = nn.ModuleDict({"out": nn.Linear(4, 7, bias=False), "words": nn.Embedding(7, 4, sparse=True)})
    model["out"].weight = model["words"].weight
    assert sparse_names(model) == {"out.weight"} == {name for name, _ in model.named_parameters()}


def test_outputs_may_be_deep_and_refer_to_anything():
    leaf = torch.ones(2, requires_grad=True)
    computed, hidden = leaf * 2, leaf * 3
    deep: Any = [computed]
    for _ in range(5000):
        deep = [deep, computed]

    def function() -> None: ...

    function.loss = hidden
    module = nn.Linear(2, 2)
    module.loss = hidden
    other = types.SimpleNamespace(deep=deep, module=module, torch=torch, function=function, kind=Custom, leaf=leaf)
    (found,) = tensors_with_graph(other)
    assert found is computed


def no_group(rank, world_size):
    DistributedDataParallel(mlp())


def test_without_a_process_group():
    (outcome,) = run_ranks(no_group, 1, init=False, collect_errors=True)
    assert outcome.type_name == "RuntimeError" and "guozhuang.init()" in outcome.message
