"""How the agent of a node reacts to signals and to ranks that end, with made-up ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from guozhuang.launch import local_run
from guozhuang.launch.failures import Failure
from guozhuang.launch.job import Job, Outcome, Over, Send
from guozhuang.launch.local_run import LocalRun
from guozhuang.launch.rendezvous.agents import OtherNodeError
from guozhuang.launch.request import Request
from guozhuang.launch.signals import RUN_FAILED, SignalledError, Signals
from guozhuang.watch.processes import ENDED_BY_SIGTERM


def agent(request: Request, was_asked: bool = True) -> Any:
    """Return what methods of ``LocalRun`` use of an agent with three ranks that would save and end if they were asked."""
    job, signals = Job(max_restarts=2, shutdown_s=30.0), cast(Any, contextlib.nullcontext())
    job.begin(range(3))
    signals.note = lambda: None
    found = SimpleNamespace(_plan=None, _config=None, _request=request, _signals=signals, _job=job)
    found.said, found.given_up, found.sent = [], [], []
    found._failures = lambda codes: {rank: Failure(rank, code, 7, 0.0) for rank, code in codes.items()}
    found._output = SimpleNamespace(say=found.said.append, interrupted=lambda: None)
    found._rendezvous = SimpleNamespace(
        ask_to_end=lambda: True,
        was_asked_to_end=lambda: was_asked,
        is_asked_end=lambda error: was_asked and error.code == ENDED_BY_SIGTERM,
        take_back_request=lambda: found.said.append("taken back"),
    )
    found._ask_to_end = partial(LocalRun._ask_to_end, found)
    found._is_asked_end = partial(LocalRun._is_asked_end, found)
    found._give_up = lambda *given: found.given_up.append(given)
    found._end_ranks = lambda: found.sent.extend(job.turn(0.0))
    return found


def run(here: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    def attempts(rendezvous: object) -> None:
        raise error

    here._attempts = attempts
    monkeypatch.setattr(local_run, "open_fixed", lambda *_: here._rendezvous)
    with pytest.raises(type(error)):
        LocalRun.run(here)
    return list(here.sent)


UNDER_A_LAUNCHER = Request(max_restarts=0)


@pytest.mark.parametrize(
    ("request_", "number", "sent"),
    [
        (Request(), signal.SIGTERM, None),
        (UNDER_A_LAUNCHER, signal.SIGTERM, None),
        (UNDER_A_LAUNCHER, RUN_FAILED, signal.SIGTERM),
        (Request(), signal.SIGHUP, signal.SIGHUP),
    ],
)
def test_ranks_are_asked_to_save_where_they_can(
    monkeypatch: pytest.MonkeyPatch, request_: Request, number: int, sent: int | None
) -> None:
    here = agent(request_)
    assert run(here, SignalledError(number), monkeypatch) == ([] if sent is None else [Send((0, 1, 2), sent)])
    assert len(here.said) == (sent is None) and len(here.given_up) == 1


@pytest.mark.parametrize(
    ("error", "was_asked", "is_signalled"),
    [
        (OtherNodeError("node 1: its agent got SIGTERM", ENDED_BY_SIGTERM), True, False),
        (OtherNodeError("node 1: its agent got SIGTERM", ENDED_BY_SIGTERM), False, True),
        (OtherNodeError("node 1: rank 3 failed first", 1), True, True),
    ],
)
def test_ranks_that_another_agent_asked_are_left_to_end(
    monkeypatch: pytest.MonkeyPatch, error: OtherNodeError, was_asked: bool, is_signalled: bool
) -> None:
    sent = run(agent(Request(), was_asked), error, monkeypatch)
    assert sent == ([Send((0, 1, 2), signal.SIGTERM)] if is_signalled else [])


def test_a_rank_that_ends_as_another_agent_asked_is_no_failure() -> None:
    here = agent(Request())
    for rank in range(3):
        LocalRun._ended(here, rank, ENDED_BY_SIGTERM)
    assert here._job.turn(1.0) == [Over(Outcome.STOPPED)] and not here.said
    here = agent(Request(), was_asked=False)
    for rank in range(3):
        LocalRun._ended(here, rank, ENDED_BY_SIGTERM)
    assert here._job.turn(1.0) == [Over(Outcome.RETRY)]


def test_a_rank_that_fails_instead_of_saving_is_said_once() -> None:
    here = agent(Request())
    for rank, code in ((0, ENDED_BY_SIGTERM), (1, -signal.SIGKILL), (2, 1)):
        LocalRun._ended(here, rank, code)
    taken_back, said = here.said
    assert (
        taken_back == "taken back"
        and said.startswith("rank 1 failed first: ")
        and said.endswith("; the others get SIGTERM")
    )
    assert here._job.turn(1.0)[-1] == Over(Outcome.STOPPED)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_while_a_rank_starts_comes_to_that_rank(monkeypatch: pytest.MonkeyPatch, num_signals: int) -> None:
    here = agent(Request())
    here._job.begin(())
    here._signals = Signals([signal.SIGUSR1])
    here._plan = SimpleNamespace(num_local_ranks=1)
    here._command, here._with_local_rank = ["true"], lambda command, local_rank: command
    here._logs, here._error_files, here._pids = None, {}, {}
    here._files = SimpleNamespace(open=lambda local_rank, environ: ("", ""))
    monkeypatch.setattr(local_run.versions, "field", lambda config, name: None)
    monkeypatch.setattr(local_run.versions, "bound_to_numa", lambda command, local_rank, options: command)

    def start(*_: object) -> int:
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGUSR1)  # the rank runs by now
        return 7

    here._crew = SimpleNamespace(start=start)
    here._attempts = lambda rendezvous: LocalRun._start_rank(here, 0, {"RANK": "5"})
    monkeypatch.setattr(local_run, "open_fixed", lambda *_: here._rendezvous)
    with pytest.raises(SignalledError):
        LocalRun.run(here)
    assert here.sent == [Send((5,), signal.SIGUSR1)]
    assert here._signals.noted == [signal.SIGUSR1] * (num_signals - 1)
