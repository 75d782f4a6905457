"""Rank 0 of a check: wait for the others, conduct, put together what is known, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from guozhuang.check.board import Board, OtherVersion
from guozhuang.check.conductor import Conductor
from guozhuang.check.ending import Ended, Ending
from guozhuang.check.facts import collect, network
from guozhuang.check.results import OTHER_VERSION, Absence, Facts, Results, is_loopback
from guozhuang.check.serving import serve
from guozhuang.check.wire import listen
from guozhuang.errors import WorldError
from guozhuang.world.identity import Identity

_LEAVE_S = 2.0
_SETTLE_S = 0.3


class Leader:
    """Leads one check; rank 0 makes one.

    Args:
        identity: of this process.
        timeout_s: limit of each step.
        ending: entered; signals that end this process.
    """

    def __init__(self, identity: Identity, timeout_s: float, ending: Ending) -> None:
        self._identity = identity
        self._timeout_s = timeout_s
        self._ending = ending
        self._started = time.monotonic()
        self._facts: dict[int, Facts] = {}
        self._absences: list[Absence] = []
        self._board: Board | None = None
        self._conductor: Conductor | None = None
        self._thread: threading.Thread | None = None

    def lead(self) -> Results:
        """Do all of it; what is known when a signal or a lost store ends it is the result.

        Raises:
            UsageError: the environment cannot work.
        """
        try:
            try:
                self._lead()
            except WorldError as error:
                own = self._facts.get(0)
                absence = Absence(0, own.host if own else "", "could not meet the others", self._when, str(error))
                self._absences.append(absence)
            finally:
                self._let_go()
            self._ending.over()
        except Ended as error:  # raised once, wherever we were
            self._note_end(error)
            self._let_go()
        conductor = self._conductor
        return Results(
            num_ranks=self._identity.size,
            launcher=self._identity.launcher,
            facts=tuple(self._facts[rank] for rank in sorted(self._facts)),
            clocks=tuple(conductor.clocks) if conductor else (),
            links=tuple(conductor.links) if conductor else (),
            reductions=tuple(conductor.reductions) if conductor else (),
            absences=(*self._absences, *(conductor.absences if conductor else ())),
            notes=tuple(conductor.notes) if conductor else (),
            duration_s=time.monotonic() - self._started,
        )

    @property
    def _when(self) -> str:
        return self._conductor.when if self._conductor else "the ranks met"

    def _lead(self) -> None:
        own = self._facts[0] = collect(self._identity)
        deadline = time.monotonic() + self._timeout_s
        board = self._board = Board(self._identity, self._timeout_s)
        if board.host and board.host != own.network.meeting_host:
            own = self._facts[0] = replace(own, network=network(board.host))
        board.write_facts(own)
        self._wait_for_facts(board, deadline)
        self._facts, address_of = _addresses(self._facts)
        own = self._facts[0]
        listener, addresses = _listener(own, len({each.node for each in self._facts.values()}) > 1)
        word = secrets.token_hex(16)
        record = {
            "addresses": addresses,
            "port": listener.getsockname()[1],
            "word": word,
            "address_of": {str(rank): address for rank, address in address_of.items()},
        }
        self._conductor = Conductor(
            listener, word, self._facts, address_of, self._timeout_s, lambda rank: _left_word(board, rank)
        )
        self._thread = threading.Thread(
            target=_serve_here, args=(own, record, self._timeout_s), name="guozhuang check", daemon=True
        )
        self._thread.start()
        board.write("record", record)
        self._conductor.lead(self._identity.size)

    def _wait_for_facts(self, board: Board, deadline: float) -> None:
        for rank in range(1, self._identity.size):
            try:
                told = board.read_facts(rank, deadline - time.monotonic())
            except OtherVersion as error:
                self._absences.append(Absence(rank, error.host, OTHER_VERSION, "the ranks met", str(error)))
                continue
            if told is None:
                reason = f"within {self._timeout_s:g} s"
                self._absences.append(Absence(rank, "", "did not come", "the ranks met", reason))
            else:
                self._facts[rank] = told

    def _note_end(self, error: Ended) -> None:
        if self._conductor is None:
            self._absences.append(Absence(None, "", "was ended", "the ranks met", str(error)))
            return
        self._conductor.settle(_SETTLE_S)
        if not any(each.what != "was ended" for each in self._conductor.absences):
            self._conductor.absences.append(Absence(None, "", "was ended", self._conductor.when, str(error)))

    def _let_go(self) -> None:
        """End what was begun. A second call does what a signal kept the first from doing."""
        if self._conductor is not None:
            self._conductor.end()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
        if self._board is not None:
            self._board.everybody_came()


def _addresses(facts: dict[int, Facts]) -> tuple[dict[int, Facts], dict[int, str]]:
    """Where each rank listens for its peers: on loopback if there is one node, else on the interface that its node uses."""
    nodes: dict[str, Facts] = {}
    for rank in sorted(facts):
        nodes.setdefault(facts[rank].node, facts[rank])
    if len(nodes) == 1:
        return facts, dict.fromkeys(facts, "127.0.0.1")
    own = facts[0]
    if all(map(is_loopback, own.network.meeting_addresses)):  # a passage; what leads to another node tells more
        far = next((each.network.address for node, each in nodes.items() if node != own.node), "")
        if far and not is_loopback(far):
            own = replace(own, network=network(far))
    facts, nodes[own.node] = facts | {0: own}, own
    return facts, {rank: nodes[each.node].network.address or each.network.address for rank, each in facts.items()}


def _listener(own: Facts, several: bool) -> tuple[socket.socket, list[str]]:
    """Where ranks call rank 0: where they met, which they have shown that they reach, or on the interface it uses."""
    if not several:
        return listen("127.0.0.1"), ["127.0.0.1"]
    for each in dict.fromkeys([*own.network.meeting_addresses, own.network.address]):
        if each and not is_loopback(each):
            with contextlib.suppress(OSError):
                return listen(each), list(dict.fromkeys([each, own.network.meeting_host]))
    # The address where ranks meet is none of this host's: something between translates it.
    every = [a for each in own.network.interfaces for a in each.addresses if not a.startswith(("127.", "::1", "fe80"))]
    return listen(""), [own.network.meeting_host, *every]


def _serve_here(own: Facts, record: dict[str, Any], timeout_s: float) -> None:
    with contextlib.suppress(OSError):  # the conductor stopped listening; it is in this very process
        serve(own, record, timeout_s)


def _left_word(board: Board, rank: int) -> str:
    """Why a rank did not call, if it could say so."""
    with contextlib.suppress(WorldError):
        return str(board.read(f"word/{rank}") or "")
    return ""
