"""The environment variables of a worker of an elastic Horovod run: the address of the driver, and the worker's present rank.

The rank of a worker changes from round to round while its process continues. So the variables that other launchers set before
a process starts are written by the process itself here, before each ``init``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from guozhuang.compat.horovod.common.extension import ELASTIC as VARIABLE
from guozhuang.compat.horovod.common.extension import OF_A_PROCESS
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import interfaces
from guozhuang.world import machine
from guozhuang.world.variables import number

DEFAULT_TIMEOUT_S = 600
# Stands in the variable before the process id of the worker, once ``claim`` has added it.
_CLAIMED_BY = " by "
# Variables that an outer run may have left in the driver's environment, and that each round sets.
_STALE = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GUOZHUANG_LOCAL_RANK", "GUOZHUANG_SECRET",
    VARIABLE, *OF_A_PROCESS,
})  # fmt: skip
_STALE_BEGINNING = "TORCHELASTIC_"
_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class Driver:
    """The address of the driver, and its number for this worker.

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


@dataclass(frozen=True)
class Place:
    """The place of a worker in a round.

    Attributes:
        rank: the rank of the worker. size: the number of ranks.
        local_rank: its index among the ranks of its host. local_size: the number of ranks of its host.
        node_rank: the index of its host. num_nodes: the number of hosts.
        cross_rank: the index of its host among the hosts that have this local rank. cross_size: the number of those hosts.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    cross_rank: int
    cross_size: int


def driver(environ: Mapping[str, str] | None = None) -> Driver | None:
    """Return the driver that started this process; None if none did. Only this tells whether a run is elastic.

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
    fix = "give a number of seconds, or leave it out"
    timeout_s = number(environ, "HOROVOD_ELASTIC_TIMEOUT", at_least=1, fix=fix)
    return Driver(host, int(port), int(worker), DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)


def claim() -> None:
    """Add the id of this process to the variable, so that processes it starts, which inherit it, are not taken for workers."""
    text = os.environ[VARIABLE].strip()
    assert driver() is not None
    if _CLAIMED_BY not in text:
        os.environ[VARIABLE] = f"{text}{_CLAIMED_BY}{os.getpid()}"


def environment_of_workers(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of workers on this machine: that of this process without leftovers of outer runs, and ``more``."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _STALE and not name.startswith(_STALE_BEGINNING)
    }
    return own | dict(more)


def variables(told: Driver, host: str, num_local: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the additional variables of one worker.

    Args:
        told: the worker's number, and the address of the store from there.
        host: the name of its host, as the user or the discovery script wrote it.
        num_local: the largest number of workers on its host, which share the cores.
        environ: the rest of its environment; if that sets OMP_NUM_THREADS it is kept.
    """
    found = {
        VARIABLE: f"{told.worker}@{told.host}:{told.port}",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_ELASTIC_TIMEOUT": str(max(1, round(told.timeout_s))),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in environ:
        found["OMP_NUM_THREADS"] = str(max(1, machine.usable_cores() // num_local))
    return found


class Seat:
    """The writer of a worker's place into the environment of this process, once for each round.

    Args:
        told: the driver's address.
    """

    def __init__(self, told: Driver) -> None:
        self._told = told
        self._interfaces: tuple[str, ...] = ()

    def take(self, place: Place, round_number: int, towards: str) -> None:
        """Set the environment variables from which the next ``init`` reads this worker's rank.

        The ranks meet in the driver's store, as torch elastic's do in its agent's store; each round has its own part there. So
        the loss of rank 0 does not lose the store.

        Args:
            place: the place of the worker in the round.
            round_number: the number of the round, counted from 1.
            towards: an address by which this host reaches the driver's if ranks are on several machines; else "".
        """
        for name in self._interfaces:
            os.environ.pop(name, None)
        self._interfaces = ()
        if towards:
            try:
                found = interfaces.variables_towards(towards, os.environ)
            except WorldError as error:
                _log.warning("no network interface chosen for gloo and NCCL: %s", error)
                found = {}
            os.environ.update(found)
            self._interfaces = tuple(found)
        own = {
            "RANK": place.rank,
            "WORLD_SIZE": place.size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": place.local_size,
            "GROUP_RANK": place.node_rank,
            "GROUP_WORLD_SIZE": place.num_nodes,
            "MASTER_ADDR": self._told.host,
            "MASTER_PORT": self._told.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": round_number,
            "HOROVOD_RANK": place.rank,
            "HOROVOD_SIZE": place.size,
            "HOROVOD_LOCAL_RANK": place.local_rank,
            "HOROVOD_LOCAL_SIZE": place.local_size,
            "HOROVOD_CROSS_RANK": place.cross_rank,
            "HOROVOD_CROSS_SIZE": place.cross_size,
        }
        os.environ.update({name: str(value) for name, value in own.items()})


def verdict_key(round_number: int) -> str:
    """Return the key of the driver's store where ranks that wait for each other look for a reason to stop waiting.

    ``net.meet.roll_call`` uses this key in the first world of that round, under the prefix that ``session.meet`` chooses.
    """
    return f"guozhuang/{round_number}/1/verdict"
