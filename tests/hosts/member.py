"""One rank of a test with a real launcher: ``python -m tests.hosts.member [CASE]``; prints what it found, a line of JSON.

CASE: nothing; ``late RANK PATH``, where that rank starts when another one has made the file because it waits;
``strangers``, where rank 0's first two ports are taken by services of somebody else, one silent and one that talks nonsense;
``alone``, outside of a step.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import guozhuang as gz
from guozhuang.net import client
from guozhuang.net.meeting_point import PortSequence
from guozhuang.world.discovery import discover
from tests.waiting import LIMIT_S, until


def silent(listener: socket.socket, kept: list[socket.socket]) -> None:
    while True:
        kept.append(listener.accept()[0])


def nonsense(listener: socket.socket, kept: list[socket.socket]) -> None:
    while True:
        kept.append(listener.accept()[0])
        kept[-1].sendall(b"220 mail.example ESMTP\r\n")


def tell_that_it_waits(path: Path, waits: list[bool]) -> None:
    """Make a file once this rank waits so long for others that it looks whether a notice is due."""
    are_due = client.Notices.are_due

    def told(notices: client.Notices) -> bool:
        waits.append(True)
        path.touch()
        return are_due(notices)

    client.FIRST_NOTICE_S = 0.2
    client.Notices.are_due = told  # type: ignore[method-assign]


def main(case: str, arguments: list[str]) -> None:
    inherited = set(listening())  # Hydra leaves sockets of its own open in the ranks
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    identity = discover()
    point = identity.meeting_point
    kept: list[socket.socket] = []
    waits: list[bool] = []
    if case == "late" and identity.rank == int(arguments[0]):
        until(Path(arguments[1]).exists)
    elif case == "late":
        tell_that_it_waits(Path(arguments[1]), waits)
    if case == "strangers" and identity.rank == 0:
        assert isinstance(point, PortSequence)
        for port, serve in zip(point.ports, (silent, nonsense), strict=False):
            listener = socket.create_server(("0.0.0.0", port))
            threading.Thread(target=serve, args=(listener, kept), daemon=True).start()
        ports = {*point.ports[:2]}
        until(lambda: {each.getsockname()[1] for each in kept} >= ports)  # the others knock at the strangers first
    world = gz.init(backend="gloo", timeout_s=LIMIT_S)
    tensor = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(tensor)
    names: list[Any] = [None] * world.size
    dist.all_gather_object(names, os.environ.get("GZ_TEST_RUN", ""))
    told = {name: value for name, value in asdict(world).items() if name != "device"}
    if isinstance(point, PortSequence):
        told |= {"ports": point.ports, "hosts": point.hosts, "note": point.note}
    told |= {
        "sum": tensor.item(),
        "runs": sorted(set(names)),
        "has_waited": bool(waits),
        "threads": torch.get_num_threads(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "listens": sorted(set(listening()) - inherited),
        "doors": [thread.name for thread in threading.enumerate() if thread.name.startswith("guozhuang")],
    }
    dist.barrier()
    gz.shutdown()
    # One write, so that the lines of ranks that share a terminal stay whole.
    os.write(1, f"MEMBER {json.dumps(told)}\n".encode())


def listening() -> list[str]:
    """Address and port, as the kernel writes them, of what this process listens on."""
    owned = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            owned.add(os.readlink(entry.path))
        except OSError:
            continue
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
            address, port = fields[1].split(":")
            found.append(f"{socket.inet_ntoa(bytes.fromhex(address)[::-1])}:{int(port, 16)}")
    return found


def members(printed: str) -> list[dict[str, Any]]:
    """What the ranks of one or more runs found, in the order of run and rank."""
    found = []
    for line in printed.splitlines():
        _, word, text = line.partition("MEMBER ")
        if word:
            found.append(json.loads(text))
    return sorted(found, key=lambda each: (each["runs"], each["rank"]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:])
