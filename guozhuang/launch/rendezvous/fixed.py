"""A fixed number of nodes, each with its number, meet; one node is the simplest case. A handler for torch elastic."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from guozhuang.errors import WorldError, explain
from guozhuang.launch.rendezvous.base import Meeting
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


class FixedMeeting(Meeting):
    """As many nodes as were said. See [Note: stores] in stores.py.

    Args:
        host: the address of node 0; of no meaning with one node.
        port: of node 0; 0 with one node: a free one.
        node_rank: of this node.
        num_nodes: of the run.
        run_id: what torch elastic calls the run.
        timeout_s: limit for the nodes to meet, in seconds.
        secret: that joining needs; None without one.
        point: where to meet instead of ``host`` and ``port``, for agents that srun or mpirun started; None: there.
        attempt: how many times the ranks were started before, by other agents.
        interface: the network interface that the user named; None: the one that leads to ``host``.
        silence_s: how long an agent may give no sign of life, in seconds.

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
        super().__init__()
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

    def get_backend(self) -> str:
        """What torch elastic calls the way of meeting."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the agents of all nodes for the next attempt.

        Raises:
            WorldError: a node did not come in time; the text names it.
        """
        self._round += 1
        if self._num_nodes == 1:
            return self._alone()
        if self._others is None:
            self._others = self._find_others()
        assert self._kept is not None and self._shared is not None
        meeting = self._shared.within(str(self._round))
        meeting.while_waiting = self._others.look
        try:
            self._others.begin_round(self._round)  # see num_nodes_waiting
            self._roll_call(meeting)
            self._kept.everybody_came()
            if self._round > 1:
                self._forget(meeting)
        except dist.DistNetworkError as error:
            raise OtherNodeError(self._others.who_is_gone()) from error
        where = RendezvousStoreInfo(self._kept.host, self._kept.port)
        return RendezvousInfo(meeting, self._node_rank, self._num_nodes, where)

    def _find_others(self) -> Others:
        """Come to the store of node 0, and give signs of life there from now on."""
        if self._kept is None and self._point is not None:
            self._kept = find(self._point, self._node_rank, self._timeout_s)
        elif self._kept is None:
            self._kept = reach(self._host, self._port, self._secret, self._timeout_s, _NODE_0)
        self._shared = PatientStore(self._kept.store, f"{_AGENTS}/{self._run_id}/", Client(self._silence_s))
        where = "" if self._kept.told[0] == LOOPBACK else f" ({self._kept.told[0]}:{self._kept.told[1]})"
        others = Others(
            self._shared, self._node_rank, self._num_nodes, _NODE_0 + where, self._node_rank == 0, True, self._silence_s
        )
        others.begin()
        return others

    def _alone(self) -> RendezvousInfo:
        if self._kept is None or self._round > 1:
            self.shutdown()
            self._kept = keep(LOOPBACK, 0)
        store = dist.PrefixStore(f"{_AGENTS}/{self._run_id}", self._kept.store)
        # By its name, as users and programs write it, where that name can mean nothing else.
        name = "localhost" if search.resolve("localhost") == [LOOPBACK] else LOOPBACK
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(name, self._kept.port))

    def _roll_call(self, meeting: PatientStore) -> None:
        """Wait for every node, in steps that a signal can come between."""
        if meeting.add(f"claim/{self._node_rank}", 1) > 1:
            what = f"two agents say that they are node {self._node_rank} of {self._num_nodes}"
            raise WorldError(explain(what, fix="give each its own --node-rank; end agents of an earlier run"))
        meeting.set(f"here/{self._node_rank}", socket.gethostname())
        begin, nodes = time.monotonic(), range(self._num_nodes)
        while not meeting.check([f"here/{node}" for node in nodes]):
            waited_s = time.monotonic() - begin
            if waited_s > self._timeout_s:
                missing = [node for node in nodes if not meeting.check([f"here/{node}"])]
                raise WorldError(_who_is_missing(missing, self._num_nodes, self._timeout_s))
            meeting.while_waiting()
            time.sleep(look_s(waited_s))

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

    def was_told(self, text: str, code: int) -> None:
        """This agent was told to end, which ends the run; see ``give_up``."""
        self.give_up(text, code, False)

    def are_all_done(self) -> bool:
        """Say that the ranks of this node have ended well; return whether those of all nodes have.

        Raises:
            OtherNodeError: another node gave up, or is lost.
        """
        return self._others is None or self._others.are_done(str(self._round))

    def is_closed(self) -> bool:
        """Whether nobody may come any more; here, nobody can who was not expected."""
        return False

    def set_closed(self) -> None:
        """Nothing to do; see ``is_closed``."""

    def num_nodes_waiting(self) -> int:
        """How many nodes wait to begin anew: one that has to start its ranks again needs those of all nodes.

        Raises:
            OtherNodeError: another node gave up, or is gone.
        """
        if self._num_nodes == 1:
            return 0
        assert self._others is not None
        self._others.look()
        return int(self._others.round > self._round)

    def get_run_id(self) -> str:
        """What torch elastic calls the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store, once the others have read what they must."""
        if self._others is not None:
            self._others.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self._others = None
        if self._kept is not None:
            self._kept.close()
        self._kept = None
        return True


def _who_is_missing(missing: Sequence[int], num_nodes: int, timeout_s: float) -> str:
    names = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    what = f"{len(missing)} of {num_nodes} nodes did not come within {timeout_s:g} s: {names}"
    return explain(what, fix="look at the output of their agents, and check --node-rank and --nnodes of each")
