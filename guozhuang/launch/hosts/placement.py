"""Read the hosts of ``-H host1:2,host2:2`` or of a hostfile, and place ranks and parameter servers on them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain

_MAX_SERVERS = 64  # per host; a greater number is a mistake, mostly ssh's port written as host:port
_MAX_RANKS = 1024  # per host; a greater number is a mistake, mostly ssh's port written as host:port


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks it can take; ``slots`` is None if the user did not give it."""

    name: str
    slots: int | None


def parse_hosts(text: str, option: str = "-H") -> list[Host]:
    """Parse the hosts of ``-H``: ``host1:2,host2``; an IPv6 address with slots stands in brackets.

    Args:
        text: the value of the option.
        option: the name of the option, for the text of an error.

    Raises:
        UsageError: a name or number cannot be read.
    """
    found = [_host(entry.strip(), text) for entry in text.split(",") if entry.strip()]
    if not found:
        raise UsageError(explain(f"{option} names no host", value=text, fix="write host1:2,host2:2"))
    return found


def read_hostfile(path: str) -> list[Host]:
    """Read hosts from a file with lines ``host slots=2``, ``host:2`` or ``host``; empty lines and # comments are skipped.

    Raises:
        UsageError: the file, or a line of it, cannot be read; the text has the number of the line.
    """
    fix = "write lines like 'host slots=2' or 'host:2'"
    try:
        with open(path, encoding="utf-8-sig") as file:  # skip the byte order mark that some editors write
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(explain(f"the hostfile cannot be read: {error}", value=path, fix="check the path")) from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            matched = re.fullmatch(r"slots=([0-9]{1,6})", word)
            if not matched or host.slots is not None:
                raise UsageError(explain(f"{where} is no host with its slots", value=line, fix=fix))
            host = Host(host.name, _slots(matched[1], where))
        found.append(host)
    if not found:
        raise UsageError(explain("the hostfile names no host", value=path, fix=fix))
    return found


def place(hosts: Sequence[Host], num_ranks: int | None, per_host: str | None) -> list[tuple[str, str]]:
    """Return (host, number of ranks) for each host that gets ranks, in order; slots of a host that is named twice are added.

    Args:
        hosts: the hosts that the user named.
        num_ranks: ``-np``: number of ranks of all hosts together, which fill the first slots; None: every slot.
        per_host: ``--nproc-per-node``, where ``num_ranks`` is None: number of ranks of each host, or a word such as "gpu";
            None: as many as slots.

    Raises:
        UsageError: there are more ranks than slots.
    """
    slots: dict[str, int | None] = {}
    for host in hosts:
        if host.name in slots:
            slots[host.name] = (slots[host.name] or 1) + (host.slots or 1)
        else:
            slots[host.name] = host.slots
    if per_host is not None:
        if per_host.isdecimal():
            _check_ranks("--nproc-per-node", int(per_host))
            for name, number in slots.items():
                if number is not None and int(per_host) > number:
                    what = f"--nproc-per-node asks for more ranks than {name} has slots ({number})"
                    raise UsageError(explain(what, value=int(per_host), fix=f"write {name}:{per_host}"))
        return [(name, per_host) for name in slots]
    free = {name: 1 if number is None else number for name, number in slots.items()}
    if num_ranks is None:
        for name, number in free.items():
            _check_ranks(name, number)
        return [(name, str(number)) for name, number in free.items()]
    if num_ranks < 1:
        raise UsageError(explain("-np must be at least 1", value=num_ranks, fix="give the number of ranks"))
    if num_ranks > sum(free.values()):
        there = ", ".join(f"{name}:{number}" for name, number in free.items())
        what = f"-np asks for more ranks than there are slots, which are {sum(free.values())} ({there})"
        raise UsageError(explain(what, value=num_ranks, fix="give hosts more slots, as in host:4, or lower -np"))
    placed = []
    for name, number in free.items():
        here = min(number, num_ranks)
        num_ranks -= here
        if here:
            _check_ranks(name, here)
            placed.append((name, str(here)))
    return placed


def place_servers(
    number: int | None, spare: Sequence[tuple[str, int | None]], rank_hosts: Sequence[str]
) -> list[tuple[str, Sequence[int]]]:
    """Return (host, the numbers of its parameter servers) for each host that gets any.

    Args:
        number: ``--servers``, 0 or more; None if it was not given.
        spare: ``--server-hosts``: hosts for servers alone, and how many each gets (None: 1).
        rank_hosts: hosts that get ranks. If ``spare`` is empty, the servers are spread evenly over these.

    Raises:
        UsageError: a server host is named twice or has ranks, a host has too many servers, or the numbers disagree.
    """
    if spare:
        shares = _shares_of_spare(spare, rank_hosts)
        total = sum(share for _, share in shares)
        if number is not None and number != total:
            there = ",".join(f"{name}:{share}" for name, share in shares)
            what = f"--servers and --server-hosts do not agree: {there} are {total} servers"
            raise UsageError(explain(what, value=number, fix="leave --servers out: the hosts say how many there are"))
    else:
        each, more = divmod(number or 0, len(rank_hosts))
        shares = [(name, each + (place < more)) for place, name in enumerate(rank_hosts)]
    placed: list[tuple[str, Sequence[int]]] = []
    begin = 0
    for name, share in shares:
        if share > _MAX_SERVERS:
            what = f"{name} is to start more than {_MAX_SERVERS} parameter servers"
            raise UsageError(
                explain(what, value=share, fix="host:N means N servers; the port of ssh goes to --ssh-port")
            )
        if share:
            placed.append((name, range(begin, begin + share)))
        begin += share
    return placed


def _shares_of_spare(spare: Sequence[tuple[str, int | None]], rank_hosts: Sequence[str]) -> list[tuple[str, int]]:
    taken = {_without_user(name) for name in rank_hosts}
    seen: set[str] = set()
    for name, _ in spare:
        if _without_user(name) in taken:
            what = f"--server-hosts are hosts for servers alone, and {name} has ranks"
            fix = "name it in one of -H and --server-hosts; --servers K without --server-hosts starts servers beside the ranks"
            raise UsageError(explain(what, value=name, fix=fix))
        if _without_user(name) in seen:
            what = "--server-hosts names a host twice"
            raise UsageError(explain(what, value=name, fix=f"name it once, as in {name}:2"))
        seen.add(_without_user(name))
    return [(name, 1 if share is None else share) for name, share in spare]


def _without_user(name: str) -> str:
    return name.rpartition("@")[2]


def _host(text: str, where: str) -> Host:
    fix = "write host, host:2, user@host:2 or [IPv6 address]:2"
    matched = re.fullmatch(r"((?:[^@\[\]\s]+@)?)\[([^\[\]\s]+)\](?::([0-9]{1,6}))?", text)
    if matched:
        return Host(_name(matched[1] + matched[2], where, fix), _slots(matched[3], where))
    name, colon, slots = text.partition(":")
    if slots.count(":") and _is_ipv6(text.rpartition("@")[2]):
        return Host(_name(text, where, fix), None)
    if colon and not re.fullmatch(r"[0-9]{1,6}", slots):
        raise UsageError(explain(f"the number of slots cannot be read in {where}", value=text, fix=fix))
    return Host(_name(name, where, fix), _slots(slots, where))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def _name(text: str, where: str, fix: str) -> str:
    # ssh would read a name that begins with "-" as an option.
    if not text or text.startswith("-") or not re.fullmatch(r"[^\s\x00-\x1f,;'\"`$|&<>()\\\[\]]+", text):
        raise UsageError(explain(f"a host has no name that ssh could take, in {where}", value=text, fix=fix))
    return text


def _slots(text: str | None, where: str) -> int | None:
    if not text:
        return None
    if int(text) == 0:
        raise UsageError(explain(f"a host needs at least one slot, in {where}", value=text, fix="leave the host out"))
    return int(text)


def _check_ranks(name: str, number: int) -> None:
    if number < 1:
        raise UsageError(explain(f"{name} must be at least 1", value=number, fix="give the number of ranks"))
    if number > _MAX_RANKS:
        what = f"{name} asks for more than {_MAX_RANKS} ranks on a host"
        raise UsageError(explain(what, value=number, fix="host:N means N ranks; the port of ssh goes to --ssh-port"))
