"""Send the function of ``horovod.run`` to its processes, and their results back.

[Note: pickles] Unpickling can run any code, so only pickles of this run are read. The mailbox is a store on loopback of the
launcher's host, behind doors (``guozhuang.net.door``) that let in only processes that know the secret of the run. Other users
of that host could reach the store directly, so each pickle is also signed with the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from guozhuang.compat.horovod.runner.doors import Doors, enter
from guozhuang.errors import WorldError, explain
from guozhuang.net.door import NotOurDoorError
from guozhuang.net.store import connect, serve

_LOOPBACK = "127.0.0.1"
_LIMIT_S = 60.0  # limit for the mailbox to be reached, and for each request to its store
# A pickle is cut into parts of this size: PyTorch's store takes no value of more than 8 MiB.
_PART_BYTES = 4 << 20
_FUNCTION = "function"


class Mailbox:
    """The launcher's side of the mailbox. ``close`` ends it.

    Args:
        function: the pickled function, for every process.
        nics: the network interfaces on which to open doors for other hosts; None: no doors; empty: on all interfaces.
    """

    def __init__(self, function: bytes, nics: Sequence[str] | None) -> None:
        self._store = serve(socket.create_server((_LOOPBACK, 0)), _LIMIT_S)
        self._doors = Doors(self._store.port, nics)
        self._secret = self._doors.secret
        _put(self._store, self._secret, _FUNCTION, function)
        *self._outer, self._inner = self._doors.open()

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which the processes find the mailbox, for their environment."""
        doors = ",".join(f"{host}:{port}" for host, port in (self._inner, *self._outer))
        return {"GUOZHUANG_TASK": f"{self._secret.hex()}@{doors}"}

    def result(self, rank: int) -> bytes | None:
        """Return the pickled result of a rank; None if it left none.

        Raises:
            WorldError: the signature is wrong, so another process has written or changed it.
        """
        key = _result_of(rank)
        return _get(self._store, self._secret, key) if self._store.check([key]) else None

    def close(self) -> None:
        """Close the doors, so that no process can connect any more."""
        self._doors.close()


@contextlib.contextmanager
def visit(secret: bytes, doors: Sequence[tuple[str, int]]) -> Iterator[Visitor]:
    """Connect to the mailbox from one of the processes. A busy host may answer late, so it tries again for a minute.

    Args:
        secret: the secret of the run.
        doors: address and port of each door; the first that lets the process in is used.

    Raises:
        WorldError: no door let the process in.
    """
    try:
        passage, _ = enter(doors, secret, _LIMIT_S)
    except NotOurDoorError as error:
        what = f"the host that called horovod.run cannot be reached: {error}"
        fix = "choose a network that leads there by network_interfaces, or check its firewall"
        raise WorldError(explain(what, fix=fix)) from None
    try:
        yield Visitor(connect(*passage, timeout_s=_LIMIT_S), secret)
    finally:
        passage.close()


class Visitor:
    """A process's side of the mailbox; ``visit`` makes it."""

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def function(self) -> bytes:
        """Return the pickled function that the launcher left.

        Raises:
            WorldError: the signature is wrong, so another process has written or changed it.
        """
        return _get(self._store, self._secret, _FUNCTION)

    def leave(self, rank: int, result: bytes) -> None:
        """Send the pickled result of a rank."""
        _put(self._store, self._secret, _result_of(rank), result)


def _result_of(rank: int) -> str:
    return f"result of rank {rank}"


def _put(store: dist.Store, secret: bytes, key: str, data: bytes) -> None:
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    signature = _signature(secret, key, data)
    for number, part in enumerate(parts):
        # The key has the signature: a rank may leave two results, in two elastic rounds, and their parts must not mix.
        store.set(f"{key}/{signature}/{number}", part)  # type: ignore[arg-type]  # the store takes bytes too
    store.set(key, f"{len(parts)} {signature}")
    store.get(key)  # a set returns before the store has it; the answer to this get comes after all of them


def _get(store: dist.Store, secret: bytes, key: str) -> bytes:
    count, _, signature = store.get(key).decode().partition(" ")
    data = b"".join(store.get(f"{key}/{signature}/{number}") for number in range(int(count)))
    if not hmac.compare_digest(signature, _signature(secret, key, data)):
        raise WorldError(explain(f"the {key} is not what its sender signed, so it was not read"))
    return data


def _signature(secret: bytes, key: str, data: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + data, hashlib.sha256).hexdigest()
