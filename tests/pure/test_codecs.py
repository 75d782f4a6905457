"""Codes of gradients against a few lines of numpy, and what is stated of their errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.errors import UsageError
from guozhuang.exchange.codec import Codec
from guozhuang.exchange.dithering import Dithering
from guozhuang.exchange.onebit import OneBit
from guozhuang.exchange.quantize import MinMax8
from guozhuang.exchange.sparsify import RandomK, TopK

DITHERINGS = [
    Dithering(bits, partition, normalize, block)
    for bits in (2, 4, 8)
    for partition in ("linear", "natural")
    for normalize in ("max", "l2")
    for block in (8, 256)
]
CODECS: list[Codec] = [MinMax8(), *DITHERINGS, OneBit(), OneBit(scaling=False), OneBit(block=8)]
CODECS += [TopK(0.1), TopK(7), RandomK(0.1), RandomK(7)]
ROWS = st.tuples(st.integers(1, 4), st.integers(1, 700), st.integers(0, 2**31), st.floats(1e-20, 1e20))


def made(num_rows: int, num_elements: int, seed: int, scale: float) -> Tensor:
    return torch.randn(num_rows, num_elements, generator=torch.Generator().manual_seed(seed)) * scale


def there_and_back(codec: Codec, rows: Tensor, seed: int = 0) -> Tensor:
    codes = torch.full((rows.shape[0], codec.row_bytes(rows.shape[1])), 0xA5, dtype=torch.uint8)
    before = rows.clone()
    codec.encode(rows, codes, torch.Generator().manual_seed(seed))
    assert torch.equal(rows, before), "encode changed what it was given"
    decoded = torch.full_like(rows, torch.nan)
    codec.decode(codes, decoded)
    return decoded


def bagua_uint8(x: np.ndarray) -> np.ndarray:
    """MinMaxUInt8 as Bagua's test states it, in float32."""
    f = np.float32
    scale = f(255) / (x.max() - x.min() + f(1e-7))
    upper = np.rint(x.max() * scale)
    lower = upper - f(255)
    level = np.minimum(np.rint(x * scale), upper)
    return ((level - lower).astype(np.uint8).astype(f) + lower) / scale


@settings(deadline=None)
@given(ROWS)
def test_minmax8_is_baguas(case: tuple[int, int, int, float]) -> None:
    rows = made(*case)
    ours = there_and_back(MinMax8(), rows)
    theirs = np.stack([bagua_uint8(row) for row in rows.numpy()])
    np.testing.assert_array_equal(ours.numpy(), theirs)


@settings(deadline=None)
@given(ROWS)
def test_minmax8_is_off_by_half_a_step_at_most(case: tuple[int, int, int, float]) -> None:
    rows = made(*case)
    span = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    slack = 4e-7 * rows.abs().amax(1, keepdim=True) * 255  # float32 in level numbers
    assert ((there_and_back(MinMax8(), rows) - rows).abs() <= (span + 1e-7) / 510 + slack).all()


@pytest.mark.parametrize("codec", [MinMax8(), Dithering(), Dithering(partition="natural"), OneBit(), TopK(9)], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e30])
def test_a_row_of_one_value(codec: Codec, value: float) -> None:
    rows = torch.full((3, 9), value)
    torch.testing.assert_close(there_and_back(codec, rows), rows, rtol=1e-6, atol=1e-7)


def by_blocks(rows: Tensor, block: int) -> list[Tensor]:
    return [rows[:, begin : begin + block] for begin in range(0, rows.shape[1], block)]


@settings(deadline=None)
@given(ROWS, st.sampled_from(DITHERINGS))
def test_dithering_goes_to_a_level_next_to_the_value(case: tuple[int, int, int, float], codec: Dithering) -> None:
    rows = made(*case)
    decoded = there_and_back(codec, rows)
    for part, got in zip(by_blocks(rows, codec.block), by_blocks(decoded, codec.block), strict=True):
        scale = part.double().norm(dim=1) if codec.normalize == "l2" else part.abs().amax(1)
        levels = torch.arange(1, codec.num_levels + 1, dtype=torch.float64)
        levels = levels / codec.num_levels if codec.partition == "linear" else 2.0 ** (levels - codec.num_levels)
        levels = torch.cat([-levels.flip(0), torch.zeros(1, dtype=torch.float64), levels])
        for x, y, s in zip(part.double(), got.double(), scale.double(), strict=True):
            at = (y[:, None] / s - levels).abs().argmin(1)
            torch.testing.assert_close(y / s, levels[at], rtol=1e-5, atol=1e-6)
            low, high = levels[(at - 1).clamp(min=0)] * s, levels[(at + 1).clamp(max=len(levels) - 1)] * s
            slack = 1e-5 * s
            assert ((low - slack <= x) & (x <= high + slack)).all()


@pytest.mark.parametrize("codec", DITHERINGS, ids=str)
def test_dithering_is_right_on_average(codec: Dithering) -> None:
    rows = made(1, 512, 3, 1.0)
    many = torch.stack([there_and_back(codec, rows, seed) for seed in range(300)])
    scale = torch.cat(
        [part.norm(dim=1) if codec.normalize == "l2" else part.abs().amax(1) for part in by_blocks(rows, codec.block)]
    )
    scale = scale.repeat_interleave(codec.block)[: rows.shape[1]]
    gap = scale / codec.num_levels
    if codec.partition == "natural":
        gap = torch.maximum(rows[0].abs(), scale * 2.0 ** (1 - codec.num_levels))
    assert ((many.mean(0) - rows).abs() < 5 * gap / 2 / 300**0.5 + 1e-6).all()


@settings(deadline=None)
@given(ROWS, st.sampled_from([8, 64, 1024]), st.booleans())
def test_onebit_is_signs_times_the_mean_magnitude(case: tuple[int, int, int, float], block: int, scaling: bool) -> None:
    rows = made(*case)
    rows[:, ::5] = 0.0
    decoded = there_and_back(OneBit(scaling, block), rows)
    for part, got in zip(by_blocks(rows, block), by_blocks(decoded, block), strict=True):
        signs = np.where(part.numpy() < 0, -1.0, 1.0)
        scale = np.abs(part.numpy().astype(np.float64)).mean(1, keepdims=True) if scaling else 1.0
        np.testing.assert_allclose(got.numpy(), signs * scale, rtol=1e-5)


@settings(deadline=None)
@given(ROWS, st.sampled_from([0.001, 0.3, 1, 5, 10_000]))
def test_topk_keeps_the_greatest(case: tuple[int, int, int, float], k: float) -> None:
    rows = made(*case)
    count = max(1, min(rows.shape[1], int(k) if k >= 1 else int(k * rows.shape[1])))
    for row, got in zip(rows.numpy(), there_and_back(TopK(k), rows).numpy(), strict=True):
        order = np.argsort(-np.abs(row), kind="stable")[:count]
        wanted = np.zeros_like(row)
        wanted[order] = row[order]
        np.testing.assert_array_equal(got, wanted)


@settings(deadline=None)
@given(ROWS, st.sampled_from([0.001, 0.3, 1, 5, 10_000]))
def test_randomk_keeps_what_it_drew(case: tuple[int, int, int, float], k: float) -> None:
    rows = made(*case)
    count = max(1, min(rows.shape[1], int(k) if k >= 1 else int(k * rows.shape[1])))
    decoded = there_and_back(RandomK(k), rows)
    kept = decoded != 0
    assert torch.equal(decoded[kept], rows[kept])
    assert (kept.sum(1) <= count).all() and kept.any(1).all()


def test_randomk_draws_every_place_alike() -> None:
    rows = torch.ones(1, 20)
    drawn = sum(there_and_back(RandomK(5), rows, seed) for seed in range(2000))
    chance = 1 - (1 - 1 / 20) ** 5
    assert ((drawn / 2000 - chance).abs() < 5 * (chance * (1 - chance) / 2000) ** 0.5).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_same_seed_gives_the_same_code(codec: Codec) -> None:
    rows = made(2, 1000, 5, 1.0)
    assert torch.equal(there_and_back(codec, rows, 1), there_and_back(codec, rows, 1))


@settings(deadline=None)
@given(ROWS, st.sampled_from(CODECS))
def test_codes_stay_inside_their_length(case: tuple[int, int, int, float], codec: Codec) -> None:
    rows = made(*case)
    length = codec.row_bytes(rows.shape[1])
    assert length % 8 == 0 or isinstance(codec, TopK | RandomK)
    around = torch.full((rows.shape[0], length + 16), 7, dtype=torch.uint8)
    codec.encode(rows, around[:, 8:-8], torch.Generator().manual_seed(0))
    assert (around[:, :8] == 7).all() and (around[:, -8:] == 7).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dithering(bits=3),
        lambda: Dithering(partition="odd"),  # type: ignore[arg-type]
        lambda: Dithering(normalize="l3"),  # type: ignore[arg-type]
        lambda: Dithering(block=12),
        lambda: OneBit(block=0),
        lambda: TopK(0),
        lambda: TopK(2.5),
        lambda: RandomK(-1),
        lambda: RandomK(float("inf")),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Codec]) -> None:
    with pytest.raises(UsageError):
        make()
