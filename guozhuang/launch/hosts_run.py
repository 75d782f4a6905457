"""A run over several hosts, from the launcher's side: start all, let them meet, pass on what they print, end them together.

[Note: the first failure] A rank that dies makes its peers on other hosts fail a moment later, and their agents may well be
the first to say so. So after the first bad news the other hosts are left alone for ``_SETTLE_S``, and only then told to end;
of those that failed by themselves one whose agent knows that the cause is elsewhere counts last, a signal before an exit
code, and then who spoke first. A host that was told to end is no cause.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guozhuang.launch import ssh
from guozhuang.launch.meeting import candidates, choose
from guozhuang.launch.remote import NO_FOLDER, NO_PACKAGE
from guozhuang.launch.remote_link import Lines, Link, write

if TYPE_CHECKING:
    from guozhuang.launch.hosts import Hosts

LOST = 255  # the exit code where a host could not be reached, or was lost; ssh's own

_PING_S = 2.0
# A host that hears nothing from the launcher for so long ends its ranks; an interrupted network may come back before.
LOST_AFTER_S = 20.0
# What ranks may take to end after SIGTERM: where the user asked for it, as torchrun has it; where the run has failed; and
# where the launcher is gone.
_ASKED_GRACE_S, _FAILED_GRACE_S, _LOST_GRACE_S = 30.0, 10.0, 10.0
_SETTLE_S = 1.0
# While hosts are being reached the others may take longer, so that all that cannot be reached are named at once.
_REACH_S = 5.0
# How long after its grace a host may be silent before its connection is dropped.
_LAST_WORDS_S = 10.0
# How an agent begins to tell how its node ended, and how it says that another node was the cause (failures.py, agent.py,
# elastic_fixed.py). Should the words differ, the report is shown all the same, but at once and not at the end.
_REPORT = re.compile(rb"guozhuang run: ((node [0-9]+: )?rank [0-9]+ failed first|the first failure was on|got SIG)")
_ELSEWHERE = re.compile(rb"guozhuang run: (node [0-9]+: |the first failure was on)|a rank of another node")


@dataclass(frozen=True)
class Failure:
    """Why a host is no longer part of the run.

    Attributes:
        link: the host.
        code: the exit code that the launcher would end with.
        text: what happened, a sentence.
        is_cause: its agent does not say itself that the cause was on another host.
        is_signal: a rank or the agent was ended by a signal.
        is_of_script: the run was on its way, so starting it again may help.
        report: what the agent said about it.
    """

    link: Link
    code: int
    text: str
    is_cause: bool = True
    is_signal: bool = False
    is_of_script: bool = False
    report: bytes = b""


class _Failed(Exception):
    """At least one host failed; the run keeps the list."""


class _Stopped(Exception):
    """The launcher got a signal."""


class Run:
    """One run over several hosts.

    Args:
        wanted: what the command line asks for.
        is_local: for each host whether it is this machine.
        secret: of this run.
    """

    def __init__(self, wanted: Hosts, is_local: Sequence[bool], secret: bytes) -> None:
        self._wanted, self._secret = wanted, secret
        self._links = [
            Link(name, node_rank, local)
            for node_rank, ((name, _), local) in enumerate(zip(wanted.placed, is_local, strict=True))
        ]
        self._selector = selectors.DefaultSelector()
        self._lines = Lines()
        self._reports: dict[int, bytearray] = {}
        self._failures: list[Failure] = []
        self._told_to_end: set[int] = set()
        self._signals: list[int] = []
        self._rings = threading.Event()
        self._has_met = False
        self.may_try_again = False

    def run(self) -> int:
        """Do all of it; see ``hosts.start``."""
        pings = threading.Thread(target=self._ping, name="guozhuang pings", daemon=True)
        try:
            with self._caught_signals():
                try:
                    self._start()
                    pings.start()
                    self._meet()
                    self._has_met = True
                    self._follow(lambda: all(link.is_closed for link in self._links))
                    return 0
                except _Failed:
                    return self._fail()
                except _Stopped:
                    return self._stop()
        finally:
            self._rings.set()
            if pings.is_alive():
                pings.join()
            for link in self._links:
                if link.has_started and not link.is_closed:
                    link.abandon()
            self._selector.close()

    def _start(self) -> None:
        wanted = self._wanted
        for link, (_, count) in zip(self._links, wanted.placed, strict=True):
            token = f"guozhuang-{secrets.token_hex(8)}"
            header = {
                "folder": ssh.folder(),
                "is_remote": not link.is_local,
                "environment": ssh.carried(os.environ),
                "asked_environment": wanted.environment,
                "lists": ssh.LISTS,
                "package": "guozhuang",
                "lost_after_s": LOST_AFTER_S,
                "lost_grace_s": _LOST_GRACE_S,
                "command": ["-m", "guozhuang.launch.remote_node"],
                "node": {
                    "node_rank": link.node_rank,
                    "num_nodes": len(self._links),
                    "interface": wanted.interface,
                    "secret": self._secret.hex(),
                    "arguments": [f"--nproc-per-node={count}", *self._timeline(link), *wanted.arguments],
                },
            }
            if link.is_local:
                command = ssh.local_command(token)
            else:
                # Sooner than ours, so that ssh says what it waited for.
                command = ssh.command(link.name, wanted.ssh, 0.75 * wanted.start_timeout_s, token)
            link.start(command, token, header, self._take)

    def _timeline(self, link: Link) -> list[str]:
        if self._wanted.timeline is None:
            return []
        root, ending = os.path.splitext(self._wanted.timeline)
        name = f"{root}.node{link.node_rank}{ending}" if link.node_rank else self._wanted.timeline
        return [f"--timeline={name}"]

    def _meet(self) -> None:
        """All hosts find the way to the first one. See [Note: the meeting point] in remote_node.py."""
        self._await("agent", self._links)
        if len(self._links) == 1:
            return
        self._await("ready", self._links)
        first, others = self._links[0], self._links[1:]
        ready = [link.messages["ready"] for link in self._links]
        offered = candidates(ready, first.name.rpartition("@")[2], self._wanted.master)
        first.say({"listen": offered, "port": self._wanted.port})
        self._await("listening", [first])
        listening = first.messages["listening"]
        doors = [(str(host), int(port)) for host, port in listening["doors"]]
        for link in others if doors else ():
            link.say({"knock": doors})
        self._await("knocked", others if doors else [])
        names = [link.name for link in self._links]
        chosen = choose(names, doors, listening["refused"], [link.messages["knocked"] for link in others if doors])
        if isinstance(chosen, str):
            self._failures.append(Failure(first, 1, chosen))
            raise _Failed
        for link in self._links:
            link.say({"go": chosen})

    def _await(self, word: str, links: Sequence[Link]) -> None:
        """Until each of these hosts has said so; who has not in time is named."""
        deadline = time.monotonic() + self._wanted.start_timeout_s
        try:
            self._follow(lambda: all(word in link.messages for link in links), deadline)
        except TimeoutError:
            for link in links:
                if word not in link.messages:
                    doing = f"was reached, but was not {word}" if link.messages else "could not be reached"
                    text = f"{doing} within {self._wanted.start_timeout_s:g} s (--start-timeout){_said(link)}"
                    self._failures.append(Failure(link, LOST, text))
            raise _Failed from None

    def _follow(self, is_done: Callable[[], bool], deadline: float = float("inf")) -> None:
        """Pass on what comes until it is done.

        Raises:
            TimeoutError: the deadline is over.
            _Failed: a host failed.
            _Stopped: the launcher got a signal.
        """
        while not is_done():
            if self._signals:
                raise _Stopped
            if self._failures:
                raise _Failed
            if time.monotonic() >= deadline:
                raise TimeoutError
            self._turn(min(0.2, max(deadline - time.monotonic(), 0)))
        if self._failures:
            raise _Failed

    def _turn(self, wait_s: float) -> None:
        watched: dict[int, tuple[int, Link]] = {}
        for link in self._links:
            if not link.is_closed:
                watched |= dict.fromkeys(link.reading(), (selectors.EVENT_READ, link))
                if (stdin := link.writing()) is not None:
                    watched[stdin] = (selectors.EVENT_WRITE, link)
        known = self._selector.get_map()
        for descriptor in [key for key in known if known[key].data is not None and key not in watched]:
            self._selector.unregister(descriptor)
        for descriptor, (events, link) in watched.items():
            if descriptor not in self._selector.get_map():
                self._selector.register(descriptor, events, link)
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            elif events & selectors.EVENT_READ:
                key.data.receive(key.fd)
            else:
                key.data.send_more()
        for link in self._links:
            if not link.is_closed and link.look():
                for descriptor in [key for key in watched if watched[key][1] is link]:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(descriptor)
                self._closed(link)

    def _take(self, link: Link, stream: str, data: bytes) -> None:
        for line in self._lines.add(link, stream, data):
            self._put(link, stream, line)

    def _put(self, link: Link, stream: str, line: bytes) -> None:
        """Pass a line on. What an agent says at its end is kept: only one of them tells of the first failure."""
        if stream == "stderr" and (link.node_rank in self._reports or _REPORT.match(line)):
            self._reports.setdefault(link.node_rank, bytearray()).extend(line)
        else:
            write(stream, line)

    def _closed(self, link: Link) -> None:
        for stream in ("stdout", "stderr"):
            if rest := self._lines.rest(link, stream):
                self._put(link, stream, rest + b"\n")
        report = bytes(self._reports.pop(link.node_rank, b""))
        if link.node_rank in self._told_to_end:
            return
        if link.code == 0:
            write("stderr", report)
            return
        self._failures.append(_failure(link, report))

    def _fail(self) -> int:
        """Tell of the first failure, and end the other hosts."""

        def is_settled(link: Link) -> bool:
            return link.is_closed or (not self._has_met and "supervisor" in link.messages)

        settled = time.monotonic() + (_SETTLE_S if self._has_met else _REACH_S)
        while time.monotonic() < settled and not self._signals and not all(map(is_settled, self._links)):
            self._turn(0.1)
        first = min(self._failures, key=lambda failure: (not failure.is_cause, not failure.is_signal))
        self._end(_FAILED_GRACE_S)
        self.may_try_again = first.is_of_script and not self._signals
        print(f"guozhuang run: host {first.link.name} {first.text}", file=sys.stderr)
        sys.stderr.flush()
        write("stderr", first.report)
        for failure in self._failures:
            if failure is not first:
                how = failure.text if failure.is_cause else "was ended because of it"
                how = "did so too, in the same words" if how == first.text else how
                print(f"guozhuang run: then host {failure.link.name} {how}", file=sys.stderr)
        self._tell_of_ended()
        return first.code

    def _stop(self) -> int:
        """The user, or the system, wants the run to end."""
        number = self._signals[0]
        name = signal.Signals(number).name
        print(f"guozhuang run: got {name}; ending the ranks of {len(self._links)} hosts", file=sys.stderr)
        self._end(_ASKED_GRACE_S)
        self._tell_of_ended()
        return 128 + number

    def _end(self, grace_s: float) -> None:
        """End what still runs: asked first, killed after the grace; at once when a further signal comes."""
        there = [link for link in self._links if not link.is_closed]
        self._told_to_end = {link.node_rank for link in there}
        num_signals = len(self._signals)
        for link in there:
            link.say({"end": grace_s})
            if "agent" not in link.messages:
                link.abandon()  # still on the way there: what comes to be at the other end finds its stdin closed
        deadline = time.monotonic() + grace_s + _LAST_WORDS_S
        while time.monotonic() < deadline and not all(link.is_closed for link in there):
            if len(self._signals) > num_signals:
                num_signals = len(self._signals) + 1000  # once is enough
                deadline = time.monotonic() + _LAST_WORDS_S
                for link in there:
                    if not link.is_closed:
                        link.say({"end": 0})
            self._turn(0.1)

    def _tell_of_ended(self) -> None:
        for link in self._links:
            if link.node_rank in self._told_to_end and "agent" in link.messages:
                how = "was ended because of it" if link.is_closed and link.code is not None else (
                    "did not confirm its end: the connection is gone, and it ends its ranks by itself within "
                    f"{LOST_AFTER_S + _LOST_GRACE_S:g} s"
                )  # fmt: skip
                print(f"guozhuang run: then host {link.name} {how}", file=sys.stderr)

    def _ping(self) -> None:
        while not self._rings.wait(_PING_S):
            for link in self._links:
                if not link.is_closed:
                    link.ping()

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[None]:
        """Note the signals that end a launcher instead of being ended by them; outside the main thread they cannot come."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        waker, wake = os.pipe()
        for end in (waker, wake):
            os.set_blocking(end, False)
        self._selector.register(waker, selectors.EVENT_READ)

        def note(number: int, _: Any) -> None:
            self._signals.append(number)

        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, note)
        woken = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.unregister(waker)
            os.close(waker)
            os.close(wake)


def _failure(link: Link, report: bytes) -> Failure:
    """What became of a host that closed its connection and was not asked to."""
    said, code = link.messages, link.code
    if "missing" in said:
        lacks = {NO_FOLDER: "has no such working directory", NO_PACKAGE: "has Python, but not this package"}
        return Failure(link, 1, f"{lacks[said['missing']]}: {said['why']}")
    if "refused" in said:
        return Failure(link, 1 if code is None else code, f"could not start: {said['refused']}", report=report)
    if code is not None and code < 0:
        text = f"lost its agent by {_signal(-code)}; its ranks were ended"
        if -code == signal.SIGKILL:
            text += "; if nobody sent it, the machine ran out of memory"
        return Failure(link, 128 - code, text, is_signal=True, is_of_script=True, report=report)
    if code is not None:
        # A shell's code for a rank that was ended by a signal; SIGTERM is how an agent ends the others.
        is_signal = code > 128 and code != 128 + signal.SIGTERM
        is_cause = not _ELSEWHERE.search(report)
        return Failure(link, code, f"failed: exit code {code}", is_cause, is_signal, True, report)
    if "supervisor" in said:
        return Failure(link, LOST, f"was lost: the connection to it broke{_said(link)}", report=report)
    client = link.client_code
    if client in (126, 127):
        return Failure(link, client, f"has no such interpreter: {sys.executable}{_said(link)}")
    if client == LOST:
        return Failure(link, LOST, f"could not be reached (ssh ended with {client}){_said(link)}")
    return Failure(link, 1, f"was reached, but the supervisor there ended with {client}{_said(link)}")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(link: Link) -> str:
    words = [line.strip() for line in link.words.replace("\r", "\n").splitlines() if line.strip()]
    return f": {'; '.join(words[-4:])}" if words else ""
