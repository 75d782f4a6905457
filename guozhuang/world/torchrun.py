"""The identity of ranks of torchrun, ``guozhuang run``, and any launcher that exports the same variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.interfaces import is_address
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.world.identity import Identity
from guozhuang.world.requests import requested_secret
from guozhuang.world.variables import bare_host, number

if TYPE_CHECKING:
    import torch.distributed as dist

_NEEDED = ("RANK", "WORLD_SIZE")
# Any of these without both RANK and WORLD_SIZE is an error: a launcher meant this process to be one of several.
_SIGNS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
# Host names that always mean this machine itself.
_LOCAL_NAMES = {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
_FIX = "start the script with `guozhuang run` or torchrun, which set it, or export it for each process"


def read(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity given by RANK, WORLD_SIZE, LOCAL_RANK and so on; None if none of them is set.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    present = [name for name in (*_NEEDED, *_SIGNS) if name in environ]
    if not present:
        return None
    for name in _NEEDED:
        if name not in environ:
            seen = f"{present[0]}={environ[present[0]]!r}"
            unset = f"unset {', '.join(present)} to run as one process"
            raise UsageError(
                explain(f"environment variable {name} is not set, but {seen} is", fix=f"{_FIX}; or {unset}")
            )
    size = number(environ, "WORLD_SIZE", at_least=1, fix=_FIX)
    assert size is not None
    rank = number(environ, "RANK", below=("WORLD_SIZE", size), fix=_FIX)
    assert rank is not None
    local_size = number(environ, "LOCAL_WORLD_SIZE", at_least=1, below=("WORLD_SIZE + 1", size + 1), fix=_FIX)
    limit = ("WORLD_SIZE", size) if local_size is None else ("LOCAL_WORLD_SIZE", local_size)
    name = "GUOZHUANG_LOCAL_RANK" if has_virtual_local_rank(environ) else "LOCAL_RANK"
    local_rank = number(environ, name, below=limit, fix=_FIX)
    _check_local(name, rank, size, local_rank, local_size)
    node_rank, num_nodes = _nodes(environ, rank, size, local_rank, local_size)
    return Identity(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        rank=rank,
        size=size,
        local_rank=0 if size == 1 else local_rank,
        local_size=1 if size == 1 else local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        meeting_point=None if size == 1 else _meeting_point(environ, is_one_node=local_size == size),
    )


def store_of_launcher(timeout_s: float = 10.0) -> dist.Store | None:
    """Connect to the store that a launcher keeps for its ranks, as the only rank, whose own store is in memory.

    Returns:
        The store; None if no launcher keeps one, or it does not answer within ``timeout_s``.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from guozhuang.net.meet import join  # imported only when needed

    with contextlib.suppress(UsageError, WorldError):
        return join(_meeting_point(os.environ, is_one_node=True), 0, timeout_s, log_notices=False).store
    return None


def has_virtual_local_rank(environ: Mapping[str, str]) -> bool:
    """Return whether LOCAL_RANK is 0 in all ranks, each of which sees its own device only (``--virtual-local-rank``).

    ``guozhuang run`` then sets GUOZHUANG_LOCAL_RANK to the true local rank.
    """
    return "GUOZHUANG_LOCAL_RANK" in environ and environ.get("LOCAL_RANK") == "0"


def _check_local(name: str, rank: int, size: int, local_rank: int | None, local_size: int | None) -> None:
    if local_rank is not None and local_rank > rank:
        what = f"environment variable {name} is above RANK={rank}, which counts the ranks of all nodes"
        raise UsageError(explain(what, value=str(local_rank), fix=_FIX))
    if local_size == size and local_rank is not None and local_rank != rank:
        what = f"LOCAL_WORLD_SIZE={size} says that all ranks are on one node, but {name} is not RANK={rank}"
        raise UsageError(explain(what, value=str(local_rank), fix=_FIX))


def _nodes(
    environ: Mapping[str, str], rank: int, size: int, local_rank: int | None, local_size: int | None
) -> tuple[int | None, int | None]:
    """Return (node_rank, num_nodes), from torchrun's GROUP_ variables or, if nodes have equally many ranks, by division."""
    num_nodes = number(environ, "GROUP_WORLD_SIZE", at_least=1, below=("WORLD_SIZE + 1", size + 1), fix=_FIX)
    if size == 1:
        return 0, 1
    if num_nodes is not None:
        node_rank = number(environ, "GROUP_RANK", below=("GROUP_WORLD_SIZE", num_nodes), fix=_FIX)
        if local_size is not None and (num_nodes == 1) != (local_size == size):
            what = f"GROUP_WORLD_SIZE={num_nodes} nodes do not fit LOCAL_WORLD_SIZE={local_size} of WORLD_SIZE={size}"
            raise UsageError(explain(what, fix=_FIX))
        if node_rank is not None:
            return node_rank, num_nodes
    if local_size is None or local_rank is None or size % local_size:
        return None, None
    node_rank = rank // local_size
    return (node_rank, size // local_size) if node_rank * local_size + local_rank == rank else (None, None)


def _meeting_point(environ: Mapping[str, str], is_one_node: bool) -> MeetingPoint:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name, "").strip():
            what = f"environment variable {name} is not set, but WORLD_SIZE={environ['WORLD_SIZE']} ranks must meet"
            raise UsageError(explain(what, fix=_FIX))
    port = number(environ, "MASTER_PORT", at_least=1, below=("the number of TCP ports", 65536), fix=_FIX)
    assert port is not None
    host = bare_host(environ["MASTER_ADDR"])
    is_kept_by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A node's own name may mean loopback on that node alone: see [Note: where rank 0 listens] in ``net.store``.
    has_own_name = not (is_address(host) or host.lower() in _LOCAL_NAMES)
    return MeetingPoint(
        host=host,
        port=port,
        is_kept_by_launcher=is_kept_by_launcher,
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        secret=requested_secret(environ),
        is_loopback_meant=is_kept_by_launcher
        or is_one_node
        or not (has_own_name or environ.get("KUBERNETES_SERVICE_HOST")),
    )
