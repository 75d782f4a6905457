"""How the ranks of a world find each other: a store, and a roll call that says who is missing."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.world.identity import Identity, MeetingPoint

# How often a waiting rank looks whether another one has given up already, and for how long the rank that keeps the
# store leaves it open for the others to read why.
_LOOK_S = 1.0


def open_store(identity: Identity, timeout_s: float) -> dist.Store:
    """Connect to the store of the world; rank 0 starts it where the launcher does not keep one.

    In a world of one the store is in memory and no port is opened. Where the meeting point is a loopback address the
    store listens there only; torch's own would listen on every interface.

    Raises:
        UsageError: the port is taken, or the address is not one of this machine.
        WorldError: nothing that speaks the store's language answered within ``timeout_s``.
    """
    point = identity.meeting_point
    if point is None:
        return dist.HashStore()
    # In its own thread, because a service that accepts the connection and says nothing would hold us for ever.
    answer: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            answer.append(_connect(point, identity.rank == 0 and not point.is_kept_by_launcher, timeout_s))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=connect, name="guozhuang store", daemon=True)
    thread.start()
    # The socket's own time-out comes first (it can take half as long again); this one is for silence.
    thread.join(2 * timeout_s + 1)
    where = f"{point.host}:{point.port} (MASTER_ADDR:MASTER_PORT)"
    fix = "check that rank 0 runs, that both variables are the same on every rank, and that no firewall stands between"
    if not answer:
        what = f"what listens at {where} is no store of PyTorch: it did not answer within {timeout_s:g} s"
        raise WorldError(explain(what, rank=identity.rank, fix="choose another MASTER_PORT"))
    if isinstance(answer[0], UsageError):
        raise answer[0]
    if isinstance(answer[0], Exception):
        what = f"could not reach rank 0's store at {where} within {timeout_s:g} s: {answer[0]}"
        raise WorldError(explain(what, rank=identity.rank, fix=fix)) from answer[0]
    return answer[0]


def _connect(point: MeetingPoint, keeps: bool, timeout_s: float) -> dist.Store:
    limit = datetime.timedelta(seconds=timeout_s)
    if not keeps:
        return dist.TCPStore(point.host, point.port, None, False, limit, wait_for_workers=False)
    address = _loopback_address(point.host)
    try:
        if address is None:
            return dist.TCPStore(point.host, point.port, None, True, limit, wait_for_workers=False)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, point.port), family=family)
        return dist.TCPStore(
            address, point.port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (OSError, dist.DistNetworkError) as error:
        if "in use" not in str(error):
            raise
        fix = "choose another MASTER_PORT, or start with `guozhuang run`, which finds a free one"
        what = f"MASTER_PORT is taken by another process of this machine: {point.host}:{point.port}"
        raise UsageError(explain(what, fix=fix)) from error


def _loopback_address(host: str) -> str | None:
    """The loopback address that ``host`` stands for, IPv4 if it has one; None if other machines can reach it."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    if not found or not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found):
        return None
    return min(found, key=lambda a: ":" in a)


def host_identity() -> str:
    """A text that is equal for processes that share a kernel, a host name and a network, and differs otherwise."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/net"
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(boot.read_text().strip())
        parts.append(str(os.stat(network).st_ino))
    return "/".join(parts)


def roll_call(store: dist.Store, rank: int, size: int, timeout_s: float) -> list[str]:
    """Wait until every rank is here; return the host identity of each, in rank order.

    Every rank must call, with a store (or prefix) that no other call uses.

    Raises:
        UsageError: two processes claim the same rank.
        WorldError: somebody did not come within ``timeout_s``, or the process that keeps the store is gone; the text
            names who is missing. Every rank that waits raises.
    """
    deadline = time.monotonic() + timeout_s
    try:
        if store.add(f"claim/{rank}", 1) > 1:
            what = f"two processes say that they are rank {rank} of {size}"
            text = explain(what, fix="give each process its own RANK; end processes that are left from an earlier run")
            store.set("verdict", text)
            raise UsageError(text)
        store.set(f"host/{rank}", host_identity())
        if store.add("present", 1) == size:
            store.set("complete", "1")
        while not _came(store, "complete", min(_LOOK_S, deadline - time.monotonic())):
            if store.check(["verdict"]):
                raise WorldError(store.get("verdict").decode())
            if time.monotonic() >= deadline:
                _give_up(store, rank, size, timeout_s)
        return [store.get(f"host/{r}").decode() for r in range(size)]
    except dist.DistNetworkError as error:
        what = "the process that keeps the store of the world is gone, so the ranks cannot find each other"
        fix = "look at the output of rank 0 and of the launcher for the first error"
        raise WorldError(explain(what, rank=rank, fix=fix)) from error


def _give_up(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    missing = [r for r in range(size) if not store.check([f"host/{r}"])]
    names = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    what = f"{len(missing)} of {size} ranks did not come within {timeout_s:g} s: {names}"
    fix = "look at their output for the first error, check MASTER_ADDR and MASTER_PORT there, or raise timeout_s"
    text = explain(what, fix=fix)
    store.set("verdict", text)
    if rank == 0:
        time.sleep(1.5 * _LOOK_S)
    raise WorldError(text)


def _came(store: dist.Store, key: str, limit_s: float) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=max(limit_s, 0.001)))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError; a file store says it in a plain RuntimeError
        return False
    return True


def places(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """(local_rank, local_size, node_rank, num_nodes) of ``rank``, from the host identity of each rank.

    Nodes are numbered in the order of their lowest rank.
    """
    nodes = list(dict.fromkeys(hosts))
    here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return here.index(rank), len(here), nodes.index(hosts[rank]), len(nodes)
