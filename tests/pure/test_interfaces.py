"""The interface that leads to another node, on this machine's own network."""

from __future__ import annotations

import socket

import pytest

from guozhuang.errors import UsageError, WorldError
from guozhuang.net import interfaces
from guozhuang.net.interfaces import GLOO, NCCL, RPC, Interface

LOOPBACK = next((name for name in ("lo", "lo0") if name in interfaces._names()), "")
pytestmark = pytest.mark.skipif(not LOOPBACK, reason="needs a loopback interface by the name of lo or lo0")


def test_the_route_to_this_machine_is_loopback() -> None:
    assert interfaces.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interfaces.towards("127.0.0.1") == Interface(LOOPBACK, "127.0.0.1")
    assert interfaces.towards("localhost").name == LOOPBACK
    assert "127.0.0.1" in interfaces.addresses()[LOOPBACK]


def test_every_address_belongs_to_its_interface() -> None:
    for name, known in interfaces.addresses().items():
        for address in known:
            found = interfaces.holding(address)
            assert found is not None and address in interfaces.addresses()[found.name], (name, address)
    assert interfaces.holding("192.0.2.77") is None


def test_bridges_within_a_node_are_known_by_their_names() -> None:
    inner = ("docker0", "virbr1", "lxcbr0", "lxdbr0", "podman0", "cni-podman0", "br-0123456789ab")
    assert all(map(interfaces.is_local_bridge, inner))
    assert not any(map(interfaces.is_local_bridge, ("eth0", "br0", "ib0", "lo", "docker", "br-lan", "xdocker0")))


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as asking:
            asking.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 on loopback")
    assert interfaces.towards("::1") == Interface(LOOPBACK, "::1")


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(WorldError, match=r"cannot be resolved.*nosuch\.invalid"):
        interfaces.towards("nosuch.invalid")


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=rf"does not exist.*'nosuch0'.*{LOOPBACK} \(127\.0\.0\.1"):
        interfaces.named("nosuch0")
    assert interfaces.named(LOOPBACK).address == "127.0.0.1"


def test_variables_are_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_names", lambda: {"eth0", "lo"})
    eth0 = Interface("eth0", "10.0.0.1")
    assert interfaces.variables(eth0, {}) == {GLOO: "eth0", NCCL: "eth0", RPC: "eth0"}
    assert interfaces.variables(eth0, {NCCL: "ib"}) == {GLOO: "eth0", RPC: "eth0"}
    assert interfaces.variables(eth0, {NCCL: "ib"}, override=True) == {GLOO: "eth0", NCCL: "eth0", RPC: "eth0"}
    monkeypatch.setattr(interfaces, "_names", lambda: {"eth0", "eth01"})
    assert interfaces.variables(eth0, {})[NCCL] == "=eth0"  # NCCL would take eth01 as well


def test_variables_towards_a_master() -> None:
    assert interfaces.variables_towards("127.0.0.1", {})[GLOO] == LOOPBACK
    # Both were set: the master's name need not even resolve.
    assert interfaces.variables_towards("nosuch.invalid", {GLOO: "a,c", NCCL: "b"}) == {RPC: "a"}
    assert interfaces.variables_towards("nosuch.invalid", {GLOO: "a", NCCL: "b", RPC: "d"}) == {}
    assert interfaces.variables_towards("nosuch.invalid", {GLOO: "a"}, LOOPBACK)[GLOO] == LOOPBACK


@pytest.mark.parametrize(
    ("text", "is_about"),
    [
        ("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error", True),
        ("[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth7", True),
        ("NCCL WARN Bootstrap : no socket interface found", True),
        ("Connection refused", True),
        ("Wait timeout: Timed out waiting 600000ms for recv operation to complete", True),
        ("Could not find the default backend type 0 for Process Group with name shm.", False),
        ("Unknown c10d backend type MADE_UP", False),
    ],
)
def test_only_errors_that_may_come_from_the_interface_are_about_it(text: str, is_about: bool) -> None:
    assert interfaces.is_about_interfaces(RuntimeError(text)) == is_about
