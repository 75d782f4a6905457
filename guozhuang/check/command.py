"""``guozhuang check``: its options; it takes part as a rank, or starts the ranks itself and tells what they found."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from guozhuang import launch
from guozhuang.check import capturing, reach
from guozhuang.check.conductor import longest_s
from guozhuang.check.rank import DEFAULT_TIMEOUT_S, take_part, taken_over
from guozhuang.check.results import Absence, Results, exit_code, from_json, to_json
from guozhuang.check.verdict import judge
from guozhuang.errors import UsageError, explain
from guozhuang.lab.runs import ended_by_signals
from guozhuang.launch.hosts import placement as hosts
from guozhuang.launch.hosts import ssh
from guozhuang.world import session, slurm

_START_S = 30.0  # for processes to start
_SAID_LINES = 3
_GOT_SIGNAL = re.compile(r"got SIG[A-Z]+")


def main(arguments: Sequence[str]) -> int:
    """Do what ``guozhuang check`` was asked for.

    Args:
        arguments: the command line after ``guozhuang check``.

    Returns:
        0 if nothing was found that breaks training, 1 if something was. A rank other than 0 returns 1 if it could not
        take part, else 0.

    Raises:
        UsageError: the command line or the environment cannot work.
    """
    options = parser().parse_args(list(arguments))
    if not (math.isfinite(options.timeout) and options.timeout >= 1):
        raise UsageError(explain("--timeout is a number of seconds, at least 1", value=options.timeout))
    if options.start_timeout is not None and not 0 < options.start_timeout < 1e6:
        what = "--start-timeout is a number of seconds above 0"
        raise UsageError(explain(what, value=options.start_timeout, fix="leave it out"))
    if options.np is not None and options.np < 1:
        raise UsageError(explain("-np must be at least 1", value=options.np, fix="give the number of ranks"))
    over_ssh = hosts.is_asked_for(options)
    identity = session.identity()
    if identity.launcher != "alone":
        given = {"-np": options.np is not None, "-H": over_ssh, "--interface": options.interface is not None}
        asked = [name for name, is_given in given.items() if is_given]
        if asked:
            started = f"{identity.launcher} has started this process as one of {identity.size}"
            what = f"{asked[0]} is for starting ranks, but {started}"
            raise UsageError(
                explain(what, rank=identity.rank, fix=f"leave {asked[0]} out, or run it without a launcher")
            )
        return take_part(options.timeout, lambda results: tell(results, options.json))
    with ended_by_signals():
        results = _over_hosts(options) if over_ssh else _here(options)
        hint = slurm.hint(command="guozhuang check")
        if hint and not over_ssh:
            results = replace(results, notes=(hint, *results.notes))
        return tell(results, options.json)


def parser() -> argparse.ArgumentParser:
    """The options of ``guozhuang check``; those for several hosts are those of ``guozhuang run``."""
    made = argparse.ArgumentParser(
        prog="guozhuang check",
        description="Measure the links between ranks, compare their hosts, and say what is wrong. Starts ranks on this node, "
        "or over -H; or takes part where a launcher has started it: `srun guozhuang check`, `torchrun -m guozhuang check`.",
        epilog="Exit code: 0 nothing that breaks training; 1 something that does; 2 the command line cannot work.",
    )
    made.add_argument(
        "-np", type=int, metavar="N", help="Ranks: on this node (default: one per CUDA device, else 2), or of all -H."
    )
    made.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"Limit in seconds of each step: meeting, links, all_reduce (default: {DEFAULT_TIMEOUT_S:g}).",
    )
    made.add_argument("--json", action="store_true", help="Print one JSON document instead of tables.")
    hosts.add_arguments(made.add_argument_group("several hosts, over ssh"))
    return made


def tell(results: Results, as_json: bool) -> int:
    """Print a result and return the exit code that follows from it."""
    from rich.console import Console

    from guozhuang.check import table

    findings = judge(results)
    if as_json:
        sys.stdout.write(to_json(results, findings) + "\n")
    else:
        table.show(Console(highlight=False), results, findings)
    sys.stdout.flush()
    return exit_code(findings)


def _here(options: argparse.Namespace) -> Results:
    """Ranks on this node."""
    if options.interface is not None:
        what = "--interface serves several hosts; ranks of one node use loopback"
        raise UsageError(explain(what, value=options.interface, fix="leave it out, or give -H"))
    num_ranks = options.np or _default_ranks()
    return _run(["-np", str(num_ranks)], num_ranks, options.timeout, 0.0)


def _over_hosts(options: argparse.Namespace) -> Results:
    """Ranks on the hosts that let us in; the others are told."""
    named = [host for text in options.hosts or () for host in hosts.parse_hosts(text)]
    if options.hostfile is not None:
        if named:
            raise UsageError(explain("-H and --hostfile exclude each other", fix="leave one out"))
        named = hosts.read_hostfile(options.hostfile)
    placed = hosts.place(named, options.np, None)
    how = ssh.Options(options.ssh_port, options.ssh_identity, options.ssh_config)
    remote = [name for name, _ in placed if not ssh.is_this_machine(name, how)]
    if remote:
        ssh.check_installed()
    limit_s = min(options.timeout, options.start_timeout or options.timeout)
    closed = reach.unreachable(remote, how.arguments(), limit_s)
    shut = {each.host for each in closed}
    num_ranks = sum(int(count) for _, count in placed)
    open_hosts = [(name, int(count)) for name, count in placed if name not in shut]
    if not open_hosts:
        return Results(num_ranks, "guozhuang run", absences=tuple(closed))
    start = options.start_timeout or hosts.DEFAULT_START_TIMEOUT_S
    there = ",".join(f"[{name}]:{count}" if ":" in name else f"{name}:{count}" for name, count in open_hosts)
    command = ["-H", there, *_handed_on(options)]
    num_open = sum(count for _, count in open_hosts)
    found = _run(command, num_open, options.timeout, start)
    left_out = [f"the check ran without {', '.join(sorted(shut))}"] if shut else []
    return replace(found, absences=(*closed, *found.absences), notes=(*left_out, *found.notes))


def _handed_on(options: argparse.Namespace) -> list[str]:
    """The other options for several hosts, as they were given."""
    given = {
        "--ssh-port": options.ssh_port,
        "--ssh-identity": options.ssh_identity,
        "--ssh-config": options.ssh_config,
        "--start-timeout": options.start_timeout,
        "--interface": options.interface,
    }
    found = [word for each in options.exported or () for word in ("-x", each)]
    return found + [f"{name}={value}" for name, value in given.items() if value is not None]


def _default_ranks() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def _run(start: Sequence[str], num_ranks: int, timeout_s: float, start_s: float) -> Results:
    """Let ``guozhuang run`` start the ranks; return what rank 0 found out, or why nobody did. No process is left.

    The launcher is this very process: another one would import torch once more, and could outlive this one.
    """
    command = [*start, "-m", "guozhuang.check.rank", "--timeout", f"{timeout_s:g}"]
    limit_s = longest_s(timeout_s) + _START_S + start_s
    with capturing.captured() as streams, capturing.limited(limit_s, streams) as limit:
        try:
            code = launch.main(command)
        except SystemExit as error:  # its parser; what it said is in the stream
            code = error.code if isinstance(error.code, int) else 1
    text = taken_over(streams.out)
    if text is not None:
        return replace(from_json(text), launcher="guozhuang run")
    lines = [line.strip() for line in streams.err.splitlines() if line.strip()]
    ours = [line.removeprefix("guozhuang run: ") for line in lines if line.startswith("guozhuang run: ")]
    if limit.is_over:
        reason = f"no result within {limit_s:g} s"
    elif any(_GOT_SIGNAL.match(line) for line in ours):
        raise KeyboardInterrupt
    else:
        reason = " | ".join((ours or lines)[:_SAID_LINES]) or f"`guozhuang run` ended with code {code}"
    return Results(
        num_ranks, "guozhuang run", absences=(Absence(None, "", "came to no result", "ranks were started", reason),)
    )
