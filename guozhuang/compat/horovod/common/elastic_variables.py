"""The environment variables by which a worker of an elastic Horovod run finds its driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from guozhuang.compat.horovod.common.extension import ELASTIC as VARIABLE
from guozhuang.compat.horovod.common.variables import parsed
from guozhuang.errors import UsageError, explain

DEFAULT_TIMEOUT_S = 600
# ``claim`` appends this text and the worker's process id to the variable.
_CLAIMED_BY = " by "


@dataclass(frozen=True)
class Driver:
    """The address of an elastic run's driver, and the number by which the driver knows this worker.

    Attributes:
        host: the address of the driver's store from here, always on loopback.
        port: the TCP port of the store.
        worker: the number by which the driver knows this process.
        timeout_s: how long the driver may be silent before the worker fails, in seconds (HOROVOD_ELASTIC_TIMEOUT).
    """

    host: str
    port: int
    worker: int
    timeout_s: float


def driver(environ: Mapping[str, str] | None = None) -> Driver | None:
    """Return the elastic driver that started this process, or None. Callers learn from this whether the run is elastic.

    Processes that a worker forks or starts get None as well: each worker number belongs to one process. See ``claim``.

    Args:
        environ: the environment to look into; None: the one of this process.

    Raises:
        UsageError: the variables hold something that no driver wrote.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    text, _, pid = text.partition(_CLAIMED_BY)
    worker, _, address = text.partition("@")
    host, _, port = address.rpartition(":")
    if not (worker.isdecimal() and host and port.isdecimal() and (pid.isdecimal() or not pid)):
        what = (
            f"environment variable {VARIABLE} must hold the number of a worker and where its driver is, as 0@HOST:PORT"
        )
        raise UsageError(explain(what, value=text, fix="let horovodrun set it, or unset it"))
    if pid and int(pid) != os.getpid():
        return None
    limit = environ.get("HOROVOD_ELASTIC_TIMEOUT", "").strip() or DEFAULT_TIMEOUT_S
    timeout_s = parsed("elastic_timeout", limit, "environment variable HOROVOD_ELASTIC_TIMEOUT")
    return Driver(host, int(port), int(worker), timeout_s)


def claim() -> None:
    """Add this process's id to the driver's variable, so that child processes, which inherit it, are not taken for workers."""
    text = os.environ[VARIABLE].strip()
    assert driver() is not None
    if _CLAIMED_BY not in text:
        os.environ[VARIABLE] = f"{text}{_CLAIMED_BY}{os.getpid()}"


def verdict_key(round_number: int) -> str:
    """Return the key in the driver's store under which ranks that wait for each other find a reason to stop waiting.

    ``net.meet.roll_call`` uses this key in the first world of that round, under the prefix that ``session.meet`` chooses.
    """
    return f"guozhuang/{round_number}/1/verdict"
