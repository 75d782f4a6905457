"""Which way nodes meet: ours for a fixed number of nodes and for one that may change, else one of torch elastic's others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.outer import Outer
from guozhuang.launch.rendezvous.elastic import ElasticMeeting
from guozhuang.launch.rendezvous.fixed import FixedMeeting
from guozhuang.launch.rendezvous.signs import SILENCE_S
from guozhuang.world.identity import LaunchedNode

_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}  # torchrun's
_UNDER_A_LAUNCHER_S = 30.0  # the launcher of several hosts notices before, and names the host as the user does


def meet(
    options: argparse.Namespace, config: LaunchConfig, secret: bytes | None, node: LaunchedNode | None, outer: Outer
) -> RendezvousHandler:
    """Choose the way in which nodes meet, and open what this node keeps for it. See [Note: stores] in stores.py.

    Args:
        options: torchrun's, as parsed.
        config: torch's reading of them.
        secret: that joining needs; None without one.
        node: what srun or mpirun said of this node, where they tell how nodes meet.
        outer: what the launcher of several hosts said.

    Raises:
        UsageError: a port that is taken, an address that cannot be, or a way to meet that is not there.
        WorldError: the way to meet did not answer.
    """
    timeout_s = float(config.rdzv_configs["timeout"])
    if config.rdzv_backend not in _DEFAULT_PORTS or config.rdzv_configs.get("store_type", "tcp") != "tcp":
        return _torchs_meeting(config)
    default_port = 0 if config.max_nodes == 1 else _DEFAULT_PORTS[config.rdzv_backend]
    host, port = options.master_addr.strip("[]"), options.master_port
    if options.rdzv_endpoint:
        try:
            host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port)
        except ValueError as error:
            raise UsageError(explain(str(error), value=options.rdzv_endpoint, fix="give HOST:PORT")) from error
    port = default_port if port is None else port
    if config.max_nodes == 1:
        return FixedMeeting("", port, 0, 1, config.run_id, timeout_s, None, attempt=outer.attempt)
    try:
        if config.rdzv_backend == "static":
            node_rank, num_nodes = options.node_rank, config.max_nodes
            if not 0 <= node_rank < num_nodes:
                what = f"--node-rank is the number of this node, from 0 to {num_nodes - 1} with --nnodes {num_nodes}"
                raise UsageError(explain(what, value=node_rank, fix="give each node its own"))
            point = node.meeting_point if node is not None else None
            return FixedMeeting(
                host,
                port,
                node_rank,
                num_nodes,
                config.run_id,
                timeout_s,
                secret,
                point,
                outer.attempt,
                options.interface,
                _silence_s(config.rdzv_configs) if outer.max_restarts is None else _UNDER_A_LAUNCHER_S,
            )
        return ElasticMeeting(
            _parameters(config), host, port, timeout_s, secret, config.max_restarts, options.interface
        )
    except OSError as error:
        what = f"no store can be opened at {host}:{port}: {error.strerror or error}"
        fix = "give --master-addr (or --rdzv-endpoint) an address of node 0"
        raise UsageError(explain(what, fix=fix)) from error


def _silence_s(settings: Mapping[str, Any]) -> float:
    """How long an agent of a fixed number of nodes may give no sign of life; said as torch elastic has it, or our default."""
    names = ("keep_alive_interval", "keep_alive_max_attempt")
    if not any(name in settings for name in names):
        return SILENCE_S
    return float(settings.get(names[0], 1)) * float(settings.get(names[1], SILENCE_S))


def _torchs_meeting(config: LaunchConfig) -> RendezvousHandler:
    """One of torch elastic's other ways to meet, or of a plug-in."""
    name = config.rdzv_backend
    try:
        return get_rendezvous_handler(_parameters(config))
    except (ValueError, TypeError, ImportError) as error:
        what = f"--rdzv-backend {name} cannot be used: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise UsageError(explain(what, fix="choose c10d or static, or install what it needs")) from error
    except RendezvousError as error:
        what = f"the nodes did not meet by --rdzv-backend {name}: {error}"
        raise WorldError(explain(what, value=config.rdzv_endpoint, fix="check --rdzv-endpoint")) from error


def _parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
