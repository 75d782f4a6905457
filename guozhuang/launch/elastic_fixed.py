"""A fixed number of nodes, each with its number, meet; one node is the simplest case. A handler for torch elastic."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from guozhuang.errors import WorldError, explain
from guozhuang.launch.elastic_stores import (
    LOOPBACK,
    Kept,
    addresses,
    find,
    interface_address,
    keep,
    keep_at,
    keep_or_share,
    reach,
    wait_for,
)
from guozhuang.world import search
from guozhuang.world.identity import PortSequence

_AGENTS = "guozhuang agents"  # what agents tell each other begins so; the rest of a store is the ranks'
_NODE_0 = "the agent of node 0"
_LOOK_S = 0.02
_TELL_S = 3.0  # for the other nodes to read why this one gives up, and to hear of a failure that came before ours


class OtherNodeError(WorldError):
    """Another node gave the run up. ``code`` is the exit code that follows from it."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class FixedMeeting(RendezvousHandler):
    """As many nodes as were said. See [Note: stores] in elastic_stores.py.

    Args:
        host: the address of node 0; of no meaning with one node.
        port: of node 0; 0 with one node: a free one.
        node_rank: of this node.
        num_nodes: of the run.
        run_id: what torch elastic calls the run.
        timeout_s: limit for the nodes to meet, in seconds.
        secret: that joining needs; None without one.
        point: where to meet instead of ``host`` and ``port``, for agents that srun or mpirun started; None: there.

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
    ) -> None:
        self._point = point
        self._host, self._port = host, port
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._run_id, self._timeout_s, self._secret = run_id, timeout_s, secret
        self._round = 0
        self._kept: Kept | None = None
        # Before anything is started: a port that is taken is an error of the command line.
        if num_nodes == 1:
            self._kept = keep(LOOPBACK, port)
        elif node_rank == 0 and point is not None:
            self._kept = keep_at(search.listener_of(point), point)
        elif node_rank == 0:
            self._kept = keep_or_share(interface_address(host), port, secret)

    def get_backend(self) -> str:
        """What torch elastic calls the way of meeting."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """The agent keeps the store: ranks are clients."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the agents of all nodes for the next attempt.

        Raises:
            WorldError: a node did not come in time; the text names it.
        """
        self._round += 1
        if self._num_nodes == 1:
            return self._alone()
        if self._kept is not None:
            self._shared.set(f"round {self._round}", "1")  # see num_nodes_waiting
        if self._kept is None and self._point is not None:
            self._kept = find(self._point, self._node_rank, self._timeout_s)
        elif self._kept is None:
            self._kept = reach(self._host, self._port, self._secret, self._timeout_s, _NODE_0)
        assert self._kept is not None
        meeting = dist.PrefixStore(f"{_AGENTS}/{self._run_id}/{self._round}", self._kept.store)
        self._roll_call(meeting)
        if self._round > 1:
            self._forget(meeting)
        where = RendezvousStoreInfo(self._kept.host, self._kept.port)
        return RendezvousInfo(meeting, self._node_rank, self._num_nodes, where)

    def _alone(self) -> RendezvousInfo:
        if self._kept is None or self._round > 1:
            self.shutdown()
            self._kept = keep(LOOPBACK, 0)
        store = dist.PrefixStore(f"{_AGENTS}/{self._run_id}", self._kept.store)
        # By its name, as users and programs write it, where that name can mean nothing else.
        name = "localhost" if addresses("localhost") == [LOOPBACK] else LOOPBACK
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(name, self._kept.port))

    def _roll_call(self, meeting: dist.Store) -> None:
        """Wait for every node, in steps that a signal can come between."""
        deadline = time.monotonic() + self._timeout_s
        if meeting.add(f"claim/{self._node_rank}", 1) > 1:
            what = f"two agents say that they are node {self._node_rank} of {self._num_nodes}"
            raise WorldError(explain(what, fix="give each its own --node-rank; end agents of an earlier run"))
        meeting.set(f"here/{self._node_rank}", socket.gethostname())
        missing = list(range(self._num_nodes))
        while missing := [node for node in missing if not meeting.check([f"here/{node}"])]:
            if time.monotonic() > deadline:
                raise WorldError(_who_is_missing(missing, self._num_nodes, self._timeout_s))
            time.sleep(_LOOK_S)

    def _forget(self, meeting: dist.Store) -> None:
        """Remove what the ranks of the last attempt left in the store. All of them have ended: every agent is here."""
        assert self._kept is not None
        if self._node_rank == 0:
            for key in self._kept.store.list_keys():
                if not key.startswith(f"{_AGENTS}/"):
                    self._kept.store.delete_key(key)
            meeting.set("forgotten", "1")
        wait_for(meeting, "forgotten", self._timeout_s, _NODE_0)

    @property
    def attempt(self) -> int:
        """How many times ranks were started before; the same on all nodes."""
        return self._round - 1

    @property
    def _shared(self) -> dist.Store:
        """What agents tell each other in all rounds."""
        assert self._kept is not None
        return dist.PrefixStore(f"{_AGENTS}/{self._run_id}", self._kept.store)

    def give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Tell the other nodes that this one gives the run up, and why.

        Args:
            text: what happened here.
            code: the exit code that follows from it.
            is_reaction: another node may have been first.

        Returns:
            What happened on the node that was first, where that is another one.
        """
        if self._num_nodes == 1 or self._kept is None or self._round == 0:
            return None
        cause = None
        try:
            self._shared.set(f"gave up {self._node_rank}", f"{int(is_reaction)} {code} {text}")
            self._shared.set("gave up", "1")
            if is_reaction:
                cause = self._first_cause(own=False)
            self._shared.add("know", 1)
            deadline = time.monotonic() + _TELL_S
            # Who keeps the store stays until the others have read it.
            while (
                self._node_rank == 0 and self._shared.add("know", 0) < self._num_nodes and time.monotonic() < deadline
            ):
                time.sleep(_LOOK_S)
        except dist.DistNetworkError:
            pass  # node 0 has gone before us
        return cause

    def _first_cause(self, own: bool) -> OtherNodeError | None:
        """Of the nodes that gave up, the one that did not merely lose another one."""
        nodes = [node for node in range(self._num_nodes) if own or node != self._node_rank]
        deadline = time.monotonic() + _TELL_S
        found: list[tuple[str, int, str]] = []
        while not any(kind == "0" for kind, _, _ in found) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            found = []
            for node in nodes:
                if self._shared.check([f"gave up {node}"]):
                    kind, code, text = self._shared.get(f"gave up {node}").decode().split(" ", 2)
                    found.append((kind, int(code), f"node {node}: {text}"))
        return OtherNodeError(min(found)[2], min(found)[1]) if found else None

    def wait_for_others(self) -> None:
        """After the ranks of this node have ended well: wait for the ranks of the others, however long they take.

        Raises:
            OtherNodeError: another node gave up.
        """
        if self._num_nodes == 1:
            return
        try:
            self._shared.add(f"done {self._round}", 1)
            while self._shared.add(f"done {self._round}", 0) < self._num_nodes:
                if self._shared.check(["gave up"]):
                    self._look_for_failures()
                time.sleep(0.1)
        except dist.DistNetworkError:
            return  # node 0 was faster to see that all are done
        if self._node_rank == 0:
            time.sleep(0.3)  # the others look ten times a second; then they need the store no more

    def _look_for_failures(self) -> None:
        try:
            if not self._shared.check(["gave up"]):
                return
            cause = self._first_cause(own=True)
            self._shared.add("know", 1)
        except dist.DistNetworkError as error:
            text = "the agent of node 0, which keeps the store, is gone; the ranks of this node were ended"
            raise OtherNodeError(text, 1) from error
        raise cause or OtherNodeError("another node gave up", 1)

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
        self._look_for_failures()
        return int(self._shared.check([f"round {self._round + 1}"]))

    def get_run_id(self) -> str:
        """What torch elastic calls the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        if self._kept is not None:
            self._kept.close()
        self._kept = None
        return True


def _who_is_missing(missing: Sequence[int], num_nodes: int, timeout_s: float) -> str:
    names = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    what = f"{len(missing)} of {num_nodes} nodes did not come within {timeout_s:g} s: {names}"
    return explain(what, fix="look at the output of their agents, and check --node-rank and --nnodes of each")
