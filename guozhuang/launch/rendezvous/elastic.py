"""Nodes that come and go between a least and a most: torch elastic's dynamic rendezvous, with the stores of stores.py.

[Note: elastic] Five things differ from what torch elastic does by itself.
1. A node that joins later. Torch elastic makes the ranks' store once and tells its address in that round only; whoever comes
   in a later round waits for it for a minute, and all agents end. Here each round has its own store, told in that round.
2. A node that is lost. Torch elastic notices after 15 s without a sign of life, and then waits another 30 s for nodes that
   might still come. Here it is ``_DEFAULTS``: together under ten seconds. The signs carry the time of the clock of their node,
   so clocks that differ by more than ``_ALIVE_S`` would take each other for dead; both can be set by ``--rdzv-conf``.
3. Ranks that hang instead of failing when a node is lost (a cut cable tells nobody): torch elastic asks only whether
   somebody came; here also whether somebody is missing. Where too few are left, and no restart was allowed, the run ends.
4. A node that was taken for dead and goes on (it was stopped): torch elastic lets its ranks run, beside those of the others.
   Here it begins anew, with the others.
5. Nodes that end at different times: torch elastic waits for five minutes, deaf, and then says nothing. Here a node whose
   ranks have ended well waits for all others, and begins anew with them where they must (signs.py).

[Note: half met] A node can be lost after torch elastic has counted it and before all have heard where the ranks meet, and
which rank is whose. Torch elastic waits for it to the end of its patience. Here whoever waits looks at the others, and the
nodes that are left meet again (``AnewError``). A node that goes to meet again is a participant no more, as one that is lost;
so it says that it goes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.rendezvous.base import AnewError, Meeting
from guozhuang.launch.rendezvous.signs import OtherNodeError, Others
from guozhuang.launch.rendezvous.stores import (
    LOOPBACK,
    Kept,
    interface_address,
    is_ours,
    keep,
    meeting_address,
    reach,
    say_if_open,
    wait_for,
)
from guozhuang.net import search
from guozhuang.net.client import PatientStore
from guozhuang.net.search import is_loopback, resolve

_ALIVE_S = 5
_DEFAULTS = {"keep_alive_interval": 1, "keep_alive_max_attempt": _ALIVE_S, "last_call_timeout": 2}
_REACH_S = 1.0  # between looks at the other nodes while the store of the ranks is not reached
# Read by torch elastic's handler: it then leaves the ranks' store to us. See [Note: elastic].
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class ElasticMeeting(Meeting):
    """Between ``min_nodes`` and ``max_nodes`` nodes meet, again whenever one comes or is lost.

    Args:
        parameters: what torch elastic's handler gets; a setting that is absent gets our default.
        host, port: where the store of the agents is kept: by the agent whose address that is, unless ``is_host`` of
            the parameters says who.
        timeout_s: limit for the store to be there, in seconds.
        secret: that joining needs; None without one.
        max_restarts: how often ranks may be started anew after a failure; 0: a node that is needed and lost ends the run.
        interface: the network interface that the user named; None: the one that leads to ``host``.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        host: str,
        port: int,
        timeout_s: float,
        secret: bytes | None,
        max_restarts: int,
        interface: str | None = None,
    ) -> None:
        super().__init__()
        os.environ[_NOT_SHARED] = "1"
        for name, value in _DEFAULTS.items():
            parameters.config.setdefault(name, value)
        self._timeout_s, self._secret, self._max_restarts = timeout_s, secret, max_restarts
        self._min_nodes, self._run_id = parameters.min_nodes, parameters.run_id
        self._keeper = f"the agent at {host}:{port}"
        is_host = parameters.get_as_bool("is_host")
        self._interface = interface
        self._agents = self._open(host, port, is_host)
        self._store = PatientStore(self._agents.store)
        self._address = parameters.local_addr or _own_address(host)
        parameters.local_addr = self._address  # of a name, others may not know the address
        with self._in_our_words():
            backend = C10dRendezvousBackend(self._store, parameters.run_id)
            handler = create_handler(self._store, backend, parameters)
        assert isinstance(handler, DynamicRendezvousHandler)
        self._handler = handler
        settings = handler.settings
        self._join_s = settings.timeout.join.total_seconds()
        self._silence_s = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        self._ranks: Kept | None = None
        self._said: set[str] = set()  # in the round that runs
        self._round = self._num_nodes = 0  # of the round that runs

    def _open(self, host: str, port: int, is_host: bool | None) -> Kept:
        self._is_keeper = _is_this_node(host) if is_host is None else is_host
        who = "the agent that keeps the store"
        if self._is_keeper:
            address = interface_address(host, self._interface)
            try:
                kept = keep(address, port, self._secret)
            except UsageError:
                if is_host:
                    raise
                # Another agent of this very node may keep it.
                self._is_keeper = False
                return reach(address, port, self._secret, 5.0, "the agent that keeps the port, or another program,")
            say_if_open(kept, self._secret)
            return kept
        return reach(meeting_address(host, self._interface), port, self._secret, self._timeout_s, who)

    def get_backend(self) -> str:
        """What torch elastic calls the way of meeting."""
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the agents of all nodes that are there.

        Raises:
            WorldError: too few came in time, or the store is gone.
            AnewError: a node of the round is gone already; to be called again.
        """
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._others is not None:
            self._others.begin_anew()
            self._others.forget()
        self._store.while_waiting = self._look_at_first
        with self._in_our_words():
            found = self._handler.next_rendezvous()
        self._said.clear()
        if self._num_nodes and self._num_nodes != found.world_size:
            self.say(f"now {found.world_size} nodes, before {self._num_nodes}")
        self._num_nodes, self._round = found.world_size, self._state.round
        meeting = self._store.within(f"guozhuang agents/{self._run_id}/{self._round}")
        self._others = Others(
            meeting, found.rank, found.world_size, self._keeper, self._is_keeper, False, self._silence_s
        )
        self._others.begin()
        meeting.while_waiting = self._look
        try:
            if found.rank == 0:
                address = self._address if is_ours(self._address) else search.own_address([self._address], [])
                self._ranks = keep(address, 0, self._secret)
                meeting.set("ranks meet at", f"{self._address} {self._ranks.told[1]}")
            else:
                where = wait_for(meeting, "ranks meet at", self._timeout_s, "the agent of node 0").split()
                self._ranks = self._reach(where[0], int(where[1]))
        except dist.DistNetworkError as error:
            raise OtherNodeError(self._others.who_is_gone()) from error
        return RendezvousInfo(
            meeting, found.rank, found.world_size, RendezvousStoreInfo(self._ranks.host, self._ranks.port)
        )

    def _reach(self, host: str, port: int) -> Kept:
        """Come to the store of the ranks, which listens already; see [Note: half met]."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return reach(host, port, self._secret, _REACH_S, "the agent of node 0")
            except WorldError:
                if time.monotonic() > deadline:
                    raise
                self._look()

    @contextlib.contextmanager
    def _in_our_words(self) -> Iterator[None]:
        """What torch elastic raises names nobody."""
        try:
            yield
        except (RendezvousConnectionError, RendezvousStateError, dist.DistNetworkError) as error:
            why = self._store.lost or f"cannot be used: {error}"
            raise OtherNodeError(f"{self._keeper}, which keeps the store, {why}") from error
        except RendezvousTimeoutError as error:
            names = ", ".join(sorted({node.addr for node in self._state.participants})) or "none"
            what = f"{len(self._state.participants)} of at least {self._min_nodes} nodes came within {self._join_s:g} s"
            fix = "look at the output of the other agents; --rdzv-conf join_timeout=SECONDS waits longer"
            raise OtherNodeError(explain(f"{what} (from {names})", fix=fix)) from error
        except RendezvousClosedError as error:
            what = "the run is over for all nodes: another one ended it, or an earlier run had the same --rdzv-id"
            raise OtherNodeError(explain(what, fix="look at the output of the other agents")) from error

    @property
    def _state(self) -> Any:
        return self._handler._state_holder.state

    @property
    def attempt(self) -> int:
        """How many rounds were before this one; the same on all nodes, also on those that came late."""
        return int(self._state.round)

    def is_closed(self) -> bool:
        """Whether the run is over for all nodes."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Let nobody come any more."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be let in; also above 0 where a node of this round is lost.

        Raises:
            OtherNodeError: another node gave up, or too few are left.
        """
        assert self._others is not None
        self._others.look()
        with self._in_our_words():
            return self._num_changes(int(self._handler.num_nodes_waiting()))

    def _num_changes(self, waiting: int) -> int:
        if self._is_left_out:
            self._say_once("the other nodes took this one for lost, as it gave no sign of life; its ranks are ended")
            return max(waiting, 1)
        missing = self._missing
        if not missing:
            return waiting
        assert self._others is not None
        what = "\n".join(map(self._others.why_missing, missing))
        left = self._num_nodes - len(set(missing) - self._others.that_begin_anew())
        if left >= self._min_nodes:
            self._say_once(f"{what}; the ranks of the other nodes are started anew")
        elif self._max_restarts > 0:
            self._say_once(
                f"{what}; at least {self._min_nodes} nodes are needed: waiting up to {self._join_s:g} s for another one"
            )
        else:
            raise OtherNodeError(f"{what}\n{left} nodes are left, at least {self._min_nodes} are needed")
        return max(waiting, len(missing))

    @property
    def _missing(self) -> list[int]:
        """The nodes of this round that are in it no more."""
        state = self._state
        return sorted(set(range(self._num_nodes)) - set(state.participants.values())) if state.complete else []

    @property
    def _is_left_out(self) -> bool:
        """Whether the other nodes went on without this one."""
        state = self._state
        return state.round != self._round or (state.complete and self._handler._this_node not in state.participants)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _look(self) -> None:
        """While something is waited for that other nodes of this round do: are they there? See [Note: half met]."""
        self.num_nodes_waiting()
        if self._missing or self._is_left_out:
            raise AnewError

    def _look_at_first(self) -> None:
        """The same while torch elastic waits for the first node of the round that begins."""
        self._handler.num_nodes_waiting()
        state = self._state
        if state.complete and 0 not in state.participants.values():
            raise AnewError

    def was_told(self, text: str, code: int) -> None:
        """This agent was told to end. The others go on without it, unless it keeps the store."""
        if self._others is not None and self._is_keeper:
            self._others.give_up(f"{text}, and it keeps the store", code, False)
        elif self._others is not None:
            self._others.leave(text)

    def are_all_done(self) -> bool:
        """Say that the ranks of this node have ended well; return whether those of all nodes have.

        Raises:
            OtherNodeError: another node gave up.
        """
        return self._others is None or self._others.are_done("")

    def get_run_id(self) -> str:
        """What torch elastic calls the run."""
        return str(self._handler.get_run_id())

    def leave(self) -> None:
        """Stop giving signs of life, and close what is ours, without ending the run for the others."""
        self._store.hurry()
        if self._others is not None and self._is_keeper:
            self._others.close()
        elif self._others is not None:
            self._others.forget()
        self._handler._stop_heartbeats()
        self._close()

    def shutdown(self) -> bool:
        """End the run for all nodes, and close the stores."""
        self._store.hurry()
        if self._others is not None:
            self._others.close()
        done = bool(self._handler.shutdown()) if not self._store.lost else False
        self._handler._stop_heartbeats()
        self._close()
        return done

    def _close(self) -> None:
        self._store.close()
        for kept in (self._ranks, self._agents):
            if kept is not None:
                kept.close()


def _is_this_node(host: str) -> bool:
    return host in (socket.gethostname(), "localhost") or any(map(is_ours, resolve(host)))


def _own_address(host: str) -> str:
    """The address of this node on the way to ``host``."""
    for address in resolve(host):
        if is_loopback(address):
            continue
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing: it only chooses the way
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return LOOPBACK
