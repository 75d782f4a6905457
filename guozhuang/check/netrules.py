"""Rules for the network between nodes: interfaces, host names, packet sizes. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from guozhuang.check.noderules import Problem, of_nodes
from guozhuang.check.results import CheckResults, Facts, Finding, Network, NetworkInterface
from guozhuang.net.interfaces import LOOPBACK_NAMES, is_local_bridge, is_loopback
from guozhuang.units import listed


def interfaces(results: CheckResults) -> Iterator[Finding]:
    """Find wrong interfaces and addresses; they matter only if ranks are, or should be, on several nodes."""
    if len(results.nodes) > 1:
        yield from of_nodes(results, (_interface, _of_nccl))
    elif results.facts and any(each.what == "did not come" for each in results.absences):
        here = results.facts[0].network
        if here.meeting_addresses and all(map(is_loopback, here.meeting_addresses)):
            means = f" means {here.meeting_addresses[0]}" if here.meeting_host != here.meeting_addresses[0] else ""
            what = f"On {results.facts[0].host} MASTER_ADDR={here.meeting_host}{means}"
            text = f"{what}; missing ranks that run on other hosts cannot reach that."
            fix = "give an address or a name that means the same on every host (look for 127.0.1.1 in /etc/hosts)"
            yield Finding("note", "wrong-address", text, fix)


def _interface(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    """Find faults of the interface that a node uses towards other nodes: it does not exist, is down, or does not lead there."""
    here = ranks[0].network
    used = here.interface(here.in_use)
    fix = "unset GLOO_SOCKET_IFNAME" if here.requested else "give the right one with --interface or GLOO_SOCKET_IFNAME"
    if here.routed and here.routed != here.in_use:
        fix = f"set GLOO_SOCKET_IFNAME={here.routed}, which leads to rank 0, or unset it"
    if here.in_use and used is None:
        names = listed(each.name for each in here.interfaces)
        text = f"The interface {here.in_use!r} is asked for on {{}}, where there are only {names}."
        yield Problem("fail", "wrong-interface", text, fix)
    if used is None:
        return
    if _is_loopback(used):
        text = f"The loopback interface {used.name} is in use on {{}}, and no other host reaches it."
        yield Problem("fail", "wrong-interface", text, fix)
    elif is_local_bridge(used.name):
        text = f"{used.name} is in use on {{}}: a bridge to containers of one host, which others do not reach."
        yield Problem("fail", "wrong-interface", text, fix)
    elif here.routed and here.routed != used.name:
        text = f"The interface {used.name} is in use on {{}}, but {here.routed} leads to rank 0."
        yield Problem("warn", "wrong-interface", text, fix)
    if not used.is_up:
        yield Problem("fail", "interface-down", f"The interface {used.name} is down on {{}}.", "bring it up")


def _of_nccl(ranks: Sequence[Facts], num_ranks: int) -> Iterator[Problem]:
    """Find values of NCCL_SOCKET_IFNAME with which NCCL cannot reach other nodes; only on nodes with CUDA devices."""
    here = ranks[0].network
    if not ranks[0].num_devices or not here.nccl_requested:
        return
    asked = f"NCCL_SOCKET_IFNAME={here.nccl_requested}"
    fix = f"set NCCL_SOCKET_IFNAME={here.routed}, which leads to rank 0, or unset it" if here.routed else "unset it"
    chosen = _chosen_by_nccl(here)
    reaching = [each for each in chosen if not _is_for_this_host_alone(each)]
    if not chosen:
        there = listed(each.name for each in here.interfaces)
        yield Problem("fail", "wrong-interface", f"{asked} fits no interface of {{}}, where there are {there}.", fix)
    elif not reaching:
        names = listed(each.name for each in chosen)
        yield Problem(
            "fail", "wrong-interface", f"{asked} lets NCCL use {names} on {{}}, which no other host reaches.", fix
        )
    elif here.routed and here.routed not in [each.name for each in chosen]:
        names = listed(each.name for each in reaching)
        text = f"{asked} lets NCCL use {names} on {{}}, but {here.routed} leads to rank 0."
        yield Problem("warn", "wrong-interface", text, fix)


def _chosen_by_nccl(here: Network) -> list[NetworkInterface]:
    """Return the interfaces that NCCL_SOCKET_IFNAME admits: it lists prefixes, after "=" whole names, after "^" exclusions."""
    text = here.nccl_requested or ""
    is_refusal, text = text.startswith("^"), text.removeprefix("^")
    is_whole, text = text.startswith("="), text.removeprefix("=")
    # An entry of NCCL_SOCKET_IFNAME may end with a colon and the port of a card, which are cut off here.
    asked = [each.strip().partition(":")[0] for each in text.split(",") if each.strip()]

    def fits(name: str) -> bool:
        return any(name == each if is_whole else name.startswith(each) for each in asked)

    # Loopback and docker's bridge count too: NCCL avoids them by itself only if NCCL_SOCKET_IFNAME is not set.
    return [each for each in here.interfaces if each.addresses and each.is_up and fits(each.name) is not is_refusal]


def _is_for_this_host_alone(interface: NetworkInterface) -> bool:
    return _is_loopback(interface) or is_local_bridge(interface.name)


def _is_loopback(interface: NetworkInterface) -> bool:
    return interface.name in LOOPBACK_NAMES or all(map(is_loopback, interface.addresses or ("::1",)))


def mtu(results: CheckResults) -> Iterator[Finding]:
    """Find nodes whose interfaces have different packet sizes (MTU)."""
    if len(results.nodes) < 2:
        return
    sizes: dict[int, list[str]] = {}
    for ranks in results.nodes.values():
        used = ranks[0].network.interface(ranks[0].network.in_use)
        if used is not None and used.mtu_bytes and used.name not in LOOPBACK_NAMES:
            sizes.setdefault(used.mtu_bytes, []).append(ranks[0].host)
    if len(sizes) > 1:
        parts = "; ".join(f"{size} on {listed(names)}" for size, names in sorted(sizes.items()))
        fix = "set the same MTU everywhere: where a large packet is dropped without a word, transfers stall"
        yield Finding("warn", "differing-mtu", f"The MTU differs between nodes: {parts}.", fix)


def names(results: CheckResults) -> Iterator[Finding]:
    """Find host names that do not resolve, or resolve to loopback: gloo listens at the address of the host's own name."""
    if len(results.nodes) < 2:
        return
    wrong, looped = [], []
    for ranks in results.nodes.values():
        here = ranks[0].network
        if here.name_error:
            wrong.append(ranks[0])
        elif here.name_addresses and all(is_loopback(a) for a in here.name_addresses):
            looped.append(ranks[0])
    fix = "add the name to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME (gz.init works without)"
    danger = "a script that makes its process group without gz.init will wait on loopback"
    if wrong:
        text = f"{_own_name(wrong)} not resolve there ({wrong[0].network.name_error}); {danger}."
        yield Finding("warn", "unresolvable-name", text, fix, tuple(each.rank for each in wrong))
    if looped:
        names, address = listed([each.host for each in looped]), looped[0].network.name_addresses[0]
        text = f"The name of {names} leads to {address} there; {danger}."
        yield Finding("warn", "unresolvable-name", text, fix, tuple(each.rank for each in looped))


def _own_name(facts: Sequence[Facts]) -> str:
    names = listed([each.host for each in facts])
    return f"The host name{'s' * (len(facts) > 1)} {names} do{'es' * (len(facts) == 1)}"
