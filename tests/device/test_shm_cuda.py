"""A "shm" group beside CUDA tensors: they go to NCCL, CPU tensors stay in shared memory. One GPU, so one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.processes.shm_ranks import run_shm_ranks

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def both_devices(rank: int, n: int) -> None:
    group = dist.group.WORLD
    assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    for device in ("cpu", "cuda"):
        tensor = torch.full((100_000,), 3.0, device=device)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        gathered = torch.zeros(n * 100_000, device=device)
        dist.all_gather_into_tensor(gathered, tensor)
        assert torch.equal(gathered.cpu(), torch.full((n * 100_000,), 3.0 * n))
        scattered = torch.zeros_like(tensor)
        dist.reduce_scatter_tensor(scattered, gathered)
        dist.all_to_all_single(gathered, gathered.clone())
    dist.barrier()
    assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupNCCL)


@pytest.mark.parametrize("name", ["shm", "cpu:shm,cuda:nccl", "cuda:nccl,cpu:shm"])
def test_cuda_tensors_go_to_nccl(name: str) -> None:
    run_shm_ranks(both_devices, 1, name=name)
