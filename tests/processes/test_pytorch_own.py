"""PyTorch's own tests of collectives and DDP, with our groups and our class in place: what stock passes on the CPU passes."""

from __future__ import annotations

import pytest

from tests.pytorch_own.run import PASSED, SKIPPED, run
from tests.waiting import LIMIT_S

# Why tests do not run, with gloo as with "shm".
NOT_FOR_GLOO_ON_CPUS = (
    *("needs a GPU", "Only Nccl", "Only NCCL", "NCCL Batch", "to be one of {'nccl'}", "Only MPI", "torchvision"),
    *("github.com/pytorch/pytorch/issues/", "github.com/pytorch/pytorch/pull/"),  # switched off by PyTorch
)
COLLECTIVES = (
    *("all_gather", "all_reduce", "test_reduce", "broadcast", "barrier", "test_gather", "scatter", "send", "recv"),
    *("group", "get_", "Backend"),
)


# Of the group over nodes; not the events of its sends, which are gloo's.
OVER_NODES = (
    *(
        "all_gather_group",
        "all_gather_coalesced_simple",
        "all_gather_object_default",
        "all_reduce_group",
        "all_reduce_sum",
    ),
    *(
        "all_reduce_coalesced_full",
        "test_reduce_group",
        "broadcast_group",
        "barrier_timeout",
        "monitored",
        "gather_checks",
    ),
    *("scatter_group", "batch_isend_irecv_gloo", "test_irecv"),
)
RUNS = {
    "shm": ("shm", "gloo", COLLECTIVES, 90),
    "all_to_all on shm": ("shm", "mpi", ("all_to_all",), 12),  # marked for another backend than gloo
    "hierarchical": ("hierarchical", "gloo", OVER_NODES, 22),
}


@pytest.mark.slow
@pytest.mark.timeout(10 * LIMIT_S)
@pytest.mark.parametrize("name", RUNS)
def test_what_gloo_passes_passes_on_our_groups(name: str) -> None:
    backend, like, patterns, num_passing = RUNS[name]
    found = run(backend, "torch", 4, patterns, like=like, timeout_s=9 * LIMIT_S)
    skipped = {name: text for name, text in found.items() if text.startswith(SKIPPED)}
    failed = {name: text for name, text in found.items() if text != PASSED and name not in skipped}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    unexpected = {name: why for name, why in skipped.items() if not any(part in why for part in NOT_FOR_GLOO_ON_CPUS)}
    assert not unexpected
    assert sum(text == PASSED for text in found.values()) >= num_passing


WRAPPER = (
    *("ddp", "DistributedDataParallel", "static_graph", "unused", "graph", "sync_bn", "data_parallel", "stateless"),
    *("undefined", "no_sync", "localSGD", "bucket", "model_across"),
)

# Tests of DDP that PyTorch's own class does not pass either, on two ranks on the CPU, with what it does there instead.
NOT_BY_STOCK = {
    "switched off by PyTorch": (
        *("test_DistributedDataParallel", "test_DistributedDataParallel_non_default_stream", "test_ddp_has_finalized"),
        *("test_compute_bucket_assignment_by_size_sparse_error_with_logger", "test_ddp_hook_pickling_powerSGD"),
        *("test_ddp_model_diff_shape_across_ranks", "test_ddp_profiling_autograd_profiler"),
        *("test_ddp_profiling_execution_trace", "test_ddp_sync_bn_training_vs_eval"),
    ),
    "it has no SyncBatchNorm on the CPU, and these tests make one in half precision or call one without DDP": (
        *(
            "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
            "test_DistributedDataParallel_SyncBatchNorm_half",
        ),
    ),
    "the test asks for the number of a GPU": ("test_ddp_device", "test_ddp_logging_data_gpu"),
    "its mixed precision needs events of an accelerator": tuple(
        f"test_ddp_native_mixed_precision_{view}_{zero}"
        for view in ("grad_as_bucket_view", "no_grad_as_bucket_view")
        for zero in ("no_set_grad_none", "set_grad_to_none")
    ),
}
# Tests that look at what only PyTorch's reducer does.
NOT_OURS = {
    "test_ddp_native_mixed_precision_ignored_params": "looks for narrow copies that parameters hold; ours hold none",
    "test_different_graph_across_ranks": "wants that buckets are not assigned anew where parameters are unused; ours are",
}


@pytest.mark.slow
@pytest.mark.timeout(10 * LIMIT_S)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_torchs_wrapper_passes_ours_passes(backend: str) -> None:
    left_out = {name for names in NOT_BY_STOCK.values() for name in names} | set(NOT_OURS)
    found = run(backend, "guozhuang", 2, WRAPPER, timeout_s=9 * LIMIT_S, on_cpu=True, without=sorted(left_out))
    failed = {name: text for name, text in found.items() if text != PASSED}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    assert sum(text == PASSED for text in found.values()) >= 80
