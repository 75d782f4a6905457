"""Parameter servers on one of several hosts: started after the meeting of all hosts, watched until the ranks are done."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from guozhuang.launch.servers import Servers

_LOOK_S = 0.05
# Servers end when the store of the run is gone, which is so at its end; the launcher then tells us to end within moments.
_STORE_GONE_S = 60.0


def run(servers: Servers, address: str, is_store_there: Callable[[], bool]) -> str:
    """Start servers and watch them until this process is told to end (SIGTERM), or one has ended. The caller closes them.

    Args:
        servers: those of this host.
        address: of the store of the run, ``host:port``.
        is_store_there: whether it can still be reached.

    Returns:
        Who ended too early, and how; "" if none did.
    """
    told: list[int] = []
    # A list, not an event: the handler runs in the thread that would hold the event's lock.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    gone_since: float | None = None
    servers.start(address)
    while not told:
        time.sleep(_LOOK_S)
        ended = servers.ended()
        if ended is None or told:
            continue
        if gone_since is None and is_store_there():
            return ended
        gone_since = gone_since or time.monotonic()
        if time.monotonic() > gone_since + _STORE_GONE_S:
            return f"{ended}, because the first host cannot be reached any more"
    return ""
