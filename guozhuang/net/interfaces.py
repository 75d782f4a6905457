"""Choice of the network interface of this node that leads to another node, and the variables that make others use it.

By default gloo listens at the address of the host's name, which may be loopback or missing, and NCCL takes
the first interface it finds; across nodes both may then wait for a peer that cannot connect.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.errors import UsageError, WorldError, explain

# The environment variables from which gloo, NCCL and torch RPC (TensorPipe) read the name of the network interface to use.
GLOO, NCCL, RPC = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
# Bridges that container and VM managers create within one node. br0 and the like are not listed: they may lead to the network.
_LOCAL_BRIDGE = re.compile(r"docker\d+|virbr\d+|lxcbr\d+|lxdbr\d+|podman\d+|cni-podman\d+|br-[0-9a-f]{12}")
# Any port will do: connecting a datagram socket sends nothing, it only makes the kernel choose a route.
_ANY_PORT = 9
LOOPBACK, LOOPBACK_NAMES = "127.0.0.1", ("lo", "lo0")
# What gloo and NCCL write when they cannot reach a peer or listen for it.
_ABOUT_INTERFACES = re.compile(r"(?i)connect|interface|address|socket|network|route|timed? ?out")
# Addresses reserved for documentation; used only to look up the kernel's default route, nothing is sent.
_SOMEWHERE = ("198.51.100.1", "2001:db8::1")
_log = logging.getLogger("guozhuang")


def is_about_interfaces(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL may come from the choice of the network interface, judged by its text."""
    return _ABOUT_INTERFACES.search(str(error)) is not None


@dataclass(frozen=True)
class Interface:
    """A network interface of this node, and one address of this node on it."""

    name: str
    address: str


def addresses() -> dict[str, list[str]]:
    """Return the addresses of every interface of this node, by its name, IPv4 before IPv6; [] if it has none.

    Link-local IPv6 addresses carry their interface, as in ``fe80::1%eth0``.
    """
    import psutil

    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        known = [e for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        known.sort(key=lambda entry: entry.family != socket.AF_INET)
        found[name] = [str(entry.address) for entry in known]
    return found


def is_local_bridge(name: str) -> bool:
    """Return whether an interface of this name leads to containers or virtual machines of its own node only."""
    return _LOCAL_BRIDGE.fullmatch(name) is not None


def is_reachable(address: str) -> bool:
    """Return whether other nodes may reach an address of this node: it is neither loopback nor link-local."""
    parsed = ipaddress.ip_address(_plain(address))
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def is_address(host: str) -> bool:
    """Return whether ``host`` is an IPv4 or IPv6 address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def own_address_towards(host: str) -> str:
    """Return the source address of packets from this node to ``host``, of IPv4 if there is one; nothing is sent.

    Args:
        host: a name, or an IPv4 or IPv6 address.

    Raises:
        WorldError: the name does not resolve, or there is no route.
    """
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        fix = "give its address, or put the name into DNS or /etc/hosts of this node"
        raise WorldError(explain(f"the name of the host cannot be resolved: {error}", value=host, fix=fix)) from error
    reason: OSError | None = None
    for family, kind, protocol, _, target in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as asking:
                asking.connect(target)
                return str(asking.getsockname()[0])
        except OSError as error:
            reason = reason or error
    what = f"this node ({socket.gethostname()}) has no route to the host: {reason}"
    raise WorldError(explain(what, value=host, fix="check its network, or give another address"))


def is_own(address: str) -> bool:
    """Return whether an address belongs to this node; every loopback address does."""
    if is_loopback(address):
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # only an address of this node can be bound
    except OSError:
        return False
    return True


def holding(address: str) -> Interface | None:
    """Return the interface that has this address; None if no interface of this node has it."""
    wanted, found = _plain(address), addresses()
    owners = [name for name, known in found.items() if wanted in map(_plain, known)]
    if not owners and is_loopback(address):  # 127.0.1.1 works though no interface lists it
        owners = [name for name in LOOPBACK_NAMES if name in found]
    return Interface(owners[0], address) if owners else None


def towards(host: str) -> Interface:
    """Return the interface of this node through which packets to ``host`` leave, with this node's address on it.

    For an address of this node itself, return the interface that has this address (and not loopback, which the kernel uses),
    because other nodes connect to it there.

    Raises:
        WorldError: the name does not resolve, there is no route, or the route's address is on no interface.
    """
    own = own_address_towards(host)
    found = holding(own)
    if found is None:
        what = f"packets to {host} leave from the address {own}, which no interface of this node has"
        raise WorldError(explain(what, fix="name the interface by --interface"))
    return found


def named(name: str) -> Interface:
    """Return the interface of this name, with its first address that is not link-local.

    Raises:
        UsageError: there is no such interface, or it has no such address; the text lists the interfaces of this node.
    """
    known = addresses()
    usable = [each for each in known.get(name, []) if not ipaddress.ip_address(_plain(each)).is_link_local]
    if not usable:
        there = ", ".join(f"{n} ({', '.join(a)})" for n, a in sorted(known.items()) if a) or "none with an address"
        what = "has no address" if name in known or name in _names() else "does not exist"
        what = f"network interface {what} on {socket.gethostname()}"
        raise UsageError(explain(what, value=name, fix=f"choose one of those there: {there}"))
    return Interface(name, usable[0])


def variables(interface: Interface, environ: Mapping[str, str], *, override: bool = False) -> dict[str, str]:
    """Return the variables that make gloo, NCCL and torch RPC use this interface, without those that ``environ`` has.

    Args:
        interface: the interface to use.
        environ: the environment that the ranks would get.
        override: return also variables that are set, because the user named the interface on the command line.
    """
    # NCCL reads a bare name as a prefix; "=" makes it exact, and is needed only if another interface's name begins with it.
    is_prefix = any(other != interface.name and other.startswith(interface.name) for other in _names())
    wanted = {GLOO: interface.name, NCCL: f"={interface.name}" if is_prefix else interface.name, RPC: interface.name}
    return {key: value for key, value in wanted.items() if override or not environ.get(key)}


def variables_towards(master: str, environ: Mapping[str, str], asked: str | None = None) -> dict[str, str]:
    """Return the environment variables that a node sets for its ranks, so that gloo, NCCL and torch RPC reach the other nodes.

    Args:
        master: name or address of the node that all other nodes reach; on that node itself its own.
        environ: the environment that the ranks would get; variables that the user set in it keep their values.
        asked: the interface that the user named (``--interface``); None: the one that routes to ``master``.

    Raises:
        UsageError: the interface ``asked`` does not exist or has no address.
        WorldError: no route leads to ``master``.
    """
    if asked is not None:
        return variables(named(asked), environ, override=True)
    if environ.get(GLOO) and environ.get(NCCL):
        # The user has chosen; torch RPC follows gloo, whose variable may list several interfaces.
        return {} if environ.get(RPC) else {RPC: environ[GLOO].partition(",")[0]}
    return variables(towards(master), environ)


def variables_of_ranks(host: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a rank lets gloo, NCCL and torch RPC reach the others; {} if no route is known.

    Args:
        host: rank 0's host, if the ranks are on several nodes: they use the interface that routes to it. None: all ranks are
            on this node, and loopback is enough.
        environ: the environment of this process.
    """
    if host is not None:
        try:
            return variables_towards(host, environ)
        except WorldError as error:
            _log.debug("no interface chosen: %s", error)
    elif loopback := _names().intersection(LOOPBACK_NAMES):
        return variables(Interface(loopback.pop(), LOOPBACK), environ)
    return {}


def _names() -> set[str]:
    return {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()


def _plain(address: str) -> str:
    return str(ipaddress.ip_address(address.partition("%")[0]))


def listen_at(address: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at an address of this node, of IPv4 or IPv6; ``port`` 0: any free port.

    Raises:
        OSError: the address is not one of this node, or the port is taken or not open to this user.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    where = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0][4]  # keeps a link-local address's zone
    return socket.create_server(where, family=family, backlog=backlog)


def own_address(hints: Sequence[str], others: Sequence[str]) -> str:
    """Return the address by which other nodes reach this node; loopback only if no other address is found.

    Args:
        hints: names and addresses by which other nodes may know this node.
        others: names of some of the other nodes.

    Bridges to containers and virtual machines are left out: other nodes cannot reach them, and many nodes have the same one.
    """
    mine, inner = _own_addresses()
    for hint in hints:
        known = [each for each in resolve(hint) if not is_loopback(each) and each not in inner]
        found = next((each for each in known if each in mine), None)
        if found is not None:
            return found
        if known:
            break  # another node's address, or a translated one: do not try less likely hints, which may match by chance
    # A node's name may mean loopback on the node itself (Debian's 127.0.1.1): take the address of the route to other nodes.
    for other in (*others, *hints):
        with contextlib.suppress(WorldError):
            address = own_address_towards(other)
            if not is_loopback(address) and address not in inner:
                return address
    if any(is_address(hint) and is_loopback(hint) for hint in hints):
        return LOOPBACK  # the other ranks connect to loopback: all "nodes" are on this machine
    return _outward_address(mine)


def resolve(host: str) -> list[str]:
    """Return the addresses that a name resolves to on this node, IPv4 first; empty if it cannot be resolved."""
    try:
        return look_up(host)
    except OSError:
        return []


def look_up(host: str) -> list[str]:
    """Return the addresses of a name as ``resolve`` does, but raise the system's OSError if the name cannot be resolved."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted(dict.fromkeys(str(info[4][0]) for info in found), key=lambda a: ":" in a)


def _own_addresses() -> tuple[set[str], set[str]]:
    """Return the addresses of this node that other nodes may reach, and those of bridges within this node."""
    mine: set[str] = set()
    inner: set[str] = set()
    for name, known in addresses().items():
        (inner if is_local_bridge(name) else mine).update(known)
    return mine, inner


def _outward_address(mine: set[str]) -> str:
    """Return the source address of the default route; without a route the first non-loopback address, IPv4 before IPv6."""
    for somewhere in _SOMEWHERE:
        with contextlib.suppress(WorldError):
            return own_address_towards(somewhere)
    return min(filter(is_reachable, mine), key=lambda each: (":" in each, each), default=LOOPBACK)


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same node can reach the address."""
    return ipaddress.ip_address(_plain(address)).is_loopback
