"""DataParallel on GPUs: parity with the plain module and with torch's own; one GPU is used twice where there is one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from guozhuang.data_parallel import DataParallel, data_parallel
from guozhuang.errors import UsageError

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEVICES = [
    pytest.param([0, 0], id="repeated"),
    pytest.param([0, "cpu"], id="mixed"),
    pytest.param([0, 1], id="two", marks=needs_two),
    pytest.param([0, 1, 0], id="two_and_repeated", marks=needs_two),
]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Linear(8, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        assert next(self.parameters()).device == x.device
        hidden = self.norm(torch.tanh(self.first(x)))
        return {"y": self.last((hidden * self.turn).real), "turned": hidden * self.turn}


def _check(devices: list[int | str], module: nn.Module, twin: nn.Module, x: torch.Tensor) -> None:
    parallel = DataParallel(module, devices)
    for wrapped in (parallel, twin):
        wrapped.zero_grad()
        out = wrapped(x)
        (out["y"].square().mean() + out["turned"].abs().square().mean()).backward()
    for (name, one), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("rows", [8, 7, 1])
@pytest.mark.parametrize("source", ["cpu", "cuda:0"])
def test_gradients_equal_the_plain_module(devices: list[int | str], rows: int, source: str) -> None:
    module = _Net().cuda(0).eval()
    _check(devices, module, copy.deepcopy(module), torch.randn(rows, 5).to(source).cuda(0))
    x = torch.randn(rows, 5, device=source)
    with torch.inference_mode():
        torch.testing.assert_close(DataParallel(module, devices)(x)["y"], module(x.cuda(0))["y"])


@pytest.mark.parametrize("devices", [DEVICES[0], DEVICES[2]])
def test_running_statistics_equal_torchs_own(devices: list[int]) -> None:
    module = _Net().cuda(0).train()
    other = copy.deepcopy(module)
    x = torch.randn(8, 5)
    mine = DataParallel(module, devices)
    if len(set(devices)) == 1:  # torch's own has no repeated devices: its first replica, alone
        mine(x), other(x[:4].cuda(0))
    else:
        mine(x), nn.DataParallel(other, devices)(x)
    for one, two in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)


def test_default_devices_are_all() -> None:
    parallel = DataParallel(nn.Linear(3, 2).cuda(0))
    assert parallel.device_ids == list(range(torch.cuda.device_count()))
    assert parallel.output_device == 0
    assert parallel(torch.randn(4, 3)).device == torch.device("cuda", 0)


@pytest.mark.parametrize("devices", [[0], [0, 0]])
def test_output_on_the_cpu(devices: list[int]) -> None:
    model = nn.Linear(3, 2).cuda(0)
    x = torch.randn(4, 3)
    for output_device in ("cpu", -1):
        output = data_parallel(model, x, devices, output_device)
        assert output.device == torch.device("cpu")
        torch.testing.assert_close(output, model(x.cuda(0)).cpu())


def test_autocast_and_current_stream_reach_the_replicas() -> None:
    seen: list[tuple[object, ...]] = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(
                (torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), torch.cuda.current_stream())
            )
            return x

    stream = torch.cuda.Stream()
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.stream(stream):
        DataParallel(Asking(), [0, 0])(torch.zeros(2, 1))
    assert seen == [(torch.bfloat16, True, stream)] * 2


@pytest.mark.parametrize("device", [torch.cuda.device_count(), "cuda:99", -2])
def test_devices_that_do_not_exist(device: int | str) -> None:
    with pytest.raises(UsageError, match="no such device"):
        DataParallel(nn.Linear(3, 2), [0, device])
