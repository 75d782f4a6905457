"""A parameter server as a process of its own; ``guozhuang run --servers K`` starts K of them.

    python -m guozhuang.exchange.parameter_server.server --store HOST:PORT --number I --count K [--listen] [--stay]

It waits at the store for groups of workers that announce themselves, and serves each in a session of its own. It ends when all
workers of all sessions have left, when the store is gone, or, with a code other than 0, when a worker was lost. With
``--stay`` it waits for further workers whatever happens, until it is ended, or its store is gone, which is no failure.

``guozhuang run --server-hosts`` starts them on hosts of their own over ssh. Where they are started by hand, the one with
``--listen`` keeps the store at HOST:PORT, and the ranks find GUOZHUANG_SERVERS=K@HOST:PORT in their environment. With
GUOZHUANG_SECRET, equal for all, a door stands before the store.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError
from guozhuang.exchange.parameter_server import meeting
from guozhuang.exchange.parameter_server.session import Session
from guozhuang.net.door import Door
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.net.search import LOOPBACK
from guozhuang.net.store import listen
from guozhuang.net.store import serve as serve_store
from guozhuang.world.requests import requested_secret

_LOOK_S = 0.05
_LINGER_S = 2.0  # for another model's workers, after the last of one have left
_FIRST_S = 600.0  # for the first workers to come
_log = logging.getLogger("guozhuang")


class _Served:
    """One announced meeting, served in a thread."""

    def __init__(
        self, store: dist.Store, number: int, count: int, place: int, told: tuple[int, float], keeper: str
    ) -> None:
        self.failed = False
        self._arguments = meeting.place_of(store, number), told[0] + place, told[0], count, told[1], keeper
        self.thread = threading.Thread(target=self._serve, name="guozhuang session", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            met = meeting.join(*self._arguments)
        except (RuntimeError, OSError) as error:
            _log.error("parameter server: %s", error)
            self.failed = True
            return
        session = Session(met, says=True)
        session.wait()
        met.crossing.close()
        self.failed = bool(session.failed)


def serve(store: dist.Store, place: int, count: int, stay: bool, keeper: str = "", linger_s: float = _LINGER_S) -> int:
    """Serve until the work is done; return the exit code.

    Args:
        store: where workers announce themselves.
        place: of this server, from 0.
        count: how many servers there are.
        stay: whether to wait for further workers.
        keeper: see :func:`meeting.join`.
        linger_s: how long to wait for further workers otherwise, in seconds, after the last ones have left.
    """
    number, served, failed = 1, list[_Served](), False
    idle_since = time.monotonic()
    while True:
        try:
            told = meeting.announced(store, number)
        except RuntimeError:
            for each in served:  # they need it no more
                each.thread.join()
            if stay:  # the run is over
                return 0
            if number == 1:
                _log.error("parameter server %d: the store is gone before any worker came", place)
            return int(failed or number == 1 or any(each.failed for each in served))
        if told is not None:
            served.append(_Served(store, number, count, place, told, keeper))
            number += 1
            continue
        failed |= any(each.failed for each in served if not each.thread.is_alive())
        served = [each for each in served if each.thread.is_alive()]
        if served:
            idle_since = time.monotonic()
        elif not stay and (failed or time.monotonic() - idle_since > (linger_s if number > 1 else _FIRST_S)):
            if number == 1:
                _log.error("parameter server %d: no workers came within %g s", place, _FIRST_S)
            return int(failed or number == 1)
        time.sleep(_LOOK_S)


def main(arguments: Sequence[str]) -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(prog="guozhuang parameter server", allow_abbrev=False)
    parser.add_argument("--store", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--listen", action="store_true")
    parser.add_argument("--stay", action="store_true")
    found = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    torch.set_num_threads(1)  # each worker has its own thread here
    if not 0 <= found.number < found.count:
        parser.error(f"--number {found.number} is none of --count {found.count} servers, which count from 0")
    try:
        kept = keep(found.store) if found.listen else None
        store = meeting.connect(found.store, _FIRST_S) if kept is None else kept[0]
        return serve(store, found.number, found.count, found.stay, meeting.towards(found.store))
    except (UsageError, WorldError) as error:
        print(error, file=sys.stderr)
        return 1


def keep(address: str) -> tuple[dist.Store, Door | None]:
    """Keep the store of the servers at ``host:port`` of this host, behind a door if there is a secret.

    Raises:
        UsageError: one cannot listen there.
    """
    host, port = meeting.host_and_port(address)
    point = MeetingPoint(host, port, is_loopback_meant=meeting.towards(address) == "")
    secret = requested_secret()
    if not secret or point.is_loopback_meant:
        return serve_store(listen(point), _FIRST_S), None
    listener, inner = listen(point), socket.create_server((LOOPBACK, 0))
    inner_port = inner.getsockname()[1]
    return serve_store(inner, _FIRST_S), Door(listener, inner_port, secret)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of sessions may stand in gloo
