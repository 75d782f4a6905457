"""PyTorch's own tests of collectives, with our groups in gloo's place: what stock gloo passes on the CPU passes."""

from __future__ import annotations

import pytest

from tests.pytorch_own.run import PASSED, SKIPPED, run

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
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RUNS)
def test_what_gloo_passes_passes_on_our_groups(name: str) -> None:
    backend, like, patterns, num_passing = RUNS[name]
    found = run(backend, "torch", 4, patterns, like=like, timeout_s=380.0)
    skipped = {name: text for name, text in found.items() if text.startswith(SKIPPED)}
    failed = {name: text for name, text in found.items() if text != PASSED and name not in skipped}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    unexpected = {name: why for name, why in skipped.items() if not any(part in why for part in NOT_FOR_GLOO_ON_CPUS)}
    assert not unexpected
    assert sum(text == PASSED for text in found.values()) >= num_passing
