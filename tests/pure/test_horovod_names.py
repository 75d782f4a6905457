"""Horovod's names, arguments and small helpers, as far as they need no other rank."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import weakref

import pytest
import torch

import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.common import exceptions, process_sets, util
from guozhuang.compat.horovod.common.autotune import AutotuneSettings
from guozhuang.compat.horovod.common.basics import HorovodBasics, state
from guozhuang.compat.horovod.common.state import place_of
from guozhuang.compat.horovod.common.variables import HorovodVariables, read, set_log_level, settings_from
from guozhuang.compat.horovod.torch import compression, functions, mpi_ops
from guozhuang.compat.horovod.torch.handles import HandleTable
from guozhuang.errors import UsageError
from guozhuang.gradients.named import Handle, Kind, NegotiationError, Settings, Submission
from guozhuang.gradients.named.requests import NamedRequest

NONE = "Compression.none"
PROCESS_SET = "process_set=global_process_set"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
# Names, order and defaults of the arguments are part of the contract: scripts pass them by place.
ARGUMENTS = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "allreduce": f"tensor, average=None, name=None, compression={NONE}, op=None, {SCALES}, {PROCESS_SET}",
    "allreduce_": f"tensor, average=None, name=None, op=None, {SCALES}, {PROCESS_SET}",
    "allreduce_async": f"tensor, average=None, name=None, op=None, {SCALES}, {PROCESS_SET}",
    "allreduce_async_": f"tensor, average=None, name=None, op=None, {SCALES}, {PROCESS_SET}",
    "grouped_allreduce": f"tensors, average=None, name=None, compression={NONE}, op=None, {SCALES}, {PROCESS_SET}",
    "grouped_allreduce_": f"tensors, average=None, name=None, op=None, {SCALES}, {PROCESS_SET}",
    "grouped_allreduce_async": f"tensors, average=None, name=None, op=None, {SCALES}, {PROCESS_SET}",
    "grouped_allreduce_async_": f"tensors, average=None, name=None, op=None, {SCALES}, {PROCESS_SET}",
    "sparse_allreduce_async": f"tensor, name=None, op=Average, {PROCESS_SET}",
    "allgather": f"tensor, name=None, {PROCESS_SET}",
    "allgather_async": f"tensor, name=None, {PROCESS_SET}",
    "grouped_allgather": f"tensors, name=None, {PROCESS_SET}",
    "grouped_allgather_async": f"tensors, name=None, {PROCESS_SET}",
    "broadcast": f"tensor, root_rank, name=None, {PROCESS_SET}",
    "broadcast_": f"tensor, root_rank, name=None, {PROCESS_SET}",
    "broadcast_async": f"tensor, root_rank, name=None, {PROCESS_SET}",
    "broadcast_async_": f"tensor, root_rank, name=None, {PROCESS_SET}",
    "alltoall": f"tensor, splits=None, name=None, {PROCESS_SET}",
    "alltoall_async": f"tensor, splits=None, name=None, {PROCESS_SET}",
    "reducescatter": f"tensor, name=None, compression={NONE}, op=Average, {PROCESS_SET}, {SCALES}",
    "reducescatter_async": f"tensor, name=None, op=Average, {PROCESS_SET}, {SCALES}",
    "grouped_reducescatter": f"tensors, name=None, compression={NONE}, op=Average, {PROCESS_SET}, {SCALES}",
    "grouped_reducescatter_async": f"tensors, name=None, op=Average, {PROCESS_SET}, {SCALES}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": PROCESS_SET,
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {PROCESS_SET}",
    "allgather_object": f"obj, name=None, {PROCESS_SET}",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
}
ASKING = {
    *("size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"),
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
}


def shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    if parameter.name == "op" and default is not None:
        return f"op={('Average', 'Sum')[default]}"
    words = {id(hvd.global_process_set): "global_process_set", id(hvd.Compression.none): NONE}
    return f"{parameter.name}={words.get(id(default), repr(default))}"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str):
    found = getattr(hvd, name)
    assert ", ".join(map(shown, inspect.signature(found).parameters.values())) == ARGUMENTS[name]
    assert (found.__doc__ or "").strip()


def test_names():
    expected = ARGUMENTS.keys() | ASKING | {"Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression"}
    expected |= {"HorovodInternalError", "DistributedOptimizer", "global_process_set", "mpi_ops", "elastic"}
    assert set(hvd.__all__) == expected
    for name in expected:
        assert getattr(hvd, name) is not None
    for absent in ("alltoall_", "broadcast_object_fn", "is_homogeneous"):
        assert not hasattr(hvd, absent)
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
    assert all(type(op) is int for op in (hvd.Average, mpi_ops._basics.Product))


def test_the_same_things_at_their_own_paths():
    for name in ("allreduce", "synchronize", "Sum", "global_process_set", "HorovodInternalError", "ProcessSet"):
        assert getattr(mpi_ops, name) is getattr(hvd, name)
    assert isinstance(mpi_ops._basics, HorovodBasics)
    assert functions.broadcast_parameters is hvd.broadcast_parameters
    assert compression.Compression is hvd.Compression
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
    assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert mpi_ops.is_homogeneous == mpi_ops._basics.is_homogeneous
    assert state() is None


def test_exceptions():
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    assert exceptions.HostsUpdatedInterrupt().skip_sync is False
    error = exceptions.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0", "2.0")
    assert "1.0" in str(error) and "2.0" in str(error)


def test_compressors():
    none, half = hvd.Compression.none, hvd.Compression.fp16
    tensor, numbers = torch.tensor([1.5, -2.25], dtype=torch.float64), torch.tensor([1, 70000])
    assert none.compress(tensor)[0] is tensor and none.decompress(tensor, None) is tensor
    sent, ctx = half.compress(tensor)
    assert sent.dtype == torch.float16
    restored = half.decompress(sent, ctx)
    assert restored.dtype == torch.float64 and torch.equal(restored, tensor)
    sent, ctx = half.compress(numbers)
    assert sent is numbers and half.decompress(sent, ctx) is numbers


def test_process_sets_before_init():
    made = hvd.ProcessSet([3, 1, 2])
    assert (made.process_set_id, made.ranks, made.mpi_comm) == (None, [1, 2, 3], None)
    assert str(made) == "ProcessSet(process_set_id=None, ranks=[1, 2, 3], mpi_comm=None)"
    assert hvd.global_process_set.process_set_id == 0
    assert (made.size(), made.rank(), made.included()) == (None, None, None)


def test_splitting_lists():
    assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert util.split_list([1, 2], 2) == [[1], [2]]
    assert util.split_list([1], 3) == [[1], [], []]


def test_powers_of_two():
    assert [n for n in range(-1, 20) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]


def test_iterables_and_versions():
    assert util.is_iterable([1]) and util.is_iterable("text") and not util.is_iterable(5)
    assert util.is_version_greater_equal_than("2.13.0", "2.9.1")
    assert not util.is_version_greater_equal_than("1.4.0", "1.5.0")
    assert util.is_version_greater_equal_than("1.5.0+cpu", "1.5.0")
    with pytest.raises(ValueError):
        util.is_version_greater_equal_than(2.0, "1.5.0")
    for target in ("1.5", "1.5.0.0", "1.5.0+cpu", "v1.5.0"):
        with pytest.raises(ValueError, match=r"major\.minor\.patch"):
            util.is_version_greater_equal_than("2.0.0", target)


def test_extensions(capsys):
    assert util.extension_available("torch", verbose=True)
    assert "torch" in capsys.readouterr().out
    assert not util.extension_available("tensorflow")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    assert util.gpu_available("torch") == torch.cuda.is_available()
    assert not util.gpu_available("mxnet")


def test_what_is_built(capsys):
    assert util.gloo_built(verbose=True) and not util.mpi_built(verbose=True)
    assert capsys.readouterr().out.splitlines() == ["Gloo: True", "MPI: not there"]
    assert util.nccl_built() == hvd.nccl_built()
    assert not (util.ddl_built() or util.ccl_built())
    assert (util.cuda_built(), util.rocm_built()) == (hvd.cuda_built(), hvd.rocm_built())


@pytest.mark.parametrize(("version", "code"), [((2, 10, 3), 21003), ((2, 8, 4), 2804), ((2, 26, 2), 22602)])
def test_code_of_nccl(monkeypatch, version: tuple[int, ...], code: int):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert hvd.nccl_built() == util.nccl_built() == code
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert hvd.nccl_built() == 0


class Communicator:
    def Get_size(self) -> int:
        return 1

    def Get_group(self) -> list[int]:
        return [0]


def test_a_communicator_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    made = hvd.ProcessSet(Communicator())
    assert (made.ranks, made.process_set_id) == (None, None) and made.mpi_comm is not None
    with pytest.raises(UsageError, match="install mpi4py, or give a list of ranks"):
        process_sets.ranks_of(made.mpi_comm)


def test_objects_as_bytes():
    def inside(x: int) -> int:
        return x + 1

    assert functions.unpickled(functions.pickled(inside))(1) == 2
    assert functions.unpickled(functions.pickled({"a": [1, None]})) == {"a": [1, None]}
    with pytest.raises(UsageError, match=r"the object cannot be pickled.*send what it is made from"):
        functions.pickled(threading.Lock())


def test_a_cache_of_results():
    calls = []

    @util._cache
    def doubled(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [doubled(2), doubled(2), doubled(3)] == [4, 4, 6]
    assert calls == [2, 3]


def test_variables_for_a_while(monkeypatch):
    monkeypatch.setenv("GIVEN_BEFORE", "old")
    monkeypatch.delenv("NOT_GIVEN", raising=False)
    with pytest.raises(KeyError), util.env(GIVEN_BEFORE=None, NOT_GIVEN="new"):
        assert "GIVEN_BEFORE" not in os.environ and os.environ["NOT_GIVEN"] == "new"
        raise KeyError
    assert os.environ["GIVEN_BEFORE"] == "old" and "NOT_GIVEN" not in os.environ
    with pytest.raises(TypeError), util.env(GIVEN_BEFORE="new", NOT_GIVEN=2):
        raise AssertionError("a number is no text")
    assert os.environ["GIVEN_BEFORE"] == "old" and "NOT_GIVEN" not in os.environ


def test_settings_of_the_engine():
    assert settings_from(HorovodVariables()) == Settings()
    variables = read(
        {
            "HOROVOD_FUSION_THRESHOLD": "0",
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_CACHE_CAPACITY": "7",
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "3",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        }
    )
    assert settings_from(variables) == Settings(
        fusion_threshold_bytes=0,
        cycle_time_ms=2.5,
        cache_capacity=7,
        fuse_groups=False,
        stall_check=False,
        stall_warning_s=3.0,
        stall_stop_s=9.0,
    )


def test_settings_of_autotuning(monkeypatch):
    from guozhuang.compat.horovod.common import variables

    monkeypatch.setattr(variables, "check_available", lambda: None)
    variables = read(
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "log.csv",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
            "HOROVOD_CYCLE_TIME": "4",
            "HOROVOD_CACHE_CAPACITY": "0",
        }
    )
    fixed = frozenset({"cycle_time_ms", "use_cache"})
    assert settings_from(variables).autotune == AutotuneSettings("log.csv", 1, 2, 3, 0.5, fixed)
    assert settings_from(read({"HOROVOD_AUTOTUNE": "1"})).autotune == AutotuneSettings()


def test_log_level(capsys):
    log = logging.getLogger("guozhuang")
    before = log.level, list(log.handlers), log.propagate
    try:
        set_log_level(HorovodVariables())
        assert (log.level, log.handlers, log.propagate) == before
        for word, level in (("trace", logging.DEBUG), ("info", logging.INFO), ("fatal", logging.CRITICAL)):
            set_log_level(HorovodVariables(log_level=word))
            assert log.level == level
        # Somebody takes what it says, so no handler is added; with nobody to take it there is one, once.
        log.handlers[:], log.propagate = [taker := logging.NullHandler()], False
        set_log_level(HorovodVariables(log_level="info"))
        assert log.handlers == [taker]
        log.handlers[:] = []
        for _ in range(2):
            set_log_level(HorovodVariables(log_level="info"))
        assert [type(each) for each in log.handlers] == [logging.StreamHandler]
        log.info("a line")
        assert capsys.readouterr().err == "[INFO] a line\n"
    finally:
        log.setLevel(before[0])
        log.handlers[:], log.propagate = before[1:]


def test_average_of_old():
    for given, meant in ((None, hvd.Average), (hvd.Sum, hvd.Sum), (hvd.Max, hvd.Max)):
        assert mpi_ops.handle_average_backwards_compatibility(given, None) == meant
    with pytest.warns(DeprecationWarning, match=r"op=hvd\.Average"):
        assert mpi_ops.handle_average_backwards_compatibility(None, False) == hvd.Sum
    with pytest.raises(ValueError):
        mpi_ops.handle_average_backwards_compatibility(hvd.Sum, False)


def test_places():
    """Node 0 has ranks 0, 1 and 4, node 2 rank 2, node 5 ranks 3 and 5."""
    told = [(0, 0), (0, 1), (2, 0), (5, 0), (0, 2), (5, 1)]
    assert [place_of(rank, told)[:4] for rank in range(6)] == [
        (0, 3, 0, 3),
        (1, 3, 0, 2),
        (0, 1, 1, 3),
        (0, 2, 2, 3),
        (2, 3, 0, 1),
        (1, 2, 1, 2),
    ]
    assert not place_of(0, told).is_homogeneous
    assert place_of(3, [(0, 0), (0, 1), (1, 0), (1, 1)]) == (1, 2, 1, 2, True)
    assert place_of(0, [(7, 3)]) == (0, 1, 0, 1, True)


def test_places_where_the_launcher_counts_otherwise():
    """Ranks 1 and 2 are on node 0, the other way round: local and cross rank speak of the same order."""
    told = [(1, 0), (0, 1), (0, 0)]
    assert [place_of(rank, told)[:4] for rank in range(3)] == [(0, 1, 1, 2), (1, 2, 0, 1), (0, 2, 0, 2)]
    # Some processes of two nodes, with gaps.
    assert [place_of(rank, [(0, 3), (0, 1), (4, 2)])[:4] for rank in range(3)] == [
        (1, 2, 0, 1),
        (0, 2, 0, 2),
        (0, 1, 1, 2),
    ]


def ended_handle(outputs: list[torch.Tensor] | None) -> Handle:
    submission = Submission(Kind.ALLREDUCE, "x", tuple(outputs or ()))
    handle = Handle(submission, NamedRequest(Kind.ALLREDUCE), lambda _: None)
    handle.outputs = outputs or ()
    handle.end(NegotiationError("the world was left") if outputs is None else None)
    return handle


def test_numbers_of_handles_after_the_world_was_left():
    """What nobody has waited for yet can be asked for later; the oldest ones are forgotten, and numbers never come again."""
    table = HandleTable()
    given = torch.ones(1)
    well = [table.add(ended_handle([given]), lambda outputs, _: outputs[0]) for _ in range(1001)]
    kept = weakref.ref(big := torch.ones(3))
    failed = table.add(ended_handle(None), lambda _, __, tensor=big: tensor)
    del big
    table.left()
    assert kept() is None
    assert [table.wait(number) is given for number in well] == [False] * 2 + [True] * 999
    assert table.done(failed)
    with pytest.raises(hvd.HorovodInternalError, match="was left"):
        table.wait(failed)
    assert table.wait(failed) is None
    assert table.add(ended_handle([]), lambda *_: None) == failed + 1
