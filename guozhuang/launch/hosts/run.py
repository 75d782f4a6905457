"""The launcher's side of a run over several hosts: start the hosts, direct their rendezvous, show their output, end them.

[Note: the first failure] A rank that dies makes its peers on other hosts fail a moment later, and their agents may report
that first. So after the first report of a failure the launcher waits ``_SETTLE_S`` before it ends the other hosts. Of the
hosts that failed by themselves, hosts whose agent knows that the cause is elsewhere are considered last; then a signal comes
before an exit code, and an earlier report before a later one. A host that the launcher ended is never the cause.

[Note: hosts of servers] Parameter servers have their own link to their host, even if the host has ranks too. They take part in
the same rendezvous, and if they end before the ranks, the run fails. The launcher ends them after the ranks, which may need
them until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from guozhuang.launch.console.display import Display
from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts import frames, ssh
from guozhuang.launch.hosts import link as hosts_link
from guozhuang.launch.hosts.failure import LOST, HostFailure, last_words
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.meeting import candidates, choose
from guozhuang.launch.hosts.supervisor import AgentStarted, EndAgent, PauseHost
from guozhuang.launch.request import RunReport
from guozhuang.launch.signals import ENDING, RUN_FAILED, Signals

if TYPE_CHECKING:
    from guozhuang.launch.hosts.options import HostsPlan

# Seconds between SIGTERM and SIGKILL: after a signal from the user (as in torchrun); after a failure; and for an agent whose
# ranks have ended, since it may be blocked in a call that a signal does not interrupt.
_ASKED_GRACE_S, _FAILED_GRACE_S, _FINISHED_GRACE_S = 30.0, 10.0, 2.0
# Seconds that an agent gets after --shutdown-timeout to report how its ranks ended.
_AFTER_SHUTDOWN_S = 5.0
_SETTLE_S = 1.0
# Seconds of further wait if all failed hosts only report the loss of another host: agents notice a loss sooner than ssh does.
_CAUSE_S = ssh.ALIVE_S * ssh.ALIVE_COUNT
# Seconds to wait after a host has failed before the rendezvous, so that the report names all hosts that cannot be reached.
_REACH_S = 5.0
# Seconds to wait after the grace time for a host's last messages; then its connection is dropped.
_LAST_WORDS_S = 10.0
# Limit in seconds for sending the hosts ``PauseHost`` after Ctrl-Z; then the launcher stops.
_PAUSE_S = 1.0
# Longest wait for events in seconds while an unfinished line is held back; see console/display.py.
_HOLDING_S = 0.03


_Message = TypeVar("_Message")


class _Failed(Exception):
    """Raised when at least one host failed; ``HostsRun`` has the list of failures."""


class _Stopped(Exception):
    """Raised when the launcher got a signal that ends the run."""


class HostsRun:
    """One run over several hosts: one start of all their ranks, from connecting to the hosts to the last rank's end.

    Args:
        wanted: the checked options on hosts.
        is_local: for each host whether it is this machine.
        secret: the secret of this run, which doors ask for.
        attempt: how many runs of the same command line came before this one.
    """

    def __init__(self, wanted: HostsPlan, is_local: Sequence[bool], secret: bytes, attempt: int = 0) -> None:
        self._wanted, self._secret, self._attempt = wanted, secret, attempt
        self._links = [
            Link(name, node_rank, local)
            for node_rank, (name, local) in enumerate(zip(wanted.names, is_local, strict=True))
        ]
        for link, (_, numbers) in zip(self._links[len(wanted.placed) :], wanted.servers, strict=True):
            link.serves = numbers
        self._selector = selectors.DefaultSelector()
        self._display = Display(is_over=lambda: bool(self._signals))
        self._failures: list[HostFailure] = []
        self._asked_to_end: set[int] = set()
        self._caught = Signals(dict.fromkeys((*ENDING, *wanted.signals)))
        self._caught.note()
        self._signals = self._caught.noted
        self._wants_pause = False
        self._is_over = threading.Event()
        self._has_met = False
        self.may_try_again = False
        self.failed: RunReport | None = None

    def run(self) -> int:
        """Start all hosts and wait until they have ended; return the exit code, as in ``agent.start_hosts``."""
        pings = threading.Thread(target=self._ping, name="guozhuang pings", daemon=True)
        try:
            with self._caught_signals():
                try:
                    self._start()
                    pings.start()
                    self._meet()
                    self._has_met = True
                    self._follow(lambda: all(link.is_closed for link in self._of_ranks))
                    self._end(_FINISHED_GRACE_S)  # all ranks have ended; this ends the parameter servers
                    self._report_ended(says_all=False)
                    return 0
                except _Failed:
                    return self._fail()
                except _Stopped:
                    return self._stop()
        finally:
            self._is_over.set()
            if pings.is_alive():
                pings.join()
            for link in self._links:
                if link.has_started and not link.is_closed:
                    link.abandon()
            self._selector.close()
            self._display.end_lines()

    @property
    def _of_ranks(self) -> list[Link]:
        return [link for link in self._links if not link.serves]

    @property
    def _of_servers(self) -> list[Link]:
        return [link for link in self._links if link.serves]

    def _start(self) -> None:
        wanted = self._wanted
        for link in self._links:
            node = frames.NodeConfig(
                host=link.name,
                node_rank=link.node_rank,
                num_nodes=len(self._of_ranks),
                num_servers=sum(len(each.serves) for each in self._of_servers),
                serves=list(link.serves),
                interface=wanted.interface,
                secret=self._secret.hex(),
                attempt=self._attempt,
                max_restarts=wanted.max_restarts,
                terminals=self._display.terminals,
                options={} if link.serves else wanted.options_of(link.node_rank),
                extension=dataclasses.asdict(wanted.extension),
            )
            link.connect(
                "guozhuang.launch.hosts.node",
                node,
                ssh.carried(os.environ, wanted.extension),
                wanted.environment,
                wanted.ssh,
                wanted.start_timeout_s,
                self._display.take,
            )

    def _meet(self) -> None:
        """Direct the rendezvous of all hosts at the first one. See [Note: the meeting point] in node.py."""
        self._await(AgentStarted, "started", self._links)
        if len(self._links) == 1:
            return
        ready = self._await(frames.NodeReady, "ready", self._links)
        first, others = self._links[0], self._links[1:]
        first.say(
            frames.OpenDoors(candidates(ready, first.name.rpartition("@")[2], self._wanted.master), self._wanted.port)
        )
        (opened,) = self._await(frames.DoorsOpened, "listening", [first])
        doors = [(host, port) for host, port in opened.doors]
        for link in others if doors else ():
            link.say(frames.TryDoors(doors))
        tried = self._await(frames.DoorsTried, "sure which addresses lead to the first host", others if doors else [])
        chosen = choose([link.name for link in self._links], doors, opened.refused, tried)
        if isinstance(chosen, str):
            self._failures.append(HostFailure(first, 1, chosen))
            raise _Failed
        for link in self._links:
            link.say(frames.UseDoor(*chosen))

    def _await(self, kind: type[_Message], state: str, links: Sequence[Link]) -> list[_Message]:
        """Wait until each of these hosts has sent a message of this class, and return the messages.

        Raises:
            _Failed: at the time-out a host had not sent one, so was not in this ``state``; or a host failed.
            _Stopped: the launcher got a signal.
        """
        deadline = time.monotonic() + self._wanted.start_timeout_s
        try:
            self._follow(lambda: all(kind in link.messages for link in links), deadline)
            return [link.messages[kind] for link in links]
        except TimeoutError:
            for link in links:
                if kind not in link.messages:
                    doing = f"was reached, but was not {state}" if link.messages else "could not be reached"
                    text = f"{doing} within {self._wanted.start_timeout_s:g} s (--start-timeout){last_words(link)}"
                    self._failures.append(HostFailure(link, LOST, text))
            raise _Failed from None

    def _follow(self, is_done: Callable[[], bool], deadline: float = float("inf")) -> None:
        """Show the hosts' output until ``is_done`` returns True.

        Raises:
            TimeoutError: the deadline has passed.
            _Failed: a host failed.
            _Stopped: the launcher got a signal.
        """
        while not is_done():
            if self._signals:
                raise _Stopped
            if self._failures:
                raise _Failed
            if self._wants_pause:
                deadline += self._pause()
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
        for key, events in self._selector.select(min(wait_s, _HOLDING_S) if self._display.is_holding else wait_s):
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
        if self._display.is_holding:
            self._display.show_what_waits()

    def _closed(self, link: Link) -> None:
        self._display.close(link)
        if link.node_rank not in self._asked_to_end and link.code != 0:
            self._failures.append(hosts_failure.of(link))

    def _pause(self) -> float:
        """Handle Ctrl-Z: send the hosts ``PauseHost``, stop until the shell resumes this process; return the seconds."""
        begin = time.monotonic()
        self._wants_pause = False
        self._say_to_all(PauseHost(True))
        while time.monotonic() < begin + _PAUSE_S and any(
            not link.is_closed and link.writing() is not None for link in self._links
        ):
            self._turn(0.1)
        self._display.end_lines()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # stops the process before the next line runs
        signal.signal(signal.SIGTSTP, handler)
        self._say_to_all(PauseHost(False))
        return time.monotonic() - begin

    def _say_to_all(self, request: PauseHost) -> None:
        for link in self._links:
            if link.has_started and not link.is_closed:
                link.say(request)

    def _fail(self) -> int:
        """End the other hosts after a failure, report the first failure, and return its exit code."""

        def is_settled(link: Link) -> bool:
            return link.is_closed or (not self._has_met and AgentStarted in link.messages)

        settled = time.monotonic() + (_SETTLE_S if self._has_met else _REACH_S)
        latest = settled + _CAUSE_S
        while not self._signals and not all(map(is_settled, self._links)):
            is_known = any(failure.is_cause for failure in self._failures)
            if time.monotonic() >= (settled if is_known else latest):
                break
            self._turn(0.1)
        first = min(self._failures, key=lambda failure: (not failure.is_cause, not failure.is_signal))
        self._end(self._grace_s(_FAILED_GRACE_S), RUN_FAILED)
        self.may_try_again = first.is_of_script and not self._signals
        self.failed = hosts_failure.summary(first)
        self._display.end_lines()
        self._display.say(f"{first.link.title} {first.text}")
        if first.report is not None and first.report.text:
            self._display.say(first.report.text)
        for failure in self._failures:
            if failure is not first:
                how = failure.text if failure.is_cause else "was ended because of it"
                how = "did so too, in the same words" if how == first.text else how
                self._display.say(f"then {failure.link.title} {how}")
        self._report_ended()
        return first.code

    def _stop(self) -> int:
        """End all hosts after a signal to the launcher; return the exit code.

        The agents get a signal of ``--signals-to-handle`` unchanged; for the usual signals (``ENDING``) they get SIGTERM.
        """
        number = self._signals[0]
        name = signal.Signals(number).name
        self._display.say(f"got {name}; ending the ranks of {len(self._of_ranks)} hosts")
        self._end(self._grace_s(_ASKED_GRACE_S), signal.SIGTERM if number in ENDING else number)
        self._display.end_lines()
        self._report_ended()
        return 128 + number

    def _grace_s(self, least_s: float) -> float:
        """Return the time between SIGTERM and SIGKILL: ``least_s``, or more if ``--shutdown-timeout`` is longer."""
        asked_s = self._wanted.shutdown_timeout_s
        return least_s if asked_s is None else max(least_s, asked_s + _AFTER_SHUTDOWN_S)

    def _end(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """End the hosts that still run: by a request first, by SIGKILL after the grace time or a further signal.

        Args:
            grace_s: the grace time in seconds.
            number: the signal for the agents.
        """
        self._asked_to_end = {link.node_rank for link in self._links if not link.is_closed}
        num_signals = len(self._signals)
        self._end_these(self._of_ranks, grace_s, number)
        # The servers end after the ranks, which may need them until then; see [Note: hosts of servers].
        self._end_these(self._of_servers, _FINISHED_GRACE_S if len(self._signals) == num_signals else 0.0)

    def _end_these(self, links: Sequence[Link], grace_s: float, number: int = signal.SIGTERM) -> None:
        there = [link for link in links if not link.is_closed]
        num_signals = len(self._signals)
        for link in there:
            link.say(
                EndAgent(min(grace_s, _FINISHED_GRACE_S) if frames.RanksFinished in link.messages else grace_s, number)
            )
            if AgentStarted not in link.messages:
                link.abandon()  # the link is still connecting: a supervisor that starts later finds its stdin closed, and ends
        deadline = time.monotonic() + grace_s + _LAST_WORDS_S
        while time.monotonic() < deadline and not all(link.is_closed for link in there):
            if len(self._signals) > num_signals:
                num_signals = len(self._signals) + 1000  # after this signal, which kills the agents, ignore others
                deadline = time.monotonic() + _LAST_WORDS_S
                for link in there:
                    if not link.is_closed:
                        link.say(EndAgent(0.0))
            self._turn(0.1)

    def _report_ended(self, says_all: bool = True) -> None:
        """Print for each host that the launcher ended whether it confirmed its end; ``says_all`` False: only if it did not."""
        for link in self._links:
            if link.node_rank in self._asked_to_end and AgentStarted in link.messages:
                has_ended = link.is_closed and link.code is not None
                how = "was ended because of it" if has_ended else (
                    f"did not confirm its end: the connection is gone, and it ends its {link.what} by itself within "
                    f"{hosts_link.LOST_AFTER_S + hosts_link.LOST_GRACE_S:g} s"
                )  # fmt: skip
                if says_all or not has_ended:
                    self._display.say(f"then {link.title} {how}")

    def _ping(self) -> None:
        while not self._is_over.wait(hosts_link.PING_S):
            for link in self._links:
                if not link.is_closed:
                    link.ping()

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[None]:
        """Record signals to the launcher inside the ``with`` block; outside the main thread, which gets them, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        waker, wake = os.pipe()
        for end in (waker, wake):
            os.set_blocking(end, False)
        self._selector.register(waker, selectors.EVENT_READ)

        def note_pause(*_: Any) -> None:
            self._wants_pause = True

        woken = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        with self._caught:
            can_pause = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
            if can_pause:
                signal.signal(signal.SIGTSTP, note_pause)
            try:
                yield
            finally:
                signal.set_wakeup_fd(woken)
                if can_pause:
                    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                self._selector.unregister(waker)
                os.close(waker)
                os.close(wake)
