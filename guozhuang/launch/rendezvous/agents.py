"""The messages between the agents of a run: heartbeats, the end of their ranks, and the reason of an abort.

[Note: heartbeats of agents] An agent that was killed, or a host that was switched off or cut off, cannot report it; and ranks
that sleep, or wait in a collective, may not notice for half an hour. So each agent publishes a heartbeat every second, and two
of the agents read those of all agents and judge them, as a rank that watches does (``watch.watcher``, ``watch.judge``). An
agent without a new heartbeat for ``SILENCE_S`` is lost, and the watcher reports that to all agents. An agent has no stacks and
no collectives to watch, so it needs none of the threads and reports of ``watch.heartbeat``. The loss of the agent that keeps
the store shows in the store itself: it is gone or does not answer (see [Note: waiting for a store] in net.client).

[Note: who was first] A rank that fails makes ranks of other nodes fail, and their agents may be faster to report it. So each
report says whether the failure may be a reaction to another one. If it is not, it is the cause. While all reports are
reactions, the agents let their own ranks run until every other agent has answered; then the report of the lowest node counts.
An agent that is found lost meanwhile is the cause.

[Note: messages] All messages stand in one key, to which each agent appends lines, and a counter gives their number. So an agent
without new messages makes one request per look, however many nodes and messages there are. That matters because the store
answers all agents from one thread, which shares its node's cores with ranks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from guozhuang.errors import WorldError
from guozhuang.net.client import ANSWER_S, PatientStore
from guozhuang.watch.judge import AwakeClock, Beat, Judge, Limits
from guozhuang.watch.processes import this_process
from guozhuang.watch.watcher import read_beats, use_store

SILENCE_S = ANSWER_S
_BEAT_S = 1.0
_REPORT_S = 3.0  # seconds for other agents to read why this one aborts, and to report a failure that came before ours
_LOOK_S = 0.02
# Seconds between two reads of the messages: per node of the run, and the maximum.
_LOOK_PER_NODE_S, _LONGEST_LOOK_S = 0.002, 0.2
_WATCHERS = 2  # how many nodes, the first ones, read all heartbeats: two, because one of them may itself be lost
_STILL_S = 3.0  # seconds; if this agent itself stood still at least so long, its error about a loss says so


class OtherNodeError(WorldError):
    """Raised when another node aborted the run or is lost. ``code`` is the exit code for this agent."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class OtherAgents:
    """An agent's connection to the other agents of a run. After ``begin``, ``close`` must be called.

    Args:
        store: the store with the agents' keys, which only agents use.
        node: the number of this node.
        num_nodes: how many nodes the run has.
        keeper: the agent that keeps the store, as in "the agent of node 0 at 10.0.0.1:29500".
        is_keeper: whether this agent keeps the store; then ``close`` waits until the other agents need it no more.
        silence_s: how long a heartbeat may stay unchanged, in seconds.
        names: what errors call the agents, by their numbers; None: "node 3" and so on.
    """

    def __init__(
        self,
        store: PatientStore,
        node: int,
        num_nodes: int,
        keeper: str,
        is_keeper: bool,
        silence_s: float = SILENCE_S,
        names: Sequence[str] | None = None,
    ) -> None:
        self._names = [f"node {other}" for other in range(num_nodes)] if names is None else names
        self._name = self._names[node]
        self._store, self._node, self._num_nodes = store, node, num_nodes
        self._keeper, self._is_keeper = keeper, is_keeper
        self._silence_s = silence_s
        self._others = [other for other in range(num_nodes) if other != node]
        self._me = this_process(socket.gethostname())
        # Both limits are the silence: an agent is lost by its silence alone, since no agent looks at another one's process.
        limits = replace(Limits.of(_BEAT_S), silent_s=silence_s, lost_s=silence_s)
        self._clock = AwakeClock(2 * _BEAT_S)
        self._judge = Judge(num_nodes, limits, None, self._clock())
        self._reported: set[int] = set()  # the nodes that this agent has reported as lost
        self._beating = threading.Lock()
        self._left: str | None = None  # part of each heartbeat; "" once this node needs the store no more, None before
        self._look_s = min(_LONGEST_LOOK_S, _LOOK_PER_NODE_S * num_nodes)
        self._looked = float("-inf")
        self._num_messages = 0  # number of messages at the last read
        self._given_up: dict[int, tuple[int, int, int, str]] = {}
        self._answered: set[int] = set()
        self._lost: tuple[int, str] | None = None
        self.round = 1  # number of the last rendezvous that any node began
        self._count = 0
        self._stood_still_s = 0.0
        self._reactions_since: float | None = None
        self._done: set[str] = set()
        self._has_ended = False  # whether the ranks of all nodes are done, or this node or another one aborted the run
        self._gave_up = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to send heartbeats.

        Raises:
            OtherNodeError: the store is gone.
        """
        try:
            self._beat()
        except dist.DistNetworkError as error:
            raise OtherNodeError(self.who_is_gone()) from error
        self._thread = threading.Thread(target=self._run, name="guozhuang heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        with self._beating:
            self._count += 1
            beat = Beat(self._count, self._me.pid, self._me.start, self._me.node, left=self._left)
            self._store.set(f"beat/{self._node}", beat.to_bytes())

    def _run(self) -> None:
        last = time.monotonic()
        # The loss of the store ends this thread silently: the next call of the main thread raises the error.
        with contextlib.suppress(dist.DistNetworkError):
            while not self._end.wait(_BEAT_S):
                now = time.monotonic()
                self._stood_still_s = max(self._stood_still_s, now - last - _BEAT_S)
                last = now
                self._beat()
                if self._node < _WATCHERS:
                    self._watch(self._clock.tick())

    def _watch(self, clock_s: float) -> None:
        read_beats(self._store, self._num_nodes, self._judge, clock_s)
        for other in self._judge.lost(clock_s).keys() - self._reported:
            self._reported.add(other)
            self._send("lost", other, self._judge.beats()[other].node)

    def _send(self, *words: str | int) -> None:
        """Send a message to all agents; see ``_receive`` and [Note: messages]."""
        self._store.append("messages", json.dumps(words) + "\n")
        self._store.add("number of messages", 1)

    def _receive(self) -> None:
        """Read the messages of all agents if there are new ones."""
        self._looked = time.monotonic()
        number = self._store.add("number of messages", 0)
        if number == self._num_messages:
            return
        for line in self._store.get("messages").decode().splitlines():
            kind, *words = json.loads(line)
            if kind == "gave up":
                node, is_reaction, code, text = words
                if self._given_up.get(node, (1,))[0]:  # never overwrite a report that is no reaction to another failure
                    self._given_up[node] = is_reaction, node, code, text
            if kind in ("gave up", "answer"):
                self._answered.add(words[0])
            elif kind == "lost":
                self._lost = self._lost or (words[0], words[1])
            elif kind == "round":
                self.round = max(self.round, words[0])
        self._num_messages = number

    def begin_round(self, number: int) -> None:
        """Report that a new rendezvous begins, unless another node has already reported it."""
        if self.round < number:
            self._send("round", number)

    def who_is_gone(self) -> str:
        """Return the error text for a lost store: which agent kept the store, and why it is lost."""
        why = self._store.lost or "is gone"
        reason = "" if why == "is gone" else ": its host is off or cut off from this one, or it was stopped"
        return f"{self._keeper}, which keeps the store, {why}{reason}{self._own_stop()}"

    def _own_stop(self) -> str:
        stop_s = self._stood_still_s
        return f" (this agent itself had stood still for {stop_s:.0f} s)" if stop_s >= _STILL_S else ""

    def look(self) -> None:
        """Read the messages of the other agents, at most every ``_look_s`` seconds; return if the run continues.

        Raises:
            OtherNodeError: another node aborted the run, or is lost.
        """
        if time.monotonic() < self._looked + self._look_s:
            return
        try:
            cause = self._cause()
            if cause is None:
                return
            self._read()
        except dist.DistNetworkError as error:
            raise OtherNodeError(self.who_is_gone()) from error
        raise cause

    def _read(self) -> None:
        """Report, by a heartbeat, that this node has read the last messages and needs the store no more."""
        self._has_ended, self._left = True, ""
        self._beat()

    def _cause(self) -> OtherNodeError | None:
        """Return the reason why the run is over; None while it continues or the cause is unclear. See [Note: who was first]."""
        self._receive()
        lost = self._loss()
        if not self._given_up:
            return lost
        kind, _, code, text = min(self._given_up.values())
        first = OtherNodeError(text, code)
        if kind == 0 or lost is not None:
            return first if kind == 0 else lost
        now = time.monotonic()
        self._reactions_since = now if self._reactions_since is None else self._reactions_since
        waited_s = now - self._reactions_since
        if waited_s > _REPORT_S and self._node not in self._answered:
            self._answered.add(self._node)
            self._send("answer", self._node)
        is_known = waited_s > _REPORT_S and self._answered >= set(self._others)
        return first if is_known or waited_s > self._silence_s + _REPORT_S else None

    def _loss(self) -> OtherNodeError | None:
        if self._lost is None:
            return None
        other, host = self._lost
        if other == self._node:
            what = f"the other nodes gave this one up: no sign of life for {self._silence_s:.0f} s"
            return OtherNodeError(f"{what}{self._own_stop()}")
        what = f"{self._names[other]} (host {host}): no sign of life of its agent for {self._silence_s:.0f} s"
        return OtherNodeError(f"{what}: it was killed or stopped, or its host is off or cut off{self._own_stop()}")

    def give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Report to the other nodes that this one aborts the run, and why.

        Args:
            text: the failure of this node.
            code: the exit code for all nodes.
            is_reaction: whether the failure may be a reaction to one of another node; then wait for its report.

        Returns:
            The failure that was first, if it was on another node; else None.
        """
        if not is_reaction:
            self._store.hurry()
        self._gave_up = True
        try:
            self._send("gave up", self._node, int(is_reaction), code, f"{self._name}: {text}")
            cause = None
            while is_reaction and cause is None:
                time.sleep(max(_LOOK_S, self._look_s))
                cause = self._cause()
            self._read()
        except dist.DistNetworkError:
            self._has_ended = True
            return OtherNodeError(self.who_is_gone()) if is_reaction else None
        return None if cause is None or str(cause).startswith(f"{self._name}: ") else cause

    def are_done(self, attempt: str) -> bool:
        """Report that the ranks of this node have ended with 0; return whether the ranks of all nodes have.

        Raises:
            OtherNodeError: another node aborted the run, or is lost.
        """
        try:
            new = attempt not in self._done
            self._done.add(attempt)
            if self._store.add(f"done {attempt}", int(new)) >= self._num_nodes:
                self._read()
                return True
        except dist.DistNetworkError as error:
            raise OtherNodeError(self.who_is_gone()) from error
        self.look()
        return False

    def close(self) -> None:
        """Stop the heartbeats. The agent that keeps the store waits until the other agents have read the last messages."""
        if self._thread is None:
            return
        try:
            self._store.hurry()
            if not self._has_ended and not self._store.lost:
                self.give_up("its agent ended", 1, False)
            if self._is_keeper:
                self._wait_for_readers(_REPORT_S if self._gave_up else self._silence_s)
        except dist.DistNetworkError:
            pass
        finally:
            self._end.set()
            self._thread.join(2 * _LOOK_S)
            self._thread = None

    def _wait_for_readers(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        # Nodes that are lost, or never sent a heartbeat, are not waited for.
        there = [other for other in self._others if self._store.check([f"beat/{other}"])]
        while use_store(self._store, set(there) - self._reported) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
