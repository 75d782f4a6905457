"""The command ``guozhuang check``: take part as a rank under a launcher, or else start the ranks and print their result."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from guozhuang.check.arguments import parser
from guozhuang.check.results import Absence, CheckResults, exit_code, from_json, to_json
from guozhuang.check.verdict import judge
from guozhuang.check.worker import longest_s, printed_result, redirected, take_part
from guozhuang.errors import UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.hosts import options as hosts
from guozhuang.launch.hosts import placement, ssh
from guozhuang.launch.options.arguments import DEFAULT_START_TIMEOUT_S
from guozhuang.launch.request import Request, RunReport
from guozhuang.launch.signals import ENDING
from guozhuang.world import slurm
from guozhuang.world.devices import num_cuda
from guozhuang.world.discovery import discover

_START_S = 30.0  # seconds for processes to start
_GRACE_S = 20.0  # seconds for the launcher to end its processes
_MOST_AT_ONCE = 64  # number of simultaneous ssh processes
_REASON_LINES = 3
_SIGNALLED = {128 + number for number in ENDING}  # the launcher's exit codes after a signal to it


def main(arguments: Sequence[str]) -> int:
    """Run the command ``guozhuang check``, and return its exit code.

    Args:
        arguments: the command line after ``guozhuang check``.

    Returns:
        0 if no problem was found that breaks training, else 1. A rank other than 0 returns 1 if it could not
        take part, else 0.

    Raises:
        UsageError: the command line or the environment cannot work.
    """
    return execute(parser().parse_args(list(arguments)))


def execute(options: argparse.Namespace) -> int:
    """Run the command with options that are parsed already; see :func:`main`."""
    if not (math.isfinite(options.timeout) and options.timeout >= 1):
        raise UsageError(explain("--timeout is a number of seconds, at least 1", value=options.timeout))
    if options.start_timeout is not None and not 0 < options.start_timeout < 1e6:
        what = "--start-timeout is a number of seconds above 0"
        raise UsageError(explain(what, value=options.start_timeout, fix="leave it out"))
    if options.np is not None and options.np < 1:
        raise UsageError(explain("-np must be at least 1", value=options.np, fix="give the number of ranks"))
    over_ssh = hosts.is_asked_for(options)
    identity = discover()
    if identity.launcher != "alone":
        given = {"-np": options.np is not None, "-H": over_ssh, "--interface": options.interface is not None}
        asked = [name for name, is_given in given.items() if is_given]
        if asked:
            started = f"{identity.launcher} has started this process as one of {identity.size}"
            what = f"{asked[0]} is for starting ranks, but {started}"
            raise UsageError(
                explain(what, rank=identity.rank, fix=f"leave {asked[0]} out, or run it without a launcher")
            )
        return take_part(options.timeout, lambda results: show(results, options.json))
    results = _over_hosts(options) if over_ssh else _here(options)
    hint = slurm.hint(command="guozhuang check")
    if hint and not over_ssh:
        results = replace(results, notes=(hint, *results.notes))
    return show(results, options.json)


def show(results: CheckResults, as_json: bool) -> int:
    """Print the results of a check, as tables or as JSON, and return the exit code."""
    from rich.console import Console

    from guozhuang.check import table

    findings = judge(results)
    if as_json:
        sys.stdout.write(to_json(results, findings) + "\n")
    else:
        table.show(Console(highlight=False), results, findings)
    sys.stdout.flush()
    return exit_code(findings)


def _here(options: argparse.Namespace) -> CheckResults:
    """Start ranks on this node, and return the results of their check."""
    if options.interface is not None:
        what = "--interface serves several hosts; ranks of one node use loopback"
        raise UsageError(explain(what, value=options.interface, fix="leave it out, or give -H"))
    num_ranks = options.np or num_cuda() or 2
    return _run(["-np", str(num_ranks)], num_ranks, options.timeout, 0.0)


def _over_hosts(options: argparse.Namespace) -> CheckResults:
    """Start ranks on the hosts that accept ssh connections, and return the results; the other hosts count as absent in them."""
    placed = placement.place(hosts.named_hosts(options), options.np, None)
    how = ssh.SshOptions(options.ssh_port, options.ssh_identity, options.ssh_config)
    remote = [name for name, _ in placed if not ssh.is_this_machine(name, how)]
    if remote:
        ssh.check_installed()
    limit_s = min(options.timeout, options.start_timeout or options.timeout)
    closed = _unreachable(remote, how, limit_s)
    shut = {each.host for each in closed}
    num_ranks = sum(int(count) for _, count in placed)
    open_hosts = [(name, int(count)) for name, count in placed if name not in shut]
    if not open_hosts:
        return CheckResults(num_ranks, "guozhuang run", absences=tuple(closed))
    start = options.start_timeout or DEFAULT_START_TIMEOUT_S
    there = ",".join(f"[{name}]:{count}" if ":" in name else f"{name}:{count}" for name, count in open_hosts)
    command = ["-H", there, *_forwarded(options)]
    num_open = sum(count for _, count in open_hosts)
    found = _run(command, num_open, options.timeout, start)
    left_out = [f"the check ran without {', '.join(sorted(shut))}"] if shut else []
    return replace(found, absences=(*closed, *found.absences), notes=(*left_out, *found.notes))


def _forwarded(options: argparse.Namespace) -> list[str]:
    """Return the options for several hosts besides -H and -np, as command-line words to pass on to ``guozhuang run``."""
    given = {
        "--ssh-port": options.ssh_port,
        "--ssh-identity": options.ssh_identity,
        "--ssh-config": options.ssh_config,
        "--start-timeout": options.start_timeout,
        "--interface": options.interface,
    }
    found = [word for each in options.exported or () for word in ("-x", each)]
    return found + [f"{name}={value}" for name, value in given.items() if value is not None]


def _run(start: Sequence[str], num_ranks: int, timeout_s: float, start_s: float) -> CheckResults:
    """Start the ranks by ``guozhuang run``; return rank 0's result, or the reason why there is none. No process is left.

    The launcher runs in this process: another process would import torch again, and could outlive this one.
    """
    command = [*start, "-m", "guozhuang.check.worker", "--timeout", f"{timeout_s:g}"]
    limit_s = longest_s(timeout_s) + _START_S + start_s
    reports: list[RunReport] = []
    with _captured() as streams, _limited(limit_s, streams) as over:
        try:
            code = agent.main(command, Request(report=reports.append))
        except SystemExit as error:  # raised by the launcher's argument parser; its text is in streams.err
            code = error.code if isinstance(error.code, int) else 1
    text = printed_result(streams.out)
    if text is not None:
        return replace(from_json(text), launcher="guozhuang run")
    lines = _lines(streams.err)
    ours = [line.removeprefix("guozhuang run: ") for line in lines if line.startswith("guozhuang run: ")]
    failed = reports[-1] if reports else RunReport()
    if over:
        reason = f"no result within {limit_s:g} s"
    elif code in _SIGNALLED and not (failed.who or failed.host):  # interrupted by the user: no rank and no host failed
        raise KeyboardInterrupt
    else:
        found = _lines(failed.text) or ours or lines
        reason = " | ".join(found[:_REASON_LINES]) or f"`guozhuang run` ended with code {code}"
    return CheckResults(
        num_ranks, "guozhuang run", absences=(Absence(None, "", "came to no result", "ranks were started", reason),)
    )


def _unreachable(names: Sequence[str], how: ssh.SshOptions, limit_s: float) -> list[Absence]:
    """Try ssh to all hosts at once; return those that refuse the connection within ``limit_s``, with the reason ssh gives."""
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(len(names), 1))) as pool:
        reasons = list(pool.map(lambda name: _refusal(name, how, limit_s), names))
    found = zip(names, reasons, strict=True)
    return [
        Absence(None, host, "cannot be reached", "ssh was tried", reason)
        for host, reason in found
        if reason is not None
    ]


def _refusal(host: str, how: ssh.SshOptions, limit_s: float) -> str | None:
    """Return the reason that ssh gives for a failure; None if the host accepts the connection."""
    try:
        done = subprocess.run(
            ssh.client(host, how, limit_s, "exit 0"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s + 2.0,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s + 2.0:g} s"
    if done.returncode == 0:
        return None
    lines = [line for line in _lines(done.stderr) if not line.startswith("Warning:")]
    return lines[-1] if lines else f"ssh ended with code {done.returncode}"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@dataclass
class _Streams:
    """The text written to stdout and stderr by this process and its children; filled when capturing ends.

    Attributes:
        real_err: the descriptor of the original stderr.
    """

    real_err: int
    out: str = ""
    err: str = ""


@contextlib.contextmanager
def _captured() -> Iterator[_Streams]:
    """Capture stdout and stderr of this process and its children in the ``with`` block; its end fills the yielded streams."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with redirected({1: out.fileno(), 2: err.fileno()}) as kept:
            streams = _Streams(kept[2])
            yield streams
        for name, file in (("out", out), ("err", err)):
            file.seek(0)
            setattr(streams, name, file.read().decode(errors="replace"))


@contextlib.contextmanager
def _limited(limit_s: float, streams: _Streams) -> Iterator[list[float]]:
    """Send SIGTERM to this process after a time limit: it makes the launcher end its processes and return.

    The yielded list holds the limit once it has passed, else it is empty. If the launcher does not return either, this process
    exits: then the launcher's guard ends the ranks.
    """
    over: list[float] = []

    def ring(*_: Any) -> None:
        if over:
            os.write(streams.real_err, f"guozhuang check: no result within {limit_s:g} s\n".encode())
            os._exit(1)
        over.append(limit_s)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, _GRACE_S)
    try:
        yield over
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
