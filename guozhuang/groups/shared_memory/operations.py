"""Runs each collective on tensors' bytes: checks sizes, compares the ranks' calls, runs the programs of collectives.py.

Every method blocks until this rank's part is done. Every rank of the group must call the same one with matching sizes.
If a size is wrong on one rank only, that rank's description differs from all others, so all ranks raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from guozhuang.errors import MismatchError, explain, rank_table

from . import collectives
from .collectives import Combining, MemoryRange, Moves, Window
from .endpoint import MEETING, Endpoint, PlacedCall, Terms, cut, refuse
from .engine import DESCRIPTOR_BYTES, ONE_SHOT_BYTES, is_readable
from .program import Program
from .programs import Places

_NUM_KEPT_PLANS: Final = 1024


class _ReductionPlan(NamedTuple):
    """The parts of a reduction that are the same for every call with this size, dtype and operation.

    Attributes:
        number: counts the plans of this rank; the key of their programs, because the plan itself is slow to hash.
    """

    number: int
    what: bytes
    how: Combining
    num_bytes: int
    fits_one_shot: bool


class Operations:
    """One rank's collectives on shared memory, run through its ``Endpoint``.

    Args:
        link: this rank's endpoint, whose ``perform`` runs a call that uses these methods.
        crowded: whether ranks of this node outnumber its cores.
    """

    def __init__(self, link: Endpoint, crowded: bool) -> None:
        self.link, self._crowded = link, crowded
        self._rank, self._size = link.rank, link.size
        self._plans: dict[tuple[object, ...], _ReductionPlan] = {}
        self._numbers = itertools.count()

    def reduce(self, tensor: Tensor, how: Combining, root: int | None, terms: Terms, among: bytes = b"") -> None:
        """Combine a contiguous tensor of all ranks, in place, on every rank or on ``root`` only.

        ``among`` is compared among ranks too; it describes the other tensors of the same call.
        """
        key = (tensor.numel(), tensor.dtype, how, root, among)
        plan = self._plans.get(key) or self._plan(key, tensor, how, root, among)
        link, address = self.link, tensor.data_ptr()
        if plan.fits_one_shot:
            program = link.programs.of((plan.number, address, link.turn), lambda: self._one_shot(plan, address, root))
            link.begin(plan.what, program, terms)
            return
        program_for = partial(self._large, plan, address, root)
        link.begin_placed(
            PlacedCall((plan.number, address), plan.what, address, plan.num_bytes, False, program_for), terms
        )

    def _plan(
        self, key: tuple[object, ...], tensor: Tensor, how: Combining, root: int | None, among: bytes
    ) -> _ReductionPlan:
        if len(self._plans) >= _NUM_KEPT_PLANS:
            self._plans.clear()
        name = "all_reduce" if root is None else f"reduce to rank {root}"
        what = cut(describe(name, [tensor.numel()], tensor.dtype, how) + among)
        num_bytes = tensor.numel() * tensor.itemsize
        plan = self._plans[key] = _ReductionPlan(next(self._numbers), what, how, num_bytes, num_bytes <= ONE_SHOT_BYTES)
        return plan

    def _one_shot(self, plan: _ReductionPlan, address: int, root: int | None) -> Program:
        window = collectives.one_shot_window(self.link.one_shot, ONE_SHOT_BYTES, 1, plan.num_bytes)
        assert window is not None
        return collectives.reduce_one_shot(window, self._rank, MemoryRange(address, plan.num_bytes), plan.how, root)

    def _large(self, plan: _ReductionPlan, address: int, root: int | None, places: Places) -> Program:
        seen = self._seen(places)
        if seen is not None:
            own = [address if rank == self._rank else there for rank, there in enumerate(seen)]
            return collectives.reduce_in_place(own, self._rank, plan.num_bytes, plan.how, root)
        longest = collectives.parts_of(plan.num_bytes, self._size)[0][1]
        window = self._ring(self._size, longest)
        return collectives.reduce_staged(window, self._rank, MemoryRange(address, plan.num_bytes), plan.how, root)

    def broadcast(self, piece: MemoryRange, tensor: Tensor, root: int, terms: Terms) -> None:
        """Copy the root's bytes to all ranks. The piece is that of ``tensor``; peers read the root's directly if they can."""
        what = describe(f"broadcast from rank {root}", [tensor.numel()], tensor.dtype)
        is_root = root == self._rank
        moves = Moves(1, [(0, piece)] if is_root else [], [] if is_root else [(root, 0, piece)], [], piece.num_bytes)
        if piece.num_bytes <= ONE_SHOT_BYTES:
            self._small(what, terms, moves)
            return
        link = self.link

        def program_for(places: Places) -> Program:
            there = None if is_root else link.address_of(root, places[root])
            if places[root][0]:
                return collectives.fetch([(there, piece)] if there is not None else [])
            if (read := link.addresses_to_read(places)) is not None:
                return collectives.read([] if is_root else [(root, read[root], piece)])
            return self._staged(moves)

        address = piece.address if is_root else 0
        link.begin_placed(PlacedCall((what, *piece), what, address, piece.num_bytes, True, program_for), terms)

    def all_gather(self, given: MemoryRange, tensor: Tensor, outputs: Sequence[MemoryRange], terms: Terms) -> None:
        """Copy every rank's bytes to all ranks; ``outputs`` has a range per rank. The given piece is that of ``tensor``."""
        counts, itemsize = _counts(outputs, tensor), tensor.itemsize
        what = describe("all_gather", counts, tensor.dtype)
        if given.num_bytes != outputs[self._rank].num_bytes:
            self._complain(what, f"but this rank gives {given.num_bytes // itemsize}", terms)
        longest = max(piece.num_bytes for piece in outputs)
        taken = [(rank, 0, piece) for rank, piece in enumerate(outputs) if rank != self._rank]
        moves = Moves(1, [(0, given)], taken, [(given.address, outputs[self._rank])], longest)
        if longest <= ONE_SHOT_BYTES:
            self._small(what, terms, moves)
            return
        link = self.link

        def program_for(places: Places) -> Program:
            seen = self._seen(places)
            if seen is not None:
                own = [given.address if rank == self._rank else there for rank, there in enumerate(seen)]
                return collectives.fetch(list(zip(own, outputs, strict=True)))
            read = link.addresses_to_read(places)
            if read is not None and all(read):
                return collectives.read([(rank, read[rank], piece) for rank, _, piece in taken], moves.kept)
            return self._staged(moves)

        key = (what, given, *outputs)
        link.begin_placed(PlacedCall(key, what, given.address, given.num_bytes, True, program_for), terms)

    def reduce_scatter(
        self,
        output: MemoryRange,
        inputs: Sequence[MemoryRange],
        whole: Tensor,
        is_whole: bool,
        how: Combining,
        terms: Terms,
    ) -> None:
        """Combine piece r of all ranks on rank r.

        Args:
            output: where this rank's result is written.
            inputs: this rank's inputs, by rank.
            whole: the tensor that contains all inputs one after the other, if ``is_whole``; else one of the inputs.
            is_whole: whether ``whole`` contains all inputs.
            how: the operation.
            terms: see ``Terms``.
        """
        counts = _counts(inputs, whole)
        what = describe("reduce_scatter", counts, whole.dtype, how)
        if output.num_bytes != inputs[self._rank].num_bytes:
            self._complain(what, f"but this rank takes {output.num_bytes // whole.itemsize}", terms)
        longest, link = max(piece.num_bytes for piece in inputs), self.link
        window = collectives.one_shot_window(link.one_shot, ONE_SHOT_BYTES, self._size, longest)
        arguments = (self._rank, inputs, output.address, how, longest)
        if window is not None:
            link.begin(what, collectives.reduce_scatter(window, *arguments), terms)
            return
        mine = inputs[self._rank]
        offset = mine.address - inputs[0].address  # the same in all ranks' tensors, as sizes are equal

        def program_for(places: Places) -> Program:
            seen = self._seen(places)
            if seen is None:
                return collectives.reduce_scatter(self._ring(self._size, longest), *arguments)
            sources = [mine.address if rank == self._rank else there + offset for rank, there in enumerate(seen)]
            return collectives.reduce_scatter_in_place(sources, output.address, output.num_bytes, how)

        address, num_bytes = (inputs[0].address, whole.numel() * whole.itemsize) if is_whole else (0, 0)
        link.begin_placed(PlacedCall((what, output, *inputs), what, address, num_bytes, False, program_for), terms)

    def all_to_all(
        self, outputs: Sequence[MemoryRange], inputs: Sequence[MemoryRange], dtype: torch.dtype, terms: Terms
    ) -> None:
        """Copy input r of every rank to rank r; all sizes may differ, as long as both ends of a pair agree."""
        link, what = self.link, describe("all_to_all", [], dtype)
        numbers = [piece.num_bytes for piece in (*inputs, *outputs)] + [piece.address for piece in inputs]
        digest = link.write_table(numbers)
        are_one = all(one.address + one.num_bytes == after.address for one, after in itertools.pairwise(inputs))
        whole = MemoryRange(inputs[0].address, sum(numbers[: self._size]))
        is_read = link.reads and all(is_readable(*piece) for piece in ((whole,) if are_one else inputs))
        program_for = partial(self._all_to_all, outputs, inputs, dtype)
        link.begin_placed(PlacedCall((what, *outputs, *inputs), what, 0, 0, is_read, program_for, digest), terms)

    def _all_to_all(
        self, outputs: Sequence[MemoryRange], inputs: Sequence[MemoryRange], dtype: torch.dtype, places: Places
    ) -> Program:
        link, size, here = self.link, self._size, self._rank
        tables = link.read_tables(3 * size)
        pairs = [(giver, taker) for giver in range(size) for taker in range(size)]
        wrong = [pair for pair in pairs if tables[pair[0]][pair[1]] != tables[pair[1]][size + pair[0]]]
        if wrong:
            each = dtype.itemsize
            rows = [(g, t, tables[g][t] // each, tables[t][size + g] // each) for g, t in wrong]
            table = rank_table(("from rank", "to rank", "gives", "takes"), rows)
            error = MismatchError(f"{explain('ranks differ in the sizes of an all_to_all', rank=here)}\n{table}")
            link.give_up(error)
            raise error
        longest = max(max(table[:size]) for table in tables)
        kept = [(inputs[here].address, outputs[here])]
        if longest > ONE_SHOT_BYTES and link.addresses_to_read(places) is not None:
            read = [(r, tables[r][2 * size + here], piece) for r, piece in enumerate(outputs) if r != here]
            return collectives.read(read, kept)
        sent = [(rank, piece) for rank, piece in enumerate(inputs) if rank != here]
        taken = [(rank, here, piece) for rank, piece in enumerate(outputs) if rank != here]
        return self._staged(Moves(size, sent, taken, kept, longest))

    def gather(
        self, given: MemoryRange, tensor: Tensor, outputs: Sequence[MemoryRange], root: int, terms: Terms
    ) -> None:
        """Copy every rank's bytes, equally many on all, to the root. ``outputs``: on the root a range per rank, else empty."""
        what = describe(f"gather to rank {root}", [tensor.numel()], tensor.dtype)
        if any(piece.num_bytes != given.num_bytes for piece in outputs):
            self._complain(what, f"but the root takes {_counts(outputs, tensor)}", terms)
        sent = [(0, given)] if self._rank != root else []
        taken = [(rank, 0, piece) for rank, piece in enumerate(outputs) if rank != root]
        kept = [(given.address, outputs[root])] if self._rank == root else []
        self._move(what, terms, Moves(1, sent, taken, kept, given.num_bytes))

    def scatter(
        self, output: MemoryRange, tensor: Tensor, inputs: Sequence[MemoryRange], root: int, terms: Terms
    ) -> None:
        """Copy the root's piece r to rank r, equally many bytes each. ``inputs``: on the root a range per rank, else empty."""
        what = describe(f"scatter from rank {root}", [tensor.numel()], tensor.dtype)
        if any(piece.num_bytes != output.num_bytes for piece in inputs):
            self._complain(what, f"but the root gives {_counts(inputs, tensor)}", terms)
        sent = [(rank, piece) for rank, piece in enumerate(inputs) if rank != root]
        taken = [(root, self._rank, output)] if self._rank != root else []
        kept = [(inputs[root].address, output)] if self._rank == root else []
        self._move(what, terms, Moves(self._size, sent, taken, kept, output.num_bytes))

    def counts(self, what: bytes, count: int, terms: Terms) -> list[int]:
        """Send this rank's number to all ranks, in the call ``what``; return the numbers of all ranks, by rank."""
        told = self.link.tell(cut(what), terms, count.to_bytes(8, "little"))
        return [int.from_bytes(each[:8], "little") for each in told]

    def barrier(self, name: bytes, terms: Terms) -> None:
        """Wait until all ranks have joined."""
        self.link.begin(name, MEETING, terms)

    def _move(self, what: bytes, terms: Terms, moves: Moves) -> None:
        """Move pieces between ranks: through the one-shot areas if they fit, else in chunks through the rings."""
        if collectives.aligned(moves.longest_bytes) * moves.num_lanes <= ONE_SHOT_BYTES:
            self._small(what, terms, moves)
            return
        self.link.meet(what, terms)
        self.link.go_on(self._staged(moves))

    def _small(self, what: bytes, terms: Terms, moves: Moves) -> None:
        link, (num_lanes, sent, taken, kept, longest) = self.link, moves

        def build() -> Program:
            window = collectives.one_shot_window(link.one_shot, ONE_SHOT_BYTES, num_lanes, longest)
            assert window is not None
            return collectives.exchange(window, self._rank, moves)

        key = (num_lanes, longest, link.turn, *sent, *taken, *kept)
        link.begin(what, link.programs.of(key, build), terms)

    def _staged(self, moves: Moves) -> Program:
        return collectives.exchange(self._ring(moves.num_lanes, moves.longest_bytes), self._rank, moves)

    def _ring(self, num_lanes: int, longest: int) -> Window:
        link = self.link
        return collectives.ring_window(link.rings, link.ring_bytes, num_lanes, longest, self._crowded)

    def _seen(self, places: Places) -> list[int] | None:
        """Return the address in this process of every rank's tensor (0 for its own); None if any rank's cannot be mapped."""
        if not all(place[0] for place in places):
            return None
        found = [0 if r == self._rank else self.link.address_of(r, place) for r, place in enumerate(places)]
        return [0 if address is None else address for address in found]

    def _complain(self, what: bytes, why: str, terms: Terms) -> NoReturn:
        """Report to the peers that sizes do not match; raise UsageError if all ranks report this, else MismatchError."""
        what = what + f" ({why})".encode()
        self.link.agree_on_refusal(what[:DESCRIPTOR_BYTES], terms)
        refuse("sizes do not fit each other", what.decode(), self._rank, "make outputs as large as what goes into them")


def describe(name: str, counts: Sequence[int], dtype: torch.dtype, how: Combining | None = None) -> bytes:
    """Describe a collective in words, equal on all ranks: ``all_reduce of 1024 float32, sum``.

    Counts that differ come last, because a long text is cut at its end: ``all_gather of float32: [3, 5]``.
    """
    is_even = len(set(counts)) == 1
    size = f"{f'{len(counts)} x ' if len(counts) > 1 else ''}{counts[0]} " if is_even else ""
    text = f"{name} of {size}{_name(dtype)}"
    if how is not None:
        text += f", {how.name}"
    if counts and not is_even:
        text += f": {list(counts)}"
    return cut(text.encode())


def _counts(pieces: Sequence[MemoryRange], tensor: Tensor) -> list[int]:
    return [piece.num_bytes // tensor.itemsize for piece in pieces]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
