"""Rank 0 leads: it tells every rank what to do next, and knows at any time who is there, who stopped and who is silent.

[Note: who waits for whom] Each rank keeps one connection to the conductor, does what comes over it, and answers. The
conductor waits for answers with a limit. A connection that ends names a rank that stopped, at once; an answer that does
not come in time names one that is stuck, and it is not asked again. A rank that is ended by a signal says so before it goes,
so that those whom a launcher ends because of another's death are not taken for the cause. The conductor never computes and
never waits for anything but these connections; rank 0's own part is a client as all others, in a thread.

Each step has a limit of its own, so that one that hangs does not take the time of the next; ``longest_s`` is their sum.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from guozhuang.check.links import PAIR_LIMIT_S, schedule
from guozhuang.check.reductions import LARGE_BYTES, SMALL_BYTES
from guozhuang.check.results import Absence, Clock, Facts, Link, Reduction
from guozhuang.check.wire import Callers, Line, readable

_CLOCK_REPEATS = 16
_CALL_S = 10.0  # for ranks that are there to call: this takes no more than an import that is still going on
_CLOCKS_S = 10.0
_ANSWER_S = 5.0  # to a question that costs no time
_LEAVE_S = 3.0
_REDUCE_GRACE_S = 2.0
_GRACE_S = 0.5  # between a rank's own limit and when its answer must be here


def longest_s(timeout_s: float) -> float:
    """How long a check may take in the worst case, from when the ranks have started to when rank 0 knows the result.

    Args:
        timeout_s: limit of each step: the meeting (once for the store, once for the ranks), links, all_reduce.
    """
    facts_s, meeting_s = 15.0, 2 * timeout_s
    links_s = timeout_s + PAIR_LIMIT_S + _GRACE_S
    return facts_s + meeting_s + _CALL_S + _CLOCKS_S + links_s + timeout_s + _REDUCE_GRACE_S + 2 * _LEAVE_S


class Conductor:
    """Leads the ranks through a check; not thread-safe.

    Args:
        listener: where ranks call in.
        word: what they must know.
        facts: of the ranks that came, by rank.
        address_of: where each rank listens for its peers.
        limit_s: of each step.
        reason_of: why a rank did not call in, as far as it could leave word.
    """

    def __init__(
        self,
        listener: socket.socket,
        word: str,
        facts: Mapping[int, Facts],
        address_of: Mapping[int, str],
        limit_s: float,
        reason_of: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._listener = listener
        self._callers = Callers(listener, word)
        self._facts = facts
        self._address_of = address_of
        self._limit_s = limit_s
        self._reason_of = reason_of
        self._lines: dict[int, Line] = {}
        self._ports: dict[int, int] = {}
        self.clocks: list[Clock] = []
        self.links: list[Link] = []
        self.reductions: list[Reduction] = []
        self.absences: list[Absence] = []
        self.notes: list[str] = []
        self.when = "the ranks called rank 0"

    def lead(self, num_ranks: int) -> None:
        """Do all of it; what could be found out stands in the attributes, also if this raises.

        Args:
            num_ranks: how many there should be; all_reduce needs all of them.

        Raises:
            Ended: by a signal.
        """
        self._gather()
        self.when = "clocks were compared"
        self._compare_clocks()
        self.when = "links were measured"
        self._measure_links()
        self.when = "all_reduce was measured"
        missing = ", ".join(str(rank) for rank in range(num_ranks) if rank not in self._lines)
        broken = next((each for each in self.links if each.failure), None)
        if missing:
            self.notes.append(f"all_reduce was not measured, because it needs every rank: missing {missing}")
        elif broken is not None:
            why = f"every rank must reach its peers, and {broken.a} does not reach {broken.b}"
            self.notes.append(f"all_reduce was not measured: {why}")
        else:
            self._measure_reductions(num_ranks)

    def end(self, limit_s: float = _LEAVE_S) -> None:
        """Let all ranks go, and wait until they have gone, so that the launcher sees them end before rank 0 does."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(do="end")
        deadline = time.monotonic() + limit_s
        for rank, line in self._lines.items():
            # It has gone, which is what we wait for; or its time is up; or an interrupted call of this has closed it.
            with contextlib.suppress(OSError, ValueError):
                while rank and time.monotonic() < deadline:
                    line.receive(max(deadline - time.monotonic(), 0.001))
            line.close()
        self._lines.clear()
        self._callers.close()
        self._listener.close()

    def settle(self, limit_s: float) -> None:
        """Take notice of who has stopped already."""
        deadline = time.monotonic() + limit_s
        while self._lines and time.monotonic() < deadline:
            self._hear(deadline - time.monotonic())

    def _gather(self) -> None:
        deadline = time.monotonic() + min(self._limit_s, _CALL_S)
        while len(self._lines) < len(self._facts):
            try:
                line, said = self._callers.next(deadline - time.monotonic())
            except TimeoutError:
                break
            self._lines[int(said["rank"])] = line
            self._ports[int(said["rank"])] = int(said["own_port"])
        self._callers.close()
        for rank in sorted(self._facts.keys() - self._lines.keys()):
            reason = self._reason_of(rank) or "it came, and did not call rank 0 after that"
            self._note_absence(rank, "does not answer", reason)

    def _compare_clocks(self) -> None:
        """Every rank answers once; of each node but this one, the first to answer tells the time."""
        deadline = time.monotonic() + _CLOCKS_S
        self._ask(list(self._lines), _ANSWER_S, do="tell")
        home = self._facts[0].node
        done = {home}
        for rank in sorted(self._lines):
            node = self._facts[rank].node
            if node in done:
                continue
            found: list[tuple[float, float]] = []
            for _ in range(_CLOCK_REPEATS):
                left_s = deadline - time.monotonic()
                if left_s < 1.0:  # so little that a rank could be called silent that is not
                    break
                start = time.time()
                told = self._ask([rank], min(_ANSWER_S, left_s), do="tell").get(rank)
                end = time.time()
                if told is None:
                    break
                found.append((end - start, float(told["time_s"]) - (start + end) / 2))
            if found:
                done.add(node)
                to_and_fro_s, offset_s = min(found)
                self.clocks.append(Clock(rank, offset_s, max(to_and_fro_s, 0.0) / 2, len(found)))

    def _measure_links(self) -> None:
        plan = schedule({rank: self._facts[rank].node for rank in self._lines})
        if plan.note:
            self.notes.append(plan.note)
        limit_s = min(PAIR_LIMIT_S, max(self._limit_s / 4, 1.0))  # one stuck rank must not use up all the time
        deadline = time.monotonic() + self._limit_s
        for number, pairs in enumerate(plan.rounds):
            if time.monotonic() > deadline:
                left = sum(len(each) for each in plan.rounds[number:])
                self.notes.append(f"{left} pairs were not measured: the time for links ({self._limit_s:g} s) was over")
                break
            self._measure_round(pairs, limit_s)
        self.links.sort(key=lambda each: (each.a, each.b))

    def _measure_round(self, pairs: Sequence[tuple[int, int]], limit_s: float) -> None:
        there = [(a, b) for a, b in pairs if a in self._lines and b in self._lines]
        for a, b in there:
            word = secrets.token_hex(8)
            self._tell(b, do="be called", word=word, within_s=limit_s)
            address = self._address_of[b] or "127.0.0.1"
            self._tell(a, do="call", peer=b, address=address, port=self._ports[b], word=word, within_s=limit_s)
        answers = self._answers([rank for pair in there for rank in pair], limit_s + _GRACE_S)
        for a, b in there:
            between = self._facts[a].node != self._facts[b].node
            told = answers.get(a)
            if told is not None and not told.get("failure"):
                self.links.append(Link(a, b, between, **told["figures"]))
                continue
            gone = [rank for rank in (a, b) if rank not in self._lines]
            reason = f"rank {gone[0]} stopped or fell silent" if gone else str((told or {}).get("failure", "no answer"))
            self.links.append(Link(a, b, between, failure=reason))

    def _measure_reductions(self, num_ranks: int) -> None:
        ranks = list(self._lines)
        # The roll call, the group's connections and a collective have a limit of their own each; who runs into one says so.
        sizes = (SMALL_BYTES, self._bucket_bytes())
        answers = self._ask(
            ranks, self._limit_s + _REDUCE_GRACE_S, do="reduce", within_s=self._limit_s / 3, sizes=sizes
        )
        timings = {rank: told["timings"] for rank, told in answers.items()}
        # Who refused is the cause; who waited for it in vain comes after.
        failed = sorted((r for r in answers if answers[r]["failure"]), key=lambda r: not answers[r]["refused"])
        failures = {rank: str(answers[rank]["failure"]) for rank in failed}
        common = min((len(each) for each in timings.values()), default=0) if len(timings) == num_ranks else 0
        for number in range(common):
            same = [each[number] for each in timings.values()]
            self.reductions.append(Reduction(**{**same[0], "median_s": max(one["median_s"] for one in same)}))
        if common and not failures:
            return
        gone = sorted(set(ranks) - set(answers))
        reason = f"rank {gone[0]} stopped or fell silent; " if gone else ""
        reason += "; ".join(f"rank {rank}: {text}" for rank, text in list(failures.items())[:2])
        known = self.reductions[-1] if self.reductions else Reduction("", True, "", 0)
        self.reductions.append(
            Reduction(known.backend, known.is_default, known.device_type, 0, failure=reason.rstrip("; ") or "no answer")
        )

    def _bucket_bytes(self) -> int:
        """A bucket of the usual size, or one small enough for the slowest link."""
        slowest = min((each.slower_bytes_per_s for each in self.links if each.slower_bytes_per_s), default=1e12)
        # Six all_reduces of 2 (n - 1) / n of the bucket, in a third of the time there is.
        size = LARGE_BYTES
        while size > SMALL_BYTES * 4 and 6 * 2 * size / slowest > self._limit_s / 3:
            size //= 4
        return size

    def _ask(self, ranks: Sequence[int], limit_s: float, **words: Any) -> dict[int, dict[str, Any]]:
        for rank in ranks:
            self._tell(rank, **words)
        return self._answers(ranks, limit_s)

    def _tell(self, rank: int, **words: Any) -> None:
        if rank in self._lines:
            try:
                self._lines[rank].send(**words)
            except OSError:
                self._lose(rank, "stopped")

    def _answers(self, ranks: Sequence[int], limit_s: float) -> dict[int, dict[str, Any]]:
        """Wait for a word of each; who gives none in time is not asked again."""
        deadline = time.monotonic() + limit_s
        found: dict[int, dict[str, Any]] = {}
        while waiting := [rank for rank in ranks if rank in self._lines and rank not in found]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                for rank in waiting:
                    self._lose(rank, "does not answer")
                break
            found |= self._hear(left_s)
        return found

    def _hear(self, limit_s: float) -> dict[int, dict[str, Any]]:
        """What ranks say within the limit. All are heard, not only who owes an answer: the first to stop is the cause."""
        ready = [rank for rank, line in self._lines.items() if line.has_word()]
        if not ready:
            by_line = {line: rank for rank, line in self._lines.items()}
            ready = [by_line[line] for line in readable(self._lines.values(), limit_s)]
        found = {}
        for rank in ready:
            try:
                told = self._lines[rank].receive(0.1)
            except TimeoutError:
                continue  # the rest of the line is on its way
            except OSError:
                self._lose(rank, "stopped")
                continue
            if "ended_by" in told:
                self._lose(rank, "was ended", f"it got {told['ended_by']}")
            else:
                found[rank] = told
        return found

    def _lose(self, rank: int, what: str, reason: str = "") -> None:
        self._lines.pop(rank).close()
        self._note_absence(rank, what, reason)

    def _note_absence(self, rank: int, what: str, reason: str = "") -> None:
        self.absences.append(Absence(rank, self._facts[rank].host, what, self.when, reason))
