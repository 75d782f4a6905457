"""Open or reach the store of the rendezvous at the address that torchrun's options give."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.rendezvous.agents import SILENCE_S
from guozhuang.launch.rendezvous.fixed import STORE_S, FixedRendezvous, meeting_point, say_if_open
from guozhuang.launch.rendezvous.members import nodes
from guozhuang.launch.request import Request
from guozhuang.net import interfaces
from guozhuang.net import store as stores
from guozhuang.net.interfaces import LOOPBACK
from guozhuang.net.meet import WorldStore, join, keep
from guozhuang.net.meeting_point import MeetingPoint

if TYPE_CHECKING:
    from guozhuang.launch.options.plan import Plan

_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}  # rendezvous backend -> torchrun's default port
# Seconds for which an agent may be silent under the launcher of several hosts, which notices a lost host earlier than that.
_UNDER_A_LAUNCHER_S = 30.0


def open_fixed(plan: Plan, config: LaunchConfig, request: Request) -> FixedRendezvous:
    """Open this node's side of the rendezvous of a fixed number of nodes. See [Note: stores] in fixed.py.

    Args:
        plan: the checked options of the command line.
        config: the options as torch parsed them.
        request: options of the program that started this agent.

    Raises:
        UsageError: the port is taken, or no store can be opened at the address.
    """
    options, num_nodes = plan.elastic, config.max_nodes
    timeout_s = float(config.rdzv_configs["timeout"])
    host, port, port_option = _endpoint(options, 0 if num_nodes == 1 else _DEFAULT_PORTS[config.rdzv_backend])
    if num_nodes == 1:
        point = MeetingPoint(LOOPBACK, port, port_option=port_option)
        return FixedRendezvous(point, 0, 1, config.run_id, timeout_s, request.attempt)
    if not 0 <= options.node_rank < num_nodes:
        what = f"--node-rank is the number of this node, from 0 to {num_nodes - 1} with --nnodes {num_nodes}"
        raise UsageError(explain(what, value=options.node_rank, fix="give each node its own"))
    given = plan.node.meeting_point if plan.node is not None else None
    members = request.members
    if members is not None:
        port_option = members.port_option or port_option
    return FixedRendezvous(
        given or meeting_point(host, port, plan.secret, options.interface, port_option),
        None if members is not None and members.takes_next else options.node_rank,
        num_nodes,
        config.run_id,
        timeout_s,
        attempt=request.attempt,
        silence_s=_silence_s(config.rdzv_configs) if request.max_restarts is None else _UNDER_A_LAUNCHER_S,
        members=members,
    )


def open_for_torch(plan: Plan, config: LaunchConfig) -> WorldStore:
    """Open or reach the c10d store for the rendezvous of torch elastic's own agents; its address is written to ``config``.

    Args:
        plan: the checked options of the command line.
        config: the options as torch parsed them; missing addresses are filled in.

    Raises:
        UsageError: the port is taken, or no store can be opened at the address.
        WorldError: no store could be reached in time.
    """
    options = plan.elastic
    host, port, port_option = _endpoint(options, _DEFAULT_PORTS["c10d"])
    point = meeting_point(host, port, plan.secret, options.interface, port_option)
    asked = str(config.rdzv_configs.get("is_host", "")).lower()
    is_keeper = _is_this_node(host) if not asked else asked in ("1", "true", "t", "yes", "y")
    kept = _keep_or_join(point, is_keeper, float(config.rdzv_configs["timeout"]), is_sure=bool(asked))
    here, port = kept.local
    config.rdzv_endpoint = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
    config.rdzv_configs["is_host"] = "false"
    # Torch publishes this address as MASTER_ADDR if rank 0 is on this node.
    config.local_addr = config.local_addr or stores.listening_address(point)
    return kept


def _keep_or_join(point: MeetingPoint, is_keeper: bool, timeout_s: float, is_sure: bool) -> WorldStore:
    if not is_keeper:
        return join(point, None, timeout_s, who="the store of the agent that keeps it", fix=nodes(1).join_fix)
    try:
        kept = keep(point, STORE_S, warn=say)
    except UsageError:
        if is_sure:
            raise
        # The port is taken; another agent of this node may keep the store there, so join that store.
        here = replace(point, host=stores.listening_address(point))
        return join(here, None, 5.0, who="the store of the agent that keeps the port", fix=nodes(1).join_fix)
    say_if_open(kept, point.secret)
    return kept


def _endpoint(options: argparse.Namespace, default_port: int) -> tuple[str, int, str]:
    """Return the host and the port of the rendezvous, and the name of the option that gives the port."""
    host, port = options.master_addr.strip("[]"), options.master_port
    if options.rdzv_endpoint:
        try:
            host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port)
        except ValueError as error:
            raise UsageError(explain(str(error), value=options.rdzv_endpoint, fix="give HOST:PORT")) from error
    option = "--rdzv-endpoint" if options.rdzv_endpoint else "--master-port"
    return host, default_port if port is None else port, option


def _silence_s(settings: Mapping[str, Any]) -> float:
    """Return how long an agent may send no heartbeat, in seconds: interval * count of ``--rdzv-conf``, or our default."""
    names = ("keep_alive_interval", "keep_alive_max_attempt")
    if not any(name in settings for name in names):
        return SILENCE_S
    return float(settings.get(names[0], 1)) * float(settings.get(names[1], SILENCE_S))


def _is_this_node(host: str) -> bool:
    return host in (socket.gethostname(), "localhost") or any(map(interfaces.is_own, interfaces.resolve(host)))
