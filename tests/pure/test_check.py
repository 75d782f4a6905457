"""The rules, the schedule and the table of ``guozhuang check``, on made-up hosts."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.check import facts as real_facts
from guozhuang.check import measure
from guozhuang.check.facts import with_threads
from guozhuang.check.results import (
    OTHER_VERSION,
    Absence,
    CheckResults,
    ClockOffset,
    Facts,
    MeasuredLink,
    MeasuredReduction,
    Network,
    NetworkInterface,
    Resources,
    exit_code,
    from_json,
    to_json,
)
from guozhuang.check.verdict import differing, headline, judge
from guozhuang.check.worker import print_result, printed_result
from guozhuang.errors import UsageError
from guozhuang.units import card_speed, listed, ranks_text, short_time, speed
from tests.drawing import examples
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S

GIB = 1 << 30
LO = NetworkInterface("lo", ("127.0.0.1", "::1"), True, 65536, None, False)
DOCKER = NetworkInterface("docker0", ("172.17.0.1",), True, 1500, None, False)
VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "guozhuang": "0.1.0", "numpy": "2.4.6", "guozhuang source": "abc"}


def facts(rank: int, host: int, *, network: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """A rank on a healthy host; ``changes`` are of Facts or of Resources."""
    address = f"10.0.0.{10 + host}"
    interfaces = (LO, NetworkInterface("eth0", (address,), True, 1500, 10_000, True))
    net = Network("10.0.0.10", ("10.0.0.10",), "", (address,), "", None, "eth0", "eth0", address, interfaces)
    here = Resources(tuple(range(8)), None, 4, 64 * GIB, 60 * GIB, 0, 32 * GIB, 32 * GIB, None, 1 << 16, ())
    of_resources = {name: changes.pop(name) for name in list(changes) if hasattr(here, name)}
    made = Facts(
        rank, f"h{host}", f"node{host}", 1000 + rank, "torchrun", "cpu", "a CPU", 0, "Linux", dict(VERSIONS), True, True,
        replace(net, **(network or {})), replace(here, **of_resources),
    )  # fmt: skip
    return replace(made, **changes)


def link(a: int, b: int, mb_per_s: float = 1100.0, latency_s: float = 5e-5, back: float | None = None) -> MeasuredLink:
    return MeasuredLink(a, b, True, latency_s, 100, mb_per_s * 1e6, 5, (back or mb_per_s) * 1e6, 5)


def cluster(num_hosts: int, per_host: int = 1, **more: Any) -> CheckResults:
    """Healthy hosts, every pair of ranks measured."""
    told = tuple(facts(host * per_host + i, host) for host in range(num_hosts) for i in range(per_host))
    pairs = itertools.combinations(told, 2)
    measured = tuple(replace(link(x.rank, y.rank), between_nodes=x.node != y.node) for x, y in pairs)
    clocks = tuple(ClockOffset(host * per_host, 1e-5, 5e-5, 16) for host in range(1, num_hosts))
    reductions = (
        MeasuredReduction("gloo", True, "cpu", 4096, 1e-4, 50),
        MeasuredReduction("gloo", True, "cpu", 25 << 20, 0.05, 8),
    )
    given = {"facts": told, "links": measured, "clocks": clocks, "reductions": reductions} | more
    return CheckResults(num_hosts * per_host, "torchrun", duration_s=2.5, **given)


def with_links(results: CheckResults, *changed: MeasuredLink) -> CheckResults:
    pairs = {(each.a, each.b): each for each in changed}
    return replace(results, links=tuple(pairs.get((each.a, each.b), each) for each in results.links))


def with_facts(results: CheckResults, *changed: Facts) -> CheckResults:
    by_rank = {each.rank: each for each in changed}
    return replace(results, facts=tuple(by_rank.get(each.rank, each) for each in results.facts))


def kinds(results: CheckResults) -> list[tuple[str, str]]:
    return [(each.level, each.kind) for each in judge(results)]


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)], ids=str)
def test_nothing_is_found_on_healthy_hosts(shape: tuple[int, int]) -> None:
    results = cluster(*shape)
    assert judge(results) == ()
    assert headline((), results).startswith("Nothing found")
    assert exit_code(()) == 0


def test_a_slow_host_is_named_once_and_not_its_links() -> None:
    results = with_links(cluster(3), link(0, 2, 12), link(1, 2, 12))
    (found,) = judge(results)
    assert (found.level, found.kind, found.ranks) == ("warn", "slow-link", (2,))
    assert found.text == (
        "The link of h2 is slow: it reaches no other node with more than 12.0 MB/s; the median of the nodes is 1.10 GB/s."
    )
    assert exit_code([found]) == 0


def test_one_slow_pair_is_named_with_its_direction() -> None:
    results = with_links(cluster(4), link(1, 3, 1000, back=90))
    (found,) = judge(results)
    assert found.ranks == (1, 3)
    assert "between ranks 1 and 3 (h1 and h3) carries 90.0 MB/s from rank 3 to 1 (and 1.00 GB/s back)" in found.text
    assert "the median between nodes is 1.10 GB/s" in found.text


def test_of_many_slow_pairs_the_worst_are_told() -> None:
    results = cluster(6)
    slow = [link(a, a + 1, 100 + a) for a in range(5)]
    texts = [each.text for each in judge(with_links(results, *slow))]
    assert len(texts) == 4
    assert "ranks 0 and 1" in texts[0]
    assert texts[3] == "2 more links between nodes are as slow."


def test_slow_everywhere_is_told_by_the_floor() -> None:
    results = with_links(cluster(2), link(0, 1, 11.8))
    interfaces = tuple(replace(each, is_card=False) for each in results.facts[0].network.interfaces)
    results = with_facts(results, *(facts(r, r, network={"interfaces": interfaces}) for r in range(2)))
    (found,) = judge(results)
    expected = "The link between nodes carries less than 62.5 MB/s; the slowest, ranks 0 and 1 (h0 and h1), 11.8 MB/s."
    assert found.text == expected


def test_a_card_that_promises_more() -> None:
    (found,) = judge(with_links(cluster(2), link(0, 1, 110)))
    assert found.kind == "below-card"
    assert "The link between nodes (h0 and h1) carries 110 MB/s, but the cards say 10 Gbit/s (1.25 GB/s)" in found.text


def test_slow_inside_a_node_needs_more_to_be_told() -> None:
    results = with_facts(cluster(1, 3), *(facts(rank, 0, num_threads=1) for rank in range(3)))
    assert judge(with_links(results, replace(link(0, 1, 500), between_nodes=False))) == ()
    (found,) = judge(with_links(results, replace(link(0, 1, 200), between_nodes=False)))
    assert "the median inside nodes is" in found.text


def test_latencies() -> None:
    (found,) = judge(with_links(cluster(3), link(0, 2, latency_s=2e-3)))
    assert found.kind == "high-latency"
    assert "between ranks 0 and 2 (h0 and h2) takes 2.00 ms; the median is 50 µs" in found.text
    far = with_links(cluster(2), link(0, 1, latency_s=0.03))
    assert [each.kind for each in judge(far)] == ["high-latency"]


def test_a_link_that_stalls_is_told_apart_from_one_that_is_shut() -> None:
    reason = f"{measure.CONNECTED}a message of 64.0 KiB did not get through in time"
    (found,) = judge(with_links(cluster(2), MeasuredLink(0, 1, True, failure=reason)))
    assert (found.level, found.kind) == ("fail", "broken-link")
    assert found.text == f"Ranks 0 and 1 on h0 and h1 cannot work together: {reason}."
    assert "MTU" in found.fix


def test_a_rank_whose_facts_cannot_be_understood_is_of_another_version() -> None:
    absence = Absence(1, "h1", OTHER_VERSION, "the ranks met", "what it tells of itself has another form than here")
    (found,) = judge(replace(cluster(1), num_ranks=2, absences=(absence,)))
    assert (found.level, found.kind, found.ranks) == ("fail", "differing-versions", (1,))
    assert found.text.startswith("Rank 1 on h1 runs another version of guozhuang: ")


def test_a_broken_link_breaks_training() -> None:
    results = with_links(
        cluster(2, 2),
        *(MeasuredLink(a, b, True, failure="10.0.0.11 port 5: timed out") for a in (0, 1) for b in (2, 3)),
    )
    (found,) = judge(results)
    assert (found.level, found.kind) == ("fail", "broken-link")
    assert (
        "Ranks 0 and 2 on h0 and h1 cannot connect (and 3 more pairs of ranks): 10.0.0.11 port 5: timed out."
        in found.text
    )
    assert exit_code([found]) == 1


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"in_use": "lo", "address": "127.0.0.1", "requested": "lo"}, "fail", "loopback interface lo is in use on h1"),
        ({"in_use": "ib0", "requested": "ib0"}, "fail", "'ib0' is asked for on h1, where there are only lo and eth0"),
        ({"routed": "ib0"}, "warn", "interface eth0 is in use on h1, but ib0 leads to rank 0"),
        ({"in_use": "docker0", "routed": "docker0", "interfaces": (LO, DOCKER)}, "fail", "docker0 is in use on h1: a bridge"),
        ({"interfaces": (LO, NetworkInterface("eth0", ("10.0.0.11",), False, 1500, None, True))}, "fail", "eth0 is down on h1"),
    ],
    ids=["loopback", "absent", "other-route", "bridge", "down"],
)  # fmt: skip
def test_wrong_interfaces(change: dict[str, Any], level: str, words: str) -> None:
    results = with_facts(cluster(2), facts(1, 1, network=change))
    (found,) = judge(results)
    assert found.level == level
    assert words in found.text
    assert found.ranks == (1,)


@pytest.mark.parametrize(
    ("asked", "level", "words"),
    [
        ("eth0", "", ""), ("eth", "", ""), ("=eth0", "", ""), ("^docker,lo", "", ""), ("ib,eth", "", ""),
        ("lo", "fail", "NCCL_SOCKET_IFNAME=lo lets NCCL use lo on h1, which no other host reaches"),
        ("docker0", "fail", "lets NCCL use docker0 on h1, which no other host reaches"),
        ("ib", "fail", "NCCL_SOCKET_IFNAME=ib fits no interface of h1, where there are lo, eth0, eth1 and docker0"),
        ("=eth", "fail", "fits no interface"),
        ("eth1", "warn", "lets NCCL use eth1 on h1, but eth0 leads to rank 0"),
        ("^eth0,lo,docker", "warn", "lets NCCL use eth1 on h1"),
    ],
)  # fmt: skip
def test_interfaces_that_nccl_is_told_to_use(asked: str, level: str, words: str) -> None:
    there = (LO, *(NetworkInterface(f"eth{i}", (f"10.0.{i}.11",), True, 1500, None, True) for i in (0, 1)), DOCKER)
    change = {"nccl_requested": asked, "interfaces": there}
    gpu = {"device": "cuda:0", "device_name": "A", "num_devices": 1}
    results = with_facts(cluster(2), facts(0, 0, **gpu), facts(1, 1, network=change, **gpu))
    told = [(each.level, each.kind) for each in judge(results)]
    assert told == ([(level, "wrong-interface")] if level else [])
    assert all(words in each.text and each.ranks == (1,) for each in judge(results))
    no_gpu = with_facts(cluster(2), facts(1, 1, network=change))
    assert judge(no_gpu) == (), "nobody uses NCCL there"


def test_interfaces_do_not_matter_on_one_node() -> None:
    loopback = {"in_use": "lo", "routed": "lo", "address": "127.0.0.1", "name_error": "no such name"}
    results = with_facts(cluster(1, 2), *(facts(rank, 0, network=loopback) for rank in range(2)))
    assert judge(results) == ()


def test_names_that_lead_nowhere() -> None:
    nowhere = {"name_error": "Name or service not known", "name_addresses": ()}
    (found,) = judge(with_facts(cluster(2), *(facts(r, r, network=nowhere) for r in (0, 1))))
    assert (found.level, found.kind) == ("warn", "unresolvable-name")
    assert found.text.startswith("The host names h0 and h1 do not resolve there (Name or service not known)")
    looped = with_facts(cluster(2), facts(1, 1, network={"name_addresses": ("127.0.1.1",)}))
    assert "The name of h1 leads to 127.0.1.1 there" in judge(looped)[0].text


def test_mtu() -> None:
    jumbo = (LO, NetworkInterface("eth0", ("10.0.0.11",), True, 9000, 10_000, True))
    (found,) = judge(with_facts(cluster(2), facts(1, 1, network={"interfaces": jumbo})))
    assert "1500 on h0; 9000 on h1" in found.text


@pytest.mark.parametrize(
    ("name", "level"),
    [("torch", "fail"), ("guozhuang", "fail"), ("Python", "warn"), ("numpy", "warn"), ("CUDA", "fail")],
)
def test_differing_versions(name: str, level: str) -> None:
    results = with_facts(cluster(3), facts(2, 2, versions=VERSIONS | {name: "9.9"}))
    (found,) = judge(results)
    assert (found.level, found.kind) == (level, "differing-versions")
    usual = VERSIONS.get(name, "absent")
    assert f"{name} differs between ranks ({usual} on h0 and h1; 9.9 on h2)" in found.text


def test_a_stale_checkout_is_told_by_its_digest() -> None:
    results = with_facts(cluster(2), facts(1, 1, versions=VERSIONS | {"guozhuang source": "xyz"}))
    (found,) = judge(results)
    assert found.level == "warn"
    assert found.text == "The source files of guozhuang differ between ranks (digest abc on h0; xyz on h1)."
    both = with_facts(cluster(2), facts(1, 1, versions=VERSIONS | {"guozhuang source": "xyz", "guozhuang": "0.2"}))
    assert len(judge(both)) == 1


def test_versions_that_differ_inside_a_node_are_told_by_rank() -> None:
    results = with_facts(cluster(1, 3), facts(1, 0, versions=VERSIONS | {"torch": "2.12"}))
    assert differing(results) == {"torch": {"2.13.0": "ranks 0, 2", "2.12": "rank 1"}}


@pytest.mark.parametrize(
    ("change", "level", "kind", "words"),
    [
        ({"shm_bytes": 64 << 20}, "warn", "small-shm", "holds 64.0 MiB on h0 and h1"),
        ({"shm_bytes": 512 << 20}, "note", "small-shm", "holds 512 MiB"),
        ({"shm_free_bytes": 1 << 20}, "warn", "small-shm", "is full on h0 and h1"),
        (
            {"memlock_bytes": 64 << 10, "rdma_devices": ("mlx5_0",)},
            "warn",
            "small-memlock",
            "too little for RDMA (mlx5_0)",
        ),
        ({"memlock_bytes": 64 << 10, "num_devices": 8}, "note", "small-memlock", "too little for pinned memory"),
        ({"available_bytes": GIB // 2}, "warn", "low-memory", "512 MiB of 64.0 GiB"),
        ({"swap_used_bytes": 3 * GIB}, "warn", "swap", "3.00 GiB are swapped out"),
        ({"num_open_files": 256}, "warn", "few-open-files", "256 files"),
        ({"cores": (0,)}, "warn", "too-many-ranks", "2 ranks share 1 core on h0 and h1"),
        ({"num_threads": 8}, "warn", "too-many-threads", "8 threads = 16 threads share 8 cores"),
        ({"quota_cores": 1.5, "num_threads": 1}, "warn", "too-many-ranks", "2 ranks share 1.5 cores"),
        ({"c_engine": False}, "warn", "no-c-engine", "C extension"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_resources(change: dict[str, Any], level: str, kind: str, words: str) -> None:
    results = with_facts(cluster(2, 2), *(facts(rank, rank // 2, **change) for rank in range(4)))
    found = [each for each in judge(results) if each.kind == kind]
    assert len(found) == 1, "nodes with the same problem share a finding"
    assert found[0].level == level
    assert words in found[0].text
    assert found[0].ranks == (0, 1, 2, 3)


def test_memlock_matters_only_to_those_who_lock() -> None:
    assert judge(with_facts(cluster(2), *(facts(r, r, memlock_bytes=64 << 10) for r in range(2)))) == ()


def test_ranks_that_are_bound_to_cores_of_their_own_do_not_share_them() -> None:
    results = with_facts(cluster(1, 2), *(facts(r, 0, cores=(r,), num_threads=1) for r in range(2)))
    assert judge(results) == ()


def test_threads_that_nobody_chose_are_those_that_init_will_choose() -> None:
    """Without a choice each of two ranks on 8 cores would begin with 8 threads; a user's number, and a GPU's rank, keep it."""
    told = [facts(rank, 0, num_threads=8, threads_by=by) for rank, by in enumerate(("", "OMP_NUM_THREADS"))]
    gpu = facts(2, 1, device="cuda:0", num_threads=8, threads_by="")
    assert [each.resources.num_threads for each in with_threads([*told, gpu])] == [4, 8, 8]


def test_devices() -> None:
    gpu = {"device": "cuda:0", "device_name": "A", "num_devices": 1}
    mixed = with_facts(cluster(2), facts(0, 0, **gpu))
    assert [each.text for each in judge(mixed)] == ["Rank 1 sees no CUDA device, the others do."]
    absent = with_facts(cluster(1, 2), facts(0, 0, **gpu), facts(1, 0, device="cuda:1 (not there)", num_devices=1))
    assert ("fail", "missing-device") in kinds(absent)
    other = with_facts(cluster(2), facts(0, 0, **gpu), facts(1, 1, **(gpu | {"device_name": "B"})))
    assert kinds(other) == [("note", "differing-devices")]


def test_clocks() -> None:
    def found(offset_s: float, uncertainty_s: float) -> list[str]:
        return [each.text for each in judge(cluster(2, clocks=(ClockOffset(1, offset_s, uncertainty_s, 16),)))]

    assert found(3.2, 1e-4) == ["The clock of h1 is 3.20 s ahead of rank 0's."]
    assert found(-90.0, 1e-4) == ["The clock of h1 is 1 min 30 s behind rank 0's."]
    assert found(0.6, 0.2) == [], "it may be right"


def test_who_is_missing() -> None:
    absences = tuple(Absence(rank, "", "did not come", "the ranks met", "within 20 s") for rank in (2, 3))
    results = replace(cluster(2), num_ranks=4, absences=absences)
    (found,) = judge(results)
    assert (found.kind, found.ranks) == ("missing-rank", (2, 3))
    assert found.text == "Ranks 2-3 did not come within 20 s (2 of 4 came)."
    looped = {"meeting_host": "h0", "meeting_addresses": ("127.0.1.1",)}
    alone = replace(with_facts(cluster(1), facts(0, 0, network=looped)), num_ranks=2, absences=absences[:1])
    assert ("note", "wrong-address") in kinds(alone)


def test_the_first_to_stop_is_told_and_not_whom_the_launcher_ended() -> None:
    stopped = Absence(1, "h1", "stopped", "links were measured")
    ended = Absence(0, "h0", "was ended", "links were measured", "it got SIGTERM")
    (found,) = judge(replace(cluster(2), absences=(stopped, ended)))
    assert found.text == "Rank 1 on h1 (process 1001) stopped while links were measured."
    (found,) = judge(replace(cluster(2), absences=(ended,)))
    assert found.text == "Rank 0 on h0 (process 1000) was ended while links were measured: it got SIGTERM."


def test_ranks_that_are_lost_together_are_told_together() -> None:
    lost = tuple(Absence(rank, "h1", "does not answer", "links were measured") for rank in (2, 3))
    (found,) = judge(replace(cluster(2, 2), absences=lost))
    assert found.text == "Ranks 2-3 on h1 do not answer while links were measured."
    assert found.ranks == (2, 3)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("user@h9: Permission denied (publickey).", "missing-ssh-key"),
        ("ssh: Could not resolve hostname h9: Name or service not known", "unresolvable-name"),
        ("Host key verification failed.", "unknown-host-key"),
        ("ssh: connect to host h9 port 22: Connection refused", "unreachable-host"),
        ("ssh: connect to host h9 port 22: Connection timed out", "unreachable-host"),
        ("something new", "unreachable-host"),
    ],
)
def test_hosts_that_let_nobody_in(reason: str, kind: str) -> None:
    (found,) = judge(replace(cluster(1), absences=(Absence(None, "h9", "cannot be reached", "ssh was tried", reason),)))
    assert (found.level, found.kind) == ("fail", kind)
    assert found.text.startswith("h9 ")
    assert reason.rstrip(".") in found.text


def test_a_failed_all_reduce_is_told_only_where_nobody_is_missing() -> None:
    failed = (MeasuredReduction("gloo", True, "cpu", 0, failure="rank 1: timed out"),)
    assert [each.text for each in judge(cluster(2, reductions=failed))] == [
        "all_reduce over gloo failed: rank 1: timed out."
    ]
    lost = (Absence(1, "h1", "stopped", "all_reduce was measured"),)
    assert [each.kind for each in judge(cluster(2, reductions=failed, absences=lost))] == ["lost-rank"]


def test_the_worst_comes_first() -> None:
    results = with_links(cluster(3), link(0, 2, 12), link(1, 2, 12))
    results = with_facts(results, facts(1, 1, versions=VERSIONS | {"torch": "2.12"}, shm_bytes=512 << 20))
    assert [each.level for each in judge(results)] == ["fail", "warn", "note"]
    assert headline(judge(results), results) == "1 problem that breaks training, and 1 that costs speed or may."


def test_json_comes_back_and_is_json() -> None:
    results = with_links(cluster(2, 2), MeasuredLink(0, 1, False, failure="gone"))
    results = replace(results, absences=(Absence(3, "h1", "stopped", "x"),), duration_s=float("nan"))
    document = json.loads(to_json(results, judge(results)))
    assert document["schema_version"] == 1
    assert document["exit_code"] == 1
    assert document["duration_s"] is None
    again = from_json(to_json(replace(results, duration_s=1.0), ()))
    assert again == replace(results, duration_s=1.0)
    with pytest.raises(UsageError):
        from_json("{}")
    with pytest.raises(UsageError):
        from_json(json.dumps({"schema_version": 99}))


def test_a_result_survives_a_launcher_that_marks_lines(capsys: pytest.CaptureFixture[str]) -> None:
    results = cluster(16)
    print_result(results)
    printed = capsys.readouterr().out
    assert printed.count("\n") > 2
    marked = "".join(f"\x1b[36m[0]\x1b[0m {line}\x1b[0m\r\n[1] something else\n" for line in printed.splitlines())
    assert from_json(printed_result(marked) or "") == results
    assert printed_result("nothing") is None
    assert printed_result(printed.partition("\n")[2]) is None, "not whole"


def shown(results: CheckResults, width: int = 80) -> str:
    from rich.console import Console

    from guozhuang.check import table

    out = io.StringIO()
    table.show(Console(file=out, width=width, highlight=False), results, judge(results))
    return out.getvalue()


def test_the_table_fits_80_columns_and_shows_everything() -> None:
    results = with_links(cluster(3), link(0, 2, 12), MeasuredLink(1, 2, True, failure="10.0.0.12 port 9: timed out"))
    results = with_facts(results, facts(1, 1, versions=VERSIONS | {"torch": "2.12"}))
    text = shown(replace(results, notes=("one pair per pair of nodes was measured",)))
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "3 ranks on 3 nodes", "h1", "eth0", "10.0.0.12", "1500", "10 Gbit/s", "torch 2.13.0 on h0 and h2", "torch 2.12 on h1",
        "Python 3.11.7", "failed", "12.0 MB/s", "gloo (default here)", "50.0 ms", "+0.01 ± 0.05 ms", "Note: one pair per pair",
        "breaks training: ", "look at this: ",
    ):  # fmt: skip
        assert words in text, words


def test_the_table_of_what_is_known_when_little_is() -> None:
    closed = (Absence(None, "h9", "cannot be reached", "ssh was tried", "Permission denied (publickey)"),)
    text = shown(CheckResults(4, "guozhuang run", absences=closed))
    assert text.startswith("0 of 4 ranks came, launcher guozhuang run\n\n")
    assert "h9 accepts no key of ours" in text
    assert "Nothing found on this node." in shown(cluster(1))


def test_of_many_links_the_slowest_are_shown() -> None:
    text = shown(with_links(cluster(8), link(2, 5, 12)))
    assert "the slowest of 28" in text
    assert text.index("2 \N{EN DASH} 5") < text.index("median")
    assert len(text.splitlines()) < 70


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(2, 60))
@examples(150)
def test_no_node_is_in_two_pairs_at_a_time(nodes: list[int], max_rounds: int) -> None:
    node_of = {rank: f"node{node}" for rank, node in enumerate(nodes)}
    plan = measure.schedule(node_of, max_rounds)
    assert len(plan.rounds) <= max_rounds
    pairs = [pair for each in plan.rounds for pair in each]
    assert len(set(pairs)) == len(pairs)
    assert all(a < b for a, b in pairs)
    for each in plan.rounds:
        busy = [node for a, b in each for node in {node_of[a], node_of[b]}]
        assert len(set(busy)) == len(busy)
    if not plan.note:
        assert sorted(pairs) == list(itertools.combinations(range(len(nodes)), 2))


def test_many_ranks_are_measured_by_node_and_many_nodes_in_part() -> None:
    plan = measure.schedule({rank: f"node{rank // 8}" for rank in range(64)})
    assert plan.note == "one pair per pair of nodes was measured (64 ranks have 2016 pairs)"
    between = [(a, b) for each in plan.rounds for a, b in each if a // 8 != b // 8]
    assert len(between) == 8 * 7 // 2
    assert sum(1 for each in plan.rounds for a, b in each if a // 8 == b // 8) == 8
    large = measure.schedule({rank: f"node{rank // 8}" for rank in range(8 * 300)})
    assert len(large.rounds) <= measure.MAX_ROUNDS
    assert "each node with 29 others" in large.note
    partners = [sum(node * 8 in pair for each in large.rounds for pair in each) for node in range(300)]
    assert set(partners) == {29 + 1}  # and one pair inside


def _both(first: Callable[[measure.Pair], Any], second: Callable[[measure.Pair], Any]) -> list[Any]:
    """Both ends of a pair, each in a thread; return what they return or raise."""
    store = dist.HashStore()

    def end(is_first: bool) -> Any:
        try:
            pair = measure.Pair(store, "pair", is_first, "127.0.0.1", LIMIT_S)
            return (first if is_first else second)(pair)
        except measure.PairError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(end, (True, False)))


def test_a_pair_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 1 ms whenever it is read: each message takes 1 ms."""
    num_readings = itertools.count()
    monkeypatch.setattr(
        measure,
        "time",
        SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: next(num_readings) / 1024),
    )
    monkeypatch.setattr(measure, "_MOST_BYTES", 1 << 18)
    found, nothing = _both(measure.lead, measure.follow)
    assert nothing == {}
    assert found["latency_s"] == 0.5 / 1024
    assert found["forward_bytes_per_s"] == found["backward_bytes_per_s"] == (1 << 18) / (0.5 / 1024)


def test_a_trickle_does_not_outlast_the_limit_of_a_pair() -> None:
    """Messages that arrive again and again: no single wait is long, all of them together are."""

    is_over = threading.Event()

    def trickle(pair: measure.Pair) -> None:
        while not is_over.is_set():
            pair.send(torch.zeros(8, dtype=torch.uint8))
            time.sleep(0.01)
        pair.limit(EXPIRES_S)
        while True:  # the sender has a limit too
            pair.send(torch.zeros(8, dtype=torch.uint8))

    def receive(pair: measure.Pair) -> tuple[bool, str]:
        pair.receive(torch.zeros(8, dtype=torch.uint8))
        pair.limit(EXPIRES_S)
        with pytest.raises(measure.PairError) as caught:
            while True:
                pair.receive(torch.zeros(8, dtype=torch.uint8))
        is_over.set()
        return caught.value.has_ended, str(caught.value)

    (has_ended, text), other = _both(receive, trickle)
    assert not has_ended
    assert text == "connected, but a message of 8 B did not get through in time"
    assert isinstance(other, measure.PairError)


def test_an_end_that_has_gone_is_told_apart_from_one_that_is_silent() -> None:
    release = threading.Event()

    def leave(pair: measure.Pair) -> None:
        pair._group.shutdown()

    gone, _ = _both(lambda pair: pair.has_ended(NEVER_S), leave)
    assert gone is True
    silent, _ = _both(lambda pair: (pair.has_ended(EXPIRES_S), release.set())[0], lambda pair: release.wait(LIMIT_S))
    assert silent is False


def test_a_rank_that_does_not_come_is_given_up_in_time() -> None:
    with pytest.raises(measure.PairError, match=rf"no connection at 127\.0\.0\.1 within {EXPIRES_S} s"):
        measure.Pair(dist.HashStore(), "pair", True, "127.0.0.1", EXPIRES_S)


def test_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 3, 4, 9]) == "ranks 3-5, 9"
    assert listed("abcdefgh") == "a, b, c, d, e, f and 2 more"
    assert listed(["a", "b", "a"]) == "a and b"
    assert (speed(11.84e6), speed(1.2e9), speed(None)) == ("11.8 MB/s", "1.20 GB/s", "–")  # noqa: RUF001
    assert (card_speed(1000), card_speed(100_000), card_speed(100)) == ("1 Gbit/s", "100 Gbit/s", "100 Mbit/s")
    assert (short_time(1.54e-5), short_time(0.0131)) == ("15.4 µs", "13.1 ms")


def test_the_facts_of_this_machine() -> None:
    here = real_facts.network("localhost")
    assert here.routed in ("lo", "lo0")
    assert not here.meeting_error
    nowhere = real_facts.network("no-such-host.invalid")
    assert nowhere.meeting_error
    assert nowhere.routed is None
    own = real_facts.resources()
    assert own.cores
    assert own.memory_bytes and own.available_bytes and own.available_bytes <= own.memory_bytes
    assert set(real_facts.versions()) >= {"Python", "torch", "guozhuang source"}
