"""From ranks that have met to a process group: compare their settings, try the ways between nodes, connect them.

[Note: why init cannot be silent for ever] PyTorch's backends make connections to ports that the kernel chooses, after the
ranks have met at a port that the user knows. A firewall that passes only the latter drops those connections, and then gloo
waits for a multiple of its time-out inside C++, where Python handles no signal, and names nobody. So, where there are several
nodes, each rank first opens such a port at the address that gloo or NCCL will use, and tries to connect to that of one rank
of every other node. All ranks tell each other what they could not reach, and raise the same error. The group itself is made
in a thread with a time limit; when it has passed, a rank names those that are not connected. Ranks with different
settings would wait for each other in different places (another backend, a strategy with other collectives), so settings
are part of the roll call and are compared before.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, UsageError, WorldError, explain, rank_table
from guozhuang.units import merged, ranks_text
from guozhuang.world.devices import choose, device_to_bind, num_cuda
from guozhuang.world.identity import Identity
from guozhuang.world.requests import (
    requested_attention,
    requested_audit,
    requested_bind,
    requested_bucket_cap_mb,
    requested_gloo_interface,
    requested_groups,
    requested_hang_timeout,
    requested_layout,
    requested_microbatches,
    requested_nccl_interface,
    requested_proof,
    requested_schedule,
    requested_servers,
    requested_slow_rank,
    requested_strategy,
)
from guozhuang.world.versions import newer_than_tried

# Modules about stores are imported inside the functions that need them, to keep ``import guozhuang`` cheap.
if TYPE_CHECKING:
    from guozhuang.net.meet import RankCard

_WAY_S = 10.0  # seconds for a connection to another node: a lost first packet is sent again after 1, 3 and 7 s
_AT_ONCE = 128  # connections that a rank tries at a time, fewer than a process may have open files
_GRACE_S = 2.0  # seconds beyond the time limit of a group's own roll calls, whose errors say more
_MOST_NAMED = 16
_DEFAULT = ""  # stands for the default backend of CPU ranks, which follows from the nodes of all ranks


def settings(backend: str | None, device: str | torch.device | None) -> dict[str, str]:
    """Return what must be equal on all ranks of a run, by the name that users know it by.

    Args:
        backend, device: as for ``init``, with the backend of the command line where the script gave none.

    Raises:
        UsageError: a variable of ours holds a value that cannot work.
    """
    servers, hang_timeout = requested_servers(), requested_hang_timeout()
    wanted, chosen = choose(backend, device, 0, num_cuda())
    return {
        "guozhuang": importlib.metadata.version("guozhuang"),
        "PyTorch": torch.__version__.partition("+")[0],  # without the part that tells CPU builds from CUDA's
        "backend": _DEFAULT if backend is None and chosen.type == "cpu" else wanted.lower(),
        "--strategy": requested_strategy() or "",
        "--layout": requested_layout() or "",
        "--microbatches": str(requested_microbatches() or ""),
        "--schedule": requested_schedule() or "",
        "--attention": requested_attention() or "",
        "--no-proof": "" if requested_proof() else "given",
        "--audit": str(requested_audit() or ""),
        "--groups": str(requested_groups()),
        "--bucket-cap-mb": f"{requested_bucket_cap_mb() or 0:g}",
        "--servers": str(servers[0] if servers else 0),
        "--bind": requested_bind(),
        "--slow-rank": requested_slow_rank(),
        "--hang-timeout": "" if hang_timeout is None else str(hang_timeout),
    }


def check_settings(cards: Sequence[RankCard], rank: int, cpu_backend: str) -> None:
    """Raise unless all ranks have equal settings; every rank raises the same, because all have the same cards.

    Args:
        cards: the cards of the roll call, by rank.
        rank: this process.
        cpu_backend: the default backend of ranks that compute on CPUs.

    Raises:
        MismatchError: settings differ; the text has a table of them, with the ranks of each value.
    """
    told = [dict(card.settings) for card in cards]
    for each in told:
        each["backend"] = each.get("backend") or cpu_backend
    rows = []
    for name in dict.fromkeys(name for each in told for name in each):
        values = merged({number: each.get(name, "unknown") or "not given" for number, each in enumerate(told)})
        if len(values) > 1:
            rows += [(name, value, ranks_text(ranks)) for ranks, value in values[:_MOST_NAMED]]
    if rows:
        what = f"ranks have different settings ({', '.join(dict.fromkeys(row[0] for row in rows))})"
        fix = "install the same versions on all nodes, and start all ranks with the same options and variables"
        table = rank_table(("setting", "value", "ranks"), rows)
        raise MismatchError(f"{explain(what, rank=rank, fix=fix)}\n{table}")


def check_ways(store: dist.Store, identity: Identity, hosts: Sequence[str], backend: str, timeout_s: float) -> None:
    """Raise on every rank if a rank cannot connect to a rank of another node. Every rank must call it.

    Args:
        store: a store that only this call uses.
        identity: who this rank is.
        hosts: the identity of each rank's node, by rank.
        backend: the backend that is to connect the ranks.
        timeout_s: limit in seconds for waiting for the other ranks; a connection has at most 10 s.

    Raises:
        WorldError: ranks cannot be reached; the text names who cannot reach whom, with address and port, and why.
    """
    if len(set(hosts)) == 1:
        return
    from guozhuang.net import interfaces
    from guozhuang.net.meet import roll_call

    rank, size = identity.rank, identity.size
    name = requested_nccl_interface() if backend.lower() == dist.Backend.NCCL else requested_gloo_interface()
    with contextlib.ExitStack() as open_:
        mine = ""
        # Names that we cannot read (NCCL takes patterns too) are left to the backend. So are interfaces that have link-local
        # addresses only: a peer must add its own interface to such an address, and our connection does not tell if gloo does.
        with contextlib.suppress(UsageError, OSError):
            if name is not None:
                listener = interfaces.listen_at(interfaces.named(name.split(",")[0].lstrip("=")).address, 0, size)
                open_.enter_context(listener)
                mine = json.dumps(listener.getsockname()[:2])
        cards = roll_call(dist.PrefixStore("ways", store), rank, size, timeout_s, mine)
        addresses = {number: tuple(json.loads(card.note)) for number, card in enumerate(cards) if card.note}
        wanted = {number: addresses[number] for number in _one_of_each_node(hosts, rank) if number in addresses}
        limit_s = min(_WAY_S, timeout_s)
        why_not = _unreached(wanted, limit_s)
        text = json.dumps(dict(sorted(why_not.items())[:_MOST_NAMED]))
        cards = roll_call(dist.PrefixStore("ways found", store), rank, size, timeout_s + limit_s, text)
    lines = [
        f"  rank {number} ({addresses.get(number, ('',))[0]}) cannot reach rank {other} at "
        f"{addresses[int(other)][0]}:{addresses[int(other)][1]}: {why}"
        for number, card in enumerate(cards)
        for other, why in json.loads(card.note).items()
    ]
    if lines:
        what = "the ranks met, but some cannot connect to others, which every backend needs"
        fix = (
            "let all TCP ports pass between the nodes of a run (net.ipv4.ip_local_port_range bounds those that are used), "
            f"or set {interfaces.GLOO} and {interfaces.NCCL} to the interface that leads to the other nodes"
        )
        more = [f"  and {len(lines) - _MOST_NAMED} lines more like these"] if len(lines) > _MOST_NAMED else []
        raise WorldError("\n".join([explain(what, rank=rank, fix=fix), *lines[:_MOST_NAMED], *more]))


def _one_of_each_node(hosts: Sequence[str], rank: int) -> list[int]:
    """Return a rank of every other node: not the same one for all ranks of this node, so that all ranks are tried."""
    members: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        members.setdefault(host, []).append(number)
    place = members[hosts[rank]].index(rank)
    return [each[place % len(each)] for host, each in members.items() if host != hosts[rank]]


def _unreached(wanted: Mapping[int, tuple[str, int]], limit_s: float) -> dict[int, str]:
    """Try to connect to all of these addresses; return the reason for each rank to which there was no connection."""
    found: dict[int, str] = {}
    ranks = list(wanted)
    for first in range(0, len(ranks), _AT_ONCE):
        found |= _unreached_of({rank: wanted[rank] for rank in ranks[first : first + _AT_ONCE]}, limit_s)
    return found


def _unreached_of(wanted: Mapping[int, tuple[str, int]], limit_s: float) -> dict[int, str]:
    found: dict[int, str] = {}
    with contextlib.ExitStack() as open_:
        selector = open_.enter_context(selectors.DefaultSelector())
        for rank, (host, port) in wanted.items():
            connection = open_.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            connection.setblocking(False)
            number = connection.connect_ex((host, port))
            if number == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, rank)
            elif number:
                found[rank] = _why_not(number)
        deadline = time.monotonic() + limit_s
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if number := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = _why_not(number)
        silent = f"no answer within {limit_s:g} s, as from behind a firewall"
        return found | {key.data: silent for key in selector.get_map().values()}


def _why_not(number: int) -> str:
    if number == errno.ECONNREFUSED:
        return "refused, though it listens: a firewall, or another host with that address"
    return os.strerror(number)


def make_group(backend: str, store: dist.Store, identity: Identity, timeout_s: float, device: torch.device) -> None:
    """Make the default process group, within a time limit. Every rank must call it.

    It is made in a thread, so that this one handles signals meanwhile. See [Note: why init cannot be silent for ever].

    Args:
        backend: its name.
        store: a store that only this call uses.
        identity: who this rank is.
        timeout_s: limit in seconds, also of each collective of the group.
        device: the device of this rank.

    Raises:
        WorldError: the group was not made in time, or PyTorch could not make it.
    """
    from guozhuang.net import client

    rank, size = identity.rank, identity.size

    def make() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # it holds for one thread
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device_to_bind(backend, device),
        )
        store.set(f"connected/{rank}", "1")

    def still() -> str:
        return f"rank {rank}: backend {backend!r} has not connected the ranks yet" if identity.local_rank == 0 else ""

    try:
        client.attempt(timeout_s + _GRACE_S, make, still)
    except client.OverdueError:
        ranks = _not_connected(store, rank, size)
        what = f"the ranks met, but backend {backend!r} did not connect {ranks_text(ranks)} within {timeout_s:g} s"
        raise WorldError(explain(what, rank=rank, fix="look at the output of those ranks; " + _CHECK)) from None
    except (WorldError, MismatchError):
        raise
    except RuntimeError as error:
        raise _not_made(backend, error, rank) from error


_CHECK = "`guozhuang check -H HOSTS` tells what stands between their hosts"


def _not_connected(store: dist.Store, rank: int, size: int) -> list[int]:
    """Return the ranks whose group is not made; this one, if the store does not tell."""
    from guozhuang.net import client

    def ask() -> list[int]:
        own = store.clone()  # type: ignore[attr-defined]  # the thread that makes the group may be waiting in the other connection
        return [each for each in range(size) if not own.check([f"connected/{each}"])]

    with contextlib.suppress(RuntimeError):
        return client.attempt(_GRACE_S, ask) or [rank]
    return [rank]


def _not_made(backend: str, error: RuntimeError, rank: int) -> WorldError:
    """Return the error for a process group that PyTorch could not make; the advice fits the cause."""
    from guozhuang.net import interfaces

    if interfaces.is_about_interfaces(error):
        what = f"the ranks met, but backend {backend!r} could not connect them: {error}"
        fix = f"set {interfaces.GLOO} or {interfaces.NCCL} to the network interface that leads to the other nodes"
    else:
        what = f"the ranks met, but PyTorch {torch.__version__} could not make their {backend!r} group: {error}"
        fix = newer_than_tried() or "mend what PyTorch's own error names, or try another backend (--backend gloo)"
    return WorldError(explain(what, rank=rank, fix=fix))


def complete(identity: Identity, hosts: list[str]) -> Identity:
    """Return ``identity`` with the fields that the environment did not give filled in from the host of each rank."""
    from guozhuang.net.meet import places

    local_rank, local_size, node_rank, num_nodes = places(hosts, identity.rank) if len(hosts) > 1 else (0, 1, 0, 1)
    return replace(
        identity,
        local_rank=local_rank if identity.local_rank is None else identity.local_rank,
        local_size=local_size if identity.local_size is None else identity.local_size,
        node_rank=node_rank if identity.node_rank is None else identity.node_rank,
        num_nodes=num_nodes if identity.num_nodes is None else identity.num_nodes,
    )
