"""Hold every packet that arrives at this host for a while: ``python delay.py MILLISECONDS``, inside the host.

A stand-in for netem, which not every kernel has. A rule of iptables sends what arrives to queue 0 (network.py makes it); the
packets stay in the kernel, and only their numbers and the verdicts on them cross to here. What arrives is delayed, not what
leaves: a socket that still sees its packets in the host's own queue would send less (TCP small queues).

The process runs before all others of the machine (SCHED_FIFO): where ranks fill the processors a packet would else be late by
whole time slices. It prints "ready" when packets are held.
"""

from __future__ import annotations

import collections
import os
import select
import socket
import struct
import sys
import time

_NETFILTER = 12  # protocol of netlink
_QUEUE_MESSAGES = 3 << 8  # NFNL_SUBSYS_QUEUE
_PACKET, _VERDICT_BATCH, _CONFIG = 0, 3, 2
_REQUEST, _ACKNOWLEDGE = 1, 4
_MAX_PACKETS = 65536


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _send(link: socket.socket, message: int, body: bytes, flags: int = _REQUEST) -> None:
    header = struct.pack("=IHHII", 20 + len(body), _QUEUE_MESSAGES | message, flags, 0, 0)
    link.send(header + struct.pack("!BBH", socket.AF_INET, 0, 0) + body)


def _configure(link: socket.socket, body: bytes) -> None:
    _send(link, _CONFIG, body, _REQUEST | _ACKNOWLEDGE)
    (error,) = struct.unpack_from("=i", link.recv(4096), 16)
    if error:
        raise OSError(-error, f"the kernel refused queue 0 ({os.strerror(-error)})")


def _open() -> socket.socket:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
    link.bind((0, 0))
    link.setsockopt(270, 5, struct.pack("i", 1))  # SOL_NETLINK, NETLINK_NO_ENOBUFS
    link.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)  # SO_RCVBUFFORCE
    _configure(link, _attribute(1, struct.pack("!BBH", 1, 0, socket.AF_INET)))  # bind
    _configure(link, _attribute(2, struct.pack("!IB", 0, 1)))  # copy nothing of the packet but its number
    _configure(link, _attribute(3, struct.pack("!I", _MAX_PACKETS)))
    whole = struct.pack("!I", 4)  # packets as large as they come, not cut into frames
    _configure(link, _attribute(4, whole) + _attribute(5, whole))
    link.setblocking(False)
    return link


def _arrived(link: socket.socket) -> list[int]:
    """The numbers of the packets that came since the last call; they rise."""
    found = []
    while True:
        try:
            messages = link.recv(65536)
        except BlockingIOError:
            return found
        at = 0
        while at < len(messages):
            length, kind = struct.unpack_from("=IH", messages, at)
            if kind == _QUEUE_MESSAGES | _PACKET:  # its first attribute begins with the number
                found.append(struct.unpack_from("!I", messages, at + 24)[0])
            at += (length + 3) & ~3


def hold(delay_s: float) -> None:
    """Let each packet go ``delay_s`` after it came; for ever."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    link = _open()
    print("ready", flush=True)
    held: collections.deque[tuple[float, int]] = collections.deque()
    while True:
        # select, and not poll: its time-out is in microseconds, and a packet that comes in the meantime ends it.
        select.select([link], [], [], max(0.0, held[0][0] - time.monotonic()) if held else None)
        now = time.monotonic()
        held.extend((now + delay_s, number) for number in _arrived(link))
        last = None
        while held and held[0][0] <= now:
            last = held.popleft()[1]
        if last is not None:
            _send(link, _VERDICT_BATCH, _attribute(2, struct.pack("!II", 1, last)))  # accept all up to this number


if __name__ == "__main__":
    hold(float(sys.argv[1]) / 1e3)
