"""This rank's end of the group: run the programs of one collective after the other, and raise errors for failed runs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import struct
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, NamedTuple, NoReturn

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
    is_readable,
)
from .program import Program, Status
from .programs import Places, Programs, Stored
from .rendezvous import Peers

MEETING: Final = Program(trailing_barrier=True)  # a program of one barrier: compares the ranks' calls, moves no data
Terms = tuple[float, int]  # (time-out in seconds, microseconds that a wait spins before it sleeps)
# Where a tensor lies: whether peers can map it, its segment and the offset there in bytes; whether it may be read from this
# process, and this rank can read the memory of all others; and the tensor's address, which is for that.
_PLACE: Final = struct.Struct("<BqqBq")


class PlacedCall(NamedTuple):
    """An operation that moves data as the places of the ranks' tensors allow. It refers to no tensor, and so keeps none alive.

    The program may also depend on tables of numbers that the ranks wrote (``write_table``), if each tells a digest of its own.

    Attributes:
        key: everything that ``program_for`` depends on besides the places.
        what: the operation in words; must be the same on all ranks, at most 256 bytes.
        address: of this rank's tensor, which peers map or read; 0: it has none for them.
        num_bytes: of that tensor.
        is_read: whether peers that cannot map the tensor may read it from this process.
        program_for: returns the program for the places that the ranks told.
        digest: of this rank's table; told with the place. Such a call is not run again by ``single``.
    """

    key: tuple[Hashable, ...]
    what: bytes
    address: int
    num_bytes: int
    is_read: bool
    program_for: Callable[[Places], Program]
    digest: bytes = b""


class Endpoint:
    """This rank's end of a shared-memory group. It runs collectives; the caller must run one at a time (turns.py does).

    Args:
        engine: the C engine over the control pages.
        peers: the other ranks' processes and memory.
        arena: the tensors of this rank that peers can map.
        rank: this process in the group.
        size: number of ranks.
        reads: whether this rank can read the memory of all peers' processes.
    """

    def __init__(self, engine: Engine, peers: Peers, arena: Arena, rank: int, size: int, reads: bool = False) -> None:
        self.rank, self.size, self.reads = rank, size, reads
        self._engine, self._peers, self._arena = engine, peers, arena
        mains = [segment.address for segment in peers.segments]
        self.rings = tuple(main + RING_OFFSET for main in mains)
        self.ring_bytes = RING_BYTES
        self._one_shot = [
            tuple(main + ONE_SHOT_OFFSET + area * ONE_SHOT_BYTES for main in mains)
            for area in range(NUM_ONE_SHOT_AREAS)
        ]
        # For each rank: 1 + the peer whose loss made that rank break the group, else 0. See ``LOST_OFFSET``.
        self._lost = [ctypes.c_uint32.from_address(main + LOST_OFFSET) for main in mains]
        self.turn = 0  # which of the two one-shot areas the next operation uses; alternates
        self.failure: Exception | None = None
        self.late: tuple[int, ...] = ()  # the ranks that had not come when an operation timed out
        self._what = b""  # the current operation in words
        self._deadline = 0.0
        self._spin_us = 0
        self.programs = Programs()
        self._is_open = False  # whether an operation has begun that will run further programs
        self._is_told = False  # whether the peers know that this rank refuses the call
        # Runs the running call's last operation again, given the turn that it had; None: there was none, or it is of several
        # parts. It returns False if it did nothing, because ``perform`` has something to do first.
        self.single: Callable[[int], bool] | None = None
        self.sync_terms: Terms = (0.0, 0)  # those of calls that ``single`` runs again

    @property
    def one_shot(self) -> tuple[int, ...]:
        """Return the addresses of all ranks' one-shot areas for the next operation."""
        return self._one_shot[self.turn]

    def perform(self, run: Callable[[Terms], object], name: str, terms: Terms) -> None:
        """Run a call as a unit: if this rank cannot finish it, the peers are notified at once.

        A UsageError between operations is reported to the peers in place of the next one; the group stays usable if all ranks
        refuse alike. After any other error this rank would be out of step, so the group is broken.

        Args:
            run: runs the call's operations.
            name: the call's name, the same on all ranks.
            terms: passed to ``run``.
        """
        self._is_open = self._is_told = False
        self.single = None
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
        """Report to the peers, in place of an operation, that this rank refuses its arguments; the group is broken unless
        all ranks report the same text. Do not raise for that: the caller raises the reason of the refusal."""
        why = why.removeprefix(f"[rank {self.rank}] ")
        with contextlib.suppress(WorldError, MismatchError):
            self.begin(cut(f"{name}: refused on this rank: {why}".encode()), MEETING, terms)

    def agree_on_refusal(self, what: bytes, terms: Terms) -> None:
        """Report to the peers that this rank will refuse its arguments; return if all do, else raise ``MismatchError``."""
        self.begin(what, MEETING, terms)
        self._is_told = True

    def begin(self, what: bytes, program: Program, terms: Terms, private: bytes = b"") -> None:
        """Begin an operation: run its first program, which must have a barrier, and compare the calls of all ranks.

        Args:
            what: the operation in words; must be the same on all ranks. Cut to 256 bytes.
            program: the first program; before its first barrier it must write only to this rank's one-shot area.
            terms: see ``Terms``.
            private: bytes for the peers that are not compared.

        Raises:
            PeerLost: a rank is gone, left the group, broke it, or did not join in time.
            MismatchError: ranks made different calls.
        """
        what = what[:DESCRIPTOR_BYTES]
        self._begin(what, program, terms, private)
        self.single = None if self._is_open or private else partial(self._again, what, program)

    def begin_placed(self, call: PlacedCall, terms: Terms) -> None:
        """Run an operation whose program depends on where the tensors of all ranks lie, to its end.

        The ranks tell each other their places and meet; then each runs the program for these places. If the places are those
        of the last operation with this key, the engine runs its program without coming back to Python. Whether it does so on
        the other ranks too makes no difference: they run programs of as many rounds.

        Raises ``PeerLost`` and ``MismatchError`` as ``begin`` does.
        """
        self._is_open = True
        stored = self.programs.find(call.key)
        private = self.place_of(call.address, call.num_bytes, call.is_read) + call.digest
        expected, then = (stored.places, stored.program) if stored is not None else (None, None)
        if self._begin(call.what, MEETING, terms, private, expected, then) and expected is not None:
            self._is_open = False
        else:
            places = tuple(self._engine.privates())
            program = call.program_for(places)
            self.programs.put(Stored(call.key, program, places))
            self.go_on(program)
        self.single = None if call.digest else partial(self._again_placed, call)

    def _begin(
        self,
        what: bytes,
        program: Program,
        terms: Terms,
        private: bytes = b"",
        expected: Places | None = None,
        then: Program | None = None,
    ) -> bool:
        if self.failure is not None:
            self.raise_failure()
        if self._peers.has_freed:  # no operation of this rank is running that could read the freed memory
            self._peers.release_freed()
        timeout_s, self._spin_us = terms
        self._deadline = time.monotonic() + timeout_s
        self._what = what
        self.turn ^= 1
        return self._run(program, what, private, timeout_s, expected, then)

    def _again(self, what: bytes, program: Program, turn: int) -> bool:
        """Run an operation as ``begin`` did, within ``sync_terms``; return False, with nothing done, where that cannot be.

        Args:
            what: the operation in words.
            program: its program.
            turn: the one-shot area that the program uses.
        """
        if self.turn != turn or self.failure is not None or self._peers.has_freed:
            return False
        timeout_s, self._spin_us = self.sync_terms
        self._what, self.turn = what, turn ^ 1
        return self._run(program, what, b"", timeout_s)

    def _again_placed(self, call: PlacedCall, turn: int) -> bool:
        if self.failure is not None:
            return False
        self.perform(partial(self.begin_placed, call), "a call that came before", self.sync_terms)
        return True

    def go_on(self, program: Program) -> None:
        """Run a further program of the current operation. Raises ``PeerLost`` as ``begin`` does."""
        self._run(program, None, b"", self._deadline - time.monotonic())
        self._is_open = False

    def _run(
        self,
        program: Program,
        what: bytes | None,
        private: bytes,
        limit_s: float,
        expected: Places | None = None,
        then: Program | None = None,
    ) -> bool:
        """Run a program, and ``then`` if the places are as expected; return False if they are not."""
        try:
            status, ranks = self._engine.run(program, what, private, limit_s, self._spin_us, expected, then)
        except BaseException as error:
            self.give_up(error)
            raise
        if status == Status.UNEXPECTED:
            return False
        if status:
            self._fail(status, ranks, limit_s)
        return True

    def meet(self, what: bytes, terms: Terms, private: bytes = b"") -> Places:
        """Begin an operation with a barrier only; ``go_on`` then moves its data. Return every rank's ``private``."""
        self._is_open = True
        return self.tell(what, terms, private)

    def tell(self, what: bytes, terms: Terms, private: bytes) -> Places:
        """Run an operation that only sends each rank's ``private`` bytes to all ranks; return these bytes, by rank."""
        self.begin(what, MEETING, terms, private)
        return tuple(self._engine.privates())

    # The methods below report to the peers where a tensor lies, and exchange tables of numbers.

    def place_of(self, address: int, num_bytes: int, is_read: bool = False) -> bytes:
        """Return bytes that report to the peers where a contiguous tensor lies; an address of 0: nowhere.

        With ``is_read`` also its address, for peers that read it from there; and whether this rank can read theirs, and the
        kernel lets them read this tensor. It refuses memory of devices, for example what CUDA has pinned.
        """
        place = self._arena.locate(address, num_bytes)  # also of nothing: it reads peers' messages
        reads = is_read and self.reads and (not address or is_readable(address, num_bytes))
        read = (reads, address) if is_read else (False, 0)
        if place is None:
            return _PLACE.pack(0, 0, 0, *read)
        self._arena.announce(place[0])
        return _PLACE.pack(1, *place, *read)

    def address_of(self, rank: int, told: bytes) -> int | None:
        """Return the address in this process of the tensor that a rank reported; None if the peers cannot map it."""
        seen, segment, offset, _, _ = _PLACE.unpack_from(told)
        return self._arena.address_at(rank, segment, offset) if seen else None

    def addresses_to_read(self, places: Sequence[bytes]) -> list[int] | None:
        """Return by rank the address of its tensor in its own process; 0: it reported none.

        None: some rank cannot read the memory of the others, so all must do without.
        """
        told = [_PLACE.unpack_from(place) for place in places]
        return [address for *_, address in told] if all(reads for _, _, _, reads, _ in told) else None

    def write_table(self, numbers: list[int]) -> bytes:
        """Write numbers to this rank's one-shot area, for all ranks to read once the next operation has begun.

        Return a digest of them, for ranks that read this table before.
        """
        assert len(numbers) * 8 <= ONE_SHOT_BYTES, "a table too long for the one-shot area"
        table = struct.pack(f"={len(numbers)}q", *numbers)
        ctypes.memmove(self.one_shot[self.rank], table, len(table))
        return hashlib.blake2b(table, digest_size=16).digest()

    def read_tables(self, length: int) -> list[list[int]]:
        """Return the tables that the ranks wrote for this operation, after it has begun."""
        areas = self._one_shot[self.turn ^ 1]  # begin() has already switched to the next area
        return [list(struct.unpack(f"={length}q", ctypes.string_at(area, 8 * length))) for area in areas]

    # The methods below handle failures.

    def give_up(self, error: BaseException) -> None:
        """Break the group because of an error in this process; peers that wait for this rank are notified within 0.1 s."""
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
        """Notify the peers that this rank has left the group."""
        self.single = None  # it refers to this object
        if self._engine.state_of(self.rank) == RankState.ALIVE:
            self._engine.set_state(RankState.LEFT)

    def raise_failure(self) -> NoReturn:
        """Raise a fresh copy of the error that broke the group."""
        assert self.failure is not None
        raise copy.copy(self.failure)

    def _words(self) -> str:
        return self._what.decode(errors="replace") or "no collective yet"

    def _fail(self, status: int, ranks: tuple[int, ...], limit_s: float) -> NoReturn:
        what = self._words()
        if status == Status.DIFFER:
            error: Exception = self._mismatch()
        else:
            self.late = ranks if status == Status.LATE else ()
            text = self._why(Status(status), ranks, what, limit_s)
            lost = self._first_cause(ranks[0]) if status == Status.BROKEN else ranks[0]
            error = WorldError(text)
            if lost != self.rank:  # else this rank itself left, and no peer is lost
                error = PeerLost(text, rank=lost, pid=self._peers.pids[lost], waiting_in=what)
        self.give_up(error)
        try:
            raise error
        finally:
            del error  # the error's traceback refers to this frame, a cycle that would keep tensors

    def _first_cause(self, rank: int) -> int:
        """Return the peer whose loss made ``rank`` break the group, if that is known and not this rank; else ``rank``."""
        lost = self._lost[rank].value - 1
        return lost if 0 <= lost < self.size and lost != self.rank else rank

    def _why(self, status: Status, ranks: tuple[int, ...], what: str, limit_s: float) -> str:
        names = ", ".join(f"rank {rank} (pid {self._peers.pids[rank]})" for rank in ranks)
        waiting = f"while this rank waited for it in {what}"
        if status == Status.UNREAD:
            fix = "see why its process ended, or may no longer be read (ptrace)"
            return explain(f"the memory of {names} cannot be read any more, {waiting}", rank=self.rank, fix=fix)
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
            f"timed out: {names} did not come within {limit_s:.3g} s, {waiting} ({last})",
            rank=self.rank,
            fix="look at what that rank is doing (py-spy dump --pid), or give the group a timeout longer than that",
        )

    def _mismatch(self) -> MismatchError:
        asked = [text.rstrip(b"\0").decode(errors="replace") for text in self._engine.descriptors()]
        table = rank_table(("rank", "pid", "asked for"), zip(range(self.size), self._peers.pids, asked, strict=True))
        return MismatchError(f"{different_calls(self.rank)}\n{table}")


def different_calls(rank: int) -> str:
    """Return the first lines of the error for ranks that made different calls."""
    fix = "let every rank make the same calls in the same order, with the same sizes and dtypes"
    return explain("ranks asked for different collectives", rank=rank, fix=fix)


def refuse(what: str, value: object, rank: int, fix: str = "") -> NoReturn:
    """Raise a UsageError about an argument of a collective."""
    raise UsageError(explain(what, value=value, rank=rank, fix=fix))


def cut(text: bytes) -> bytes:
    """Shorten a call's description to the length that ranks compare; a digest at its end stands for the part cut off."""
    room = DESCRIPTOR_BYTES - 96  # leaves room to add why a rank's sizes do not match
    return text if len(text) <= room else text[: room - 20] + b"..." + hashlib.sha256(text).hexdigest()[:16].encode()
