"""When a rank of a group over several nodes is lost, every other rank raises an error that names the lost rank.

[Note: how a failure spreads]
A rank learns that another one is gone from the node's group, from a check of its node's processes while it waits for the
link, from gloo (a connection ended, perhaps of a rank that itself only aborted), or from the time-out. It then writes a notice
to the store: *lost*, with rank and process, if it saw that the process is dead or stopped; else *heard*, with its error. A
rank that finds that ranks made different calls writes *differ*, which takes precedence, since a process may end because of the
difference; and every rank that fails writes its own last calls, for the table.
Then it aborts the whole group: the group inside the node, and its gloo connections, so that the ranks of its node and its
partners on other nodes fail in turn. Only then, when nobody waits for it any more, does a rank that saw no dead process
itself poll the store for a while, to raise an error with the real cause. A rank that waits for the link for long also reads
the store: its partner may be computing, and not have failed yet.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from guozhuang.errors import MismatchError, PeerLost, WorldError, explain, rank_table
from guozhuang.groups.hierarchical.comparison import Disagreement
from guozhuang.groups.hierarchical.nodes import Nodes
from guozhuang.net.client import Client
from guozhuang.watch.processes import GONE, STOPPED, start_of, state_of

_DIFFER, _LOST, _HEARD = "differ", "lost", "heard"
_PATIENCE_S = 0.5  # how long to poll for a *lost* notice: ranks on a dead rank's node need about 0.2 s to notice
_STORE_S = 1.0  # the limit of one request to the store, whose host may be the lost process
_LOOK_S = 0.02
_STORE_EVERY_S = 1.0  # between two reads of the store while waiting for the link
_FIX_LOST = "look at that rank's own error, or in the system's log there if it was killed"


class GroupFailure:
    """The failure, if any, that ended a group, and the error to raise for it. Every rank must construct it.

    Args:
        store: a store used for this purpose only.
        nodes: the ranks of each node.
        give_up: aborts the group inside the node and cuts the connections to other nodes; must not wait or raise.
        asked: number and words of this rank's last calls.
    """

    def __init__(
        self, store: dist.Store, nodes: Nodes, give_up: Callable[[], None], asked: Collection[tuple[int, str]] = ()
    ) -> None:
        self._store, self._nodes, self._give_up, self._asked = store, nodes, give_up, asked
        self._error: BaseException | None = None
        self._next_look = 0.0
        self._client = Client(_STORE_S, retries=True)
        store.set(f"process/{nodes.rank}", f"{os.getpid()} {start_of(os.getpid())}")
        mates = [rank for rank in nodes.here if rank != nodes.rank]
        self._mates = {rank: tuple(map(int, store.get(f"process/{rank}").split())) for rank in mates}

    def check(self) -> None:
        """Raise the error that ended the group, if there is one."""
        if self._error is not None:
            raise copy.copy(self._error)

    def look_around(self, what: str) -> None:
        """Raise if a rank of this node has died or another rank has reported a failure; for a rank that waits in ``what``."""
        dead = self._lost_mate(also_stopped=False)
        if dead is not None:
            raise self._gone(*dead, what)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _STORE_EVERY_S
            word = self._word(what, 0.0)
            if word is not None:
                raise word

    def end_with(self, error: BaseException, what: str) -> BaseException:
        """Abort the group because of an error in a collective; return the error to raise instead.

        Args:
            error: from the group inside the node, from gloo, or from this process itself.
            what: the collective, for the text.
        """
        if self._error is not None:
            return self._error
        self._say_what_was_asked()
        if isinstance(error, MismatchError):
            is_own = isinstance(error, Disagreement)
            self._tell(_DIFFER, str(error.number) if isinstance(error, Disagreement) else str(error))
            self._give_up()
            self._error = (self._word(what, 0.0) if is_own else None) or error
            return self._error
        is_of_others = isinstance(error, RuntimeError)
        if is_of_others and isinstance(differ := self._word(what, 0.0), MismatchError):
            # Checked before the processes: one that saw the difference may have ended because of it.
            self._give_up()
            self._error = differ
            return differ
        dead = self._lost_mate(also_stopped=True) if is_of_others else None
        if dead is not None:
            self._tell(_LOST, f"{dead[0]} {dead[1]}")
            error = self._gone(*dead, what)
        elif is_of_others:
            error = self._in_words(error, what)
            self._tell(_HEARD, str(error))
        else:
            kind = type(error).__name__
            self._tell(_HEARD, explain(f"{kind} in {what}", rank=self._nodes.rank, fix="look at that rank's own error"))
        self._give_up()
        if is_of_others and dead is None:
            error = self._word(what, _PATIENCE_S) or error
        self._error = error
        return error

    def late(self, what: str, peers: Sequence[int], limit_s: float) -> WorldError:
        """Return the error for partners on other nodes that did not join in time."""
        text = explain(
            f"{_named(peers)} on other nodes did not come within {limit_s:.3g} s, while this rank waited in {what}",
            rank=self._nodes.rank,
            fix="look at what runs there and at the network, or give the group a longer timeout",
        )
        return _lost(text, peers, what)

    def _in_words(self, error: BaseException, what: str) -> BaseException:
        """Return an error about the whole group for an error of one of its inner groups."""
        if isinstance(error, PeerLost) and error.pid is not None and error.pid in (m[0] for m in self._mates.values()):
            rank = next(rank for rank, process in self._mates.items() if process[0] == error.pid)
            text = explain(
                f"rank {rank} (pid {error.pid}, on this node) gave this group up, or did not come, while this rank waited for "
                f"it in {what}",
                rank=self._nodes.rank,
                fix="look at that rank's own error",
            )
            return PeerLost(text, rank=rank, pid=error.pid, waiting_in=what)
        if isinstance(error, WorldError):
            return error
        lane = self._nodes.lane
        peers = [] if lane is None else [r for r in self._nodes.peers_of_lane(lane) if r != self._nodes.rank]
        text = explain(
            f"a connection to another node ended while this rank waited in {what}: {_named(peers)}, or a rank that it "
            f"waited for, is gone. Gloo says: {str(error).strip().splitlines()[0]}",
            rank=self._nodes.rank,
            fix="look for the first error in the output of all ranks",
        )
        return _lost(text, peers, what)

    def _gone(self, rank: int, pid: int, what: str) -> PeerLost:
        node = self._nodes.node_of(rank)
        where = "on this node" if node == self._nodes.node else f"on node {node} of {len(self._nodes.members)}"
        text = f"rank {rank} (pid {pid}, {where}) is gone or stopped, while this rank waited in {what}"
        return PeerLost(explain(text, rank=self._nodes.rank, fix=_FIX_LOST), rank=rank, pid=pid, waiting_in=what)

    def _lost_mate(self, also_stopped: bool) -> tuple[int, int] | None:
        """Return rank and pid of a rank of this node that is gone, or None."""
        for rank, (pid, start) in self._mates.items():
            if _is_lost(pid, start, also_stopped):
                return rank, pid
        return None

    # ---- notices in the store

    def _tell(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.compare_set(key, "", text))  # only the first rank's notice is stored

    def _word(self, what: str, patience_s: float) -> WorldError | MismatchError | None:
        """Return an error from the notices: of *differ*; else of *lost*, polled for a while; else of *heard*; else None."""
        deadline = time.monotonic() + patience_s
        while True:
            told = self._ask(self._read)
            if told is None:
                return None  # the store is gone or slow
            if _DIFFER in told:
                return self._difference(told[_DIFFER], what)
            if _LOST in told:
                rank, pid = map(int, told[_LOST].split())
                return self._gone(rank, pid, what)
            if time.monotonic() >= deadline:
                heard = told.get(_HEARD)
                return None if heard is None else WorldError(f"[rank {self._nodes.rank}] in {what}: {heard}")
            time.sleep(_LOOK_S)

    def _read(self) -> Mapping[str, str]:
        return {key: self._store.get(key).decode() for key in (_DIFFER, _LOST, _HEARD) if self._store.check([key])}

    def _say_what_was_asked(self) -> None:
        key = f"asked/{self._nodes.rank}"
        self._ask(lambda: self._store.set(key, json.dumps(dict(self._asked))))

    def _difference(self, told: str, what: str) -> MismatchError:
        """Return the error for *differ*: with a table of all ranks' calls of that number, or a node's group's own text."""
        if not told.isdigit():
            return MismatchError(f"[rank {self._nodes.rank}] in {what}: {told}")
        self._say_what_was_asked()
        self._give_up()  # other ranks cannot write their calls while they wait in a collective
        keys = [f"asked/{rank}" for rank in range(self._nodes.size)]
        deadline = time.monotonic() + _PATIENCE_S
        while not self._ask(lambda: self._store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        texts = self._ask(lambda: [self._store.get(key).decode() if self._store.check([key]) else "{}" for key in keys])
        rows = (
            (rank, self._nodes.node_of(rank), json.loads(text).get(told, "(has not come)"))
            for rank, text in enumerate(texts or ["{}"] * len(keys))
        )
        table = rank_table(("rank", "node", "asked for"), rows)
        return MismatchError(f"{Disagreement(int(told), self._nodes.rank)}\n{table}")

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the store's answer; None if it fails or is slow, since a dead host can block a client for minutes."""
        with contextlib.suppress(Exception):
            return self._client.call(question)
        return None


def _lost(text: str, peers: Sequence[int], what: str) -> WorldError:
    # An error can name the lost rank only if there is a single candidate.
    return PeerLost(text, rank=peers[0], pid=None, waiting_in=what) if len(peers) == 1 else WorldError(text)


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "a rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"


def _is_lost(pid: int, start: int, also_stopped: bool) -> bool:
    # start is 0 where the system does not report it.
    return start != 0 and state_of(pid, start) in ((GONE, STOPPED) if also_stopped else (GONE,))
