"""This rank's end of the group: runs the programs of one collective after the other, and turns what went wrong into errors."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import struct
import time
from collections.abc import Callable, Hashable
from typing import Final, NoReturn

from torch import Tensor

from guozhuang.errors import MismatchError, PeerLost, UsageError, WorldError, explain, rank_table

from .arena import Arena
from .engine import (
    DESCRIPTOR_BYTES,
    LOST_OFFSET,
    NUM_ONE_SHOT_AREAS,
    ONE_SHOT_BYTES,
    ONE_SHOT_OFFSET,
    RING_BYTES,
    RING_OFFSET,
    Engine,
    RankState,
)
from .program import Program, Status
from .rendezvous import Peers

MEETING: Final = Program(trailing_barrier=True)  # one barrier, to compare what ranks ask for before anything moves
# Of programs, about; one may be some hundred bytes or, of many ranks, many kilobytes.
REMEMBERED_BYTES: Final = 16 << 20
Terms = tuple[float, int]  # time-out in seconds, how long to look before sleeping in microseconds
_PLACE: Final = struct.Struct("<Bqq")  # what a rank tells of its tensor: whether peers see it, segment, offset in bytes


class Endpoint:
    """Runs collectives of one rank. One at a time: the caller sees to that (turns.py).

    Args:
        engine: over the control pages.
        peers: the other ranks' processes and memory.
        arena: memory that peers see.
        rank: this process in the group.
        size: number of ranks.
    """

    def __init__(self, engine: Engine, peers: Peers, arena: Arena, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._engine, self._peers, self._arena = engine, peers, arena
        mains = [segment.address for segment in peers.segments]
        self.rings = tuple(main + RING_OFFSET for main in mains)
        self.ring_bytes = RING_BYTES
        self._one_shot = [
            tuple(main + ONE_SHOT_OFFSET + area * ONE_SHOT_BYTES for main in mains)
            for area in range(NUM_ONE_SHOT_AREAS)
        ]
        # By rank: 1 + the rank that it lost, before it gave up. See ``LOST_OFFSET``.
        self._lost = [ctypes.c_uint32.from_address(main + LOST_OFFSET) for main in mains]
        self.turn = 0  # which area the operation that comes next uses: as the descriptor slots, they are used in turn
        self.failure: Exception | None = None
        self._what = b""  # the operation under way
        self._deadline = 0.0
        self._spin_us = 0
        self._programs: dict[Hashable, Program] = {}
        self._programs_bytes = 0
        self._is_open = False  # an operation has begun, and has further programs to run
        self._is_told = False  # the peers know what this rank refuses

    @property
    def one_shot(self) -> tuple[int, ...]:
        """Address of the one-shot area of every rank, for the operation that comes next."""
        return self._one_shot[self.turn]

    def remembered(self, key: Hashable, build: Callable[[], Program]) -> Program:
        """Return the program of a collective, built once per key. A key must tell everything the program depends on."""
        program = self._programs.get(key)
        if program is None:
            program = build()
            num_bytes = size_of(program)
            if self._programs_bytes + num_bytes > REMEMBERED_BYTES:
                self._programs.clear()
                self._programs_bytes = 0
            self._programs[key] = program
            self._programs_bytes += num_bytes
        return program

    def perform(self, run: Callable[[Terms], object], name: str, terms: Terms) -> None:
        """Run a call as a unit: whatever keeps this rank from its end, the peers learn of it at once.

        A UsageError between operations is told to them in place of the next one, and leaves the group whole where all ranks
        refuse alike. After any other error this rank would be out of step, so the group is broken.

        Args:
            run: runs the call's operations.
            name: of the call, the same on all ranks.
            terms: handed to ``run``.
        """
        self._is_open = self._is_told = False
        try:
            run(terms)
        except BaseException as error:
            if self.failure is not None or self._is_told:
                pass
            elif isinstance(error, UsageError) and not self._is_open:
                self.refuse(name, str(error), terms)
            else:
                self.give_up(error)
            raise

    def refuse(self, name: str, why: str, terms: Terms) -> None:
        """Tell the peers, in place of an operation, that this rank's arguments cannot work: unless they all say the same,
        the group is broken. Raises nothing of that: the caller has an error already.
        """
        why = why.removeprefix(f"[rank {self.rank}] ")
        with contextlib.suppress(WorldError, MismatchError):
            self.begin(cut(f"{name}: refused on this rank: {why}".encode()), MEETING, terms)

    def agree_on_refusal(self, what: bytes, terms: Terms) -> None:
        """Tell the peers what this rank will refuse; returns if all ranks do, else raises ``MismatchError``."""
        self.begin(what, MEETING, terms)
        self._is_told = True

    def begin(self, what: bytes, program: Program, terms: Terms, private: bytes = b"") -> None:
        """Begin an operation: run its first program (with a barrier at least) and compare what all ranks ask for.

        Args:
            what: the operation in words; must be the same on all ranks. Cut, with a mark, where it is long.
            program: what to do; before its first barrier it must write only to this rank's one-shot area.
            terms: the time-out in seconds, and how long to look before sleeping in microseconds.
            private: told to the peers, not compared.

        Raises:
            PeerLost: a rank is gone, gave up or did not come.
            MismatchError: ranks ask for different things.
        """
        if self.failure is not None:
            self.raise_failure()
        if self._peers.has_freed:  # nothing of this rank is under way that could read it
            self._peers.release_freed()
        timeout_s, self._spin_us = terms
        self._deadline = time.monotonic() + timeout_s
        self._what = what
        self.turn ^= 1
        self._engine.set_doing(what)
        try:
            status, ranks = self._engine.run(program, what[:DESCRIPTOR_BYTES], private, timeout_s, self._spin_us)
        except BaseException as error:
            self.give_up(error)
            raise
        if status:
            self._fail(status, ranks, timeout_s)

    def go_on(self, program: Program) -> None:
        """Run a further program of the operation. Raises ``PeerLost`` as ``begin`` does."""
        left_s = self._deadline - time.monotonic()
        try:
            status, ranks = self._engine.run(program, None, b"", left_s, self._spin_us)
        except BaseException as error:
            self.give_up(error)
            raise
        if status:
            self._fail(status, ranks, left_s)
        self._is_open = False

    def meet(self, what: bytes, terms: Terms, private: bytes = b"") -> tuple[bytes, ...]:
        """Begin an operation that moves nothing before ``go_on``; return what every rank told privately."""
        self._is_open = True
        return self.tell(what, terms, private)

    def tell(self, what: bytes, terms: Terms, private: bytes) -> tuple[bytes, ...]:
        """Run an operation that moves nothing; return what every rank told privately."""
        self.begin(what, MEETING, terms, private)
        return tuple(self._engine.privates())

    # What the peers see of a tensor.

    def place_of(self, tensor: Tensor) -> bytes:
        """What to tell peers about a contiguous tensor: where they see it, or nothing (b"")."""
        place = self._arena.locate(tensor)
        if place is None:
            return b""
        self._arena.announce(place[0])
        return _PLACE.pack(1, *place)

    def address_of(self, rank: int, told: bytes) -> int | None:
        """Where this process sees the tensor that a rank told about; None if the rank told nothing."""
        seen, segment, offset = _PLACE.unpack_from(told)
        return self._arena.address_at(rank, segment, offset) if seen else None

    def write_table(self, numbers: list[int]) -> None:
        """Lay a table into this rank's one-shot area, before the operation begins."""
        assert len(numbers) * 8 <= ONE_SHOT_BYTES, "a table too long for the one-shot area"
        struct.pack_into(
            f"={len(numbers)}q", (ctypes.c_char * ONE_SHOT_BYTES).from_address(self.one_shot[self.rank]), 0, *numbers
        )

    def read_tables(self, length: int) -> list[list[int]]:
        """The tables that the ranks laid out for this operation, after it began."""
        areas = self._one_shot[self.turn ^ 1]  # begin() has turned already
        return [list(struct.unpack(f"={length}q", ctypes.string_at(area, 8 * length))) for area in areas]

    # Failures.

    def give_up(self, error: BaseException) -> None:
        """Break the group because of an error in this process; peers that wait for this rank learn of it within 0.1 s."""
        what = self._words()
        if self.failure is None and isinstance(error, WorldError | MismatchError):
            self.failure = copy.copy(error)  # without its traceback, which would keep tensors alive
        elif self.failure is None:
            text = explain(
                f"this group was given up after {type(error).__name__} in {what}: {error}",
                rank=self.rank,
                fix="mend the cause and make a new group",
            )
            self.failure = WorldError(text)
        cause = f"lost rank {error.rank}" if isinstance(error, PeerLost) else f"met {type(error).__name__}"
        self._lost[self.rank].value = error.rank + 1 if isinstance(error, PeerLost) else 0
        self._engine.set_doing(f"{cause} in {what}".encode())
        self._engine.set_state(RankState.BROKEN)

    def leave(self) -> None:
        """Tell the peers that this rank will not come any more."""
        if self._engine.state_of(self.rank) == RankState.ALIVE:
            self._engine.set_state(RankState.LEFT)

    def raise_failure(self) -> NoReturn:
        """Raise what broke the group, afresh."""
        assert self.failure is not None
        raise copy.copy(self.failure)

    def _words(self) -> str:
        return self._what.decode(errors="replace") or "no collective yet"

    def _fail(self, status: int, ranks: tuple[int, ...], limit_s: float) -> NoReturn:
        what = self._words()
        if status == Status.DIFFER:
            error: Exception = self._mismatch()
        else:
            text = self._why(Status(status), ranks, what, limit_s)
            lost = self._first_cause(ranks[0]) if status == Status.BROKEN else ranks[0]
            error = WorldError(text)
            if lost != self.rank:  # else it was this rank that left
                error = PeerLost(text, rank=lost, pid=self._peers.pids[lost], waiting_in=what)
        self.give_up(error)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _first_cause(self, rank: int) -> int:
        """The rank that a rank which gave up had lost, where it was another one; else itself."""
        lost = self._lost[rank].value - 1
        return lost if 0 <= lost < self.size and lost != self.rank else rank

    def _why(self, status: Status, ranks: tuple[int, ...], what: str, limit_s: float) -> str:
        names = ", ".join(f"rank {rank} (pid {self._peers.pids[rank]})" for rank in ranks)
        waiting = f"while this rank waited for it in {what}"
        if status == Status.LOST:
            return explain(
                f"{names} is gone, {waiting}",
                rank=self.rank,
                fix="look at that rank's own error, or in the system's log if it was killed",
            )
        if status == Status.LEFT and ranks[0] == self.rank:
            fix = "wait for the work before the group is destroyed"
            return explain(f"this group was destroyed during {what}", rank=self.rank, fix=fix)
        if status == Status.LEFT:
            fix = "look at that rank's own error or early exit: every rank must make the same calls until the end"
            return explain(f"{names} left the group, {waiting}", rank=self.rank, fix=fix)
        if status == Status.BROKEN:
            causes = "; ".join(f"rank {rank} {self._engine.doing(rank)}" for rank in ranks)
            return explain(
                f"{names} gave up on the group, {waiting}: {causes}",
                rank=self.rank,
                fix="look at that rank's own error",
            )
        last = "; ".join(f"rank {rank}'s last: {self._engine.doing(rank) or 'none yet'}" for rank in ranks)
        return explain(
            f"{names} did not come within {limit_s:.3g} s, {waiting} ({last})",
            rank=self.rank,
            fix="look at what that rank is doing (py-spy dump --pid), or give the group a longer timeout",
        )

    def _mismatch(self) -> MismatchError:
        asked = [text.rstrip(b"\0").decode(errors="replace") for text in self._engine.descriptors()]
        table = rank_table(("rank", "pid", "asked for"), zip(range(self.size), self._peers.pids, asked, strict=True))
        fix = "let every rank make the same calls in the same order, with the same sizes and dtypes"
        return MismatchError(f"{explain('ranks asked for different collectives', rank=self.rank, fix=fix)}\n{table}")


def refuse(what: str, value: object, rank: int, fix: str = "") -> NoReturn:
    """Raise a UsageError about an argument of a collective."""
    raise UsageError(explain(what, value=value, rank=rank, fix=fix))


def cut(text: bytes) -> bytes:
    """Shorten a text so that it can be compared, and with it what was cut off."""
    room = DESCRIPTOR_BYTES - 96  # for a complaint
    return text if len(text) <= room else text[: room - 20] + b"..." + hashlib.sha256(text).hexdigest()[:16].encode()


def size_of(program: Program) -> int:
    """About how many bytes a program takes as Python objects."""
    num_places = sum(len(stream.dsts) + len(stream.srcs) for stream in program.streams)
    return 500 + 400 * len(program.streams) + 150 * num_places
