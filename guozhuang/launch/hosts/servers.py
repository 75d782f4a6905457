"""``--servers`` and ``--server-hosts`` beside ``-H``: which host gets which parameter servers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from guozhuang.errors import UsageError, explain

_MAX_SERVERS = 64  # of a host: more are a slip, mostly the port of ssh


def place(
    number: int | None, spare: Sequence[tuple[str, int | None]], rank_hosts: Sequence[str]
) -> list[tuple[str, Sequence[int]]]:
    """The numbers of the servers of each host that gets any.

    Args:
        number: ``--servers``; None where it was not given.
        spare: ``--server-hosts``: hosts for servers alone, and how many each gets (None: 1).
        rank_hosts: hosts that get ranks. Without spare ones the servers are spread over these, as evenly as may be.

    Raises:
        UsageError: a host that is named twice or has ranks, a number that makes no sense, or numbers that do not agree.
    """
    if number is not None and number < 0:
        fix = "give 0 or more"
        raise UsageError(explain("--servers is a count of parameter servers, at least 0", value=number, fix=fix))
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
    taken = {_plain(name) for name in rank_hosts}
    seen: set[str] = set()
    for name, _ in spare:
        if _plain(name) in taken:
            what = f"--server-hosts are hosts for servers alone, and {name} has ranks"
            fix = "name it in one of -H and --server-hosts; --servers K without --server-hosts starts servers beside the ranks"
            raise UsageError(explain(what, value=name, fix=fix))
        if _plain(name) in seen:
            what = "--server-hosts names a host twice"
            raise UsageError(explain(what, value=name, fix=f"name it once, as in {name}:2"))
        seen.add(_plain(name))
    return [(name, 1 if share is None else share) for name, share in spare]


def _plain(name: str) -> str:
    return name.rpartition("@")[2]
