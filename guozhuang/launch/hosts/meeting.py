"""Where hosts meet: which addresses the first one offers, and which of its doors let everybody in. Pure."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_OFFERED = 16
_LOOPBACK = "127.0.0.1"


def candidates(ready: Sequence[Mapping[str, Any]], name: str, asked: str | None) -> list[str]:
    """The addresses by which others might reach the first host, the likeliest first.

    Args:
        ready: what each host said of itself, the first one first: ``addresses`` by interface, the address that the
            launcher ``reached_at`` over ssh, and a text that is the ``same`` for hosts that are one machine.
        name: of the first host, as the user wrote it.
        asked: the address that the user gave (``--master-addr``); it is the only one then.
    """
    if asked is not None:
        return [asked]
    if len({each["same"] for each in ready}) == 1:
        return [_LOOPBACK]
    own = [address for known in ready[0]["addresses"].values() for address in known]
    wanted = [str(ready[0]["reached_at"]), *_resolved(name), *sorted(own, key=lambda address: ":" in address)]
    usable = [each for each in dict.fromkeys(wanted) if each in own and _is_reachable(each)]
    return usable[:_MAX_OFFERED]


def choose(
    names: Sequence[str],
    doors: Sequence[tuple[str, int]],
    refused: Mapping[str, str],
    knocked: Sequence[Mapping[str, Mapping[str, str]]],
) -> tuple[str, int] | str:
    """The first door that let all others in; where there is none, a text that says who could not come through, and why.

    Args:
        names: of all hosts, the first one first.
        doors: address and port of those that the first host opened.
        refused: addresses at which it could not open one, and why.
        knocked: for each of the other hosts its own address by the number of each door that ``opened``, and the reason
            of each that ``refused``.
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


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)
