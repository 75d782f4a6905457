"""What became of a host that is no longer part of the run, in words. Pure."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.supervisor import NO_FOLDER, NO_PACKAGE
from guozhuang.launch.request import RunReport

LOST = 255  # the exit code where a host could not be reached, or was lost; ssh's own


@dataclass(frozen=True)
class HostFailure:
    """Why a host is no longer part of the run.

    Attributes:
        link: the host.
        code: the exit code that the launcher would end with.
        text: what happened, a sentence.
        is_cause: its agent does not say itself that the cause was on another host.
        is_signal: a rank or the agent was ended by a signal, or a parameter server ended, which none does because of others.
        is_of_script: the run was on its way, so starting it again may help.
        report: the agent's own; None: it could not make one.
    """

    link: Link
    code: int
    text: str
    is_cause: bool = True
    is_signal: bool = False
    is_of_script: bool = False
    report: RunReport | None = None


def of(link: Link) -> HostFailure:
    """What became of a host that closed its connection and was not asked to."""
    told, code = link.messages, link.code
    report = RunReport(**told["report"]) if "report" in told else None
    if "missing" in told:
        lacks = {NO_FOLDER: "has no such working directory", NO_PACKAGE: "has Python, but not this package"}
        return HostFailure(link, 1, f"{lacks[told['missing']]}: {told['why']}")
    if "refused" in told:
        return HostFailure(link, 1 if code is None else code, f"could not start: {told['refused']}", report=report)
    if "server" in told:
        text = f"ends the run: {told['server']}; look at what it printed, or in the system's log if it was killed"
        return HostFailure(link, 1, text, is_signal=True, is_of_script=True, report=report)
    if code is not None and code < 0:
        text = f"lost its agent by {_signal(-code)}; its {link.what} were ended"
        if -code == signal.SIGKILL:
            text += "; if nobody sent it, the machine ran out of memory"
        return HostFailure(link, 128 - code, text, is_signal=True, is_of_script=True, report=report)
    if code is not None:
        # A shell's code for a rank that was ended by a signal; SIGTERM is how an agent ends the others.
        is_signal = code > 128 and code != 128 + signal.SIGTERM
        is_cause = report is None or report.is_cause
        return HostFailure(link, code, f"failed: exit code {code}", is_cause, is_signal, True, report)
    if "supervisor" in told:
        return HostFailure(link, LOST, f"was lost: the connection to it broke{said(link)}", report=report)
    client = link.client_code
    if client in (126, 127):
        return HostFailure(link, client, f"has no such interpreter: {sys.executable}{said(link)}")
    if client == LOST:
        return HostFailure(link, LOST, f"could not be reached (ssh ended with {client}){said(link)}")
    return HostFailure(link, 1, f"was reached, but the supervisor there ended with {client}{said(link)}")


def summary(failure: HostFailure) -> RunReport:
    """For the program that called the launcher: the rank that failed first on that host, or the host alone."""
    report = failure.report
    if report is not None and report.who:
        return RunReport(who=report.who, host=failure.link.name, code=failure.code)
    return RunReport(host=failure.link.title.removeprefix("host "), code=failure.code)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def said(link: Link) -> str:
    """What ssh or the shell there said last, to be put behind a sentence; "" if nothing."""
    words = [line.strip() for line in link.words.replace("\r", "\n").splitlines() if line.strip()]
    return f": {'; '.join(words[-4:])}" if words else ""
