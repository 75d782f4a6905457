"""Start the ranks, wait for them, and say what happened."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from guozhuang import timeline
from guozhuang.errors import UsageError, explain
from guozhuang.launch.failures import describe, exit_code, first
from guozhuang.launch.options import Plan, plan

_log = logging.getLogger("guozhuang")


def main(arguments: Sequence[str]) -> int:
    """Do what ``guozhuang run`` was asked for.

    Args:
        arguments: the command line after ``guozhuang run``.

    Returns:
        0 if every rank ended with 0; else the exit code of the rank that failed first, 128 + its number for a signal.

    Raises:
        UsageError: the command line cannot work; nothing was started.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ours = plan(arguments, os.environ)
    for decision in ours.chosen:
        _log.info("chosen: %s", decision)
    for part in _timeline_parts(ours):
        os.unlink(part)  # of an earlier run that was ended before it could join them
    try:
        with _variables(ours.variables), _log_folder(ours):
            _start(ours)
        return 0
    except ChildFailedError as error:
        print(f"guozhuang run: {describe(error.failures)}\n{error}", file=sys.stderr)
        return exit_code(error.failures[first(error.failures)].exitcode)
    except SignalException as error:
        print(f"guozhuang run: got {error.sigval.name}; the ranks of this node were ended", file=sys.stderr)
        return 128 + error.sigval.value
    finally:
        _join_timelines(ours)


def _start(ours: Plan) -> None:
    from torch.distributed.run import run

    try:
        run(ours.elastic)
    except (ValueError, AssertionError) as error:
        # How torch elastic refuses an option: a range of nodes, a rendezvous, a filter that cannot be read.
        what = f"torch elastic refused the options: {error}"
        raise UsageError(explain(what, fix="see `guozhuang run --help`")) from error


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


@contextlib.contextmanager
def _log_folder(ours: Plan) -> Iterator[None]:
    """A folder for torch elastic's error files that goes away again, unless the user wants logs in files."""
    options = ours.elastic
    if options.log_dir is not None or options.redirects != "0" or options.tee != "0":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="guozhuang-run-") as folder:
        options.log_dir = folder
        yield


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
