"""Mean of the gradients over all ranks, summed by parameter servers.

Formula: g = sum over ranks r of (g_r / n), added in the order of ranks by whichever server has the part.
Error: that of n additions in the gradient's dtype. All ranks get the same bits, and every run does.
Traffic: with K servers of their own a worker sends its gradients once and a server (n/K) times; a ring sends 2 (n-1)/n times.
Where the workers serve, each its share, one sends 2 (n-1)/n times, as with a ring.
Order: a bucket is cut into parts, and of what waits that part is sent first which the next forward needs first. Buckets are
filled in the order of backward, so it is the part that lies last.
Source: BytePS, Jiang et al., OSDI 2020; the order: ByteScheduler, Peng et al., SOSP 2019,
https://doi.org/10.1145/3341301.3359642.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError, explain
from guozhuang.exchange.base import Done, GradientExchange, Work
from guozhuang.exchange.numbers import is_finite, where_not_finite
from guozhuang.gradients.buckets import Bucket

from .lines import Errand
from .links import Links
from .meeting import num_servers
from .parts import Part, cut
from .protocol import Kind, Message

_log = logging.getLogger("guozhuang")


@dataclass
class ServersState:
    """What is made once per layout of the buckets.

    Attributes:
        links: to the servers; the same for all layouts.
        layout: how many layouts there were before.
        parts: of each bucket, by its index.
        copies: memory on the CPU for buckets of other devices, by index.
    """

    group: dist.ProcessGroup
    links: Links
    layout: int
    parts: dict[int, list[Part]]
    copies: dict[int, Tensor]

    def close(self) -> None:
        """Say goodbye to the servers, in the background; the state is not used again. Not collective."""
        self.links.close()


@dataclass(frozen=True)
class ParameterServer(GradientExchange[ServersState]):
    """The exact exchange, through servers.

    Args:
        part_bytes: the most that travels as one part, in bytes.
        servers: None: those that ``guozhuang run --servers`` started, or else the workers themselves. 0: the workers. K:
            exactly K processes that ``guozhuang run`` started.

    Raises:
        UsageError: a number that makes no sense.
    """

    part_bytes: int = 4_000_000
    servers: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self.part_bytes, self.servers)

    def input_scale(self, world_size: int) -> float:
        """Return ``1 / world_size``."""
        return 1.0 / world_size

    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: ServersState | None = None
    ) -> ServersState:
        """Meet the servers, the first time, and cut the buckets. Every rank must call.

        Raises:
            UsageError: the run has another number of servers.
            WorldError: a rank or a server did not come in time; the text names it.
        """
        links = before.links if before is not None else Links(group, self.servers, self.part_bytes)
        layout = before.layout + 1 if before is not None else 0
        parts: dict[int, list[Part]] = {bucket.index: [] for bucket in buckets}
        copies: dict[int, Tensor] = {}
        if links.lines:
            sizes = [(bucket.flat.numel(), bucket.flat.element_size()) for bucket in buckets]
            for part in cut(sizes, self.part_bytes, len(links.lines), last_is_first=True):
                parts[buckets[part.tensor].index].append(part)
            for bucket in buckets:
                if bucket.flat.device.type != "cpu":
                    pinned = bucket.flat.device.type == "cuda"
                    copies[bucket.index] = torch.empty_like(bucket.flat, device="cpu", pin_memory=pinned)
        return ServersState(group, links, layout, parts, copies)

    def start(self, bucket: Bucket, state: ServersState, step: int) -> Work:
        """Hand the parts of the bucket to the lines."""
        parts = state.parts[bucket.index]
        if not parts:
            return Done()
        copy = state.copies.get(bucket.index)
        work = _Pulling(bucket, copy, step, state.group.rank())
        flat = bucket.flat if copy is None else copy
        for part in parts:
            piece = flat[part.start : part.start + part.num_elements]
            message = Message(
                Kind.SUM, state.layout, part.index, step, piece.dtype, part.num_elements, has_payload=True
            )
            work.add(
                part.server, Errand(message, piece, piece, part.urgency, before=functools.partial(work.look_at, piece))
            )
        state.links.send(work.errands)
        return work

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        """Return the bytes of the gradients, to servers of their own; else twice what is of other workers' shares."""
        num_bytes = num_elements * element_bytes
        return num_bytes if num_servers(self.servers) else 2 * (world_size - 1) * num_bytes // world_size


class _Pulling:
    """The parts of one bucket, under way."""

    def __init__(self, bucket: Bucket, copy: Tensor | None, step: int, rank: int) -> None:
        self.errands: list[tuple[int, Errand]] = []
        self._bucket, self._copy, self._step, self._rank = bucket, copy, step, rank
        self._said = False
        self._copied: Any = None
        if copy is not None:
            copy.copy_(bucket.flat, non_blocking=True)
            if bucket.flat.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(bucket.flat.device))

    def add(self, server: int, errand: Errand) -> None:
        self.errands.append((server, errand))

    def look_at(self, piece: Tensor) -> None:
        """Say, in a line's thread, that a gradient is not finite; it travels all the same."""
        if self._copied is not None:
            self._copied.synchronize()
        if not self._said and not is_finite(piece):
            self._said = True
            names = where_not_finite(self._bucket).partition(" holds ")[0]
            what = f"step {self._step}: {names} holds NaN or infinity, which all ranks get"
            _log.warning("%s", explain(what, rank=self._rank))

    def is_completed(self) -> bool:
        return all(errand.is_completed() for _, errand in self.errands)

    def wait(self) -> None:
        for _, errand in self.errands:
            errand.wait()
        if self._copy is not None:
            self._bucket.flat.copy_(self._copy, non_blocking=True)


def check_numbers(part_bytes: int, servers: int | None) -> None:
    """Check what both exchanges are told.

    Raises:
        UsageError: a size of parts below 1, or a number of servers below 0.
    """
    if part_bytes < 1:
        raise UsageError(explain("part_bytes is a size in bytes, at least 1", value=part_bytes, fix="give 4_000_000"))
    if servers is not None and servers < 0:
        raise UsageError(explain("servers is a count, at least 0, or None", value=servers, fix="leave it out"))
