"""Which rows of a table are used: by the C kernel and by torch, against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.exchange import kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VALUES = (0.0, -0.0, 1.0, float("nan"), -float("inf"), 1e-45)


def by_definition(table: Tensor) -> list[int]:
    return [i for i, row in enumerate(table.tolist()) if any(value != 0 for value in row)]


@given(
    st.integers(0, 12), st.integers(1, 300), st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 299), st.sampled_from(VALUES)), max_size=12),
)  # fmt: skip
def test_used_rows(num_rows: int, num_columns: int, dtype: torch.dtype, puts: list[tuple[int, int, float]]) -> None:
    table = torch.zeros(num_rows, num_columns, dtype=dtype)
    for row, column, value in puts:
        if row < num_rows and column < num_columns:
            table[row, column] = value
    found = kernels.used_rows(table)
    assert found.dtype == torch.int64 and found.tolist() == by_definition(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_rows", None)
        assert kernels.used_rows(table).tolist() == by_definition(table)


def test_the_kernel_refuses_what_it_cannot_read() -> None:
    rows = pytest.importorskip("guozhuang.exchange.kernels._rows")
    for wrong in ((-1, 8, 4), (1, 0, 4), (1, 8, 3)):
        with pytest.raises(ValueError, match="2, 4 or 8"):
            rows.used(0, *wrong, 0)
