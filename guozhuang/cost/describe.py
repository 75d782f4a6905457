"""Reads a cluster from the few words of a command line: ``4x8xA100-80,ib=200gbit``.

[Note: what a description says]
First the machines: ``NODESxDEVICESxNAME`` (``8xH100`` is one node), ``NODESxCOREScores`` (``2x4cores``), ``NODESxSYSTEM``
(``4xdgx-a100``) or ``NODESxhere`` (hosts like this machine); or the file of ``guozhuang check --json``. Then, after commas, in
any order: the network between nodes (``ib=``, ``eth=``, ``roce=``, ``efa=`` or nothing before a rate: ``10gbit``, ``25GB/s``,
``8x200gbit``, ``hdr``; after a slash its latency: ``10gbit/0.1ms``), the link inside a node (``inside=``, ``nvlink``,
``nvlink=3``, ``pcie=4``), ``ranks=N`` on each node, ``memory=64GiB`` of a node or device, ``shm``, ``gloo`` or ``nccl``,
``shared`` (all nodes are one machine), and a file of measured all-reduces (CSV: bytes, seconds, ranks).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

from guozhuang.cost import hardware
from guozhuang.cost.cluster import (
    GLOO,
    LOOPBACK,
    NCCL,
    SHARED_MEMORY,
    SHARED_MEMORY_LINK,
    Cluster,
    LinkSpeed,
    cluster_of_check,
    measured_table,
)
from guozhuang.cost.hardware import Device, near
from guozhuang.errors import UsageError, explain

_EXAMPLES = "8xH100, 4x8xA100-80,ib=200gbit, 2x4cores,10gbit/0.1ms, 4xdgx-a100 or here"
_KEYS = {
    "ib": "ib=200gbit", "eth": "eth=10gbit", "roce": "roce=1600gbit", "efa": "efa=4x100gbit", "net": "net=10gbit/0.1ms",
    "inside": "inside=300GB/s", "nvlink": "nvlink=3", "pcie": "pcie=4", "ranks": "ranks=4", "memory": "memory=64GiB",
}  # fmt: skip
_ALIASES = {"infiniband": "ib", "ethernet": "eth", "network": "net", "mem": "memory", "rank": "ranks"}
_PLAIN = ("shm", "gloo", "nccl", "shared", "nvlink", "pcie", *hardware.INFINIBAND)
_TRANSPORTS = {each.name: each for each in (SHARED_MEMORY, GLOO, NCCL)}
#: Latencies that are taken where a description gives none: of a TCP network, of one for devices, and inside a node of devices.
TCP_LATENCY_S, NETWORK_LATENCY_S, DEVICE_LATENCY_S = 50e-6, 20e-6, 10e-6
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_MOST_NODES = 1_000_000


def parse_cluster(text: str, here: Cluster | None = None, read: Callable[[str], str] | None = None) -> Cluster:
    """Return the cluster that a description means. See [Note: what a description says].

    Args:
        text: the description.
        here: this machine, as measured; without it the word ``here`` is refused.
        read: returns the text of a file that the description names; without it files are refused.

    Raises:
        UsageError: a word is not understood, does not fit the others, or something is missing that cannot be guessed; the text
            names the word and what would be understood.
    """
    first, *words = [each.strip() for each in text.split(",") if each.strip()] or [""]
    if not first:
        raise UsageError(
            explain("the description of a cluster is empty", value=text, fix=f"say for example {_EXAMPLES}")
        )
    if first.endswith(".json"):
        transport = next((each.lower() for each in words if each.lower() in _TRANSPORTS), None)
        cluster = cluster_of_check(_document(first, read), transport)
    else:
        cluster, more = _machines(first, here)
        named = [each for each in words if _word(each)[0] == "between"]
        words = words if named or not more else [more, *words]
    seen: dict[str, str] = {}
    for word in sorted(words, key=lambda each: each.lower() != "shared"):  # what a link carries depends on it
        kind, value = _word(word)
        if kind in seen and kind != "table":
            raise UsageError(explain(f"two words say the same: {seen[kind]!r} and", value=word, fix="leave one out"))
        seen[kind] = word
        cluster = _changed(cluster, kind, value, word, read)
    if cluster.num_nodes > 1 and cluster.between.bytes_per_s <= 0 and not cluster.between.table:
        fix = (
            f"add it after a comma: {text.strip()},10gbit/0.1ms for Ethernet, {text.strip()},ib=200gbit for InfiniBand"
        )
        raise UsageError(
            explain(f"the network between the {cluster.num_nodes} nodes is not described", value=text, fix=fix)
        )
    return dataclasses.replace(cluster, name=text.strip())


def _machines(word: str, here: Cluster | None) -> tuple[Cluster, str]:
    """Return the nodes that the first word names, and the word for their network where they bring one."""
    found = re.fullmatch(r"(?i)(?:(\d+)\s*[x*\u00d7]\s*)?(?:(\d+)\s*[x*\u00d7]\s*)?(.*)", word)
    assert found
    counts, what = [int(each) for each in found.groups()[:2] if each], found.group(3).strip()
    if not what:
        raise UsageError(
            explain("a number without what there are so many of", value=word, fix=f"say for example {_EXAMPLES}")
        )
    if 0 in counts or max(counts, default=1) > _MOST_NODES:
        raise UsageError(explain("such a number of machines cannot be", value=word, fix=f"say for example {_EXAMPLES}"))
    cores = re.fullmatch(r"(?i)(\d+)\s*-?(?:cores?|cpus?)", what)
    system = hardware.SYSTEMS.get(re.sub(r"[ _]", "-", what.lower()))
    if (cores or system or what.lower() == "here") and len(counts) > 1:
        fix = f"say {counts[0] * counts[1]}x{what}" + (f", or {counts[0]}x{what},ranks={counts[1]}" if cores else "")
        raise UsageError(
            explain("only devices have two numbers before them: nodes and devices of a node", value=word, fix=fix)
        )
    nodes = counts[0] if counts else 1
    unknown = LinkSpeed(TCP_LATENCY_S, 0.0)
    if cores:
        number = int(cores.group(1))
        if not number:
            raise UsageError(explain("a host without cores", value=word, fix="say for example 2x4cores"))
        return Cluster(nodes, number, number, SHARED_MEMORY_LINK, unknown, SHARED_MEMORY), ""
    if what.lower() == "here":
        if here is None:
            fix = (
                "describe it (4x8xA100-80,ib=200gbit; 2x4cores,10gbit), or give the document of guozhuang check --json"
            )
            raise UsageError(explain("this machine was not measured", value=word, fix=fix))
        return dataclasses.replace(here, num_nodes=nodes * here.num_nodes), ""
    if system:
        return _of_devices(nodes, system.num_devices, hardware.device(system.device)), system.network
    devices = hardware.named(what)
    if len(devices) != 1:
        raise _unknown_machine(word, what, devices)
    device = devices[0]
    per_node = counts[-1] if counts else 1
    nodes = counts[0] if len(counts) > 1 else 1
    if per_node > device.most_per_node:
        most = next(k for k in (8, 16, 72) if k <= device.most_per_node)
        fix = f"say how many nodes: {-(-per_node // most)}x{most}x{what}, and the network between them"
        raise UsageError(explain(f"no node has {per_node} of them", value=word, fix=fix))
    return _of_devices(nodes, per_node, device), ""


def _unknown_machine(word: str, what: str, devices: list[Device]) -> UsageError:
    before = word[: len(word) - len(what)]
    if devices:
        meant = " or ".join(f"{before}{each.name}" for each in devices)
        return UsageError(explain("this device comes with different memory", value=word, fix=f"say {meant}"))
    if re.fullmatch(r"(?i)cpus?|cores?|hosts?|nodes?", what):
        return UsageError(
            explain("cores without a number", value=word, fix=f"say how many a host has: {before or '2x'}4cores")
        )
    names = near(
        what.replace("-", " ").split()[0] if what[0].isdigit() and " " in what else what,
        [*hardware.DEVICES, *hardware.SYSTEMS],
    )
    if re.match(r"(?i)\d+\s*-?c", what):
        names = [re.sub(r"\D.*", "cores", what)]
    meant = f"did you mean {' or '.join(before + each for each in names)}? " if names else ""
    known = f"devices are {', '.join(hardware.DEVICES)}; systems {', '.join(hardware.SYSTEMS)}; hosts without devices 2x4cores"
    return UsageError(explain("no such device or system", value=word, fix=f"{meant}{known}"))


def _of_devices(nodes: int, per_node: int, device: Device) -> Cluster:
    name = "NVLink" if device.generation else "the devices' own link"
    inside = LinkSpeed(DEVICE_LATENCY_S, device.link_bytes_per_s or 0.0, name=name)
    if device.link_bytes_per_s is None:
        inside = LinkSpeed(DEVICE_LATENCY_S, device.pcie_bytes_per_s, name="PCIe")
    return Cluster(nodes, per_node, 0, inside, LinkSpeed(NETWORK_LATENCY_S, 0.0), NCCL, device)


def _word(word: str) -> tuple[str, str]:
    """Return what a word is about, and its value: ``("between", "10gbit/0.1ms")``."""
    key, equals, value = (each.strip() for each in word.partition("="))
    key = _ALIASES.get(key.lower(), key.lower())
    if equals:
        if key not in _KEYS:
            meant = [_KEYS[each] for each in near(key, _KEYS)] or list(_KEYS.values())
            raise UsageError(
                explain("this word of the cluster is not understood", value=word, fix=f"say {' or '.join(meant)}")
            )
        if not value:
            raise UsageError(
                explain("nothing stands behind the equals sign", value=word, fix=f"say for example {_KEYS[key]}")
            )
        kinds = {"inside": "inside", "nvlink": "inside", "pcie": "inside", "ranks": "ranks", "memory": "memory"}
        return kinds.get(key, "between"), f"{key}={value}" if key in ("ib", "roce", "efa", "nvlink", "pcie") else value
    if key.endswith((".csv", ".json")):
        return "table", word
    if found := re.fullmatch(r"(\d+)\s*ranks?", key):
        return "ranks", found.group(1)
    if key in _TRANSPORTS:
        return "transport", key
    if key == "shared":
        return "shared", ""
    if key in ("nvlink", "pcie"):
        return "inside", key
    if key in hardware.INFINIBAND or re.match(r"\d+x\s*(\d|[a-z]dr)|[\d.]+\s*[a-z]", key):
        return "between", word
    if re.fullmatch(r"[\d.]+", key):
        raise UsageError(explain("a number without a unit", value=word, fix=f"say {word}gbit, or ranks={word}"))
    meant = near(key, [*_PLAIN, *_KEYS]) or [*_KEYS.values(), *_TRANSPORTS, "shared", "10gbit/0.1ms"]
    fix = f"say {' or '.join(_KEYS.get(each, each) for each in meant)}"
    raise UsageError(explain("this word of the cluster is not understood", value=word, fix=fix))


def _changed(cluster: Cluster, kind: str, value: str, word: str, read: Callable[[str], str] | None) -> Cluster:
    """Return the cluster with what one word says about it."""
    change = dataclasses.replace
    if kind == "between":
        return change(cluster, between=_network(value, word, cluster))
    if kind == "inside":
        return change(cluster, inside=_inside(value, word, cluster))
    if kind == "ranks":
        if not value.isdecimal() or not int(value):
            raise UsageError(explain("no number of ranks", value=word, fix="say for example ranks=4"))
        return change(cluster, ranks_per_node=int(value))
    if kind == "memory":
        size = parse_size(value)
        if cluster.device is None:
            return change(cluster, node_memory_bytes=size)
        return change(cluster, device=change(cluster.device, memory_bytes=size))
    if kind == "transport":
        if (value == "nccl") != (cluster.device is not None):
            fix = "say gloo or shm" if cluster.device is None else "leave it out: devices use nccl"
            raise UsageError(explain("this transport does not fit these machines", value=word, fix=fix))
        if value == cluster.transport.name:  # perhaps as measured here
            return cluster
        inside = {"gloo": LOOPBACK, "shm": SHARED_MEMORY_LINK}.get(value, cluster.inside)
        is_kept = cluster.inside not in (LOOPBACK, SHARED_MEMORY_LINK)
        return change(cluster, transport=_TRANSPORTS[value], inside=cluster.inside if is_kept else inside)
    if kind == "shared":
        if cluster.device is not None:
            raise UsageError(
                explain("only hosts that compute on cores can be one machine", value=word, fix="leave it out")
            )
        return change(cluster, shares_host=True)
    table = measured_table(_read(word, read), cluster.num_ranks, word)
    return cluster.with_table(table)


def _network(value: str, word: str, cluster: Cluster) -> LinkSpeed:
    """Read the rate and latency of a network: ``ib=8x200gbit``, ``10gbit/0.1ms``, ``hdr``."""
    kind, _, rest = value.partition("=") if "=" in value else ("", "", value)
    rate_text, slash, latency_text = _split_latency(rest)
    is_plain = kind == "" and rate_text.lower().split("x")[-1].strip() not in hardware.INFINIBAND
    rate = parse_rate(rate_text, word)
    if is_plain and not rate_text.rstrip("/s").endswith("B"):
        rate *= hardware.TCP_SHARE_VIRTUAL if cluster.shares_host else hardware.TCP_SHARE
    latency = TCP_LATENCY_S if is_plain else NETWORK_LATENCY_S
    name = rate_text if is_plain else f"InfiniBand {rate_text}" if kind in ("", "ib") else f"{kind} {rate_text}"
    return LinkSpeed(parse_time(latency_text, word) if slash else latency, rate, name=name)


def _inside(value: str, word: str, cluster: Cluster) -> LinkSpeed:
    """Read the link inside a node: ``nvlink``, ``nvlink=3``, ``pcie=4``, ``300GB/s/10us``."""
    kind, _, rest = value.partition("=")
    if kind in ("nvlink", "pcie"):
        if cluster.device is None:
            raise UsageError(
                explain("only devices have such a link", value=word, fix="leave it out, or name devices: 8xH100")
            )
        if kind == "nvlink" and not rest and cluster.device.link_bytes_per_s is None:
            fix = "leave it out; where they are bridged, say its rate: inside=31GB/s"
            raise UsageError(explain(f"{cluster.device.name} has no NVLink", value=word, fix=fix))
        known: dict[int, float] = hardware.NVLINK if kind == "nvlink" else hardware.PCIE
        own = cluster.device.link_bytes_per_s if kind == "nvlink" else cluster.device.pcie_bytes_per_s
        name = "NVLink" if kind == "nvlink" else "PCIe"
        if not rest or (rest.isdecimal() and int(rest) in known):
            return LinkSpeed(DEVICE_LATENCY_S, known[int(rest)] if rest else own or 0.0, name=name)
        if rest.isdecimal():
            raise UsageError(
                explain(f"no such generation of {name}", value=word, fix=f"known are {', '.join(map(str, known))}")
            )
        value = rest
    rate_text, slash, latency_text = _split_latency(value)
    latency = parse_time(latency_text, word) if slash else cluster.inside.latency_s
    return LinkSpeed(latency, parse_rate(rate_text, word), name=value)


def _split_latency(value: str) -> tuple[str, str, str]:
    """Divide at the slash before a latency; that of ``GB/s`` is no such slash."""
    found = re.fullmatch(r"(.*?[^/\s](?:/s)?)(?:\s*(/)\s*(.+))?", value.strip(), re.IGNORECASE)
    return (found.group(1), found.group(2) or "", found.group(3) or "") if found else (value, "", "")


def parse_rate(text: str, word: str = "") -> float:
    """Return bytes per second: of ``10gbit``, ``10Gb/s``, ``8x200gbit``, ``25GB/s``, ``hdr``, ``8xndr``.

    Raises:
        UsageError: it is none of them, or may be bits or bytes.
    """
    word = word or text
    found = re.fullmatch(r"(?:(\d+)\s*[xX]\s*)?([\d.]*)\s*([A-Za-z]*)\s*(/s|ps)?", text.strip())
    fix = "say for example 200gbit, 8x200gbit, 25GB/s or hdr"
    if not found:
        raise UsageError(explain("no rate of a link", value=word, fix=fix))
    cards, number, unit = int(found.group(1) or 1), found.group(2), found.group(3)
    if not number and unit.lower() in hardware.INFINIBAND and cards:
        return cards * hardware.INFINIBAND[unit.lower()] / 8
    bits = re.fullmatch(r"(?i)([kmgt]?)(?:bits?|bps|be?)?(?:ps)?", unit)
    try:
        value = float(number)
    except ValueError:
        raise UsageError(explain("no rate of a link", value=word, fix=fix)) from None
    if not bits or not bits.group(1) or value <= 0 or not cards:
        raise UsageError(explain("no rate of a link", value=word, fix=fix))
    scale = _BITS[bits.group(1).lower()]
    if re.fullmatch(r"[kmgtKMGT]B(ps)?", unit):
        return cards * value * scale
    if re.fullmatch(r"[kmgt]b(ps)?", unit) and not (found.group(4) == "ps" or unit.endswith("ps")):
        fix = f"say {number}{unit[0]}bit or {number}{unit[0].upper()}B/s"
        raise UsageError(explain("a rate that may be bits or bytes", value=word, fix=fix))
    return cards * value * scale / 8


def parse_time(text: str, word: str = "") -> float:
    """Return the seconds of ``0.1ms``, ``20us``, ``1s``.

    Raises:
        UsageError: it is no such time.
    """
    found = re.fullmatch(r"(?i)([\d.]+(?:e-?\d+)?)\s*(s|ms|us|\u00b5s|\u03bcs|ns)", text.strip())
    try:
        scale = {"s": 1.0, "ms": 1e-3, "ns": 1e-9}.get(found.group(2).lower(), 1e-6) if found else 0.0
        return float(found.group(1)) * scale if found else float("-")
    except ValueError:
        raise UsageError(
            explain("no latency", value=word or text, fix="say for example 10gbit/0.1ms or 10gbit/20us")
        ) from None


def parse_size(text: str, before: str = "memory=") -> float:
    """Return the bytes of ``64GiB``, ``64GB`` (both binary, as memory is sold), ``800MB``, ``1.5tib``.

    Args:
        text: the size.
        before: what stands before it, for the text of an error: ``"--memory-limit "``.

    Raises:
        UsageError: it is no such size.
    """
    found = re.fullmatch(r"(?i)([\d.]+)\s*([kmgt])(?:i?b)?", text.strip())
    try:
        size = float(found.group(1)) * 1024.0 ** (1 + "kmgt".index(found.group(2).lower())) if found else 0.0
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise UsageError(explain("no size of memory", value=f"{before}{text}", fix=f"say for example {before}64GiB"))
    return size


def _document(name: str, read: Callable[[str], str] | None) -> dict[str, Any]:
    text = _read(name, read)
    try:
        document = json.loads(text)
    except ValueError as error:
        fix = "give the output of guozhuang check --json"
        raise UsageError(explain(f"{name} is no JSON document: {error}", fix=fix)) from error
    return document if isinstance(document, dict) else {}


def _read(name: str, read: Callable[[str], str] | None) -> str:
    if read is None:
        raise UsageError(explain("a file cannot be read here", value=name, fix=f"describe the cluster: {_EXAMPLES}"))
    try:
        return read(name)
    except (OSError, UnicodeDecodeError) as error:
        what = f"the file of a cluster cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(explain(what, value=name, fix="give the output of guozhuang check --json")) from error
