"""The heartbeat: a rank that stops is named on all others, with the Python stacks of every rank that can still give one.

[Note: two threads] A client of a TCP store is one socket under one lock: a ``wait`` of the main thread would hold the beat
up, so the heartbeat has a client of its own (``store.clone()``). A keeper of the store that falls silent (a cut cable, a
stopped process) holds ``get`` and ``check`` for ever, whatever the store's time-out says, because torch limits only the
wait for a key. So one thread talks to the store, and nothing else waits for it; the other one, the guard, looks at the main
thread, keeps the clock, and notices that the first one has had no answer.

[Note: who watches] Every rank overwrites its own key once per interval and reads one key, the word of the watching rank;
only that rank reads all. With N ranks that is 2 N small requests per interval and one of N values, and the interval grows
above 500 ranks (above 50 behind a door), so the store sees 1000 requests a second at most. The watch begins at rank 0. Where
its word stays out, or its process is seen to be gone, the first rank that adds to the key of the next term takes over; two that
watch for a moment do no harm, the higher term counts.

[Note: the clock] A run that was stopped as a whole (Ctrl-Z, a suspended virtual machine) must not look like a hang when it
goes on. The clock of a rank is ticked by its guard and goes forward by two intervals at most per tick, so it stands while
the rank does.

[Note: how it ends] A main thread inside a wait of gloo or NCCL cannot be interrupted from Python, and an exception that is
set for later comes never. So after a hang the process ends at once, as NCCL's watchdog does it, with an exit code of its
own, after it has said why. Where only a rank was *lost* nothing is ended: gloo and "shm" raise by themselves then, in the
main thread, where a script can act on it. Who still waits ``hang_timeout_s`` later hangs, and is ended by that rule.

Nothing here takes a signal: stacks are read from a thread (``sys._current_frames``). A main thread that holds Python's
lock for ever in a C call therefore gives no beat and no stack; its neighbours say that its process is there.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from guozhuang.errors import UsageError, explain
from guozhuang.watch.beats import Heartbeat
from guozhuang.watch.judge import Limits

# Behind a door every request goes through the Python of rank 0, which has a training step to do.
_RANKS_PER_SECOND, _RANKS_PER_SECOND_BEHIND_A_DOOR = 500, 50
_log = logging.getLogger("guozhuang")


def start(
    store: dist.Store,
    rank: int,
    size: int,
    hang_timeout_s: float | None,
    *,
    keeps_store: bool = False,
    behind_door: bool = False,
    interval_s: float | None = None,
) -> bool:
    """Begin to give signs of life, and to hear those of the others. Every rank must call, after the group was made.

    Cheap, and returns at once. A second call for the same world does nothing. In a world of one, and with a store that is
    not a ``TCPStore`` (a file would grow with every beat), nothing is started, which is logged.

    Args:
        store: of this world: no other world may use its keys ("heartbeat/...").
        rank: of this process.
        size: number of ranks.
        hang_timeout_s: after so many seconds in which no rank started a collective while the main thread of one stood
            still, the stacks of all ranks are printed and every rank ends itself with exit code 75. None: lost ranks are
            reported, but nothing is ended and no hang is looked for. The value of the watching rank (first rank 0) counts.
        keeps_store: this process keeps the store itself: it then waits a moment in ``stop`` until others have let go.
        behind_door: the store is reached through a ``Door``, on every rank.
        interval_s: between two beats; None: 1 s, more above 500 ranks (50 behind a door). All other limits are multiples of
            it. The same on every rank.

    Returns:
        Whether a heartbeat runs.

    Raises:
        UsageError: a time that is not a number above 0.
    """
    for name, value in (("hang_timeout_s", hang_timeout_s), ("interval_s", interval_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(explain(f"{name} must be a number of seconds above 0", value=value, fix="leave it out"))
    if _state.running is not None:
        if (_state.running.rank, _state.running.size) == (rank, size):
            return True
        stop()
    if size == 1 or not isinstance(_innermost(store), dist.TCPStore):
        why = "there is one rank" if size == 1 else "the store of the world is no TCPStore"
        _log.log(logging.INFO if hang_timeout_s is None else logging.WARNING, "no heartbeat: %s", why)
        return False
    if not _state.handles_fork:
        os.register_at_fork(after_in_child=_forget)
        _state.handles_fork = True
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # again, to come before what was registered until now
    limits = Limits.of(usual_interval_s(size, behind_door) if interval_s is None else interval_s)
    prefixed: Any = dist.PrefixStore("heartbeat", store)
    own = prefixed.clone()  # See [Note: two threads].
    own.set_timeout(timedelta(seconds=limits.lost_s))
    _state.running = Heartbeat(own, rank, size, hang_timeout_s, limits, keeps_store)
    _state.running.start()
    return True


def usual_interval_s(size: int, behind_door: bool) -> float:
    """Between two beats of each of ``size`` ranks, so that the store has no more than 1000 requests per second (a door 100)."""
    return max(1.0, size / (_RANKS_PER_SECOND_BEHIND_A_DOOR if behind_door else _RANKS_PER_SECOND))


def stop(error: BaseException | None = None) -> None:
    """Say farewell, and end the threads. Without a heartbeat it does nothing.

    To be called before the process group is destroyed; at exit it is called by itself. Takes milliseconds; up to an interval
    where this process keeps the store and others still run; up to two seconds where the store does not answer; and until the
    report after an exception that came out of a collective, which may be the echo of what happened to another rank: an
    interval or two, at most three where nobody begins to gather it. Where a loss was reported before there is no wait.

    Args:
        error: why this rank leaves, told to the others; None: the exception that is being handled, if any.
    """
    running, _state.running = _state.running, None
    if running is not None:
        running.stop(error if error is not None else sys.exception())


@dataclass
class _State:
    running: Heartbeat | None = None
    handles_fork: bool = False


_state = _State()


def _at_exit() -> None:
    stop(getattr(sys, "last_value", None))


def _forget() -> None:
    """In a forked child, which has none of our threads and must not speak on our socket."""
    _state.running = None


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
