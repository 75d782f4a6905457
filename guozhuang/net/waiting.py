"""Waiting that ends, and says what it waits for while it does.

[Note: waiting for a store] PyTorch limits how long a store's client waits for a key, and not how long for an answer: the
keeper's process may be stopped, or its cable cut, and the call does not come back; nor do signals get through to it. So
whatever talks to a store of another process does so in a thread, and who needs the answer waits for that thread with a limit.
A thread that never gets its answer stays behind until the process ends: nothing else can be done about it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from guozhuang.errors import WorldError, explain

# When one that waits says so for the first time, and how long after that again.
FIRST_NOTICE_S, NEXT_NOTICE_S = 10.0, 60.0
LOOK_AT_THE_KEEPER = "look whether its process is there and not stopped, and whether its node can be reached"
_log = logging.getLogger("guozhuang")
_T = TypeVar("_T")


class OverdueError(Exception):
    """The limit of ``attempt`` is over."""


class Notices:
    """The times at which somebody who waits says so: after 10 s, then once a minute."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next = self._started + FIRST_NOTICE_S
        self.num = 0

    def left_s(self) -> float:
        """Until the next one, in seconds."""
        return max(self._next - time.monotonic(), 0.0)

    def are_due(self) -> bool:
        """Whether one is; True once for each."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + NEXT_NOTICE_S
        self.num += 1
        return True

    def say(self, text: str) -> None:
        """A line in the log, with how long it has been."""
        _log.warning("after %.0f s: %s", time.monotonic() - self._started, text)


def attempt(limit_s: float, do: Callable[[], _T], still: Callable[[], str] = lambda: "") -> _T:
    """Call ``do`` in a thread of its own, and wait for it; signals get through meanwhile. See [Note: waiting for a store].

    Args:
        limit_s: for how long, in seconds.
        do: what to call. It should end by itself soon after the limit, where it can.
        still: asked now and then, in the calling thread, what is waited for; a text goes into the log, "" does not.

    Raises:
        OverdueError: ``do`` did not end in time; it goes on.
        BaseException: what ``do`` raised.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(do())
        except BaseException as error:
            errors.append(error)

    deadline, notices = time.monotonic() + limit_s, Notices()
    thread = threading.Thread(target=call, name="guozhuang store", daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
        thread.join(min(left_s, notices.left_s() or left_s))
        if thread.is_alive() and notices.are_due() and (text := still()):
            notices.say(text)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # else the exception and this frame hold each other
    if not answers:
        raise OverdueError
    return answers[0]


def within(
    limit_s: float, what: str, do: Callable[[], _T], *, rank: int | None = None, fix: str = LOOK_AT_THE_KEEPER
) -> _T:
    """Call ``do``, which asks another process for something, and give up when that does not answer.

    Args:
        limit_s: for how long it is waited for, in seconds.
        what: who is asked, for the error: "rank 0's store at 10.0.0.1:29500".
        do: what to call; in a thread of its own.
        rank: this rank, for the error.
        fix: the remedy, for the error.

    Raises:
        WorldError: it did not end in time.
        BaseException: what ``do`` raised.
    """
    try:
        return attempt(limit_s, do, lambda: f"{what} does not answer yet")
    except OverdueError:
        raise WorldError(explain(f"{what} has not answered for {limit_s:g} s", rank=rank, fix=fix)) from None


def why_no_connection(error: OSError) -> str:
    """In words, why no connection to a host came about."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved here ({error.strerror or error})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "the host does not answer"
    return str(error)
