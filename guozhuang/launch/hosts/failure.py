"""Describe why a host has failed, from the messages and the exit codes that the launcher received. Pure."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

from guozhuang.launch.failures import OUT_OF_MEMORY, signal_name
from guozhuang.launch.hosts.frames import NodeRefused, ServerEnded
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.supervisor import AgentStarted, HostLacks
from guozhuang.launch.request import RunReport

LOST = 255  # exit code if a host could not be reached, or was lost; the same as ssh's


@dataclass(frozen=True)
class HostFailure:
    """The failure of a host: it could not be reached, was lost, or its agent ended with an error.

    Attributes:
        link: the host.
        code: the exit code that the launcher would end with.
        text: the failure, as a sentence without its subject, which is the host.
        is_cause: whether the cause may be on this host; False: its agent reported that the cause was on another host.
        is_signal: whether a signal ended a rank or the agent, or a parameter server ended; none of these is a reaction.
        is_of_script: whether the agent had started, so that restarting the run may help.
        report: the agent's report; None: it did not send one.
    """

    link: Link
    code: int
    text: str
    is_cause: bool = True
    is_signal: bool = False
    is_of_script: bool = False
    report: RunReport | None = None


def of(link: Link) -> HostFailure:
    """Return the failure of a host whose connection has closed although the launcher did not ask the host to end."""
    code, report = link.code, link.last(RunReport)
    if (lack := link.last(HostLacks)) is not None:
        return HostFailure(link, 1, lack.what)
    if (refused := link.last(NodeRefused)) is not None:
        return HostFailure(link, 1 if code is None else code, f"could not start: {refused.why}", report=report)
    if (server := link.last(ServerEnded)) is not None:
        text = f"ends the run: {server.how}; look at what it printed, or in the system's log if it was killed"
        return HostFailure(link, 1, text, is_signal=True, is_of_script=True, report=report)
    if code is not None and code < 0:
        text = f"lost its agent by {signal_name(-code)}; its {link.what} were ended"
        if -code == signal.SIGKILL:
            text += f"; {OUT_OF_MEMORY}"
        return HostFailure(link, 128 - code, text, is_signal=True, is_of_script=True, report=report)
    if code is not None:
        # A code above 128 is that of a signal, as in a shell. SIGTERM is no cause: agents send it to their remaining ranks.
        is_signal = code > 128 and code != 128 + signal.SIGTERM
        is_cause = report is None or report.is_cause
        return HostFailure(link, code, f"failed: exit code {code}", is_cause, is_signal, True, report)
    if link.last(AgentStarted) is not None:
        return HostFailure(link, LOST, f"was lost: the connection to it broke{last_words(link)}", report=report)
    client = link.client_code
    if client in (126, 127):
        return HostFailure(link, client, f"has no such interpreter: {sys.executable}{last_words(link)}")
    if client == LOST:
        return HostFailure(link, LOST, f"could not be reached (ssh ended with {client}){last_words(link)}")
    return HostFailure(link, 1, f"was reached, but the supervisor there ended with {client}{last_words(link)}")


def summary(failure: HostFailure) -> RunReport:
    """Return a report for the program that called the launcher: the rank that failed first on that host, or only the host."""
    report = failure.report
    if report is not None and report.who:
        return RunReport(who=report.who, host=failure.link.name, code=failure.code)
    return RunReport(host=failure.link.title.removeprefix("host "), code=failure.code)


def last_words(link: Link) -> str:
    """Return the last lines that ssh or the host's shell printed, as the end of a sentence; "" if there are none."""
    words = [line.strip() for line in link.words.replace("\r", "\n").splitlines() if line.strip()]
    return f": {'; '.join(words[-4:])}" if words else ""
