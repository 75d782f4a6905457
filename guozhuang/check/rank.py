"""One rank of a check, under whatever launcher; rank 0 leads and tells.

``python -m guozhuang.check.rank`` is what ``guozhuang check`` starts where nobody else has started ranks.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from guozhuang.check import links, reductions
from guozhuang.check.conductor import Conductor, Ended
from guozhuang.check.facts import collect, network
from guozhuang.check.results import Absence, Facts, Results, is_loopback, to_json
from guozhuang.check.verdict import judge
from guozhuang.check.wire import Line, call, listen
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.lab.files import build
from guozhuang.world import session
from guozhuang.world.identity import Identity

DEFAULT_TIMEOUT_S = 20.0
_LOOK_S = 0.03  # between looks at the store
_LEAVE_S = 2.0
_REDUCER = "guozhuang all_reduce"
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
    if any(thread.name == _REDUCER for thread in threading.enumerate()):
        # A collective that hangs cannot be cancelled, and would hold the interpreter's end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _part(identity: Identity, timeout_s: float) -> Results | None:
    started = time.monotonic()
    if identity.size == 1:
        facts = collect(identity)
        return Results(1, identity.launcher, (facts,), duration_s=time.monotonic() - started)
    with _Ending(identity.rank) as ending:
        facts = collect(identity)
        try:
            store, met = session.meet(identity, timeout_s)
            if store.add(f"claim/{identity.rank}", 1) > 1:
                what = f"two processes say that they are rank {identity.rank} of {identity.size}"
                raise UsageError(explain(what, fix="give each process its own RANK; end processes of earlier runs"))
        except WorldError as error:
            if identity.rank:
                raise Apart(str(error), facts) from error
            absence = Absence(0, facts.host, "could not meet the others", "the ranks met", str(error))
            return Results(identity.size, identity.launcher, (facts,), absences=(absence,))
        facts = _informed(facts, store, met.host, timeout_s)
        store.set(f"facts/{identity.rank}", json.dumps(asdict(facts)))
        if identity.rank == 0:
            try:
                return _lead(identity, store, facts, timeout_s, started)
            finally:
                met.everybody_came()
        try:
            _follow(identity, store, timeout_s, ending)
        except WorldError as error:
            raise Apart(str(error), facts) from error
        return None


def _informed(facts: Facts, store: dist.Store, host: str | None, timeout_s: float) -> Facts:
    """The facts with the network as it is known after the meeting.

    Where the launcher leads every node to rank 0 through a passage on its own loopback, rank 0 itself says where it is.
    """
    if host and host != facts.network.meeting_host:
        facts = replace(facts, network=network(host))
    if facts.rank and all(map(is_loopback, facts.network.meeting_addresses)) and _came(store, "facts/0", timeout_s):
        first = build(Facts, json.loads(store.get("facts/0")))
        if first.node != facts.node and first.network.address and not is_loopback(first.network.address):
            facts = replace(facts, network=network(first.network.address))
    return facts


def _lead(identity: Identity, store: dist.Store, own: Facts, timeout_s: float, started: float) -> Results:
    """Rank 0: wait for the others, conduct, and put everything together. Its own part runs in a thread."""
    absences: list[Absence] = []
    facts = {0: own}
    conductor: Conductor | None = None
    thread: threading.Thread | None = None
    try:
        facts = _everybody(identity, store, own, timeout_s)
        for rank in range(identity.size):
            if rank not in facts:
                absences.append(Absence(rank, "", "did not come", "the ranks met", f"within {timeout_s:g} s"))
        facts, address_of = _addresses(facts)
        own = facts[0]
        several = len({each.node for each in facts.values()}) > 1
        listener, addresses = _listener(own, several)
        word = secrets.token_hex(16)
        record = {
            "addresses": addresses,
            "port": listener.getsockname()[1],
            "word": word,
            "address_of": {str(rank): address for rank, address in address_of.items()},
        }
        conductor = Conductor(listener, word, facts, address_of, timeout_s, lambda rank: _left_word(store, rank))
        thread = threading.Thread(
            target=_serve_here, args=(own, record, timeout_s), name="guozhuang check", daemon=True
        )
        thread.start()
        store.set("record", json.dumps(record))
        conductor.lead(identity.size)
    except Ended as error:
        if conductor is not None:
            conductor.settle(0.3)
            if not any(each.what != "was ended" for each in conductor.absences):
                conductor.absences.append(Absence(None, "", "was ended", conductor.when, str(error)))
        else:
            absences.append(Absence(None, "", "was ended", "the ranks met", str(error)))
    finally:
        if conductor is not None:
            conductor.end()
        if thread is not None:
            thread.join(_LEAVE_S)
    return Results(
        num_ranks=identity.size,
        launcher=identity.launcher,
        facts=tuple(facts[rank] for rank in sorted(facts)),
        clocks=tuple(conductor.clocks) if conductor else (),
        links=tuple(conductor.links) if conductor else (),
        reductions=tuple(conductor.reductions) if conductor else (),
        absences=(*absences, *(conductor.absences if conductor else ())),
        notes=tuple(conductor.notes) if conductor else (),
        duration_s=time.monotonic() - started,
    )


def _everybody(identity: Identity, store: dist.Store, own: Facts, timeout_s: float) -> dict[int, Facts]:
    """The facts of all ranks that come in time."""
    deadline = time.monotonic() + timeout_s
    found = {0: own}
    for rank in range(1, identity.size):
        key = f"facts/{rank}"
        if _came(store, key, deadline - time.monotonic()):
            found[rank] = build(Facts, json.loads(store.get(key)))
    return found


def _addresses(facts: dict[int, Facts]) -> tuple[dict[int, Facts], dict[int, str]]:
    """Where each rank listens for its peers: on loopback if there is one node, else on the interface that its node uses."""
    nodes: dict[str, Facts] = {}
    for rank in sorted(facts):
        nodes.setdefault(facts[rank].node, facts[rank])
    if len(nodes) == 1:
        return facts, dict.fromkeys(facts, "127.0.0.1")
    own = facts[0]
    if all(map(is_loopback, own.network.meeting_addresses)):  # a passage; what leads to another node tells more
        far = next((each.network.address for node, each in nodes.items() if node != own.node), "")
        if far and not is_loopback(far):
            own = replace(own, network=network(far))
    facts, nodes[own.node] = facts | {0: own}, own
    return facts, {rank: nodes[each.node].network.address or each.network.address for rank, each in facts.items()}


def _listener(own: Facts, several: bool) -> tuple[socket.socket, list[str]]:
    """Where ranks call rank 0: where they met, which they have shown that they reach, or on the interface it uses."""
    if not several:
        return listen("127.0.0.1"), ["127.0.0.1"]
    for each in dict.fromkeys([*own.network.meeting_addresses, own.network.address]):
        if each and not is_loopback(each):
            with contextlib.suppress(OSError):
                return listen(each), list(dict.fromkeys([each, own.network.meeting_host]))
    # The address where ranks meet is none of this host's: something between translates it.
    every = [a for each in own.network.interfaces for a in each.addresses if not a.startswith(("127.", "::1", "fe80"))]
    return listen(""), [own.network.meeting_host, *every]


def _follow(identity: Identity, store: dist.Store, timeout_s: float, ending: _Ending) -> None:
    """Any other rank."""
    limit_s = timeout_s + 5.0
    try:
        if not _came(store, "record", limit_s):
            what = f"rank 0 did not begin the check within {limit_s:g} s"
            raise WorldError(explain(what, rank=identity.rank, fix="look at the output of rank 0"))
        record = json.loads(store.get("record"))
    except dist.DistNetworkError as error:
        raise WorldError(explain("rank 0 is gone", rank=identity.rank, fix="look at its output")) from error
    if str(identity.rank) not in record["address_of"]:
        what = f"this rank came too late: the check began without it after {timeout_s:g} s"
        raise WorldError(explain(what, rank=identity.rank, fix="raise --timeout"))
    facts = build(Facts, json.loads(store.get(f"facts/{identity.rank}")))
    try:
        serve(facts, record, timeout_s, ending)
    except OSError as error:
        with contextlib.suppress(RuntimeError):
            store.set(f"word/{identity.rank}", str(error))
        raise WorldError(explain(f"the check went on without this rank: {error}", rank=identity.rank)) from error


def _serve_here(own: Facts, record: dict[str, Any], timeout_s: float) -> None:
    with contextlib.suppress(OSError):  # the conductor stopped listening; it is in this very process
        serve(own, record, timeout_s)


def serve(own: Facts, record: dict[str, Any], timeout_s: float, ending: _Ending | None = None) -> None:
    """Do what the conductor says until it says that it is over.

    Raises:
        OSError: the conductor cannot be reached, or is gone.
    """
    address = record["address_of"][str(own.rank)]
    try:
        listener = listen(address or "127.0.0.1")
    except OSError as error:
        raise OSError(f"cannot listen at {address} ({own.network.in_use}): {error}") from error
    with listener, contextlib.closing(_call(own, record, listener.getsockname()[1])) as line:
        if ending is not None:
            ending.line = line
        worker: threading.Thread | None = None
        # Another rank may use up the limit of the step before this one; for a silent conductor nobody waits longer.
        while (said := line.receive(2 * timeout_s + links.PAIR_LIMIT_S))["do"] != "end":
            if said["do"] == "tell":
                line.send(time_s=time.time())
            elif said["do"] == "reduce":
                # In a thread, so that this one hears if the check is over while a collective hangs.
                worker = threading.Thread(target=_reduce, args=(line, said), name=_REDUCER, daemon=True)
                worker.start()
            else:
                line.send(**_pair(said, listener))
        if worker is not None:
            worker.join(_LEAVE_S)


def _call(own: Facts, record: dict[str, Any], port: int) -> Line:
    wrong = []
    for address in record["addresses"]:
        try:
            return call(address, record["port"], 5.0, word=record["word"], rank=own.rank, own_port=port)
        except OSError as error:
            wrong.append(f"{address}:{record['port']}: {error}")
    raise OSError(f"rank 0 cannot be reached at {'; '.join(wrong)}")


def _pair(said: dict[str, Any], listener: socket.socket) -> dict[str, Any]:
    """One end of a pair; ``figures`` come from the end that leads."""
    try:
        if said["do"] == "be called":
            links.measure_as_called(listener, said["word"], said["within_s"])
            return {"failure": "", "figures": {}}
        return {
            "failure": "",
            "figures": links.measure_as_caller(said["address"], said["port"], said["word"], said["within_s"]),
        }
    except OSError as error:
        where = f"{said['address']} port {said['port']}: " if said["do"] == "call" else ""
        return {"failure": f"{where}{error}", "figures": {}}


def _reduce(line: Line, said: dict[str, Any]) -> None:
    timings: list[dict[str, Any]] = []
    failure, refused = "", False
    try:
        for timing in reductions.measure(said["within_s"], said["sizes"]):
            timings.append(asdict(timing))
    except (RuntimeError, ValueError, OSError) as error:
        failure, refused = str(error) or repr(error), isinstance(error, UsageError)
    with contextlib.suppress(OSError):  # the conductor has given up on us
        line.send(timings=timings, failure=failure, refused=refused)


def _came(store: dist.Store, key: str, limit_s: float) -> bool:
    """Look again and again: the store's own waiting is deaf to signals, and prints warnings when it is in vain."""
    deadline = time.monotonic() + limit_s
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _left_word(store: dist.Store, rank: int) -> str:
    with contextlib.suppress(RuntimeError):
        if store.check([f"word/{rank}"]):
            return store.get(f"word/{rank}").decode()
    return ""


class _Ending:
    """Signals that end a process: rank 0 still tells what is known, others say that they were ended. A context manager."""

    def __init__(self, rank: int) -> None:
        self.line: Line | None = None
        self._rank = rank
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Ending:
        for kind in (signal.SIGTERM, signal.SIGHUP):
            self._before[kind] = signal.signal(kind, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            # A second one must not end rank 0 while it tells.
            signal.signal(kind, signal.SIG_IGN if self._rank == 0 else handler)

    def _handle(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if self._rank == 0:
            signal.signal(number, signal.SIG_IGN)
            raise Ended(f"rank 0 got {name}")
        if self.line is not None:
            with contextlib.suppress(OSError):
                self.line.send(0.5, ended_by=name)
        os._exit(128 + number)


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
