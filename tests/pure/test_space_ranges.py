"""Rows of a divided dimension: windows of every kind over all ranks' rows equal those over the whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from guozhuang.parallel.space.ranges import (
    RowPiece,
    RowPlan,
    SlidingWindow,
    TransposedWindow,
    padded_rows,
    parts,
    ranges_plan,
    rows_plan,
    window_plan,
)


def carried_out(plans: list[RowPlan], rows: list[list[float]]) -> list[list[float]]:
    """What every rank has after the plans: messages by (from, to), taken in order."""
    mail: dict[tuple[int, int], list[float]] = {}
    for rank, plan in enumerate(plans):
        for peer, ranges in plan.sends:
            mail[rank, peer] = [rows[rank][i] for each in ranges for i in each]
    results = []
    for rank, plan in enumerate(plans):
        target = [0.0] * plan.length
        for piece in plan.own:
            for i, row in enumerate(piece.rows):
                target[piece.at + i] = rows[rank][row]
        for peer, pieces in plan.receives:
            message = mail.pop((peer, rank))
            assert len(message) == sum(len(piece.rows) for piece in pieces)
            for piece in pieces:
                for i, row in enumerate(piece.rows):
                    target[piece.at + i] = message[row]
        results.append(target)
    assert not mail, "a message that nobody takes"
    return results


def over_ranks(size: int, num: int, plan_of: Callable[[int], RowPlan]) -> tuple[torch.Tensor, list[list[float]], bool]:
    """The whole, what the ranks get, and whether a row comes from a rank beyond the next."""
    image = torch.arange(1.0, size + 1)
    plans = [plan_of(rank) for rank in range(num)]
    far = any(abs(peer - rank) > 1 for rank, plan in enumerate(plans) for peer, _ in plan.receives)
    return image, carried_out(plans, [image[start:stop].tolist() for start, stop in parts(size, num)]), far


def numbers(draw: random.Random) -> tuple[int, int, int, int, int]:
    return draw.randint(2, 6), draw.randint(1, 7), draw.randint(1, 4), draw.randint(1, 3), draw.randint(0, 5)


def test_windows_over_parts_equal_those_over_the_whole() -> None:
    draw, cases, beyond = random.Random(1), 0, 0
    while cases < 200:
        num, kernel, stride, dilation, padding = numbers(draw)
        size, weight = draw.randint(num, 40), torch.rand(1, 1, kernel)
        window = SlidingWindow(kernel, stride, dilation, padding, padding)
        if window.num_outputs(size) < num:
            continue
        image, got, far = over_ranks(size, num, lambda r: window_plan(window, size, num, r))  # noqa: B023
        expected = F.conv1d(image[None, None], weight, stride=stride, padding=padding, dilation=dilation)
        found = torch.cat(
            [F.conv1d(torch.tensor([[rows]]), weight, stride=stride, dilation=dilation) for rows in got], 2
        )
        torch.testing.assert_close(found, expected)
        cases, beyond = cases + 1, beyond + far
    assert beyond > 15


def test_transposed_windows_over_parts_equal_those_over_the_whole() -> None:
    draw, cases = random.Random(2), 0
    while cases < 100:
        num, kernel, stride, dilation, padding = numbers(draw)
        size, weight, extra = (
            draw.randint(num, 20),
            torch.rand(1, 1, kernel),
            draw.randint(0, max(stride, dilation) - 1),
        )
        window = TransposedWindow(kernel, stride, dilation, padding, extra)
        if window.num_outputs(size) < num:
            continue
        image, got, _ = over_ranks(size, num, lambda r: window_plan(window, size, num, r))  # noqa: B023
        expected = F.conv_transpose1d(image[None, None], weight, None, stride, padding, extra, dilation=dilation)
        found = []
        for (start, stop), rows in zip(parts(window.num_outputs(size), num), got, strict=True):
            made = F.conv_transpose1d(torch.tensor([[rows]]), weight, None, stride, dilation=dilation)
            first = start - window.first_made((start, stop))
            assert first >= 0 and first + stop - start <= made.shape[2]
            found.append(made[:, :, first : first + stop - start])
        torch.testing.assert_close(torch.cat(found, 2), expected)
        cases += 1


@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect", "circular"])
def test_padding_and_cutting_over_parts(mode: str) -> None:
    draw = random.Random(3)
    for _ in range(40):
        num, size = draw.randint(2, 5), draw.randint(2, 30)
        size = max(size, num)
        least = 0 if mode != "constant" else -2
        before, after = draw.randint(least, min(9, size - 1)), draw.randint(least, min(9, size - 1))
        length = size + before + after
        if length < num:
            continue
        rows = padded_rows(size, before, after, mode)
        image, got, _ = over_ranks(size, num, lambda r: rows_plan(rows, length, size, num, r))  # noqa: B023
        expected = F.pad(image[None, None], (before, after), mode)[0, 0]
        assert list(itertools.chain(*got)) == expected.tolist()


def test_strided_and_reversed_rows_and_ranges() -> None:
    draw = random.Random(4)
    for _ in range(60):
        num, size = draw.randint(2, 5), draw.randint(8, 40)
        wanted = range(size)[
            slice(draw.randint(-size, size), draw.randint(-size, size), draw.choice([-3, -2, -1, 1, 2, 3]))
        ]
        if len(wanted) >= num:
            pieces = (RowPiece(0, wanted),)
            _, got, _ = over_ranks(size, num, lambda r: rows_plan(pieces, len(wanted), size, num, r))  # noqa: B023
            assert list(itertools.chain(*got)) == [float(row + 1) for row in wanted]
        starts = [draw.randint(0, size - 1) for _ in range(num)]
        needed = tuple((start, draw.randint(start + 1, size)) for start in starts)
        _, got, _ = over_ranks(size, num, lambda r: ranges_plan(size, needed, r))  # noqa: B023
        assert got == [[float(row + 1) for row in range(*each)] for each in needed]


def test_pooling_counts_windows_as_pytorch_does() -> None:
    draw = random.Random(5)
    for _ in range(60):
        kernel, stride, size = draw.randint(1, 5), draw.randint(1, 4), draw.randint(5, 20)
        padding, ceil, counts_padding = draw.randint(0, kernel // 2), draw.random() < 0.5, draw.random() < 0.5
        window = SlidingWindow(kernel, stride, 1, padding, padding, ceil)
        pooled = F.avg_pool1d(torch.ones(1, 1, size), kernel, stride, padding, ceil, counts_padding)[0, 0]
        assert window.num_outputs(size) == len(pooled)
        for j, mean in enumerate(pooled.tolist()):
            start = j * stride - padding
            inside = min(start + kernel, size) - max(start, 0)
            assert inside / window.num_inside(j, size, counts_padding) == pytest.approx(mean)
