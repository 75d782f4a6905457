"""Parameter servers on one of several hosts: started after the meeting of all hosts, watched until the ranks are done."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from guozhuang.launch.servers import Servers

_LOOK_S = 0.05


def run(servers: Servers, address: str, is_store_there: Callable[[], bool]) -> str:
    """Start servers and watch them until this process is told to end (SIGTERM), or one has ended. The caller closes them.

    Args:
        servers: those of this host.
        address: of the store of the run, ``host:port``.
        is_store_there: whether it can still be reached.

    Returns:
        Who ended too early, and how; or that this process was told to end, which it is at the end of a run, too.
    """
    told: list[int] = []
    # A list, not an event: the handler runs in the thread that would hold the event's lock.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    is_over = False
    servers.start(address)
    while not told:
        time.sleep(_LOOK_S)
        ended = None if is_over else servers.ended()
        if ended is None or told:
            continue
        if is_store_there():
            return ended
        # The run is over, or the first host is lost. The launcher learns both by itself, however late: it may be stopped
        # (Ctrl-Z) or stand before a pager, and a run that has ended well must not fail for it.
        is_over = True
    return f"its servers were told to end by {signal.Signals(told[0]).name}"
