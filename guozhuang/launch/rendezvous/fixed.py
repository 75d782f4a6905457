"""The rendezvous of a fixed number of numbered nodes before each attempt; a single node is the simplest case.

[Note: stores] Torchrun's own rendezvous has four faults: its store listens on every interface, even if all ranks are on one
node; it chooses a port by binding a free one and releasing it again; it keeps one store for all attempts, so restarted ranks
read keys of earlier ranks; and a node that joins later waits for an address that no node writes.
So here the agent of node 0 keeps the store, and passes it a socket that is already bound (``master_listen_fd``). Each attempt
starts with an empty store: on one node and in an elastic run it is a new one, between a fixed number of nodes its keys are
deleted. On one node it listens on loopback. Between nodes it listens at the one address that the other nodes know, or, with
a secret, on loopback behind a door (``net.door``) at that address. Ranks connect as clients (TORCHELASTIC_USE_AGENT_STORE).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.rendezvous.agents import SILENCE_S, OtherAgents, OtherNodeError
from guozhuang.launch.rendezvous.members import Members, nodes
from guozhuang.net import end_request, interfaces
from guozhuang.net import store as stores
from guozhuang.net.client import Client, PatientStore
from guozhuang.net.ended import forget_ended, tell_ended
from guozhuang.net.interfaces import LOOPBACK
from guozhuang.net.meet import WorldStore, join, keep
from guozhuang.net.meeting_point import MeetingPoint, PortSequence
from guozhuang.watch.processes import ENDED_BY_SIGTERM

STORE_S = 300.0  # timeout in seconds of one operation of a store that an agent keeps
# The variable that tells ranks the first host where MASTER_ADDR does not, since they reach the launcher's store by loopback.
# ``_guozhuang_start`` reads it, for stores that a script keeps at a port of its own.
FIRST_HOST = "GUOZHUANG_FIRST_HOST"
_AGENTS = "guozhuang agents"  # prefix of the agents' keys in the store; all other keys belong to the ranks


@dataclass(frozen=True)
class NodeShare:
    """A node's share of the run (ranks, servers, role), which the agents exchange in the rendezvous.

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
    """The result of a rendezvous: the nodes of one attempt, and the address of the store of its ranks.

    Attributes:
        number: how many attempts there were before; the same on all nodes.
        node: the number of this node.
        shares: the shares of all nodes, in the order of their numbers. Who has no ranks does not count as a node for ranks.
        host, port: the address at which the ranks of this node reach the store.
        first_host: name or address by which other nodes reach node 0, if ``host`` does not tell it, since a ``Passage`` leads
            to the store; else "".
    """

    number: int
    node: int
    shares: Sequence[NodeShare]
    host: str
    port: int
    first_host: str = ""

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
        with_ranks = [node for node, share in enumerate(self.shares) if share.ranks]
        found = {
            "RANK": place["rank"],
            "WORLD_SIZE": place["size"],
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": own.ranks,
            "GROUP_RANK": with_ranks.index(self.node),
            "GROUP_WORLD_SIZE": len(with_ranks),
            "ROLE_NAME": own.role,
            "ROLE_RANK": sum(share.ranks for share in before if share.role == own.role) + local_rank,
            "ROLE_WORLD_SIZE": sum(share.ranks for share in self.shares if share.role == own.role),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RESTART_COUNT": self.number,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        if self.first_host:
            found[FIRST_HOST] = self.first_host
        return {name: str(value) for name, value in found.items()}


def meeting_point(
    host: str, port: int, secret: bytes | None, interface: str | None, port_option: str = "--master-port"
) -> MeetingPoint:
    """Return the address at which agents meet. Only "localhost" and loopback addresses mean that all agents are on one machine.

    Args:
        host, port: the address of node 0 in the options of the agents.
        secret: the secret that joining needs; None without one.
        interface: the network interface that the user named; None: the one that leads to ``host``.
        port_option: the option that gives ``port``, for errors.
    """
    is_loopback_meant = host == "localhost" or (interfaces.is_address(host) and interfaces.is_loopback(host))
    return MeetingPoint(
        host,
        port,
        secret=secret or b"",
        is_loopback_meant=is_loopback_meant,
        interface=interface or "",
        port_option=port_option,
    )


def say_if_open(kept: WorldStore, secret: bytes | None) -> None:
    """Print the address of the store if it is open to other nodes without a secret."""
    if not secret and kept.host is not None and not interfaces.is_loopback(kept.host):
        what = "with the same GUOZHUANG_SECRET on all nodes it would ask for it"
        say(f"the store is at {kept.host}:{kept.port}, open to whoever reaches that; {what}")


class FixedRendezvous:
    """This node's side of the rendezvous of a fixed number of nodes. See [Note: stores].

    Args:
        point: the address of node 0, or the ports to search for agents that srun or mpirun started; with one node, an address
            of loopback, and port 0 means any free port.
        node_rank: the number of this node; None if ``members`` says that it takes a free one.
        num_nodes: number of nodes of the run.
        run_id: distinguishes runs whose agents use the same store.
        timeout_s: how long the rendezvous may take, in seconds.
        attempt: how many times earlier agents have started the ranks of this run.
        silence_s: how long an agent may send no heartbeat, in seconds.
        members: who takes part, if not every agent is that of a node with ranks.

    Attributes:
        say: prints a message for the user; the agent replaces it by ``Output.say``, which does not cut lines of ranks.

    Raises:
        UsageError: the port is taken, or no store can be opened at the address.
    """

    def __init__(
        self,
        point: MeetingPoint | PortSequence,
        node_rank: int | None,
        num_nodes: int,
        run_id: str,
        timeout_s: float,
        attempt: int = 0,
        silence_s: float = SILENCE_S,
        members: Members | None = None,
    ) -> None:
        self.say: Callable[[str], None] = say
        self._members = nodes(num_nodes) if members is None else members
        self._others: OtherAgents | None = None
        self._point, self._node_rank, self._num_nodes = point, node_rank, num_nodes
        self._run_id, self._timeout_s = run_id, timeout_s
        self._round, self._first_attempt = 0, attempt
        self._shared: PatientStore | None = None
        self._silence_s = silence_s
        # Open the store before anything is started, because a port that is taken is an error of the command line.
        self._kept = self._keep() if node_rank == 0 else None

    def _keep(self) -> WorldStore:
        """Open a store, or share the one that this process already keeps at that port.

        With -H the process opens a store on loopback before it becomes the agent; other hosts reach that through a ``Door``.
        """
        try:
            kept = keep(self._point, STORE_S, warn=say)
        except UsageError:
            if self._num_nodes == 1 or isinstance(self._point, PortSequence):
                raise
            host, port = stores.listening_address(self._point), self._point.port
            with contextlib.suppress(RuntimeError):
                shared = stores.share(host, port, STORE_S)
                return WorldStore(shared, host, port=port, local=(shared.host, port))
            raise
        if isinstance(self._point, MeetingPoint):
            say_if_open(kept, self._point.secret)
        return kept

    def meet(self, share: NodeShare) -> Attempt:
        """Carry out the rendezvous with the agents of all nodes for the next attempt.

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
            self._others.begin_round(self._round)  # makes ``must_restart`` of nodes in an earlier round return True
            try:
                shares = self._roll_call(meeting, share)
            except WorldError as error:
                if not isinstance(error, OtherNodeError):
                    self._others.give_up(str(error), 1, False)
                raise
            self._kept.remove_note()
            if self._round > 1:
                self._forget(meeting)
                if self._node_rank == 0:
                    forget_ended(self._kept.store)
        except dist.DistNetworkError as error:
            raise OtherNodeError(self._others.who_is_gone()) from error
        assert self._node_rank is not None
        host, port = self._kept.local
        known = self._kept.host or ""
        first_host = known if host == LOOPBACK and known != LOOPBACK else ""
        return Attempt(self.attempt, self._node_rank, shares, host, port, first_host)

    def _find_others(self) -> OtherAgents:
        """Connect to the store of node 0, and start to send heartbeats to the other agents there."""
        members = self._members
        if self._kept is None:
            rank = self._node_rank if isinstance(self._point, PortSequence) else None
            who = f"the store of {members.keeper}"
            self._kept = join(self._point, rank, self._timeout_s, who=who, fix=members.join_fix, operation_s=STORE_S)
        prefix, answers = f"{_AGENTS}/{self._run_id}/", Client(self._silence_s)
        self._shared = PatientStore(self._kept.store, prefix, answers, num_pollers=self._num_nodes)
        where = "" if self._kept.host == LOOPBACK else f" ({self._kept.host}:{self._kept.port})"
        if self._node_rank is None:
            self._node_rank = self._free_number(self._shared)
        keeper, is_keeper = members.keeper + where, self._node_rank == 0
        others = OtherAgents(
            self._shared, self._node_rank, self._num_nodes, keeper, is_keeper, self._silence_s, members.names
        )
        others.begin()
        return others

    def _free_number(self, shared: PatientStore) -> int:
        """Take the next number of those from ``first_free`` on; an agent without a place would be seen by nobody."""
        first, names = self._members.first_free, self._members.names
        found = first + shared.add("free", 1) - 1
        if found >= len(names):
            what = f"all places are taken: the run has {len(names) - first}, from {first} on, and this is one more"
            raise WorldError(explain(what, value=", ".join(names), fix=self._members.count_fix))
        return found

    def _alone(self, share: NodeShare) -> Attempt:
        if self._kept is None or self._round > 1:
            self.close()
            self._kept = keep(MeetingPoint(LOOPBACK, 0), STORE_S)
        # MASTER_ADDR is the usual name "localhost" if that name resolves to 127.0.0.1 alone.
        name = "localhost" if interfaces.resolve("localhost") == [LOOPBACK] else LOOPBACK
        return Attempt(self.attempt, 0, [share], name, self._kept.local[1])

    def _roll_call(self, meeting: PatientStore, share: NodeShare) -> list[NodeShare]:
        """Wait until all nodes have joined, in short steps so that a signal can interrupt the wait; return their shares."""
        members = self._members
        ours = ", ".join(members.names)
        if (theirs := meeting.compare_set("members", "", ours).decode()) != ours:
            what = f"{members.title} do not agree who takes part: one was told {_short(theirs)}, and another {_short(ours)}"
            raise WorldError(explain(what, fix=members.count_fix))
        if meeting.add(f"claim/{self._node_rank}", 1) > 1:
            what = f"two agents say that they are {members.names[self._node_rank or 0]} of {self._num_nodes}"
            raise WorldError(explain(what, fix=members.number_fix))
        meeting.set(f"here/{self._node_rank}", json.dumps(dataclasses.asdict(share)))
        keys = [f"here/{node}" for node in range(self._num_nodes)]
        if not meeting.exist_within(keys, self._timeout_s):
            missing = [node for node, key in enumerate(keys) if not meeting.check([key])]
            raise WorldError(_who_is_missing(missing, members, self._timeout_s))
        return [NodeShare(**json.loads(text)) for text in meeting.multi_get(keys)]

    def _forget(self, meeting: PatientStore) -> None:
        """Remove the keys of the last attempt's ranks from the store. Those ranks have ended, since every agent has joined."""
        if self._node_rank == 0:
            whole = meeting.whole
            for key in whole.list_keys():
                if not key.startswith(f"{_AGENTS}/"):
                    whole.delete_key(key)
            meeting.set("forgotten", "1")
        if meeting.read("forgotten", self._timeout_s) is None:
            what = f"{self._members.keeper} did not remove the keys of the last attempt within {self._timeout_s:g} s"
            raise WorldError(explain(what, fix="look at its output"))

    @property
    def attempt(self) -> int:
        """Return the number of the attempt: how many times ranks were started before; the same on all nodes."""
        return self._first_attempt + self._round - 1

    def give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Report to the other nodes that this one aborts the run, and why; see ``OtherAgents.give_up``."""
        return None if self._others is None else self._others.give_up(text, code, is_reaction)

    @property
    def _of_ranks(self) -> PatientStore | dist.Store | None:
        """The store in which the ranks meet; None before ``meet``."""
        return self._shared.whole if self._shared is not None else self._kept.store if self._kept is not None else None

    def tell_ended(self, rank: int) -> None:
        """Tell the ranks of all nodes that a rank has ended with 0: those that still wait for it to join raise."""
        if (store := self._of_ranks) is not None:
            tell_ended(store, rank)

    def ask_to_end(self) -> bool:
        """Ask the ranks of all nodes to save a checkpoint and to end; return False if they cannot: they do not train now, or
        another node aborted the run or is lost.
        """
        # This agent ends, also where the store does not answer. Only this question is in a hurry: the heartbeats go on during
        # the save, which may keep the store's host busy.
        hurried = contextlib.nullcontext() if self._shared is None else self._shared.hurried()
        with contextlib.suppress(WorldError, RuntimeError), hurried:
            return (store := self._of_ranks) is not None and not self.must_restart() and end_request.ask_to_end(store)
        return False

    def was_asked_to_end(self) -> bool:
        """Return whether an agent, of this node or another one, has asked the ranks to save a checkpoint and to end."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with node 0
            return (store := self._of_ranks) is not None and end_request.is_made(store)
        return False

    def must_signal(self) -> bool:
        """Return whether ranks that were asked to save and to end need a signal after all.

        They do if they look for the request no more, it was taken back, or another node aborted for another reason or is lost.
        """
        try:
            if self.must_restart():
                return True
        except OtherNodeError as error:
            return not self.is_asked_end(error)
        with contextlib.suppress(RuntimeError):  # the store may be gone with node 0, whose ranks have ended
            return (store := self._of_ranks) is not None and not (
                end_request.is_awaited(store) and end_request.is_made(store)
            )
        return False

    def is_asked_end(self, error: OtherNodeError) -> bool:
        """Return whether another node aborted the run because its ranks have saved and ended, as all ranks were asked to."""
        return error.code == ENDED_BY_SIGTERM and self.was_asked_to_end()

    def take_back_request(self) -> None:
        """Take back the request that the ranks save and end, because a rank failed: other nodes send their ranks a signal."""
        with contextlib.suppress(RuntimeError):
            if (store := self._of_ranks) is not None:
                end_request.take_back(store)

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
        """Close the store; the agent that keeps it waits until the other nodes have read the last messages."""
        if self._others is not None:
            self._others.close()
        if self._shared is not None:
            self._shared.close()
        if self._kept is not None:
            self._kept.close()
        self._shared = self._others = self._kept = None


def _who_is_missing(missing: Sequence[int], members: Members, timeout_s: float) -> str:
    names = ", ".join(members.names[each].removeprefix("node ") for each in missing[:16])
    names += f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    what = f"{len(missing)} of {len(members.names)} {members.title} did not come within {timeout_s:g} s: {names}"
    return explain(what, fix=members.missing_fix)


def _short(names: str) -> str:
    """Return a text for a list of names: its number, and where they are few, the names."""
    count = names.count(",") + 1
    return f"{count} ({names})" if count <= 8 else f"{count}"
