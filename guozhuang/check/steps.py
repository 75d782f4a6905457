"""The steps of a check after the ranks have met, the same on every rank; rank 0 starts each and collects its answers.

See [Note: a check goes step by step] in ``worker``.

[Note: who is lost] A rank whose answer does not arrive within the limit of a step is lost. If its connection to rank 0 was
closed, its process has ended ("stopped"); otherwise it hangs ("does not answer"). A rank that a signal ends writes that to the
store first, so that ranks which the launcher ended because another died are not reported as the cause.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.check import measure
from guozhuang.check.facts import address_on, with_threads
from guozhuang.check.measure import Pair, PairError
from guozhuang.check.results import Absence, CheckResults, ClockOffset, Facts, MeasuredLink, MeasuredReduction
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.client import Client, OverdueError, PatientStore, attempt, look_s
from guozhuang.net.meet import WorldStore
from guozhuang.world.identity import Identity

_ANSWER_S = 5.0  # seconds within which the store must answer a call
_CONNECT_S, _CONNECT_ONE_S = 10.0, 3.0  # seconds for all connections to rank 0 together, and for each
_CLOCKS_S, _CLOCK_REPEATS = 10.0, 16
_REDUCE_GRACE_S = 2.0
_GRACE_S = 0.5  # seconds between the limit of a pair and the deadline for its answers
ENDED_S = 0.3  # seconds to wait until gloo notices that a connection was closed


def steps_limit_s(timeout_s: float) -> float:
    """Return the seconds that all steps of a check take together at most.

    Args:
        timeout_s: limit of the step for links, and of that for all_reduce.
    """
    links_s = timeout_s + measure.PAIR_LIMIT_S + _GRACE_S
    return _CONNECT_S + _CLOCKS_S + links_s + timeout_s + _REDUCE_GRACE_S


def store_of(meeting: WorldStore, store: dist.Store, identity: Identity) -> PatientStore:
    """Return the store of the world, with a limit for each call, and with errors that name the node that keeps it."""
    name = f"the store of the world (at {meeting.host})" if meeting.host else "the store of the world"
    return PatientStore(store, client=Client(_ANSWER_S), name=name, rank=identity.rank, num_pollers=identity.size)


def write(store: PatientStore, key: str, value: Any) -> None:
    """Write a value to the store as JSON."""
    store.set(key, json.dumps(value))


def read(store: PatientStore, key: str, limit_s: float = 0.0) -> Any:
    """Read a value of :func:`write` from the store; None if it was not written within ``limit_s``."""
    found = store.read(key, limit_s)
    return None if found is None else json.loads(found)


@dataclass
class CheckState:
    """The facts and measurements that a rank has so far; rank 0 builds the result from them, whenever the check ends.

    Attributes:
        step: the present step, as text for reports.
        is_stuck: whether a call into torch has not returned.
        present: on rank 0: the ranks that took part and are not lost.
        facts, clocks, links, reductions, absences, notes: as in ``CheckResults``.
    """

    step: str = "the ranks met"
    is_stuck: bool = False
    facts: dict[int, Facts] = field(default_factory=dict)
    present: dict[int, Facts] = field(default_factory=dict)
    clocks: list[ClockOffset] = field(default_factory=list)
    links: list[MeasuredLink] = field(default_factory=list)
    reductions: list[MeasuredReduction] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_absence(self, rank: int, what: str, reason: str = "", host: str = "") -> None:
        """Record that a rank is absent; see ``Absence``."""
        host = self.facts[rank].host if rank in self.facts else host
        self.absences.append(Absence(rank, host, what, self.step, reason))

    def results(self, identity: Identity, duration_s: float) -> CheckResults:
        """Return the results of the check from the facts and measurements so far."""
        return CheckResults(
            num_ranks=identity.size,
            launcher=identity.launcher,
            facts=with_threads([self.facts[rank] for rank in sorted(self.facts)]),
            clocks=tuple(self.clocks),
            links=tuple(sorted(self.links, key=lambda each: (each.a, each.b))),
            reductions=tuple(self.reductions),
            absences=tuple(self.absences),
            notes=tuple(self.notes),
            duration_s=duration_s,
        )


class Steps:
    """The steps of a check as one rank runs them: connect to rank 0, compare clocks, measure links, measure all_reduce.

    Args:
        store: the store of the world.
        identity: identity of this process.
        timeout_s: limit of each step.
        node_of: the node of each rank that takes part.
        address: the address at which this rank listens for other ranks.
        state: the steps record their results in it.
    """

    def __init__(
        self,
        store: PatientStore,
        identity: Identity,
        timeout_s: float,
        node_of: dict[int, str],
        address: str,
        state: CheckState,
    ) -> None:
        self._store = store
        self._rank, self._leads = identity.rank, identity.rank == 0
        self._size = identity.size
        self._timeout_s = timeout_s
        self._node_of = node_of
        self._address = address
        self._state = state
        self._ended: set[int] = set()  # on rank 0: the ranks whose connection was closed
        self._control: dict[int, Pair] = {}  # on rank 0: by rank, the connections to others; elsewhere one, to rank 0

    def take(self) -> None:
        """Run all steps of the check; call this in a thread, because calls into torch do not react to signals."""
        self._connect()
        self._state.step = "clocks were compared"
        self._compare_clocks()
        self._state.step = "links were measured"
        self._measure_links()
        self._state.step = "all_reduce was measured"
        self._measure_reductions()
        if not self._leads:
            self._wait_for("over")
            self._store.add("left", 1)

    def _connect(self) -> None:
        """Connect each rank with rank 0, through the interface that leads there. A rank that fails takes part all the same."""
        deadline = time.monotonic() + _CONNECT_S
        alone = len(set(self._node_of.values())) == 1
        here = self._state.facts[self._rank].network
        address = "127.0.0.1" if alone else address_on(here, here.routed) or self._address
        for rank in sorted(self._node_of.keys() - {0}) if self._leads else [self._rank]:
            limit_s = min(_CONNECT_ONE_S, deadline - time.monotonic()) if self._leads else 2 * _CONNECT_S
            with contextlib.suppress(PairError, RuntimeError):
                self._control[rank] = Pair(
                    self._store.inner, f"control/{rank}", self._leads, address, max(limit_s, _GRACE_S)
                )

    def _compare_clocks(self) -> None:
        """Compare the clock of rank 0 with that of the lowest rank of each other node."""
        deadline = time.monotonic() + _CLOCKS_S
        first_of: dict[str, int] = {}
        for rank in sorted(self._node_of):
            first_of.setdefault(self._node_of[rank], rank)
        for rank in sorted(first_of.values()):
            pair = self._control.get(rank)
            if pair is None:
                continue
            pair.limit(deadline - time.monotonic() if self._leads else _CLOCKS_S + _CONNECT_S)
            with contextlib.suppress(PairError):
                if self._leads:
                    self._state.clocks.append(_clock(rank, pair))
                else:
                    for _ in range(_CLOCK_REPEATS):
                        pair.receive(torch.zeros(1, dtype=torch.float64))
                        pair.send(torch.tensor([time.time()], dtype=torch.float64))

    def _measure_links(self) -> None:
        plan = measure.schedule(self._node_of)
        if plan.note:
            self._state.notes.append(plan.note)
        limit_s = min(measure.PAIR_LIMIT_S, max(self._timeout_s / 4, 1.0))  # a stuck rank must not use up all the time
        deadline = time.monotonic() + self._timeout_s
        for number, pairs in enumerate(plan.rounds):
            if self._leads:
                is_late = time.monotonic() > deadline
                lost = sorted(self._node_of.keys() - self._state.present.keys())
                write(self._store, f"round/{number}", {"lost": lost, "is_late": is_late})
                if is_late:
                    left = sum(len(each) for each in plan.rounds[number:])
                    self._state.notes.append(
                        f"{left} pairs were not measured: the time for links ({self._timeout_s:g} s) was over"
                    )
            order = self._wait_for(f"round/{number}")
            if order["is_late"]:
                return
            began = time.monotonic()
            there = [pair for pair in pairs if not set(pair) & set(order["lost"])]
            for a, b in there:
                if self._rank in (a, b):
                    key = f"pair/{a}-{b}"
                    write(
                        self._store,
                        f"{key}/{self._rank}",
                        _measured_pair(self._store.inner, key, self._rank == a, self._address, limit_s),
                    )
            if self._leads:
                self._collect_links(there, began + limit_s + _GRACE_S)

    def _collect_links(self, pairs: Sequence[tuple[int, int]], deadline: float) -> None:
        key_of = {rank: f"pair/{a}-{b}/{rank}" for a, b in pairs for rank in (a, b)}
        ends = self._collect(key_of, pairs, deadline)
        for a, b in pairs:
            between = self._node_of[a] != self._node_of[b]
            if a in ends and not ends[a]["failure"]:
                self._state.links.append(MeasuredLink(a, b, between, **ends[a]["figures"]))
                continue
            gone = [rank for rank in (a, b) if rank not in self._state.present]
            failures = [str(ends[rank]["failure"]) for rank in (a, b) if rank in ends and ends[rank]["failure"]]
            reason = f"rank {gone[0]} stopped or fell silent" if gone else next(iter(failures), "no answer")
            self._state.links.append(MeasuredLink(a, b, between, failure=reason))

    def _measure_reductions(self) -> None:
        if self._leads:
            missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self._state.present)
            broken = next((each for each in self._state.links if each.failure), None)
            if missing:
                self._state.notes.append(f"all_reduce was not measured, because it needs every rank: missing {missing}")
            elif broken is not None:
                why = f"every rank must reach its peers, and {broken.a} does not reach {broken.b}"
                self._state.notes.append(f"all_reduce was not measured: {why}")
            sizes = [] if missing or broken else [measure.SMALL_TENSOR_BYTES, self._bucket_bytes()]
            write(self._store, "reduce", {"sizes": sizes})
        sizes = self._wait_for("reduce")["sizes"]
        if not sizes:
            return
        deadline = time.monotonic() + self._timeout_s + _REDUCE_GRACE_S
        if (reduced := self._reduced(sizes)) is not None:
            write(self._store, f"reduced/{self._rank}", reduced)
        if self._leads:
            deadline = max(deadline, time.monotonic() + _GRACE_S)
            key_of = {rank: f"reduced/{rank}" for rank in self._state.present}
            self._note_reductions(self._collect(key_of, [list(key_of)], deadline))

    def _reduced(self, sizes: Sequence[int]) -> dict[str, Any] | None:
        """Measure all_reduce; return times or the failure, None if it hangs although each of its parts has a time limit."""
        timings: list[dict[str, Any]] = []

        def reduce() -> None:
            timings.extend(asdict(each) for each in measure.reductions(self._timeout_s / 3, sizes))

        try:
            attempt(self._timeout_s + _GRACE_S, reduce)
        except OverdueError:
            self._state.is_stuck = True
            return None
        except Exception as error:  # bugs are reported too: a rank without an answer would look stuck
            is_expected = isinstance(error, RuntimeError | ValueError | OSError) and str(error)
            text, refused = str(error) if is_expected else repr(error), isinstance(error, UsageError)
            return {"timings": timings, "failure": text, "refused": refused}
        return {"timings": timings, "failure": "", "refused": False}

    def _note_reductions(self, answers: dict[int, dict[str, Any]]) -> None:
        # Ranks on which ``gz.init`` refused (UsageError) are named first: ranks that waited for them failed in consequence.
        failed = sorted((r for r in answers if answers[r]["failure"]), key=lambda r: not answers[r]["refused"])
        timings = [each["timings"] for each in answers.values()]
        common = min(map(len, timings)) if len(timings) == self._size else 0
        for same in zip(*(each[:common] for each in timings), strict=True):
            slowest = max(one["median_s"] for one in same)
            self._state.reductions.append(MeasuredReduction(**{**same[0], "median_s": slowest}))
        if common and not failed:
            return
        gone = sorted(self._node_of.keys() - answers.keys())
        reasons = [f"rank {gone[0]} stopped or fell silent"] if gone else []
        reasons += [f"rank {rank}: {answers[rank]['failure']}" for rank in failed[:2]]
        known = self._state.reductions[-1] if self._state.reductions else MeasuredReduction("", True, "", 0)
        failure = "; ".join(reasons) or "no answer"
        self._state.reductions.append(replace(known, num_bytes=0, median_s=None, num_repeats=0, failure=failure))

    def _bucket_bytes(self) -> int:
        """Return the bytes of a usual bucket of gradients, or fewer if the slowest link cannot carry that in time."""
        slowest = min((each.slower_bytes_per_s for each in self._state.links if each.slower_bytes_per_s), default=1e12)
        # Six all_reduces, each sending 2 (n - 1) / n of the bucket, must fit in a third of the time limit.
        size = measure.LARGE_TENSOR_BYTES
        while size > measure.SMALL_TENSOR_BYTES * 4 and 6 * 2 * size / slowest > self._timeout_s / 3:
            size //= 4
        return size

    def _collect(
        self, key_of: Mapping[int, str], groups: Sequence[Sequence[int]], deadline: float
    ) -> dict[int, dict[str, Any]]:
        """Read, on rank 0, the answers that ranks write to the store; a rank without an answer at the deadline is lost.

        Args:
            key_of: the key under which each rank writes its answer.
            groups: ranks that depend on each other: once one has failed, another is lost if its connection was closed.
            deadline: monotonic time at which waiting ends.
        """
        group_of = {rank: group for group in groups for rank in group}
        began = time.monotonic()
        found: dict[int, dict[str, Any]] = {}
        while waiting_for := [rank for rank in key_of if rank in self._state.present and rank not in found]:
            is_over = time.monotonic() > deadline
            for rank in waiting_for:
                answer = read(self._store, key_of[rank])
                if answer is not None:
                    found[rank] = answer
                elif is_over or (
                    any(found[other]["failure"] for other in group_of[rank] if other in found) and self.has_ended(rank)
                ):
                    self.lose(rank)
            time.sleep(look_s(time.monotonic() - began, self._size))
        return found

    def _wait_for(self, key: str) -> Any:
        """Wait for the key by which rank 0 starts a step, so long that other ranks can use all the time of the step before."""
        limit_s = 2 * self._timeout_s + _CONNECT_S + _CLOCKS_S + measure.PAIR_LIMIT_S
        found = read(self._store, key, limit_s)
        if found is None:
            what = f"the check went on without this rank: rank 0 gave no sign within {limit_s:g} s"
            raise WorldError(explain(what, rank=self._rank, fix="look at the output of rank 0"))
        return found

    def lose(self, rank: int) -> None:
        """Record that a rank is lost, and how; see [Note: who is lost]."""
        if self._state.present.pop(rank, None) is None:
            return
        ended_by = self.ended_by(rank)
        what = "was ended" if ended_by else "stopped" if self.has_ended(rank) else "does not answer"
        self._state.add_absence(rank, what, f"it got {ended_by}" if ended_by else "")

    def ended_by(self, rank: int) -> str:
        """Return the signal that ended a rank; "" if the rank did not write one to the store."""
        with contextlib.suppress(WorldError):
            return str(read(self._store, f"ended/{rank}") or "")
        return ""

    def has_ended(self, rank: int) -> bool:
        """Return whether ``rank`` closed its connection to rank 0. This ends the connection, which only clocks needed."""
        if (pair := self._control.pop(rank, None)) is not None and pair.has_ended(ENDED_S):
            self._ended.add(rank)
        return rank in self._ended


def _clock(rank: int, pair: Pair) -> ClockOffset:
    """Compare this rank's clock with that of ``rank``, as NTP does: return the result of the fastest exchange of messages."""
    found = []
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(_CLOCK_REPEATS):
        start = time.time()
        pair.send(clock)
        pair.receive(clock)
        end = time.time()
        found.append((end - start, float(clock) - (start + end) / 2))
    to_and_fro_s, offset_s = min(found)
    return ClockOffset(rank, offset_s, max(to_and_fro_s, 0.0) / 2, len(found))


def _measured_pair(store: dist.Store, key: str, is_first: bool, address: str, limit_s: float) -> dict[str, Any]:
    """Measure the link of a pair as one of its two ranks; only the lower rank (``is_first``) returns values."""
    try:
        pair = Pair(store, key, is_first, address, limit_s)
        figures = measure.lead(pair) if is_first else measure.follow(pair)
    except PairError as error:
        return {"failure": str(error), "figures": {}}
    return {"failure": "", "figures": figures}
