"""Codes of gradients against a few lines of numpy, and what is stated of their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.errors import UsageError
from guozhuang.exchange import kernels
from guozhuang.exchange.codecs import quantize8
from guozhuang.exchange.codecs.base import Codec
from guozhuang.exchange.codecs.dithering import Dithering, chances
from guozhuang.exchange.codecs.onebit import OneBit
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.codecs.topk import RandomK, TopK
from tests.drawing import examples

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
    byte = np.clip(level - lower, 0, 255).astype(
        np.uint8
    )  # theirs wraps where roundings of large numbers leave 0 .. 255
    return (byte.astype(f) + lower) / scale


@examples()
@given(ROWS)
def test_minmax8_is_baguas(case: tuple[int, int, int, float]) -> None:
    rows = made(*case)
    ours = there_and_back(MinMax8(), rows)
    theirs = np.stack([bagua_uint8(row) for row in rows.numpy()])
    np.testing.assert_array_equal(ours.numpy(), theirs)


@examples()
@given(ROWS)
def test_minmax8_is_off_by_half_a_step_at_most(case: tuple[int, int, int, float]) -> None:
    rows = made(*case)
    span = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    slack = 4e-7 * rows.abs().amax(1, keepdim=True) * 255  # float32 in level numbers
    assert ((there_and_back(MinMax8(), rows) - rows).abs() <= (span + 1e-7) / 510 + slack).all()


@examples()
@given(st.integers(0, 2**31), st.floats(1e-3, 1e38), st.floats(1e-9, 1e-5))
def test_minmax8_does_not_wrap_where_elements_are_next_to_alike(seed: int, scale: float, apart: float) -> None:
    rows = scale * (1 + apart * made(2, 50, seed, 1.0))
    span = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    assert ((there_and_back(MinMax8(), rows) - rows).abs() <= span + 1e-6 * scale).all()


def test_minmax8_where_the_least_rounds_below_the_lowest_level() -> None:
    random = torch.Generator().manual_seed(0)
    least = 100 * torch.rand(4000, 1, generator=random)
    rows = torch.cat([least, least + torch.rand(4000, 1, generator=random)], dim=1)
    scale, upper = quantize8._scale_and_upper(rows)
    assert ((rows[:, :1] * scale).round() - (upper - 255) < 0).any()
    assert ((there_and_back(MinMax8(), rows) - rows).abs() < 0.01).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("length", [1024, 1500, 3])
def test_onebit_of_huge_numbers_has_their_mean_magnitude(sign: int, length: int) -> None:
    rows = torch.full((2, length), sign * 3e38)
    rows[1] /= 3e38
    by_torch, codes = (torch.zeros(2, OneBit().row_bytes(length), dtype=torch.uint8) for _ in range(2))
    OneBit().encode_by_torch(rows, by_torch)
    OneBit().encode(rows, codes, torch.Generator())
    assert torch.equal(codes, by_torch)
    torch.testing.assert_close(there_and_back(OneBit(), rows), rows, rtol=1e-5, atol=0.0)
    lost = torch.zeros_like(rows)
    OneBit().encode_with_feedback(rows.clone(), codes, torch.Generator(), lost)
    assert lost.isfinite().all() and torch.equal(codes, by_torch)


@pytest.mark.parametrize("codec", [MinMax8(), Dithering(), Dithering(partition="natural"), OneBit(), TopK(9)], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e30])
def test_a_row_of_one_value(codec: Codec, value: float) -> None:
    rows = torch.full((3, 9), value)
    torch.testing.assert_close(there_and_back(codec, rows), rows, rtol=1e-6, atol=1e-7)


def by_blocks(rows: Tensor, block: int) -> list[Tensor]:
    return [rows[:, begin : begin + block] for begin in range(0, rows.shape[1], block)]


@examples()
@given(ROWS, st.sampled_from(DITHERINGS))
def test_dithering_goes_to_a_level_next_to_the_value(case: tuple[int, int, int, float], codec: Dithering) -> None:
    rows = made(*case)
    rows[:, ::5] = 0.0
    decoded = there_and_back(codec, rows)
    for part, got in zip(by_blocks(rows, codec.block), by_blocks(decoded, codec.block), strict=True):
        scale = part.double().norm(dim=1) if codec.normalize == "l2" else part.abs().amax(1)
        levels = torch.arange(1, codec.num_levels + 1, dtype=torch.float64)
        levels = levels / codec.num_levels if codec.partition == "linear" else 2.0 ** (levels - codec.num_levels)
        levels = torch.cat([-levels.flip(0), torch.zeros(1, dtype=torch.float64), levels])
        for x, y, s in zip(part.double(), got.double(), scale.double(), strict=True):
            if s == 0:
                assert not y.any()
                continue
            at = (y[:, None] / s - levels).abs().argmin(1)
            torch.testing.assert_close(y / s, levels[at], rtol=1e-5, atol=1e-6)
            low, high = levels[(at - 1).clamp(min=0)] * s, levels[(at + 1).clamp(max=len(levels) - 1)] * s
            slack = 1e-5 * s
            assert ((low - slack <= x) & (x <= high + slack)).all()


@pytest.mark.parametrize("codec", DITHERINGS, ids=str)
def test_dithering_is_right_on_average(codec: Dithering) -> None:
    rows = made(1, 512, 3, 1.0)
    rows[:, ::5] = 0.0
    many = torch.stack([there_and_back(codec, rows, seed) for seed in range(300)])
    scale = torch.cat(
        [part.norm(dim=1) if codec.normalize == "l2" else part.abs().amax(1) for part in by_blocks(rows, codec.block)]
    )
    scale = scale.repeat_interleave(codec.block)[: rows.shape[1]]
    gap = scale / codec.num_levels
    if codec.partition == "natural":
        gap = torch.maximum(rows[0].abs(), scale * 2.0 ** (1 - codec.num_levels))
    assert ((many.mean(0) - rows).abs() < 5 * gap / 2 / 300**0.5 + 1e-6).all()


@examples()
@given(ROWS, st.sampled_from([8, 64, 1024]), st.booleans())
def test_onebit_is_signs_times_the_mean_magnitude(case: tuple[int, int, int, float], block: int, scaling: bool) -> None:
    rows = made(*case)
    rows[:, ::5] = 0.0
    decoded = there_and_back(OneBit(scaling, block), rows)
    for part, got in zip(by_blocks(rows, block), by_blocks(decoded, block), strict=True):
        signs = np.where(part.numpy() < 0, -1.0, 1.0)
        scale = np.abs(part.numpy().astype(np.float64)).mean(1, keepdims=True) if scaling else 1.0
        np.testing.assert_allclose(got.numpy(), signs * scale, rtol=1e-5)


@examples()
@given(ROWS, st.sampled_from([0.001, 0.3, 1, 5, 10_000]))
def test_topk_keeps_the_greatest(case: tuple[int, int, int, float], k: float) -> None:
    rows = made(*case)
    count = max(1, min(rows.shape[1], int(k) if k >= 1 else int(k * rows.shape[1])))
    for row, got in zip(rows.numpy(), there_and_back(TopK(k), rows).numpy(), strict=True):
        order = np.argsort(-np.abs(row), kind="stable")[:count]
        wanted = np.zeros_like(row)
        wanted[order] = row[order]
        np.testing.assert_array_equal(got, wanted)


@examples()
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


@examples()
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


def test_topk_of_a_row_too_long_for_its_places_is_refused() -> None:
    assert TopK(5).row_bytes(2**31) == 40
    with pytest.raises(UsageError, match="at most 2147483648"):
        TopK(5).row_bytes(2**31 + 1)


BY_BLOCKS = st.sampled_from([8, 24, 40, 256])
KERNELS: dict[str, Callable[[int], Codec]] = {
    "quantize8": lambda block: MinMax8(),
    "dithering2": lambda block: Dithering(2, block=block),
    "dithering4": lambda block: Dithering(4, block=block),
    "dithering8": lambda block: Dithering(8, block=block),
    "natural2": lambda block: Dithering(2, "natural", block=block),
    "natural4": lambda block: Dithering(4, "natural", block=block),
    "natural8": lambda block: Dithering(8, "natural", block=block),
    "signs": lambda block: OneBit(block=block),
    "signs alone": lambda block: OneBit(scaling=False, block=block),
}


def encode_by_torch(codec: Codec, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
    if isinstance(codec, MinMax8):
        codec.encode_by_torch(rows, codes)
    elif isinstance(codec, Dithering):
        first, second = torch.randint(2**32, (2,), generator=random).tolist()
        codec.encode_by_torch(rows, codes, (first, second))
    else:
        assert isinstance(codec, OneBit)
        codec.encode_by_torch(rows, codes)


def test_the_kernels_were_built() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("the C modules are built on Linux only")
    assert kernels.serves(torch.zeros(1, 8), torch.zeros(1, 16, dtype=torch.uint8))


@examples()
@given(
    ROWS,
    st.sampled_from(sorted(KERNELS)),
    BY_BLOCKS,
    st.sampled_from(["random", "sparse", "alike", "near", "huge", "below zero"]),
)
def test_a_kernel_gives_the_bits_of_torch(case: tuple[int, int, int, float], name: str, block: int, kind: str) -> None:
    codec, wide = KERNELS[name](block), made(case[0], case[1] + 5, case[2], case[3])
    rows = wide[:, 2:-3]  # neither aligned nor one after the other
    if kind == "sparse":
        rows[:, ::3] = -0.0
        rows[:, 1:40] = 0.0
    elif kind == "alike":
        rows.fill_(case[3])
    elif kind == "near":
        rows.mul_(1e-6).add_(case[3])
    elif kind == "huge":
        if rows.any():  # zeros are none the larger for it, but NaN, which no codec is given
            rows.div_(float(rows.abs().max())).mul_(2e37)  # the quotient of both may be too large for float32
    elif kind == "below zero":
        rows.abs_().neg_()
    length = codec.row_bytes(rows.shape[1])
    ours, theirs = (torch.full((rows.shape[0], length + 16), 7, dtype=torch.uint8) for _ in range(2))
    codec.encode(rows, ours[:, 8:-8], torch.Generator().manual_seed(case[2]))
    encode_by_torch(codec, rows, theirs[:, 8:-8], torch.Generator().manual_seed(case[2]))
    assert torch.equal(ours, theirs)
    lost = made(case[0], rows.shape[1], case[2] + 1, case[3])
    before, kept = lost.clone(), lost.clone()
    codec.encode_with_feedback(rows.clone(), ours[:, 8:-8], torch.Generator().manual_seed(case[2]), lost)
    rows = rows + before
    encode_by_torch(codec, rows, theirs[:, 8:-8], torch.Generator().manual_seed(case[2]))
    codec.decode_by_torch(theirs[:, 8:-8], kept)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(lost, rows - kept, rtol=0, atol=0, equal_nan=True)  # a sum of huge ones may be infinite
    decoded, expected = torch.full_like(rows, torch.nan), torch.full_like(rows, torch.nan)
    codec.decode(ours[:, 8:-8], decoded)
    codec.decode_by_torch(theirs[:, 8:-8], expected)
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))
    mean, expected = torch.full_like(rows[:1], torch.nan), decoded[0].clone()
    codec.decode_mean(ours[:, 8:-8], mean)
    for row in decoded[1:]:
        expected += row
    assert torch.equal(mean[0], expected / rows.shape[0])


@pytest.mark.parametrize(
    "codec", [TopK(0.1), RandomK(0.1), Dithering(4, "natural"), Dithering(4, normalize="l2")], ids=str
)
def test_the_mean_of_codes_is_the_mean_of_what_they_stand_for(codec: Codec) -> None:
    rows = made(3, 500, 1, 1.0)
    codes = torch.zeros(3, codec.row_bytes(500), dtype=torch.uint8)
    codec.encode(rows, codes, torch.Generator().manual_seed(0))
    mean, decoded = torch.empty(1, 500), torch.empty(3, 500)
    codec.decode_mean(codes, mean)
    codec.decode(codes, decoded)
    torch.testing.assert_close(mean[0], decoded.mean(0), rtol=1e-6, atol=1e-7)


def test_chances_are_even_and_new_with_each_seed() -> None:
    count = 1 << 18
    one, other = chances(count, 1, 2), chances(count, 1, 3)
    for drawn in (one, other, chances(count, 2**32 - 1, 2**32 - 1)):
        assert drawn.min() >= 0 and drawn.max() < 1
        counts = torch.histc(drawn, 64, 0, 1)
        assert (counts - count / 64).abs().max() < 5 * (count / 64) ** 0.5
        for apart in (1, 2, 256):  # a neighbour says nothing
            assert torch.corrcoef(torch.stack([drawn[:-apart], drawn[apart:]]))[0, 1].abs() < 5 / count**0.5
    assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 5 / count**0.5
    first = [chances(1, seed, 7).item() for seed in range(1000)]
    assert abs(sum(first) / 1000 - 0.5) < 5 * 0.29 / 1000**0.5


@pytest.mark.parametrize(
    "wrong", [{"num_rows": 0}, {"length": 0}, {"block": 12}, {"bits": 3}, {"kind": 9}, {"task": -1}, {"lost": 8}]
)
def test_the_c_module_refuses_what_is_out_of_range(wrong: dict[str, int]) -> None:
    codes = pytest.importorskip("guozhuang.exchange.kernels._codes")
    rows, room = torch.zeros(1, 8), torch.zeros(1, 16, dtype=torch.uint8)
    told = {"kind": 0, "task": 0, "num_rows": 1, "length": 8, "bits": 8, "block": 8, "lost": 0} | wrong
    with pytest.raises(ValueError, match="must be in range"):
        codes.code(
            told["kind"], told["task"], (rows.data_ptr(), 8), (room.data_ptr(), 16), (told["lost"], 8),
            told["num_rows"], told["length"], (told["bits"], told["block"], 0, 0),
        )  # fmt: skip
