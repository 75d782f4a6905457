"""How gradients or weights are cut into parts, which server gets which part, and what is sent first. Pure: no communication.

Source: parts of a few megabytes and the order of their sending: Peng et al., A Generic Communication Scheduler for Distributed
DNN Training Acceleration (ByteScheduler), SOSP 2019, https://doi.org/10.1145/3341301.3359642; the load of servers by bytes:
Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training (BytePS), OSDI 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# Below that many bytes a server's share costs more in messages than its link saves.
_WORTH_SHARING_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a flat tensor that travels by itself.

    Attributes:
        index: place among all parts of the layout; the same on all ranks.
        tensor: which flat tensor it is cut from.
        start: its first element there.
        num_elements: how many it has.
        num_bytes: the same in bytes.
        server: who serves it, counted from 0.
        urgency: what is waiting is sent in ascending order of it.
    """

    index: int
    tensor: int
    start: int
    num_elements: int
    num_bytes: int
    server: int
    urgency: int


def cut(
    sizes: Sequence[tuple[int, int]], part_bytes: int, num_servers: int, *, last_is_first: bool = False
) -> list[Part]:
    """Cut flat tensors into parts and give each to the server with the fewest bytes so far, the first of several.

    A tensor is cut into equal parts of at most ``part_bytes``; into a multiple of the number of servers where the parts are
    still worth it, so that all links carry the same.

    Args:
        sizes: (number of elements, bytes of an element) of each flat tensor.
        part_bytes: the most that a part has, in bytes; an element is never cut.
        num_servers: how many there are, at least 1.
        last_is_first: whether what lies last is needed first. So it is with buckets of gradients: they are filled in the order
            of backward, and the next forward begins where backward ended.
    """
    assert num_servers >= 1 and part_bytes >= 1
    loads, found = [0] * num_servers, []
    pieces = [
        piece for i, (num, width) in enumerate(sizes) for piece in _pieces(i, num, width, part_bytes, num_servers)
    ]
    for index, (tensor, start, num_elements, num_bytes) in enumerate(pieces):
        server = min(range(num_servers), key=loads.__getitem__)
        loads[server] += num_bytes
        urgency = len(pieces) - 1 - index if last_is_first else index
        found.append(Part(index, tensor, start, num_elements, num_bytes, server, urgency))
    return found


def _pieces(
    tensor: int, num_elements: int, width: int, part_bytes: int, num_servers: int
) -> list[tuple[int, int, int, int]]:
    most = max(1, part_bytes // width)
    count = -(-num_elements // most)
    if num_elements * width >= num_servers * _WORTH_SHARING_BYTES:
        count = -(-count // num_servers) * num_servers
    bounds = [num_elements * i // count for i in range(count + 1)] if count else []
    return [(tensor, a, b - a, (b - a) * width) for a, b in itertools.pairwise(bounds) if b > a]
