"""Sums over memory whose pages of zeros are marked: the C functions and plain sums agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.groups.shared_memory.program import DTYPE_OF
from guozhuang.groups.shared_memory.sparse import PAGE_BYTES, add, num_pages, take
from tests.drawing import examples

PAGES = 6


def paged(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A buffer of zeros that begins at a page, and its marks."""
    room = torch.zeros((PAGES + 1) * PAGE_BYTES, dtype=torch.uint8)
    skip = -room.data_ptr() % PAGE_BYTES
    return room[skip : skip + PAGES * PAGE_BYTES].view(dtype), torch.zeros(PAGES, dtype=torch.uint8)


def values(seed: int, holes: list[int], num: int, dtype: torch.dtype) -> Tensor:
    found = torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)
    per_page = PAGE_BYTES // found.itemsize
    for page in holes:
        found[page * per_page : (page + 1) * per_page] = 0
    return found


@examples(60)
@given(
    holes=st.lists(st.lists(st.integers(0, PAGES - 1), max_size=PAGES), min_size=2, max_size=8),
    offset=st.integers(0, 100),
    end=st.integers(101, PAGES * PAGE_BYTES // 4),
    low=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_sums_are_those_of_the_buffers(
    holes: list[list[int]], offset: int, end: int, low: int, dtype: torch.dtype
) -> None:
    end, offset = end * 4 // dtype.itemsize, offset * 4 // dtype.itemsize
    end, itemsize = max(end, offset + 1), dtype.itemsize
    ranks = [paged(dtype), paged(dtype)]
    exact = [torch.zeros_like(buffer) for buffer, _ in ranks]
    for step, its_holes in enumerate(holes):  # written again and again: what was there before must not show
        buffer, marks = ranks[step % 2]
        gradient = values(step, its_holes, end - offset, dtype)
        where = buffer.data_ptr() + offset * itemsize
        mark = marks.data_ptr() + offset * itemsize // PAGE_BYTES
        take([(where, gradient.data_ptr(), gradient.numel() * itemsize, mark)])
        exact[step % 2][offset:end] = gradient
        assert torch.equal(buffer, exact[step % 2])
        for page in range(PAGES):
            held = buffer[page * PAGE_BYTES // itemsize : (page + 1) * PAGE_BYTES // itemsize]
            assert marks[page] or not held.any(), "a page that is not marked holds zeros"
    low = min(low, end - 1)
    into = torch.full((end - low,), 7.0, dtype=dtype)
    srcs = tuple(buffer.data_ptr() + low * itemsize for buffer, _ in ranks)
    marks_at = tuple(marks.data_ptr() + low * itemsize // PAGE_BYTES for _, marks in ranks)
    add(into.data_ptr(), srcs, marks_at, into.numel() * itemsize, DTYPE_OF[dtype], 0.5)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = ((exact[0][low:end].to(wide) + exact[1][low:end].to(wide)) * 0.5).to(dtype)
    assert torch.equal(into, expected)


def test_pages_of_zeros_are_left_out() -> None:
    buffer, marks = paged()
    gradient = values(0, [0, 2, 3], buffer.numel(), torch.float32)
    take([(buffer.data_ptr(), gradient.data_ptr(), PAGES * PAGE_BYTES, marks.data_ptr())])
    assert marks.tolist() == [0, 1, 0, 0, 1, 1]
    gradient[5 * PAGE_BYTES // 4] = -0.0
    gradient[5 * PAGE_BYTES // 4 + 1 :] = 0
    take([(buffer.data_ptr(), gradient.data_ptr(), PAGES * PAGE_BYTES, marks.data_ptr())])
    assert marks.tolist() == [0, 1, 0, 0, 1, 1], "-0.0 is something"
    take([(buffer.data_ptr(), gradient.data_ptr(), 0, marks.data_ptr())])
    with pytest.raises(ValueError, match="as many marks"):
        add(0, (0, 0), (0,), 4, 0, 1.0)
    with pytest.raises(ValueError, match="piece"):
        take([[1, 2, 3]])  # type: ignore[list-item]


def test_pages_are_counted() -> None:
    assert [num_pages(*told) for told in ((0, 0), (0, 1), (4095, 2), (4096, 4096), (1, 8192))] == [0, 1, 2, 1, 3]
