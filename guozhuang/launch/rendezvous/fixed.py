"""A fixed number of nodes, each with its number, meet before each attempt; one node is the simplest case."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from guozhuang.errors import WorldError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.rendezvous.signs import SILENCE_S, OtherNodeError, Others
from guozhuang.launch.rendezvous.stores import (
    LOOPBACK,
    Kept,
    find,
    interface_address,
    keep,
    keep_at,
    keep_or_share,
    meeting_address,
    reach,
    say_if_open,
    wait_for,
)
from guozhuang.net import search
from guozhuang.net.client import Client, PatientStore, look_s
from guozhuang.net.meeting_point import PortSequence

_AGENTS = "guozhuang agents"  # what agents tell each other begins so; the rest of a store is the ranks'
_NODE_0 = "the agent of node 0"


@dataclass(frozen=True)
class NodeShare:
    """What a node brings to an attempt: a frame that the agents exchange when they meet.

    Attributes:
        ranks: how many it starts.
        servers: how many parameter servers it starts.
        role: the ``--role`` of its ranks.
    """

    ranks: int
    servers: int = 0
    role: str = "default"


@dataclass(frozen=True)
class Attempt:
    """The nodes of one attempt, and where its ranks meet.

    Attributes:
        number: how many attempts there were before; the same on all nodes.
        node: the number of this node.
        shares: of all nodes, in their order.
        host, port: where the ranks of this node reach the store.
    """

    number: int
    node: int
    shares: Sequence[NodeShare]
    host: str
    port: int

    def place(self, local_rank: int) -> dict[str, int]:
        """The numbers of a rank, for ``Extension.rank_variables``."""
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
        """The variables, as torchrun sets them, by which a rank finds its place."""
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
    """As many nodes as the command line says. See [Note: stores] in stores.py.

    Args:
        host: the address of node 0; of no meaning with one node.
        port: of node 0; 0 with one node: a free one.
        node_rank: of this node.
        num_nodes: of the run.
        run_id: tells runs apart whose agents meet at one store.
        timeout_s: limit for the nodes to meet, in seconds.
        secret: that joining needs; None without one.
        point: where to meet instead of ``host`` and ``port``, for agents that srun or mpirun started; None: there.
        attempt: how many times the ranks were started before, by other agents.
        interface: the network interface that the user named; None: the one that leads to ``host``.
        silence_s: how long an agent may give no sign of life, in seconds.

    Attributes:
        say: how to say something to the user; the agent sets it to a way that leaves what ranks print whole.

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
        self._kept: Kept | None = None
        self._shared: PatientStore | None = None
        self._silence_s = silence_s
        # Before anything is started: a port that is taken is an error of the command line.
        if num_nodes == 1:
            self._kept = keep(LOOPBACK, port)
        elif node_rank == 0 and point is not None:
            self._kept = keep_at(search.listener_of(point), point)
        elif node_rank == 0:
            self._kept = keep_or_share(interface_address(host, interface), port, secret)
            say_if_open(self._kept, secret)
        else:
            self._host = meeting_address(host, interface)

    def meet(self, share: NodeShare) -> Attempt:
        """Meet the agents of all nodes for the next attempt.

        Args:
            share: what this node brings.

        Raises:
            WorldError: a node did not come in time, or is lost; the text names it.
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
            self._others.begin_round(self._round)  # see must_restart
            shares = self._roll_call(meeting, share)
            self._kept.everybody_came()
            if self._round > 1:
                self._forget(meeting)
        except dist.DistNetworkError as error:
            raise OtherNodeError(self._others.who_is_gone()) from error
        return Attempt(self.attempt, self._node_rank, shares, self._kept.host, self._kept.port)

    def _find_others(self) -> Others:
        """Come to the store of node 0, and give signs of life there from now on."""
        if self._kept is None and self._point is not None:
            self._kept = find(self._point, self._node_rank, self._timeout_s)
        elif self._kept is None:
            self._kept = reach(self._host, self._port, self._secret, self._timeout_s, _NODE_0)
        self._shared = PatientStore(self._kept.store, f"{_AGENTS}/{self._run_id}/", Client(self._silence_s))
        where = "" if self._kept.told[0] == LOOPBACK else f" ({self._kept.told[0]}:{self._kept.told[1]})"
        others = Others(
            self._shared, self._node_rank, self._num_nodes, _NODE_0 + where, self._node_rank == 0, self._silence_s
        )
        others.begin()
        return others

    def _alone(self, share: NodeShare) -> Attempt:
        if self._kept is None or self._round > 1:
            self.close()
            self._kept = keep(LOOPBACK, 0)
        # By its name, as users and programs write it, where that name can mean nothing else.
        name = "localhost" if search.resolve("localhost") == [LOOPBACK] else LOOPBACK
        return Attempt(self.attempt, 0, [share], name, self._kept.port)

    def _roll_call(self, meeting: PatientStore, share: NodeShare) -> list[NodeShare]:
        """Wait for every node, in steps that a signal can come between; return what each brings."""
        if meeting.add(f"claim/{self._node_rank}", 1) > 1:
            what = f"two agents say that they are node {self._node_rank} of {self._num_nodes}"
            raise WorldError(explain(what, fix="give each its own --node-rank; end agents of an earlier run"))
        meeting.set(f"here/{self._node_rank}", json.dumps(dataclasses.asdict(share)))
        begin, keys = time.monotonic(), [f"here/{node}" for node in range(self._num_nodes)]
        while not meeting.check(keys):
            waited_s = time.monotonic() - begin
            if waited_s > self._timeout_s:
                missing = [node for node, key in enumerate(keys) if not meeting.check([key])]
                raise WorldError(_who_is_missing(missing, self._num_nodes, self._timeout_s))
            meeting.while_waiting()
            time.sleep(look_s(waited_s))
        return [NodeShare(**json.loads(text)) for text in meeting.multi_get(keys)]

    def _forget(self, meeting: PatientStore) -> None:
        """Remove what the ranks of the last attempt left in the store. All of them have ended: every agent is here."""
        if self._node_rank == 0:
            whole = meeting.whole
            for key in whole.list_keys():
                if not key.startswith(f"{_AGENTS}/"):
                    whole.delete_key(key)
            meeting.set("forgotten", "1")
        wait_for(meeting, "forgotten", self._timeout_s, _NODE_0)

    @property
    def attempt(self) -> int:
        """How many times ranks were started before; the same on all nodes."""
        return self._first_attempt + self._round - 1

    def give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Tell the other nodes that this one gives the run up, and why; see ``Others.give_up``."""
        return None if self._others is None else self._others.give_up(text, code, is_reaction)

    def are_all_done(self) -> bool:
        """Say that the ranks of this node have ended well; return whether those of all nodes have.

        Raises:
            OtherNodeError: another node gave up, or is lost.
        """
        return self._others is None or self._others.are_done(str(self._round))

    def must_restart(self) -> bool:
        """Whether another node restarts its ranks, for which those of all nodes have to be restarted.

        Raises:
            OtherNodeError: another node gave up, or is gone.
        """
        if self._others is None:
            return False
        self._others.look()
        return self._others.round > self._round

    def close(self) -> None:
        """Close the store, once the others have read what they must."""
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
