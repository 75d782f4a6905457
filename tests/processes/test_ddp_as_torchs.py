"""Our wrapper beside PyTorch's own, row by row: each row runs with both classes, and what it returns must be equal.

A row is a function ``row_name(kind, rank)``, called with PyTorch's class and with ours in the same two processes. It returns
numbers, tensors, texts, or dictionaries and lists of them; ``error`` returns what a call raised.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from tests.processes.cases import as_tests, batch, grads, local_loss, mlp, normed

Kind = type[TorchDDP]
SINCE_2_15 = hasattr(TorchDDP, "finalize_backward")


class Branch(nn.Module):
    """The second layer is used only where ``both`` is true."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.relu(self.first(x))
        return self.second(x) if both else x


def error(call: Callable[[], object], *texts: str) -> list[bool]:
    """Whether the call raises a RuntimeError or a ValueError, and which of PyTorch's texts it holds."""
    try:
        call()
    except (RuntimeError, ValueError) as raised:
        return [isinstance(raised, RuntimeError), *(text in str(raised) for text in texts)]
    return []


def rank_independent(rank: int) -> Tensor:
    return batch(rank)[:, :6]


# ---- what the class is, and what it holds ---------------------------------------------------------------------------


def row_attributes(kind: Kind, rank: int) -> Any:
    ddp = kind(normed(), bucket_cap_mb_list=[1, 2])
    names = ("device", "device_ids", "output_device", "device_type", "dim", "is_multi_device_module", "broadcast_buffers",
             "forward_sync_buffers", "find_unused_parameters", "static_graph", "require_backward_grad_sync",
             "require_forward_param_sync", "gradient_as_bucket_view", "parameters_to_ignore", "mixed_precision", "training",
             "skip_all_reduce_unused_params", "batched_grad_copy", "bucket_bytes_cap", "bucket_bytes_cap_list",
             "bucket_bytes_cap_default", "broadcast_bucket_size", "_use_python_reducer", "_bucket_config",
             "_delay_all_reduce_all_params", "_ddp_sink_clone", "_distributed_rank")  # fmt: skip
    present = dir(TorchDDP(normed()))  # versions of PyTorch have not all of them
    found = {name: getattr(ddp, name) for name in names if name in present}
    assert ddp.process_group is dist.group.WORLD and isinstance(ddp, TorchDDP)
    shapes = [tuple(b.shape) for b in ddp.modules_buffers], list(ddp.named_module_buffers), len(ddp._module_parameters)
    return found, *shapes, kind(mlp()).bucket_bytes_cap, [n for n, _ in ddp.named_parameters()]


def case_no_attribute_is_missing(rank: int, world_size: int) -> None:
    theirs, ours = TorchDDP(normed(), static_graph=True), DistributedDataParallel(normed(), static_graph=True)
    for ddp in (theirs, ours):
        local_loss(ddp, rank).backward()
    own = {"_static_graph_delay_allreduce_enqueued"}  # a state of PyTorch's reducer
    assert {name for name in vars(theirs) if not hasattr(ours, name)} == own


def row_logging_data(kind: Kind, rank: int) -> Any:
    found = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"broadcast_buffers": False}):
        ddp = kind(normed(), **options)
        for step in range(5):
            local_loss(ddp, rank, step).backward()
        data = ddp._get_ddp_logging_data()
        assert type(ddp.logger._get_ddp_logging_data().ints_map["iteration"]) is int
        if options.get("find_unused_parameters"):  # PyTorch does not assign buckets anew then; here they are
            data = {key: value for key, value in data.items() if "rebuilt" not in key}
        found.append({key: None if "time" in key else value for key, value in data.items()})
    return found


def row_state_dict_and_torchs_checkpoints(kind: Kind, rank: int) -> Any:
    ddp = kind(normed(rank))
    other = kind(normed(7))
    other.load_state_dict(ddp.state_dict())
    with pytest.raises(RuntimeError, match=r"module\."):
        other.load_state_dict(normed().state_dict())
    return ddp.state_dict(), get_model_state_dict(ddp), other.eval()(batch(0))


def row_pickled(kind: Kind, rank: int) -> Any:
    ddp = kind(mlp(), find_unused_parameters=True)
    local_loss(ddp, rank).backward()
    ddp.zero_grad()
    other = pickle.loads(pickle.dumps(ddp))
    local_loss(other, rank, 1).backward()
    group = dist.new_group([0, 1])
    refused = error(
        lambda: pickle.dumps(kind(mlp(), process_group=group)), "DDP Pickling/Unpickling are only supported"
    )
    return grads(other), other.find_unused_parameters, other.require_backward_grad_sync, refused


def row_names_of_parameters(kind: Kind, rank: int) -> Any:
    bare = normed()
    bare[0].bias.requires_grad_(False)
    kind._set_params_and_buffers_to_ignore_for_model(bare, ["1.weight", "1.running_mean"])
    ddp = kind(bare)
    parameters, sparse = ddp._build_params_for_reducer()
    managed = [name for name, _ in kind._get_data_parallel_params(bare, named_params=True)]
    return ddp._build_debug_param_to_name_mapping(parameters), sparse, managed, list(ddp.named_module_buffers)


# ---- inherited private methods work or raise ------------------------------------------------------------------------

# Methods of PyTorch's class that ours inherits, and that work because they call only what ours has too.
INHERITED = {
    *("scatter", "to_kwargs", "gather", "no_sync", "join_device", "join_process_group"),
    *("require_manual_backward_finalization", "should_finalize_after_backward"),  # since torch 2.15
    *("_log_and_throw", "_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_get_parameters"),
    *("_check_default_group", "_get_active_ddp_module", "_clear_grad_buffer", "_lazy_init", "_find_common_rank"),
    *("_register_buffer_comm_hook", "_register_fused_optim", "_distributed_broadcast_coalesced", "_check_comm_hook"),
    *("_check_sync_bufs_post_fwd", "_check_sync_bufs_pre_fwd", "_passing_sync_batchnorm_handle", "_distributed_rank"),
    *("_get_data_parallel_params", "_set_params_and_buffers_to_ignore_for_model", "_get_ddp_logging_data"),
    *("_set_ddp_runtime_logging_sample_rate", "_set_ddp_sink_clone"),
}


def case_inherited_methods_work_or_raise(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(normed())
    refused = set()
    for name, method in vars(TorchDDP).items():
        if name.startswith("__") or name in ("_abc_impl", "_active_ddp_module"):
            continue
        ours = getattr(DistributedDataParallel, name)
        is_inherited = next(base for base in DistributedDataParallel.__mro__ if name in vars(base)) is TorchDDP
        assert is_inherited == (name in INHERITED), name
        if "own reducer" in (ours.__doc__ or "") and "UsageError" in ours.__doc__:
            refused.add(name)
            with pytest.raises(UsageError, match=name):
                getattr(ddp, name)()
        assert is_inherited or method is not ours, name
    assert "_ddp_init_helper" in refused and len(refused) == 13 + 2 * SINCE_2_15, refused
    if SINCE_2_15:
        assert not ddp.should_finalize_after_backward
        ddp.require_manual_backward_finalization = False
        with pytest.raises(UsageError, match=r"manual_backward_finalization.*Fix:"):
            ddp.require_manual_backward_finalization = True
    ddp._lazy_init()
    ddp._clear_grad_buffer()
    assert ddp._find_common_rank(rank, True) == world_size - 1
    assert len(list(ddp._get_parameters(ddp.module))) == len(list(ddp.parameters()))
    with pytest.raises(ValueError, match="broken"):
        ddp._log_and_throw(ValueError, "broken")
    assert ddp._get_ddp_logging_data()["has_error"] == 1
    local_loss(ddp, rank).backward()


# ---- steps ----------------------------------------------------------------------------------------------------------


def row_buffer_hooks(kind: Kind, rank: int) -> Any:
    found = []
    for place in _BufferCommHookLocation:
        for is_async in (False, True) if place is _BufferCommHookLocation.POST_FORWARD else (False,):
            ddp = kind(normed(rank))

            def hook(state: list[str], buffers: dict[str, Tensor], is_async: bool = is_async) -> Any:
                state += buffers
                works = [dist.all_reduce(b, async_op=True) for b in buffers.values()]
                if is_async:
                    return [work.get_future() for work in works]
                for work in works:
                    work.wait()
                return None

            names: list[str] = []
            ddp._register_buffer_comm_hook(names, hook, place)
            for step in range(2):
                local_loss(ddp, rank, step).backward()
            found.append((names, [b.clone() for b in ddp.module.buffers()]))
    ddp = kind(normed(rank))
    # Before the forward, for in torch 2.11 backward notices a broadcast after it.
    ddp._register_buffer_comm_hook(
        ddp,
        lambda own, buffers: own._default_broadcast_coalesced(list(buffers.values())),
        _BufferCommHookLocation.PRE_FORWARD,
    )
    local_loss(ddp, rank).backward()
    return found, [b.clone() for b in ddp.module.buffers()]


def case_optimizers_in_backward(rank: int, world_size: int) -> None:
    """PyTorch's own class needs an accelerator for it; it steps as an optimizer does after backward."""
    for has_hook in (False, True):  # in this order, for a hook of any model is found in a map of the whole process
        reference = TorchDDP(mlp())
        stepper = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
        models = []
        for before in (True, False):
            bare = mlp()
            ddp = None if before else DistributedDataParallel(bare)
            settings = {"lr": 0.1, "momentum": 0.9}
            _apply_optimizer_in_backward(torch.optim.SGD, bare.parameters(), settings, register_hook=has_hook)
            models.append(ddp or DistributedDataParallel(bare))
        for step in range(3):
            for model in models:
                local_loss(model, rank, step).backward()
                assert all(p.grad is None for p in model.parameters())
            local_loss(reference, rank, step).backward()
            stepper.step()
            stepper.zero_grad()
        for model in models:
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p, q, msg=name)
    late = DistributedDataParallel(mlp())
    local_loss(late, rank).backward()
    late.zero_grad()
    for step in range(2):  # after training began; then a second optimizer for the same parameters
        _apply_optimizer_in_backward(torch.optim.SGD, late.module.parameters(), {"lr": 0.1})
        local_loss(late, rank, step).backward()
    sums = torch.stack([p.detach().sum() for p in late.parameters()])
    other = sums.clone()
    dist.broadcast(other, 0)
    assert torch.equal(sums, other)


def row_bucket_caps(kind: Kind, rank: int) -> Any:
    found = []
    for options in ({"bucket_cap_mb_list": [0.0001, 1]}, {"bucket_cap_mb": 1}, {"gradient_as_bucket_view": True}):
        ddp = kind(mlp(), **options)
        for step in range(3):
            local_loss(ddp, rank, step).backward()
        found.append((grads(ddp), ddp._get_ddp_logging_data()["bucket_cap_bytes"]))
    return found


def row_unused_and_undefined(kind: Kind, rank: int) -> Any:
    """PyTorch waits for the map of used parameters only where this rank left one out."""
    found: list[Any] = []
    for options in ({}, {"skip_all_reduce_unused_params": True}):
        ddp = kind(Branch(), find_unused_parameters=True, **options)
        for step in range(4):
            ddp.zero_grad()
            ddp(rank_independent(rank), step % 2 == 0).sum().backward()
            found.append((grads(ddp), ddp.reducer._ddp_graph_static()))
            found.append(ddp.reducer._get_local_used_map() if step % 2 else None)
    ddp = kind(Branch(), find_unused_parameters=True)
    for _ in range(3):
        ddp(rank_independent(rank), rank == 0).sum().backward()
        found.append((grads(ddp), ddp.reducer._get_local_used_map() if rank else None))
    ddp = kind(Branch(), find_unused_parameters=True)
    torch._C._functions.UndefinedGrad()(ddp(rank_independent(rank), True).sum()).backward()
    return found, [p.grad is None for p in ddp.parameters()]


def row_outputs_changed_in_place(kind: Kind, rank: int) -> Any:
    found = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        ddp = kind(Branch(), **options)
        for _ in range(2):
            out = ddp(rank_independent(rank), True)
            out *= 2
            out.sum().backward()
        ddp._set_ddp_sink_clone(False)
        ddp(rank_independent(rank), True).sum().backward()
        found.append(grads(ddp))
    return found


def row_uneven_numbers_of_batches(kind: Kind, rank: int) -> Any:
    found = []
    for divide in (True, False):
        ddp = kind(normed())
        stepper = torch.optim.SGD(ddp.parameters(), 0.1)
        with ddp.join(divide_by_initial_world_size=divide):
            for step in range(2 + 2 * rank):
                stepper.zero_grad()
                local_loss(ddp, rank, step).backward()
                stepper.step()
                found.append(grads(ddp))
        found.append([p.detach().clone() for p in ddp.parameters()] + [b.clone() for b in ddp.buffers()])
        ddp.zero_grad()
        local_loss(ddp, rank).backward()
        found.append(grads(ddp))
        assert ddp._get_ddp_logging_data()["join_uneven_inputs"] == 1
    return found


def row_backward_by_a_trainers_word(kind: Kind, rank: int) -> Any:
    """As Lightning's manual optimization, and Accelerate's ``trigger_sync_in_backward``, synchronize a backward."""
    found = []
    for options in ({}, {"find_unused_parameters": True}):
        ddp = kind(mlp(), **options)
        for step in range(3):
            ddp.zero_grad()
            ddp.require_backward_grad_sync = False  # so that the forward does not
            loss = local_loss(ddp, rank, step)
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([loss])
            loss.backward()
            found.append(grads(ddp))
    ddp = kind(mlp())
    with ddp.no_sync():
        losses = [local_loss(ddp, rank, step) for step in range(2)]
    losses[0].backward()
    found.append(grads(ddp))
    ddp.reducer.prepare_for_backward([])
    losses[1].backward()
    return *found, grads(ddp)


def row_delayed_all_reduce_of_a_static_graph(kind: Kind, rank: int) -> Any:
    ddp = kind(mlp(), static_graph=True)
    for step in range(3):
        local_loss(ddp, rank, step).backward()
    return grads(ddp)


def row_the_active_wrapper(kind: Kind, rank: int) -> Any:
    seen: list[Any] = []
    bare = mlp()
    ddp = kind(bare)
    bare.register_forward_hook(lambda *_: seen.append(TorchDDP._get_active_ddp_module() is ddp))
    local_loss(ddp, rank).backward()
    return seen, TorchDDP._get_active_ddp_module()


def row_profile(kind: Kind, rank: int) -> Any:
    ddp = kind(mlp())
    for step in range(2):
        local_loss(ddp, rank, step).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            local_loss(ddp, rank, step).backward()
    names = [event.name for event in profile.events()]
    return {
        name: names.count(name) for name in ("DistributedDataParallel.forward", "gloo:all_reduce", "gloo:broadcast")
    }


# ---- what is refused, in PyTorch's words ----------------------------------------------------------------------------


def row_errors(kind: Kind, rank: int) -> Any:
    mesh = dist.init_device_mesh("cpu", (2,))
    square = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    frozen = mlp().requires_grad_(False)
    found = [
        error(lambda: kind(mlp(), process_group=dist.group.WORLD, device_mesh=mesh),
              "Cannot specify both process_group and device_mesh"),
        error(lambda: kind(mlp(), device_mesh=square), "Only 1D device mesh is supported, but got"),
        error(lambda: kind(mlp(), device_ids=[0, 1]), "device_ids can only be None or contain a single element"),
        error(lambda: kind(mlp(), device_ids=[0]), "device_ids and output_device arguments only work with"),
        error(lambda: kind(frozen), "DistributedDataParallel is not needed when a module doesn't have any parameter"),
        error(lambda: kind(nn.LazyLinear(3)), "Modules with uninitialized parameters can't be used with"),
        error(lambda: kind(mlp(), param_to_hook_all_reduce=frozen[0].weight), "need to be set at the same time"),
    ]  # fmt: skip
    ddp = kind(mlp())
    local_loss(ddp, rank).backward()
    local_loss(ddp, rank).backward()
    found.append(error(ddp._set_static_graph, "should be called before training loop starts"))
    found.append(["should be called before training" in ddp._get_ddp_logging_data()["error"]])
    found.append(
        error(lambda: ddp._set_ddp_runtime_logging_sample_rate(0), "sample rate should be equal or greater than 1")
    )
    return found


def row_an_unused_parameter(kind: Kind, rank: int) -> Any:
    ddp = kind(Branch())
    found = []
    ddp(rank_independent(rank), False).sum().backward()
    texts = (
        "Expected to have finished reduction in the prior iteration before starting a new one",
        "passing the keyword argument `find_unused_parameters=True`",
        "`forward` function outputs participate in calculating loss",
        "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL",
        f"Parameter indices which did not receive grad for rank {rank}: 1",
    )
    found.append(error(lambda: ddp(rank_independent(rank), False), *texts))
    data = ddp._get_ddp_logging_data()
    return found, data["has_error"], texts[0] in data["error"]


def row_a_static_graph_that_changes(kind: Kind, rank: int) -> Any:
    more, fewer = kind(Branch(), static_graph=True), kind(Branch(), static_graph=True)
    more(rank_independent(rank), False).sum().backward()
    out = more(rank_independent(rank), True)
    changed = "Your training graph has changed in this iteration"
    found = [error(out.sum().backward, changed), changed in more._get_ddp_logging_data()["error"]]
    for both in (True, False):
        fewer(rank_independent(rank), both).sum().backward()
    text = (
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
        "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to True.\n"
        f"Parameter indices which did not receive grad for rank {rank}: "
    )
    found.append(error(lambda: more(rank_independent(rank), True), text))  # it did not come to its end
    return *found, error(lambda: fewer(rank_independent(rank), True), text)


class BreaksOff(torch.autograd.Function):
    """Raises in backward where it was told so in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.raises:
            raise KeyError("broken off")
        return gradient, None


class Breaking(nn.Module):
    """Ends with ``BreaksOff``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, raises: bool = False) -> Any:
        return BreaksOff.apply(self.inner(x), raises)


def row_a_backward_that_raises_before_any_gradient(kind: Kind, rank: int) -> Any:
    found = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        ddp = kind(Breaking(), **options)
        for step in range(4):
            ddp.zero_grad()
            loss = ddp(torch.full((2, 3), rank + 1.0), step == 2).sum()
            with pytest.raises(KeyError) if step == 2 else contextlib.nullcontext():
                loss.backward()
        found.append(ddp.module.inner.weight.grad.clone())
    return found


def compare(row: Callable[[Kind, int], Any], rank: int, world_size: int) -> None:
    results = []
    for kind in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(row(kind, rank))
    same(*results, "the result")


def same(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), f"{where}: {ours!r}, {theirs!r}"
    if isinstance(ours, dict):
        assert set(ours) == set(theirs), f"{where}: {set(ours) ^ set(theirs)}"
        for key in ours:
            same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), f"{where}: {ours!r}, {theirs!r}"
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{where}[{i}]")
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}")
    else:
        assert ours == theirs, f"{where}: {ours!r}, {theirs!r}"


for _name, _row in list(globals().items()):
    if _name.startswith("row_"):
        globals()[f"case_{_name.removeprefix('row_')}"] = functools.partial(compare, _row)

test_on_two_ranks = as_tests(globals(), (2,))
