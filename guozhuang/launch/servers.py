"""The parameter servers of a run: processes on a host, started, watched and named.

They meet the ranks at a store: with one node at one that the agent keeps on loopback, with several at the one where ranks meet.
Nothing is left of them for the same reasons as of ranks, see [Note: no orphans] in guard.py: they are started through rank.py
and have the run's variable. Under -H the host's supervisor ends them in place of a guard.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

from guozhuang.errors import WorldError, explain
from guozhuang.launch.crew import entry
from guozhuang.launch.failures import how
from guozhuang.launch.rendezvous.fixed import Attempt
from guozhuang.net import search
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.net.store import listen, serve

VARIABLE = "GUOZHUANG_SERVERS"
_STORE_S = 300.0  # the limit of the store's operations
_JOIN_S = 5.0


class Servers:
    """Those of one host.

    Args:
        numbers: which of the run's servers they are.
        count: how many the run has.
        say: how to pass on what they print, line by line.
    """

    def __init__(self, numbers: Sequence[int], count: int, say: Callable[[str], None]) -> None:
        self._numbers, self._count, self._say = numbers, count, say
        self._processes: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._readers: list[threading.Thread] = []

    def start(self, address: str) -> None:
        """Start them; to be called by a thread that lives as long as they shall.

        Args:
            address: of the store where they meet the ranks, ``host:port``.
        """
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        # At the end of a run its store goes first, which c10d would tell of.
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
        """Their processes."""
        return [process.pid for _, process in self._processes]

    def ended(self, but_well: bool = False) -> str | None:
        """Who has ended, which none does by itself while the run goes on, and how; None while all are there.

        Args:
            but_well: leave out who ended with 0, as servers do when the store is gone where they met the ranks.
        """
        for number, process in self._processes:
            code = process.poll()
            if code is not None and not (but_well and code == 0):
                return f"parameter server {number} (process {process.pid}) ended with {how(code)}"
        return None

    def close(self) -> None:
        """Kill what is left of them, and pass on what they printed."""
        for _, process in self._processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel, as guard.py says
                process.wait(_JOIN_S)
        for reader in self._readers:
            reader.join(_JOIN_S)  # somebody may have inherited the pipe
        self._processes, self._readers = [], []

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                self._say(f"server {number}: {line.decode(errors='replace').rstrip()}")


class ServersError(WorldError):
    """The run cannot go on with the parameter servers of this node; its other nodes are told."""


class ServersOfANode:
    """Those beside the ranks of one node, started anew with the ranks of each attempt.

    Args:
        count: how many; 0: everything below does nothing.
        say: how to pass on what they print, line by line.
    """

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self._count, self._say = count, say
        self._servers = Servers([], 0, say)
        self._store: dist.TCPStore | None = None
        self._is_alone = True

    def start(self, attempt: Attempt) -> dict[str, str]:
        """Start them; to be called by the thread that starts the ranks, before it does.

        Args:
            attempt: how many servers each node starts, and where the ranks meet.

        Returns:
            What the ranks need in their environment.
        """
        if not self._count:
            return {}
        counts = [share.servers for share in attempt.shares]
        begin, count = sum(counts[: attempt.node]), sum(counts)
        self._is_alone = len(counts) == 1
        if self._is_alone:
            listener = listen(MeetingPoint(search.LOOPBACK, 0, is_loopback_meant=True))
            address = f"{search.LOOPBACK}:{listener.getsockname()[1]}"
            self._store = serve(listener, _STORE_S)
        else:
            # The agents keep that store, and a new one, or an empty one, for each attempt.
            host = f"[{attempt.host}]" if ":" in attempt.host else attempt.host
            address = f"{host}:{attempt.port}"
        self._servers = Servers(range(begin, begin + self._count), count, self._say)
        self._servers.start(address)
        return {VARIABLE: f"{count}@{address}"}

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return self._servers.pids

    def check(self) -> None:
        """Look whether all are there.

        Raises:
            ServersError: one has ended, which none does by itself.
        """
        # The end of a store that other nodes keep is theirs: they begin anew or are lost, which the meeting tells of.
        ended = self._servers.ended(but_well=not self._is_alone)
        if ended is not None:
            fix = "look at what it printed, or in the system's log if it was killed"
            raise ServersError(explain(f"{ended} on host {socket.gethostname()}, so the run ends", fix=fix))

    def close(self) -> None:
        """Kill what is left of them, and pass on what they printed."""
        self._servers.close()
        self._store = None
