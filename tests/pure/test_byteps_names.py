"""What scripts for BytePS import: names, arguments by place, refusals, and what is said of variables; in one process."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import guozhuang.compat.byteps.torch as bps
from guozhuang.compat import redirect
from guozhuang.compat.byteps.torch import compression, cross_barrier, ops, session
from guozhuang.compat.byteps.torch.parallel import DistributedDataParallel

SENT = "tensor, average=True, name=None, version=0, priority=0"
NONE = "compression=Compression.none"
ARGUMENTS = {
    (bps, "init"): "lazy=True",
    (bps, "shutdown"): "",
    (bps, "suspend"): "",
    (bps, "resume"): "num_workers, num_servers, global_rank, context=None",
    (bps, "push_pull"): f"{SENT}, {NONE}",
    (bps, "byteps_push_pull"): SENT,
    (ops, "push_pull_async"): SENT,
    (ops, "push_pull_async_inplace"): SENT,
    (ops, "push_pull_inplace"): SENT,
    (ops, "push_pull_group_sync_inplace"): SENT,
    (bps, "poll"): "handle",
    (bps, "synchronize"): "handle",
    (bps, "declare"): "name",
    (bps, "DistributedOptimizer"): f"optimizer, named_parameters=None, {NONE}, backward_passes_per_step=1",
    (bps, "broadcast_parameters"): "params, root_rank, prefix='Parameter.'",
    (bps, "broadcast_optimizer_state"): "optimizer, root_rank, prefix='Parameter.'",
    (bps, "broadcast_object"): "obj, root_rank=0, name=None",
    (cross_barrier, "CrossBarrier"): (
        f"model, optimizer, named_parameters=None, {NONE}, backward_passes_per_step=1, num_steps=1000000"
    ),
}


@pytest.mark.parametrize(("module", "name"), ARGUMENTS, ids=[name for _, name in ARGUMENTS])
def test_arguments_in_their_places(module: object, name: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    found = []
    for each in parameters:
        default = "Compression.none" if each.default is bps.Compression.none else repr(each.default)
        found.append(each.name if each.default is each.empty else f"{each.name}={default}")
    assert ", ".join(found) == ARGUMENTS[module, name]


def test_the_names() -> None:
    assert len(bps.__all__) == 18 and all(hasattr(bps, name) for name in bps.__all__)
    assert all(hasattr(cross_barrier, name) for name in cross_barrier.__all__)
    assert not hasattr(cross_barrier, "push_pull") and not hasattr(bps, "allreduce")
    parameters = list(inspect.signature(DistributedDataParallel).parameters)
    assert parameters == ["module", "device_ids", "broadcast_buffers", "compression"]
    assert compression.Compression.fp16 is compression.FP16Compressor is bps.Compression.fp16
    methods = (
        "synchronize skip_synchronize set_backward_passes_per_step step _push_pull_delay _requires_update _handles"
    )
    assert all(hasattr(bps._DistributedOptimizer, name) for name in methods.split())
    assert importlib.import_module("guozhuang.compat.byteps").__version__ == "0.2.5"


@pytest.mark.parametrize("part", ["tensorflow", "tensorflow.keras", "keras", "_keras", "mxnet", "misc"])
def test_other_frameworks_are_not_there(part: str) -> None:
    finder = redirect._Finder(redirect.SYSTEMS["byteps"])
    what = (
        rf"byteps.{part} is not there: Guozhuang stands in for BytePS, and has its PyTorch part only \(byteps.torch\)"
    )
    with pytest.raises(ModuleNotFoundError, match=what):
        finder.find_spec(f"byteps.{part}")
    assert finder.find_spec("byteps.torch.mxnet") is None and finder.find_spec("bytepsx.torch") is None


def test_before_init() -> None:
    for ask in (bps.size, bps.rank, bps.local_size, bps.local_rank):
        with pytest.raises(ValueError, match=r"^BytePS has not been initialized; use bps\.init\(\)\.$"):
            ask()
    for send in (bps.push_pull, bps.byteps_push_pull):
        with pytest.raises(RuntimeError, match="BytePS has not been initialized"):
            send(torch.ones(1), name="a")
    for call in (bps.broadcast_parameters, bps.broadcast_optimizer_state):
        with pytest.raises(ValueError, match="BytePS has not been initialized"):
            call({}, 0)
    assert bps.synchronize(10**9) is None
    bps.shutdown()  # does nothing


@pytest.mark.parametrize(("text", "found"), [("1", True), ("0", False), ("", False), (None, False), ("yes", None)])
def test_asynchronous_or_not(monkeypatch: pytest.MonkeyPatch, text: str | None, found: bool | None) -> None:
    monkeypatch.delenv("BYTEPS_ENABLE_ASYNC", raising=False)
    if text is not None:
        monkeypatch.setenv("BYTEPS_ENABLE_ASYNC", text)
    if found is None:
        with pytest.raises(ValueError, match="BYTEPS_ENABLE_ASYNC is 0 or 1"):
            session.is_asynchronous()
    else:
        assert session.is_asynchronous() is found


def test_pytorchs_profiler_takes_what_it_took_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.profiler.profile, "__init__", torch.autograd.profiler.profile.__init__)
    redirect.install("byteps")
    redirect.install("byteps")  # nothing happens twice
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autograd.profiler.profile(True, True) as found:
        torch.ones(3).sum()
    assert not found.use_device and any(event.key == "aten::sum" for event in found.key_averages())
    assert not torch.autograd.profiler.profile(enabled=False, use_cuda=False).enabled
    with pytest.raises(TypeError, match="several values for use_cuda"):
        torch.autograd.profiler.profile(True, True, use_cuda=True)
    with pytest.raises(TypeError):
        torch.autograd.profiler.profile(True, True, True, True)
