"""Rules for links: broken ones, ones slower than others, and ones below absolute limits. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from guozhuang.check.measure import CONNECTED
from guozhuang.check.results import CheckResults, Finding, MeasuredLink
from guozhuang.units import card_speed, listed, short_time, speed

#: A link is slow below this share of the median of comparable links.
SLOW_SHARE = 0.5
#: Links between nodes below this bandwidth (500 Mbit/s) slow down training with gradients of any size.
MIN_BETWEEN_BYTES_PER_S = 62.5e6
#: Links inside a node below this bandwidth mean that something slows down the whole machine.
MIN_INSIDE_BYTES_PER_S = 100e6
#: A link is slow below this share of the speed that its card reports.
CARD_SHARE = 0.3
MAX_CARD_MBIT_PER_S = 10_000
HIGH_LATENCY_S = 2e-3
LATENCY_TIMES, LATENCY_OVER_S = 4.0, 300e-6

_FIX = "test that cable, switch port and card (`ethtool`), what else uses it, and the route"


def broken(results: CheckResults) -> Iterator[Finding]:
    """Find pairs that could not be measured although both ranks were present; one finding per pair of nodes."""
    lost = {each.rank for each in results.absences}
    wrong = [each for each in results.links if each.failure and not {each.a, each.b} & lost]
    by_nodes: dict[tuple[str, str], list[MeasuredLink]] = {}
    for link in wrong:
        by_nodes.setdefault((results.host_of(link.a), results.host_of(link.b)), []).append(link)
    for (a, b), links in by_nodes.items():
        first = links[0]
        pairs = "" if len(links) == 1 else f" (and {len(links) - 1} more pairs of ranks)"
        where = f"on {a} and {b}" if first.between_nodes else f"on {a}"
        stalled = first.failure.startswith(CONNECTED)  # small packets pass, but large messages do not
        cannot = "cannot work together" if stalled else "cannot connect"
        text = f"Ranks {first.a} and {first.b} {where} {cannot}{pairs}: {first.failure}."
        fix = "open TCP ports between the hosts (ranks use any port from 1024 on), and check interface and address"
        if stalled:
            fix = "test the link, and the MTU on the way (`ping -M do -s 1472`): too large packets are lost without a word"
        yield Finding("fail", "broken-link", text, fix, (first.a, first.b))


def reductions(results: CheckResults) -> Iterator[Finding]:
    """Find an all_reduce that failed although no rank is missing."""
    if any(each.rank is not None for each in results.absences):
        return
    for each in results.reductions:
        if each.failure:
            backend = f" over {each.backend}" if each.backend else ""
            yield Finding("fail", "no-all-reduce", f"all_reduce{backend} failed: {each.failure.rstrip('.')}.")


def slow_nodes_and_links(results: CheckResults) -> Iterator[Finding]:
    """Find nodes and links that are slow compared with the median of their kind."""
    best, slow_nodes = _nodes_by_best_link(results)
    median = statistics.median(best.values()) if best else 0.0
    for node in sorted(slow_nodes, key=lambda each: best[each]):
        ranks = results.nodes[node]
        text = (
            f"The link of {ranks[0].host} is slow: it reaches no other node with more than {speed(best[node])}; "
            f"the median of the nodes is {speed(median)}."
        )
        yield Finding("warn", "slow-link", text, _FIX, tuple(each.rank for each in ranks))
    yield from _slow_pairs(results, _between(results, slow_nodes), "between nodes")
    yield from _slow_pairs(results, _inside(results), "inside nodes")


def _nodes_by_best_link(results: CheckResults) -> tuple[dict[str, float], set[str]]:
    """Return the bandwidth of each node's best link, and the nodes that are slow compared with the others.

    With three nodes, one of them slow, two of three links are slow, and their median is useless. So nodes are compared
    before links, by the best link of each.
    """
    node_of = {each.rank: each.node for each in results.facts}
    best: dict[str, float] = {}
    for link in _between(results, set()):
        for node in (node_of[link.a], node_of[link.b]):
            best[node] = max(best.get(node, 0.0), link.slower_bytes_per_s or 0.0)
    if len(best) < 3:
        return best, set()
    median = statistics.median(best.values())
    return best, {node for node, value in best.items() if value < SLOW_SHARE * median}


def _between(results: CheckResults, nodes: set[str]) -> list[MeasuredLink]:
    """Return the measured links between nodes, without links of ``nodes``."""
    node_of = {each.rank: each.node for each in results.facts}
    known = [each for each in results.links if each.between_nodes and each.slower_bytes_per_s]
    return [each for each in known if not {node_of[each.a], node_of[each.b]} & nodes]


def _inside(results: CheckResults) -> list[MeasuredLink]:
    return [each for each in results.links if not each.between_nodes and each.slower_bytes_per_s]


def _slow_pairs(results: CheckResults, links: list[MeasuredLink], kind: str) -> Iterator[Finding]:
    if len(links) < 3:
        return
    median = statistics.median(each.slower_bytes_per_s or 0.0 for each in links)
    share = SLOW_SHARE if kind == "between nodes" else SLOW_SHARE / 2  # caches cause differences inside a node
    slow = [each for each in links if (each.slower_bytes_per_s or 0.0) < share * median]
    for link in sorted(slow, key=lambda each: each.slower_bytes_per_s or 0.0)[:3]:
        text = (
            f"The link between ranks {link.a} and {link.b} ({_hosts(results, link)}) carries {speed(link.slower_bytes_per_s)}"
            f"{_direction(link)}; the median {kind} is {speed(median)}."
        )
        yield Finding(
            "warn", "slow-link", text, _FIX if link.between_nodes else "see what else runs there", (link.a, link.b)
        )
    if len(slow) > 3:
        yield Finding("warn", "slow-link", f"{len(slow) - 3} more links {kind} are as slow.", "see the table")


def below_floors(results: CheckResults) -> Iterator[Finding]:
    """Find kinds of links that are slow in general, so that no single link is far below the median."""
    between_nodes = _between(results, _nodes_by_best_link(results)[1])
    for links, floor, kind in (
        (between_nodes, MIN_BETWEEN_BYTES_PER_S, "between nodes"),
        (_inside(results), MIN_INSIDE_BYTES_PER_S, "inside nodes"),
    ):
        known = {each: each.slower_bytes_per_s or 0.0 for each in links}
        slow = {link: value for link, value in known.items() if value < floor}
        if not slow or 2 * len(slow) < len(known):
            continue
        worst = min(slow, key=lambda each: slow[each])
        how_many = "The link" if len(known) == 1 else f"{len(slow)} of {len(known)} links"
        text = (
            f"{how_many} {kind} carr{'y' if len(known) > 1 else 'ies'} less than {speed(floor)}; the slowest, "
            f"ranks {worst.a} and {worst.b} ({_hosts(results, worst)}), {speed(slow[worst])}{_direction(worst)}."
        )
        fix = (
            "use a faster network, or a strategy that sends less"
            if worst.between_nodes
            else "see what else runs on that machine"
        )
        yield Finding("warn", "slow-link", text, fix, (worst.a, worst.b))


def below_card(results: CheckResults) -> Iterator[Finding]:
    """Find that the median link carries far less than the slower of its two cards reports."""
    by_rank = {each.rank: each.network for each in results.facts}
    links = sorted(
        _between(results, _nodes_by_best_link(results)[1]),
        key=lambda each: each.slower_bytes_per_s or 0.0,
        reverse=True,
    )
    if not links:
        return
    usual = links[len(links) // 2]
    cards = [network.interface(network.in_use) for network in (by_rank[usual.a], by_rank[usual.b])]
    speeds = [card.speed_mbit_per_s for card in cards if card and card.is_card and card.speed_mbit_per_s]
    # One connection cannot fill the fastest cards, so those are not judged.
    if len(speeds) < 2 or min(speeds) > MAX_CARD_MBIT_PER_S:
        return
    carried, promised = usual.slower_bytes_per_s or 0.0, min(speeds) * 1e6 / 8
    if carried < CARD_SHARE * promised:
        which = "The link" if len(links) == 1 else "The median of the links"
        text = (
            f"{which} between nodes ({_hosts(results, usual)}) carries {speed(carried)}, but the cards say "
            f"{card_speed(min(speeds))} ({speed(promised)})."
        )
        yield Finding("warn", "below-card", text, _FIX, (usual.a, usual.b))


def latencies(results: CheckResults) -> Iterator[Finding]:
    """Find links with high latency, compared with the others or in absolute time."""
    known = [each for each in results.links if each.between_nodes and each.latency_s is not None]
    if not known:
        return
    median = statistics.median(each.latency_s or 0.0 for each in known)
    worst = max(known, key=lambda each: each.latency_s or 0.0)
    latency_s = worst.latency_s or 0.0
    pair = f"ranks {worst.a} and {worst.b} ({_hosts(results, worst)})"
    if median > HIGH_LATENCY_S:
        text = f"A small message takes {short_time(median)} between nodes (median), {short_time(latency_s)} at most ({pair})."
        yield Finding(
            "warn",
            "high-latency",
            text,
            "hosts so far apart train well only with few, large messages",
            (worst.a, worst.b),
        )
    elif len(known) > 2 and latency_s > max(LATENCY_TIMES * median, median + LATENCY_OVER_S):
        text = f"A small message between {pair} takes {short_time(latency_s)}; the median is {short_time(median)}."
        yield Finding("warn", "high-latency", text, "see what else uses that link or those hosts", (worst.a, worst.b))


def _hosts(results: CheckResults, link: MeasuredLink) -> str:
    return listed([results.host_of(link.a), results.host_of(link.b)])


def _direction(link: MeasuredLink) -> str:
    """Return a text that names the slow direction, if one direction is far slower than the other."""
    to, fro = link.forward_bytes_per_s, link.backward_bytes_per_s
    if to is None or fro is None or min(to, fro) > 0.6 * max(to, fro):
        return ""
    a, b = (link.a, link.b) if to < fro else (link.b, link.a)
    return f" from rank {a} to {b} (and {speed(max(to, fro))} back)"
