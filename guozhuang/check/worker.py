"""One rank of a check, under any launcher; rank 0 leads, and returns the result.

[Note: a check goes step by step] The ranks meet at the store of the world, as in ``gz.init``, and write their facts to it.
Rank 0 writes a roster of the ranks that came in time; others are reported missing, and the check continues without them. From
the roster every rank derives the same plan of pairs. Rank 0 starts each step by writing a key to the store, collects the
answers from the store with a limit, and publishes in the key of the next step which ranks were lost. Ranks measure each other
over gloo groups of two, and all_reduce in the world of ``gz.init``.

Every step runs in a thread (``net.client``), because calls into torch do not react to signals; the main thread waits for it.
``guozhuang check`` starts ranks as ``python -m guozhuang.check.worker`` if no launcher has started them.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from guozhuang.check.arguments import DEFAULT_TIMEOUT_S
from guozhuang.check.facts import collect, network
from guozhuang.check.results import OTHER_VERSION, Absence, CheckResults, Facts, to_json
from guozhuang.check.steps import ENDED_S, CheckState, Steps, read, steps_limit_s, store_of, write
from guozhuang.check.verdict import judge
from guozhuang.errors import WorldError, explain
from guozhuang.net.client import OverdueError, PatientStore, attempt, look_s
from guozhuang.net.interfaces import is_loopback
from guozhuang.net.meet import WorldStore, claim
from guozhuang.records import build
from guozhuang.world import session
from guozhuang.world.discovery import discover
from guozhuang.world.identity import Identity

_FACTS_S = 15.0
_LATE_S = 5.0  # seconds by which rank 0 may start to wait for the ranks later than another rank does
_LEAVE_S = 3.0
_CHUNK = 900  # characters of a line of the printed result: some pipes and terminals fold or cut long lines
_PRINTED = re.compile(r"guozhuang-check (\d+)/(\d+) ([A-Za-z0-9+/=]+)")


class CheckEnded(Exception):
    """Raised when a signal ends rank 0: the result is built from the measurements so far."""


class ExcludedError(WorldError):
    """This rank could not take part in the check; rank 0 may never learn the reason.

    Attributes:
        facts: facts about this rank.
    """

    def __init__(self, text: str, facts: Facts) -> None:
        super().__init__(text)
        self.facts = facts


def longest_s(timeout_s: float) -> float:
    """Return the seconds that a check takes at most, from the start of the ranks to rank 0's result.

    Args:
        timeout_s: limit of each step: the meeting (once for the store, once for the ranks), links, all_reduce.
    """
    return _FACTS_S + 2 * timeout_s + steps_limit_s(timeout_s) + 2 * _LEAVE_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Take part in a check as a rank; rank 0 prints the result on stdout in a form that ``guozhuang check`` parses."""
    parser = argparse.ArgumentParser(prog="python -m guozhuang.check.worker")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="limit of each step")
    return take_part(parser.parse_args(arguments).timeout, print_result)


def print_result(results: CheckResults) -> int:
    """Print the result for :func:`printed_result`, in lines that can be found even if a launcher adds prefixes."""
    text = base64.b64encode(zlib.compress(to_json(results, ()).encode())).decode()
    chunks = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
    for number, chunk in enumerate(chunks):
        print(f"guozhuang-check {number + 1}/{len(chunks)} {chunk}", flush=True)
    return 0


def printed_result(printed: str) -> str | None:
    """Return the text that :func:`print_result` printed among other output; None if it is incomplete."""
    found = {int(number): (int(total), chunk) for number, total, chunk in _PRINTED.findall(printed)}
    if not found or len(found) != found[max(found)][0]:
        return None
    return zlib.decompress(base64.b64decode("".join(found[number][1] for number in sorted(found)))).decode()


def take_part(timeout_s: float, show: Callable[[CheckResults], int]) -> int:
    """Run the check on this rank. Every rank must call this.

    Args:
        timeout_s: limit of each step: the meeting, the links, all_reduce.
        show: called on rank 0 with the result, with the process's own stdout; returns the exit code.

    Returns:
        Rank 0: the result of ``show``. Others: 0, or 1 if the check failed for this rank.

    Raises:
        UsageError: the environment cannot work.
    """
    identity = discover()
    worker = CheckRank(identity, timeout_s)
    try:
        with redirected({1: 2}):  # libraries such as gloo print to stdout, which is to hold only the result
            results = worker.run()
    except ExcludedError as error:
        print(f"guozhuang check: {error}", file=sys.stderr)
        alone = CheckResults(identity.size, identity.launcher, (error.facts,))
        for finding in judge(alone):
            print(f"guozhuang check: on rank {identity.rank}: {finding.text}", file=sys.stderr)
        code = 1
    else:
        code = show(results) if results is not None else 0
    if worker.is_stuck:
        # A call that hangs in torch cannot be cancelled, and would block the interpreter's exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class CheckRank:
    """One rank of a check, which collects its facts, finds the other ranks, runs the steps and, on rank 0, returns the result.

    Args:
        identity: identity of this process.
        timeout_s: limit of each step.
    """

    def __init__(self, identity: Identity, timeout_s: float) -> None:
        self._identity = identity
        self._rank, self._leads = identity.rank, identity.rank == 0
        self._timeout_s = timeout_s
        self._is_over = False
        self._meeting: WorldStore | None = None
        self._store: PatientStore | None = None
        self._steps: Steps | None = None
        self._state = CheckState()

    @property
    def is_stuck(self) -> bool:
        """Whether a call into torch or to the store hangs in its thread, so that this process cannot end as usual."""
        return self._state.is_stuck or bool(self._store and self._store.lost)

    def run(self) -> CheckResults | None:
        """Run the whole check; rank 0 returns the result, partial if a signal or a lost store ended the check.

        Raises:
            UsageError: the environment cannot work.
            ExcludedError: the check failed for this rank (not rank 0), or was cut short.
        """
        started = time.monotonic()
        if self._identity.size == 1:
            self._state.facts[0] = collect(self._identity)
        else:
            with self._signals():
                self._run()
        if not self._leads:
            return None
        return self._state.results(self._identity, time.monotonic() - started)

    def _run(self) -> None:
        limit_s = steps_limit_s(self._timeout_s)
        try:
            try:
                self._state.facts[self._rank] = collect(self._identity)
                store, meeting = self._enter()
                node_of, address = (self._lead if self._leads else self._follow)(store, meeting)
                self._steps = Steps(store, self._identity, self._timeout_s, node_of, address, self._state)
                attempt(limit_s, self._steps.take)
            except (WorldError, OverdueError) as error:
                self._state.is_stuck |= isinstance(error, OverdueError)
                text = f"no end within {limit_s:g} s" if isinstance(error, OverdueError) else str(error)
                if not self._leads:
                    raise ExcludedError(text, self._state.facts[self._rank]) from error
                self._state.add_absence(0, "could not meet the others", text)
            self._release()
            self._is_over = True
        except CheckEnded as error:  # raised on rank 0 by its signal handler, at most once, anywhere above
            self._state.is_stuck = self._steps is not None
            self._note_end(error)
            self._release()

    def _enter(self) -> tuple[PatientStore, WorldStore]:
        store, self._meeting = session.meet(self._identity, self._timeout_s)
        self._store = store_of(self._meeting, store, self._identity)
        claim(self._store, self._rank, self._identity.size)
        return self._store, self._meeting

    def _lead(self, store: PatientStore, meeting: WorldStore) -> tuple[dict[int, str], str]:
        """Collect the facts of all ranks as rank 0; return the node of each rank that joined, and the address of this rank."""
        deadline = time.monotonic() + self._timeout_s
        facts = self._state.facts
        if meeting.host and meeting.host != facts[0].network.meeting_host:
            facts[0] = replace(facts[0], network=network(meeting.host))
        write(store, "facts/0", asdict(facts[0]))
        for rank in range(1, self._identity.size):
            found = read(store, f"facts/{rank}", deadline - time.monotonic())
            if found is None:
                self._state.add_absence(rank, "did not come", f"within {self._timeout_s:g} s")
                continue
            try:
                facts[rank] = build(Facts, found)
            except (TypeError, ValueError, KeyError, AttributeError):
                host = str(found.get("host", "")) if isinstance(found, dict) else ""
                self._state.add_absence(rank, OTHER_VERSION, "its facts have another form than here", host)
        address_of = _addresses(facts)
        self._state.present = dict(facts)
        write(store, "roster", {str(rank): [each.node, address_of[rank]] for rank, each in facts.items()})
        return {rank: each.node for rank, each in facts.items()}, address_of[0]

    def _follow(self, store: PatientStore, meeting: WorldStore) -> tuple[dict[int, str], str]:
        """Publish the facts of a rank other than 0, and wait for rank 0's list of ranks; return the same as :meth:`_lead`."""
        limit_s = self._timeout_s + _LATE_S
        own = self._state.facts[self._rank] = self._with_network(store, meeting, limit_s)
        write(store, f"facts/{self._rank}", asdict(own))
        roster = read(store, "roster", limit_s)
        if roster is None:
            what = f"rank 0 did not begin the check within {limit_s:g} s"
            raise WorldError(explain(what, rank=self._rank, fix="look at the output of rank 0"))
        if str(self._rank) not in roster:
            what = f"the check began without this rank: it came later than after {self._timeout_s:g} s, or its version differs"
            raise WorldError(explain(what, rank=self._rank, fix="look at the output of rank 0, or raise --timeout"))
        return {int(rank): node for rank, (node, _) in roster.items()}, str(roster[str(self._rank)][1])

    def _with_network(self, store: PatientStore, meeting: WorldStore, limit_s: float) -> Facts:
        """Return this rank's facts, with the network towards the address of rank 0 that is known once the store was reached.

        If the launcher connects every node to rank 0 through a tunnel on its own loopback, rank 0's facts give its address.
        """
        facts = self._state.facts[self._rank]
        if meeting.host and meeting.host != facts.network.meeting_host:
            facts = replace(facts, network=network(meeting.host))
        if not all(map(is_loopback, facts.network.meeting_addresses)):
            return facts
        first = read(store, "facts/0", limit_s)
        try:
            address = first["network"]["address"] if first and first["node"] != facts.node else ""
        except (TypeError, KeyError) as error:
            what = "rank 0 runs another version of guozhuang"
            raise WorldError(explain(what, rank=self._rank, fix="install the same version on every host")) from error
        return replace(facts, network=network(address)) if address and not is_loopback(address) else facts

    def _note_end(self, error: CheckEnded) -> None:
        """Record, after a signal to rank 0, the other ranks that a signal ended, and those that had stopped before."""
        state = self._state
        if self._steps is not None:
            time.sleep(ENDED_S)
            for rank in sorted(state.present.keys() - {0}):
                if self._steps.ended_by(rank) or self._steps.has_ended(rank):
                    self._steps.lose(rank)
        if not any(each.what != "was ended" for each in state.absences):
            state.absences.append(Absence(None, "", "was ended", state.step, str(error)))

    def _release(self) -> None:
        """Let the other ranks end, and wait until they have, so that the launcher sees them end before rank 0 does."""
        if not self._leads or self._store is None or self._meeting is None:
            return
        deadline, num_others = time.monotonic() + _LEAVE_S, len(self._state.present) - 1
        with contextlib.suppress(WorldError):
            if num_others > 0:
                write(self._store, "over", {})
                while self._store.add("left", 0) < num_others and time.monotonic() < deadline:
                    time.sleep(look_s(0.0))
        self._meeting.remove_note()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGHUP in the main thread.

        On rank 0 the first signal raises :class:`CheckEnded`; further ones are ignored, because launchers send several, while
        rank 0 shows its result. Any other rank writes to the store that a signal ended it, and exits.
        """

        def handle(number: int, frame: object) -> None:
            name = signal.Signals(number).name
            if not self._leads:
                with contextlib.suppress(Exception):
                    assert self._store is not None
                    write(self._store, f"ended/{self._rank}", name)
                os._exit(128 + number)
            if not self._is_over:
                self._is_over = True
                raise CheckEnded(f"rank 0 got {name}")

        before = {kind: signal.signal(kind, handle) for kind in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, signal.SIG_IGN if self._leads else handler)


def _addresses(facts: dict[int, Facts]) -> dict[int, str]:
    """Return the address at which each rank listens: loopback if there is one node, else that of its node's interface.

    If ranks meet through a tunnel on loopback, rank 0's network is set to the one that leads to another node.
    """
    first_of: dict[str, Facts] = {}
    for rank in sorted(facts):
        first_of.setdefault(facts[rank].node, facts[rank])
    if len(first_of) == 1:
        return dict.fromkeys(facts, "127.0.0.1")
    if all(map(is_loopback, facts[0].network.meeting_addresses)):
        far = next((each.network.address for node, each in first_of.items() if node != facts[0].node), "")
        if far and not is_loopback(far):
            first_of[facts[0].node] = facts[0] = replace(facts[0], network=network(far))
    return {rank: first_of[each.node].network.address or each.network.address for rank, each in facts.items()}


@contextlib.contextmanager
def redirected(targets: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Redirect descriptors 1 and 2 inside the ``with`` block, also for child processes, which inherit them.

    Args:
        targets: the descriptor to write to instead, for each that is redirected.

    Yields:
        The original of each redirected descriptor, under another number.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = {number: os.dup(number) for number in targets}
    try:
        for number, target in targets.items():
            os.dup2(target, number)
        yield kept
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in kept.items():
            os.dup2(original, number)
            os.close(original)


if __name__ == "__main__":
    sys.exit(main())
