"""The entry point of ``guozhuang run``: read the command line, run the ranks on this node or on hosts, report the outcome."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import glob
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from guozhuang import timeline
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import say
from guozhuang.launch.hosts import options as hosts_options
from guozhuang.launch.hosts import ssh
from guozhuang.launch.options.arguments import read
from guozhuang.launch.options.plan import Plan, plan
from guozhuang.launch.rendezvous.agents import OtherNodeError
from guozhuang.launch.request import Request, RunReport, with_folders
from guozhuang.world.threads.settle import leave_default_binding

_log = logging.getLogger("guozhuang")
_SECRET_BYTES = 32
_FILES, _FILES_OF_A_RANK = 40, 8  # that an agent opens: 26 and 6 were counted, and some are open for a moment
_ERROR_LEVEL = 2  # number of the level "error" in torch's C++ log
_READ_S = 5.0  # seconds; how long after a signal the last message may wait for the reader of standard error


def main(arguments: Sequence[str], request: Request | None = None) -> int:
    """Execute the command ``guozhuang run`` with these arguments, and wait for its end.

    Args:
        arguments: the command line after ``guozhuang run``.
        request: further options of a program that calls this; None: the defaults.

    Returns:
        0 if every rank ended with 0; else the exit code of the rank that failed first, 128 + its number for a signal;
        1 if the rendezvous of the nodes failed.

    Raises:
        UsageError: the command line cannot work; nothing was started.
    """
    return execute(read(arguments), request or Request())


def execute(found: argparse.Namespace, request: Request) -> int:
    """Execute ``guozhuang run`` with options that are parsed already, and wait for its end; see :func:`main`."""
    return start_hosts(found, request) if hosts_options.is_asked_for(found) else run(found, request)


def run(found: argparse.Namespace, request: Request) -> int:
    """Run the ranks of this node, with options that are parsed already; return the exit code, as ``main`` does.

    Raises:
        UsageError: the options cannot work; nothing was started.
    """
    leave_default_binding()
    try:
        ours = plan(found, {**os.environ, **request.extension.defaults(os.environ)})
        if request.members is not None and not request.members.has_ranks:
            ours = dataclasses.replace(ours, num_local_ranks=0, num_servers=request.members.num_servers)
        report = _run(ours, request)
    except WorldError as error:
        report = RunReport(str(error), code=getattr(error, "code", 1), is_cause=not isinstance(error, OtherNodeError))
    if request.report is not None:
        request.report(report)
    elif report.text:
        say(report.text)
    return report.code


def start_hosts(found: argparse.Namespace, request: Request) -> int:
    """Start the run on all hosts that the command line names, with restarts, and wait until the last rank has ended.

    Args:
        found: the command line, as parsed.
        request: further options of the program that calls this.

    Returns:
        0 if every rank ended with 0; else the exit code of the first failure, 128 + its number for a signal; 255 if a
        host could not be reached or was lost.

    Raises:
        UsageError: the command line cannot work; no host was started.
    """
    from guozhuang.launch.hosts.run import HostsRun

    wanted = hosts_options.plan(found, os.environ)
    wanted = dataclasses.replace(
        wanted, environment={**wanted.environment, **request.variables}, extension=request.extension
    )
    is_here = request.is_here or functools.partial(ssh.is_this_machine, options=wanted.ssh)
    is_local = [is_here(name) for name in wanted.names]
    if not all(is_local):
        ssh.check_installed()
    where = ", ".join(f"{name} ({count})" for name, count in wanted.placed)
    _log.info("%d hosts, with their ranks: %s", len(wanted.placed), where)
    if wanted.servers:
        where = ", ".join(f"{name} ({len(numbers)})" for name, numbers in wanted.servers)
        _log.info("%d hosts, with their parameter servers: %s", len(wanted.servers), where)
    for attempt in range(wanted.max_restarts + 1):
        run = HostsRun(wanted, is_local, secrets.token_bytes(_SECRET_BYTES), attempt)
        code = run.run()
        if code == 0 or not run.may_try_again:
            break
        if attempt < wanted.max_restarts:
            say(f"starting all ranks again, time {attempt + 1} of {wanted.max_restarts}")
    if run.failed is not None and request.report is not None:
        request.report(run.failed)
    return code


def _run(ours: Plan, request: Request) -> RunReport:
    for decision in ours.chosen:
        _log.info("chosen: %s", decision)
    for note in ours.notes:
        say(note)
    _allow_open_files(ours.num_local_ranks)
    _forget_timelines(ours)
    from guozhuang.launch.signals import SignalledError

    try:
        with _variables(ours, request), _errors_only():
            return _run_here(ours, request)
    except SignalledError as error:
        text = f"{error}; the ranks of this node were ended"
        if request.report is not None:
            return RunReport(text, code=128 + error.number)
        say(text, within_s=_READ_S)
        return RunReport(code=128 + error.number)
    finally:
        _join_timelines(ours)


def _run_here(ours: Plan, request: Request) -> RunReport:
    run: TorchElasticRun | LocalRun
    if ours.is_torchruns:
        from guozhuang.launch.torchrun import TorchElasticRun

        run = TorchElasticRun(ours, request)
    else:
        from guozhuang.launch.local_run import LocalRun

        run = LocalRun(ours, request)
    with contextlib.closing(run):
        return run.run()


@contextlib.contextmanager
def _variables(ours: Plan, request: Request) -> Iterator[None]:
    """Set the environment that the ranks inherit, and restore it afterwards."""
    before = dict(os.environ)
    for name in ("GUOZHUANG_LOCAL_RANK", *request.extension.of_a_process):
        os.environ.pop(name, None)  # a run that is started inside a rank of another run inherits such variables
    os.environ.update(request.extension.defaults(os.environ))
    os.environ.update(ours.variables)
    os.environ.update(request.variables)
    os.environ.update(with_folders(os.environ.get("PYTHONPATH", ""), request.extension.python_path))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Suppress warnings of torch's C++ log inside the ``with`` block, unless the environment sets a log level.

    For a lost store torch would log twenty lines of stack frames; our error is one line. ``TORCH_CPP_LOG_LEVEL`` cannot be
    used: torch reads it only at import, and ranks inherit it. So the C++ variable behind it is set, if it can be found.
    """
    import torch

    level = None
    if not {"TORCH_CPP_LOG_LEVEL", "LOGLEVEL", "TORCH_LOGS"} & os.environ.keys():
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before = None if level is None else level.value
    if level is not None:
        level.value = max(level.value, _ERROR_LEVEL)
    try:
        yield
    finally:
        if level is not None and before is not None:
            level.value = before


def _allow_open_files(num_ranks: int) -> None:
    """Raise this process's soft limit of open files where the ranks' pipes and handles need more; the ranks inherit it.

    Raises:
        UsageError: the hard limit is too low.
    """
    import resource

    needed = _FILES + _FILES_OF_A_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        what = f"this shell allows too few open files: the launcher of {num_ranks} ranks needs {needed}"
        raise UsageError(explain(what, value=hard, fix="ulimit -n 1024, in a shell that may raise the limit"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _timeline_parts(ours: Plan) -> list[str]:
    """Return the timeline files of the ranks: the timeline's name followed by, for example, ".rank3"."""
    return [] if ours.timeline is None else sorted(glob.glob(f"{glob.escape(ours.timeline)}.rank*"))


def _forget_timelines(ours: Plan) -> None:
    """Remove timeline files of ranks that an earlier run left because it was killed before it could join them."""
    try:
        for part in _timeline_parts(ours):
            os.unlink(part)
    except OSError as error:
        what = f"a part of an earlier timeline cannot be removed: {error}"
        raise UsageError(explain(what, value=ours.timeline, fix="give --timeline another file")) from error


def _join_timelines(ours: Plan) -> None:
    """Join the timelines of the ranks. A failure is reported but does not change the exit code."""
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
