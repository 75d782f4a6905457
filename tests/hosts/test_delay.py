"""Links that take their time: what arrives at a host is held for as long as was asked."""

from __future__ import annotations

import os
import sys

import pytest

from tests.hosts.network import Hosts, missing
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(bool(missing(delay=True)), reason=missing(delay=True) or "-")]

_ANSWER = """
import socket
server = socket.create_server(("0.0.0.0", 5999))
print("up", flush=True)
peer, _ = server.accept()
while peer.recv(1):
    peer.send(b"b")
"""
_ASK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5999))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(100):
    start = time.perf_counter()
    peer.send(b"a")
    peer.recv(1)
    times.append(time.perf_counter() - start)
print(1e3 * min(times))
"""


@pytest.mark.parametrize(
    ("delay_ms", "low", "high"),
    [pytest.param(10.0, 20.0, 30.0, marks=pytest.mark.slow), pytest.param(0.5, 1.0, 6.0, marks=pytest.mark.slow)],
)
def test_a_packet_is_under_way_as_long_as_asked(delay_ms: float, low: float, high: float) -> None:
    with Hosts(2, "100mbit", delay_ms) as hosts:
        answers = hosts.start(1, [sys.executable, "-c", _ANSWER], os.environ)
        assert answers.stdout is not None and answers.stdout.readline() == "up\n"
        asks = hosts.start(0, [sys.executable, "-c", _ASK, hosts.address(1)], os.environ)
        least_ms = float(asks.communicate(timeout=LIMIT_S)[0])
    assert low <= least_ms < high, "the quickest of many, which waited for no processor"
