"""Embeddings by their rows: the sums are those of an all-reduce, and only the rows that were used are sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce, CommHook
from guozhuang.exchange.base import GradientExchange
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.sparse_rows import SparseRows
from guozhuang.world import versions
from tests.processes.cases import as_tests, assert_equal_everywhere, seeded
from tests.ranks import run_ranks

WORDS, WIDTH = 4096, 32


class Model(nn.Module):
    """An embedding between two other layers in the order of parameters, and an output that may share its weight."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with seeded(0):
            self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
            self.words = nn.Embedding(WORDS, WIDTH, dtype=dtype)
            self.second = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.second(torch.tanh(self.first(self.words(tokens).mean(1))))
        return found @ self.words.weight.T if self.tied else found


def tokens(rank: int, step: int, most: int = WORDS) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, most, (4, 5 + rank), generator=random)


def wrapped(exchange: GradientExchange[Any], **options: Any) -> DistributedDataParallel:
    caps = options.pop("caps", {})
    ddp = DistributedDataParallel(Model(**options), **caps)
    ddp.use_exchange(exchange)
    return ddp


def gradients(ddp: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in ddp.named_parameters() if p.grad is not None}


def same(ours: DistributedDataParallel, theirs: DistributedDataParallel, rank: int, steps: int, **close: float) -> None:
    for step in range(steps):
        for ddp in (ours, theirs):
            ddp.zero_grad()
            ddp(tokens(rank, step)).square().sum().backward()
        for name, gradient in gradients(ours).items():
            torch.testing.assert_close(gradient, gradients(theirs)[name], **close)
            assert_equal_everywhere(gradient)


def case_the_same_as_an_all_reduce(rank: int, size: int) -> None:
    for caps in ({}, {"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 100}):
        same(
            wrapped(SparseRows(AllReduce()), caps=caps), wrapped(AllReduce(), caps=caps), rank, 3, rtol=1e-5, atol=1e-6
        )


def case_a_tied_output_goes_whole(rank: int, size: int) -> None:
    same(wrapped(SparseRows(AllReduce()), tied=True), wrapped(AllReduce(), tied=True), rank, 2, rtol=1e-5, atol=1e-5)


def case_half_and_double(rank: int, size: int) -> None:
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        ours, theirs = (wrapped(one, dtype=dtype) for one in (SparseRows(AllReduce()), AllReduce()))
        same(ours, theirs, rank, 2, rtol=tolerance, atol=tolerance)


def case_the_rest_in_8_bits(rank: int, size: int) -> None:
    ours, exact = wrapped(SparseRows(Compressed(MinMax8()))), wrapped(AllReduce())
    for ddp in (ours, exact):
        ddp(tokens(rank, 0)).square().sum().backward()
    ours_, exact_ = gradients(ours), gradients(exact)
    torch.testing.assert_close(ours_["module.words.weight"], exact_["module.words.weight"], rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours_["module.first.weight"], exact_["module.first.weight"])
    span = exact_["module.first.weight"].aminmax()
    torch.testing.assert_close(
        ours_["module.first.weight"], exact_["module.first.weight"], rtol=0, atol=float(span.max - span.min) * 4 / 255
    )


def case_rows_that_only_one_rank_used(rank: int, size: int) -> None:
    for row in (0, 7, WORDS - 1):
        ddp, model = wrapped(SparseRows(AllReduce())), Model()
        ddp(torch.tensor([[row if rank == size - 1 else 3]])).sum().backward()
        model(torch.tensor([[row]])).sum().backward()
        mine, whole = ddp.module.words.weight.grad, model.words.weight.grad
        assert mine is not None and whole is not None
        torch.testing.assert_close(mine[row], whole[row] / size)
        assert int(mine.any(1).sum()) == 2


def case_infinity_and_nan_arrive(rank: int, size: int) -> None:
    ddp = wrapped(SparseRows(AllReduce()))
    loss = ddp(torch.tensor([[5]])).sum()
    (loss * (float("nan") if rank == 0 else 1.0)).backward()
    gradient = ddp.module.words.weight.grad
    assert gradient is not None and bool(gradient[5].isnan().all()) and not bool(gradient[6].isnan().any())


def case_uneven_inputs(rank: int, size: int) -> None:
    ours, theirs = wrapped(SparseRows(AllReduce())), wrapped(AllReduce())
    for ddp in (ours, theirs):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(1 + rank):
                optimizer.zero_grad()
                ddp(tokens(rank, step)).square().sum().backward()
                optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def case_accumulated_and_resumed_feedback(rank: int, size: int) -> None:
    def run(ddp: DistributedDataParallel, steps: range) -> None:
        for step in steps:
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(tokens(rank, step)).square().sum().backward()
            ddp(tokens(rank, step + 50)).square().sum().backward()

    exchange = SparseRows(Compressed(MinMax8(), error_feedback=True))
    caps = {"bucket_cap_mb": 100}
    first = wrapped(exchange, caps=caps)
    run(first, range(3))
    saved = copy.deepcopy(first.exchange_state_dict())
    run(first, range(3, 5))
    second = wrapped(exchange, caps=caps)
    run(second, range(1))
    second.load_exchange_state_dict(saved)
    run(second, range(3, 5))
    for name, gradient in gradients(first).items():
        assert torch.equal(gradient, gradients(second)[name]), name


def few_bytes(rank: int, size: int) -> None:
    """What the collectives are given, counted: an embedding of 512 KiB, of which 20 to 40 rows are used."""
    sent = {"bytes": 0}
    gather, reduce = versions.all_gather_single, dist.all_reduce

    def counted_gather(output: Tensor, tensor: Tensor, **options: Any) -> Any:
        sent["bytes"] += (size - 1) * tensor.numel() * tensor.element_size()
        return gather(output, tensor, **options)

    def counted_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent["bytes"] += 2 * (size - 1) * tensor.numel() * tensor.element_size() // size
        return reduce(tensor, *args, **options)

    ddp = wrapped(SparseRows(AllReduce()))
    batch = tokens(rank, 0)
    ddp(batch).sum().backward()  # buckets are laid out anew after the first
    ddp.zero_grad()
    versions.all_gather_single, dist.all_reduce = counted_gather, counted_reduce  # type: ignore[assignment]
    try:
        ddp(batch).sum().backward()
    finally:
        versions.all_gather_single, dist.all_reduce = gather, reduce
    most = max(len(tokens(other, 0).unique()) for other in range(size))
    rest = sum(p.numel() for name, p in ddp.named_parameters() if "words" not in name) * 4
    told = 16  # two numbers that say whether ranks are alike, in their first passes and every 16th
    wanted = (size - 1) * most * (4 + WIDTH * 4) + 2 * (size - 1) * (8 + told + rest) // size
    assert abs(sent["bytes"] - wanted) <= 16, (sent, wanted)
    assert sent["bytes"] < AllReduce().traffic(WORDS * WIDTH, 4, size) / 5


def case_buckets_keep_their_memory(rank: int, size: int) -> None:
    """The works of an inner all-reduce hold views of a bucket that is cut until the next step, those of a code do not."""
    for inner, cap in ((AllReduce(), 0.001), (Compressed(MinMax8()), 0.001), (Compressed(MinMax8()), 100)):
        ddp, places = wrapped(SparseRows(inner), caps={"bucket_cap_mb": cap}), set()
        for step in range(4):
            ddp.zero_grad()
            ddp(tokens(rank, step)).square().sum().backward()
            if step >= 2:  # the layout changes after the first
                places.add(tuple(bucket.flat.data_ptr() for bucket in ddp.reducer.buckets))
        assert len(places) == 1, (inner, cap)


def case_lazy_buckets(rank: int, size: int) -> None:
    for inner in (AllReduce(), Compressed(MinMax8())):
        ours, theirs = (
            wrapped(SparseRows(inner), caps={"lazy_bucket_allocation": lazy, "bucket_cap_mb": 100})
            for lazy in (True, False)
        )
        seen: list[int] = []
        ours.module.register_forward_hook(
            lambda *_, ddp=ours, seen=seen: seen.extend(
                bucket.flat.untyped_storage().nbytes() for bucket in ddp.reducer.buckets
            )
        )
        same(ours, theirs, rank, 3, rtol=0, atol=0)
        assert not any(seen)


def case_what_cannot_work(rank: int, size: int) -> None:
    for wrong in (None, CommHook(lambda state, bucket: None, None)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="needs an exchange for what is no table"):
            SparseRows(wrong)  # type: ignore[arg-type]


test_cases = as_tests(globals(), (2, 3), on="threads")


def test_few_bytes() -> None:
    run_ranks(few_bytes, 3)


def alone(rank: int, size: int) -> bool:
    ddp, model = wrapped(SparseRows(AllReduce())), Model()
    for each in (ddp, model):
        each(tokens(0, 0)).sum().backward()
    return torch.equal(ddp.module.words.weight.grad, model.words.weight.grad)


def test_one_rank() -> None:
    assert run_ranks(alone, 1) == [True]
