"""What travels together, and which parts of flat memory are reduced in one piece. Pure: the same on every rank."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from .submission import Kind
from .table import Place, Response

# A broadcast is copied to travel with others, which pays only where a message costs more than its bytes.
_BROADCAST_BYTES: Final = 256 << 10


def batches(responses: Sequence[Response], threshold_bytes: int, fuse_groups: bool) -> list[list[Response]]:
    """Divide responses into what is done at once, in order.

    Each batch begins with the first response that is left, and takes what fits to it and into the threshold, looking past what
    does not fit as long as what was taken and what was passed over stay within the threshold.

    Args:
        responses: without error, in the order that all ranks know.
        threshold_bytes: of one batch; a larger response goes alone.
        fuse_groups: whether a response of several tensors goes with others.
    """
    left = deque((response, _key(response, fuse_groups), response.request.num_bytes) for response in responses)
    num_alike = Counter(key for _, key, _ in left)
    found = []
    while left:
        first, key, num_bytes = left.popleft()
        num_alike[key] -= 1
        taken, passed, passed_bytes = [first], [], 0
        looks, num_ahead = key is not None and num_bytes < threshold_bytes, num_alike[key]
        while looks and num_ahead:  # nobody looks through all that is left for what is not there
            other = response, other_key, more = left.popleft()
            num_ahead -= other_key == key
            if other_key == key and num_bytes + more <= threshold_bytes:
                taken.append(response)
                num_alike[key] -= 1
                num_bytes += more
                continue
            passed.append(other)
            passed_bytes += more
            looks = num_bytes + passed_bytes <= threshold_bytes
        found.append(taken)
        left.extendleft(reversed(passed))
    return found


def _key(response: Response, fuse_groups: bool) -> Hashable | None:
    """What must be equal for responses to go together; None for one that goes alone."""
    request = response.request
    if len(request.shapes) > 1 and not fuse_groups:
        return None
    if request.kind == Kind.BROADCAST and request.num_bytes <= _BROADCAST_BYTES:
        return request.kind, request.device, request.root
    if request.kind != Kind.ALLREDUCE or len(set(request.dtypes)) != 1:
        return None
    memory = None if response.places is None else response.places[0][0]
    scales = request.prescale, request.postscale
    return request.kind, request.dtypes[0], request.device, request.reduction, scales, memory


@dataclass(frozen=True)
class Run:
    """Tensors that lie one after the other in flat memory, on every rank.

    Attributes:
        order: the numbers of the tensors, by place.
        num_elements: of all of them.
    """

    order: tuple[int, ...]
    num_elements: int


def runs(batch: Sequence[Response]) -> list[Run] | None:
    """Divide the tensors of a batch into runs; None where they do not lie in flat memory.

    Tensors are numbered as they come in the batch.
    """
    places: list[Place] = []
    sizes: list[int] = []
    for response in batch:
        if response.places is None:
            return None
        places += response.places
        sizes += [prod(shape) for shape in response.request.shapes]
    found: list[Run] = []
    order: list[int] = []
    begin, end = (-1, -1), (-1, -1)
    for i in sorted(range(len(places)), key=lambda i: (places[i], sizes[i])):
        if places[i] != end:
            if order:
                found.append(Run(tuple(order), end[1] - begin[1]))
            order, begin = [], places[i]
        order.append(i)
        end = places[i][0], places[i][1] + sizes[i]
    found.append(Run(tuple(order), end[1] - begin[1]))
    return found
