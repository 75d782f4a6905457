"""One rank of a check, under whatever launcher; rank 0 leads and tells.

``python -m guozhuang.check.rank`` is what ``guozhuang check`` starts where nobody else has started ranks.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from guozhuang.check.board import Board, OtherVersion, is_stuck
from guozhuang.check.ending import Ending
from guozhuang.check.facts import collect, network
from guozhuang.check.leader import Leader
from guozhuang.check.results import Facts, Results, is_loopback, to_json
from guozhuang.check.serving import REDUCER, serve
from guozhuang.check.verdict import judge
from guozhuang.errors import WorldError, explain
from guozhuang.world import session
from guozhuang.world.identity import Identity

DEFAULT_TIMEOUT_S = 20.0
_LATE_S = 5.0  # rank 0 may have begun to wait so much later
_CHUNK = 900  # characters of a line that is handed over: some pipes and terminals fold or cut long ones
_HANDED = re.compile(r"guozhuang-check (\d+)/(\d+) ([A-Za-z0-9+/=]+)")


class Apart(WorldError):
    """This rank could not take part; rank 0 may never learn why.

    Attributes:
        facts: what this rank knows of itself.
    """

    def __init__(self, text: str, facts: Facts) -> None:
        super().__init__(text)
        self.facts = facts


Tell = Callable[[Results], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Take part; rank 0 hands its result over on stdout, for ``guozhuang check`` to read."""
    parser = argparse.ArgumentParser(prog="python -m guozhuang.check.rank")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="limit of each step")
    return take_part(parser.parse_args(arguments).timeout, hand_over)


def hand_over(results: Results) -> int:
    """Print the result for :func:`taken_over` in lines that survive a launcher that marks lines."""
    text = base64.b64encode(zlib.compress(to_json(results, ()).encode())).decode()
    chunks = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
    for number, chunk in enumerate(chunks):
        print(f"guozhuang-check {number + 1}/{len(chunks)} {chunk}", flush=True)
    return 0


def taken_over(printed: str) -> str | None:
    """The text that :func:`hand_over` put among other output; None if it is not whole."""
    found = {int(number): (int(total), chunk) for number, total, chunk in _HANDED.findall(printed)}
    if not found or len(found) != found[max(found)][0]:
        return None
    return zlib.decompress(base64.b64decode("".join(found[number][1] for number in sorted(found)))).decode()


def take_part(timeout_s: float, tell: Tell) -> int:
    """Be one rank of the check. Every rank must call.

    Args:
        timeout_s: limit of each step: the meeting, the links, all_reduce.
        tell: what rank 0 does with the result, with the process's own stdout; returns the exit code.

    Returns:
        Rank 0: what ``tell`` returned. Others: 0, or 1 if the check could not be done with them.

    Raises:
        UsageError: the environment cannot work.
    """
    identity = session.identity()
    try:
        with _quiet_stdout():
            results = _part(identity, timeout_s)
    except Apart as error:
        print(f"guozhuang check: {error}", file=sys.stderr)
        alone = Results(identity.size, identity.launcher, (error.facts,))
        for finding in judge(alone):
            print(f"guozhuang check: on rank {identity.rank}: {finding.text}", file=sys.stderr)
        code = 1
    else:
        code = tell(results) if results is not None else 0
    if is_stuck() or any(thread.name == REDUCER for thread in threading.enumerate()):
        # What hangs in torch cannot be cancelled, and would hold the interpreter's end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _part(identity: Identity, timeout_s: float) -> Results | None:
    if identity.size == 1:
        started = time.monotonic()
        facts = collect(identity)
        return Results(1, identity.launcher, (facts,), duration_s=time.monotonic() - started)
    with Ending(identity.rank) as ending:
        if identity.rank == 0:
            return Leader(identity, timeout_s, ending).lead()
        facts = collect(identity)
        try:
            _follow(identity, facts, timeout_s, ending)
        except WorldError as error:
            raise Apart(str(error), facts) from error
        return None


def _follow(identity: Identity, facts: Facts, timeout_s: float, ending: Ending) -> None:
    """Any rank but 0.

    Raises:
        WorldError: the check could not be done with this rank, or not to its end.
    """
    board = Board(identity, timeout_s)
    limit_s = timeout_s + _LATE_S
    try:
        facts = _informed(facts, board, limit_s)
    except OtherVersion as error:
        what = f"rank 0 runs another version of guozhuang: {error}"
        raise WorldError(explain(what, rank=identity.rank, fix="install the same version on every host")) from error
    board.write_facts(facts)
    record = board.read("record", limit_s)
    if record is None:
        what = f"rank 0 did not begin the check within {limit_s:g} s"
        raise WorldError(explain(what, rank=identity.rank, fix="look at the output of rank 0"))
    if str(identity.rank) not in record["address_of"]:
        what = f"the check began without this rank: it came later than after {timeout_s:g} s, or its version differs"
        raise WorldError(explain(what, rank=identity.rank, fix="look at the output of rank 0, or raise --timeout"))
    try:
        serve(facts, record, timeout_s, ending)
    except OSError as error:
        with contextlib.suppress(WorldError):
            board.write(f"word/{identity.rank}", str(error))
        raise WorldError(explain(f"the check went on without this rank: {error}", rank=identity.rank)) from error


def _informed(facts: Facts, board: Board, limit_s: float) -> Facts:
    """The facts with the network as it is known after the meeting.

    Where the launcher leads every node to rank 0 through a passage on its own loopback, rank 0 itself says where it is.
    """
    if board.host and board.host != facts.network.meeting_host:
        facts = replace(facts, network=network(board.host))
    if not all(map(is_loopback, facts.network.meeting_addresses)):
        return facts
    first = board.read_facts(0, limit_s)
    if first is not None and first.node != facts.node:
        address = first.network.address
        if address and not is_loopback(address):
            facts = replace(facts, network=network(address))
    return facts


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """What libraries print on stdout (gloo does) goes to stderr, so that stdout holds the result alone."""
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
