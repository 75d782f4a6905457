"""The fork server of the tests: a process that has imported everything, from which others are forked in 10 ms.

    process = fork_server().Process(target=function_at_the_top_of_a_module, args=(1, 2))

``starts`` counts what was started in this process, for the report at the end of a test run.
"""

from __future__ import annotations

import collections
import multiprocessing.context

# Imported by the server, last of all in ``tests.preload``: what a forked process need not import again.
PRELOADED = ("tests.preload",)

starts: collections.Counter[str] = collections.Counter()


class _Process(multiprocessing.context.ForkServerProcess):
    def start(self) -> None:
        starts["forked"] += 1
        super().start()


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Process


def fork_server() -> multiprocessing.context.ForkServerContext:
    """A context of multiprocessing whose processes are forked from the server; the first of them starts it."""
    context = _Context()
    context.set_forkserver_preload(list(PRELOADED))
    return context
