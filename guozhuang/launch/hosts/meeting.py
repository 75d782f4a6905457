"""Choose the first host's address for the rendezvous of hosts: the candidates, then a ``Door`` that all can reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from guozhuang.launch.hosts.frames import DoorsTried, NodeReady
from guozhuang.net import interfaces

_MAX_OFFERED = 16


def candidates(ready: Sequence[NodeReady], name: str, asked: str | None) -> list[str]:
    """Return the addresses by which other hosts might reach the first host, the likeliest first.

    Args:
        ready: the message of each host.
        name: name of the first host, as the user wrote it.
        asked: the address that the user gave (``--master-addr``), which is then the only candidate; else None.
    """
    if asked is not None:
        return [asked]
    if len({each.same for each in ready}) == 1:
        return [interfaces.LOOPBACK]
    own = [address for known in ready[0].addresses.values() for address in known]
    wanted = [str(ready[0].reached_at), *interfaces.resolve(name), *sorted(own, key=lambda address: ":" in address)]
    usable = [each for each in dict.fromkeys(wanted) if each in own and interfaces.is_reachable(each)]
    return usable[:_MAX_OFFERED]


def choose(
    names: Sequence[str],
    doors: Sequence[tuple[str, int]],
    refused: Mapping[str, str],
    tried: Sequence[DoorsTried],
) -> tuple[str, int] | str:
    """Return the first ``Door`` that all other hosts could reach; else a text that names the hosts that could not, and why.

    Args:
        names: the names of all hosts.
        doors: address and port of each ``Door`` that the first host opened.
        refused: addresses at which the first host could not open a door, with the reasons.
        tried: the answer of each other host.
    """
    if not doors:
        why = "; ".join(f"{host}: {reason}" for host, reason in refused.items()) or "it has none but loopback"
        return f"could not listen on any address that others could reach ({why})"
    for number, door in enumerate(doors):
        if not any(each.reasons[number] for each in tried):
            return door
    lines = []
    for name, each in zip(names[1:], tried, strict=True):
        missed = [f"{host} port {port} ({why})" for (host, port), why in zip(doors, each.reasons, strict=True) if why]
        if missed:
            lines.append(f"\n  from {name}: not {', not '.join(missed)}")
    fix = "open the firewall between them, or give --interface, --master-addr or --master-port"
    return f"cannot be reached by all others at one address. Fix: {fix}.{''.join(lines)}"
