"""The programs of collectives, run for n ranks in one process: round by round, ranks in any order, as barriers allow."""

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guozhuang.groups.shared_memory import collectives
from guozhuang.groups.shared_memory.collectives import Combining, MemoryRange, Window
from guozhuang.groups.shared_memory.program import DTYPE_OF, ChunkPlace, Op, Program
from guozhuang.groups.shared_memory.programs import MOST_SEEN, REMEMBERED_BYTES, Programs, Stored, size_of
from tests.drawing import examples
from tests.pure import program_in_python

WINDOW_BYTES = 1 << 16
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


class Memory:
    """Windows of all ranks, one-shot or ring, kept alive."""

    def __init__(self, num_ranks: int) -> None:
        self.tensors = [torch.full((WINDOW_BYTES,), 0x5A, dtype=torch.uint8) for _ in range(num_ranks)]
        self.bases = [tensor.data_ptr() for tensor in self.tensors]

    def window(self, num_lanes: int, longest_bytes: int, chunk_bytes: int) -> Window:
        """A window for these pieces: one shot if ``chunk_bytes`` is 0, else a ring with chunks of this size."""
        if chunk_bytes == 0:
            window = collectives.one_shot_window(self.bases, WINDOW_BYTES, num_lanes, longest_bytes)
            assert window is not None
            return window
        lane_bytes = collectives.aligned(chunk_bytes)
        assert lane_bytes * num_lanes * collectives.NUM_SLOTS <= WINDOW_BYTES
        return Window(tuple(self.bases), lane_bytes, lane_bytes * num_lanes)


def touched(program: Program, number: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What a program reads and writes in a round, as intervals of addresses."""
    reads, writes = [], []
    for stream in program.streams:
        chunk = number - stream.stage
        if not 0 <= chunk < stream.num_chunks:
            continue
        length = min(stream.chunk_bytes, stream.num_bytes - chunk * stream.chunk_bytes)

        def interval(place: ChunkPlace, chunk: int = chunk, length: int = length, stride: int = stream.chunk_bytes):
            start = place.base + (chunk % 3 * place.ring_bytes if place.ring_bytes else chunk * stride)
            return start, start + length

        reads += [interval(place) for place in stream.srcs]
        writes += [interval(place) for place in stream.dsts]
    return reads, writes


def overlap(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)


def simulate(programs: Sequence[Program], order: random.Random) -> None:
    """Run the programs of all ranks; fail where two ranks touch the same bytes in one round and one of them writes."""
    rounds = {program.rounds for program in programs}
    assert len(rounds) == 1, "ranks would wait in different numbers of barriers"
    assert len({program.trailing_barrier for program in programs}) == 1
    for program in programs:
        program_in_python.check(program)
    for number in range(rounds.pop()):
        ranks = list(range(len(programs)))
        accesses = [touched(program, number) for program in programs]
        for a in ranks:
            for b in ranks[:a]:
                (reads_a, writes_a), (reads_b, writes_b) = accesses[a], accesses[b]
                assert not overlap(writes_a, reads_b + writes_b), f"ranks {a} and {b} race in round {number}"
                assert not overlap(writes_b, reads_a), f"ranks {b} and {a} race in round {number}"
        order.shuffle(ranks)
        for rank in ranks:
            program_in_python.work(programs[rank], number)


def values(num_elements: int, dtype: torch.dtype, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * rank + num_elements)
    if dtype == torch.bool:
        return torch.randint(0, 2, (num_elements,), generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(num_elements, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-50, 50, (num_elements,), generator=generator).to(dtype)


def piece(tensor: Tensor) -> MemoryRange:
    return MemoryRange(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


def combined(tensors: Sequence[Tensor], op: Op, scale: float) -> Tensor:
    """The boring twin: in rank order, 16-bit floats in float32."""
    dtype = tensors[0].dtype
    wide = [t.float() if dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
    if dtype == torch.bool:
        return torch.stack(wide).any(0) if op in (Op.SUM, Op.MAX) else torch.stack(wide).all(0)
    steps: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
        Op.SUM: torch.add,
        Op.PROD: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
    }
    total = wide[0]
    for each in wide[1:]:
        total = steps[op](total, each)
    return (total * scale if scale != 1.0 else total).to(dtype)


ways = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 5),
        "num_elements": st.one_of(st.integers(0, 40), st.integers(41, 1500)),
        "dtype": st.sampled_from(DTYPES),
        "chunk_bytes": st.sampled_from([0, 64, 128, 640]),
        "seed": st.integers(0, 999),
    }
)


@examples(150)
@given(ways, st.sampled_from([Op.SUM, Op.PROD, Op.MIN, Op.MAX]), st.booleans(), st.integers(0, 4))
def test_reductions_of_equal_tensors(way, op, to_root, root) -> None:
    """One shot, staged and in place give what the twin gives, on all ranks or on the root only, with the same bits."""
    n, dtype = way["num_ranks"], way["dtype"]
    root = root % n if to_root else None
    scale = 1.0 / n if dtype.is_floating_point and op == Op.SUM else 1.0
    how = Combining(DTYPE_OF[dtype], op, scale)
    inputs = [values(way["num_elements"], dtype, rank) for rank in range(n)]
    expected = combined(inputs, op, scale)
    num_bytes = piece(inputs[0]).num_bytes
    for kind in ("through a window", "in place"):
        memory, tensors = Memory(n), [tensor.clone() for tensor in inputs]
        if kind == "in place":
            addresses = [tensor.data_ptr() for tensor in tensors]
            programs = [collectives.reduce_in_place(addresses, rank, num_bytes, how, root) for rank in range(n)]
        elif way["chunk_bytes"] == 0:
            window = memory.window(1, num_bytes, 0)
            programs = [collectives.reduce_one_shot(window, r, piece(tensors[r]), how, root) for r in range(n)]
        else:
            window = memory.window(n, num_bytes, way["chunk_bytes"])
            programs = [collectives.reduce_staged(window, r, piece(tensors[r]), how, root) for r in range(n)]
        simulate(programs, random.Random(way["seed"]))
        for rank, (tensor, before) in enumerate(zip(tensors, inputs, strict=True)):
            wanted = expected if root in (None, rank) else before
            assert torch.equal(tensor, wanted), f"{kind}, rank {rank}"


@examples(80)
@given(ways, st.lists(st.integers(0, 300), min_size=5, max_size=5), st.booleans())
def test_reduce_scatter(way, counts, uneven) -> None:
    n, dtype = way["num_ranks"], way["dtype"]
    counts = counts[:n] if uneven else [counts[0]] * n
    how = Combining(DTYPE_OF[dtype], Op.SUM, 1.0)
    inputs = [[values(count, dtype, rank) for count in counts] for rank in range(n)]
    longest = max(counts) * dtype.itemsize
    memory, outputs = Memory(n), [torch.zeros(count, dtype=dtype) for count in counts]
    window = memory.window(n, longest, way["chunk_bytes"])
    programs = [
        collectives.reduce_scatter(window, r, [piece(t) for t in inputs[r]], outputs[r].data_ptr(), how, longest)
        for r in range(n)
    ]
    simulate(programs, random.Random(way["seed"]))
    direct = [torch.zeros(count, dtype=dtype) for count in counts]
    programs = [
        collectives.reduce_scatter_in_place(
            [inputs[peer][r].data_ptr() for peer in range(n)], direct[r].data_ptr(), piece(direct[r]).num_bytes, how
        )
        for r in range(n)
    ]
    simulate(programs, random.Random(way["seed"]))
    for rank in range(n):
        expected = combined([inputs[peer][rank] for peer in range(n)], Op.SUM, 1.0)
        assert torch.equal(outputs[rank], expected)
        assert torch.equal(direct[rank], expected)


@examples(80)
@given(ways, st.lists(st.integers(0, 300), min_size=25, max_size=25))
def test_all_to_all(way, counts) -> None:
    """Every pair of ranks its own size; gather and scatter are the same with most sizes nought."""
    n, dtype = way["num_ranks"], way["dtype"]
    sizes = [[counts[5 * giver + taker] for taker in range(n)] for giver in range(n)]
    inputs = [[values(sizes[g][t], dtype, 7 * g + t) for t in range(n)] for g in range(n)]
    outputs = [[torch.zeros(sizes[g][t], dtype=dtype) for g in range(n)] for t in range(n)]
    longest = max(max(row) for row in sizes) * dtype.itemsize
    window = Memory(n)
    programs = [
        collectives.exchange(
            window.window(n, longest, way["chunk_bytes"]),
            rank,
            collectives.Moves(
                n,
                [(taker, piece(inputs[rank][taker])) for taker in range(n) if taker != rank],
                [(giver, rank, piece(outputs[rank][giver])) for giver in range(n) if giver != rank],
                [(inputs[rank][rank].data_ptr(), piece(outputs[rank][rank]))],
                longest,
            ),
        )
        for rank in range(n)
    ]
    simulate(programs, random.Random(way["seed"]))
    for taker in range(n):
        for giver in range(n):
            assert torch.equal(outputs[taker][giver], inputs[giver][taker])


@examples(60)
@given(ways, st.lists(st.integers(0, 1500), min_size=5, max_size=5))
def test_all_gather_and_fetch(way, counts) -> None:
    n, dtype = way["num_ranks"], way["dtype"]
    inputs = [values(counts[rank], dtype, rank) for rank in range(n)]
    longest = max(counts[:n]) * dtype.itemsize
    memory = Memory(n)
    window = memory.window(1, longest, way["chunk_bytes"])
    outputs = [[torch.zeros(count, dtype=dtype) for count in counts[:n]] for _ in range(n)]
    programs = [
        collectives.exchange(
            window,
            rank,
            collectives.Moves(
                1,
                [(0, piece(inputs[rank]))],
                [(peer, 0, piece(outputs[rank][peer])) for peer in range(n) if peer != rank],
                [(inputs[rank].data_ptr(), piece(outputs[rank][rank]))],
                longest,
            ),
        )
        for rank in range(n)
    ]
    simulate(programs, random.Random(way["seed"]))
    fetched = [[torch.zeros(count, dtype=dtype) for count in counts[:n]] for _ in range(n)]
    simulate(
        [
            collectives.fetch([(inputs[peer].data_ptr(), piece(fetched[rank][peer])) for peer in range(n)])
            for rank in range(n)
        ],
        random.Random(way["seed"]),
    )
    for rank in range(n):
        for peer in range(n):
            assert torch.equal(outputs[rank][peer], inputs[peer])
            assert torch.equal(fetched[rank][peer], inputs[peer])


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_parts_cover_everything_once_on_cache_lines(num_bytes, num_parts) -> None:
    parts = collectives.parts_of(num_bytes, num_parts)
    assert len(parts) == num_parts
    end = 0
    for offset, length in parts:
        assert offset == end and length >= 0
        assert offset % collectives.ALIGNMENT_BYTES == 0 or offset == num_bytes
        end += length
    assert end == num_bytes
    assert parts[0][1] == max(length for _, length in parts), "the first part is the longest: it tells the rounds"


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("num_lanes", [1, 2, 7, 64, 1000])
def test_a_ring_holds_its_lanes_three_times(num_lanes: int, crowded: bool) -> None:
    ring_bytes = 32 << 20
    window = collectives.ring_window([0], ring_bytes, num_lanes, 1 << 30, crowded)
    assert window.lane_bytes % collectives.ALIGNMENT_BYTES == 0
    assert window.slot_bytes == num_lanes * window.lane_bytes
    assert collectives.NUM_SLOTS * window.slot_bytes <= ring_bytes


def test_own_part_never_travels() -> None:
    """Bytes that a staged all_reduce moves on a rank: others' parts in, own part combined, others' parts out."""
    n, num_bytes = 4, 64 * 400
    memory = Memory(n)
    window = memory.window(n, num_bytes, 640)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    how = Combining(DTYPE_OF[torch.uint8], Op.SUM, 1.0)
    program = collectives.reduce_staged(window, 1, piece(tensor), how, None)
    moved = {stage: sum(s.num_bytes for s in program.streams if s.stage == stage) for stage in (0, 1, 2)}
    assert moved == {0: num_bytes * 3 // 4, 1: num_bytes // 4, 2: num_bytes * 3 // 4}


def test_what_does_not_fit_one_shot() -> None:
    assert collectives.one_shot_window([0, 0], 65536, 1, 65536) is not None
    assert collectives.one_shot_window([0, 0], 65536, 1, 65537) is None
    assert collectives.one_shot_window([0, 0], 65536, 2, 32769) is None


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_remembered_programs_are_bounded_by_what_they_take(num_ranks: int) -> None:
    def build(i: int) -> Program:
        bases = [10**14 + rank * 10**9 for rank in range(num_ranks)]
        window = collectives.ring_window(bases, 32 << 20, num_ranks, 1 << 20, False)
        return collectives.reduce_staged(
            window, 0, MemoryRange(10**13 + i * 10**8, num_ranks << 20), Combining(0, 0, 1.0), None
        )

    tracemalloc.start()
    programs = [build(i) for i in range(20)]
    taken = tracemalloc.get_traced_memory()[0] / 20
    tracemalloc.stop()
    assert taken / 2 < size_of(Stored((), programs[0])) < taken * 3
    store = Programs()
    num = REMEMBERED_BYTES // size_of(Stored((), programs[0])) + 5
    for i in range(num):
        for _ in range(2):
            assert store.of((i,), lambda i=i: programs[i % 20]) is programs[i % 20]
    assert sum(size_of(each) for each in store._stored.values()) <= REMEMBERED_BYTES
    last = ((num - 1,), programs[(num - 1) % 20])
    assert store.of(last[0], lambda: build(0)) is last[1], "what came last is still there"
    for i in range(3 * MOST_SEEN):
        store.of((i, "once"), lambda: programs[0])
    assert store.of(last[0], lambda: build(0)) is last[1], "keys that come only once push nothing out"
    assert len(store._seen) <= MOST_SEEN
