"""``gz.reduce``: metrics of any structure over the ranks, against the formula; rank zero's output; ``gz.all_gather``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import guozhuang as gz
from guozhuang.errors import MismatchError, UsageError
from tests.threads.ranks import run_threads

FORMULAS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "min": min,
    "max": max,
}


def metric(rank: int) -> dict[str, Any]:
    return {
        "loss": 0.1 + rank,
        "parts": [torch.tensor([[1.0, -2.0]]) * (rank - 1), (3 * rank - 2,)],
        "right": torch.tensor([True, rank > 0]),
        "none": torch.zeros(0),
        "infinite": -math.inf if rank == 1 else 1.0,
    }


def reduced(rank: int, num_ranks: int, op: Any) -> Any:
    mine = metric(rank)
    found = gz.reduce(mine, op)
    assert mine["loss"] == 0.1 + rank and mine["parts"][0].tolist() == metric(rank)["parts"][0].tolist()
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("op", FORMULAS)
def test_every_rank_gets_the_combined_metric(op: str, num_ranks: int) -> None:
    formula, results = FORMULAS[op], run_threads(reduced, num_ranks, op)
    for found in results:
        given = [metric(rank) for rank in range(num_ranks)]
        assert found["loss"] == pytest.approx(formula([each["loss"] for each in given]), rel=1e-15)
        assert found["parts"][0].dtype == torch.float32 and found["parts"][0].shape == (1, 2)
        for column in range(2):
            expected = formula([float(each["parts"][0][0, column]) for each in given])
            assert float(found["parts"][0][0, column]) == pytest.approx(expected)
        expected = formula([each["parts"][1][0] for each in given])
        assert found["parts"][1] == (pytest.approx(expected),) and isinstance(found["parts"], list)
        assert isinstance(found["parts"][1][0], float if op == "mean" else int)
        dtype = {"mean": torch.float32, "sum": torch.int64}.get(op, torch.bool)
        assert found["right"].dtype == dtype
        assert [float(x) for x in found["right"]] == pytest.approx(
            [formula([float(each["right"][i]) for each in given]) for i in range(2)]
        )
        assert found["none"].shape == (0,)
        assert found["infinite"] == formula([each["infinite"] for each in given])
    assert str(results[0]) == str(results[-1])


def weighted(rank: int, num_ranks: int) -> Any:
    nan = math.nan
    assert math.isnan(gz.reduce(nan if rank == 1 else 1.0, "max")) and math.isnan(gz.reduce([nan, 1][rank % 2], "min"))
    with pytest.raises(UsageError, match="weights of all ranks are 0"):
        gz.reduce(1.0, weight=0)
    # The last rank had no sample, so its mean is 0 / 0.
    return gz.reduce([4.0, 1.0, nan][rank], weight=[1, 3, 0][rank])


def test_means_are_weighted() -> None:
    assert run_threads(weighted, 3) == [(4.0 + 3 * 1.0) / 4] * 3


def differing(rank: int, num_ranks: int) -> str:
    with pytest.raises(ValueError, match="metrics of different structures") as error:
        gz.reduce({"loss": 1.0} if rank else {"accuracy": 1.0})
    with pytest.raises(ValueError, match="different structures"):
        gz.reduce([1.0, 2.0] if rank else torch.ones(2), "max")
    for op in ("sum", "max"):
        for sizes in ((1, 2), (3, 300), (100, 300)):  # which backends other than "shm" do not forgive
            with pytest.raises(ValueError, match="different structures"):
                gz.reduce(torch.ones(sizes[rank]), op)
        assert torch.equal(gz.reduce(torch.arange(200.0), op), torch.arange(200.0) * (2 if op == "sum" else 1))
    return str(error.value)


def test_ranks_that_reduce_different_metrics_are_told() -> None:
    run_threads(differing, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1.0, "average"), "no such operation.*'average'"),
        (("loss",), "made of real numbers"),
        ((1j,), "made of real numbers"),
        ((torch.ones(1, dtype=torch.complex64),), "made of real numbers"),
    ],
)
def test_what_cannot_be_reduced(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        gz.reduce(*arguments)
    for weight in (-1.0, math.nan):
        with pytest.raises(UsageError, match="a weight is a finite number"):
            gz.reduce(1.0, weight=weight)
    with pytest.raises(UsageError, match='for "mean" alone'):
        gz.reduce(1.0, "sum", weight=2)


def writes(rank: int, num_ranks: int) -> bool:
    gz.print("rank", rank, end="!")
    return gz.rank_zero()


def test_one_rank_writes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_threads(writes, 3) == [True, False, False]
    assert capfd.readouterr().out == "rank 0!"
    assert gz.rank_zero(), "the only process"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert not gz.rank_zero(), "the launcher tells, before init"


def gathers(rank: int, num_ranks: int) -> torch.Tensor:
    mine = torch.full((2, 3), float(rank), requires_grad=True)
    weights = torch.arange(6.0 * num_ranks).view(-1, 3) + rank
    laid_out = weights if rank == 0 else weights.t().contiguous().t()  # equal values in another order of memory
    gz.all_gather(mine).backward(laid_out)
    with pytest.raises(MismatchError, match="rows of different shapes"):
        gz.all_gather(torch.zeros(*[1] * 9, 1 + rank, 2 - rank))
    assert mine.grad is not None
    return mine.grad


def test_rows_of_all_ranks_take_gradients_of_any_strides() -> None:
    for rank, gradient in enumerate(run_threads(gathers, 2)):
        expected = sum(torch.arange(12.0).view(-1, 3) + r for r in range(2))
        torch.testing.assert_close(gradient, expected[2 * rank : 2 * rank + 2], rtol=0, atol=0)
