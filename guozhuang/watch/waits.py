"""Adds up the time in which the thread that trains waits for other ranks, and counts the collectives that it has started."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class Waits:
    """Adds up the time in which one thread waits for other ranks; nested waits count once.

    Attributes:
        thread: the identity of that thread; 0: nothing is measured, which costs one comparison.
        total_ns: the sum so far.
    """

    def __init__(self) -> None:
        self.thread = 0
        self.total_ns = 0
        self._is_inside = False

    def measure(self) -> None:
        """Measure the waits of the calling thread from now on."""
        self.thread = threading.get_ident()

    def begin(self) -> int:
        """Begin a wait; return what :meth:`end` takes."""
        if not self.thread or self._is_inside or threading.get_ident() != self.thread:
            return 0
        self._is_inside = True
        return time.perf_counter_ns()

    def end(self, began_ns: int) -> None:
        """End the wait that :meth:`begin` began."""
        if began_ns:
            self.total_ns += time.perf_counter_ns() - began_ns
            self._is_inside = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Count the time inside of the ``with`` block as a wait."""
        began_ns = self.begin()
        try:
            yield
        finally:
            self.end(began_ns)

    def for_work(self, work: Any) -> None:
        """Wait for a work, and count the time, unless the work is made of others: what it computes itself is no wait."""
        if not isinstance(work, dist.Work):
            work.wait()
            return
        began_ns = self.begin()
        try:
            work.wait()
        finally:
            self.end(began_ns)


#: The waits of this process's main thread.
waits = Waits()


def num_started(group: Any) -> int:
    """Return how many collectives, and in some backends messages, this rank has started in a group; 0 if it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:  # the backend does not count, or the group is being destroyed
        return 0
