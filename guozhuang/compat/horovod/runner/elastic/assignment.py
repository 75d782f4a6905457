"""Which slots of which hosts get workers, and which rank each has. Pure.

Survivors keep their order, and come before all others on their host, as do their hosts before hosts without survivors. So rank
0 is a survivor wherever there is one: what it holds is what all begin with. Ranks of a host follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.compat.horovod.common.elastic_variables import Place


@dataclass(frozen=True)
class HostSlot:
    """Room for one worker.

    Attributes:
        host: the name of the host.
        index: counts the slots of the host; not the local rank, which may change.
    """

    host: str
    index: int


def choose(hosts: Mapping[str, int], living: Sequence[HostSlot], max_np: int | None) -> list[HostSlot]:
    """The slots that shall have workers, in the order of their ranks.

    Args:
        hosts: the slots of each host that may be used, in the order in which they were found.
        living: slots whose workers live, in the order of their ranks.
        max_np: how many workers there may be; None: one in each slot.
    """
    limit = sum(hosts.values()) if max_np is None else max_np
    kept = [slot for slot in living if slot.index < hosts.get(slot.host, 0)][:limit]
    order = list(dict.fromkeys([*(slot.host for slot in kept), *hosts]))
    taken = set(kept)
    free = [slot for host in order for index in range(hosts[host]) if (slot := HostSlot(host, index)) not in taken]
    free = free[: limit - len(kept)]
    return [slot for host in order for slot in (*kept, *free) if slot.host == host]


def places(slots: Sequence[HostSlot]) -> list[Place]:
    """The place of each of these slots, which stand in the order of their ranks, those of a host together."""
    hosts = list(dict.fromkeys(slot.host for slot in slots))
    sizes = {host: sum(slot.host == host for slot in slots) for host in hosts}
    found, local_ranks = [], dict.fromkeys(hosts, 0)
    for rank, slot in enumerate(slots):
        local_rank = local_ranks[slot.host]
        local_ranks[slot.host] += 1
        alike = [host for host in hosts if sizes[host] > local_rank]
        found.append(
            Place(
                rank=rank,
                size=len(slots),
                local_rank=local_rank,
                local_size=sizes[slot.host],
                node_rank=hosts.index(slot.host),
                num_nodes=len(hosts),
                cross_rank=alike.index(slot.host),
                cross_size=len(alike),
            )
        )
    return found
