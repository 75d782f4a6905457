"""The parameter servers of a run: processes beside the ranks of this node, started, watched and named.

They meet the ranks at a store that the agent keeps on loopback. Nothing is left of them for the same reasons as of ranks, see
[Note: no orphans] in guard.py: they are started through rank.py and have the run's variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from guozhuang.errors import WorldError, explain
from guozhuang.launch.failures import how
from guozhuang.world import search
from guozhuang.world.identity import MeetingPoint
from guozhuang.world.stores import listen, serve

VARIABLE = "GUOZHUANG_SERVERS"
_STORE_S = 300.0  # the limit of the store's operations
_JOIN_S = 5.0


class Servers:
    """Those of one run, started anew with the ranks of each attempt.

    Args:
        count: how many; 0: everything below does nothing.
        say: how to pass on what they print, line by line.
    """

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self._count, self._say = count, say
        self._store: dist.TCPStore | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        """Start them; to be called by the thread that starts the ranks, before it does."""
        if not self._count:
            return
        listener = listen(MeetingPoint(search.LOOPBACK, 0, is_loopback_meant=True))
        address = f"{search.LOOPBACK}:{listener.getsockname()[1]}"
        self._store = serve(listener, _STORE_S)
        os.environ[VARIABLE] = f"{self._count}@{address}"  # for the ranks
        environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
        stub, own = str(Path(__file__).with_name("rank.py")), ["-I", "-S"]
        for number in range(self._count):
            words = ["-m", "guozhuang.exchange.parameter_server.server", "--stay", "--store", address]
            words += ["--number", str(number), "--count", str(self._count)]
            process = subprocess.Popen(
                [sys.executable, *own, stub, str(os.getpid()), "", sys.executable, *words],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=environ, start_new_session=True,
            )  # fmt: skip
            self._processes.append(process)
            reader = threading.Thread(target=self._read, args=(number, process), name="guozhuang servers", daemon=True)
            reader.start()
            self._readers.append(reader)

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Look whether all are there.

        Raises:
            WorldError: one has ended, which none does by itself.
        """
        for number, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                what = f"parameter server {number} (process {process.pid}) ended with {how(code)}, so the run ends"
                raise WorldError(explain(what, fix="look at what it printed, or in the system's log if it was killed"))

    def close(self) -> None:
        """Kill what is left of them, and pass on what they printed."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(_JOIN_S)  # somebody may have inherited the pipe
        self._store, self._processes, self._readers = None, [], []

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                self._say(f"server {number}: {line.decode(errors='replace').rstrip()}")
