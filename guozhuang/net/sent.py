"""Counts the bytes that this process has sent over the network."""

from __future__ import annotations

import os
import socket
import struct

from guozhuang.watch.processes import has_proc, open_descriptors

# Offsets in struct tcp_info of the kernel's header linux/tcp.h; its fields never move, new ones are appended.
_NOTSENT_OFFSET = 144  # u32 tcpi_notsent_bytes: bytes that the process has written and the kernel has not yet sent
_SENT_OFFSET = 200  # u64 tcpi_bytes_sent, then u64 tcpi_bytes_retrans (since Linux 4.19)
_TCP_INFO_BYTES = 512


def tcp_sent_bytes() -> int | None:
    """Count the payload bytes that this process has written to its open TCP sockets, without retransmissions.

    Returns:
        The sum over the sockets, or None if the system does not report it (not Linux, or older than 4.19).
    """
    if not has_proc():
        return None
    total = 0
    for descriptor, target in open_descriptors().items():
        if not target.startswith("socket:"):
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as own:
                if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # the socket was closed since it was listed, or is no TCP socket
            continue
        if len(info) < _SENT_OFFSET + 16:
            return None
        sent, again = struct.unpack_from("=QQ", info, _SENT_OFFSET)
        (waiting,) = struct.unpack_from("=I", info, _NOTSENT_OFFSET)
        total += sent - again + waiting
    return total
