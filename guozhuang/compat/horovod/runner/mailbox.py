"""How the function of ``horovod.run`` comes to its processes, and what they return comes back.

[Note: pickles] Reading a pickle can run anything, so none is read that did not come from this run. The mailbox is a store on
loopback of the launcher's host, behind doors (``guozhuang.net.door``) that let in who knows a secret of the run. Other users
of that host could reach the store itself; so each pickle is signed with the secret too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from guozhuang.errors import WorldError, explain
from guozhuang.net import interfaces
from guozhuang.net.door import Door, NotOurDoorError, knock, passage_from
from guozhuang.net.store import connect, serve

_SECRET_BYTES = 32
_LOOPBACK = "127.0.0.1"
_LIMIT_S = 60.0  # for a part that was announced to be there
_KNOCK_S = 5.0
_PAUSE_S = 0.5  # between two rounds of knocking
_MAX_DOORS = 16
# PyTorch's store takes no value of more than 8 MiB.
_PART_BYTES = 4 << 20
_FUNCTION = "function"


class Mailbox:
    """The launcher's side. ``close`` ends it.

    Args:
        function: a pickle, for every process.
        nics: the network interfaces at which other hosts may come; None: none will come; empty: all.
    """

    def __init__(self, function: bytes, nics: Sequence[str] | None) -> None:
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._store = serve(socket.create_server((_LOOPBACK, 0)), _LIMIT_S)
        _put(self._store, self._secret, _FUNCTION, function)
        self._doors: list[Door] = []
        for address in [_LOOPBACK, *([] if nics is None else _addresses(nics))]:
            with contextlib.suppress(OSError):  # the others will do, or nobody comes in and says so
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, 0), family=family)
                self._doors.append(Door(listener, self._store.port, self._secret))

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of the processes."""
        doors = ",".join(f"{host}:{port}" for host, port in (door.address for door in self._doors))
        return {"GUOZHUANG_TASK": f"{self._secret.hex()}@{doors}"}

    def result(self, rank: int) -> bytes | None:
        """What the process of that rank returned, a pickle; None if nothing came.

        Raises:
            WorldError: it was changed on its way.
        """
        key = _result_of(rank)
        return _get(self._store, self._secret, key) if self._store.check([key]) else None

    def close(self) -> None:
        """Let nobody in any more."""
        for door in self._doors:
            door.close()


@contextlib.contextmanager
def visit(secret: bytes, doors: Sequence[tuple[str, int]]) -> Iterator[Visitor]:
    """Come to the mailbox from one of the processes. A host that is busy may answer late, so it is tried again for a minute.

    Args:
        secret: of the run.
        doors: addresses and ports, of which one lets us in.

    Raises:
        WorldError: none did.
    """
    host, port, first = _entered(secret, doors)
    passage = passage_from(first, host, port, secret)
    try:
        yield Visitor(connect(*passage, timeout_s=_LIMIT_S), secret)
    finally:
        passage.close()


def _entered(secret: bytes, doors: Sequence[tuple[str, int]]) -> tuple[str, int, socket.socket]:
    """The door that let us in, and the way through it."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        refused = []
        for host, port in doors:
            try:
                return host, port, knock(host, port, secret, _KNOCK_S)
            except (OSError, NotOurDoorError) as error:
                refused.append(f"{host} port {port}: {error}")
        if time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE_S)
    what = f"the host that called horovod.run cannot be reached: {'; '.join(refused)}"
    raise WorldError(
        explain(what, fix="choose a network that leads there by network_interfaces, or check its firewall")
    )


class Visitor:
    """A process's side; see ``visit``."""

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def function(self) -> bytes:
        """The pickle that the launcher left.

        Raises:
            WorldError: it was changed on its way.
        """
        return _get(self._store, self._secret, _FUNCTION)

    def leave(self, rank: int, result: bytes) -> None:
        """Leave what the process of that rank returns, a pickle."""
        _put(self._store, self._secret, _result_of(rank), result)


def _result_of(rank: int) -> str:
    return f"result of rank {rank}"


def _put(store: dist.Store, secret: bytes, key: str, data: bytes) -> None:
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    signature = _signature(secret, key, data)
    for number, part in enumerate(parts):
        # A process may leave a result twice, in two rounds of an elastic run: parts of both must not mix.
        store.set(f"{key}/{signature}/{number}", part)  # type: ignore[arg-type]  # bytes are taken, and come back
    store.set(key, f"{len(parts)} {signature}")
    store.get(key)  # its answer comes after all has arrived: what was set may still be on its way otherwise


def _get(store: dist.Store, secret: bytes, key: str) -> bytes:
    count, _, signature = store.get(key).decode().partition(" ")
    data = b"".join(store.get(f"{key}/{signature}/{number}") for number in range(int(count)))
    if not hmac.compare_digest(signature, _signature(secret, key, data)):
        raise WorldError(explain(f"the {key} is not what its sender signed, so it was not read"))
    return data


def _signature(secret: bytes, key: str, data: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + data, hashlib.sha256).hexdigest()


def _addresses(nics: Sequence[str]) -> list[str]:
    """Of this host, that others might reach; those of ``nics`` alone if it names any."""
    if nics:
        return [interfaces.named(name).address for name in nics]
    found = [
        address
        for name, known in interfaces.addresses().items()
        for address in known
        if not interfaces.is_local_bridge(name) and "%" not in address
    ]
    usable = [
        each
        for each in found
        if not (ipaddress.ip_address(each).is_loopback or ipaddress.ip_address(each).is_link_local)
    ]
    return sorted(usable, key=lambda address: ":" in address)[: _MAX_DOORS - 1]
