"""Start and watch the parameter servers of a run, which are processes on a host.

Servers and ranks meet at a store: with one node at a store that the agent keeps on loopback, with several nodes at the store
of the ranks' rendezvous. Servers are started through rank.py and have the run's variable, so that none is left when the agent
is killed, see [Note: no orphans] in guard.py. With -H the host's supervisor kills them in place of a guard.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from guozhuang.errors import WorldError, explain
from guozhuang.launch.crew import entry
from guozhuang.launch.failures import how
from guozhuang.launch.rendezvous.fixed import Attempt
from guozhuang.net import interfaces
from guozhuang.net.meet import WorldStore, keep
from guozhuang.net.meeting_point import MeetingPoint

VARIABLE = "GUOZHUANG_SERVERS"
_STORE_S = 300.0  # timeout of one operation of the store, in seconds
_JOIN_S = 5.0


class Servers:
    """The parameter servers of one host.

    Args:
        numbers: the numbers of this host's servers among all servers of the run.
        count: how many servers the run has.
        say: called with each line that they print.
    """

    def __init__(self, numbers: Sequence[int], count: int, say: Callable[[str], None]) -> None:
        self._numbers, self._count, self._say = numbers, count, say
        self._processes: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._readers: list[threading.Thread] = []

    def start(self, address: str) -> None:
        """Start the servers. The calling thread must outlive them; see [Note: no orphans].

        Args:
            address: address of the store where they meet the ranks, as ``host:port``.
        """
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        # At the end the store closes before the servers do, and c10d would log warnings about that.
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        for number in self._numbers:
            words = ["-m", "guozhuang.exchange.parameter_server.server", "--stay", "--store", address]
            words += ["--number", str(number), "--count", str(self._count)]
            process = subprocess.Popen(
                [*entry(), sys.executable, *words],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=environ, start_new_session=True,
            )  # fmt: skip
            self._processes.append((number, process))
            reader = threading.Thread(target=self._read, args=(number, process), name="guozhuang servers", daemon=True)
            reader.start()
            self._readers.append(reader)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the servers."""
        return [process.pid for _, process in self._processes]

    def ended(self, but_well: bool = False) -> str | None:
        """Return a sentence: which server has ended before the run, and how; None while all servers are running.

        Args:
            but_well: ignore servers that ended with 0, as they do when the store has closed.
        """
        for number, process in self._processes:
            code = process.poll()
            if code is not None and not (but_well and code == 0):
                return f"parameter server {number} (process {process.pid}) ended with {how(code)}"
        return None

    def close(self) -> None:
        """Kill the servers that are still running, and show their remaining output."""
        for _, process in self._processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a server in uninterruptible sleep is left behind
                process.wait(_JOIN_S)
        for reader in self._readers:
            reader.join(_JOIN_S)  # wait for a limited time, because a child of the server may hold the pipe open
        self._processes, self._readers = [], []

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                self._say(f"server {number}: {line.decode(errors='replace').rstrip()}")


class ServersError(WorldError):
    """Raised when a parameter server of this node has ended early; the agent then aborts the run on all nodes."""


class ServersOfANode:
    """The parameter servers beside the ranks of one node, restarted with the ranks in each attempt.

    Args:
        count: how many servers; with 0 there may be some on other nodes, of which the ranks are told.
        say: called with each line that they print.
    """

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self._count, self._say = count, say
        self._servers = Servers([], 0, say)
        self._store: WorldStore | None = None
        self._is_alone = True

    def start(self, attempt: Attempt) -> dict[str, str]:
        """Start the servers. The thread that starts the ranks must call ``start`` before it starts them.

        Args:
            attempt: the attempt, with the number of servers of each node and the address of the ranks' store.

        Returns:
            The environment variables by which the ranks find the servers.
        """
        counts = [share.servers for share in attempt.shares]
        begin, count = sum(counts[: attempt.node]), sum(counts)
        if not count:
            return {}
        self._is_alone = len(counts) == 1
        if self._is_alone:
            self._store = keep(MeetingPoint(interfaces.LOOPBACK, 0), _STORE_S)
            address = f"{interfaces.LOOPBACK}:{self._store.port}"
        else:
            # Servers use the agents' store, which is new or emptied in each attempt.
            host = f"[{attempt.host}]" if ":" in attempt.host else attempt.host
            address = f"{host}:{attempt.port}"
        self._servers = Servers(range(begin, begin + self._count), count, self._say)
        self._servers.start(address)
        return {VARIABLE: f"{count}@{address}"}

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the servers."""
        return self._servers.pids

    def check(self) -> None:
        """Check that all servers are running.

        Raises:
            ServersError: a server has ended.
        """
        # With several nodes a server ends with 0 when the store closes, because another node restarts its ranks or is lost:
        # the rendezvous reports that.
        ended = self._servers.ended(but_well=not self._is_alone)
        if ended is not None:
            fix = "look at what it printed, or in the system's log if it was killed"
            raise ServersError(explain(f"{ended} on host {socket.gethostname()}, so the run ends", fix=fix))

    def close(self) -> None:
        """Kill the servers that are still running, and show their remaining output."""
        self._servers.close()
        self._store = None
