"""What collectives cost: the formulas of the field's algorithms, recorded and published measurements."""

from __future__ import annotations

import dataclasses
import math

import pytest

from guozhuang.cost import collectives
from guozhuang.cost.cluster import GLOO, LOOPBACK, Cluster, LinkSpeed, Transport
from guozhuang.cost.collectives import (
    affine,
    amortised,
    collective_cost,
    gloo_segments,
    interpolated,
    ring_phase,
    server_cost,
)
from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.sharing import partly_hidden
from guozhuang.errors import UsageError

MIB = float(1 << 20)


def on_gloo(num_nodes: int, per_node: int, rate: float = 1e9, latency_s: float = 1e-4, **transport: float) -> Cluster:
    """Ranks whose transport takes no processor time, unless a test says so: what is left is the algorithm."""
    link = LinkSpeed(latency_s, rate)
    return Cluster(num_nodes, per_node, 4, LOOPBACK, link, Transport("gloo", **transport))  # type: ignore[arg-type]


def cost(operation: str, size: float, cluster: Cluster) -> collectives.CollectiveCost:
    return collective_cost(operation, size, range(cluster.num_ranks), cluster)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_of_one_rank_and_one_node(n: int) -> None:
    """The table of the field's algorithms: what the busiest rank sends, and what leaves the busiest node."""
    size = 40e6
    once = (n - 1) / n * size
    hosts, one = on_gloo(n, 1), on_gloo(1, n)
    rows = {
        "all_reduce": 2 * once, "reduce_scatter": 2 * once, "all_gather": once, "all_to_all": once,
        "broadcast": math.ceil(math.log2(n)) * size, "pair": size, "send": size, "barrier": 0.0,
    }  # fmt: skip
    for operation, sent in rows.items():
        assert cost(operation, size, hosts).wire_bytes == pytest.approx(sent), operation
        assert cost(operation, size, hosts).nic_bytes == pytest.approx(sent), operation
        assert cost(operation, size, one).nic_bytes == 0, operation
    twice = dataclasses.replace(hosts, ranks_per_node=4)
    assert cost("all_reduce", size, twice).nic_bytes == pytest.approx(2 * (4 * n - 1) / (4 * n) * size), (
        "a ring enters a node once"
    )
    shm = dataclasses.replace(twice, transport=dataclasses.replace(GLOO, name="shm"))
    assert cost("all_reduce", size, shm).nic_bytes == pytest.approx(2 * (n - 1) / n * size), (
        "lanes send each byte once a node"
    )


def test_seconds_of_the_algorithms() -> None:
    size, rate, alpha = 400e6, 1e9, 1e-4
    cluster = on_gloo(4, 1, rate, alpha)
    assert cost("all_reduce", size, cluster).seconds == pytest.approx(2 * 3 / 4 * size / rate, rel=0.01)
    assert cost("all_gather", size, cluster).seconds == pytest.approx(3 / 4 * size / rate, rel=0.01)
    assert cost("reduce_scatter", size, cluster).seconds == cost("all_reduce", size, cluster).seconds, (
        "gloo keeps a part of it"
    )
    assert cost("broadcast", size, cluster).seconds == pytest.approx(2 * (2 * alpha + size / rate))
    assert cost("barrier", 0, cluster).seconds == pytest.approx(2 * 2 * alpha)
    assert cost("pair", size, cluster).seconds == pytest.approx(alpha + size / rate)
    # Of two ranks that send each other something, one begins when the other one's data have come.
    assert cost("all_to_all", size, cluster).seconds == pytest.approx(2 * alpha + size / rate)
    pair = on_gloo(2, 1, rate, alpha)
    assert cost("all_to_all", size, pair).seconds == pytest.approx(2 * alpha + size / rate)
    assert cost("all_gather", size, pair).seconds == pytest.approx(2 * alpha + 3 / 4 * size / rate)
    beside = dataclasses.replace(cluster.transport, gather_s=((100e6, 0.1), (300e6, 0.2)))
    slower = [
        cost("all_gather", size, dataclasses.replace(cluster, transport=beside)).seconds for size in (5e7, 2e8, 6e8)
    ]
    plain = [cost("all_gather", size, cluster).seconds for size in (5e7, 2e8, 6e8)]
    assert [a - b for a, b in zip(slower, plain, strict=True)] == pytest.approx([0.05, 0.15, 0.4])
    assert cost("hand_over", 0, cluster).seconds == cost("all_reduce", size, on_gloo(1, 1)).seconds == 0
    crowded = dataclasses.replace(cluster, ranks_per_node=4, transport=dataclasses.replace(GLOO, name="shm"))
    slower = dataclasses.replace(crowded, inside=LinkSpeed(1e-5, 1e8))
    assert cost("all_reduce", size, crowded).seconds == pytest.approx(2 * 3 / 4 * size / rate, rel=0.1), (
        "four lanes share the card"
    )
    assert cost("all_reduce", size, slower).seconds == pytest.approx((2 + 0.625) * size / 1e8, rel=0.15)
    with pytest.raises(UsageError, match="all_reduced"):
        cost("all_reduced", 1, cluster)


def test_servers_gossip_and_exchanges_that_are_not_in_every_step() -> None:
    size, rate = 100e6, 1e9
    cluster = on_gloo(8, 1, rate, 0.0)
    assert server_cost(size, 8, 2, cluster).seconds == pytest.approx(8 * size / 2 / rate)
    assert server_cost(size, 8, 16, cluster).seconds == pytest.approx(size / rate)
    assert cost("server", size, cluster).seconds == pytest.approx(8 * size / rate)
    assert server_cost(size, 8, 0, cluster, ranks_serve=True).seconds == pytest.approx(2 * 7 / 8 * size / rate), (
        "a ring's bytes"
    )
    assert server_cost(size, 8, 8, cluster, ranks_serve=True).seconds == pytest.approx(size / rate)
    assert amortised(1.0, 50) == pytest.approx(0.02)
    assert amortised(1.0, 50, hidden_behind_s=2.0) == 0
    assert amortised(0.3, 50, fragments=4, hidden_behind_s=0.2) == pytest.approx(4 / 50 * 0.1)


def test_gloo_over_loopback_as_recorded() -> None:
    """Two recorded sizes give the wake-up and the rate; the formula then meets the other two."""
    assert [gloo_segments(size, 2) for size in (4e3, 1e6, 25e6, 256e6)] == [4, 4, 24, 246]
    recorded = {4e3: 1.45e-3, 1e6: 2.41e-3, 25e6: 25.3e-3, 256e6: 244e-3}
    wake_s = recorded[4e3] / 2
    per_byte = (recorded[25e6] / 2 - wake_s) / (25e6 / 2)
    for size in (1e6, 256e6):
        segments = gloo_segments(size, 2)
        assert 2 * ring_phase(2, segments, wake_s, size / segments * per_byte) == pytest.approx(
            recorded[size], rel=0.02
        )
    default = Cluster(1, 2, 2, LOOPBACK, LOOPBACK, GLOO)
    assert cost("all_reduce", 25e6, default).seconds == pytest.approx(recorded[25e6], rel=0.05)
    assert cost("all_reduce", 256e6, default).seconds == pytest.approx(recorded[256e6], rel=0.05)


def test_processor_time_of_one_megabyte() -> None:
    """0.97 ms of a rank's processor for each megabyte that it sends, as a CPU column of the benchmarks has it."""
    hosts = Cluster(4, 1, 2, LOOPBACK, LinkSpeed(2e-4, 1e9 / 8), GLOO, shares_host=True)
    one = cost("all_reduce", 44.8e6, hosts)
    assert one.processor_s == pytest.approx(one.wire_bytes * 0.97e-9, rel=0.08)
    assert one.seconds == pytest.approx(one.wire_bytes * partly_hidden(8e-9, 0.97e-9), rel=0.01)


@pytest.mark.parametrize(
    ("device", "n", "operation", "microseconds"),
    [  # what torch 2.13's _inductor/comm_analysis.py gives for 4 KiB, 256 KiB, 1 MiB, 25 MiB, 256 MiB
        ("V100-16", 2, "all_reduce", (7.91, 14.52, 23.94, 233.65, 2252.16)),
        ("V100-16", 8, "all_gather", (10.89, 16.68, 34.33, 223.35, 1989.54)),
        ("A100-80", 8, "all_reduce", (15.08, 20.23, 35.92, 247.15, 2013.34)),
        ("H100", 8, "all_reduce", (15.05, 18.25, 28.01, 172.85, 1325.63)),
        ("H100", 2, "reduce_scatter", (7.21, 8.13, 10.92, 47.22, 374.55)),
        ("B200", 8, "all_reduce", (15.03, 16.63, 21.51, 108.56, 708.45)),
    ],
)
def test_nccl_chooses_as_its_tuner(device: str, n: int, operation: str, microseconds: tuple[float, ...]) -> None:
    cluster = parse_cluster(f"{n}x{device}")
    sizes = (4096, 1 << 18, 1 << 20, 25 << 20, 1 << 28)
    assert [cost(operation, size, cluster).seconds * 1e6 for size in sizes] == pytest.approx(microseconds, abs=0.01)


def test_nccl_over_nodes() -> None:
    """Few nodes use a part of their cards; the bus bandwidth of a large message is then that of a node's cards."""
    busbw = {}
    for nodes in (2, 8, 16):
        cluster = parse_cluster(f"{nodes}x8xH100,ib=8x400gbit")
        n = cluster.num_ranks
        busbw[nodes] = 2 * (n - 1) / n * 2**34 / cost("all_reduce", 2**34, cluster).seconds
    assert [busbw[each] / 400e9 for each in (2, 8, 16)] == pytest.approx([0.80, 0.92, 0.92], abs=0.02)
    one_card = parse_cluster("4x8xA100-80,ib=200gbit")
    assert cost("all_reduce", 2**34, one_card).seconds == pytest.approx(
        2 * 31 / 32 * 2**34 / (25e9 * (0.77 + 0.23 * 3 / 7)), rel=0.01
    )
    assert collective_cost("send", 1e9, (0, 8), one_card).seconds == pytest.approx(1e9 / (25e9 * 0.80), rel=0.01)


# Published all-reduce of 32 devices on 4 nodes (ml-engineering, network/benchmarks): bus bandwidth in GB/s.
PUBLISHED = {
    32 << 10: 0.92, 256 << 10: 5.2, 1 << 20: 17, 4 << 20: 40, 8 << 20: 69, 16 << 20: 94, 32 << 20: 98, 64 << 20: 85,
    1 << 30: 94, 16 << 30: 92,
}  # fmt: skip
TABLE = tuple((32.0, float(size), 2 * 31 / 32 * size / (rate * 1e9)) for size, rate in PUBLISHED.items())


def test_a_published_table() -> None:
    plain = parse_cluster("4x8xA100-80,ib=4x200gbit")
    cluster = plain.with_table(TABLE)
    for _, size, seconds in TABLE:
        found = cost("all_reduce", size, cluster)
        assert (found.seconds, found.extrapolated) == (pytest.approx(seconds), 1.0)
    # Each row between two others is predicted from these; the change of protocol at 64 MiB is the worst.
    errors = {}
    for at in range(1, len(TABLE) - 1):
        others = plain.with_table(TABLE[:at] + TABLE[at + 1 :])
        errors[TABLE[at][1]] = cost("all_reduce", TABLE[at][1], others).seconds / TABLE[at][2] - 1
    assert max(map(abs, errors.values())) < 0.35
    assert sum(map(abs, errors.values())) / len(errors) < 0.15


def test_what_lies_outside_of_measurements_is_marked() -> None:
    cluster = parse_cluster("4x8xA100-80,ib=4x200gbit").with_table(TABLE)
    far = {size: cost("all_reduce", size, cluster).extrapolated for size in (16 << 10, 1 << 10, 32 << 30, 64 << 30)}
    assert far == {16 << 10: 2.0, 1 << 10: 32.0, 32 << 30: 2.0, 64 << 30: 4.0}
    larger = parse_cluster("16x8xA100-80,ib=4x200gbit").with_table(TABLE)
    assert cost("all_reduce", 1 << 30, larger).extrapolated == 4.0, "four times as many ranks as were measured"
    assert cost("all_reduce", 1 << 30, cluster).seconds < cost("all_reduce", 2 << 34, cluster).seconds / 30
    measured = LinkSpeed(0.0, 0.0, ((2.0, 1e6, 1e-2),))
    unknown = Cluster(2, 1, 1, LOOPBACK, measured, Transport("gloo"))
    assert cost("all_reduce", 1e7, unknown).seconds == pytest.approx(0.1, rel=0.2), "a table gives the rate too"
    with pytest.raises(UsageError, match="no rate"):
        cost("all_reduce", 1e7, dataclasses.replace(unknown, between=LinkSpeed(0.0, 0.0)))


@pytest.mark.parametrize(("n", "alpha_us", "busbw"), [(2, 46, 193e9), (4, 54, 218e9), (8, 79, 227e9)])
def test_two_sizes_predict_all_others(n: int, alpha_us: float, busbw: float) -> None:
    """Latency and bandwidth of A100s as fitted to 1,024 sizes: measured at 4 and 256 MiB alone, 1 MiB to 1 GiB follow."""

    def seconds(size: float) -> float:
        return alpha_us * 1e-6 + 2 * (n - 1) / n * size / busbw

    assert affine([(4 * MIB, seconds(4 * MIB)), (256 * MIB, seconds(256 * MIB))]) == pytest.approx(
        (alpha_us * 1e-6, 2 * (n - 1) / n / busbw)
    )
    cluster = parse_cluster(f"{n}x A100-80").with_table([(n, size, seconds(size)) for size in (4 * MIB, 256 * MIB)])
    errors = [
        cost("all_reduce", MIB * size, cluster).seconds / seconds(MIB * size) - 1
        for size in (1, 2, 5, 30, 100, 300, 1024)
    ]
    assert max(map(abs, errors)) < 0.001


def test_other_numbers_of_ranks_follow_from_a_measured_one() -> None:
    """Two ranks are measured at eight sizes; the ring's steps give four, of segments as long."""
    true = {"rate": 3e8, "latency_s": 3e-4}
    plain = on_gloo(4, 1, **true)
    table = [(2.0, s, cost("all_reduce", s, on_gloo(2, 1, **true)).seconds) for s in (4096 * 4.0**k for k in range(8))]
    wrong = dataclasses.replace(plain, between=LinkSpeed(1e-4, 5e8)).with_table(table)
    for size in (1e4, 3e5, 1e6, 8e6, 25e6):
        assert cost("all_reduce", size, wrong).seconds == pytest.approx(
            cost("all_reduce", size, plain).seconds, rel=0.12
        ), size


def test_interpolation() -> None:
    points = [(1e3, 1e-3), (4e3, 4e-3), (4e6, 1.0)]
    assert interpolated(points, 2e3) == pytest.approx(2e-3)
    assert interpolated(points, 2e6) == pytest.approx(4e-3 + (2e6 - 4e3) * 0.996 / (4e6 - 4e3))
    assert interpolated(points, 4e9) == pytest.approx(1e3, rel=0.01)
    assert interpolated(points[:1], 1.0) == 1e-3
    assert affine([(1.0, 1.0), (2.0, 4.0)]) == (0.0, 2.0), "no negative latency"
    assert affine([(1.0, 1.0), (2.0, 0.5)]) == (0.5, 0.0), "no negative rate"
