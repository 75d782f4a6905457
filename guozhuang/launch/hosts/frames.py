"""The messages between the launcher of several hosts and the node that each host's supervisor starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.launch.hosts.supervisor import AgentEnded, AgentStarted, HostLacks
from guozhuang.launch.request import RunReport


@dataclass(frozen=True)
class NodeConfig:
    """The launcher's first message to a node: its place in the run, and the options for its agent.

    Attributes:
        host: the name of the host, as the user wrote it.
        node_rank: the index of the node; hosts of servers come after those of ranks.
        num_nodes: how many nodes have ranks.
        num_servers: how many parameter servers the run has.
        serves: the numbers of the parameter servers that this node runs, in the place of ranks.
        interface: the network interface to use; None: the one that leads to the first host.
        secret: the secret of the run, in hexadecimal digits.
        attempt: how many times the launcher has started all ranks before.
        max_restarts: how many times the launcher may restart all ranks.
        terminals: for standard output and standard error: whether it is shown on a terminal, whether marks are coloured.
        options: the options of ``guozhuang run`` for the agent, as parsed; empty for a node of servers.
        extension: the fields of the run's ``Extension``.
    """

    host: str
    node_rank: int
    num_nodes: int
    num_servers: int
    serves: Sequence[int]
    interface: str | None
    secret: str
    attempt: int
    max_restarts: int
    terminals: Sequence[Sequence[bool]]
    options: Mapping[str, Any]
    extension: Mapping[str, Any]


@dataclass(frozen=True)
class NodeReady:
    """A node's message that it is ready for the rendezvous.

    Attributes:
        same: a text that is the same for hosts that are one machine.
        addresses: the addresses of each network interface.
        reached_at: the address at which the launcher's ssh reached the host; None where no ssh was needed.
    """

    same: str
    addresses: Mapping[str, Sequence[str]]
    reached_at: str | None


@dataclass(frozen=True)
class OpenDoors:
    """A request to the first node: open a ``Door`` to the store at each of its addresses; ``port`` 0: any free port."""

    addresses: Sequence[str]
    port: int


@dataclass(frozen=True)
class DoorsOpened:
    """The first node's answer to ``OpenDoors``: address and port of each ``Door``; the reason for each address without one."""

    doors: Sequence[tuple[str, int]]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class TryDoors:
    """A request to the other nodes: try to connect to each ``Door`` of the first node, given by address and port."""

    doors: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class DoorsTried:
    """A node's answer to ``TryDoors``: for each ``Door`` the reason why the node did not reach it; "" if it did."""

    reasons: Sequence[str]


@dataclass(frozen=True)
class UseDoor:
    """The request to all nodes that ends the rendezvous: reach the store of the run through the ``Door`` at this address."""

    host: str
    port: int


@dataclass(frozen=True)
class RanksFinished:
    """A node's message that its ranks have ended with 0; its agent now waits for the ranks of the other nodes."""


@dataclass(frozen=True)
class ServerEnded:
    """A node's message that one of its parameter servers ended before the ranks; ``how`` is a sentence about that."""

    how: str


@dataclass(frozen=True)
class NodeRefused:
    """A node's message that it cannot take part in the run; ``why`` is the text of the error."""

    why: str


TO_NODE = (NodeConfig, OpenDoors, TryDoors, UseDoor)
TO_LAUNCHER = (
    AgentStarted, AgentEnded, HostLacks, NodeReady, DoorsOpened, DoorsTried, RanksFinished, ServerEnded, NodeRefused,
    RunReport,
)  # fmt: skip
