"""Which thread processes what sends and receives wait for: a thread of the group's own, or whoever waits for a transfer.

[Note: who waits attends] A message for a thread that waits should not wake another thread first: a switch of threads costs more
than all else that a small message needs. So the state of the transfers belongs to whoever holds one lock. A thread that
begins a transfer takes the lock if it is free, and writes its message itself. A thread that waits for a transfer holds the
lock until the transfer has ended, and processes what arrives meanwhile, also for others. The group's own thread processes what
arrives while nobody waits. For a moment after each wait, and after each transfer that ended as it began, it stays away: it
polls nothing but the eventfd, so that a thread that waits again and again is not disturbed; what arrives for nobody then lies
for that moment.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Set
from typing import Final, Protocol, TypeVar

from guozhuang.errors import UsageError, explain

_AWAY_S: Final = 0.002
_LONGEST_AWAY_S: Final = 0.02  # while one thread waits for long
_MOMENT_S: Final = 0.0005
_MOST_VAIN: Final = 4  # looks in vain that make the next ones rarer: each doubles the occasions without one
_ACTIVE_S: Final = 1.0  # the thread sleeps in naps for so long after the last wait, so that nobody needs to wake it
_NAP_S: Final = 0.2
_LONGEST_SLEEP_S: Final = 3600.0
_NONE: Final[Set[int]] = frozenset()
_A = TypeVar("_A")
_T = TypeVar("_T")


class Looks(Protocol):
    """Looks for messages that wait in memory, beside those that make descriptors ready."""

    def spin(self, limit_s: float, /) -> bool:
        """Look for at most so many seconds; return whether there is a message."""

    def arm(self) -> bool:
        """Have the next message make a descriptor ready; return whether there is one already."""


class SpinLimit:
    """How long to look for something before one does other things: not at all on some occasions after looks in vain."""

    def __init__(self) -> None:
        self._vain = self._skips = 0  # looks in vain, one after the other; occasions that do without

    def of(self, limit_s: float) -> float:
        """Return the given limit of a look, in seconds, or 0."""
        return 0.0 if self._skips else limit_s

    def next_of(self, limit_s: float) -> float:
        """Return the same on the next occasion."""
        if self._skips:
            self._skips -= 1
        return 0.0 if self._skips else limit_s

    def count(self, found: bool) -> None:
        """Count a look; those in vain are counted also where both ranks share a core."""
        self._vain = 0 if found else min(self._vain + 1, _MOST_VAIN)
        self._skips = 2**self._vain if self._vain else 0


class Attendant:
    """Calls one function, in one thread at a time, with the descriptors that are ready. See [Note: who waits attends].

    Args:
        process: called with the descriptors that are ready, or None where a transfer has begun, under ``lock``; returns for
            how many seconds nothing needs to be looked at but descriptors and messages. It must not raise.
        has_ended: whether no more calls shall be made.
        spin_s: how long a waiting thread looks again and again before it sleeps, in seconds.
        messages: looks for messages in memory.

    Attributes:
        lock: held by the thread that uses the state of the transfers.
    """

    def __init__(
        self,
        process: Callable[[Set[int] | None], float],
        has_ended: Callable[[], bool],
        spin_s: float,
        messages: Looks,
    ) -> None:
        self.lock = threading.Lock()
        self._messages = messages
        self._process, self._has_ended, self._spin_s = process, has_ended, spin_s
        self._opening = threading.Lock()  # guards the next attribute
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # For the own thread, the thread that waits, and a wait inside of that wait: an object cannot poll twice at a time.
        self._pollers = select.poll(), select.poll(), select.poll()
        self._for_wake = select.poll()
        self._for_wake.register(self._wake_fd, select.POLLIN)
        self.register(self._wake_fd, select.POLLIN)
        self._sleep_s, self._away_until, self._sleeps_long = 0.0, 0.0, False
        self._sleeps = False  # whether the own thread polls all descriptors
        self._attending = 0  # the thread that waits and processes meanwhile
        self._processing = 0  # the thread that is inside ``process``
        self._spins = SpinLimit()  # of waits

    def register(self, fd: int, events: int) -> None:
        """Poll a descriptor for these events from now on; also changes the events."""
        for poller in self._pollers:
            poller.register(fd, events)

    def unregister(self, fd: int) -> None:
        """Poll a descriptor no more."""
        for poller in self._pollers:
            poller.unregister(fd)

    def wake(self) -> None:
        """Let a thread call ``process`` soon. Any thread may call this."""
        with self._opening:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the eventfd. No thread may poll any more."""
        with self._opening:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def serve(self) -> None:
        """Process in this thread, which is the group's own, until the end."""
        away_s = _AWAY_S
        while not self._has_ended():
            if self._attending or time.monotonic() < self._away_until:
                woken = self._for_wake.poll(away_s * 1e3)
                away_s = min(2 * away_s, _LONGEST_AWAY_S) if self._attending else _AWAY_S
                if woken:
                    with self.lock:
                        self._call({fd for fd, _ in woken})
                continue
            self._sleeps_long = time.monotonic() > self._away_until + _ACTIVE_S
            self._sleeps = True
            ready = self._poll(self._pollers[0], _LONGEST_SLEEP_S if self._sleeps_long else _NAP_S)
            self._sleeps = self._sleeps_long = False
            if not self._attending:
                with self.lock:
                    self._call(ready)

    def look(self, first: Callable[[float], bool], spin_s: float) -> bool:
        """Before ``attend``: have ``first`` look under ``lock`` for what is waited for, for the seconds that it is given.

        These are ``spin_s``, or 0 after looks in vain.

        Returns:
            What ``first`` returns: whether it came. False without a call if the lock is not free.
        """
        if self._attending or not self.lock.acquire(False):
            return False
        spin_s, found = self._spins.of(spin_s), False
        try:
            self._attending = threading.get_ident()
            found = first(spin_s)
        finally:
            if spin_s:
                self._spins.count(found)
            self.stay_away()
            self._attending = 0
            self.lock.release()
        return found

    def attend(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Process in this thread until ``is_done()``, at most ``limit_s`` seconds; return at once if another thread does.

        Args:
            is_done: whether what is waited for has come.
            limit_s: the longest wait, in seconds.

        Raises:
            UsageError: this thread is inside ``process``, so that nobody could process what this wait is for.
            BaseException: what a signal's handler raises in this thread.
        """
        is_nested = self._attending == threading.get_ident()  # the handler of a signal waits inside of a wait
        if self._processing == threading.get_ident():  # in a callback, or in the handler of a signal
            if is_done():
                return
            what = "a send or a receive was waited for inside of another one, which would wait for itself"
            raise UsageError(explain(what, fix="start it there, and wait for it in another place"))
        while not is_nested and not self.lock.acquire(timeout=_MOMENT_S):
            if self._attending or is_done():
                return
        begin = now = time.monotonic()
        spin_s, poller = 0.0, self._pollers[2 if is_nested else 1]
        try:
            self._attending = threading.get_ident()
            spin_s = self._spins.next_of(self._spin_s)
            while not is_done() and not self._has_ended() and now < begin + limit_s:
                if now >= begin + spin_s:
                    self._call(self._poll(poller, begin + limit_s - now))
                elif self._messages.spin(min(begin + spin_s - now, limit_s)):
                    self._call(_NONE)
                now = time.monotonic()
            if spin_s:
                self._spins.count(now <= begin + spin_s)
        finally:
            if not is_nested:
                self.stay_away()
                self._attending = 0
                if self._sleeps and self._messages.arm():  # this thread may have read what was to wake the own one
                    self.wake()
                self.lock.release()
                # The own thread may stay away for longer, or sleep through a wake that this thread has read.
                if now > begin + _LONGEST_AWAY_S or self._sleeps_long:
                    self.wake()

    def attend_now(self) -> None:
        """Let ``process`` know that a transfer has begun, in this thread if none is at it, else in that one."""
        if not self.at_once(self._begun, None) or self._sleeps_long:
            self.wake()

    def _begun(self, ready: Set[int] | None) -> bool:
        self._sleep_s = self._process(ready)
        return True

    def stay_away(self) -> None:
        """Let the own thread stay away for a moment from now on. See [Note: who waits attends]."""
        self._away_until = time.monotonic() + _AWAY_S

    def at_once(self, first: Callable[[_A], _T], argument: _A) -> _T | None:
        """Call ``first`` in this thread under ``lock`` if no thread holds that, and return what it returns; else None."""
        if not self.lock.acquire(False):
            return None
        try:
            self._processing = threading.get_ident()
            return first(argument)
        finally:
            self._processing = 0
            self.lock.release()

    def _poll(self, poller: select.poll, at_most_s: float) -> Set[int]:
        """Sleep until a descriptor is ready, or not at all if a message is there; return the descriptors."""
        limit_ms = max(min(self._sleep_s, at_most_s), 0.0) * 1e3 + 1
        return {fd for fd, _ in poller.poll(0 if self._messages.arm() else limit_ms)}

    def _call(self, ready: Set[int]) -> None:
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        self._processing = threading.get_ident()
        try:
            self._sleep_s = self._process(ready)
        finally:
            self._processing = 0
