"""Mean of the gradients over all ranks, summed by parameter servers.

Formula: g = sum over ranks r of (g_r / n), added in the order of ranks by the server that holds the part.
Error: the rounding of n additions in the gradient's dtype. All ranks get equal bits, and repeated runs get the same bits.
Traffic: with K server processes a worker sends its gradients once, and a server sends n/K times their bytes. If the workers
serve, each its share, a worker sends 2 (n-1)/n times the bytes of its gradients, as in a ring all-reduce.
Order: a bucket is cut into parts; of the waiting parts, the one that the next forward needs first is sent first. Buckets are
filled in the order of backward, so that is the last part.
Source: BytePS, Jiang et al., OSDI 2020; the order: ByteScheduler, Peng et al., SOSP 2019,
https://doi.org/10.1145/3341301.3359642.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ...gradients.buckets import Bucket
from ..base import Done, GradientExchange, Work
from ..numbers import is_finite, warn_unless_finite
from .client import PartRequest, ServerClient, check_numbers, on_cpu, traffic
from .parts import ServedPart, cut
from .protocol import Opcode, ServerMessage


@dataclass
class ServersState:
    """The state of :class:`ParameterServer`, made once per bucket layout.

    Attributes:
        group: the workers.
        client: the connections to the servers; the same for all layouts.
        layout: the number of this layout, from 0.
        parts: the parts of each bucket, by bucket index.
        copies: buffers on the CPU for buckets on other devices, by bucket index.
    """

    group: dist.ProcessGroup
    client: ServerClient
    layout: int
    parts: dict[int, list[ServedPart]]
    copies: dict[int, Tensor]

    def close(self) -> None:
        """Send GOODBYE to the servers, in the background; the state is not used again. Not collective."""
        self.client.close()


@dataclass(frozen=True)
class ParameterServer(GradientExchange[ServersState]):
    """The exact exchange of gradients, through parameter servers.

    Args:
        part_bytes: the largest size of a part, in bytes.
        servers: K: exactly K server processes that ``guozhuang run --servers`` started. 0: the workers serve. None: all server
            processes of the run, or the workers if it has none.

    Raises:
        UsageError: a number is out of its range; in ``prepare``, the run has another number of servers.
        WorldError: in ``prepare``, a rank or a server did not join in time; the text names it.
    """

    part_bytes: int = 4_000_000
    servers: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self.part_bytes, self.servers)

    @override
    def input_scale(self, world_size: int) -> float:
        return 1.0 / world_size

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: ServersState | None = None
    ) -> ServersState:
        client = before.client if before is not None else ServerClient(group, self.servers, self.part_bytes)
        parts: dict[int, list[ServedPart]] = {bucket.index: [] for bucket in buckets}
        copies: dict[int, Tensor] = {}
        if client.connections:
            sizes = [(bucket.flat.numel(), bucket.flat.element_size()) for bucket in buckets]
            for part in cut(sizes, self.part_bytes, len(client.connections), last_is_first=True):
                parts[buckets[part.tensor].index].append(part)
            copies = {bucket.index: on_cpu(bucket.flat) for bucket in buckets if bucket.flat.device.type != "cpu"}
        return ServersState(group, client, 0 if before is None else before.layout + 1, parts, copies)

    @override
    def start(self, bucket: Bucket, state: ServersState, step: int) -> Work:
        parts = state.parts[bucket.index]
        if not parts:
            return Done()
        copy = state.copies.get(bucket.index)
        work = _ServedBucket(bucket, copy, step, state.group.rank())
        for part in parts:
            values = part.of(bucket.flat if copy is None else copy)
            message = ServerMessage(Opcode.SUM, state.layout, part.index, step, values.dtype, values.numel(), True)
            before = functools.partial(work.look_at, values)
            work.requests.append((part.server, PartRequest(message, values, values, part.urgency, before)))
        state.client.send(work.requests)
        return work

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        return int(traffic(num_elements * element_bytes, self.servers, world_size))


# The parts of one bucket are sent by several threads, of which one is to warn.
_WARNING: Final = threading.Lock()


class _ServedBucket:
    """The work of one bucket: one request for each of its parts."""

    def __init__(self, bucket: Bucket, copy: Tensor | None, step: int, rank: int) -> None:
        self.requests: list[tuple[int, PartRequest]] = []
        self._bucket, self._copy, self._step, self._rank = bucket, copy, step, rank
        self._warned = False
        self._copied: Any = None
        if copy is not None:
            copy.copy_(bucket.flat, non_blocking=True)
            if bucket.flat.device.type == "cuda":
                self._copied = torch.cuda.current_stream(bucket.flat.device).record_event()

    def look_at(self, values: Tensor) -> None:
        """Warn if gradients are not finite; they are sent nevertheless. Called in the sending thread."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._warned or is_finite(values):
            return
        with _WARNING:
            if not self._warned:
                self._warned = not warn_unless_finite(self._bucket, values, self._step, self._rank, "all ranks get it")

    def is_completed(self) -> bool:
        return all(request.is_completed() for _, request in self.requests)

    def wait(self) -> None:
        for _, request in self.requests:
            request.wait()
        self.requests = []  # they hold slices of the bucket, and this work, which would outlive the step in a reference cycle
        if self._copy is not None:
            self._bucket.flat.copy_(self._copy, non_blocking=True)
