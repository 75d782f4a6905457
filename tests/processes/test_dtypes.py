"""Every dtype, memory format and size of parameter: gradients are the mean over ranks, in the dtype and strides they had alone.

The twin runs each rank's batch on a bare copy of the model and averages the gradients with plain arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from guozhuang import DistributedDataParallel
from guozhuang.exchange.sparse import all_gather_mean, no_rows
from tests.processes.cases import as_tests
from tests.ranks import run_ranks

Batch = tuple[Any, ...]
STEPS = 3
TINY_MB = 1e-4


def local_grads(model: nn.Module, batch: Batch) -> list[Tensor | None]:
    model.zero_grad()
    model(*batch).abs().pow(2).sum().backward()
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def mean_of(parts: Iterable[Tensor | None], num_ranks: int, like: Tensor) -> Tensor:
    """Mean in double precision."""
    wide = torch.complex128 if like.is_complex() else torch.float64
    total = torch.zeros(like.shape, dtype=wide)
    for part in parts:
        if part is not None:
            total += part.to_dense().to(wide) if part.is_sparse else part.to(wide)
    return total / num_ranks


def check_means(
    make: Callable[[], nn.Module],
    batch_of: Callable[[int, int], Batch],
    rank: int,
    size: int,
    tolerance: float = 1e-6,
    set_to_none: bool = True,
    **options: Any,
) -> nn.Module:
    """Compare the gradients of some steps with the mean of all ranks' own; return the wrapper."""
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(1)
    twin = make()
    ddp = DistributedDataParallel(model, **options)
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=set_to_none)
        ddp(*batch_of(step, rank)).abs().pow(2).sum().backward()
        parts = [local_grads(twin, batch_of(step, other)) for other in range(size)]
        for (name, parameter), *grads in zip(model.named_parameters(), *parts, strict=True):
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == parameter.dtype and parameter.grad.shape == parameter.shape, name
            ours = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            expected = mean_of(grads, size, parameter)
            scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
            error = float((ours.to(expected.dtype) - expected).abs().max()) / scale if expected.numel() else 0.0
            assert error <= tolerance, f"{name} {parameter.dtype}: {error:.2e}"
    return ddp


def rows(dtype: torch.dtype, width: int = 6) -> Callable[[int, int], Batch]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        real = torch.randn(3, width, generator=generator, dtype=torch.float64)
        if dtype.is_complex:
            real = torch.complex(real, torch.randn(3, width, generator=generator, dtype=torch.float64))
        return (real.to(dtype),)

    return batch


class Layers(nn.Module):
    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).to(dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)) * 0.5
        return x


# ---- dtypes -----------------------------------------------------------------------------------------------------------


def case_one_dtype(rank: int, size: int) -> None:
    for dtype, tolerance in (
        (torch.float64, 1e-14),
        (torch.float32, 1e-6),
        (torch.float16, 4e-3),
        (torch.bfloat16, 3e-2),
        (torch.complex64, 1e-6),
        (torch.complex128, 1e-14),
    ):
        for options in ({}, {"bucket_cap_mb": TINY_MB}, {"batched_grad_copy": True}, {"set_to_none": False}):
            check_means(lambda dtype=dtype: Layers(dtype, dtype), rows(dtype), rank, size, tolerance, **options)


def case_mixed_dtypes(rank: int, size: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
    for options in ({}, {"bucket_cap_mb": TINY_MB}, {"batched_grad_copy": True}, {"find_unused_parameters": True}):
        ddp = check_means(lambda: Layers(*dtypes), rows(torch.float32), rank, size, 3e-2, **options)
        assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in ddp.reducer.buckets)


def case_real_and_complex(rank: int, size: int) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Linear(6, 6)
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return self.real(x) * self.phase.conj()  # its gradient arrives as a lazy conjugate

    check_means(Both, rows(torch.float32), rank, size)
    check_means(Both, rows(torch.float32), rank, size, batched_grad_copy=True)


def half_without_overflow(rank: int, size: int) -> None:
    """60000 on each of four ranks: the sum does not fit into fp16, the mean does."""
    for options in ({}, {"batched_grad_copy": True}, {"static_graph": True}):
        model = nn.Linear(3, 2, bias=False).half()
        ddp = DistributedDataParallel(model, **options)
        for _ in range(2):
            ddp.zero_grad()
            (ddp.module.weight * 1).sum()  # a graph beside the one that counts
            ddp(torch.full((1, 3), 60000.0).half() / 1000).sum().mul(1000).backward()
            assert bool((model.weight.grad == 60000).all()), model.weight.grad


def test_means_of_half_precision_do_not_overflow_on_four_ranks() -> None:
    run_ranks(half_without_overflow, 4)


# ---- memory formats and sizes -----------------------------------------------------------------------------------------


def case_channels_last(rank: int, size: int) -> None:
    def make() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3, bias=False))
        return layers.to(memory_format=torch.channels_last)

    def images(step: int, rank: int) -> Batch:
        return (torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(9 * step + rank)),)

    for options in ({}, {"set_to_none": False}, {"batched_grad_copy": True}, {"bucket_cap_mb": TINY_MB}):
        ddp = check_means(make, images, rank, size, 1e-5, **options)
        for parameter in ddp.parameters():
            assert parameter.grad.stride() == parameter.stride()
        assert ddp.module[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def case_transposed_and_expanded(rank: int, size: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(6, 4).t())
            self.gapped = nn.Parameter(torch.randn(4, 12)[:, ::2])
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 6))

        def forward(self, x: Tensor) -> Tensor:
            total = x @ self.transposed.t() * self.scalar + x @ self.gapped.t()
            return total + (x @ self.nothing.t()).sum()

    for options in ({}, {"bucket_cap_mb": 1e-6}, {"batched_grad_copy": True}):
        ddp = check_means(Odd, rows(torch.float32), rank, size, 1e-5, **options)
        assert ddp.module.transposed.grad.stride() == ddp.module.transposed.stride()
        assert ddp.module.scalar.grad.shape == () and ddp.module.nothing.grad.shape == (0, 6)


def case_a_single_parameter(rank: int, size: int) -> None:
    for shape in ((), (1,), (0,)):

        class One(nn.Module):
            def __init__(self, shape: tuple[int, ...] = shape) -> None:
                super().__init__()
                self.p = nn.Parameter(torch.ones(shape))

            def forward(self, x: Tensor) -> Tensor:
                return x.sum() * self.p.sum()

        check_means(One, rows(torch.float32), rank, size, 1e-6)


def case_many_parameters(rank: int, size: int) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(i % 3) for i in range(500))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(list(self.parts)) * x.sum()

    for options in ({}, {"bucket_cap_mb": TINY_MB}, {"batched_grad_copy": True, "find_unused_parameters": True}):
        check_means(Many, rows(torch.float32), rank, size, 1e-5, **options)


# ---- sparse gradients -------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A sparse embedding, a sparse bag, and dense parts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, sparse=True, dtype=dtype)
        self.bag = nn.EmbeddingBag(7, 4, sparse=True, mode="sum", dtype=dtype)
        self.out = nn.Linear(4, 3, dtype=dtype)

    def forward(self, words: Tensor, bag: Tensor | None = None) -> Tensor:
        hidden = self.words(words).sum(0)
        if bag is not None and bag.numel():
            hidden = hidden + self.bag(bag.unsqueeze(0))[0]
        return self.out(hidden)


def uneven_rows(step: int, rank: int) -> Batch:
    """Some rows on one rank only, some on both, some twice; rank 1 has none in step 1."""
    if rank == 1 and step == 1:
        return (torch.empty(0, dtype=torch.int64), torch.tensor([1]))
    return (torch.tensor([0, 3, 3, 5 + rank][: 4 - rank]), torch.arange(1 + rank + step) % 7)


def case_sparse_gradients(rank: int, size: int) -> None:
    for options in ({}, {"bucket_cap_mb": TINY_MB}, {"static_graph": True}, {"batched_grad_copy": True}):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)):
            ddp = check_means(lambda d=dtype: Words(d), uneven_rows, rank, size, tolerance, **options)
            for part in (ddp.module.words, ddp.module.bag):
                assert part.weight.grad.is_sparse and part.weight.grad.is_coalesced()
            assert not ddp.module.out.weight.grad.is_sparse
            # Only rows that some rank used travel: 5 + rank is one of them for each rank but for the cut above.
            assert ddp.module.words.weight.grad.indices().max() < 11


def case_sparse_gathered(rank: int, size: int) -> None:
    """What no embedding gives: complex values, several sparse dimensions, a dense tensor, nothing at all."""
    for dtype in (torch.float32, torch.float16, torch.complex64, torch.complex128):
        own = torch.zeros(5, 4, 2, dtype=dtype)
        own[rank + 1, 3 - rank] = 1 + rank + (1j if dtype.is_complex else 0)
        own[0, 0] = 2
        expected = torch.zeros_like(own)
        expected[0, 0] = 2
        for other in range(size):
            expected[other + 1, 3 - other] = (1 + other + (1j if dtype.is_complex else 0)) / size
        for gradient in (own, own.to_sparse(1), own.to_sparse(2), own.to_sparse(3)):
            mean = all_gather_mean(gradient, float(size), dist.group.WORLD, [])
            assert mean.is_coalesced() and mean.dtype == dtype
            assert torch.equal(mean.to_dense(), expected)
        only_here = own.to_sparse(1) if rank == 1 else no_rows(own)
        mean = all_gather_mean(only_here, 1.0, dist.group.WORLD, [])
        assert mean.indices().tolist() == [[0, 2]]
        assert all_gather_mean(no_rows(own), 2.0, dist.group.WORLD, [])._nnz() == 0
        twice = torch.sparse_coo_tensor([[3, 3]], torch.ones(2, 4, 2, dtype=dtype), own.shape)  # not coalesced
        assert bool((all_gather_mean(twice, float(size), dist.group.WORLD, []).to_dense()[3] == 2).all())


def case_sparse_alone(rank: int, size: int) -> None:
    """Nothing but sparse parameters: there is no flat tensor at all."""
    check_means(
        lambda: nn.Embedding(6, 2, sparse=True),
        lambda step, rank: (torch.tensor([rank, step]),),
        rank,
        size,
        find_unused_parameters=True,
    )


def case_sparse_training(rank: int, size: int) -> None:
    """SparseAdam for the embeddings, AdamW for the rest, gradients of several micro-batches: as in one process."""
    torch.manual_seed(2)
    model, twin = Words().double(), Words().double()
    twin.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model)

    def optimizers(module: Words) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SparseAdam([module.words.weight, module.bag.weight], lr=0.01),
            torch.optim.AdamW(module.out.parameters(), lr=0.01),
        ]

    ours, theirs = optimizers(model), optimizers(twin)
    for step in range(6):
        for stepper in (*ours, *theirs):
            stepper.zero_grad()
        for micro in range(2):
            with ddp.no_sync() if micro == 0 else contextlib.nullcontext():
                (ddp(*uneven_rows(step + micro, rank)).pow(2).sum() / 2).backward()
            for other in range(size):
                (twin(*uneven_rows(step + micro, other)).pow(2).sum() / 2 / size).backward()
        for stepper in (*ours, *theirs):
            stepper.step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10), name


def case_sparse_unused(rank: int, size: int) -> None:
    """Used on one rank only, on none, on both; without a gradient anywhere ``.grad`` stays None."""
    torch.manual_seed(2)
    model, twin = Words(), Words()
    twin.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=TINY_MB)

    def bag(step: int, rank: int) -> Tensor | None:
        return torch.tensor([1, 2]) if step in (0, 3) or (step == 1 and rank == 1) else None

    for step in range(4):
        ddp.zero_grad()
        words = torch.tensor([rank, 4])
        ddp(words, bag(step, rank)).pow(2).sum().backward()
        parts = [local_grads(twin, (torch.tensor([other, 4]), bag(step, other))) for other in range(size)]
        for (name, parameter), *grads in zip(model.named_parameters(), *parts, strict=True):
            if all(grad is None for grad in grads):
                assert parameter.grad is None, f"{name} in step {step}"
                continue
            ours = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            assert torch.allclose(ours.double(), mean_of(grads, size, parameter), rtol=1e-5, atol=1e-6), name
        assert (model.bag.weight.grad is None) == (step == 2)


def case_sparse_as_torch(rank: int, size: int) -> None:
    grads = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(4)
        ddp = wrapper(Words())
        for step in (0, 1, 2):
            ddp.zero_grad()
            ddp(*uneven_rows(step, rank)).pow(2).sum().backward()
        grads.append([p.grad for p in ddp.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert ours.is_sparse == theirs.is_sparse
        assert torch.equal(ours.to_dense(), theirs.to_dense())


test_cases = as_tests(globals(), (2,))
