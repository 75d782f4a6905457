"""Sends only the rows of an embedding's gradient that some rank used; other gradients go through an inner exchange.

A batch of words uses a few hundred rows of a table with tens of thousands, but ``torch.nn.Embedding`` still gives a dense
gradient that is mostly zeros. Here each rank finds its rows that are not zero, an all-gather distributes them, and each rank
sums them.
Formula: g = sum over ranks r of (g_r / n), row by row in the order of ranks; rows that are zero on all ranks are not sent.
If the rows of all ranks have more bytes than the table (a tied output layer), the table goes through the inner exchange too.
Error: rounding only for rows, with equal bits on all ranks; that of the inner exchange for the other gradients.
Traffic: by an all-gather of k rows and their numbers, (n-1) k (4 + the bytes of a row) for the largest k of any rank, and an
all-reduce of 8 bytes per table for k itself; that of the inner exchange for the other gradients.
Source: hybrid of sparse and dense gradients, Kim et al. 2019, Parallax, EuroSys, arXiv:1808.02621.

[Note: who starts the inner exchange] Whether a table is sent by rows is known only after the all-reduce of k, so each bucket is
processed in the thread of a lane. The inner exchange must be started for its parts in one order on all ranks. So the lane's
thread starts all of them, and the inner exchange is prepared with the lane's group, in which nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..groups.serial import Lane, SerialWork
from ..watch.waits import waits
from ..world import versions
from .allreduce import AllReduce
from .around import AroundGradients
from .base import GradientExchange, Work
from .kernels import used_rows

# A matrix counts as a table, sent in a message of its own, if it has at least this many bytes (smaller ones are not worth the
# extra all-reduce) and at least this many rows per column (weights of other layers than embeddings have fewer).
_LEAST_BYTES, _LEAST_RATIO = 1 << 18, 16
_ITEM_BYTES = (2, 4, 8)


@dataclass
class _Piece:
    """A part of a bucket: one table, or a run of adjacent parameters.

    Attributes:
        part: the piece as a bucket, which shares the memory of the whole bucket during its exchange, and is empty otherwise.
        first: index of the piece's first parameter in the bucket.
        start: index of the piece's first element in the bucket's flat tensor.
        num_elements: the number of elements.
        is_table: whether the piece is a table, which may be sent by rows.
    """

    part: Bucket
    first: int
    start: int
    num_elements: int
    is_table: bool

    def share(self, bucket: Bucket) -> None:
        """Let the part share the memory that the whole bucket has now."""
        # A bucket of one piece goes as it is: works may hold their tensors until the next step, and a view would count as the
        # program's, so that the bucket would take new memory then.
        is_whole = self.num_elements == bucket.flat.numel()
        self.part.flat = bucket.flat if is_whole else bucket.flat.narrow(0, self.start, self.num_elements)
        self.part.views = bucket.views[self.first : self.first + len(self.part.parameters)]

    def let_go(self) -> None:
        """Let go of the bucket's memory, so that it counts as held by nobody else and is used again."""
        self.part.flat, self.part.views = self.part.flat.new_empty(0), []


@dataclass
class SparseRowsState:
    """The state of :class:`SparseRows`, made once per bucket layout.

    Attributes:
        pieces: the pieces of each bucket, by bucket index.
        inner: the state of the inner exchange.
        lane: the thread and the group that process the buckets; None for one rank.
    """

    group: dist.ProcessGroup
    pieces: Mapping[int, Sequence[_Piece]]
    inner: Any
    lane: Lane | None


@dataclass
class _Pieces:
    """The work of one bucket: first ``job``, which starts the pieces, then the works of the inner exchange."""

    pieces: Sequence[_Piece]
    job: SerialWork | None = None
    works: list[Work] = field(default_factory=list)

    def wait(self) -> None:
        if not self.pieces:  # waited for already
            return
        if self.job is not None:
            self.job.wait()
        for work in self.works:
            waits.for_work(work)
        for piece in self.pieces:
            piece.let_go()
        self.pieces = ()

    def is_completed(self) -> bool:
        return (self.job is None or self.job.is_completed()) and all(work.is_completed() for work in self.works)


@dataclass(frozen=True)
class SparseRows(AroundGradients[SparseRowsState]):
    """Sends the used rows of tables (such as embeddings), and other gradients through ``inner``. Exact if ``inner`` is.

    A table is a matrix of 256 KiB or more with at least 16 times as many rows as columns. Each step decides again, from the
    number of rows that are not zero, whether sending rows is cheaper.

    Args:
        inner: the exchange of parameters that are no tables, and of tables in steps in which many rows were used.

    Raises:
        UsageError: ``inner`` is no gradient exchange, or its ``one_round`` is False (a communication hook).
    """

    inner: GradientExchange[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.inner, GradientExchange) or not self.inner.one_round:
            fix = "give AllReduce(), or a code such as Compressed(MinMax8())"
            raise UsageError(explain("SparseRows needs an exchange for what is no table", value=self.inner, fix=fix))

    @override
    def inner_state(self, state: SparseRowsState) -> Any:
        return state.inner

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: SparseRowsState | None = None
    ) -> SparseRowsState:
        pieces: dict[int, list[_Piece]] = {}
        num_parts = 0
        for bucket in buckets:
            bucket.hold()  # for the views of its parts
            pieces[bucket.index] = _cut(bucket, num_parts)
            num_parts += len(pieces[bucket.index])
        parts = [piece.part for some in pieces.values() for piece in some]
        for part in parts:
            part.is_last = part.index == num_parts - 1
        lane = before.lane if before is not None else Lane(group) if group.size() > 1 else None
        inner = self.inner.prepare(
            parts, group if lane is None else lane.group, None if before is None else before.inner
        )
        for some in pieces.values():
            for piece in some:
                piece.let_go()
        return SparseRowsState(group, pieces, inner, lane)

    @override
    def start(self, bucket: Bucket, state: SparseRowsState, step: int) -> Work:
        pieces = state.pieces[bucket.index]
        for piece in pieces:
            piece.share(bucket)
        works = _Pieces(pieces)
        if state.lane is None:
            works.works += [self.inner.start(piece.part, state.inner, step) for piece in pieces]
        else:
            works.job = state.lane.run(
                lambda: self._start_pieces(pieces, state, step, works.works), [bucket.flat.device]
            )
        return works

    def _start_pieces(self, pieces: Sequence[_Piece], state: SparseRowsState, step: int, works: list[Work]) -> None:
        assert state.lane is not None
        group = state.lane.group
        tables = [piece for piece in pieces if piece.is_table]
        own = [used_rows(piece.part.views[0]) for piece in tables]
        most = _largest([len(rows) for rows in own], group, pieces[0].part.flat.device)
        by_rows = {
            id(piece): (rows, num)
            for piece, rows, num in zip(tables, own, most, strict=True)
            if self._pays(piece, num, group)
        }
        works += [self.inner.start(piece.part, state.inner, step) for piece in pieces if id(piece) not in by_rows]
        factor = 1 / (group.size() * self.inner.input_scale(group.size()))
        for piece in tables:
            if id(piece) in by_rows:
                _sum_rows(piece.part.views[0], *by_rows[id(piece)], factor, group)

    def _pays(self, piece: _Piece, num_rows: int, group: dist.ProcessGroup) -> bool:
        table, size = piece.part.views[0], group.size()
        whole = self.inner.traffic(table.numel(), table.element_size(), size)
        if whole is None:
            whole = AllReduce().traffic(table.numel(), table.element_size(), size)
        return (size - 1) * num_rows * (4 + table.shape[1] * table.element_size()) < whole

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return None for more than one rank: the bytes that are sent then depend on how many rows the step used."""
        return 0 if world_size == 1 else None


def _cut(bucket: Bucket, num_before: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    run: list[int] = []
    offset = start = 0

    def end(members: list[int], is_table: bool) -> None:
        names, parameters = [bucket.names[i] for i in members], [bucket.parameters[i] for i in members]
        begin, count = start, sum(p.numel() for p in parameters)
        # The part has no memory of its own: its flat tensor is a view of the whole bucket's.
        index = num_before + len(pieces)
        part = Bucket(index, False, names, parameters, allocate=lambda *_: bucket.flat.narrow(0, begin, count))
        pieces.append(_Piece(part, members[0], begin, count, is_table))

    for i, parameter in enumerate(bucket.parameters):
        if _may_be_table(bucket.views[i]):
            if run:
                end(run, False)
            run, start = [], offset
            end([i], True)
            start = offset + parameter.numel()
        else:
            run.append(i)
        offset += parameter.numel()
    if run:
        end(run, False)
    return pieces


def _may_be_table(view: Tensor) -> bool:
    is_matrix = (
        view.dim() == 2 and view.is_contiguous() and view.element_size() in _ITEM_BYTES and not view.is_complex()
    )
    if not is_matrix or not view.is_floating_point() or view.shape[0] < _LEAST_RATIO * view.shape[1]:
        return False
    return view.numel() * view.element_size() >= _LEAST_BYTES


def _largest(counts: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return for each table the largest of the counts that the ranks pass. Every rank must call."""
    if not counts:
        return []
    most = torch.tensor(counts, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [int(count) for count in most.tolist()]


def _sum_rows(table: Tensor, rows: Tensor, num_rows: int, factor: float, group: dist.ProcessGroup) -> None:
    """Sum ``table``, multiplied by ``factor``, over the ranks in place; each rank has at most ``num_rows`` nonzero rows."""
    if num_rows == 0:
        return
    num_own = len(rows)
    message = torch.empty(sum(_lengths(table, num_rows)), dtype=torch.uint8, device=table.device)
    numbers, values = _opened(message, table, num_rows)
    numbers[:num_own] = rows.to(torch.int32)
    numbers[num_own:] = -1
    values[num_own:] = 0.0
    torch.index_select(table, 0, rows, out=values[:num_own])
    messages = message.new_empty(group.size(), len(message))
    versions.all_gather_single(messages.view(-1), message, group=group)
    table.index_fill_(0, rows, 0.0)
    for message in messages:  # in the order of ranks, so that all ranks get equal bits
        numbers, values = _opened(message, table, num_rows)
        num = int((numbers >= 0).sum())
        theirs = values[:num] if factor == 1.0 else values[:num].mul_(factor)
        table.index_add_(0, numbers[:num].to(torch.int64), theirs)


def _lengths(table: Tensor, num_rows: int) -> tuple[int, int]:
    """Return the bytes of a message's two parts, row numbers (int32) and rows, rounded up to 8 so that both can be viewed."""
    return -(-4 * num_rows // 8) * 8, -(-num_rows * table.shape[1] * table.element_size() // 8) * 8


def _opened(message: Tensor, table: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return views of a message's row numbers (-1 where it has fewer rows than fit) and of the values of the rows."""
    numbers, rows = message.split(_lengths(table, num_rows))
    shape = num_rows, table.shape[1]
    return numbers.view(torch.int32)[:num_rows], rows.view(table.dtype)[: shape[0] * shape[1]].view(shape)
