"""Check the options for several hosts (``-H`` and others), and for parameter servers."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.launch.hosts import ssh
from guozhuang.launch.hosts.placement import Host, parse_hosts, place, place_servers, read_hostfile
from guozhuang.launch.job import Policy
from guozhuang.launch.options.arguments import DEFAULT_START_TIMEOUT_S
from guozhuang.launch.options.plan_file import check_nodes
from guozhuang.launch.options.torchrun import RENDEZVOUS_DEFAULTS, signals_of
from guozhuang.launch.request import NO_EXTENSION, Extension
from guozhuang.launch.signals import ENDING

# Options that the launcher itself carries out, and options on the rendezvous, which -H excludes because it sets that up.
_OF_THE_LAUNCHER = (
    "hosts", "hostfile", "exported", "ssh_port", "ssh_identity", "ssh_config", "start_timeout", "interface", "servers",
    "server_hosts", "num_ranks", "plan", "planned_nodes",
)  # fmt: skip
_EXCLUDED = RENDEZVOUS_DEFAULTS.keys() - {"master_addr", "master_port"} | {"local_addr"}


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
        options: the options for the agents, as parsed; ``options_of`` completes them for one host.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    servers: Sequence[tuple[str, Sequence[int]]] = ()
    extension: Extension = NO_EXTENSION

    def options_of(self, node_rank: int) -> dict[str, Any]:
        """Return the options for the agent of a host, with its number of ranks and its own file for the timeline."""
        timeline = self.timeline
        if timeline is not None and node_rank:
            root, ending = os.path.splitext(timeline)
            timeline = f"{root}.node{node_rank}{ending}"
        return {**self.options, "nproc_per_node": self.placed[node_rank][1], "timeline": timeline}

    @property
    def names(self) -> list[str]:
        """Return the host name of each link: first the hosts with ranks, then those with servers (twice if a host has both)."""
        return [name for name, _ in (*self.placed, *self.servers)]


def is_asked_for(options: argparse.Namespace) -> bool:
    """Return whether the command line asks for a run over several hosts, by ``-H`` or ``--hostfile``.

    Raises:
        UsageError: the command line names no hosts, but has options that need hosts.
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


def named_hosts(options: argparse.Namespace) -> list[Host]:
    """Return the hosts of ``-H`` or ``--hostfile``.

    Raises:
        UsageError: both options are given, or name no hosts.
    """
    named = [host for text in options.hosts or () for host in parse_hosts(text)]
    if options.hostfile is None:
        return named
    if named:
        raise UsageError(explain("-H and --hostfile exclude each other", fix="leave one out"))
    return read_hostfile(options.hostfile)


def plan(found: argparse.Namespace, environ: Mapping[str, str]) -> HostsPlan:
    """Check the options for several hosts, and place ranks and servers on the hosts.

    Args:
        found: the command line, as parsed.
        environ: the launcher's environment, for ``-x``.

    Raises:
        UsageError: hosts, slots, ranks or variables make no sense or contradict each other.
    """
    _check_excluded(found, environ)
    if found.max_restarts < 0:
        raise UsageError(explain("--max-restarts cannot be negative", value=found.max_restarts, fix="leave it out"))
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
    signals = [each for each in signals_of(found.signals_to_handle) if each not in ENDING]
    placed = place(named_hosts(found), _number_of_ranks(found.num_ranks), found.nproc_per_node)
    check_nodes(found, len(placed), len(placed))
    # With keep-survivors each agent replaces its own ranks, within its own limit; otherwise the launcher restarts all ranks.
    is_replaced = found.on_failure == Policy.KEEP_SURVIVORS.value
    of_agents = vars(found) | RENDEZVOUS_DEFAULTS | dict.fromkeys(_OF_THE_LAUNCHER)
    of_agents["max_restarts"] = found.max_restarts if is_replaced else 0
    of_agents["signals_to_handle"] = ",".join(each.name for each in (*ENDING, *signals))
    return HostsPlan(
        placed=placed,
        ssh=ssh.SshOptions(found.ssh_port, found.ssh_identity, found.ssh_config),
        environment=ssh.asked_for(found.exported or (), environ),
        start_timeout_s=timeout_s,
        interface=found.interface,
        master=found.master_addr,
        port=found.master_port or 0,
        timeline=found.timeline,
        max_restarts=0 if is_replaced else found.max_restarts,
        shutdown_timeout_s=found.shutdown_timeout,
        signals=signals,
        options=of_agents,
        servers=place_servers(found.servers, [(host.name, host.slots) for host in spare], [name for name, _ in placed]),
    )


def _check_excluded(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    for name in sorted(_EXCLUDED):
        if getattr(found, name) not in (RENDEZVOUS_DEFAULTS.get(name), ""):
            variable, option = f"PET_{name.upper()}", f"--{name.replace('_', '-')}"
            option = variable if environ.get(variable) else option
            what = f"{option} and -H exclude each other: -H says which nodes there are, and they meet by themselves"
            raise UsageError(
                explain(what, fix=f"leave {option} out; --master-addr, --master-port and --interface are taken")
            )


def _number_of_ranks(text: str | None) -> int | None:
    if text is None or re.fullmatch(r"-?[0-9]{1,9}", text):
        return None if text is None else int(text)
    fix = "give a number; --nproc-per-node takes gpu, cpu and auto"
    raise UsageError(explain("-np counts the ranks of all hosts", value=text, fix=fix))
