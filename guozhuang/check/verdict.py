"""Finds problems in the results of a check by rules, and describes them in plain sentences, worst first. No I/O.

Each rule is a function from the results to findings; those for links are in ``linkrules``, those for the network between
nodes in ``netrules``, those for single nodes in ``noderules``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from guozhuang import units
from guozhuang.check import linkrules, netrules, noderules
from guozhuang.check.results import LEVELS, OTHER_VERSION, SOURCE, Absence, CheckResults, Facts, Finding
from guozhuang.units import listed, ranks_text

MAX_CLOCK_OFFSET_S = 0.5

#: Packages whose versions must agree for collectives to work; a difference in any other package is a risk only.
_MUST_AGREE = ("torch", "guozhuang", "CUDA", "ROCm", "NCCL")
_SAME_VERSION = "install the same version on every host"


def judge(results: CheckResults) -> tuple[Finding, ...]:
    """Return the problems that all rules find in the results of a check, worst first; empty if there are none."""
    found = [finding for rule in RULES for finding in rule(results)]
    return tuple(sorted(found, key=lambda each: LEVELS.index(each.level)))


def headline(findings: Sequence[Finding], results: CheckResults) -> str:
    """Return the verdict of a check in one sentence: whether training will run, and how many problems were found."""
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


def _absences(results: CheckResults) -> Iterator[Finding]:
    stopped = [each for each in results.absences if each.rank is not None and each.what != "was ended"]
    together: dict[Absence, list[int]] = {}
    for each in results.absences:
        if each.what == "cannot be reached":
            yield _unreachable_host(each)
        elif each.rank is None:
            yield Finding("fail", "ended", f"The check {each.what} while {each.when}: {each.reason.rstrip('.')}.")
        elif each.what != "was ended" or not stopped:  # a rank ended because of another is no cause
            together.setdefault(replace(each, rank=None), []).append(each.rank)
    for alike, ranks in together.items():
        if alike.what == "did not come":
            came = f"{len(results.facts)} of {results.num_ranks} came"
            text = f"{ranks_text(ranks).capitalize()} did not come {alike.reason} ({came})."
            fix = "look at their output, and that they reach MASTER_ADDR:MASTER_PORT (firewall, name, address)"
            yield Finding("fail", "missing-rank", text, fix, tuple(ranks))
            continue
        if alike.what == OTHER_VERSION:
            run = alike.what.replace("runs", "run") if len(ranks) > 1 else alike.what
            text = f"{ranks_text(ranks).capitalize()} on {alike.host} {run}: {alike.reason}."
            yield Finding("fail", "differing-versions", text, _SAME_VERSION, tuple(ranks))
            continue
        verb = alike.what
        if len(ranks) > 1:
            verb = verb.replace("does ", "do ").replace("was ", "were ")
        process = next((f" (process {f.pid})" for f in results.facts if f.rank == ranks[0]), "") * (len(ranks) == 1)
        text = f"{ranks_text(ranks).capitalize()} on {alike.host}{process} {verb} while {alike.when}"
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


def _versions(results: CheckResults) -> Iterator[Finding]:
    found = differing(results)
    for name, by_value in found.items():
        parts = "; ".join(f"{value or 'absent'} on {where}" for value, where in by_value.items())
        what = f"{name} differs between ranks"
        if name == SOURCE:
            if "guozhuang" in found:
                continue  # the difference of version was reported already
            what, parts = "The source files of guozhuang differ between ranks", f"digest {parts}"
        level = "fail" if name in _MUST_AGREE else "warn"
        yield Finding(level, "differing-versions", f"{what} ({parts}).", _SAME_VERSION)


def differing(results: CheckResults) -> dict[str, dict[str, str]]:
    """Return the packages whose versions differ: for each version ("" if absent) a text that names its hosts or ranks."""
    packages = list(dict.fromkeys(name for each in results.facts for name in each.versions))
    found = {}
    for name in packages:
        by_value: dict[str, list[Facts]] = {}
        for each in results.facts:
            by_value.setdefault(each.versions.get(name, ""), []).append(each)
        if len(by_value) > 1:
            found[name] = {value: _where(there, results) for value, there in by_value.items()}
    return found


def _where(there: Sequence[Facts], results: CheckResults) -> str:
    """Return a text that names these ranks: the hosts if all ranks of the hosts' nodes are among them, else the numbers."""
    own = {each.rank for each in there}
    nodes = dict.fromkeys(each.node for each in there)
    whole = all({one.rank for one in results.nodes[node]} <= own for node in nodes)
    return listed([results.nodes[node][0].host for node in nodes]) if whole else ranks_text(sorted(own))


def _clocks(results: CheckResults) -> Iterator[Finding]:
    for clock in results.clocks:
        if abs(clock.offset_s) - clock.uncertainty_s > MAX_CLOCK_OFFSET_S:
            way = "ahead of" if clock.offset_s > 0 else "behind"
            text = (
                f"The clock of {results.host_of(clock.rank)} is {units.duration(abs(clock.offset_s))} {way} rank 0's."
            )
            fix = "run chrony or ntpd on every host; logs and file times mislead until then"
            yield Finding("warn", "clock", text, fix, (clock.rank,))


Rule = Callable[[CheckResults], Iterable[Finding]]
#: All rules, in the order in which their findings of one level are printed.
RULES: tuple[Rule, ...] = (
    netrules.interfaces,
    _absences,
    linkrules.broken,
    linkrules.reductions,
    noderules.devices,
    _versions,
    linkrules.bandwidths,
    linkrules.latencies,
    netrules.names,
    netrules.mtu,
    noderules.all_of_them,
    _clocks,
)
