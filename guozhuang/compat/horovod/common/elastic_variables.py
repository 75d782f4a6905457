"""An elastic Horovod run, as the environment of a worker tells of it: where the driver is, and which rank the worker has now.

A worker keeps its process while its rank changes from round to round. So the variables that other launchers export before a
process begins are written here, before each ``init``.
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
# In the variable, before the number of the process that is the worker.
_CLAIMED_BY = " by "
# What an outer run may have left in the driver's environment, and what each round writes anew.
_STALE = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GUOZHUANG_LOCAL_RANK", "GUOZHUANG_SECRET",
    VARIABLE, *OF_A_PROCESS,
})  # fmt: skip
_STALE_BEGINNING = "TORCHELASTIC_"
_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class Driver:
    """The driver of this worker.

    Attributes:
        host: where its store is reached from here; on loopback.
        port: the TCP port of the store.
        worker: the number by which the driver knows this process.
        timeout_s: how long the driver may be silent, in seconds (HOROVOD_ELASTIC_TIMEOUT).
    """

    host: str
    port: int
    worker: int
    timeout_s: float


@dataclass(frozen=True)
class Place:
    """The place of a worker in a round.

    Attributes:
        rank: of the worker. size: how many there are.
        local_rank: among those of its host. local_size: how many its host has.
        node_rank: its host. num_nodes: how many hosts there are.
        cross_rank: its host among those that have this local rank. cross_size: how many those are.
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
    """The driver that started this process; None if none did. This alone tells whether a run is elastic.

    None too in what a worker has forked or started: the driver knows one process by each number. See ``claim``.

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
    """This process is the worker: those that it forks or starts from now on, which inherit the variable, are none."""
    text = os.environ[VARIABLE].strip()
    assert driver() is not None
    if _CLAIMED_BY not in text:
        os.environ[VARIABLE] = f"{text}{_CLAIMED_BY}{os.getpid()}"


def environment_of_workers(more: Mapping[str, str]) -> dict[str, str]:
    """What workers on this machine get: this process's environment and ``more``, without what an outer run has left."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _STALE and not name.startswith(_STALE_BEGINNING)
    }
    return own | dict(more)


def variables(told: Driver, host: str, num_local: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What one worker gets besides.

    Args:
        told: its number, and where it reaches the store.
        host: the name of its host, as the user or the discovery script wrote it.
        num_local: how many workers its host may have.
        environ: what it gets otherwise; OMP_NUM_THREADS stays as it is there.
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
    """Where a worker sits: writes its place into the environment of this process, round after round.

    Args:
        told: by the driver.
    """

    def __init__(self, told: Driver) -> None:
        self._told = told
        self._interfaces: tuple[str, ...] = ()

    def take(self, place: Place, round_number: int, towards: str) -> None:
        """Be this rank from the next ``init`` on.

        The driver keeps the store where the ranks meet, as torch elastic does for its ranks; rounds have parts of their own
        there. So nothing is lost with rank 0.

        Args:
            place: in the round.
            round_number: counts rounds from 1.
            towards: an address of the driver's host as this one sees it, where ranks are on several machines; else "".
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
    """The key of the driver's store at which ranks that still wait for each other look for a reason to stop waiting.

    It is that of ``net.meet.roll_call`` in the first world of that round; ``session.meet`` names the part around it.
    """
    return f"guozhuang/{round_number}/1/verdict"
