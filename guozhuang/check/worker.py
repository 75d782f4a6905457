"""One rank of a check, under whatever launcher; rank 0 leads, and has the result.

[Note: a check goes step by step] The ranks meet at the store of the world, as ``gz.init`` does, and write their facts there.
Rank 0 writes the roster of those that came in time; the others are reported missing, and the check goes on without them. From
the roster every rank derives the same plan of pairs. Rank 0 begins each step by a key in the store, collects the answers of
the step there with a limit, and tells in the key of the next step which ranks were lost. Ranks measure each other over gloo
groups of two, and all_reduce in the world of ``gz.init``.

Every step runs in a thread (``net.client``), because calls into torch are deaf to signals; the main thread waits for it.
``python -m guozhuang.check.worker`` is what ``guozhuang check`` starts where nobody else has started ranks.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from guozhuang.check.facts import collect, network
from guozhuang.check.results import OTHER_VERSION, Absence, CheckResults, Facts, is_loopback, to_json
from guozhuang.check.steps import ENDED_S, CheckState, Steps, StoreClient, steps_limit_s
from guozhuang.check.verdict import judge
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.client import OverdueError, attempt
from guozhuang.net.meet import WorldStore
from guozhuang.records import build
from guozhuang.world import session
from guozhuang.world.identity import Identity

DEFAULT_TIMEOUT_S = 20.0
_FACTS_S = 15.0
_LATE_S = 5.0  # rank 0 may have begun to wait so much later
_LOOK_S, _LOOKS_PER_S = 0.02, 2000  # between looks at the store, and how many all ranks together may take
_LEAVE_S = 3.0
_CHUNK = 900  # characters of a line that is handed over: some pipes and terminals fold or cut long ones
_HANDED_OVER = re.compile(r"guozhuang-check (\d+)/(\d+) ([A-Za-z0-9+/=]+)")


class CheckEnded(Exception):
    """The launcher ends the check; the result is what is known by now."""


class Apart(WorldError):
    """This rank could not take part; rank 0 may never learn why.

    Attributes:
        facts: of this rank.
    """

    def __init__(self, text: str, facts: Facts) -> None:
        super().__init__(text)
        self.facts = facts


def longest_s(timeout_s: float) -> float:
    """Return how long a check takes in the worst case, from when the ranks have started to when rank 0 has the result.

    Args:
        timeout_s: limit of each step: the meeting (once for the store, once for the ranks), links, all_reduce.
    """
    return _FACTS_S + 2 * timeout_s + steps_limit_s(timeout_s) + 2 * _LEAVE_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Take part; rank 0 hands its result over on stdout, for ``guozhuang check`` to read."""
    parser = argparse.ArgumentParser(prog="python -m guozhuang.check.worker")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="limit of each step")
    return take_part(parser.parse_args(arguments).timeout, hand_over)


def hand_over(results: CheckResults) -> int:
    """Print the result for :func:`taken_over` in lines that survive a launcher that marks lines."""
    text = base64.b64encode(zlib.compress(to_json(results, ()).encode())).decode()
    chunks = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
    for number, chunk in enumerate(chunks):
        print(f"guozhuang-check {number + 1}/{len(chunks)} {chunk}", flush=True)
    return 0


def taken_over(printed: str) -> str | None:
    """Return the text that :func:`hand_over` put among other output; None if it is not whole."""
    found = {int(number): (int(total), chunk) for number, total, chunk in _HANDED_OVER.findall(printed)}
    if not found or len(found) != found[max(found)][0]:
        return None
    return zlib.decompress(base64.b64decode("".join(found[number][1] for number in sorted(found)))).decode()


def take_part(timeout_s: float, show: Callable[[CheckResults], int]) -> int:
    """Be one rank of the check. Every rank must call.

    Args:
        timeout_s: limit of each step: the meeting, the links, all_reduce.
        show: what rank 0 does with the result, with the process's own stdout; returns the exit code.

    Returns:
        Rank 0: what ``show`` returned. Others: 0, or 1 if the check could not be done with them.

    Raises:
        UsageError: the environment cannot work.
    """
    identity = session.identity()
    worker = CheckRank(identity, timeout_s)
    try:
        with _quiet_stdout():
            results = worker.run()
    except Apart as error:
        print(f"guozhuang check: {error}", file=sys.stderr)
        alone = CheckResults(identity.size, identity.launcher, (error.facts,))
        for finding in judge(alone):
            print(f"guozhuang check: on rank {identity.rank}: {finding.text}", file=sys.stderr)
        code = 1
    else:
        code = show(results) if results is not None else 0
    if worker.is_stuck:
        # A call that hangs in torch cannot be cancelled, and would hold the interpreter's end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class CheckRank:
    """One rank of a check.

    Args:
        identity: of this process.
        timeout_s: limit of each step.
    """

    def __init__(self, identity: Identity, timeout_s: float) -> None:
        self._identity = identity
        self._rank, self._leads = identity.rank, identity.rank == 0
        self._timeout_s = timeout_s
        self._is_over = False
        self._meeting: WorldStore | None = None
        self._client: StoreClient | None = None
        self._steps: Steps | None = None
        self._state = CheckState()

    @property
    def is_stuck(self) -> bool:
        """Whether a call in a thread has not come back."""
        return self._state.is_stuck or bool(self._client and self._client.is_stuck)

    def run(self) -> CheckResults | None:
        """Do all of it; on rank 0 return what is known when it is over, or when a signal or a lost store ends it.

        Raises:
            UsageError: the environment cannot work.
            Apart: the check could not be done with this rank (not rank 0), or not to its end.
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
                client, meeting = self._enter()
                node_of, address = (self._lead if self._leads else self._follow)(client, meeting)
                self._steps = Steps(client, self._identity, self._timeout_s, node_of, address, self._state)
                attempt(limit_s, self._steps.take)
            except (WorldError, OverdueError) as error:
                self._state.is_stuck |= isinstance(error, OverdueError)
                text = f"no end within {limit_s:g} s" if isinstance(error, OverdueError) else str(error)
                if not self._leads:
                    raise Apart(text, self._state.facts[self._rank]) from error
                self._state.lack(0, "could not meet the others", text)
            self._release()
            self._is_over = True
        except CheckEnded as error:  # on rank 0, once, wherever it was
            self._state.is_stuck = self._steps is not None
            self._note_end(error)
            self._release()

    def _enter(self) -> tuple[StoreClient, WorldStore]:
        store, self._meeting = session.meet(self._identity, self._timeout_s)
        look_s = max(_LOOK_S, self._identity.size / _LOOKS_PER_S)
        self._client = StoreClient(store, self._meeting.host, self._rank, look_s)
        if self._client.add(f"claim/{self._rank}", 1) > 1:
            what = f"two processes say that they are rank {self._rank} of {self._identity.size}"
            raise UsageError(explain(what, fix="give each process its own RANK; end processes of earlier runs"))
        return self._client, self._meeting

    def _lead(self, client: StoreClient, meeting: WorldStore) -> tuple[dict[int, str], str]:
        """Meet as rank 0; return the node of each rank that came, and the address of this one."""
        deadline = time.monotonic() + self._timeout_s
        facts = self._state.facts
        if meeting.host and meeting.host != facts[0].network.meeting_host:
            facts[0] = replace(facts[0], network=network(meeting.host))
        client.write("facts/0", asdict(facts[0]))
        for rank in range(1, self._identity.size):
            found = client.read(f"facts/{rank}", deadline - time.monotonic())
            if found is None:
                self._state.lack(rank, "did not come", f"within {self._timeout_s:g} s")
                continue
            try:
                facts[rank] = build(Facts, found)
            except (TypeError, ValueError, KeyError, AttributeError):
                host = str(found.get("host", "")) if isinstance(found, dict) else ""
                self._state.lack(rank, OTHER_VERSION, "its facts have another form than here", host)
        address_of = _addresses(facts)
        self._state.present = dict(facts)
        client.write("roster", {str(rank): [each.node, address_of[rank]] for rank, each in facts.items()})
        return {rank: each.node for rank, each in facts.items()}, address_of[0]

    def _follow(self, client: StoreClient, meeting: WorldStore) -> tuple[dict[int, str], str]:
        """Meet as any other rank; return as :meth:`_lead`."""
        limit_s = self._timeout_s + _LATE_S
        own = self._state.facts[self._rank] = self._informed(client, meeting, limit_s)
        client.write(f"facts/{self._rank}", asdict(own))
        roster = client.read("roster", limit_s)
        if roster is None:
            what = f"rank 0 did not begin the check within {limit_s:g} s"
            raise WorldError(explain(what, rank=self._rank, fix="look at the output of rank 0"))
        if str(self._rank) not in roster:
            what = f"the check began without this rank: it came later than after {self._timeout_s:g} s, or its version differs"
            raise WorldError(explain(what, rank=self._rank, fix="look at the output of rank 0, or raise --timeout"))
        return {int(rank): node for rank, (node, _) in roster.items()}, str(roster[str(self._rank)][1])

    def _informed(self, client: StoreClient, meeting: WorldStore, limit_s: float) -> Facts:
        """Return the facts with the network as it is known after the meeting.

        Where the launcher leads every node to rank 0 through a passage on its own loopback, rank 0 gives its address.
        """
        facts = self._state.facts[self._rank]
        if meeting.host and meeting.host != facts.network.meeting_host:
            facts = replace(facts, network=network(meeting.host))
        if not all(map(is_loopback, facts.network.meeting_addresses)):
            return facts
        first = client.read("facts/0", limit_s)
        try:
            address = first["network"]["address"] if first and first["node"] != facts.node else ""
        except (TypeError, KeyError) as error:
            what = "rank 0 runs another version of guozhuang"
            raise WorldError(explain(what, rank=self._rank, fix="install the same version on every host")) from error
        return replace(facts, network=network(address)) if address and not is_loopback(address) else facts

    def _note_end(self, error: CheckEnded) -> None:
        """Note the ranks that a signal has ended besides rank 0, and those that had stopped before."""
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
        if not self._leads or self._client is None or self._meeting is None:
            return
        deadline, num_others = time.monotonic() + _LEAVE_S, len(self._state.present) - 1
        with contextlib.suppress(WorldError):
            if num_others > 0:
                self._client.write("over", {})
                while self._client.add("left", 0) < num_others and time.monotonic() < deadline:
                    time.sleep(self._client.look_s)
        self._meeting.everybody_came()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGHUP in the main thread.

        On rank 0 the first raises :class:`CheckEnded`; further ones change nothing, because launchers send several, and rank 0
        shows its result meanwhile. Any other rank writes down that it was ended, and is gone.
        """

        def handle(number: int, frame: object) -> None:
            name = signal.Signals(number).name
            if not self._leads:
                with contextlib.suppress(Exception):
                    assert self._client is not None
                    self._client.write(f"ended/{self._rank}", name)
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
    """Return where each rank listens: on loopback if there is one node, else on the interface that its node uses.

    Rank 0 of a world that meets through a passage on loopback gets the network that leads to another node.
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
def _quiet_stdout() -> Iterator[None]:
    """Send what libraries print on stdout (gloo does) to stderr, so that stdout holds the result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
