"""Sends the function of ``horovod.run`` to its processes and the results back; as a program, calls the function in a process.

The launcher has a ``Mailbox``, and starts each process as ``python -m guozhuang.compat.horovod.runner.task``.

[Note: pickles] Unpickling can run any code, so only pickles of this run are read. The mailbox is a store on loopback of the
launcher's host, behind doors (``guozhuang.net.door``) that let in only processes that know the secret of the run. Other users
of that host could reach the store directly, so each pickle is also signed with the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.state import state
from guozhuang.compat.horovod.runner.doors import Doors, enter
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.door import NotOurDoorError
from guozhuang.net.interfaces import LOOPBACK
from guozhuang.net.store import connect, serve

_LIMIT_S = 60.0  # seconds to reach the mailbox, and for each request to its store
# A pickle is cut into parts of this size: PyTorch's store takes no value of more than 8 MiB.
_PART_BYTES = 4 << 20
_FUNCTION = "function"


class Mailbox:
    """A store in the launcher's process that gives the pickled function to processes and receives their results.

    Args:
        function: the pickled function, for every process.
        nics: the network interfaces on which to open doors for other hosts; None: no doors; empty: on all interfaces.
    """

    def __init__(self, function: bytes, nics: Sequence[str] | None) -> None:
        self._store = serve(socket.create_server((LOOPBACK, 0)), _LIMIT_S)
        self._doors = Doors(self._store.port, nics)
        self._secret = self._doors.secret
        _put(self._store, self._secret, _FUNCTION, function)
        *self._outer, self._inner = self._doors.open()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables by which the processes find the mailbox."""
        doors = ",".join(f"{host}:{port}" for host, port in (self._inner, *self._outer))
        return {"GUOZHUANG_TASK": f"{self._secret.hex()}@{doors}"}

    def result(self, rank: int) -> bytes | None:
        """Return the pickled result of a rank; None if the rank has sent none.

        Raises:
            WorldError: the signature is wrong, so another process has written or changed it.
        """
        key = _result_of(rank)
        return _get(self._store, self._secret, key) if self._store.check([key]) else None

    def close(self) -> None:
        """Close the mailbox's ``Doors``, so that no process can connect any more."""
        self._doors.close()


def _result_of(rank: int) -> str:
    return f"result of rank {rank}"


def _put(store: dist.Store, secret: bytes, key: str, data: bytes) -> None:
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    signature = _signature(secret, key, data)
    for number, part in enumerate(parts):
        # The signature is in the key because a rank may send two results, in two elastic rounds, whose parts must not mix.
        store.set(f"{key}/{signature}/{number}", part)  # type: ignore[arg-type]  # the store takes bytes too
    store.set(key, f"{len(parts)} {signature}")
    store.get(key)  # ``set`` does not wait for the store; the answer to this ``get`` shows that all parts arrived


def _get(store: dist.Store, secret: bytes, key: str) -> bytes:
    count, _, signature = store.get(key).decode().partition(" ")
    data = b"".join(store.get(f"{key}/{signature}/{number}") for number in range(int(count)))
    if not hmac.compare_digest(signature, _signature(secret, key, data)):
        raise WorldError(explain(f"the {key} is not what its sender signed, so it was not read"))
    return data


def _signature(secret: bytes, key: str, data: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + data, hashlib.sha256).hexdigest()


@contextlib.contextmanager
def visit(secret: bytes, doors: Sequence[tuple[str, int]]) -> Iterator[dist.Store]:
    """Connect to the mailbox from one of the processes; try for a minute, because a busy host may answer late.

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
    with contextlib.closing(passage):
        yield connect(*passage, timeout_s=_LIMIT_S)


def main() -> None:
    """Fetch the function, call it and send the result. An exception of the function ends the process with its traceback."""
    import cloudpickle

    secret, doors = _requested()
    with visit(secret, doors) as store:
        path, function = pickle.loads(_get(store, secret, _FUNCTION))
    # Add the ``sys.path`` of the program that called ``horovod.run``, so that modules beside its script can be imported.
    sys.path += [entry for entry in path if entry not in sys.path]
    result = cloudpickle.dumps(cloudpickle.loads(function)())
    with visit(secret, doors) as store:
        _put(store, secret, _result_of(_rank()), result)


def _requested() -> tuple[bytes, list[tuple[str, int]]]:
    """Return the secret of the run, and the address and port of each ``Door`` of the mailbox that holds the function.

    Both are read from environment variable GUOZHUANG_TASK, such as ``00ff...@127.0.0.1:41234,10.0.0.1:41235``, which is then
    removed, so that child processes do not inherit the secret.

    Raises:
        UsageError: the variable is missing, or holds something else.
    """
    secret, _, doors = os.environ.pop("GUOZHUANG_TASK", "").partition("@")
    try:
        found = [(host, int(port)) for host, _, port in (door.rpartition(":") for door in doors.split(","))]
        return bytes.fromhex(secret), found
    except ValueError:
        # The error does not show the variable's value, which holds the secret.
        what = "environment variable GUOZHUANG_TASK does not say where the function is to be found"
        raise UsageError(explain(what, fix="this program is started by horovod.run(), not by hand")) from None


def _rank() -> int:
    """Return the rank of this process among all that were launched; in an elastic run its rank in the present round.

    It may differ from the rank in the Horovod world: with ``hvd.init(comm=...)`` there may be several such worlds.
    """
    here = state()
    rank = horovod_variables.read().rank if here is None else here.world.rank
    if rank is None:
        fix = "this program is started by horovod.run(), not by hand"
        raise UsageError(explain("HOROVOD_RANK is not set, so nobody knows whose result this is", fix=fix))
    return rank


if __name__ == "__main__":
    main()
