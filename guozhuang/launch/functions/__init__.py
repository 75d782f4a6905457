"""``guozhuang.launch(function)``: call a function in new processes, which the launcher of ``guozhuang run`` starts and ends."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from guozhuang.errors import RankFailed, UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.functions.mailbox import Answer, Mailbox
from guozhuang.launch.options.plan import num_ranks
from guozhuang.launch.request import Request, RunReport

_one_at_a_time = threading.Lock()
_TASK = "guozhuang.launch.functions.task"


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | None = None,
    strategy: str | None = None,
    backend: str | None = None,
    hang_timeout_s: float | None = None,
) -> list[Any]:
    """Call a function on new ranks of this machine, for programs and notebooks; wait for all of them.

    This process is no rank. The function may come from a notebook's cell: it is pickled by cloudpickle, with its arguments and
    all of the caller's module that it uses, and so is what it returns. In it ``gz.init()`` meets the other ranks, as in a
    script under ``guozhuang run``, by whose launcher the ranks are started, watched and ended: none outlives this call.

    Args:
        function: called on every rank.
        args: its positional arguments.
        kwargs: its keyword arguments.
        nproc: the number of ranks; None: one for each CUDA device, or one on a machine without, as ``guozhuang run`` does.
        strategy: how ``gz.prepare`` spreads the training; None: the strategy that the function names.
        backend: what carries collectives, where the function leaves it to ``gz.init``.
        hang_timeout_s: ends the run, with the stacks of all ranks, when a rank has not moved for so many seconds; None: off.

    Returns:
        What the function returned on each rank, in rank order.

    Raises:
        UsageError: an argument cannot work, the function cannot be pickled, or another thread is in ``launch``; nothing was
            started.
        RankFailed: the function raised on a rank, or a rank ended before it returned; the others have been ended. The text has
            the rank and its traceback; the exception is the cause, if it can be pickled.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    if not callable(function):
        raise UsageError(explain("launch() takes a function", value=type(function).__name__, fix="write launch(train)"))
    size = num_ranks(nproc, os.environ)
    words = ["-np", str(size)]
    for option, value in (("--strategy", strategy), ("--backend", backend), ("--hang-timeout", hang_timeout_s)):
        words += [] if value is None else [option, str(value)]
    words += ["--standalone", "--no-python", sys.executable, "-u", "-m", _TASK]
    reports: list[RunReport] = []
    if not _one_at_a_time.acquire(blocking=False):
        what = "another thread of this program is in launch(), which changes the environment of the process meanwhile"
        raise UsageError(explain(what, fix="call launch() when the other call has returned"))
    try:
        mailbox = Mailbox(functools.partial(function, *args, **(kwargs or {})))
        try:
            code = agent.main(words, Request(variables=mailbox.variables, report=reports.append))
            answers = [mailbox.answer(rank) for rank in range(size)]
        finally:
            mailbox.close()
    finally:
        _one_at_a_time.release()
    failed = [report.who for report in reports if report.who]
    if code == 128 + signal.SIGINT and not failed:  # this process was interrupted, and no rank
        raise KeyboardInterrupt
    if code != 0:
        text = "\n".join(report.text for report in reports if report.text)
        raise _failure(failed, answers, text, code)
    missing = [str(rank) for rank, answer in enumerate(answers) if answer is None]
    if missing:
        what = f"all ranks ended with 0, but rank {', '.join(missing)} left before the function had returned"
        raise RankFailed(explain(what, fix="return from the function; do not exit"))
    return [answer.result for answer in answers if answer is not None]


def _failure(failed: Sequence[str], answers: Sequence[Answer | None], text: str, code: int) -> RankFailed:
    """Return the error of the rank that failed first, as the launcher saw it, else of the first that raised."""
    raised = {rank: answer for rank, answer in enumerate(answers) if answer is not None and answer.trace}
    first = next((rank for rank in raised if f"rank {rank}" in failed), min(raised, default=None))
    if first is None:
        return RankFailed(text or f"the ranks ended with exit code {code}; see what was said before")
    answer = raised[first]
    error = RankFailed(f"the function raised on rank {first}:\n{answer.trace.rstrip()}", rank=first)
    error.__cause__ = answer.error
    return error
