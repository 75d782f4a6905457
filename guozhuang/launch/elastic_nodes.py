"""Nodes that come and go between a least and a most: torch elastic's dynamic rendezvous, with the stores of elastic_stores.py.

[Note: elastic] Three things differ from what torch elastic does by itself.
1. A node that joins later. Torch elastic makes the ranks' store once and tells its address in that round only; whoever comes
   in a later round waits for it for a minute, and all agents end. Here each round has its own store, told in that round.
2. A node that is lost. Torch elastic notices after 15 s without a sign of life, and then waits another 30 s for nodes that
   might still come. Here it is ``_DEFAULTS``: together under ten seconds. The signs carry the time of the clock of their node,
   so clocks that differ by more than ``_ALIVE_S`` would take each other for dead; both can be set by ``--rdzv-conf``.
3. Ranks that hang instead of failing when a node is lost (a cut cable tells nobody): torch elastic asks only whether
   somebody came; here also whether somebody is missing.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from guozhuang.errors import UsageError
from guozhuang.launch.elastic_stores import (
    LOOPBACK,
    Kept,
    addresses,
    interface_address,
    is_loopback,
    is_ours,
    keep,
    reach,
    wait_for,
)

_ALIVE_S = 5
_DEFAULTS = {"keep_alive_interval": 1, "keep_alive_max_attempt": _ALIVE_S, "last_call_timeout": 2}
# Read by torch elastic's handler: it then leaves the ranks' store to us. See [Note: elastic].
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class ElasticMeeting(RendezvousHandler):
    """Between ``min_nodes`` and ``max_nodes`` nodes meet, again whenever one comes or is lost.

    Args:
        parameters: what torch elastic's handler gets; a setting that is absent gets our default.
        host, port: where the store of the agents is kept: by the agent whose address that is, unless ``is_host`` of
            the parameters says who.
        timeout_s: limit for the store to be there, in seconds.
        secret: that joining needs; None without one.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        host: str,
        port: int,
        timeout_s: float,
        secret: bytes | None,
    ) -> None:
        os.environ[_NOT_SHARED] = "1"
        for name, value in _DEFAULTS.items():
            parameters.config.setdefault(name, value)
        self._timeout_s, self._secret = timeout_s, secret
        self._agents = self._open(host, port, parameters.get_as_bool("is_host"))
        self._address = parameters.local_addr or _own_address(host)
        parameters.local_addr = self._address  # of a name, others may not know the address
        backend = C10dRendezvousBackend(self._agents.store, parameters.run_id)
        handler = create_handler(self._agents.store, backend, parameters)
        assert isinstance(handler, DynamicRendezvousHandler)
        self._handler = handler
        self._ranks: Kept | None = None
        self._num_nodes = 0  # of the round that runs

    def _open(self, host: str, port: int, is_host: bool | None) -> Kept:
        ours = is_host if is_host is not None else _is_this_node(host)
        if ours:
            try:
                return keep(interface_address(host), port, self._secret)
            except UsageError:
                if is_host:
                    raise
                # Another agent of this very node may keep it.
                return reach(host, port, self._secret, 5.0, "the agent that keeps the port, or another program,")
        return reach(host, port, self._secret, self._timeout_s, "the agent that keeps the store")

    def get_backend(self) -> str:
        """What torch elastic calls the way of meeting."""
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        """The agent of node 0 keeps the store of the ranks."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the agents of all nodes that are there."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        found = self._handler.next_rendezvous()
        if self._num_nodes and self._num_nodes != found.world_size:
            print(f"guozhuang run: now {found.world_size} nodes, before {self._num_nodes}", file=sys.stderr, flush=True)
        self._num_nodes = found.world_size
        if found.rank == 0:
            address = self._address if is_ours(self._address) else "0.0.0.0"
            self._ranks = keep(address, 0, self._secret)
            found.store.set("ranks meet at", f"{self._address} {self._ranks.told[1]}")
        else:
            host, port = wait_for(found.store, "ranks meet at", self._timeout_s, "the agent of node 0").split()
            self._ranks = reach(host, int(port), self._secret, self._timeout_s, "the agent of node 0")
        where = RendezvousStoreInfo(self._ranks.host, self._ranks.port)
        return RendezvousInfo(found.store, found.rank, found.world_size, where)

    @property
    def attempt(self) -> int:
        """How many rounds were before this one; the same on all nodes, also on those that came late."""
        return int(self._handler._state_holder.state.round)

    def is_closed(self) -> bool:
        """Whether the run is over for all nodes."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Let nobody come any more."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be let in; also above 0 where a node of this round is lost."""
        waiting = int(self._handler.num_nodes_waiting())
        state = self._handler._state_holder.state
        return max(waiting, self._num_nodes - len(state.participants)) if state.complete else waiting

    def get_run_id(self) -> str:
        """What torch elastic calls the run."""
        return str(self._handler.get_run_id())

    def leave(self) -> None:
        """Stop giving signs of life, and close what is ours, without ending the run for the others."""
        self._handler._stop_heartbeats()
        self._close()

    def shutdown(self) -> bool:
        """End the run for all nodes, and close the stores."""
        done = bool(self._handler.shutdown())
        self._close()
        return done

    def _close(self) -> None:
        for kept in (self._ranks, self._agents):
            if kept is not None:
                kept.close()


def _is_this_node(host: str) -> bool:
    return host in (socket.gethostname(), "localhost") or any(map(is_ours, addresses(host)))


def _own_address(host: str) -> str:
    """The address of this node on the way to ``host``."""
    for address in addresses(host):
        if is_loopback(address):
            continue
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing: it only chooses the way
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return LOOPBACK
