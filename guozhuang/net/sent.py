"""Counts the bytes that this process has sent over the network, and the time in which it was sending."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from guozhuang.watch.processes import has_proc, open_descriptors

# Offsets in struct tcp_info of the kernel's header linux/tcp.h; its fields never move, new ones are appended.
_NOTSENT_OFFSET = 144  # u32 tcpi_notsent_bytes: bytes that the process has written and the kernel has not yet sent
_BUSY_OFFSET = 168  # u64 tcpi_busy_time: microseconds in which something was under way (since Linux 4.10)
_SENT_OFFSET = 200  # u64 tcpi_bytes_sent, then u64 tcpi_bytes_retrans (since Linux 4.19)
_TCP_INFO_BYTES = 512


def _open_sockets() -> Iterator[tuple[socket.socket, bytes]]:
    """Yield a duplicate of each open TCP socket of this process with the kernel's tcp_info about it; nothing but on Linux."""
    for descriptor, target in open_descriptors().items() if has_proc() else ():
        if not target.startswith("socket:"):
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as own:
                if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
                    yield own, own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # the socket was closed since it was listed, or is no TCP socket
            continue


def tcp_sent_bytes() -> int | None:
    """Count the payload bytes that this process has written to its open TCP sockets, without retransmissions.

    Returns:
        The sum over the sockets, or None if the system does not report it (not Linux, or older than 4.19).
    """
    if not has_proc():
        return None
    total = 0
    for _, info in _open_sockets():
        if len(info) < _SENT_OFFSET + 16:
            return None
        sent, again = struct.unpack_from("=QQ", info, _SENT_OFFSET)
        (waiting,) = struct.unpack_from("=I", info, _NOTSENT_OFFSET)
        total += sent - again + waiting
    return total


def tcp_links() -> dict[tuple[str, str], tuple[int, int]]:
    """Return what this process has sent so far from each of its addresses to each address of others.

    Returns:
        Bytes, and microseconds in which something was under way, by (own address, peer's address); without loopback, and empty
        where the system does not report it. Sockets that were closed since are not in it.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for own, info in _open_sockets():
        if len(info) < _SENT_OFFSET + 16:
            return {}
        try:
            here, there = own.getsockname()[0], own.getpeername()[0]
        except OSError:  # it listens, or is not connected any more
            continue
        if not here.startswith(("127.", "::1")):
            (busy_us,) = struct.unpack_from("=Q", info, _BUSY_OFFSET)
            (sent,) = struct.unpack_from("=Q", info, _SENT_OFFSET)
            before = found.get((here, there), (0, 0))
            found[here, there] = (before[0] + sent, before[1] + busy_us)
    return found
