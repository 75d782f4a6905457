"""The fork server of the tests: a process that has imported everything, from which others are forked in 10 ms.

    process = fork_server().Process(target=function_at_the_top_of_a_module, args=(1, 2))

``starts`` counts what was started in this process, for the report at the end of a test run.
"""

from __future__ import annotations

import collections
import multiprocessing.context
import multiprocessing.forkserver
import os
from typing import Any

# Imported by the server, last of all in ``tests.preload``: what a forked process need not import again.
PRELOADED = ("tests.preload",)

starts: collections.Counter[str] = collections.Counter()
# Processor time that the fork server has used to import what is preloaded, once it has started.
preload_s = 0.0


class _Process(multiprocessing.context.ForkServerProcess):
    def start(self) -> None:
        global preload_s
        starts["forked"] += 1
        super().start()
        preload_s = preload_s or processor_s()


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Process


def fork_server() -> multiprocessing.context.ForkServerContext:
    """A context of multiprocessing whose processes are forked from the server; the first of them starts it."""
    context = _Context()
    context.set_forkserver_preload(list(PRELOADED))
    return context


def processor_s() -> float:
    """Processor time of the fork server and of its children that have ended; 0 where there is none, or no Linux."""
    server = _server()._forkserver_pid
    try:
        with open(f"/proc/{server}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # those after the name, which may hold anything
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def stop() -> None:
    """End the fork server, so that its processor time counts as that of a child of this process."""
    if _server()._forkserver_pid is not None:
        _server()._stop()


def _server() -> Any:
    return multiprocessing.forkserver._forkserver
