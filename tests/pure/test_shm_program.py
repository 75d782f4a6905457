"""Programs and their arithmetic: the C engine against an oracle in Python, bit by bit, and both against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.groups.shared_memory import _engine
from guozhuang.groups.shared_memory import engine as control
from guozhuang.groups.shared_memory.program import (
    DTYPE_OF,
    ELEMENT_BYTES,
    TORCH_DTYPES,
    ChunkPlace,
    ChunkStream,
    DType,
    Op,
    Program,
    StreamKind,
)
from tests.drawing import examples
from tests.pure import program_in_python

FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)
BITWISE = (Op.BAND, Op.BOR, Op.BXOR)
PAIRS = [(d, o) for d in DType for o in Op if not (d in FLOATS and o in BITWISE)]


def work_in_python(program: Program) -> None:
    program_in_python.check(program)
    for number in range(program.rounds):
        program_in_python.work(program, number)


WORKERS = [pytest.param(_engine.work, id="c"), pytest.param(work_in_python, id="python")]
Work = Callable[[Program], None]


def made_up(dtype: DType, num_elements: int, seed: int) -> Tensor:
    """Random bits, so infinities, NaN and denormal numbers too; 0 and 1 for bool."""
    bits = np.random.default_rng(seed).integers(0, 256, num_elements * ELEMENT_BYTES[dtype], dtype=np.uint8)
    tensor = torch.from_numpy(bits & 1 if dtype == DType.BOOL else bits).view(TORCH_DTYPES[dtype])
    if dtype in FLOATS and seed % 2:
        tensor = torch.from_numpy(np.random.default_rng(seed).normal(size=num_elements)).to(TORCH_DTYPES[dtype])
    return tensor


def place(tensor: Tensor) -> ChunkPlace:
    return ChunkPlace(tensor.data_ptr())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, but for the payload of NaN."""
    nan = a.isnan()
    return bool(torch.equal(nan, b.isnan())) and torch.equal(
        torch.where(nan, torch.zeros_like(a), a).view(torch.uint8),
        torch.where(nan, torch.zeros_like(b), b).view(torch.uint8),
    )


def reduction(
    dsts: list[Tensor], srcs: list[Tensor], op: Op, scale: float = 1.0, chunk_bytes: int | None = None
) -> Program:
    num_bytes = srcs[0].nbytes
    places = tuple(map(place, dsts)), tuple(map(place, srcs))
    return Program(
        (
            ChunkStream(
                StreamKind.REDUCE,
                0,
                num_bytes,
                chunk_bytes or max(num_bytes, 1),
                *places,
                DTYPE_OF[srcs[0].dtype],
                op,
                scale,
            ),
        )
    )


def test_c_and_python_agree_on_the_layout() -> None:
    first, second = control.DESCRIPTOR_OFFSETS
    assert (
        control.MAGIC,
        control.MAGIC_OFFSET,
        control.ARRIVED_OFFSET,
        control.ASLEEP_OFFSET,
        control.STATE_OFFSET,
        control.DOING_OFFSET,
        control.DOING_BYTES,
        first,
        second,
        control.DESCRIPTOR_BYTES,
        control.PRIVATE_BYTES,
    ) == _engine.LAYOUT


def test_areas_of_the_main_segment_do_not_overlap() -> None:
    first, second = control.DESCRIPTOR_OFFSETS
    described = control.DESCRIPTOR_BYTES + control.PRIVATE_BYTES
    edges = [
        control.DOING_OFFSET + control.DOING_BYTES + 1,
        first,
        first + described,
        second,
        second + described,
        control.CONTROL_BYTES,
        control.ONE_SHOT_OFFSET,
        control.ONE_SHOT_OFFSET + control.NUM_ONE_SHOT_AREAS * control.ONE_SHOT_BYTES,
        control.RING_OFFSET,
        control.RING_OFFSET + control.RING_BYTES,
        control.MAIN_BYTES,
    ]
    assert edges == sorted(edges)
    assert not any(offset % 64 for offset in (first, second, control.ONE_SHOT_OFFSET, control.RING_OFFSET))


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda v: v.name)
@pytest.mark.parametrize("num_srcs", [1, 2, 3, 5])
def test_c_equals_the_oracle(dtype: DType, op: Op, num_srcs: int) -> None:
    num_elements = 20_011 // ELEMENT_BYTES[dtype]  # several blocks and an odd end
    scale = 1 / 3 if dtype in FLOATS and num_srcs % 2 else 1.0
    results = []
    for work in (_engine.work, work_in_python):
        srcs = [made_up(dtype, num_elements, seed) for seed in range(num_srcs)]
        dsts = [srcs[-1], torch.empty_like(srcs[0]), srcs[0]]  # in place, and elsewhere
        work(reduction(dsts, srcs, op, scale))
        assert same_bits(dsts[0], dsts[1]) and same_bits(dsts[0], dsts[2])
        results.append(dsts[1])
    assert same_bits(*results)


@pytest.mark.parametrize("work", WORKERS)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda d: d.name)
def test_every_half_converts_as_torch_does(work: Work, dtype: DType) -> None:
    # Every bit pattern, alone: unpacked, times 1 + 2**-9 in float32, rounded once.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])
    nothing = torch.zeros_like(every)
    for scale in (1.0, 1 + 2**-9, 2.0**-8, 2.0**-20, 2.0**12):
        dst = torch.empty_like(every)
        work(reduction([dst], [every, nothing], Op.SUM, scale))
        expected = ((every.float() + 0.0) * scale).to(every.dtype)
        assert same_bits(dst, expected), scale


@pytest.mark.parametrize("work", WORKERS)
def test_halves_are_rounded_once(work: Work) -> None:
    # 2048 + 1 rounds to 2048 in float16 each time; the sum of all is 2052.
    srcs = [torch.tensor([v], dtype=torch.float16) for v in (2048.0, 1.0, 1.0, 1.0, 1.0)]
    dst = torch.empty_like(srcs[0])
    work(reduction([dst], srcs, Op.SUM))
    assert dst.item() == 2052.0
    large = torch.full((1,), 60000.0, dtype=torch.float16)
    work(reduction([dst], [large, large], Op.SUM, scale=0.5))
    assert dst.item() == 60000.0  # the sum alone would be infinite


@pytest.mark.parametrize("work", WORKERS)
def test_order_wrap_nan_and_bool(work: Work) -> None:
    def reduced(op: Op, *values: Tensor) -> Tensor:
        dst = torch.empty_like(values[0])
        work(reduction([dst], list(values), op))
        return dst

    big, small = torch.tensor([1e8]), torch.tensor([1.0])
    assert reduced(Op.SUM, big, small, -big).item() == 0.0  # (1e8 + 1) - 1e8 in float32, in this order
    assert reduced(Op.SUM, big, -big, small).item() == 1.0
    assert reduced(Op.SUM, torch.tensor([127], dtype=torch.int8), torch.tensor([1], dtype=torch.int8)).item() == -128
    most = torch.tensor([-1], dtype=torch.int16)
    assert reduced(Op.PROD, most, most).item() == 1
    assert reduced(Op.PROD, torch.tensor([2**62]), torch.tensor([6])).item() == -(2**63)
    nan, one = torch.tensor([float("nan")]), torch.tensor([1.0])
    for op in (Op.MIN, Op.MAX):
        assert reduced(op, nan, one).isnan().item() and reduced(op, one, nan, one).isnan().item()
    assert reduced(Op.MIN, torch.tensor([-3], dtype=torch.int8), torch.tensor([2], dtype=torch.int8)).item() == -3
    yes, no = torch.tensor([True]), torch.tensor([False])
    assert reduced(Op.SUM, yes, yes).view(torch.uint8).item() == 1
    assert (
        not reduced(Op.PROD, yes, no).item() and not reduced(Op.MIN, yes, no).item() and reduced(Op.MAX, no, yes).item()
    )


@pytest.mark.parametrize("work", WORKERS)
@examples(60)
@given(data=st.data())
def test_streams_through_a_ring(work: Work, data: st.DataObject) -> None:
    """Copy into a ring of three, reduce out of it one stage later: the result is that of whole tensors."""
    num_elements = data.draw(st.integers(1, 3000), "num_elements")
    chunk = data.draw(st.integers(max(1, num_elements // 40), 3000), "chunk")
    mine, other = torch.randn(num_elements), torch.randn(num_elements)
    expected = (mine + other) * 0.5
    ring = torch.full((3 * (chunk + 16),), float("nan"))
    in_ring = ChunkPlace(ring.data_ptr(), (chunk + 16) * 4)
    streams = (
        ChunkStream(StreamKind.COPY, 0, num_elements * 4, chunk * 4, (in_ring,), (place(other),)),
        ChunkStream(
            StreamKind.REDUCE,
            1,
            num_elements * 4,
            chunk * 4,
            (place(mine),),
            (place(mine), in_ring),
            DType.F32,
            Op.SUM,
            0.5,
        ),
    )
    program = Program(streams)
    assert program.rounds == -(-num_elements // chunk) + 1
    work(program)
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("work", WORKERS)
def test_programs_that_make_no_sense_are_refused(work: Work) -> None:
    a, b = torch.zeros(8), torch.ones(8)
    good = reduction([a], [b], Op.SUM).streams[0]
    wrong = [
        good._replace(kind=7),
        good._replace(stage=-1),
        good._replace(num_bytes=30),
        good._replace(num_bytes=-4),
        good._replace(chunk_bytes=0),
        good._replace(chunk_bytes=6),
        good._replace(dsts=()),
        good._replace(srcs=()),
        good._replace(srcs=(ChunkPlace(b.data_ptr() + 2),)),
        good._replace(srcs=(ChunkPlace(b.data_ptr(), -4),)),
        good._replace(dtype=99),
        good._replace(op=99),
        good._replace(op=Op.BOR),
        good._replace(dtype=DType.I32, scale=0.5),
        good._replace(kind=StreamKind.COPY, srcs=(place(b), place(b))),
    ]
    for stream in wrong:
        with pytest.raises(ValueError):
            work(Program((stream,)))
    with pytest.raises(ValueError):
        work(Program((good._replace(chunk_bytes=8),), num_rounds=3))
    assert not a.any(), "a refused program worked on memory"
    work(Program((good,)))
    assert torch.equal(a, b)


def test_rounds() -> None:
    def stream(stage: int, num_bytes: int, chunk_bytes: int) -> ChunkStream:
        return ChunkStream(StreamKind.COPY, stage, num_bytes, chunk_bytes, (ChunkPlace(0),), (ChunkPlace(0),))

    assert Program().rounds == 1 and Program().num_barriers == 0
    assert Program(trailing_barrier=True).num_barriers == 1
    assert Program((stream(0, 100, 30), stream(2, 10, 30))).rounds == 4
    assert Program((stream(0, 10, 30), stream(2, 40, 30))).rounds == 4
    assert Program((stream(5, 0, 30),)).rounds == 1, "a stream of no bytes has no chunk"
    assert Program((stream(0, 10, 30),), num_rounds=6).num_barriers == 5


def test_denormal_numbers_survive_where_torch_flushes_them() -> None:
    code = """
import torch
from guozhuang.groups.shared_memory import _engine
from guozhuang.groups.shared_memory.program import *
tiny = torch.ones(21, dtype=torch.int16).view(torch.float16)
dst = torch.empty_like(tiny)
torch.set_flush_denormal(True)
places = (ChunkPlace(dst.data_ptr()),), (ChunkPlace(tiny.data_ptr()),) * 2
_engine.work(Program((ChunkStream(StreamKind.REDUCE, 0, 42, 42, *places, DType.F16),)))
assert (dst.view(torch.int16) == 2).all(), dst.view(torch.int16)
for dtype, code in ((torch.float32, DType.F32), (torch.float64, DType.F64)):
    number = torch.int32 if dtype == torch.float32 else torch.int64
    tiny, dst = torch.ones(21, dtype=number), torch.zeros(21, dtype=number)
    places = (ChunkPlace(dst.data_ptr()),), (ChunkPlace(tiny.data_ptr()),) * 2
    num_bytes = 21 * dtype.itemsize
    _engine.work(Program((ChunkStream(StreamKind.REDUCE, 0, num_bytes, num_bytes, *places, code),)))
    assert (dst == 2).all(), dst
from guozhuang.groups.shared_memory import sparse
tiny, dst, marks = torch.ones(1024, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32), torch.ones(2, dtype=torch.uint8)
sparse.add(dst.data_ptr(), (tiny.data_ptr(),) * 2, (marks.data_ptr(),) * 2, 4096, DType.F32, 1.0)
assert (dst == 2).all(), dst
assert (torch.ones(9, dtype=torch.int32).view(torch.float32) * 2 == 0).all()  # torch's own mode is as it was
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=60)
