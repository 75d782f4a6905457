"""The machines that a prediction is about: nodes, their cores or devices, and the links between their ranks."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.cost import hardware
from guozhuang.cost.hardware import Device
from guozhuang.errors import UsageError, explain

#: One measured all-reduce: ranks that took part, bytes of the tensor, seconds.
Measured = tuple[float, float, float]


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of what joins ranks: memory of a node, NVLink, a network. Both directions have this rate at once.

    Attributes:
        latency_s: time of a small message from one rank to another.
        bytes_per_s: rate of large messages in one direction; between nodes that of all network cards of one node together.
        table: measured all-reduces over this link, ``(ranks, bytes, seconds)`` each; costs come from them where there are some.
        name: how it is called in results: ``"NVLink"``, ``"10 Gbit/s"``.
    """

    latency_s: float
    bytes_per_s: float
    table: tuple[Measured, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Transport:
    """The software that carries collectives, and what it takes from the cores that compute.

    Attributes:
        name: ``"shm"``, ``"gloo"`` or ``"nccl"``.
        processor_s_per_byte: processor time of a rank for each byte that it sends (and receives as much of), without reducing.
        processor_s_per_message: processor time of a rank for each message, however small.
        reduce_s_per_byte: processor time for each byte that is added to another.
        lanes: how many collectives of one group run at the same time.
        gather_s: of gathers of so many bytes, the processor time beside the messages: PyTorch makes room for the whole output,
            which the kernel fills with zeros first, and copies it. ``(bytes, seconds)`` each, in ascending order.
    """

    name: str
    processor_s_per_byte: float = 0.0
    processor_s_per_message: float = 0.0
    reduce_s_per_byte: float = 0.0
    lanes: int = 1
    gather_s: tuple[tuple[float, float], ...] = ()


#: Transports with the coefficients that stand until they are measured. Gloo's are of a rank with one thread over loopback: all
#: that a byte costs, sent, received and reduced, is in the first. What shared memory takes is processor time throughout.
SHARED_MEMORY = Transport("shm", processor_s_per_byte=1 / 14e9, processor_s_per_message=5e-6, lanes=1)
GLOO = Transport("gloo", processor_s_per_byte=0.97e-9, processor_s_per_message=25e-6, lanes=2)
NCCL = Transport("nccl")
#: Links inside a host that stand until they are measured: copies of one rank in memory, and TCP over loopback.
SHARED_MEMORY_LINK = LinkSpeed(10e-6, 14e9, name="shared memory")
LOOPBACK = LinkSpeed(35e-6, 3e9, name="loopback")


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal kind. Ranks are numbered node by node.

    Attributes:
        num_nodes: number of nodes.
        ranks_per_node: ranks on each.
        cores_per_node: processor cores of a node that its ranks compute and communicate with; 0: they do not limit.
        inside: the link between ranks of one node.
        between: the link between nodes; unused where there is one node.
        transport: what carries collectives.
        device: the accelerator of each rank; None: ranks compute on the cores.
        node_memory_bytes: memory of a node; None if unknown. That of a device is ``device.memory_bytes``.
        shares_host: all nodes are one machine (network namespaces with shaped links), whose ``cores_per_node`` they share.
        name: the description that it was made from.
    """

    num_nodes: int
    ranks_per_node: int
    cores_per_node: int
    inside: LinkSpeed
    between: LinkSpeed
    transport: Transport
    device: Device | None = None
    node_memory_bytes: float | None = None
    shares_host: bool = False
    name: str = ""

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def rank_memory_bytes(self) -> float | None:
        """Memory that one rank may use: its device's, or its share of the node's; None if unknown."""
        if self.device is not None:
            return self.device.memory_bytes
        nodes = self.num_nodes if self.shares_host else 1
        return None if self.node_memory_bytes is None else self.node_memory_bytes / (self.ranks_per_node * nodes)

    def node_of(self, rank: int) -> int:
        """Return the number of the node that a rank is on."""
        return rank // self.ranks_per_node

    def placement(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Return on how many nodes these ranks are, and how many of them are on the fullest."""
        counts: dict[int, int] = {}
        for rank in ranks:
            counts[self.node_of(rank)] = counts.get(self.node_of(rank), 0) + 1
        return len(counts), max(counts.values(), default=0)

    def with_ranks(self, num_ranks: int) -> Cluster:
        """Return the part of this cluster that a training of so many ranks takes: full nodes, or part of one.

        Ranks that compute on cores may be any number on a node: there they are spread over all nodes if their number allows,
        else over the fewest that it does.
        """
        if self.device is None:
            nodes = max(n for n in range(1, self.num_nodes + 1) if num_ranks % n == 0)
            return dataclasses.replace(self, num_nodes=nodes, ranks_per_node=num_ranks // nodes)
        per_node = next(k for k in range(min(num_ranks, self.ranks_per_node), 0, -1) if num_ranks % k == 0)
        return dataclasses.replace(self, num_nodes=num_ranks // per_node, ranks_per_node=per_node)

    def with_table(self, table: Sequence[Measured]) -> Cluster:
        """Return this cluster with measured all-reduces: those of more ranks than a node has are of the link between nodes."""
        inside = tuple(each for each in table if each[0] <= self.ranks_per_node)
        between = tuple(each for each in table if each[0] > self.ranks_per_node)
        return dataclasses.replace(
            self,
            inside=dataclasses.replace(self.inside, table=(*self.inside.table, *inside)),
            between=dataclasses.replace(self.between, table=(*self.between.table, *between)),
        )


_SCALES = {"seconds": 1.0, "s": 1.0, "ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "microseconds": 1e-6}
_HEADING = "bytes,seconds,ranks (or ms or us for seconds; ranks may be left out)"


def measured_table(text: str, num_ranks: int, name: str = "the table") -> tuple[Measured, ...]:
    """Read measured all-reduces: CSV with the columns ``bytes``, ``seconds`` (or ``ms``, ``us``) and, if wanted, ``ranks``.

    Args:
        text: the file's; without a heading its columns are bytes, seconds and ranks. Lines that begin with ``#`` are left out.
        num_ranks: how many ranks were measured, where the file does not say.
        name: of the file, for errors.

    Raises:
        UsageError: a column or a number is not understood; the text names the line.
    """
    lines = [
        (n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise UsageError(explain(f"{name} has no lines", fix=f"give it the columns {_HEADING}"))
    columns = [each.strip().lower() for each in lines[0][1].split(",")]
    if any(re.search("[a-df-z]", each) for each in columns):
        units = [each for each in columns if each in _SCALES]
        unknown = [each for each in columns if each not in (*_SCALES, "bytes", "ranks")]
        if unknown or len(units) != 1 or "bytes" not in columns:
            raise UsageError(
                explain(f"the heading of {name} is not understood", value=lines[0][1], fix=f"say {_HEADING}")
            )
        lines = lines[1:]
    else:
        columns, units = ["bytes", "seconds", "ranks"], ["seconds"]
    rows = []
    for number, line in lines:
        cells = [each.strip() for each in line.split(",")]
        try:
            row = dict(zip(columns, map(float, cells), strict=False))
            ranks, size, seconds = row.get("ranks", float(num_ranks)), row["bytes"], row[units[0]] * _SCALES[units[0]]
            is_right = ranks >= 2 and ranks == int(ranks) and size > 0 and seconds > 0 and math.isfinite(size * seconds)
        except (ValueError, KeyError, OverflowError):
            is_right = False
        if not is_right:
            fix = "give positive numbers, at least 2 ranks, in the columns " + ",".join(columns)
            raise UsageError(explain(f"line {number} of {name} is not understood", value=line, fix=fix))
        rows.append((ranks, size, seconds))
    if not rows:
        raise UsageError(explain(f"{name} has a heading alone", fix="add a line for each measured size"))
    return tuple(sorted(set(rows)))


def cluster_of_check(document: Mapping[str, Any], transport: str | None = None) -> Cluster:
    """Return the cluster that ``guozhuang check --json`` measured.

    Args:
        document: its JSON document, as a dictionary.
        transport: ``"shm"`` or ``"gloo"``; None for the backend that ``gz.init`` chose there.

    Raises:
        UsageError: it is no such document, lacks ranks or measurements, or its nodes differ in their number of ranks.
    """
    try:
        facts, num_ranks = document["facts"], int(document["num_ranks"])
        nodes: dict[str, list[Mapping[str, Any]]] = {}
        for each in facts:
            nodes.setdefault(each["node"], []).append(each)
        if len(facts) < num_ranks:
            raise UsageError(
                explain(
                    f"this check has {len(facts)} of its {num_ranks} ranks",
                    fix="mend what it found, and run guozhuang check again",
                )
            )
        sizes = [f"{members[0]['host']}: {len(members)}" for members in nodes.values()]
        if len({len(members) for members in nodes.values()}) > 1:
            fix = "check equal numbers of ranks on all nodes, or describe the cluster in words"
            raise UsageError(
                explain("the nodes of this check have different numbers of ranks", value=", ".join(sizes), fix=fix)
            )
        is_cuda = str(facts[0]["device"]).startswith("cuda")
        return _checked(document, nodes, hardware.device(facts[0]["device_name"]) if is_cuda else None, transport)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        fix = "give the output of guozhuang check --json"
        raise UsageError(explain(f"this is no result of a check: {error!r}", fix=fix)) from error


def _checked(
    document: Mapping[str, Any],
    nodes: Mapping[str, list[Mapping[str, Any]]],
    device: Device | None,
    transport: str | None,
) -> Cluster:
    ranks = [each for members in nodes.values() for each in members]
    per_node = len(ranks) // len(nodes)
    measured = [each for each in document["reductions"] if each["median_s"]]
    backends = {each["backend"]: each["is_default"] for each in measured}
    default = next((each for each, is_default in backends.items() if is_default), "nccl" if device else "shm")
    wanted = transport or (default if default in ("shm", "gloo", "nccl") else "gloo")
    inside, between = _link(document, False), _link(document, True)
    if wanted == "shm":
        inside = SHARED_MEMORY_LINK
    elif device is not None:
        rate = device.link_bytes_per_s or device.pcie_bytes_per_s
        inside = LinkSpeed(
            inside.latency_s if inside else 10e-6, rate, name="NVLink" if device.link_bytes_per_s else "PCIe"
        )
    if len(nodes) > 1 and between is None:
        raise UsageError(
            explain("no link between nodes was measured", fix="mend what the check found, and run it again")
        )
    cores = min(_cores(each["resources"]) for each in ranks)
    memory = [each["resources"]["memory_bytes"] for each in ranks]
    machines = {name.split("/")[1] for name in nodes if name.count("/") > 1}  # host / boot / namespace of the network
    cluster = Cluster(
        len(nodes), per_node, 0 if device else cores, inside or LOOPBACK, between or LOOPBACK,
        {"shm": SHARED_MEMORY, "gloo": GLOO, "nccl": NCCL}[wanted], device, min(memory) if all(memory) else None,
        shares_host=len(nodes) > 1 and len(machines) == 1, name="guozhuang check",
    )  # fmt: skip
    return cluster.with_table(
        [(len(ranks), each["num_bytes"], each["median_s"]) for each in measured if each["backend"] == wanted]
    )


def _cores(resources: Mapping[str, Any]) -> int:
    return max(1, min(len(resources["cores"]), int(resources["quota_cores"] or len(resources["cores"]))))


def _link(document: Mapping[str, Any], between: bool) -> LinkSpeed | None:
    """Return the median latency and rate of the measured links between nodes, or inside them; None without any."""
    links = [each for each in document["links"] if each["between_nodes"] == between and each["latency_s"]]
    rates = [min(each["forward_bytes_per_s"] or math.inf, each["backward_bytes_per_s"] or math.inf) for each in links]
    rates = [each for each in rates if math.isfinite(each)]
    if not rates:
        return None
    return LinkSpeed(statistics.median(each["latency_s"] for each in links), statistics.median(rates), name="measured")
