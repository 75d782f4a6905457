"""A store in the launcher's process that hands a pickled function to the ranks, and takes back what it returned or raised.

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
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.door import NotOurDoorError
from guozhuang.net.doors import Doors, enter
from guozhuang.net.interfaces import LOOPBACK
from guozhuang.net.store import connect, serve

_LIMIT_S = 60.0  # seconds to reach the mailbox, and for each request to its store
# A pickle is cut into parts of this size: PyTorch's store takes no value of more than 8 MiB.
_PART_BYTES = 4 << 20
_FUNCTION = "function"


@dataclass(frozen=True)
class Answer:
    """What a rank sends when its function has ended.

    Attributes:
        result: what the function returned.
        trace: the traceback of the exception that it raised; empty if it returned.
        error: that exception; None if it returned, or if the exception cannot be pickled.
    """

    result: Any
    trace: str = ""
    error: BaseException | None = None


class Mailbox:
    """The launcher's end: it gives the function to the processes, and receives their answers.

    Args:
        function: takes no arguments; pickled by cloudpickle, with the ``sys.path`` of this process.
        nics: the network interfaces on which to open doors for other hosts; None: no doors; empty: on all interfaces.

    Raises:
        UsageError: the function cannot be pickled; nothing was opened.
    """

    def __init__(self, function: Callable[[], Any], nics: Sequence[str] | None = None) -> None:
        try:
            pickled = cloudpickle.dumps(function)
        except Exception as error:
            what = (
                f"the function, its arguments or what it uses of your program cannot be pickled for the ranks: {error}"
            )
            fix = "make such things (locks, open files, connections, generators) inside the function"
            raise UsageError(explain(what, fix=fix)) from error
        self._store = serve(socket.create_server((LOOPBACK, 0)), _LIMIT_S)
        self._doors = Doors(self._store.port, nics)
        self._secret = self._doors.secret
        _put(self._store, self._secret, _FUNCTION, pickle.dumps((sys.path, pickled)))
        *self._outer, self._inner = self._doors.open()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables by which the processes find the mailbox."""
        doors = ",".join(f"{host}:{port}" for host, port in (self._inner, *self._outer))
        return {"GUOZHUANG_TASK": f"{self._secret.hex()}@{doors}"}

    def answer(self, rank: int) -> Answer | None:
        """Return what a rank has sent; None if it has sent nothing.

        Raises:
            WorldError: the signature is wrong, so another process has written or changed it.
        """
        key = _answer_of(rank)
        if not self._store.check([key]):
            return None
        found: Answer = pickle.loads(_get(self._store, self._secret, key))
        return found

    def close(self) -> None:
        """Close the mailbox's ``Doors``, so that no process can connect any more."""
        self._doors.close()


def _answer_of(rank: int) -> str:
    return f"answer of rank {rank}"


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
        what = f"the host that handed out the function cannot be reached: {error}"
        fix = "choose a network that leads there, or check its firewall"
        raise WorldError(explain(what, fix=fix)) from None
    with contextlib.closing(passage):
        yield connect(*passage, timeout_s=_LIMIT_S)


def run(rank: Callable[[], int]) -> None:
    """Fetch the function, call it, and send what it returned or raised. Called in each process that the launcher started.

    Args:
        rank: returns the rank under which the launcher expects the answer; called after the function.

    Raises:
        BaseException: what the function raised, when the launcher knows of it.
    """
    secret, doors = _requested()
    with visit(secret, doors) as store:
        path, function = pickle.loads(_get(store, secret, _FUNCTION))
    # Add the ``sys.path`` of the program that called the launcher, so that modules beside its script can be imported.
    sys.path += [entry for entry in path if entry not in sys.path]
    try:
        answer = _pickled_result(cloudpickle.loads(function)())
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        # Where the mailbox cannot be reached, the traceback on standard error tells it.
        with contextlib.suppress(Exception), visit(secret, doors) as store:
            _put(store, secret, _answer_of(rank()), _pickled_error(error))
        raise
    with visit(secret, doors) as store:
        _put(store, secret, _answer_of(rank()), answer)


def _pickled_result(result: Any) -> bytes:
    try:
        return _pickled(Answer(result))
    except Exception as error:
        what = f"what the function returned cannot be pickled: {error}"
        raise UsageError(explain(what, value=type(result).__name__, fix="return tensors and plain values")) from error


def _pickled(answer: Answer) -> bytes:
    data: bytes = cloudpickle.dumps(answer)
    return data


def _pickled_error(error: BaseException) -> bytes:
    """Return an answer with an exception, or only with its traceback if the exception cannot be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        data = _pickled(Answer(None, text, error))
        pickle.loads(data)
    except Exception:
        return _pickled(Answer(None, text))
    return data


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
        raise UsageError(explain(what, fix="this program is started for a function, not by hand")) from None
