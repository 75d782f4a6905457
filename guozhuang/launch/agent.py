"""Start the ranks, wait for them, and say what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from guozhuang import timeline
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch import python_path, torch_log
from guozhuang.launch.console.say import say
from guozhuang.launch.failures import describe, exit_code, first
from guozhuang.launch.options.plan import Plan, plan
from guozhuang.launch.order import FirstFailure, Order
from guozhuang.launch.outer import Outer

_log = logging.getLogger("guozhuang")
_READ_S = 5.0  # for whoever reads our output to take the last word, after a signal
# What torch elastic says of its own; we say it in our words. LOGLEVEL or TORCH_LOGS bring it back.
_SILENT = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


def main(arguments: Sequence[str], outer: Outer | None = None, order: Order | None = None) -> int:
    """Do what ``guozhuang run`` was asked for.

    Args:
        arguments: the command line after ``guozhuang run``.
        outer: what the launcher of several hosts says, where it has started this agent.
        order: what the program that calls this wants besides; None: nothing.

    Returns:
        0 if every rank ended with 0; else the exit code of the rank that failed first, 128 + its number for a signal;
        1 if the nodes did not meet.

    Raises:
        UsageError: the command line cannot work; nothing was started.
    """
    try:
        order = order or Order()
        ours = plan(arguments, os.environ)
        if ours.hosts:
            from guozhuang.launch.hosts import placement as hosts

            return hosts.start(ours, arguments, order)
        ours = dataclasses.replace(ours, variables={**ours.variables, **order.variables})
        return _start(ours, outer, order)
    except WorldError as error:
        say(str(error))
        return getattr(error, "code", 1)


def _start(ours: Plan, outer: Outer | None, order: Order) -> int:
    for decision in ours.chosen:
        _log.info("chosen: %s", decision)
    for note in ours.notes:
        say(note)
    _forget_timelines(ours)
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ours.elastic.signals_to_handle = _heeded(ours.elastic.signals_to_handle)
    try:
        with (
            _signals(ours.elastic.signals_to_handle, SignalException),
            _variables(ours.variables),
            _silence(),
            torch_log.errors_only(os.environ),
        ):
            return _run(ours, outer, order)
    except SignalException as error:
        say(f"got {error.sigval.name}; the ranks of this node were ended", within_s=_READ_S)
        return 128 + int(error.sigval)
    finally:
        _join_timelines(ours)


def _run(ours: Plan, outer: Outer | None, order: Order) -> int:
    from guozhuang.launch.elastic import Run

    run = Run(
        *(ours.elastic, ours.pass_local_rank, ours.log_folder, ours.secret, ours.node, outer, ours.num_servers),
        *(ours.copy_folder, ours.timestamps),
    )
    try:
        ended = run.start()
    finally:
        run.close()
    if ended.elsewhere:
        say(f"the first failure was on {ended.elsewhere}\nhere, then:")
    if ended.why:
        say(ended.why)
    if not ended.failures:
        return ended.code
    say(describe(ended.failures, socket.gethostname(), ended.num_nodes))
    if ended.elsewhere:
        return ended.code
    rank = first(ended.failures)
    code = exit_code(ended.failures[rank].code)
    order.failed(FirstFailure(f"rank {rank} on host {socket.gethostname()}", code))
    return code


def _heeded(names: str) -> str:
    """Those of the signals that this process was not started to ignore, as nohup does with SIGHUP and a shell with SIGINT."""
    wanted = [name.strip() for name in names.split(",")]
    return ",".join(name for name in wanted if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN)


@contextlib.contextmanager
def _signals(names: str, kind: type[Exception]) -> Iterator[None]:
    """From now on a signal is the exception that torch elastic raises for it, also before it has started anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: FrameType | None) -> NoReturn:
        raise kind(f"got signal {number}", signal.Signals(number))

    # Torch elastic sets handlers of its own for the same signals when it starts ranks; both are undone here.
    before = {
        number: signal.signal(number, told) for number in (getattr(signal, name) for name in names.split(",") if name)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Torch elastic's log says in many lines what the report says; only what would be lost comes through."""
    loggers = [] if {"LOGLEVEL", "TORCH_LOGS"} & os.environ.keys() else [logging.getLogger(name) for name in _SILENT]
    import torch.distributed.elastic.agent.server.api
    import torch.distributed.launcher.api  # they set their level when they are imported  # noqa: F401

    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Torch elastic hands its own environment on to the ranks, and writes to it; leave it as it was."""
    before = dict(os.environ)
    for name in ("GUOZHUANG_LOCAL_RANK", python_path.ELASTIC, *python_path.OF_A_PROCESS):
        os.environ.pop(name, None)  # of a run that this one is started in
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _timeline_parts(ours: Plan) -> list[str]:
    """The files that ranks write: the timeline's name with ".rank3" at its end."""
    return [] if ours.timeline is None else sorted(glob.glob(f"{glob.escape(ours.timeline)}.rank*"))


def _forget_timelines(ours: Plan) -> None:
    """Remove what an earlier run left that was ended before it could join its timelines."""
    try:
        for part in _timeline_parts(ours):
            os.unlink(part)
    except OSError as error:
        what = f"a part of an earlier timeline cannot be removed: {error}"
        raise UsageError(explain(what, value=ours.timeline, fix="give --timeline another file")) from error


def _join_timelines(ours: Plan) -> None:
    """Join the timelines of the ranks; whether that works changes nothing about how the run ended."""
    if ours.timeline is None:
        return
    parts = _timeline_parts(ours)
    if not parts:
        say("no timeline was written: no rank came through gz.prepare and to its end")
        return
    try:
        timeline.merge(parts, ours.timeline)
        for part in parts:
            os.unlink(part)
    except (UsageError, OSError) as error:
        say(
            f"the timelines of the ranks could not be joined, and are left as they are ({ours.timeline}.rank*): {error}"
        )
        return
    say(f"the timeline is in {ours.timeline}")
