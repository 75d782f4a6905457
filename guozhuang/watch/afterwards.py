"""After a rank has left its world with a time-out for hangs: whether its main thread stands still for long.

The rule for hangs in a world (``judge``) needs the other ranks, which may have ended by then. So the main thread alone counts,
and has more time: ranks that wait for this one in the world since it left say so first.
"""

from __future__ import annotations

import contextlib
import threading

from guozhuang.watch.judge import AwakeClock
from guozhuang.watch.report import EXIT_CODE, end
from guozhuang.watch.stacks import OWN_THREADS, MainThread, stacks_text

_LOOKS = 8  # per time-out, and at least one per second
_TIMES, _MORE_S = 2, 5.0  # the main thread has so many times the time-out, and so much more
_over: threading.Event | None = None


def start(rank: int, hang_timeout_s: float, error_file: str) -> None:
    """End this process with a report, once its main thread has been standing at one place for twice the time-out and 5 s.

    Does nothing where the interpreter ends already: from Python 3.12 on no thread can start there.

    Args:
        rank: that of this process in the world that it leaves.
        error_file: the file by which the agent that started this rank learns why it ended; "" without one.
    """
    global _over
    stop()
    _over = threading.Event()
    what = (_over, rank, hang_timeout_s, error_file)
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_watch, args=what, name=f"{OWN_THREADS} afterwards", daemon=True).start()


def stop() -> None:
    """Watch no more, because the process enters a world again."""
    if _over is not None:
        _over.set()


def _watch(over: threading.Event, rank: int, hang_timeout_s: float, error_file: str) -> None:
    interval_s = min(1.0, hang_timeout_s / _LOOKS)
    clock, main, now_s = AwakeClock(2 * interval_s), MainThread(0.0), 0.0
    while not over.wait(interval_s):
        now_s = clock.tick()
        main.look(now_s)
        if main.still_s(now_s) < _TIMES * hang_timeout_s + _MORE_S:
            continue
        hang = f"rank {rank} has left the world, and does not end: it stands at {main.place.text}"
        why = f"for {main.still_s(now_s):.0f} s (--hang-timeout {hang_timeout_s:g})"
        what = f"[rank {rank}] hang: {hang} {why}, and ends itself with exit code {EXIT_CODE}"
        end(f"{what}\n{stacks_text()}", 0.0, hang, error_file)
