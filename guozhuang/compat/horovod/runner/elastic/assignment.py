"""Choose which slots of which hosts get workers, and the rank of each. Pure functions.

Survivors of the last round keep their order. They get lower ranks than new workers on their host, and their hosts lower ranks
than hosts without survivors. So rank 0, whose state all ranks take over, is a survivor if there is one. The ranks of a host are
consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.compat.horovod.common.elastic_variables import Place


@dataclass(frozen=True)
class HostSlot:
    """A slot of a host, in which one worker can run.

    Attributes:
        host: the name of the host.
        index: the number of the slot on its host, from 0; not the local rank, which may change from round to round.
    """

    host: str
    index: int


def choose(hosts: Mapping[str, int], living: Sequence[HostSlot], max_np: int | None) -> list[HostSlot]:
    """Return the slots that shall have workers, in the order of their ranks.

    Args:
        hosts: the number of slots of each usable host, in the order in which the hosts were found.
        living: slots whose workers are alive, in the order of their ranks.
        max_np: the largest number of workers; None: one in each slot.
    """
    limit = sum(hosts.values()) if max_np is None else max_np
    kept = [slot for slot in living if slot.index < hosts.get(slot.host, 0)][:limit]
    order = list(dict.fromkeys([*(slot.host for slot in kept), *hosts]))
    taken = set(kept)
    free = [slot for host in order for index in range(hosts[host]) if (slot := HostSlot(host, index)) not in taken]
    free = free[: limit - len(kept)]
    return [slot for host in order for slot in (*kept, *free) if slot.host == host]


def places(slots: Sequence[HostSlot]) -> list[Place]:
    """Return the ``Place`` (ranks and sizes) of each slot; the slots are given in rank order, those of a host consecutively."""
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
