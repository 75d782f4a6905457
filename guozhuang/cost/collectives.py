"""What one collective costs on a cluster: seconds, bytes on the wire, processor time and messages.

n are the ranks, S the bytes that ``OPERATIONS`` in ``trace.py`` counts. A ring that follows the order of the ranks enters and
leaves each node once, so that a node's cards carry it once however many ranks the node has.

[Note: gloo's ring]
Gloo cuts a tensor into segments of at most 1 MiB, at least 2n of them, a multiple of n: a rank's share has r = 2 or more, and
an all-reduce takes two phases of (n-1)·r steps (gloo/allreduce.cc). Two segments are under way at a time. A message takes a
wake-up w, which is two latencies (the receiver says that it is ready) and two messages' processor time; a segment takes x on
the link and in the one thread that serves gloo's sockets, which partly alternate. Then a phase is one pair of segments, w + 2x,
and for each further pair the longer of w + x and 2x: long messages hide the wake-up behind the other segment, short ones do
not.

[Note: both directions of a connection]
Gloo tells a sender over the same connection that the receiver is ready. Where two ranks send each other something, and one has
come first, the other one's data leave before it says so, and what the first one sends waits until they have arrived. So an
all-to-all takes n messages' time for its n-1, and a gather among 2 ranks, in two halves, that of three. (Messages of 0.5 and 2
MiB between 2 ranks over 1 Gbit/s and 100 Mbit/s took once or twice the time of the wire, by chance, when both came together.)

[Note: NCCL's choice]
The seconds are those of NCCL's tuner (src/graph/tuning.cc; the same numbers stand in torch/_inductor/comm_analysis.py): the
fastest of tree and ring, each with three protocols. Its bus bandwidth is that of the devices' link; over several nodes that
of a node's cards, of which few nodes use a part.

[Note: measured collectives]
Where a link has measured all-reduces, its seconds are those of the formula times measured / formula, taken at the number of
ranks nearest to n that was measured, and at the size whose segments are as long (S·n0/n in a ring). Between two measured
sizes no more than four times apart the times are interpolated in logarithms, else as latency + bytes / rate, which two sizes
far apart determine to a few percent. ``extrapolated`` says how far outside of sizes and ranks that was: beyond 2 a caller
refuses or widens.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from guozhuang.cost.cluster import GLOO, Cluster, LinkSpeed, Transport
from guozhuang.cost.sharing import partly_hidden
from guozhuang.errors import UsageError, explain

#: Beyond this factor outside of what was measured a prediction is refused or widened.
MOST_EXTRAPOLATED = 2.0
_MIB = 1 << 20
_NO_COST = frozenset({"hand_over"})
_MESSAGES = frozenset({"send", "recv", "pair"})


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of one collective with nothing else going on.

    Attributes:
        seconds: from the last rank's call to the last rank's end.
        wire_bytes: that the busiest rank sends, to ranks of its node and of others; in shared memory what it copies.
        nic_bytes: that the busiest node sends to other nodes, for all its ranks together.
        processor_s: processor time that it takes from the cores of one rank.
        messages: that one rank sends, one after another.
        extrapolated: how far it lies outside of what was measured, as a factor: 1 inside, or without measurements.
        alternates: how many times the time of its bytes it keeps links busy. See [Note: both directions of a connection].
    """

    seconds: float
    wire_bytes: float
    nic_bytes: float
    processor_s: float
    messages: float
    extrapolated: float = 1.0
    alternates: float = 1.0


def collective_cost(operation: str, num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> CollectiveCost:
    """Return the cost of a collective among these ranks of a cluster.

    Args:
        operation: one of ``trace.OPERATIONS``; ``"server"`` is of one server beside the ranks (see :func:`server_cost`).
        num_bytes: what ``trace.OPERATIONS`` says for the operation.
        ranks: the ranks of the cluster that take part.
        cluster: the cluster.

    Raises:
        UsageError: the operation is unknown.
    """
    nodes, most = cluster.placement(ranks)
    return placed_cost(operation, num_bytes, len(ranks), nodes, most, cluster)


@lru_cache(maxsize=8192)
def placed_cost(
    operation: str, num_bytes: float, n: int, nodes: int, per_node: int, cluster: Cluster
) -> CollectiveCost:
    """Return the cost of a collective among ``n`` ranks on so many nodes, the fullest of which has ``per_node`` of them."""
    if operation == "server":
        return server_cost(num_bytes, n, 1, cluster)
    shape = _shape(operation, num_bytes, n, nodes, per_node)
    if n < 2 or operation in _NO_COST:
        return CollectiveCost(0.0, 0.0, 0.0, 0.0, 0.0)
    plain = _formula(operation, num_bytes, n, nodes, per_node, cluster)
    if operation in _MESSAGES:
        return dataclasses.replace(plain, wire_bytes=shape.wire, nic_bytes=shape.nic)
    factor, extrapolated = _measured(num_bytes, n, nodes, per_node, cluster)
    # What the processor does takes part of the seconds: where these were measured longer, the link or the waiting was.
    processor_s = (
        min(plain.processor_s, plain.seconds * factor)
        if cluster.transport.name != "shm"
        else plain.processor_s * factor
    )
    return dataclasses.replace(
        plain, seconds=plain.seconds * factor, processor_s=processor_s, extrapolated=extrapolated
    )


def server_cost(
    num_bytes: float, n: int, num_servers: int, cluster: Cluster, ranks_serve: bool = False
) -> CollectiveCost:
    """Return the cost of sending S bytes to servers that add them, and of getting the sums back.

    Args:
        num_bytes: S, of one rank.
        n: ranks, each on a node of its own.
        num_servers: servers on nodes beside the ranks, each of which has its part of the tensor.
        cluster: whose link between nodes, or inside the one node, carries it.
        ranks_serve: the ranks serve too, with the best division between them and the servers: 2n(n-1)S / (n² + qn - 2q) bytes.
    """
    link = cluster.between if cluster.num_nodes > 1 else cluster.inside
    transport = cluster.transport
    at_server = n * num_bytes / max(num_servers, 1)
    moved = (
        2 * n * (n - 1) * num_bytes / (n * n + num_servers * n - 2 * num_servers)
        if ranks_serve
        else max(num_bytes, at_server)
    )
    per_byte = max(1 / _rate(link), transport.processor_s_per_byte + transport.reduce_s_per_byte)
    processor_s = 2 * num_bytes * transport.processor_s_per_byte + 2 * transport.processor_s_per_message
    seconds = 2 * link.latency_s + moved * per_byte
    return CollectiveCost(seconds, num_bytes, moved if cluster.num_nodes > 1 else 0.0, processor_s, 2)


def amortised(seconds: float, every: float, fragments: int = 1, hidden_behind_s: float = 0.0) -> float:
    """Return the exposed seconds a step of an exchange that is not in every step.

    Args:
        seconds: of the exchange of one fragment.
        every: steps between two exchanges of the same fragment: H.
        fragments: in how many parts the weights travel, each with a turn of its own in H steps.
        hidden_behind_s: seconds of computing that go on while it runs: the steps of its delay, times a step.
    """
    return fragments / every * max(0.0, seconds - hidden_behind_s)


def affine(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency and seconds a byte of two measured ``(bytes, seconds)``; neither is negative."""
    (small, short), (large, long) = sorted(points)
    per_byte = (long - short) / (large - small)
    if per_byte <= 0:  # one of the two was disturbed
        return long, 0.0
    return (short - per_byte * small, per_byte) if short > per_byte * small else (0.0, long / large)


def interpolated(points: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Return the seconds of a size among measured ``(bytes, seconds)`` in ascending order. See [Note: measured collectives]."""
    at = bisect.bisect_left([size for size, _ in points], num_bytes)
    if len(points) == 1:
        return points[0][1] * max(1.0, num_bytes / points[0][0])
    if at < len(points) and points[at][0] == num_bytes:
        return points[at][1]
    inside = 0 < at < len(points)
    (small, short), (large, long) = points[at - 1 : at + 1] if inside else points[:2] if at == 0 else points[-2:]
    if inside and large <= 4 * small:
        return short * float((long / short) ** (math.log(num_bytes / small) / math.log(large / small)))
    latency, per_byte = affine(((small, short), (large, long)))
    return latency + per_byte * num_bytes


def _between(points: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Return the seconds on the lines between points, and in proportion to the bytes outside of them; 0 without points."""
    if not points:
        return 0.0
    at = bisect.bisect_left([size for size, _ in points], num_bytes)
    if at in (0, len(points)):
        size, seconds = points[min(at, len(points) - 1)]
        return seconds * num_bytes / size
    (small, short), (large, long) = points[at - 1 : at + 1]
    return short + (long - short) * (num_bytes - small) / (large - small)


def gloo_segments(num_bytes: float, n: int) -> int:
    """Return into how many segments gloo cuts the tensor of an all-reduce."""
    return n * math.ceil(max(math.ceil(num_bytes / _MIB), 2 * n) / n)


def ring_phase(n: int, segments: int, wake_s: float, segment_s: float) -> float:
    """Return the seconds of one phase of gloo's ring. See [Note: gloo's ring].

    Args:
        n: ranks.
        segments: of the whole tensor.
        wake_s: w, of a message.
        segment_s: x, of a segment.
    """
    pairs = (n - 1) * segments / n / 2
    return wake_s + 2 * segment_s + (pairs - 1) * max(wake_s + segment_s, 2 * segment_s)


@dataclass(frozen=True)
class _Shape:
    """Bytes of a collective that do not depend on the speed of anything: of the busiest rank, and of the busiest node."""

    wire: float
    nic: float


def _shape(operation: str, size: float, n: int, nodes: int, per_node: int) -> _Shape:
    once = (n - 1) / n * size if n else 0.0
    rounds = math.ceil(math.log2(n)) if n > 1 else 0
    rings = {"all_reduce": 2 * once, "reduce": 2 * once, "reduce_scatter": once, "all_gather": once}
    crosses = nodes > 1
    if operation in rings:
        return _Shape(rings[operation], rings[operation] if crosses else 0.0)
    if operation == "broadcast":
        return _Shape(rounds * size, math.ceil(math.log2(nodes)) * size if crosses else 0.0)
    if operation == "all_to_all":
        return _Shape(once, per_node * size * (n - per_node) / n if crosses else 0.0)
    if operation in ("gather", "scatter"):
        return _Shape(once, size * (n - per_node) / n if crosses else 0.0)
    if operation in _MESSAGES:
        return _Shape(size, size if crosses else 0.0)
    if operation in ("barrier", "meeting", *_NO_COST):
        return _Shape(0.0, 0.0)
    raise UsageError(
        explain("no such operation of a collective", value=operation, fix="see OPERATIONS in guozhuang/cost/trace.py")
    )


def _formula(operation: str, size: float, n: int, nodes: int, per_node: int, cluster: Cluster) -> CollectiveCost:
    name = cluster.transport.name
    if name == "nccl":
        return _nccl(operation, size, n, nodes, per_node, cluster)
    if name == "shm" and nodes == 1:
        return _shared(operation, size, n, cluster.inside)
    if name == "shm" and per_node > 1 and operation not in _MESSAGES:
        return _hierarchical(operation, size, n, nodes, per_node, cluster)
    transport = GLOO if name == "shm" else cluster.transport  # between nodes it is gloo that carries it
    return _gloo(operation, size, n, nodes, per_node, cluster, transport, 1)


def _gloo(
    operation: str, size: float, n: int, nodes: int, per_node: int, cluster: Cluster, transport: Transport, rings: int
) -> CollectiveCost:
    """Cost over gloo; ``rings`` of them share the cards of a node."""
    link = cluster.between if nodes > 1 else cluster.inside
    reduces = operation in ("all_reduce", "reduce", "reduce_scatter")
    if operation == "reduce_scatter":  # an all-reduce of which a part is kept
        operation = "all_reduce"
    shape = _shape(operation, size, n, nodes, per_node)
    processor_a_byte = transport.processor_s_per_byte + (transport.reduce_s_per_byte / 2 if reduces else 0.0)
    # Over loopback the rate is that of the processor's work itself, and rings beside this one use the wire meanwhile.
    both = rings / _rate(link), processor_a_byte
    per_byte = max(both) if nodes == 1 or rings > 1 else partly_hidden(*both)
    wake_s = 2 * link.latency_s + 2 * transport.processor_s_per_message
    rounds, beside_s, alternates = math.ceil(math.log2(n)), 0.0, 1.0
    if operation in ("all_reduce", "reduce"):
        segments = gloo_segments(size, n)
        messages = 2.0 * (segments - segments / n)
        seconds = 2 * ring_phase(n, segments, wake_s, size / segments * per_byte)
    elif operation == "all_gather":
        messages = 2.0 * (n - 1)
        beside_s = _between(transport.gather_s, size)
        alternates = 1.5 if n == 2 else 1.0
        seconds = ring_phase(n, 2 * n, wake_s, alternates * size / (2 * n) * per_byte) + beside_s
    elif operation == "broadcast":
        messages, seconds = float(rounds), rounds * (wake_s + size * per_byte)
    elif operation in ("all_to_all", "gather", "scatter"):
        alternates = n / (n - 1) if operation == "all_to_all" else 1.0
        nic_s = shape.nic * rings / _rate(link) if shape.nic else 0.0
        messages, seconds = n - 1.0, wake_s + alternates * max(shape.wire * per_byte, nic_s)
    elif operation in ("barrier", "meeting"):
        messages, seconds = float(rounds), rounds * wake_s
    else:
        # Sent once the receiver has said that it is ready, which it mostly is.
        messages, seconds = 1.0, link.latency_s + transport.processor_s_per_message + size * per_byte
    processor_s = shape.wire * processor_a_byte + messages * transport.processor_s_per_message + beside_s
    busy_s = min(processor_s, seconds)
    return CollectiveCost(seconds, shape.wire, shape.nic, busy_s, messages, alternates=alternates)


def _shared(operation: str, size: float, n: int, link: LinkSpeed) -> CollectiveCost:
    """Cost in shared memory: each rank copies in, combines its part, copies out; all of it is processor time."""
    combine = (1 + 1 / n) / 2
    copies = {
        "all_reduce": 2 + combine, "reduce": 1.5 + combine, "reduce_scatter": 1 + combine, "all_gather": 1 + 1 / n,
        "barrier": 0.0, "meeting": 0.0,
    }.get(operation, 2.0)  # fmt: skip
    moved_s = copies * size / _rate(link)
    return CollectiveCost(link.latency_s + moved_s, copies * size, 0.0, moved_s, 1.0)


def _hierarchical(operation: str, size: float, n: int, nodes: int, per_node: int, cluster: Cluster) -> CollectiveCost:
    """Cost of lanes: inside each node in shared memory, between nodes each of its ranks a part; pieces of 1 MiB overlap."""
    inside = _shared(operation, size, per_node, cluster.inside)
    lanes = per_node
    between = _gloo(operation, size / lanes, nodes, nodes, 1, cluster, GLOO, lanes)
    pieces = max(1, math.ceil(size / (lanes * _MIB)))
    seconds = max(inside.seconds, between.seconds) + min(inside.seconds, between.seconds) / pieces
    processor_s = inside.processor_s + between.processor_s
    return CollectiveCost(
        seconds, between.wire_bytes, between.nic_bytes * lanes, min(processor_s, seconds), inside.messages + between.messages
    )  # fmt: skip


# Of NCCL's tuner: microseconds by algorithm and protocol (LL, LL128, Simple); GB/s by generation and number of nodes.
_BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_STEP = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
_GENERATIONS = {"volta": 0, "ampere": 1, "hopper": 2, "": 2, "blackwell": 3}
_LL_MOST = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_CHANNELS = (2, 8, 16, 32)
_RING_LL128_CHANNEL = (20.0, 20.0, 36.7, 40.0)
_TREE_LL128_CHANNEL = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_CHANNEL = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
# A tree's bandwidth by log2(bytes / 64), in tenths.
_TREE_SHARE = (
    (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 10),
    (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10, 10),
    (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9, 9),
)
#: The share of a link's rate that NCCL's bus bandwidth reaches.
_BUS_SHARE = {"nvlink": 0.8, "hopper": 370 / 450, "pcie": 24 / 31}


def _nccl(operation: str, size: float, n: int, nodes: int, per_node: int, cluster: Cluster) -> CollectiveCost:
    device = cluster.device
    generation = device.generation if device else "ampere"
    is_pcie = cluster.inside.name == "PCIe"
    inside = _rate(cluster.inside) * (
        _BUS_SHARE["pcie"] if is_pcie else _BUS_SHARE.get(generation, _BUS_SHARE["nvlink"])
    )
    bus = inside
    if nodes > 1:
        cards = min(_rate(cluster.between), per_node * (device.pcie_bytes_per_s if device else math.inf))
        bus = min(inside, cards * (0.77 + 0.23 * min(1.0, (nodes - 1) / 7)))
    shape = _shape(operation, size, n, nodes, per_node)
    hardware = "pcie" if is_pcie else "nvlink"
    if operation in ("barrier", "meeting"):
        operation, size = "all_reduce", 4.0
    if operation in _MESSAGES or operation in ("all_to_all", "gather", "scatter"):
        link = cluster.between if nodes > 1 else cluster.inside
        away = shape.nic / _rate(cluster.between) if nodes > 1 else 0.0
        seconds = max(shape.wire / (bus if nodes == 1 or operation in _MESSAGES else inside), away) + link.latency_s
        return CollectiveCost(seconds, shape.wire, shape.nic, 0.0, 1.0 if operation in _MESSAGES else n - 1.0)
    steps = 2 * (n - 1) if operation == "all_reduce" else n - 1
    crossing = 0 if nodes == 1 else (2 if operation == "all_reduce" else 1) * (nodes - 1)
    a_byte = {"broadcast": 1.0, "reduce": 1.0}.get(
        operation, steps / n
    )  # of the ring: bytes of one rank, of the tensor's
    kind, scale, best = _GENERATIONS[generation], min(nodes, 3) - 1, math.inf
    for number in range(3):
        if number == 1 and nodes > 1:
            continue  # LL128's numbers are of NVLink
        overhead = (3.0 if number == 2 else 1.0) if nodes > 1 else 0.0
        step_us = {each: max(_STEP[hardware][each][number], overhead) for each in _BASE}
        for algorithm in ("tree", "ring") if operation == "all_reduce" else ("ring",):
            rate = _protocol_rate(algorithm, number, bus / 1e9, kind, scale, nodes) * 1e9
            away_us = _STEP["network"][algorithm][number]
            if algorithm == "ring":
                latency_us = _BASE["ring"][number] + (steps - crossing) * step_us["ring"] + crossing * away_us
                seconds = latency_us * 1e-6 + size * a_byte / rate
            else:
                latency_us = _BASE["tree"][number] + 2 * (
                    (n // nodes - 1) * step_us["tree"] + int(math.log2(nodes)) * away_us
                )
                power = int(math.log2(size / 64)) if size >= 64 else 0
                share = _TREE_SHARE[number][power] / 10 if power < 24 else 1.0
                seconds = latency_us * 1e-6 + size * 2 / (rate * share)
            best = min(best, seconds)
    return CollectiveCost(best, shape.wire, shape.nic, 0.0, float(steps))


def _protocol_rate(algorithm: str, protocol: int, bus: float, kind: int, scale: int, nodes: int) -> float:
    """Return the bus bandwidth in GB/s that a protocol (LL, LL128, Simple) reaches."""
    channels = _CHANNELS[kind]
    if protocol == 0:
        most = _LL_MOST[kind if nodes == 1 else 0][scale]
        return min(most, bus * (0.5 if algorithm == "ring" else 1 / 3.8))
    if algorithm == "ring":
        return bus if protocol == 2 else min(bus * 120 / 128, channels * _RING_LL128_CHANNEL[kind])
    if protocol == 2:
        return min(bus * 0.92, channels * _TREE_CHANNEL[kind][scale])
    return min(bus * 7 / 9, channels * _TREE_LL128_CHANNEL[kind][scale])


def _rate(link: LinkSpeed) -> float:
    """Return the rate of a link; where only all-reduces of it were measured, that of the largest."""
    if link.bytes_per_s > 0:
        return link.bytes_per_s
    if not link.table:
        raise UsageError(
            explain("a link between ranks has no rate", value=link.name, fix="describe it: 10gbit/0.1ms or ib=200gbit")
        )
    ranks, size, seconds = max(link.table, key=lambda each: each[1])
    return 2 * (ranks - 1) / ranks * size / seconds


def _measured(size: float, n: int, nodes: int, per_node: int, cluster: Cluster) -> tuple[float, float]:
    """Return measured / formula, and how far outside of what was measured. See [Note: measured collectives]."""
    link = cluster.between if nodes > 1 else cluster.inside
    if not link.table:
        return 1.0, 1.0
    known = sorted({ranks for ranks, _, _ in link.table})
    ranks = min(known, key=lambda each: abs(math.log(each / n)))
    points = sorted((bytes_, seconds) for each, bytes_, seconds in link.table if each == ranks)
    is_ring = not (cluster.transport.name == "shm" and nodes == 1)
    wanted = max(size * ranks / n if is_ring else size, 1.0)
    measured_nodes = 1 if nodes == 1 else max(2, math.ceil(ranks / per_node))
    of_formula = _formula(
        "all_reduce", wanted, int(ranks), measured_nodes, math.ceil(ranks / measured_nodes), cluster
    ).seconds
    outside = max(wanted / points[-1][0], points[0][0] / wanted, n / known[-1], known[0] / n, 1.0)
    return interpolated(points, wanted) / of_formula, outside
