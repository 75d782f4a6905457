"""Ring attention: keys and values travel from rank to rank, and each rank's queries meet all of them.

Each rank keeps its own queries, keys and values alone. In the backward, keys and values travel once more, and their gradients
with them, which arrive complete where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from ..spans import Span, SpansOfRanks
from . import kernels
from .kernels import Tile
from .team import Team


@dataclass(frozen=True)
class RingOfKeys:
    """The ranks of a ring and what of queries and keys they have."""

    team: Team
    queries: SpansOfRanks
    keys: SpansOfRanks

    def tiles(self, whole: Tile, owner: int) -> Iterator[tuple[slice, slice, Tile]]:
        """Return what this rank's queries see of a rank's keys: rows, columns, and the tile.

        Args:
            whole: this rank's rows of the mask and of what dropout keeps, over all keys.
            owner: whose keys they are.
        """
        rows, columns = self.queries.of_ranks[self.team.rank], self.keys.of_ranks[owner]
        if not whole.is_causal:
            every = slice(None)
            yield from self._seen(every, every, whole, columns)
            return
        assert whole.mask is None, "torch takes a mask or causality"
        for at, (start, stop) in _with_offsets(rows):
            for there, (first, last) in _with_offsets(columns):
                if first >= stop:
                    continue  # all of these keys come after all of these queries
                of_rows, of_columns = slice(at, at + stop - start), slice(there, there + last - first)
                tile = self._part(replace(whole, is_causal=(start, stop) == (first, last)), of_rows, ((first, last),))
                if not tile.is_causal and last > start + 1:
                    tile = replace(tile, mask=torch.arange(start, stop).unsqueeze(1) >= torch.arange(first, last))
                yield of_rows, of_columns, tile

    def _seen(self, rows: slice, columns: slice, whole: Tile, spans: tuple[Span, ...]) -> Iterator[Any]:
        tile = self._part(whole, rows, spans)
        if not tile.is_empty():
            yield rows, columns, tile

    def _part(self, whole: Tile, rows: slice, spans: tuple[Span, ...]) -> Tile:
        keep = None if whole.keep is None else _columns(whole.keep[:, :, rows], spans)
        mask = whole.mask
        if mask is not None:
            mask = _columns(mask if mask.shape[2] == 1 else mask[:, :, rows], spans)
        return replace(whole, mask=mask, keep=keep)


def _with_offsets(spans: tuple[Span, ...]) -> list[tuple[int, Span]]:
    at, found = 0, []
    for start, stop in spans:
        found.append((at, (start, stop)))
        at += stop - start
    return found


def _columns(tensor: Tensor, spans: tuple[Span, ...]) -> Tensor:
    parts = [tensor[..., start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Ring(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: RingOfKeys, tile: Tile
    ) -> Tensor:
        ctx.ring, ctx.tile = ring, replace(tile, mask=None, keep=None)
        whole = replace(tile, mask=mask)
        exact = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=exact, device=query.device)
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=exact, device=query.device)
        for owner, its_key, its_value in _travelling(ring, key, value):
            for rows, columns, part in ring.tiles(whole, owner):
                found, its_lse = kernels.forward(
                    query[:, :, rows], its_key[:, :, columns], its_value[:, :, columns], part
                )
                joined = torch.logaddexp(lse[:, :, rows], its_lse.to(exact))
                before, now = (
                    (each - joined).exp().nan_to_num(0.0).unsqueeze(-1) for each in (lse[:, :, rows], its_lse)
                )
                output[:, :, rows] = output[:, :, rows] * before + found * now
                lse[:, :, rows] = joined
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, tile.keep, result, lse)
        return result

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ring: RingOfKeys = ctx.ring
        query, key, value, mask, keep, output, lse = ctx.saved_tensors
        whole, wants_mask = replace(ctx.tile, mask=mask, keep=keep), ctx.needs_input_grad[3]
        exact = lse.dtype
        for_query = torch.zeros(query.shape, dtype=exact, device=query.device)
        for_mask = torch.zeros_like(mask, dtype=exact) if wants_mask else None
        under_way: tuple[Tensor, Any] | None = None
        sizes = [_num_elements(key, value, count) for count in ring.keys.counts]
        for owner, its_key, its_value in _travelling(ring, key, value):
            here = torch.zeros(sizes[owner], dtype=exact, device=query.device)
            for_key, for_value = _keys_and_values(here, key, value, ring.keys.counts[owner])
            for rows, columns, part in ring.tiles(whole, owner):
                parts = (query[:, :, rows], its_key[:, :, columns], its_value[:, :, columns])
                seen = (output[:, :, rows], lse[:, :, rows], gradient[:, :, rows])
                dq, dk, dv, for_scores = kernels.backward(*parts, part, *seen, wants_mask)
                for_query[:, :, rows] += dq
                for_key[:, :, columns] += dk
                for_value[:, :, columns] += dv
                if for_mask is not None and for_scores is not None:
                    _add_columns(for_mask, for_scores, rows, _spans_of(ring.keys.of_ranks[owner], columns))
            if under_way is not None:  # what the ranks before have added for this owner
                got, work = under_way
                work.wait()
                here += got
            before = (owner - 1) % ring.team.size
            under_way = ring.team.passed_on(here, sizes[before])
        assert under_way is not None
        got, work = under_way
        work.wait()
        for_key, for_value = _keys_and_values(got, key, value, ring.keys.counts[ring.team.rank])
        given = (for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype))
        return *given, None if for_mask is None else for_mask.to(mask.dtype), None, None


def _num_elements(key: Tensor, value: Tensor, count: int) -> int:
    return key.shape[0] * key.shape[1] * count * (key.shape[3] + value.shape[3])


def _keys_and_values(flat: Tensor, key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    batch, heads = key.shape[:2]
    cut = batch * heads * count * key.shape[3]
    return flat[:cut].view(batch, heads, count, -1), flat[cut:].view(batch, heads, count, -1)


def _travelling(ring: RingOfKeys, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Return the ranks and their keys and values, this rank's first; the next ones arrive while a part is used."""
    team = ring.team
    flat = torch.cat([key.reshape(-1), value.reshape(-1)])
    for step in range(team.size):
        owner = (team.rank - step) % team.size
        under_way = None
        if step < team.size - 1:
            under_way = team.passed_on(flat, _num_elements(key, value, ring.keys.counts[(owner - 1) % team.size]))
        yield owner, *_keys_and_values(flat, key, value, ring.keys.counts[owner])
        if under_way is not None:
            flat, work = under_way
            work.wait()


def _spans_of(spans: tuple[Span, ...], columns: slice) -> tuple[Span, ...]:
    if columns == slice(None):
        return spans
    return next((span,) for at, span in _with_offsets(spans) if at == columns.start)


def _add_columns(total: Tensor, for_scores: Tensor, rows: slice, spans: tuple[Span, ...]) -> None:
    at = 0
    for start, stop in spans:
        there = total[..., start:stop] if total.shape[2] == 1 else total[:, :, rows, start:stop]
        there += for_scores[..., at : at + stop - start].sum_to_size(there.shape)
        at += stop - start


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: RingOfKeys, tile: Tile
) -> Tensor:
    """Attention of this rank's queries (B, H, l, D) to all ranks' keys (B, K, s, D) and values (B, K, s, E), with gradients.

    Every rank of the ring must call it, and its backward.

    Args:
        mask: this rank's rows over all keys, (B or 1, H or 1, l or 1, all keys); see ``Tile``.
        tile: scale, causality and dropout; ``keep`` is of (B, H, l, all keys).
    """
    result: Tensor = _Ring.apply(query, key, value, mask, ring, tile)  # type: ignore[no-untyped-call]
    return result
