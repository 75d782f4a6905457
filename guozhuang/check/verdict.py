"""What is wrong, in plain sentences, worst first. Pure: rules over facts and figures, no system is asked.

Each rule is one function from the results to findings; those about links are in ``linkrules``, those about single nodes in
``noderules``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from guozhuang.check import linkrules, noderules
from guozhuang.check.results import LEVELS, SOURCE, Absence, Facts, Finding, Results, is_loopback
from guozhuang.check.words import listed, ranks_text
from guozhuang.lab import units

MAX_CLOCK_OFFSET_S = 0.5

#: Where these differ, collectives may not understand each other; elsewhere it is a risk.
_MUST_AGREE = ("torch", "guozhuang", "CUDA", "ROCm", "NCCL")
#: Bridges that lead to containers of one host only.
_LOCAL_BRIDGE = re.compile(r"docker\d+|virbr\d+|lxcbr\d+|lxdbr\d+|podman\d+|cni-podman\d+|br-[0-9a-f]{12}")


def judge(results: Results) -> tuple[Finding, ...]:
    """All findings, worst first; empty if there is nothing to say."""
    found = [finding for rule in RULES for finding in rule(results)]
    return tuple(sorted(found, key=lambda each: LEVELS.index(each.level)))


def headline(findings: Sequence[Finding], results: Results) -> str:
    """The verdict in one sentence."""
    levels = [each.level for each in findings]
    num_fail, num_warn = levels.count("fail"), levels.count("warn")
    if num_fail:
        more = f", and {num_warn} that cost{'s' * (num_warn == 1)} speed or may" if num_warn else ""
        return f"{num_fail} problem{'s' * (num_fail > 1)} that break{'s' * (num_fail == 1)} training{more}."
    if num_warn:
        return f"Training will run; {num_warn} thing{'s' * (num_warn > 1)} to look at."
    if results.num_ranks == 1:
        return "Nothing found on this node."
    nodes = f"{len(results.nodes)} node{'s' * (len(results.nodes) > 1)}"
    return f"Nothing found: {results.num_ranks} ranks on {nodes} fit each other."


def _absences(results: Results) -> Iterator[Finding]:
    stopped = [each for each in results.absences if each.rank is not None and each.what != "was ended"]
    together: dict[Absence, list[int]] = {}
    for each in results.absences:
        if each.what == "cannot be reached":
            yield _unreachable_host(each)
        elif each.rank is None:
            yield Finding("fail", "ended", f"The check {each.what} while {each.when}: {each.reason.rstrip('.')}.")
        elif each.what != "was ended" or not stopped:  # whom the launcher ended because of another is no cause
            together.setdefault(replace(each, rank=None), []).append(each.rank)
    for alike, ranks in together.items():
        if alike.what == "did not come":
            came = f"{len(results.facts)} of {results.num_ranks} came"
            text = f"{ranks_text(ranks)} did not come {alike.reason} ({came})."
            fix = "look at their output, and that they reach MASTER_ADDR:MASTER_PORT (firewall, name, address)"
            yield Finding("fail", "missing-rank", text, fix, tuple(ranks))
            continue
        verb = alike.what
        if len(ranks) > 1:
            verb = verb.replace("does ", "do ").replace("was ", "were ")
        process = next((f" (process {f.pid})" for f in results.facts if f.rank == ranks[0]), "") * (len(ranks) == 1)
        text = f"{ranks_text(ranks)} on {alike.host}{process} {verb} while {alike.when}"
        text += f": {alike.reason.rstrip('.')}." if alike.reason else "."
        fix = "look at its output; if nobody sent it a signal, memory ran out" if alike.what == "stopped" else ""
        yield Finding("fail", "lost-rank", text, fix, tuple(ranks))


def _unreachable_host(absence: Absence) -> Finding:
    for pattern, kind, what, fix in (
        (
            r"permission denied|too many authentication failures",
            "missing-ssh-key",
            "accepts no key of ours",
            f"run `ssh-copy-id {absence.host}`, or give --ssh-identity",
        ),
        (
            r"could not resolve|name or service not known",
            "unresolvable-name",
            "has a name that does not resolve here",
            "correct the name, or give an address, or add it to /etc/hosts or the ssh configuration",
        ),
        (
            r"host key verification failed",
            "unknown-host-key",
            "shows a host key that is not known here",
            f"run `ssh {absence.host}` once and compare the key",
        ),
        (
            r"connection refused|timed out|no route|unreachable|no answer|closed by",
            "unreachable-host",
            "cannot be reached over ssh",
            "check that it runs, that sshd runs there, the port (--ssh-port) and the firewall",
        ),
    ):
        if re.search(pattern, absence.reason, re.IGNORECASE):
            return Finding("fail", kind, f"{absence.host} {what}: {absence.reason.rstrip('.')}.", fix)
    reason = absence.reason.rstrip(".") or "ssh did not say why"
    return Finding("fail", "unreachable-host", f"{absence.host} cannot be used over ssh: {reason}.")


def _networks(results: Results) -> Iterator[Finding]:
    """What only matters where ranks are on several nodes, or should be."""
    if len(results.nodes) > 1:
        where: dict[tuple[str, str, str, str], list[Facts]] = {}
        for ranks in results.nodes.values():
            for level, kind, text, fix in _interface(ranks[0]):
                where.setdefault((level, kind, text, fix), []).extend(ranks)
        for (level, kind, text, fix), there in where.items():
            names = listed(each.host for each in there)
            yield Finding(level, kind, text.format(names), fix, tuple(each.rank for each in there))
    elif results.facts and any(each.what == "did not come" for each in results.absences):
        here = results.facts[0].network
        if here.meeting_addresses and all(map(is_loopback, here.meeting_addresses)):
            means = f" means {here.meeting_addresses[0]}" if here.meeting_host != here.meeting_addresses[0] else ""
            what = f"On {results.facts[0].host} MASTER_ADDR={here.meeting_host}{means}"
            text = f"{what}; missing ranks that run on other hosts cannot reach that."
            fix = "give an address or a name that means the same on every host (look for 127.0.1.1 in /etc/hosts)"
            yield Finding("note", "wrong-address", text, fix)


def _interface(first: Facts) -> Iterator[tuple[str, str, str, str]]:
    """(level, kind, text with {} for the hosts, fix) of what is wrong with the interface in use on a node."""
    here = first.network
    used = here.interface(here.in_use)
    fix = "unset GLOO_SOCKET_IFNAME" if here.requested else "give the right one with --interface or GLOO_SOCKET_IFNAME"
    if here.routed and here.routed != here.in_use:
        fix = f"set GLOO_SOCKET_IFNAME={here.routed}, which leads to rank 0, or unset it"
    if here.in_use and used is None:
        names = listed(each.name for each in here.interfaces)
        text = f"The interface {here.in_use!r} is asked for on {{}}, where there are only {names}."
        yield "fail", "wrong-interface", text, fix
    if used is None:
        return
    if used.name in ("lo", "lo0") or all(is_loopback(a) for a in used.addresses or ("::1",)):
        text = f"The loopback interface {used.name} is in use on {{}}, and no other host reaches it."
        yield "fail", "wrong-interface", text, fix
    elif _LOCAL_BRIDGE.fullmatch(used.name):
        text = f"{used.name} is in use on {{}}: a bridge to containers of one host, which others do not reach."
        yield "fail", "wrong-interface", text, fix
    elif here.routed and here.routed != used.name:
        text = f"The interface {used.name} is in use on {{}}, but {here.routed} leads to rank 0."
        yield "warn", "wrong-interface", text, fix
    if not used.is_up:
        yield "fail", "interface-down", f"The interface {used.name} is down on {{}}.", "bring it up"


def _mtu(results: Results) -> Iterator[Finding]:
    if len(results.nodes) < 2:
        return
    sizes: dict[int, list[str]] = {}
    for ranks in results.nodes.values():
        used = ranks[0].network.interface(ranks[0].network.in_use)
        if used is not None and used.mtu_bytes and used.name not in ("lo", "lo0"):
            sizes.setdefault(used.mtu_bytes, []).append(ranks[0].host)
    if len(sizes) > 1:
        parts = "; ".join(f"{size} on {listed(names)}" for size, names in sorted(sizes.items()))
        fix = "set the same MTU everywhere: where a large packet is dropped without a word, transfers stall"
        yield Finding("warn", "differing-mtu", f"The MTU differs between nodes: {parts}.", fix)


def _names(results: Results) -> Iterator[Finding]:
    """Own names that do not resolve, or to loopback: gloo and others listen where the host's own name leads."""
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


def _versions(results: Results) -> Iterator[Finding]:
    found = differing(results)
    for name, by_value in found.items():
        parts = "; ".join(f"{value or 'absent'} on {where}" for value, where in by_value.items())
        what = f"{name} differs between ranks"
        if name == SOURCE:
            if "guozhuang" in found:
                continue  # said already, and better
            what, parts = "The source files of guozhuang differ between ranks", f"digest {parts}"
        level = "fail" if name in _MUST_AGREE else "warn"
        fix = "install the same version on every host"
        yield Finding(level, "differing-versions", f"{what} ({parts}).", fix)


def differing(results: Results) -> dict[str, dict[str, str]]:
    """By package whose version differs: each version ("" for none) and the hosts that have it, in words."""
    packages = list(dict.fromkeys(name for each in results.facts for name in each.versions))
    found = {}
    for name in packages:
        by_value: dict[str, list[Facts]] = {}
        for each in results.facts:
            by_value.setdefault(each.versions.get(name, ""), []).append(each)
        if len(by_value) > 1:
            found[name] = {value: _where(there, results) for value, there in by_value.items()}
    return found


def _where(there: Sequence[Facts], results: Results) -> str:
    """Hosts where all ranks of a node agree, else ranks."""
    own = {each.rank for each in there}
    nodes = dict.fromkeys(each.node for each in there)
    whole = all({one.rank for one in results.nodes[node]} <= own for node in nodes)
    return listed([results.nodes[node][0].host for node in nodes]) if whole else ranks_text(sorted(own))


def _clocks(results: Results) -> Iterator[Finding]:
    for clock in results.clocks:
        if abs(clock.offset_s) - clock.uncertainty_s > MAX_CLOCK_OFFSET_S:
            way = "ahead of" if clock.offset_s > 0 else "behind"
            text = (
                f"The clock of {results.host_of(clock.rank)} is {units.duration(abs(clock.offset_s))} {way} rank 0's."
            )
            fix = "run chrony or ntpd on every host; logs and file times mislead until then"
            yield Finding("warn", "clock", text, fix, (clock.rank,))


Rule = Callable[[Results], Iterable[Finding]]
#: In the order in which findings of one level are told.
RULES: tuple[Rule, ...] = (
    _networks,
    _absences,
    linkrules.broken,
    linkrules.reductions,
    noderules.devices,
    _versions,
    linkrules.slow_nodes_and_links,
    linkrules.below_floors,
    linkrules.below_card,
    linkrules.latencies,
    _names,
    _mtu,
    noderules.all_of_them,
    _clocks,
)
