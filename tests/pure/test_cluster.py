"""Clusters: from the words of a command line, from the document of a check, from measured all-reduces."""

from __future__ import annotations

import dataclasses
import json

import pytest

from guozhuang.check.results import CheckResults, Facts, MeasuredLink, MeasuredReduction, Network, Resources, to_json
from guozhuang.cost import hardware
from guozhuang.cost.cluster import (
    SHARED_MEMORY,
    SHARED_MEMORY_LINK,
    Cluster,
    LinkSpeed,
    cluster_of_check,
    measured_table,
)
from guozhuang.cost.describe import parse_cluster, parse_rate, parse_size
from guozhuang.errors import UsageError

HERE = Cluster(1, 2, 2, SHARED_MEMORY_LINK, LinkSpeed(0.0, 0.0), SHARED_MEMORY, node_memory_bytes=24.0 * 2**30)


def facts(rank: int, node: str, *, cores: int = 4, device: str = "cpu", name: str = "x86_64") -> Facts:
    network = Network("h", (), "", (), "", None, None, None, "", ())
    resources = Resources(tuple(range(cores)), None, 1, 32 << 30, None, None, None, None, None, None, ())
    return Facts(rank, "h", node, 1, "torchrun", device, name, 0, "Linux", {}, True, True, network, resources)


def check(*nodes: str, **more: object) -> str:
    links = (
        MeasuredLink(0, 1, False, 30e-6, 9, 4e9, 5, 3e9, 5),
        MeasuredLink(0, 2, True, 150e-6, 9, 1.1e9, 5, 1.0e9, 5),
        MeasuredLink(1, 2, True, failure="no answer"),
    )
    reductions = (
        MeasuredReduction("shm", True, "cpu", 4096, 1e-4, 5),
        MeasuredReduction("gloo", False, "cpu", 4096, 9e-4, 5),
    )
    ranks = tuple(facts(rank, node, **more) for rank, node in enumerate(nodes))  # type: ignore[arg-type]
    return to_json(CheckResults(len(nodes), "guozhuang run", ranks, (), links, reductions), ())


FILES = {
    "check.json": check("h/boot/net:1", "h/boot/net:1", "i/other/net:1", "i/other/net:1"),
    "one.json": check("h/boot/net:1", "h/boot/net:1"),
    "table.csv": "bytes,ms,ranks\n4096,0.1,32\n1048576,0.4,32\n# a remark\n4096,.05,8\n",
}


def parsed(text: str) -> Cluster:
    return parse_cluster(text, HERE, FILES.__getitem__)


@pytest.mark.parametrize(
    ("text", "nodes", "ranks", "device", "inside", "between", "latency_s"),
    [
        ("8xH100", 1, 8, "H100", 450e9, None, None),
        ("8 x h100 80gb", 1, 8, "H100", 450e9, None, None),
        ("4x8xA100-80,ib=200gbit", 4, 8, "A100-80", 300e9, 25e9, 20e-6),
        ("4\u00d78xNVIDIA A100-SXM4-80GB, IB = 8x200Gb/s / 5us", 4, 8, "A100-80", 300e9, 200e9, 5e-6),
        ("2x8xV100-32,infiniband=4xEDR", 2, 8, "V100-32", 150e9, 50e9, 20e-6),
        ("2x4cores,10gbit/0.1ms", 2, 4, None, 14e9, 10e9 / 8 * 0.941, 0.1e-3),
        ("2x4cores,1gbps,2ranks,gloo", 2, 2, None, 3e9, 1e9 / 8 * 0.941, 50e-6),
        ("4xdgx-a100", 4, 8, "A100-80", 300e9, 200e9, 20e-6),
        ("4xDGX A100,hdr", 4, 8, "A100-80", 300e9, 25e9, 20e-6),
        ("2xp5en,8xndr", 2, 8, "H200", 450e9, 400e9, 20e-6),
        ("8x4090", 1, 8, "RTX-4090", 31e9, None, None),
        ("4xA100-80,pcie", 1, 4, "A100-80", 31e9, None, None),
        ("4xA100-80,nvlink=4,", 1, 4, "A100-80", 450e9, None, None),
        ("here", 1, 2, None, 14e9, None, None),
        ("4xhere,100mbit/10ms,shared,ranks=1", 4, 1, None, 14e9, 100e6 / 8 * 0.998, 0.01),
        ("check.json", 2, 2, None, 14e9, 1e9, 150e-6),
        ("check.json,gloo", 2, 2, None, 3e9, 1e9, 150e-6),
        ("check.json,1gbit/1ms", 2, 2, None, 14e9, 1e9 / 8 * 0.941, 1e-3),
    ],
)
def test_a_description(
    text: str, nodes: int, ranks: int, device: str | None, inside: float, between: float | None, latency_s: float | None
) -> None:
    cluster = parsed(text)
    assert (cluster.num_nodes, cluster.ranks_per_node) == (nodes, ranks)
    assert (cluster.device and cluster.device.name) == device
    assert cluster.inside.bytes_per_s == pytest.approx(inside)
    if between is not None:
        assert (cluster.between.bytes_per_s, cluster.between.latency_s) == pytest.approx((between, latency_s))
    assert cluster.shares_host == ("shared" in text)


def test_measured_tables_lie_where_they_were_measured() -> None:
    cluster = parsed("4x8xA100-80,ib=200gbit,table.csv")
    assert cluster.between.table == ((32.0, 4096.0, 1e-4), (32.0, 1048576.0, 4e-4))
    assert cluster.inside.table == ((8.0, 4096.0, 0.05e-3),)
    assert parsed("4x8xA100-80,table.csv").between.table, "a measured network needs no rate"
    assert parsed("check.json").between.table == ((4.0, 4096.0, 1e-4),)
    assert parsed("one.json,gloo").inside.table == ((2.0, 4096.0, 9e-4),)
    assert measured_table("4096, 0.001\n", 4) == ((4.0, 4096.0, 0.001),)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "8xH100"),
        ("8x", "8xH100"),
        ("8xH1OO", "did you mean 8xH100"),
        ("8xA100", "say 8xA100-40 or 8xA100-80"),
        ("4xdgx-a10", "4xdgx-a100"),
        ("4cors", "did you mean 4cores"),
        ("2xcpu", "2x4cores"),
        ("16xH100", "2x8xH100"),
        ("0xH100", "8xH100"),
        ("2x2x4cores", "2x4cores,ranks=2"),
        ("4x8xA100-80", "4x8xA100-80,ib=200gbit"),
        ("2x4cores", "2x4cores,10gbit/0.1ms"),
        ("4x8xA100-80,ib=200gb", "200gbit or 200GB/s"),
        ("4x8xA100-80,ib=", "ib=200gbit"),
        ("4x8xA100-80,ib=fast", "200gbit"),
        ("4x8xA100-80,ib=0gbit", "200gbit"),
        ("2x4cores,10", "10gbit"),
        ("2x4cores,10gibt", "200gbit"),
        ("2x4cores,10gbit/0.1", "10gbit/0.1ms"),
        ("2x4cores,10gbit,1gbit", "leave one out"),
        ("2x4cores,speed=10gbit", "net=10gbit/0.1ms"),
        ("2x4cores,1gbit,glooo", "say gloo"),
        ("8x4090,nvlink", "inside=31GB/s"),
        ("8xH100,nvlink=9", "1, 2, 3, 4, 5"),
        ("4cores,nvlink", "name devices"),
        ("4cores,nccl", "gloo or shm"),
        ("8xH100,gloo", "devices use nccl"),
        ("8xH100,shared", "leave it out"),
        ("4cores,ranks=0", "ranks=4"),
        ("4cores,memory=lots", "memory=64GiB"),
    ],
)
def test_a_mistyped_description_names_the_word(text: str, named: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(text)
    assert named in str(error.value)
    wrong = text.split(",")[-1]
    assert (wrong if "10gbit" not in wrong or "/" in wrong else "10gbit") in str(error.value)


def test_what_cannot_be_read_is_refused() -> None:
    for text, named in {"here": "guozhuang check", "x.csv": "no such device", "8xH100,x.csv": "x.csv"}.items():
        with pytest.raises(UsageError, match=named):
            parse_cluster(text)
    tables = {
        "": "no lines",
        "bytes,time\n1,2": "heading",
        "bytes,ms\n1,x": "line 2",
        "bytes,ms\n4096,-1": "line 2",
        "bytes,ms": "alone",
    }
    for text, named in tables.items():
        with pytest.raises(UsageError, match=named):
            measured_table(text, 2)
    for document in ({}, {"facts": [], "num_ranks": 0}, {"facts": [1], "num_ranks": 1}, {"facts": None}):
        with pytest.raises(UsageError, match="no result of a check"):
            cluster_of_check(document)
    with pytest.raises(UsageError, match="different numbers"):
        cluster_of_check(json.loads(check("a", "a", "b")))
    with pytest.raises(UsageError, match="no JSON"):
        parse_cluster("c.json", read=lambda _: "no")


def test_a_check_tells_machines_from_namespaces_and_devices() -> None:
    namespaces = cluster_of_check(json.loads(check("h/boot/net:1", "h/boot/net:2", "h/boot/net:3")))
    assert namespaces.shares_host
    assert (namespaces.num_nodes, namespaces.cores_per_node) == (3, 4)
    assert namespaces.rank_memory_bytes == pytest.approx((32 << 30) / 3)
    device = cluster_of_check(json.loads(check("a", "a", device="cuda:0", name="NVIDIA H100 80GB HBM3"))).device
    assert device is hardware.DEVICES["H100"]


def test_every_system_and_device_can_be_described() -> None:
    for name, system in hardware.SYSTEMS.items():
        cluster = parse_cluster(f"2x{name}")
        assert cluster.device is hardware.DEVICES[system.device]
        assert cluster.num_ranks == 2 * system.num_devices
    for name, device in hardware.DEVICES.items():
        assert hardware.device(name) is device
        assert hardware.device(name.lower().replace("-", "_")) is device
        assert device.source


def test_peaks_are_dense() -> None:
    """Clock, multiply-adds per clock and core, and cores give H100's peak; vendors print twice that."""
    assert pytest.approx(hardware.device("H100").flops["bf16"], rel=1e-3) == 1.830e9 * 512 * 2 * 528
    best = {
        name: each.matmul_flops / each.flops["bf16"] for name, each in hardware.DEVICES.items() if each.matmul_flops
    }
    shares = {"A100-80": 0.87, "H100": 0.80, "B200": 0.78, "GB200": 0.73, "MI300X": 0.51}
    assert {name: round(best[name], 2) for name in shares} == shares


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10gbit", 1.25e9),
        ("25GB/s", 25e9),
        ("8xhdr", 200e9),
        ("100mbit", 12.5e6),
        ("1.6tbit", 200e9),
        ("200Gb/s", 25e9),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)
    assert parse_size("64GiB") == parse_size("64 gb") == 2**36


def test_part_of_a_cluster() -> None:
    cluster = parse_cluster("4x8xA100-80,ib=200gbit")
    shapes = {
        n: (part.num_nodes, part.ranks_per_node) for n in (1, 4, 8, 16, 24, 12) for part in [cluster.with_ranks(n)]
    }
    assert shapes == {1: (1, 1), 4: (1, 4), 8: (1, 8), 16: (2, 8), 24: (3, 8), 12: (2, 6)}
    hosts = dataclasses.replace(parse_cluster("4x2cores,1gbit"))
    assert [(p.num_nodes, p.ranks_per_node) for n in (1, 2, 3, 4, 8) for p in [hosts.with_ranks(n)]] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (4, 2),
    ]  # fmt: skip
    assert cluster.placement(range(6, 10)) == (2, 2)
    assert hosts.rank_memory_bytes is None
