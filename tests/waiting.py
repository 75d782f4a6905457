"""Waiting for something to happen, with a limit: what a test does in place of a sleep of guessed length.

until(path.exists)
until(lambda: launched.printed.count("ready") == 2, told=lambda: launched.printed)

Three lengths of time, none of which says how fast a machine is; tests/test_timing.py holds tests to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

Answer = TypeVar("Answer")

# What a test waits for comes in milliseconds on an idle machine and in seconds on a busy one. Only a hang reaches this limit.
LIMIT_S = 150.0
# A time-out of the code under test that must not be waited for: who does wait for it reaches the limit above, and fails.
NEVER_S = 3600.0
# A time-out of the code under test that is to be reached, because nobody comes, whether the machine is fast or slow.
EXPIRES_S = 0.3


def until(
    what: Callable[[], Answer],
    limit_s: float = LIMIT_S,
    *,
    goes_on: Callable[[], object] = lambda: True,
    told: Callable[[], object] = lambda: "",
) -> Answer:
    """Ask ``what`` again and again until its answer is true, and return the answer.

    Fails after ``limit_s`` seconds, or as soon as ``goes_on`` is false (a process that ended, say), with what ``told`` returns.
    """
    deadline = time.monotonic() + limit_s
    while not (answer := what()):
        assert goes_on(), f"it ended before that: {told()}"
        assert time.monotonic() < deadline, f"it did not come within {limit_s:g} s: {told()}"
        time.sleep(0.01)
    return answer


def remaining(find: Callable[[], Collection[Answer]], limit_s: float = LIMIT_S) -> Collection[Answer]:
    """Ask again and again until nothing is found; return what is still found after so many seconds."""
    deadline = time.monotonic() + limit_s
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
