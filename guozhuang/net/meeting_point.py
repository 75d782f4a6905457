"""The address at which the ranks of a run find each other: a given one, or ports and a secret computed from launcher values."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

# The range of ports to try: below Linux's ephemeral ports (from 32768), which any program may use, and torchrun's 29400 and up.
_FIRST, _END = 15000, 29000
_NUM_PORTS = 12


@dataclass(frozen=True)
class MeetingPoint:
    """The address of the TCP store through which ranks find each other, and the process that starts that store.

    Attributes:
        host: name or address of the machine that keeps the store.
        port: the TCP port of the store, or of the door in front of it.
        is_kept_by_launcher: the launcher keeps the store already; otherwise rank 0 starts it.
        attempt: number that separates the attempts that share one store, where a launcher restarts ranks after a failure.
        secret: if not empty, and rank 0 keeps the store where other machines can reach it, a door that checks this secret is
            opened in front of the store.
        is_loopback_meant: True: if ``host`` resolves to loopback, all ranks are on this machine. False: it resolves to loopback
            on rank 0's node only, and other ranks connect from other machines.
        interface: the network interface that the user named; "": the one that leads to ``host``.
        port_option: the variable or option that gave ``port``, for errors.
    """

    host: str
    port: int
    is_kept_by_launcher: bool = False
    attempt: str = "0"
    secret: bytes = field(default=b"", repr=False)
    is_loopback_meant: bool = True
    interface: str = ""
    port_option: str = "MASTER_PORT (--master-port)"


@dataclass(frozen=True)
class PortSequence:
    """Ports for ranks whose launcher gives none: rank 0 opens a ``Door`` at the first free port, the other ranks try all.

    See [Note: meeting without a message] in ``search``.

    Attributes:
        hosts: names and addresses by which rank 0's node may be known, the likeliest first; empty: only ``note`` has it.
        ports: TCP ports, in the order to try.
        secret: proves that a door belongs to this run.
        is_one_node: all ranks are on one node, and loopback is enough.
        others: names of other nodes: rank 0 opens its door on the interface that leads to them.
        note: path of a file, in a folder that all nodes share, in which rank 0 writes the address of its door; "" for none.
        attempt: number that separates the attempts of one run, as in ``MeetingPoint``.
    """

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    secret: bytes = field(repr=False)
    is_one_node: bool = False
    others: tuple[str, ...] = ()
    note: str = ""
    attempt: str = "0"


def sequence(key: Sequence[str]) -> tuple[int, ...]:
    """Return the ports to try, in order: ranks with the same key get the same ports, a run with another key gets others."""
    found: dict[int, None] = {}
    turn = 0
    while len(found) < _NUM_PORTS:
        digest = _digest("port", str(turn), *key)
        found[_FIRST + int.from_bytes(digest[:8], "big") % (_END - _FIRST)] = None
        turn += 1
    return tuple(found)


def secret(given: bytes, key: Sequence[str]) -> bytes:
    """Return the secret by which processes of one run recognize each other, computed from ``given`` and ``key``.

    Args:
        given: a secret that the user or the launcher gave to all ranks and to nobody else; empty if there is none. Without it
            the result is no real secret: it only separates runs that meet by accident, and who guesses the key can compute it.
        key: values that the launcher gives to all ranks of this run, and that differ in every other run.
    """
    return hmac.new(given, _digest("secret", *key), hashlib.sha256).digest()


def _digest(*parts: str) -> bytes:
    # Each part is hashed with its length, so that ("a", "b") and ("ab", "") differ.
    return hashlib.sha256(b"".join(b"%d:%b" % (len(each.encode()), each.encode()) for each in parts)).digest()
