"""Rules for links: broken ones, ones slower than others, and ones below absolute limits. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from guozhuang.check.measure import CONNECTED
from guozhuang.check.results import CheckResults, Finding, MeasuredLink
from guozhuang.units import card_speed, listed, short_time, speed

#: A link is slow below this share of the median of comparable links.
SLOW_SHARE = 0.5
#: Links between nodes below this bandwidth (500 Mbit/s) slow down training with gradients of any size.
MIN_BETWEEN_BYTES_PER_S = 62.5e6
#: Links inside a node below this bandwidth mean that something slows down the whole machine.
MIN_INSIDE_BYTES_PER_S = 100e6
#: A link is slow below this share of the speed that its network card reports.
CARD_SHARE = 0.3
MAX_CARD_MBIT_PER_S = 10_000
HIGH_LATENCY_S = 2e-3
LATENCY_TIMES, LATENCY_OVER_S = 4.0, 300e-6

_FIX = "test that cable, switch port and card (`ethtool`), what else uses it, and the route"


def broken(results: CheckResults) -> Iterator[Finding]:
    """Find pairs of ranks whose link could not be measured although both were present; one finding per pair of nodes."""
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


def bandwidths(results: CheckResults) -> Iterator[Finding]:
    """Find nodes and links that are slow: compared with the others, by absolute limits, and by what their cards report.

    With three nodes, one of them slow, two of three links are slow, and their median is useless. So nodes are compared
    before links, by the best link of each, and a slow node's links are left out of all further comparisons.
    """
    node_of = {each.rank: each.node for each in results.facts}
    carried = {each: each.slower_bytes_per_s for each in results.links if each.slower_bytes_per_s}
    between = {link: value for link, value in carried.items() if link.between_nodes}
    inside = {link: value for link, value in carried.items() if not link.between_nodes}
    best: dict[str, float] = {}
    for link, value in between.items():
        for node in (node_of[link.a], node_of[link.b]):
            best[node] = max(best.get(node, 0.0), value)
    median = statistics.median(best.values()) if best else 0.0
    slow = {node for node, value in best.items() if value < SLOW_SHARE * median} if len(best) > 2 else set()
    for node in sorted(slow, key=lambda each: best[each]):
        ranks = results.nodes[node]
        text = (
            f"The link of {ranks[0].host} is slow: it reaches no other node with more than {speed(best[node])}; "
            f"the median of the nodes is {speed(median)}."
        )
        yield Finding("warn", "slow-link", text, _FIX, tuple(each.rank for each in ranks))
    fair = {link: value for link, value in between.items() if not {node_of[link.a], node_of[link.b]} & slow}
    yield from _slow_pairs(results, fair, "between nodes", SLOW_SHARE)
    yield from _slow_pairs(results, inside, "inside nodes", SLOW_SHARE / 2)  # less strict: caches cause differences
    yield from _below_floor(results, fair, "between nodes", MIN_BETWEEN_BYTES_PER_S)
    yield from _below_floor(results, inside, "inside nodes", MIN_INSIDE_BYTES_PER_S)
    yield from _below_card(results, fair)


def _slow_pairs(
    results: CheckResults, carried: Mapping[MeasuredLink, float], kind: str, share: float
) -> Iterator[Finding]:
    """Find links that carry less than ``share`` of the median bandwidth of their kind."""
    if len(carried) < 3:
        return
    median = statistics.median(carried.values())
    slow = sorted((link for link, value in carried.items() if value < share * median), key=lambda each: carried[each])
    for link in slow[:3]:
        text = (
            f"The link between ranks {link.a} and {link.b} ({_hosts(results, link)}) carries {speed(carried[link])}"
            f"{_direction(link)}; the median {kind} is {speed(median)}."
        )
        fix = _FIX if link.between_nodes else "see what else runs there"
        yield Finding("warn", "slow-link", text, fix, (link.a, link.b))
    if len(slow) > 3:
        yield Finding("warn", "slow-link", f"{len(slow) - 3} more links {kind} are as slow.", "see the table")


def _below_floor(
    results: CheckResults, carried: Mapping[MeasuredLink, float], kind: str, floor: float
) -> Iterator[Finding]:
    """Find links below an absolute bandwidth if half of a kind are: then none of them is far below the median of the kind."""
    slow = [link for link, value in carried.items() if value < floor]
    if not slow or 2 * len(slow) < len(carried):
        return
    worst = min(slow, key=lambda each: carried[each])
    how_many = "The link" if len(carried) == 1 else f"{len(slow)} of {len(carried)} links"
    text = (
        f"{how_many} {kind} carr{'y' if len(carried) > 1 else 'ies'} less than {speed(floor)}; the slowest, "
        f"ranks {worst.a} and {worst.b} ({_hosts(results, worst)}), {speed(carried[worst])}{_direction(worst)}."
    )
    fix = "use a faster network, or a strategy that sends less"
    yield Finding(
        "warn",
        "slow-link",
        text,
        fix if worst.between_nodes else "see what else runs on that machine",
        (worst.a, worst.b),
    )


def _below_card(results: CheckResults, carried: Mapping[MeasuredLink, float]) -> Iterator[Finding]:
    """Find a median link between nodes that carries far less than the slower of its two network cards reports."""
    if not carried:
        return
    usual = sorted(carried, key=lambda each: carried[each], reverse=True)[len(carried) // 2]
    networks = [each.network for each in results.facts if each.rank in (usual.a, usual.b)]
    cards = [network.interface(network.in_use) for network in networks]
    speeds = [card.speed_mbit_per_s for card in cards if card and card.is_card and card.speed_mbit_per_s]
    # One connection cannot fill the fastest cards, so those are not judged.
    if len(speeds) < 2 or min(speeds) > MAX_CARD_MBIT_PER_S:
        return
    promised = min(speeds) * 1e6 / 8
    if carried[usual] < CARD_SHARE * promised:
        which = "The link" if len(carried) == 1 else "The median of the links"
        text = (
            f"{which} between nodes ({_hosts(results, usual)}) carries {speed(carried[usual])}, but the cards say "
            f"{card_speed(min(speeds))} ({speed(promised)})."
        )
        yield Finding("warn", "below-card", text, _FIX, (usual.a, usual.b))


def latencies(results: CheckResults) -> Iterator[Finding]:
    """Find links with high latency, compared with the others or in absolute time."""
    known = {each: each.latency_s for each in results.links if each.between_nodes and each.latency_s is not None}
    if not known:
        return
    median, worst = statistics.median(known.values()), max(known, key=lambda each: known[each])
    latency_s, ranks = known[worst], (worst.a, worst.b)
    pair = f"ranks {worst.a} and {worst.b} ({_hosts(results, worst)})"
    if median > HIGH_LATENCY_S:
        text = f"A small message takes {short_time(median)} between nodes (median), {short_time(latency_s)} at most ({pair})."
        fix = "hosts so far apart train well only with few, large messages"
        yield Finding("warn", "high-latency", text, fix, ranks)
    elif len(known) > 2 and latency_s > max(LATENCY_TIMES * median, median + LATENCY_OVER_S):
        text = f"A small message between {pair} takes {short_time(latency_s)}; the median is {short_time(median)}."
        yield Finding("warn", "high-latency", text, "see what else uses that link or those hosts", ranks)


def _hosts(results: CheckResults, link: MeasuredLink) -> str:
    return listed([results.host_of(link.a), results.host_of(link.b)])


def _direction(link: MeasuredLink) -> str:
    """Return a text that names the slow direction, if one direction is far slower than the other."""
    to, fro = link.forward_bytes_per_s, link.backward_bytes_per_s
    if to is None or fro is None or min(to, fro) > 0.6 * max(to, fro):
        return ""
    a, b = (link.a, link.b) if to < fro else (link.b, link.a)
    return f" from rank {a} to {b} (and {speed(max(to, fro))} back)"
