"""An elastic Horovod run, as the environment of a worker tells of it: where the driver is, and which rank the worker has now.

A worker keeps its process while its rank changes from round to round. So the variables that other launchers export before a
process begins are written here, before each ``init``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.world import cores, interfaces
from guozhuang.world.variables import number

VARIABLE = "GUOZHUANG_HOROVOD_ELASTIC"
DEFAULT_TIMEOUT_S = 600
# What an outer run may have left in the driver's environment, and what each round writes anew.
_STALE = (
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "GUOZHUANG_LOCAL_RANK",
    "GUOZHUANG_SECRET",
    "HOROVOD_RANK",
)
_STALE_NAMES = ("RANK", "WORLD_SIZE", VARIABLE)
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
    """The driver that started this process; None if none did.

    Args:
        environ: the environment to look into; None: the one of this process.

    Raises:
        UsageError: the variables hold something that no driver wrote.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    worker, _, address = text.partition("@")
    host, _, port = address.rpartition(":")
    if not (worker.isdecimal() and host and port.isdecimal()):
        what = (
            f"environment variable {VARIABLE} must hold the number of a worker and where its driver is, as 0@HOST:PORT"
        )
        raise UsageError(explain(what, value=text, fix="let horovodrun set it, or unset it"))
    fix = "give a number of seconds, or leave it out"
    timeout_s = number(environ, "HOROVOD_ELASTIC_TIMEOUT", at_least=1, fix=fix)
    return Driver(host, int(port), int(worker), DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)


def environment_of_workers(more: Mapping[str, str]) -> dict[str, str]:
    """What workers on this machine get: this process's environment and ``more``, without what an outer run has left."""
    own = {
        name: value for name, value in os.environ.items() if name not in _STALE_NAMES and not name.startswith(_STALE)
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
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_NUM_THREADS" not in environ:
        found["OMP_NUM_THREADS"] = str(max(1, cores.usable_cores() // num_local))
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

    It is that of ``rendezvous.roll_call`` in the first world of that round; ``session.meet`` names the part around it.
    """
    return f"guozhuang/{round_number}/1/verdict"
