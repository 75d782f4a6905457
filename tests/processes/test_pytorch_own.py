"""PyTorch's own tests of collectives, with "shm" in gloo's place: what stock gloo passes on the CPU passes."""

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


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("patterns", "like", "num_passing"), [(COLLECTIVES, "gloo", 90), (("all_to_all",), "mpi", 12)])
def test_what_gloo_passes_passes_on_shm(patterns: tuple[str, ...], like: str, num_passing: int) -> None:
    found = run("shm", "torch", 4, patterns, like=like, timeout_s=380.0)
    skipped = {name: text for name, text in found.items() if text.startswith(SKIPPED)}
    failed = {name: text for name, text in found.items() if text != PASSED and name not in skipped}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    unexpected = {name: why for name, why in skipped.items() if not any(part in why for part in NOT_FOR_GLOO_ON_CPUS)}
    assert not unexpected
    assert sum(text == PASSED for text in found.values()) >= num_passing
