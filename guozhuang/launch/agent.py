"""Start the ranks, wait for them, and say what happened."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from guozhuang import timeline
from guozhuang.errors import WorldError
from guozhuang.launch.failures import describe, exit_code, first
from guozhuang.launch.options import Plan, plan

_log = logging.getLogger("guozhuang")
# What torch elastic says of its own; we say it in our words. LOGLEVEL or TORCH_LOGS bring it back.
_SILENT = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


def main(arguments: Sequence[str]) -> int:
    """Do what ``guozhuang run`` was asked for.

    Args:
        arguments: the command line after ``guozhuang run``.

    Returns:
        0 if every rank ended with 0; else the exit code of the rank that failed first, 128 + its number for a signal;
        1 if the nodes did not meet.

    Raises:
        UsageError: the command line cannot work; nothing was started.
    """
    ours = plan(arguments, os.environ)
    if ours.hosts:
        from guozhuang.launch import hosts

        return hosts.start(ours, arguments)
    for decision in ours.chosen:
        _log.info("chosen: %s", decision)
    for note in ours.notes:
        print(f"guozhuang run: {note}", file=sys.stderr, flush=True)
    for part in _timeline_parts(ours):
        os.unlink(part)  # of an earlier run that was ended before it could join them
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        with _signals(ours.elastic.signals_to_handle, SignalException), _variables(ours.variables), _silence():
            return _run(ours)
    except SignalException as error:
        print(f"guozhuang run: got {error.sigval.name}; the ranks of this node were ended", file=sys.stderr)
        return 128 + int(error.sigval)
    except WorldError as error:
        print(f"guozhuang run: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    finally:
        _join_timelines(ours)


def _run(ours: Plan) -> int:
    from guozhuang.launch.elastic import Run

    run = Run(ours.elastic, ours.pass_local_rank, ours.log_folder, ours.secret, ours.node)
    try:
        ended = run.start()
    finally:
        run.close()
    if ended.elsewhere:
        print(f"guozhuang run: the first failure was on {ended.elsewhere}\nhere, then:", file=sys.stderr)
    if not ended.failures:
        return ended.code
    print(f"guozhuang run: {describe(ended.failures, socket.gethostname(), ended.num_nodes)}", file=sys.stderr)
    if ended.elsewhere:
        return ended.code
    return exit_code(ended.failures[first(ended.failures)].code)


@contextlib.contextmanager
def _signals(names: str, kind: type[Exception]) -> Iterator[None]:
    """From now on a signal is the exception that torch elastic raises for it, also before it has started anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: FrameType | None) -> NoReturn:
        raise kind(f"got signal {number}", signal.Signals(number))

    numbers = [getattr(signal, name.strip(), None) for name in names.split(",")]
    known = [number for number in numbers if isinstance(number, signal.Signals)]
    # Torch elastic sets handlers of its own for the same signals when it starts ranks; both are undone here.
    before = {number: signal.signal(number, told) for number in known}
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
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _timeline_parts(ours: Plan) -> list[str]:
    """The files that ranks write: the timeline's name with ".rank3" at its end."""
    return [] if ours.timeline is None else sorted(glob.glob(f"{glob.escape(ours.timeline)}.rank*"))


def _join_timelines(ours: Plan) -> None:
    if ours.timeline is None:
        return
    parts = _timeline_parts(ours)
    if not parts:
        what = "no timeline was written: no rank came through gz.prepare and to its end"
        print(f"guozhuang run: {what}", file=sys.stderr)
        return
    timeline.merge(parts, ours.timeline)
    for part in parts:
        os.unlink(part)
    print(f"guozhuang run: the timeline is in {ours.timeline}", file=sys.stderr)
