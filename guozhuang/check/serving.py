"""What a rank does once it has called rank 0: tell the time, be one end of a pair, take part in all_reduce."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

from guozhuang.check import links, reductions
from guozhuang.check.ending import Ending
from guozhuang.check.results import Facts
from guozhuang.check.wire import Line, call, listen
from guozhuang.errors import UsageError

#: The name of the thread that is in a collective.
REDUCER = "guozhuang all_reduce"
_CALL_S = 5.0
_LEAVE_S = 2.0


def serve(own: Facts, record: dict[str, Any], timeout_s: float, ending: Ending | None = None) -> None:
    """Do what the conductor says until it says that it is over.

    Raises:
        OSError: the conductor cannot be reached, or is gone.
    """
    address = record["address_of"][str(own.rank)]
    try:
        listener = listen(address or "127.0.0.1")
    except OSError as error:
        raise OSError(f"cannot listen at {address} ({own.network.in_use}): {error}") from error
    with listener, contextlib.closing(_call(own, record, listener.getsockname()[1])) as line:
        if ending is not None:
            ending.line = line
        worker: threading.Thread | None = None
        # Another rank may use up the limit of the step before this one; for a silent conductor nobody waits longer.
        while (said := line.receive(2 * timeout_s + links.PAIR_LIMIT_S))["do"] != "end":
            if said["do"] == "tell":
                line.send(time_s=time.time())
            elif said["do"] == "reduce":
                # In a thread, so that this one hears if the check is over while a collective hangs.
                worker = threading.Thread(target=_reduce, args=(line, said), name=REDUCER, daemon=True)
                worker.start()
            else:
                line.send(**_pair(said, listener))
        if worker is not None:
            worker.join(_LEAVE_S)


def _call(own: Facts, record: dict[str, Any], port: int) -> Line:
    wrong = []
    for address in record["addresses"]:
        try:
            return call(address, record["port"], _CALL_S, word=record["word"], rank=own.rank, own_port=port)
        except OSError as error:
            wrong.append(f"{address}:{record['port']}: {error}")
    raise OSError(f"rank 0 cannot be reached at {'; '.join(wrong)}")


def _pair(said: dict[str, Any], listener: socket.socket) -> dict[str, Any]:
    """One end of a pair; ``figures`` come from the end that leads."""
    try:
        if said["do"] == "be called":
            links.measure_as_called(listener, said["word"], said["within_s"])
            return {"failure": "", "figures": {}}
        return {
            "failure": "",
            "figures": links.measure_as_caller(said["address"], said["port"], said["word"], said["within_s"]),
        }
    except OSError as error:
        where = f"{said['address']} port {said['port']}: " if said["do"] == "call" else ""
        return {"failure": f"{where}{error}", "figures": {}}


def _reduce(line: Line, said: dict[str, Any]) -> None:
    timings: list[dict[str, Any]] = []
    failure, refused = "", False
    try:
        for timing in reductions.measure(said["within_s"], said["sizes"]):
            timings.append(asdict(timing))
    except Exception as error:  # a bug, too: a thread that dies would look like a rank that is stuck
        expected = isinstance(error, RuntimeError | ValueError | OSError) and str(error)
        failure, refused = str(error) if expected else repr(error), isinstance(error, UsageError)
    with contextlib.suppress(OSError):  # the conductor has given up on us
        line.send(timings=timings, failure=failure, refused=refused)
