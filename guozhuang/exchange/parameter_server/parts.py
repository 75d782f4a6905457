"""How flat tensors are cut into the parts that servers hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# A tensor with fewer bytes per server is not cut for all servers: more messages would cost more than all links gain.
_WORTH_SHARING_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A piece of a flat tensor that is sent in a message of its own.

    Attributes:
        index: the part's number among all parts of the layout; the same on all ranks.
        tensor: the number of the flat tensor from which the part is cut.
        start: the position of the part's first element in that tensor.
        num_elements: the part's number of elements.
        num_bytes: the part's size in bytes.
        server: the number of the server that holds the part, from 0.
        urgency: waiting parts are sent in ascending order of this number.
    """

    index: int
    tensor: int
    start: int
    num_elements: int
    num_bytes: int
    server: int
    urgency: int

    def of(self, flat: Tensor) -> Tensor:
        """Return this part of its flat tensor, as a view."""
        return flat[self.start : self.start + self.num_elements]


def cut(
    sizes: Sequence[tuple[int, int]], part_bytes: int, num_servers: int, *, last_is_first: bool = False
) -> list[ServedPart]:
    """Cut flat tensors into parts; assign each to the server with the fewest bytes so far, with ties to the first server.

    A tensor is cut into equal parts of at most ``part_bytes``; into a multiple of the number of servers where the parts are
    still worth it, so that all links carry the same.

    Args:
        sizes: (number of elements, bytes of an element) of each flat tensor.
        part_bytes: the largest size of a part, in bytes; an element is never cut.
        num_servers: the number of servers, at least 1.
        last_is_first: whether the last parts are the most urgent. This is so for buckets of gradients: they are filled in the
            order of backward, and the next forward starts with the layers at which backward ended.
    """
    assert num_servers >= 1 and part_bytes >= 1
    pieces = []
    for tensor, (num_elements, width) in enumerate(sizes):
        count = -(-num_elements // max(1, part_bytes // width))
        if num_elements * width >= num_servers * _WORTH_SHARING_BYTES:
            count = -(-count // num_servers) * num_servers
        bounds = [num_elements * i // count for i in range(count + 1)] if count else []
        pieces += [(tensor, a, b - a, (b - a) * width) for a, b in itertools.pairwise(bounds) if b > a]
    loads, found = [0] * num_servers, []
    for index, (tensor, start, num_elements, num_bytes) in enumerate(pieces):
        server = min(range(num_servers), key=loads.__getitem__)
        loads[server] += num_bytes
        urgency = len(pieces) - 1 - index if last_is_first else index
        found.append(ServedPart(index, tensor, start, num_elements, num_bytes, server, urgency))
    return found
