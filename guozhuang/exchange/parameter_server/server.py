"""A parameter server as a process of its own; ``guozhuang run --servers K`` starts K of them.

    python -m guozhuang.exchange.parameter_server.server --store HOST:PORT --number I --count K [--listen] [--stay]

The process polls the store for announcements of groups of workers, and serves each group. It exits when all workers of all
groups have left, when the store is gone, or, with an exit code other than 0, when a worker was lost. With ``--stay`` it waits
for further workers in any case, until it is killed, or until the store is gone, which then counts as success.

``guozhuang run --server-hosts`` starts servers on hosts of their own over ssh. To start them by hand, give ``--listen`` to one
of them, which then keeps the store at HOST:PORT, and set GUOZHUANG_SERVERS=K@HOST:PORT in the environment of the ranks. If
GUOZHUANG_SECRET is set, to the same value for all, only processes that know it can connect to the store.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ...errors import UsageError, WorldError
from ...groups.serial import SerialThread
from . import protocol
from .protocol import Announcement, ServerGroup
from .service import Service

_LOOK_S = 0.05
_LINGER_S = 2.0  # how long to wait for workers of another model after all workers have left
_FIRST_S = 600.0  # how long to wait for the first workers
_log = logging.getLogger("guozhuang")


class _ServedGroup:
    """Serves one announced group of workers, in a thread of its own."""

    def __init__(self, make: Callable[[], ServerGroup]) -> None:
        self.failed = False
        self._make = make
        self._thread = SerialThread("guozhuang session", "session")
        self.work = self._thread.run(self._serve)
        self._thread.close()

    def _serve(self) -> None:
        try:
            group = self._make()
        except (RuntimeError, OSError) as error:
            _log.error("parameter server: %s", error)
            self.failed = True
            return
        service = Service(group, says=True)
        service.wait_until_over()
        group.close()
        self.failed = bool(service.failed)


def serve(store: dist.Store, place: int, count: int, stay: bool, keeper: str = "", linger_s: float = _LINGER_S) -> int:
    """Serve groups of workers until all have left, or with ``stay`` until the store is gone; return the exit code.

    Args:
        store: the store in which workers announce groups.
        place: the number of this server, from 0.
        count: how many servers there are.
        stay: whether to wait for further workers.
        keeper: the host that keeps the store, if it may be another host than this one.
        linger_s: without ``stay``, how long to wait for further workers after the last ones have left, in seconds.
    """

    def join(number: int, found: Announcement) -> ServerGroup:
        own, size = protocol.store_of_group(store, number), found.num_workers
        return protocol.join(own, size + place, size, count, found.limit_s, keeper)

    number, served, failed = 1, list[_ServedGroup](), False
    idle_since = time.monotonic()
    while True:
        try:
            found = protocol.announced(store, number)
        except RuntimeError:
            for each in served:  # wait for connected groups, which no longer need the store
                each.work.wait()
            if stay:  # the store ended because the run is over
                return 0
            if number == 1:
                _log.error("parameter server %d: the store is gone before any worker came", place)
            return int(failed or number == 1 or any(each.failed for each in served))
        if found is not None:
            served.append(_ServedGroup(functools.partial(join, number, found)))
            number += 1
            continue
        failed |= any(each.failed for each in served if each.work.is_completed())
        served = [each for each in served if not each.work.is_completed()]
        if served:
            idle_since = time.monotonic()
        elif not stay and (failed or time.monotonic() - idle_since > (linger_s if number > 1 else _FIRST_S)):
            if number == 1:
                _log.error("parameter server %d: no workers came within %g s", place, _FIRST_S)
            return int(failed or number == 1)
        time.sleep(_LOOK_S)


def main(arguments: Sequence[str]) -> int:
    """Run a parameter server with these command-line arguments; return the exit code."""
    parser = argparse.ArgumentParser(prog="guozhuang parameter server", allow_abbrev=False)
    parser.add_argument("--store", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--listen", action="store_true")
    parser.add_argument("--stay", action="store_true")
    found = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    torch.set_num_threads(1)  # each worker is served by threads of its own, so torch needs no further ones
    if not 0 <= found.number < found.count:
        parser.error(f"--number {found.number} is none of --count {found.count} servers, which count from 0")
    try:
        kept = protocol.keep(found.store, _FIRST_S) if found.listen else None
        store = protocol.connect(found.store, _FIRST_S) if kept is None else kept.store
        return serve(store, found.number, found.count, found.stay, protocol.address_of(found.store).host)
    except (UsageError, WorldError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit could hang, because threads may be blocked in gloo
