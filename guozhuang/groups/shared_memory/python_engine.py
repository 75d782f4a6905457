"""The engine in Python: what the C engine does, with torch operations and futex calls. For machines without a compiler,
and the twin that tests hold the C engine against. Both may meet on the same control pages.

[Note: order without fences]
Python has no fences. What stands for them is the FUTEX_WAKE system call: before it looks whether anybody sleeps, the
kernel executes a full memory barrier (its own half of the same Dekker pattern as in [Note: memory order] of _barrier.c).

- After the store of `arrived` the twin always calls FUTEX_WAKE, whether or not a peer says it is asleep: the barrier
  that the pattern needs on the waker's side, and the wake-up.
- Between the store of `asleep` and the last look at a peer's `arrived` stands another such call, on the rank's own word,
  where nobody of this process waits: the sleeper's side.
- Release before the store of `arrived` and acquire after the last load of a wait are also such calls, except where the
  processor has total store order (x86), which gives both for free.
- ctypes reads and writes an aligned 32-bit word in one access.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import stat
import threading
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from guozhuang.errors import UsageError, WorldError, explain

from . import arithmetic
from .control import (
    ARRIVED_OFFSET,
    ASLEEP_OFFSET,
    DESCRIPTOR_BYTES,
    DESCRIPTOR_OFFSETS,
    DOING_BYTES,
    DOING_OFFSET,
    MAGIC,
    MAGIC_OFFSET,
    PRIVATE_BYTES,
    STATE_OFFSET,
    State,
)
from .program import Outcome, Program, Status

_FUTEX_NUMBERS: Final = MappingProxyType(
    {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "loongarch64": 98}
)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_SLICE_NS = 100_000_000  # sleep at most this long before looking after the peers
_LONGEST_WAIT_S = 1e9
_WRAP = 2**32
_GRAVEST_FIRST = (Status.LOST, Status.LEFT, Status.BROKEN)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class PythonEngine:
    """See ``engine.Engine``; same arguments as ``engine.make_engine``.

    Raises:
        UsageError: rank, size and the sequences do not fit each other.
        WorldError: the system call that ranks wait with is not known for this machine.
    """

    def __init__(self, rank: int, size: int, controls: Sequence[int], pidfds: Sequence[int]) -> None:
        if not (0 <= rank < size == len(controls) == len(pidfds)):
            what = "rank must lie in [0, size), with a control page and a descriptor for each rank"
            raise UsageError(explain(what, value=(rank, size, len(controls), len(pidfds))))
        machine = platform.machine()
        if machine not in _FUTEX_NUMBERS:
            fix = "build the C engine (install a C compiler, then reinstall guozhuang), or use gloo"
            raise WorldError(explain("Ranks cannot wait for each other in shared memory here", value=machine, fix=fix))
        self._futex_number = _FUTEX_NUMBERS[machine]
        self._in_order = machine == "x86_64"
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall  # lets go of the GIL during a call
        self._syscall.restype = ctypes.c_long
        self._rank, self._size, self._controls = rank, size, tuple(controls)
        self._arrived = self._words(ARRIVED_OFFSET)
        self._asleep = self._words(ASLEEP_OFFSET)
        self._states = self._words(STATE_OFFSET)
        self._magics = self._words(MAGIC_OFFSET)
        self._magics[rank].value = MAGIC
        self._ends = select.poll()
        self._rank_of_end: dict[int, int] = {}
        for peer, descriptor in enumerate(pidfds):
            if peer != rank and descriptor >= 0:
                # A socket with a message waiting is readable and well; a pidfd is readable once the process ended.
                is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
                self._ends.register(descriptor, select.POLLRDHUP if is_socket else select.POLLIN)
                self._rank_of_end[descriptor] = peer
        self._slot = 0
        self._one_run = threading.Lock()

    def run(
        self, program: Program, descriptor: bytes | None, private: bytes, deadline_s: float, spin_us: int, /
    ) -> Outcome:
        """See ``engine.Engine.run``."""
        if not self._one_run.acquire(blocking=False):
            raise RuntimeError("a run of this engine is under way in another thread")
        try:
            arithmetic.check(program)
            if deadline_s != deadline_s or not 0 <= spin_us <= 1e9:
                raise ValueError("deadline_s must be a number, spin_us must lie in [0, 1e9]")
            deadline_ns = time.monotonic_ns() + int(min(max(deadline_s, 0), _LONGEST_WAIT_S) * 1e9)
            if descriptor is not None:
                self._describe(program, descriptor, private)
            return self._run(program, descriptor is not None, deadline_ns, int(spin_us * 1000))
        finally:
            self._one_run.release()

    def _run(self, program: Program, begins: bool, deadline_ns: int, spin_ns: int) -> Outcome:
        for number in range(program.rounds):
            arithmetic.work(program, number)
            if number == program.rounds - 1 and not program.trailing_barrier:
                break
            try:
                outcome = self._barrier(deadline_ns, spin_ns)
            except BaseException:  # Ctrl-C: the peers wait for a barrier at which this rank will not arrive
                self.set_state(State.BROKEN)
                raise
            if outcome[0] == Status.OK and begins and number == 0:
                outcome = self._compare()
            if outcome[0] != Status.OK:
                return outcome
        return int(Status.OK), ()

    def descriptors(self) -> list[bytes]:
        """See ``engine.Engine``."""
        return [ctypes.string_at(self._slot_of(r), DESCRIPTOR_BYTES) for r in range(self._size)]

    def privates(self) -> list[bytes]:
        """See ``engine.Engine``."""
        return [ctypes.string_at(self._slot_of(r) + DESCRIPTOR_BYTES, PRIVATE_BYTES) for r in range(self._size)]

    def doing(self, rank: int, /) -> str:
        """See ``engine.Engine``."""
        text = ctypes.string_at(self._controls[self._known(rank)] + DOING_OFFSET, DOING_BYTES)
        return text.split(b"\0")[0].decode("ascii", "replace")

    def set_doing(self, text: bytes, /) -> None:
        """See ``engine.Engine``."""
        text = text[:DOING_BYTES] + b"\0"
        ctypes.memmove(self._controls[self._rank] + DOING_OFFSET, text, len(text))

    def set_state(self, state: int, /) -> None:
        """See ``engine.Engine``."""
        self._fence_unless_in_order()
        self._states[self._rank].value = state
        self._wake()

    def state_of(self, rank: int, /) -> int:
        """See ``engine.Engine``."""
        return self._states[self._known(rank)].value

    def arrived_of(self, rank: int, /) -> int:
        """See ``engine.Engine``."""
        return self._arrived[self._known(rank)].value

    def _words(self, offset: int) -> list[ctypes.c_uint32]:
        return [ctypes.c_uint32.from_address(control + offset) for control in self._controls]

    def _known(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError("no such rank")
        return rank

    def _slot_of(self, rank: int) -> int:
        return self._controls[rank] + DESCRIPTOR_OFFSETS[self._slot]

    def _describe(self, program: Program, descriptor: bytes, private: bytes) -> None:
        if len(descriptor) > DESCRIPTOR_BYTES or len(private) > PRIVATE_BYTES:
            raise ValueError("descriptor and private must be bytes, at most 256 and 128")
        if program.num_barriers == 0:
            raise ValueError("a run with a descriptor needs a barrier, to compare it")
        self._slot = 1 - self._slot  # See [Note: one barrier per operation] in _barrier.c
        text = descriptor.ljust(DESCRIPTOR_BYTES, b"\0") + private.ljust(PRIVATE_BYTES, b"\0")
        ctypes.memmove(self._slot_of(self._rank), text, len(text))

    def _compare(self) -> Outcome:
        described = self.descriptors()
        mine = described[self._rank]
        others = tuple(r for r in range(self._size) if described[r] != mine or self._magics[r].value != MAGIC)
        return int(Status.DIFFER if others else Status.OK), others

    # Waiting. See [Note: order without fences].

    def _wake(self) -> None:
        word = ctypes.byref(self._arrived[self._rank])
        self._syscall(self._futex_number, word, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def _fence_unless_in_order(self) -> None:
        if not self._in_order:
            self._wake()

    def _missing(self, target: int) -> list[int]:
        """The ranks that have not arrived at barrier ``target``; numbers wrap around."""
        return [r for r, word in enumerate(self._arrived) if (word.value - target) % _WRAP >= _WRAP // 2]

    def _barrier(self, deadline_ns: int, spin_ns: int) -> Outcome:
        mine = self._arrived[self._rank]
        target = (mine.value + 1) % _WRAP
        self._fence_unless_in_order()
        mine.value = target
        self._wake()
        spin_until_ns = time.monotonic_ns() + spin_ns if spin_ns else 0
        outcome: Outcome = (int(Status.OK), ())
        while missing := self._missing(target):
            now_ns = time.monotonic_ns()
            if now_ns < spin_until_ns:
                os.sched_yield()
                continue
            outcome = self._sleep(missing[0], target, deadline_ns)
            if outcome[0] != Status.OK:
                break
        self._fence_unless_in_order()
        return outcome

    def _sleep(self, peer: int, target: int, deadline_ns: int) -> Outcome:
        """Sleep until a peer moves, for a slice at most."""
        left_ns = min(deadline_ns - time.monotonic_ns(), _SLICE_NS)
        woken, error = -1, errno.ETIMEDOUT
        if left_ns > 0:
            word = self._arrived[peer]
            self._asleep[self._rank].value = peer + 1
            self._wake()  # the fence of the sleeper's side
            seen = word.value
            if (seen - target) % _WRAP >= _WRAP // 2:
                limit = _Timespec(0, left_ns)
                arguments = (ctypes.byref(word), _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
                woken = self._syscall(self._futex_number, *arguments)
                error = ctypes.get_errno()
            self._asleep[self._rank].value = 0
        if woken == 0 or error in (errno.ETIMEDOUT, errno.EINTR):
            return self._look_after(target, out_of_time=time.monotonic_ns() >= deadline_ns)
        return int(Status.OK), ()

    def _look_after(self, target: int, out_of_time: bool) -> Outcome:
        """What has become of the ranks that are missing; see look_after_peers in _barrier.c for the order."""
        ended_events = select.POLLIN | select.POLLRDHUP | select.POLLHUP | select.POLLERR
        ended = {self._rank_of_end[d] for d, events in self._ends.poll(0) if events & ended_events}
        states = [word.value for word in self._states]
        self._fence_unless_in_order()
        missing = self._missing(target)  # after both of the above: whoever arrived before its end has arrived
        fates: dict[int, Status] = {}
        for rank in missing:
            if states[rank] != State.ALIVE:
                fates[rank] = Status.LEFT if states[rank] == State.LEFT else Status.BROKEN
            elif rank in ended:
                fates[rank] = Status.LOST
        for status in _GRAVEST_FIRST:
            if status in fates.values():
                return int(status), tuple(r for r in missing if fates.get(r) == status)
        if missing and states[self._rank] != State.ALIVE:  # another thread of this rank gave the group back
            return int(Status.LEFT), (self._rank,)
        return (int(Status.LATE), tuple(missing)) if out_of_time and missing else (int(Status.OK), ())
