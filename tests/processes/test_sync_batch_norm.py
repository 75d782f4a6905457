"""SyncBatchNorm on CPU equals BatchNorm on the joined batch: outputs, gradients, running statistics, in every corner."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.sync_batch_norm import use_on_cpu
from tests.processes.cases import as_tests
from tests.ranks import run_ranks

STEPS = 3
KINDS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TAILS: dict[int, tuple[int, ...]] = {2: (), 3: (5,), 4: (3, 4), 5: (2, 3, 2)}


@dataclass(frozen=True)
class Case:
    dims: int = 4
    rows: tuple[int, ...] = (3, 3)  # of each rank
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    offset: float = 0.0  # mean of the inputs, in standard deviations
    tolerance: float = 1e-10


CASES = [
    *(Case(dims) for dims in (2, 3, 4, 5)),
    Case(rows=(1, 6)),
    Case(rows=(0, 4)),
    Case(rows=(5, 0)),
    Case(dims=2, rows=(1, 1)),
    Case(dims=2, rows=(0, 2)),
    Case(options={"momentum": None}),
    Case(options={"momentum": None}, rows=(2, 5)),
    Case(options={"momentum": 0.0}),
    Case(options={"momentum": 1.0}),
    Case(options={"affine": False}),
    Case(options={"track_running_stats": False}),
    Case(options={"affine": False, "track_running_stats": False}, rows=(0, 3)),
    Case(options={"eps": 0.1}),
    Case(channels_last=True),
    Case(dtype=torch.float32, tolerance=1e-5),
    Case(dtype=torch.float32, offset=1000.0, tolerance=1e-3),  # where E[x^2] - E[x]^2 has no digit left
]


def compare(rank: int, size: int, case: Case) -> None:
    torch.manual_seed(0)
    twin = KINDS[case.dims](4, **case.options).to(case.dtype)
    if twin.affine:
        nn.init.normal_(twin.weight)
        nn.init.normal_(twin.bias)
    ours = gz.SyncBatchNorm(4, **case.options).to(case.dtype)
    ours.load_state_dict(twin.state_dict())
    bounds = [0, *itertools.accumulate(case.rows)]
    mine = slice(bounds[rank], bounds[rank + 1])

    def close(what: str, a: Tensor | None, b: Tensor | None) -> None:
        assert (a is None) == (b is None), what
        if a is not None and b is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, what
            scale = max(float(b.abs().max()), 1.0) if b.numel() else 1.0
            assert torch.allclose(a, b, rtol=0, atol=case.tolerance * scale), f"{what}: {(a - b).abs().max():.2e}"

    for step in range(STEPS + 1):
        if step == STEPS:
            twin.eval()
            ours.eval()
        joined = torch.randn(sum(case.rows), 4, *TAILS[case.dims], dtype=torch.float64) + case.offset
        factors = torch.randn_like(joined).to(case.dtype)
        joined = joined.to(case.dtype)
        if case.channels_last:
            joined = joined.to(memory_format=torch.channels_last)
        a = joined[mine].clone().requires_grad_()
        b = joined.clone().requires_grad_()
        ours.zero_grad()
        twin.zero_grad()
        mine_out = ours(a)
        if step == STEPS and not case.options.get("track_running_stats", True):
            # No statistics were kept: each rank's own batch counts, as in torch.nn.SyncBatchNorm.
            if case.rows[rank] > 1:
                close("own batch", mine_out, twin(joined[mine]))
            continue
        expected = twin(b)
        close("output", mine_out, expected[mine])
        assert case.rows[rank] == 0 or mine_out.stride() == a.stride(), "the memory format changed"
        (mine_out * factors[mine]).sum().backward()
        (expected * factors).sum().backward()
        close("gradient of the input", a.grad, b.grad[mine])
        for (name, parameter), other in zip(ours.named_parameters(), twin.parameters(), strict=True):
            grad = parameter.grad.clone()
            dist.all_reduce(grad)
            close(f"gradient of {name}", grad, other.grad)
        for (name, buffer), other in zip(ours.named_buffers(), twin.buffers(), strict=True):
            close(name, buffer, other)


def compare_all(rank: int, size: int, cases: list[Case]) -> None:
    for case in cases:
        try:
            compare(rank, size, case)
        except Exception as error:
            error.add_note(repr(case))
            raise


def case_it_equals_batch_norm_of_the_joined_batch(rank: int, size: int) -> None:
    compare_all(rank, size, CASES)


def test_it_equals_batch_norm_of_the_joined_batch_on_three_ranks() -> None:
    run_ranks(compare_all, 3, [Case(rows=(2, 0, 3)), Case(dims=2, rows=(1, 4, 2)), Case(rows=(0, 0, 2))])


def case_it_takes_narrow_inputs(rank: int, size: int) -> None:
    """bf16: inputs and outputs are rounded, statistics are not."""
    torch.manual_seed(0)
    joined = torch.randn(8, 3, 5, 5) * 3 + 10
    twin = nn.BatchNorm2d(3)
    rows = slice(4 * rank, 4 * rank + 4)
    for parameters in (torch.float32, torch.bfloat16):
        ours = gz.SyncBatchNorm(3).to(parameters)
        a = joined[rows].bfloat16().requires_grad_()
        b = joined.bfloat16().float().requires_grad_()
        out = ours(a)
        assert out.dtype == torch.bfloat16
        twin.reset_parameters()
        twin.reset_running_stats()
        expected = twin(b)
        assert torch.allclose(out.float(), expected[rows], rtol=2**-7, atol=2**-7)
        factors = torch.randn_like(b)
        out.backward(factors[rows].bfloat16())
        expected.backward(factors.bfloat16().float())
        assert a.grad.dtype == torch.bfloat16
        assert torch.allclose(a.grad.float(), b.grad[rows], rtol=2**-6, atol=2**-6)
        assert ours.running_mean.dtype == parameters
        rounding = 1e-5 if parameters == torch.float32 else 2**-7
        assert torch.allclose(ours.running_mean.float(), twin.running_mean, rtol=rounding)
        assert torch.allclose(ours.running_var.float(), twin.running_var, rtol=rounding)
        assert ours.weight.grad.dtype == parameters


def subgroups(rank: int, size: int) -> None:
    """Ranks 0 and 1, and rank 2 alone: each group has its own joined batch."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    torch.manual_seed(0)
    joined = torch.randn(6, 3)
    members = joined[:4] if rank < 2 else joined[4:]
    mine = joined[2 * rank : 2 * rank + 2]
    ours = gz.SyncBatchNorm(3, process_group=pair if rank < 2 else alone)
    twin = nn.BatchNorm1d(3)
    out, expected = ours(mine), twin(members)
    assert torch.allclose(out, expected[2 * (rank % 2) : 2 * (rank % 2) + 2], atol=1e-6)
    assert torch.allclose(ours.running_var, twin.running_var)


def case_wrong_inputs_are_refused_on_every_rank(rank: int, size: int) -> None:
    layer = gz.SyncBatchNorm(3)
    for shape, text in (
        ((3,), r"\(N, C, ...\)"),
        ((2, 4), "4 channels"),
        ((1 - rank, 3), "more than one value per channel"),  # on all ranks together
    ):
        with pytest.raises(ValueError, match=text):
            layer(torch.randn(shape))
    assert bool(layer(torch.randn(2, 3)).isfinite().all()), "the group no longer works"


def test_groups_normalize_for_themselves() -> None:
    run_ranks(subgroups, 3)


class Net(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        norm, other = nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=1e-3)
        second = norm if shared else other
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 1), second, nn.Flatten())
        self.head = nn.Sequential(nn.Linear(36, 5), nn.BatchNorm1d(5, affine=False, momentum=None))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def case_converted_models_train_on_cpu_like_one_process(rank: int, size: int) -> None:
    torch.manual_seed(0)
    for convert, shared in (
        (
            nn.SyncBatchNorm.convert_sync_batchnorm,
            False,
        ),  # PyTorch's leaves the second place of a shared part as it was
        (gz.SyncBatchNorm.convert_sync_batchnorm, False),
        (gz.SyncBatchNorm.convert_sync_batchnorm, True),
    ):
        twin = Net(shared)
        model = Net(shared)
        model.load_state_dict(twin.state_dict())
        model = convert(model)
        if convert is nn.SyncBatchNorm.convert_sync_batchnorm:
            with pytest.raises(ValueError, match="GPU"):
                model(torch.randn(2, 2, 5, 5))  # PyTorch's refuses CPU tensors
        ddp = gz.DistributedDataParallel(model, bucket_cap_mb=1e-4)
        assert all(isinstance(ddp.module.body[i], gz.SyncBatchNorm) for i in (1, 4))
        assert (ddp.module.body[1] is ddp.module.body[4]) == shared, "one part in two places became two"
        assert list(ddp.module.state_dict()) == list(twin.state_dict())
        single = Net(shared)
        single.load_state_dict(twin.state_dict())
        stepper, other = torch.optim.SGD(ddp.parameters(), 0.1), torch.optim.SGD(single.parameters(), 0.1)
        for _ in range(4):
            torch.manual_seed(5)
            x = torch.randn(6, 2, 5, 5)
            stepper.zero_grad()
            other.zero_grad()
            ddp(x[3 * rank : 3 * rank + 3]).pow(3).mean().backward()
            single(x).pow(3).mean().backward()
            stepper.step()
            other.step()
        for (name, a), b in zip(ddp.module.state_dict().items(), single.state_dict().values(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), name
        ddp.eval()
        single.eval()
        assert torch.allclose(ddp(x), single(x), atol=1e-4)


def case_the_module_may_be_the_layer(rank: int, size: int) -> None:
    """The module may itself be the layer."""
    torch.manual_seed(rank)
    x = torch.randn(4, 3)
    grads = []
    for layer in (nn.SyncBatchNorm(3), gz.SyncBatchNorm(3)):
        ddp = gz.DistributedDataParallel(layer)
        for _ in range(2):
            ddp.zero_grad()
            ddp(x).pow(3).mean().backward()
        grads.append([p.grad.clone() for p in ddp.parameters()] + [b.clone().float() for b in ddp.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert float(grads[0][0].abs().max()) > 0


class Own(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return input * 2


def test_conversion_keeps_hooks_and_subclasses() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), Own(3))
    calls = []
    handles = [
        model[0].register_forward_hook(lambda m, args, kwargs, out: calls.append("forward"), with_kwargs=True),
        model[0].register_forward_pre_hook(lambda m, args: calls.append("before forward")),
        model[0].register_full_backward_hook(lambda m, a, b: calls.append("backward")),
    ]
    own = model[2]
    model = gz.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(part) for part in model] == [gz.SyncBatchNorm, gz.SyncBatchNorm, Own] and model[2] is own
    model(torch.randn(4, 3)).sum().backward()
    assert calls == ["before forward", "forward", "backward"]
    for handle in handles:
        handle.remove()
    model(torch.randn(4, 3)).sum().backward()
    assert len(calls) == 3, "the user's handle no longer removes the hook"
    assert use_on_cpu(nn.Sequential(own))[0] is own


def test_without_a_process_group_it_is_batch_norm() -> None:
    torch.manual_seed(0)
    ours, twin = gz.SyncBatchNorm(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(ours(x), twin(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), twin.state_dict().values(), strict=True))
    assert torch.equal(ours.eval()(x), twin.eval()(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        gz.SyncBatchNorm(3)(torch.randn(1, 3))


test_cases = as_tests(globals(), (2,))
