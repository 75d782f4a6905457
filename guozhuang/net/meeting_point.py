"""Where the ranks of a run meet: a told address; or ports and a secret that each rank derives from its launcher's words."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

# Below the ephemeral ports of Linux (32768 and up), which any program may be using, and off torchrun's 29400 and 29500.
_FIRST, _END = 15000, 29000
_NUM_PORTS = 12


@dataclass(frozen=True)
class MeetingPoint:
    """The TCP store through which ranks find each other.

    Attributes:
        host: name or address of the machine that keeps the store.
        port: its TCP port.
        is_kept_by_launcher: the launcher keeps the store already; otherwise rank 0 starts it.
        attempt: separates the runs that share one store, where a launcher starts ranks again after a failure.
        secret: if not empty, and rank 0 keeps the store where other machines can reach it, a door that asks for it stands in
            front of the store.
        is_loopback_meant: where ``host`` stands for loopback, all ranks are on this machine. If not, it does so on rank 0's
            own node only, and the others come from outside.
    """

    host: str
    port: int
    is_kept_by_launcher: bool = False
    attempt: str = "0"
    secret: bytes = field(default=b"", repr=False)
    is_loopback_meant: bool = True


@dataclass(frozen=True)
class PortSequence:
    """Where ranks meet if the launcher tells no port: rank 0 opens a door at the first free port, the others knock at all.

    See [Note: meeting without a message] in ``search``.

    Attributes:
        hosts: names and addresses by which rank 0's node may be known, the likeliest first; empty: only ``note`` tells it.
        ports: TCP ports, in the order to try.
        secret: proves that a door belongs to this run.
        is_one_node: all ranks are on one node, and loopback is enough.
        others: names of other nodes: rank 0 opens its door on the interface that leads to them.
        note: path of a file in a folder that all nodes share, in which rank 0 says where its door is; "" for none.
        attempt: as in ``MeetingPoint``.
    """

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    secret: bytes = field(repr=False)
    is_one_node: bool = False
    others: tuple[str, ...] = ()
    note: str = ""
    attempt: str = "0"


def sequence(key: Sequence[str]) -> tuple[int, ...]:
    """The ports at which ranks with this key meet: the same on every rank, others for another key, in the order to try."""
    found: dict[int, None] = {}
    turn = 0
    while len(found) < _NUM_PORTS:
        digest = _digest("port", str(turn), *key)
        found[_FIRST + int.from_bytes(digest[:8], "big") % (_END - _FIRST)] = None
        turn += 1
    return tuple(found)


def secret(given: bytes, key: Sequence[str]) -> bytes:
    """The secret of the run with this key.

    Args:
        given: what the user or the launcher handed to all ranks and to nobody else; empty if nothing was. Only with it the
            result is a secret; without, it keeps runs apart that meet by accident, and whoever can guess the key knows it.
        key: what the launcher told all ranks of this run, and says differently for every other one.
    """
    return hmac.new(given, _digest("secret", *key), hashlib.sha256).digest()


def _digest(*parts: str) -> bytes:
    # With the length of each part, so that ("a", "b") and ("ab", "") differ.
    return hashlib.sha256(b"".join(b"%d:%b" % (len(each.encode()), each.encode()) for each in parts)).digest()
