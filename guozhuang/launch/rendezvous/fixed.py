"""The rendezvous of a fixed number of numbered nodes before each attempt; a single node is the simplest case."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from guozhuang.errors import WorldError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.rendezvous.signs import SILENCE_S, OtherNodeError, Others
from guozhuang.launch.rendezvous.stores import (
    LOOPBACK,
    STORE_S,
    find,
    interface_address,
    keep,
    keep_or_share,
    meeting_address,
    reach,
    say_if_open,
    wait_for,
)
from guozhuang.net import interfaces
from guozhuang.net.client import Client, PatientStore
from guozhuang.net.meet import WorldStore, keep_at
from guozhuang.net.meeting_point import PortSequence

_AGENTS = "guozhuang agents"  # prefix of the agents' keys in the store; all other keys belong to the ranks
_NODE_0 = "the agent of node 0"


@dataclass(frozen=True)
class NodeShare:
    """The number of ranks and servers of a node, which the agents exchange in the rendezvous.

    Attributes:
        ranks: how many ranks it starts.
        servers: how many parameter servers it starts.
        role: the ``--role`` of its ranks.
    """

    ranks: int
    servers: int = 0
    role: str = "default"


@dataclass(frozen=True)
class Attempt:
    """The nodes of one attempt, and the address of the store of its ranks.

    Attributes:
        number: how many attempts there were before; the same on all nodes.
        node: the number of this node.
        shares: the shares of all nodes, in the order of their numbers.
        host, port: the address at which the ranks of this node reach the store.
    """

    number: int
    node: int
    shares: Sequence[NodeShare]
    host: str
    port: int

    def place(self, local_rank: int) -> dict[str, int]:
        """Return the rank, size and other numbers of a local rank, by their names in ``Extension.rank_variables``."""
        crosswise = [node for node, share in enumerate(self.shares) if share.ranks > local_rank]
        return {
            "rank": sum(share.ranks for share in self.shares[: self.node]) + local_rank,
            "size": sum(share.ranks for share in self.shares),
            "local_rank": local_rank,
            "local_size": self.shares[self.node].ranks,
            "cross_rank": crosswise.index(self.node),
            "cross_size": len(crosswise),
        }

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that give a rank its place in the world, as torchrun sets them."""
        own, before = self.shares[self.node], self.shares[: self.node]
        place = self.place(local_rank)
        found = {
            "RANK": place["rank"],
            "WORLD_SIZE": place["size"],
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": own.ranks,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": len(self.shares),
            "ROLE_NAME": own.role,
            "ROLE_RANK": sum(share.ranks for share in before if share.role == own.role) + local_rank,
            "ROLE_WORLD_SIZE": sum(share.ranks for share in self.shares if share.role == own.role),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RESTART_COUNT": self.number,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        return {name: str(value) for name, value in found.items()}


class FixedRendezvous:
    """The rendezvous of as many nodes as the command line gives. See [Note: stores] in stores.py.

    Args:
        host: the address of node 0; unused with one node.
        port: the port of node 0; with one node 0 means any free port.
        node_rank: the number of this node.
        num_nodes: number of nodes of the run.
        run_id: distinguishes runs whose agents use the same store.
        timeout_s: how long the rendezvous may take, in seconds.
        secret: the secret that joining needs; None without one.
        point: the ports to search instead of ``host`` and ``port``, for agents that srun or mpirun started; else None.
        attempt: how many times earlier agents have started the ranks of this run.
        interface: the network interface that the user named; None: the one that leads to ``host``.
        silence_s: how long an agent may send no heartbeat, in seconds.

    Attributes:
        say: prints a message for the user; the agent replaces it by ``Output.say``, which does not cut lines of ranks.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        node_rank: int,
        num_nodes: int,
        run_id: str,
        timeout_s: float,
        secret: bytes | None,
        point: PortSequence | None = None,
        attempt: int = 0,
        interface: str | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.say: Callable[[str], None] = say
        self._others: Others | None = None
        self._point = point
        self._host, self._port = host, port
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._run_id, self._timeout_s, self._secret = run_id, timeout_s, secret
        self._round, self._first_attempt = 0, attempt
        self._kept: WorldStore | None = None
        self._shared: PatientStore | None = None
        self._silence_s = silence_s
        # Before anything is started: a port that is taken is an error of the command line.
        if num_nodes == 1:
            self._kept = keep(LOOPBACK, port)
        elif node_rank == 0 and point is not None:
            self._kept = keep_at(point, STORE_S)
        elif node_rank == 0:
            self._kept = keep_or_share(interface_address(host, interface), port, secret)
            say_if_open(self._kept, secret)
        else:
            self._host = meeting_address(host, interface)

    def meet(self, share: NodeShare) -> Attempt:
        """Meet the agents of all nodes for the next attempt.

        Args:
            share: the number of ranks and servers of this node.

        Raises:
            WorldError: a node did not join in time, or is lost; the text names it.
        """
        self._round += 1
        if self._num_nodes == 1:
            return self._alone(share)
        if self._others is None:
            self._others = self._find_others()
        assert self._kept is not None and self._shared is not None
        meeting = self._shared.within(str(self._round))
        meeting.while_waiting = self._others.look
        try:
            self._others.begin_round(self._round)  # read by must_restart of other nodes
            shares = self._roll_call(meeting, share)
            self._kept.remove_note()
            if self._round > 1:
                self._forget(meeting)
        except dist.DistNetworkError as error:
            raise OtherNodeError(self._others.who_is_gone()) from error
        return Attempt(self.attempt, self._node_rank, shares, *self._kept.local)

    def _find_others(self) -> Others:
        """Connect to the store of node 0, and start to send heartbeats there."""
        if self._kept is None and self._point is not None:
            self._kept = find(self._point, self._node_rank, self._timeout_s)
        elif self._kept is None:
            self._kept = reach(self._host, self._port, self._secret, self._timeout_s, _NODE_0)
        prefix, answers = f"{_AGENTS}/{self._run_id}/", Client(self._silence_s)
        self._shared = PatientStore(self._kept.store, prefix, answers, num_pollers=self._num_nodes)
        where = "" if self._kept.host == LOOPBACK else f" ({self._kept.host}:{self._kept.port})"
        others = Others(
            self._shared, self._node_rank, self._num_nodes, _NODE_0 + where, self._node_rank == 0, self._silence_s
        )
        others.begin()
        return others

    def _alone(self, share: NodeShare) -> Attempt:
        if self._kept is None or self._round > 1:
            self.close()
            self._kept = keep(LOOPBACK, 0)
        # MASTER_ADDR is the usual name "localhost" if that name resolves to 127.0.0.1 alone.
        name = "localhost" if interfaces.resolve("localhost") == [LOOPBACK] else LOOPBACK
        return Attempt(self.attempt, 0, [share], name, self._kept.local[1])

    def _roll_call(self, meeting: PatientStore, share: NodeShare) -> list[NodeShare]:
        """Wait for every node, in short steps so that a signal can interrupt it; return the shares of all nodes."""
        if meeting.add(f"claim/{self._node_rank}", 1) > 1:
            what = f"two agents say that they are node {self._node_rank} of {self._num_nodes}"
            raise WorldError(explain(what, fix="give each its own --node-rank; end agents of an earlier run"))
        meeting.set(f"here/{self._node_rank}", json.dumps(dataclasses.asdict(share)))
        keys = [f"here/{node}" for node in range(self._num_nodes)]
        if not meeting.exist_within(keys, self._timeout_s):
            missing = [node for node, key in enumerate(keys) if not meeting.check([key])]
            raise WorldError(_who_is_missing(missing, self._num_nodes, self._timeout_s))
        return [NodeShare(**json.loads(text)) for text in meeting.multi_get(keys)]

    def _forget(self, meeting: PatientStore) -> None:
        """Remove the keys of the last attempt's ranks from the store. They have all ended, since every agent has joined."""
        if self._node_rank == 0:
            whole = meeting.whole
            for key in whole.list_keys():
                if not key.startswith(f"{_AGENTS}/"):
                    whole.delete_key(key)
            meeting.set("forgotten", "1")
        wait_for(meeting, "forgotten", self._timeout_s, _NODE_0)

    @property
    def attempt(self) -> int:
        """Return how many times ranks were started before; the same on all nodes."""
        return self._first_attempt + self._round - 1

    def give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Report to the other nodes that this one aborts the run, and why; see ``Others.give_up``."""
        return None if self._others is None else self._others.give_up(text, code, is_reaction)

    def are_all_done(self) -> bool:
        """Report that the ranks of this node have ended with 0; return whether the ranks of all nodes have.

        Raises:
            OtherNodeError: another node aborted the run, or is lost.
        """
        return self._others is None or self._others.are_done(str(self._round))

    def must_restart(self) -> bool:
        """Return whether another node restarts its ranks, so that all nodes have to restart theirs.

        Raises:
            OtherNodeError: another node aborted the run, or is lost.
        """
        if self._others is None:
            return False
        self._others.look()
        return self._others.round > self._round

    def close(self) -> None:
        """Close the store after the other nodes have read the last messages."""
        if self._others is not None:
            self._others.close()
        if self._shared is not None:
            self._shared.close()
        if self._kept is not None:
            self._kept.close()
        self._shared = self._others = self._kept = None


def _who_is_missing(missing: Sequence[int], num_nodes: int, timeout_s: float) -> str:
    names = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    what = f"{len(missing)} of {num_nodes} nodes did not come within {timeout_s:g} s: {names}"
    return explain(what, fix="look at the output of their agents, and check --node-rank and --nnodes of each")
