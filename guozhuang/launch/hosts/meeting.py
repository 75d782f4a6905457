"""Choose the address for the rendezvous of hosts: addresses of the first host to try, and a door that all can reach. Pure."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from guozhuang.net import interfaces

_MAX_OFFERED = 16
_LOOPBACK = "127.0.0.1"


def candidates(ready: Sequence[Mapping[str, Any]], name: str, asked: str | None) -> list[str]:
    """Return the addresses by which other hosts might reach the first host, the likeliest first.

    Args:
        ready: the "ready" message of each host: its ``addresses`` by interface, the address ``reached_at`` by the launcher's
            ssh, and a text that is the ``same`` for hosts that are one machine.
        name: name of the first host, as the user wrote it.
        asked: the address that the user gave (``--master-addr``), which is then the only one; else None.
    """
    if asked is not None:
        return [asked]
    if len({each["same"] for each in ready}) == 1:
        return [_LOOPBACK]
    own = [address for known in ready[0]["addresses"].values() for address in known]
    wanted = [str(ready[0]["reached_at"]), *_resolved(name), *sorted(own, key=lambda address: ":" in address)]
    usable = [each for each in dict.fromkeys(wanted) if each in own and interfaces.is_reachable(each)]
    return usable[:_MAX_OFFERED]


def choose(
    names: Sequence[str],
    doors: Sequence[tuple[str, int]],
    refused: Mapping[str, str],
    knocked: Sequence[Mapping[str, Mapping[str, str]]],
) -> tuple[str, int] | str:
    """Return the first door that all other hosts could reach; if there is none, a text on which hosts could not, and why.

    Args:
        names: the names of all hosts.
        doors: address and port of the doors that the first host opened.
        refused: addresses at which the first host could not open a door, with the reasons.
        knocked: the answer of each other host: its own address by the index of each door that ``opened``, and the reason
            by the index of each door that ``refused``.
    """
    if not doors:
        why = "; ".join(f"{host}: {reason}" for host, reason in refused.items()) or "it has none but loopback"
        return f"could not listen on any address that others could reach ({why})"
    for number, door in enumerate(doors):
        if all(str(number) in each["opened"] for each in knocked):
            return door
    lines = []
    for name, each in zip(names[1:], knocked, strict=True):
        missed = [
            f"{host} port {port} ({each['refused'].get(str(number), 'nobody answered')})"
            for number, (host, port) in enumerate(doors)
            if str(number) not in each["opened"]
        ]
        if missed:
            lines.append(f"\n  from {name}: not {', not '.join(missed)}")
    fix = "open the firewall between them, or give --interface, --master-addr or --master-port"
    return f"cannot be reached by all others at one address. Fix: {fix}.{''.join(lines)}"


def _resolved(name: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
