"""Errors of a group over several nodes: if calls differ or a rank is lost, every rank raises an error that names the cause.

[Note: what a comparison costs]
Gloo checks nothing: it mixes up different operations of the same size, and ends the process if sizes differ. So every call is
compared before its data crosses the link. Inside the node the group there compares the calls, which costs one more barrier.
Between nodes, the ranks of a lane send each other a 16-byte digest of the call through gloo. A call waits for these digests
only when it first uses the link: they travel while the ranks of the node combine their values. So the cost is hidden in a
large call, and is a part of one message's latency in a small one.
Comparing in the node and along the lane covers every pair: a rank that differs from another differs from one of its own
node, or its node's lanes differ from another node's. Ranks that see no difference are notified as of any failure.

[Note: how a failure spreads]
A rank learns that another one is gone from the node's group, from a check of its node's processes while it waits for the
link, from gloo (a connection ended, perhaps of a rank that itself only aborted), or from the time-out. It then leaves a notice
in the store, which has its last calls, and aborts the whole group: the group inside the node, and its gloo connections, so
that the ranks of its node and its partners on other nodes fail in turn, and leave their notices. Only then, when nobody waits
for it any more, does it read the others' notices for a while, to raise an error with the real cause. A difference takes
precedence, since a process may end because of it; then a rank that was seen dead, then an error of a rank itself, then the
error of a rank that only noticed others fail. A rank that waits for the link for long also reads the notices: its partner may
be computing, and not have failed yet.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, PeerLost, WorldError, explain, rank_table
from guozhuang.groups.agreement import STORE_S, StoreNotices
from guozhuang.groups.gloo import Crossing
from guozhuang.groups.hierarchical.nodes import Nodes
from guozhuang.groups.shared_memory.endpoint import different_calls
from guozhuang.groups.shared_memory.segments import SharedSegments
from guozhuang.groups.verbs import start
from guozhuang.net.client import Client
from guozhuang.watch.processes import GONE, STOPPED, Process, state_of

_NUM_REMEMBERED: Final = 2  # calls that a rank remembers: it can be one call ahead of another rank, not two
_PATIENCE_S: Final = 0.5  # how long to wait for notices: ranks on a dead rank's node need about 0.2 s to notice
_STORE_EVERY_S: Final = 1.0  # seconds between two reads of the ranks' notices during a wait for another node
_FIX_LOST: Final = "look at that rank's own error, or in the system's log there if it was killed"
_FIX_ERROR: Final = "look at that rank's own error"
_FIX_LATE: Final = "give the group a timeout longer than that"


class Comparison:
    """Compares the calls of all ranks, one call after the other. See [Note: what a comparison costs].

    Args:
        rank: this process, for errors.
        inside: the group of this rank's node; None if the node has only this rank.
        lane: gloo among one rank of each node; None if this rank is in no lane.
        num_nodes: the number of ranks in ``lane``.
        wait: waits for a work of the lane, with a limit.

    Attributes:
        number: the number of calls so far.
        calls: the last calls: number, and description in words.
    """

    def __init__(
        self,
        rank: int,
        inside: SharedSegments | None,
        lane: Crossing | None,
        num_nodes: int,
        wait: Callable[[dist.Work, str], None],
    ) -> None:
        self._rank, self._inside, self._lane, self._wait = rank, inside, lane, wait
        self._mine, self._of_lane = torch.empty(0), torch.empty(2 * num_nodes, dtype=torch.int64)
        self._work: dist.Work | None = None
        self.number = 0
        self.calls: deque[tuple[int, str]] = deque(maxlen=_NUM_REMEMBERED)

    def begin(self, what: str, node_first: bool = False) -> None:
        """Begin the comparison of a call, and finish it among the ranks of the node.

        Args:
            what: the call in words; it must contain everything that must be equal on all ranks. At most 256 bytes.
            node_first: send the digest over the link only after all ranks of the node have joined.

        Raises:
            MismatchError: ranks of this node made different calls.
        """
        self.number += 1
        self.calls.append((self.number, what))
        if not node_first:
            self._send()
        if self._inside is not None:
            self._inside.meet(what.encode())
        if node_first:
            self._send()

    def settle(self) -> None:
        """Wait for the other nodes' digests of the current call, and compare them. A second call does nothing.

        Raises:
            MismatchError: ranks of this rank's lane (one rank per node) made different calls.
        """
        if self._work is not None:
            work, self._work = self._work, None
            self._wait(work, self.calls[-1][1])
            if not bool((self._of_lane.view(-1, 2) == self._mine).all()):
                raise MismatchError(different_calls(self._rank))

    def _send(self) -> None:
        if self._lane is not None:
            digest = hashlib.blake2b(self.calls[-1][1].encode(), digest_size=16).digest()
            self._mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)
            self._work = start(self._lane.group, "all_gather_single", self._of_lane, self._mine)


class _Kind(enum.IntEnum):
    """The kinds of failure notices; where ranks leave notices of several kinds, the lowest kind is the cause."""

    DIFFERENT = 0  # ranks made different calls
    LOST = 1  # the reporting rank saw that a process is dead or stopped
    OWN = 2  # the reporting rank raised an error of its own
    HEARD = 3  # the reporting rank failed only because another rank did


class _FailureNotice(NamedTuple):
    """A rank's notice that a call failed; among notices of the same kind, the one with the lowest ``order`` is the cause."""

    kind: int
    order: int  # place of this notice among those of all ranks
    number: int  # number of the failed call
    text: str
    lost: int | None = None  # the rank that is gone, or that raised an error of its own
    calls: Mapping[str, str] = {}  # the reporting rank's last calls in words, by number


class GroupFailure:
    """The failure, if any, that ended a group, and the error to raise for it. See [Note: how a failure spreads].

    Args:
        store: a store used for this purpose only.
        nodes: the ranks of each node.
        processes: the process of each rank.
        comparison: compares this rank's calls with those of the other ranks.
        give_up: aborts the group inside the node and cuts the connections to other nodes; must not wait or raise.
    """

    def __init__(
        self,
        store: dist.Store,
        nodes: Nodes,
        processes: Sequence[Process],
        comparison: Comparison,
        give_up: Callable[[], None],
    ) -> None:
        self._store, self._nodes, self._processes = store, nodes, processes
        self._comparison, self._give_up = comparison, give_up
        self._mates = [rank for rank in nodes.here if rank != nodes.rank]
        self._client = Client(STORE_S, retries=True)
        self._notices = StoreNotices(dist.PrefixStore("notice", store), nodes.rank, nodes.size, self._client.call)
        self._error: BaseException | None = None
        self._passed_on: _FailureNotice | None = None  # another rank's notice, if that made this rank fail
        self._next_look = 0.0

    def close(self) -> None:
        """End the thread that makes calls of the store; notices are neither written nor read from then on."""
        self._client.close()

    def check(self) -> None:
        """Raise the error that ended the group, if there is one."""
        if self._error is not None:
            raise copy.copy(self._error)

    def look_around(self) -> None:
        """Raise if a rank of this node has died or another rank has left a notice; ``end_with`` then gives the right error."""
        if self._lost_mate(GONE) is None:
            now = time.monotonic()
            if now < self._next_look:
                return
            self._next_look = now + _STORE_EVERY_S
            told = self._read(0.0)
            if not told:
                return
            self._passed_on = min(told.values(), key=_precedence)
        raise WorldError("a rank has failed")

    def end_with(self, error: BaseException, what: str) -> BaseException:
        """Abort the group because of an error in a collective; return the error to raise instead.

        Args:
            error: from the group inside the node, from gloo, or from this process itself.
            what: the collective, for the text.
        """
        if self._error is not None:
            return self._error
        if self._passed_on is not None:
            notice = self._passed_on
        else:
            error, notice = self._classified(error, what)
        mine = self._leave(notice)
        self._give_up()
        if mine.kind == _Kind.OWN:
            self._error = error
            return error
        told = {self._nodes.rank: mine, **self._read(_PATIENCE_S)}
        first = min(told.values(), key=_precedence)
        if first.kind == _Kind.DIFFERENT:
            error = self._difference(first, told, what)
        elif first.kind == _Kind.LOST:
            assert first.lost is not None
            error = self._gone(first.lost, what)
        elif first is not told[self._nodes.rank] or self._passed_on is not None:
            text = f"[rank {self._nodes.rank}] in {what}: {first.text}"
            error = WorldError(text) if first.lost is None else self._peer_lost(text, first.lost, what)
        self._error = error
        return error

    def late(self, what: str, peers: Sequence[int], limit_s: float) -> WorldError:
        """Return the error for ranks on other nodes that did not join in time."""
        late = f"{_named(peers)} on other nodes did not come within {limit_s:.3g} s"
        text = f"timed out: {late}, while this rank waited in {what}"
        fix = f"look at what runs there and at the network, or {_FIX_LATE}"
        return _lost_one_of(explain(text, rank=self._nodes.rank, fix=fix), peers, what)

    def _classified(self, error: BaseException, what: str) -> tuple[BaseException, _FailureNotice]:
        """Translate an error of an inner group into one that names this group's ranks; return it, and the notice to leave."""
        rank, nodes, kind, lost = self._nodes.rank, self._nodes, _Kind.HEARD, None
        text = str(error)
        if isinstance(error, MismatchError):
            kind = _Kind.DIFFERENT
        elif not isinstance(error, RuntimeError):
            kind, lost = _Kind.OWN, rank
            text = explain(f"{type(error).__name__} in {what}", rank=rank, fix=_FIX_ERROR)
        elif (mate := self._lost_mate(GONE, STOPPED)) is not None:
            kind, lost, error = _Kind.LOST, mate, self._gone(mate, what)
        elif isinstance(error, PeerLost) and error.pid is not None:
            lost = nodes.here[error.rank]  # the error has the rank's number within the node
            late = "timed out: " if "timed out" in text else ""
            text = (
                f"{late}rank {lost} (pid {error.pid}, on this node) gave this group up, or did not come, while this rank "
                f"waited for it in {what}"
            )
            text = explain(
                text, rank=rank, fix=f"look at what that rank is doing, or {_FIX_LATE}" if late else _FIX_ERROR
            )
            error, lost = self._peer_lost(text, lost, what), None
        elif not isinstance(error, WorldError):
            peers = [] if nodes.lane is None else [each for each in nodes.peers_of_lane(nodes.lane) if each != rank]
            text = (
                f"a connection to another node ended while this rank waited in {what}: {_named(peers)}, or a rank that it "
                f"waited for, is gone. Gloo says: {str(error).strip().splitlines()[0]}"
            )
            text = explain(text, rank=rank, fix="look for the first error in the output of all ranks")
            error = _lost_one_of(text, peers, what)
        return error, _FailureNotice(kind, 0, self._comparison.number, text, lost)

    def _lost_mate(self, *states: str) -> int | None:
        """Return a rank of this node whose process is in one of these states, or None."""
        mates = ((rank, self._processes[rank]) for rank in self._mates)
        # A process's start time is 0 where the system does not report it; then its state cannot be checked.
        return next((rank for rank, each in mates if each.start and state_of(each.pid, each.start) in states), None)

    # ---- These methods compose errors.

    def _peer_lost(self, text: str, lost: int, what: str) -> PeerLost:
        return PeerLost(text, rank=lost, pid=self._processes[lost].pid, waiting_in=what)

    def _gone(self, rank: int, what: str) -> PeerLost:
        node = self._nodes.node_of(rank)
        where = "on this node" if node == self._nodes.node else f"on node {node} of {len(self._nodes.members)}"
        text = f"rank {rank} (pid {self._processes[rank].pid}, {where}) is gone or stopped, while this rank waited in {what}"
        return self._peer_lost(explain(text, rank=self._nodes.rank, fix=_FIX_LOST), rank, what)

    def _difference(self, first: _FailureNotice, told: Mapping[int, _FailureNotice], what: str) -> MismatchError:
        """Return the error for ranks that made different calls: a table of the calls, or the text of the node's group."""
        calls = [
            told[rank].calls.get(str(first.number), "(has not come)") if rank in told else "(has not come)"
            for rank in range(self._nodes.size)
        ]
        if len(set(calls)) == 1:
            return MismatchError(f"[rank {self._nodes.rank}] in {what}: {first.text}")
        rows = [(rank, self._nodes.node_of(rank), text) for rank, text in enumerate(calls)]
        return MismatchError(f"{different_calls(self._nodes.rank)}\n{rank_table(('rank', 'node', 'asked for'), rows)}")

    # ---- These methods write and read notices.

    def _leave(self, notice: _FailureNotice) -> _FailureNotice:
        """Write a notice to the store, with this rank's last calls and the next ``order``; return the completed notice."""

        with contextlib.suppress(
            Exception
        ):  # if the store fails or is slow (its host may be dead), no notice is written
            order = self._client.call(self._store.add, "order", 1)
            notice = notice._replace(order=order, calls={str(n): text for n, text in self._comparison.calls})
            self._notices.leave(0, json.dumps(notice))
        return notice

    def _read(self, patience_s: float) -> dict[int, _FailureNotice]:
        """Return the notices, by rank, as soon as they show the cause; none if the store fails or is slow."""

        def is_enough(found: Mapping[int, str]) -> bool:
            kinds = {json.loads(text)[0] for text in found.values()}
            return _Kind.DIFFERENT not in kinds and bool(kinds & {_Kind.LOST, _Kind.OWN})

        with contextlib.suppress(Exception):
            found = self._notices.read(0, patience_s, is_enough)
            return {rank: _FailureNotice(*json.loads(text)) for rank, text in found.items()}
        return {}


def _precedence(notice: _FailureNotice) -> tuple[int, int]:
    return notice.kind, notice.order


def _lost_one_of(text: str, peers: Sequence[int], what: str) -> WorldError:
    # An error can name the lost rank only if there is a single candidate.
    return PeerLost(text, rank=peers[0], pid=None, waiting_in=what) if len(peers) == 1 else WorldError(text)


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "a rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
