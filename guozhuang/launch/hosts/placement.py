"""``guozhuang run -H host1:2,host2:2``: read the hosts, place ranks and parameter servers on them, and start the run."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import ipaddress
import logging
import os
import re
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.hosts import options as hosts_options
from guozhuang.launch.hosts import ssh
from guozhuang.launch.hosts.options import DEFAULT_START_TIMEOUT_S as DEFAULT_START_TIMEOUT_S
from guozhuang.launch.hosts.options import add_arguments as add_arguments
from guozhuang.launch.request import NO_EXTENSION, Extension, Request

if TYPE_CHECKING:
    from guozhuang.launch.options.plan import Plan

_SECRET_BYTES = 32
_MAX_SERVERS = 64  # per host; a greater number is a mistake, mostly the port of ssh
_MAX_RANKS = 1024  # per host; a greater number is a mistake, mostly the port of ssh
_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks it can take; ``slots`` is None if the user did not give it."""

    name: str
    slots: int | None


@dataclass(frozen=True)
class HostsPlan:
    """The checked options of a run over several hosts.

    Attributes:
        placed: each host that gets ranks, with their number, or with a word that the host resolves ("gpu").
        ssh: options of ssh.
        environment: variables for every host (``-x``), in addition to those that ``ssh.carried`` selects.
        start_timeout_s: limit for all hosts to be reached, and for each step of their rendezvous.
        interface: the network interface to use on each host; None: the one that leads to the first host.
        master: address of the first host that the user gave; None: the launcher finds one.
        port: port on the first host; 0: any free port.
        timeline: the file for the timeline; each host writes its own file.
        max_restarts: how many times all ranks may be restarted.
        shutdown_timeout_s: how long ranks may take to end after SIGTERM; None: the launcher's default.
        signals: further signals that the launcher passes on to the ranks, besides those that always end a run.
        arguments: the rest of the command line, for the agent of each host.
        servers: each host that gets parameter servers, with their numbers; it may have ranks too.
        extension: additions of the compatibility layer that called the launcher.
    """

    placed: Sequence[tuple[str, str]]
    ssh: ssh.SshOptions
    environment: Mapping[str, str]
    start_timeout_s: float
    interface: str | None
    master: str | None
    port: int
    timeline: str | None
    max_restarts: int
    shutdown_timeout_s: float | None
    signals: Sequence[signal.Signals]
    arguments: Sequence[str]
    servers: Sequence[tuple[str, Sequence[int]]] = ()
    extension: Extension = NO_EXTENSION

    @property
    def names(self) -> list[str]:
        """Return the host name of each link: first the hosts with ranks, then those with servers (twice if a host has both)."""
        return [name for name, _ in (*self.placed, *self.servers)]


def is_asked_for(options: argparse.Namespace) -> bool:
    """Return whether the command line names hosts.

    Raises:
        UsageError: it names no hosts, but has options that need hosts.
    """
    if options.hosts or options.hostfile is not None:
        return True
    alone = {
        "-x": options.exported, "--ssh-port": options.ssh_port, "--ssh-identity": options.ssh_identity,
        "--ssh-config": options.ssh_config, "--start-timeout": options.start_timeout,
        "--server-hosts": getattr(options, "server_hosts", None),
    }  # fmt: skip
    given = [name for name, value in alone.items() if value is not None]
    if given:
        what = f"{', '.join(given)} serves only hosts that are started over ssh, and none is named"
        raise UsageError(explain(what, fix="give -H host:ranks,... or --hostfile FILE, or leave it out"))
    return False


def start(ours: Plan, arguments: Sequence[str], request: Request) -> int:
    """Start the run on all hosts that the command line names, with restarts, and wait until the last rank has ended.

    Args:
        ours: the command line as ``options.plan`` read it.
        arguments: the command line itself, after ``guozhuang run``.
        request: further options of the program that calls this.

    Returns:
        0 if every rank ended with 0; else the exit code of the first failure, 128 + its number for a signal; 255 if a
        host could not be reached or was lost.

    Raises:
        UsageError: the command line cannot work; no host was started.
    """
    from guozhuang.launch.hosts.run import HostsRun

    script = [ours.elastic.training_script, *ours.elastic.training_script_args]
    wanted = plan(arguments, script, os.environ)
    wanted = dataclasses.replace(
        wanted, environment={**wanted.environment, **request.variables}, extension=request.extension
    )
    is_here = request.is_here or functools.partial(ssh.is_this_machine, options=wanted.ssh)
    is_local = [is_here(name) for name in wanted.names]
    if not all(is_local):
        ssh.check_installed()
    where = ", ".join(f"{name} ({count})" for name, count in wanted.placed)
    _log.info("%d hosts, with their ranks: %s", len(wanted.placed), where)
    if wanted.servers:
        where = ", ".join(f"{name} ({len(numbers)})" for name, numbers in wanted.servers)
        _log.info("%d hosts, with their parameter servers: %s", len(wanted.servers), where)
    for attempt in range(wanted.max_restarts + 1):
        run = HostsRun(wanted, is_local, secrets.token_bytes(_SECRET_BYTES), attempt)
        code = run.run()
        if code == 0 or not run.may_try_again:
            break
        if attempt < wanted.max_restarts:
            say(f"starting all ranks again, time {attempt + 1} of {wanted.max_restarts}")
    if run.failed is not None and request.report is not None:
        request.report(run.failed)
    return code


def plan(arguments: Sequence[str], script: Sequence[str], environ: Mapping[str, str]) -> HostsPlan:
    """Read the options on hosts, and place ranks and servers on the hosts.

    Args:
        arguments: the words after ``guozhuang run``.
        script: the last of these: the training script and its arguments, which are passed on unchanged.
        environ: the launcher's environment; a variable like PET_NPROC_PER_NODE stands for the option, as with torchrun.

    Raises:
        UsageError: hosts, slots, ranks or variables make no sense or contradict each other.
    """
    head = list(arguments[: len(arguments) - len(script)])
    assert list(arguments[len(head) :]) == list(script), (arguments, script)
    found, rest = hosts_options.read(head, environ)
    hosts = [host for text in found.hosts or () for host in parse_hosts(text)]
    if found.hostfile is not None:
        if hosts:
            raise UsageError(explain("-H and --hostfile exclude each other", fix="leave one out"))
        hosts = read_hostfile(found.hostfile)
    timeout_s = DEFAULT_START_TIMEOUT_S if found.start_timeout is None else found.start_timeout
    if not 0 < timeout_s < 1e6:
        raise UsageError(explain("--start-timeout is a number of seconds above 0", value=timeout_s, fix="leave it out"))
    for name, port in (("--ssh-port", found.ssh_port), ("--master-port", found.master_port)):
        if port is not None and not 0 < port < 65536:
            raise UsageError(explain(f"{name} is no TCP port", value=port, fix="give 1 to 65535, or leave it out"))
    for name, path in (("--ssh-identity", found.ssh_identity), ("--ssh-config", found.ssh_config)):
        if path is not None and not os.access(path, os.R_OK):
            raise UsageError(
                explain(f"{name}: there is no such file, or it cannot be read", value=path, fix="check the path")
            )
    spare = [host for text in found.server_hosts or () for host in parse_hosts(text, "--server-hosts")]
    placed = place(hosts, found.num_ranks, found.per_host)
    return HostsPlan(
        placed=placed,
        ssh=ssh.SshOptions(found.ssh_port, found.ssh_identity, found.ssh_config),
        environment=ssh.asked_for(found.exported or (), environ),
        start_timeout_s=timeout_s,
        interface=found.interface,
        master=found.master_addr,
        port=found.master_port or 0,
        timeline=found.timeline,
        max_restarts=found.max_restarts,
        shutdown_timeout_s=found.shutdown_timeout,
        signals=found.signals,
        arguments=[*rest, *script],
        servers=place_servers(found.servers, [(host.name, host.slots) for host in spare], [name for name, _ in placed]),
    )


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
        with open(path, encoding="utf-8-sig") as file:  # some editors write a byte order mark
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
    """Return the number of ranks of each host, in the order of the hosts; slots of a host that is named twice are added.

    Args:
        hosts: the hosts that the user named.
        num_ranks: ``-np``: number of ranks of all hosts together, which fill the first slots; None: every slot.
        per_host: ``--nproc-per-node``: number of ranks of each host, or a word such as "gpu"; None: as many as slots.

    Raises:
        UsageError: there are more ranks than slots, or both numbers are given.
    """
    slots: dict[str, int | None] = {}
    for host in hosts:
        if host.name in slots:
            slots[host.name] = (slots[host.name] or 1) + (host.slots or 1)
        else:
            slots[host.name] = host.slots
    if per_host is not None:
        if num_ranks is not None:
            what = "-np counts the ranks of all hosts, --nproc-per-node those of each: they exclude each other"
            raise UsageError(explain(what, fix="leave one out"))
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
    """Return the numbers of the parameter servers of each host that gets any.

    Args:
        number: ``--servers``; None if it was not given.
        spare: ``--server-hosts``: hosts for servers alone, and how many each gets (None: 1).
        rank_hosts: hosts that get ranks. If ``spare`` is empty, the servers are spread evenly over these.

    Raises:
        UsageError: a server host is named twice or has ranks, a number makes no sense, or the numbers disagree.
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
