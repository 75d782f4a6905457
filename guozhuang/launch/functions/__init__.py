"""``guozhuang.launch(function)``: call a function in new processes, which the launcher of ``guozhuang run`` starts and ends."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from guozhuang.errors import RankFailed, UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.functions.mailbox import Answer, Mailbox
from guozhuang.launch.request import Request, RunReport

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
        nproc: the number of ranks; None: one for each accelerator, or as ``guozhuang run`` chooses for CPUs.
        strategy: how ``gz.prepare`` spreads the training; None: the strategy that the function names.
        backend: what carries collectives, where the function leaves it to ``gz.init``.
        hang_timeout_s: ends the run, with the stacks of all ranks, when a rank has not moved for so many seconds; None: off.

    Returns:
        What the function returned on each rank, in rank order.

    Raises:
        UsageError: an argument cannot work; nothing was started.
        RankFailed: the function raised on a rank, or a rank ended before it returned; the others have been ended. The text has
            the rank and its traceback; the exception is the cause, if it can be pickled.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    if not callable(function):
        raise UsageError(explain("launch() takes a function", value=type(function).__name__, fix="write launch(train)"))
    words = [] if nproc is None else ["-np", str(nproc)]
    for option, value in (("--strategy", strategy), ("--backend", backend), ("--hang-timeout", hang_timeout_s)):
        words += [] if value is None else [option, str(value)]
    words += ["--standalone", "--no-python", sys.executable, "-u", "-m", _TASK]
    reports: list[RunReport] = []
    mailbox = Mailbox(functools.partial(function, *args, **(kwargs or {})))
    try:
        code = agent.main(words, Request(variables=mailbox.variables, report=reports.append))
        answers = _answers(mailbox, nproc)
    finally:
        mailbox.close()
    text = "\n".join(report.text for report in reports if report.text)
    if code == 128 + signal.SIGINT and not any(
        report.who for report in reports
    ):  # no rank: this process was interrupted
        raise KeyboardInterrupt
    if code != 0:
        raise _failure([report.who for report in reports], answers, text, code)
    missing = [str(rank) for rank, answer in enumerate(answers) if answer is None]
    if missing:
        what = f"all ranks ended with 0, but rank {', '.join(missing)} left before the function had returned"
        raise RankFailed(explain(what, fix="return from the function; do not exit"))
    return [answer.result for answer in answers if answer is not None]


def _answers(mailbox: Mailbox, nproc: int | None) -> list[Answer | None]:
    """Return the answers of all ranks; where their number is not known, up to the last that has answered."""
    if nproc is not None:
        return [mailbox.answer(rank) for rank in range(nproc)]
    found: list[Answer | None] = []
    while (answer := mailbox.answer(len(found))) is not None:
        found.append(answer)
    return found


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
