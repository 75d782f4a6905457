"""What a round of a program does, with torch operations: the oracle that tests hold _program.c and _reduce.c against."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from guozhuang.groups.shared_memory.program import (
    ELEMENT_BYTES,
    TORCH_DTYPES,
    ChunkPlace,
    ChunkStream,
    DType,
    Op,
    Program,
    StreamKind,
)

_RING_SLOTS = 3
_BLOCK_BYTES = 256 * 1024  # of one place: several fit in the second-level cache
_HALVES = (DType.F16, DType.BF16)
_FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)


def check(program: Program) -> None:
    """Raise a ValueError where a program makes no sense; the same rules as in C."""
    for stream in program.streams:
        _check_stream(stream)
    if program.rounds < program._replace(num_rounds=None).rounds:
        raise ValueError("num_rounds is less than the streams need")


def _check_stream(stream: ChunkStream) -> None:
    if stream.kind not in (StreamKind.COPY, StreamKind.REDUCE):
        raise ValueError("no such kind of stream")
    if stream.stage < 0 or stream.num_bytes < 0 or stream.chunk_bytes <= 0:
        raise ValueError("stage and num_bytes must not be negative, chunk_bytes must be positive")
    is_reduce = stream.kind == StreamKind.REDUCE
    if not stream.dsts or not stream.srcs or (not is_reduce and (len(stream.dsts) > 1 or len(stream.srcs) > 1)):
        raise ValueError("a copy has one dst and one src, a reduction at least one of each")
    element_bytes = 1
    if is_reduce:
        dtype, op = DType(stream.dtype), Op(stream.op)  # ValueError: no such dtype, no such op
        if dtype in _FLOATS and op in (Op.BAND, Op.BOR, Op.BXOR):
            raise ValueError("bitwise operations are for integers and bool")
        if dtype not in _FLOATS and stream.scale != 1.0:
            raise ValueError("scale must be 1.0 for integers and bool")
        element_bytes = ELEMENT_BYTES[dtype]
        if stream.num_bytes % element_bytes or stream.chunk_bytes % element_bytes:
            raise ValueError("num_bytes and chunk_bytes of a reduction must be multiples of the element size")
    for place in (*stream.dsts, *stream.srcs):
        if place.ring_bytes < 0 or place.base % element_bytes or place.ring_bytes % element_bytes:
            raise ValueError("base and ring_bytes must be multiples of the element size, ring_bytes not negative")


def work(program: Program, round_number: int) -> None:
    """What this rank does in a round."""
    for stream in program.streams:
        chunk = round_number - stream.stage
        if 0 <= chunk < stream.num_chunks:
            _work_on_chunk(stream, chunk)


def _work_on_chunk(stream: ChunkStream, chunk: int) -> None:
    num_bytes = min(stream.chunk_bytes, stream.num_bytes - chunk * stream.chunk_bytes)
    dsts = [_address(place, stream, chunk) for place in stream.dsts]
    srcs = [_address(place, stream, chunk) for place in stream.srcs]
    if stream.kind == StreamKind.COPY:
        copy(dsts[0], srcs[0], num_bytes)
        return
    dtype = DType(stream.dtype)
    combine(
        [_tensor_at(address, num_bytes, TORCH_DTYPES[dtype]) for address in dsts],
        [_tensor_at(address, num_bytes, TORCH_DTYPES[dtype]) for address in srcs],
        dtype,
        Op(stream.op),
        stream.scale,
    )


def _address(place: ChunkPlace, stream: ChunkStream, chunk: int) -> int:
    if place.ring_bytes:
        return place.base + chunk % _RING_SLOTS * place.ring_bytes
    return place.base + chunk * stream.chunk_bytes


def _tensor_at(address: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """A tensor over memory that the caller keeps mapped for as long as it uses it."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)


def copy(dst: int, src: int, num_bytes: int) -> None:
    """Copy between addresses; lets go of the GIL."""
    if num_bytes < 0:
        raise ValueError("num_bytes must not be negative")
    if dst != src:
        ctypes.memmove(dst, src, num_bytes)


@torch.no_grad()
def combine(dsts: Sequence[Tensor], srcs: Sequence[Tensor], dtype: DType, op: Op, scale: float) -> None:
    """Every dst becomes ``op(srcs) * scale``, block by block; a dst may be one of the srcs."""
    if dtype == DType.BOOL:
        op = {Op.SUM: Op.BOR, Op.MAX: Op.BOR, Op.PROD: Op.BAND, Op.MIN: Op.BAND}.get(op, op)
    block = _BLOCK_BYTES // ELEMENT_BYTES[dtype]
    for start in range(0, len(dsts[0]), block):
        parts = [src[start : start + block] for src in srcs]
        total = parts[0].float() if dtype in _HALVES else parts[0]
        for part in parts[1:]:
            total = _combine_two(total, part.float() if dtype in _HALVES else part, op)
        if scale != 1.0:
            total = total * scale
        for dst in dsts:
            dst[start : start + block].copy_(total)


def _combine_two(first: Tensor, second: Tensor, op: Op) -> Tensor:
    match op:
        case Op.SUM:
            return first + second
        case Op.PROD:
            return first * second
        case Op.MIN:  # torch.minimum leaves open which of two equal values (0.0 and -0.0) it returns
            return torch.where((second < first) | second.isnan(), second, first)
        case Op.MAX:
            return torch.where((second > first) | second.isnan(), second, first)
        case Op.BAND:
            return first & second
        case Op.BOR:
            return first | second
        case Op.BXOR:
            return first ^ second
