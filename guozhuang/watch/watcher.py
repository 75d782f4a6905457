"""The watcher, the rank that reads the beats of all ranks, judges them, gathers stacks and publishes reports in the store.

Keys of the store, all overwritten and never appended to: ``beat/R`` and ``stacks/R`` of rank R, ``status`` (``WatcherStatus``),
``report`` (the last few reports), and ``term/N``, a counter by which one rank claims the N-th term of the watch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from guozhuang.net.client import PatientStore
from guozhuang.units import merged, ranks_text
from guozhuang.watch import report as texts
from guozhuang.watch.judge import Beat, Judge, Limits
from guozhuang.watch.pace import PaceJudge, sentence, table
from guozhuang.watch.processes import state_of

_log = logging.getLogger("guozhuang")
# The number of reports kept in the store: more than the watcher can publish between two reads of a rank.
_KEPT_REPORTS = 4
_MAX_ASKED = 256


@dataclass(frozen=True)
class WatcherStatus:
    """The status of the watcher, in one key ("status") that every rank reads once per beat.

    Attributes:
        term: number of the watch, one more at each takeover; a status of a higher term replaces a lower one.
        watcher: the rank that watches; -1: it has left, and another rank is to take over.
        count: number of this status within the term.
        stacks_request: number of the report for which the watcher wants stacks; 0 for none.
        report: number of the last report, to be read at the key "report".
        suspects: processes as [rank, node, pid, start]: ranks of that node are to look at them, because they may be lost.
        keeper: the rank that keeps the store, in the same form; None: a launcher keeps it.
        process: node, pid and start of the watcher's process.
        lost: the ranks that were reported as lost and are still lost.
        closing: the rank that keeps the store leaves; no rank may use the store any more.
    """

    term: int
    watcher: int
    count: int = 0
    stacks_request: int = 0
    report: int = 0
    suspects: Sequence[tuple[int, str, int, int]] = ()
    keeper: tuple[int, str, int, int] | None = None
    process: tuple[str, int, int] | None = None
    lost: Sequence[int] = ()
    closing: bool = False

    def to_bytes(self) -> bytes:
        """Encode the status for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WatcherStatus:
        """Return the status that ``to_bytes`` encoded."""
        return cls(**json.loads(data))


def look_at_neighbours(status: WatcherStatus, node: str, rank: int) -> dict[int, str]:
    """Return the states of the processes of this node that the watcher asks for in ``status``, by rank."""
    return {
        int(asked): state_of(int(pid), int(start))
        for asked, where, pid, start in status.suspects
        if where == node and asked != rank
    }


@dataclass
class _Gathering:
    number: int
    deadline_s: float


@dataclass(frozen=True)
class Report:
    """A finished report of the watcher on lost ranks, failed collectives, exceptions or a hang.

    Attributes:
        number: higher than the number of any earlier report.
        short: the text that every rank logs.
        stacks: the stacks of all ranks, which the watcher alone logs.
        ends: every rank must end.
        hang: the line that names the ranks for which the others wait, if the world hangs.
    """

    number: int
    short: str
    stacks: str
    ends: bool
    hang: str = ""

    @property
    def full(self) -> str:
        """The text of the report, followed by the stacks of all ranks if it has them."""
        return f"{self.short}\n{self.stacks}" if self.stacks else self.short


class Watcher:
    """The work of the watcher, in rounds: read all beats, judge them, ask for process states, gather stacks, report.

    Args:
        store: a client that no other thread uses.
        size: the number of ranks of the world.
        status: the first status of this term.
        judge: a new one, without beats.
    """

    def __init__(self, store: dist.Store, size: int, status: WatcherStatus, judge: Judge) -> None:
        self._store, self._size, self._judge = store, size, judge
        self.status = status
        # Number reports from above all those of earlier terms: this rank does not know which numbers were used then.
        self._number = self.status.term * 1_000_000
        self._reported_lost: set[int] = set()
        self._reported_mute: set[int] = set()
        self._reported_failed: set[int] = set()
        self._reported_troubled: set[int] = set()
        self._gathering: _Gathering | None = None
        self._reports: list[tuple[int, str, bool, str]] = []
        self._paces, self._has_seen_slow = PaceJudge(), False

    @property
    def limits(self) -> Limits:
        """The time limits by which this watcher's ``Judge`` decides."""
        return self._judge.limits

    @property
    def is_urgent(self) -> bool:
        """Whether the watcher waits for stacks or process states from other ranks."""
        return self._gathering is not None or bool(self.status.suspects)

    def round(self, clock_s: float) -> tuple[Report | None, list[str]]:
        """Read and judge all beats once; return a report if one is finished, and lines for the log.

        Raises:
            RuntimeError: the store does not answer (``DistNetworkError``, ``DistStoreError``).
        """
        judge, lines = self._judge, []
        read_beats(self._store, self._size, judge, clock_s)
        lost, mute = judge.lost(clock_s), judge.mute(clock_s)
        known = self._reported_lost | self._reported_mute
        back = known - lost.keys() - mute.keys()
        if back:
            lines.append(f"{ranks_text(sorted(back))} sent a heartbeat again")
        new = {rank: text for rank, text in mute.items() if rank not in known}
        lines += [f"{ranks_text(ranks)} of {self._size}: {text}" for ranks, text in merged(new)]
        lines += self._slow(list(judge.live(lost)))
        self._reported_lost, self._reported_mute = self._reported_lost & lost.keys(), set(mute)
        failed = {rank: text for rank, text in judge.failed().items() if rank not in self._reported_failed}
        self._reported_failed |= failed.keys()
        hangs = judge.hangs(clock_s)
        news = lost.keys() - self._reported_lost or judge.troubled().keys() - self._reported_troubled
        if self._gathering is None and (news or hangs):
            self._number += 1
            self._gathering = _Gathering(self._number, clock_s + self.limits.gather_s)
        report = self._finish(clock_s, lost, hangs) if self._gathering is not None else None
        if report is None and failed:
            self._number += 1
            report = Report(self._number, texts.failures(failed), "", ends=False)
        self._publish(clock_s, report)
        return report, lines

    def _slow(self, live: Sequence[int]) -> list[str]:
        """Take the own times in the last beats, and return a line for each rank that is slow from now on, or no longer."""
        beats = self._judge.beats()
        for rank, beat in beats.items():
            if beat.own_time is not None:
                self._paces.take(rank, beat.own_time)
        new, over = self._paces.round(live)
        self._has_seen_slow |= bool(new)
        lines = [sentence(each, beats[each.rank].host) for each in new]
        return lines + [f"rank {rank} is as fast as the others again" for rank in over]

    def log_own_times(self, rank: int, is_wanted: bool) -> None:
        """Log the table of the own time of each rank, for people if a rank was slow or ``is_wanted``."""
        if self._paces.own_times:
            hosts = {each: beat.host for each, beat in self._judge.beats().items()}
            text = table(self._paces.own_times, hosts, self._paces.slow)
            _log.log(logging.WARNING if is_wanted or self._has_seen_slow else logging.INFO, "[rank %d] %s", rank, text)

    def _finish(self, clock_s: float, lost: Mapping[int, str], hangs: bool) -> Report | None:
        gathering, judge = self._gathering, self._judge
        assert gathering is not None
        silent = set(judge.silent(clock_s))
        asked = [r for r, b in judge.beats().items() if b.left is None and r not in lost]
        late = [rank for rank in asked if judge.beats()[rank].stacks_answered < gathering.number]
        if any(rank not in silent for rank in late) and clock_s < gathering.deadline_s:
            return None
        troubled = {rank: text for rank, text in judge.troubled().items() if rank not in self._reported_troubled}
        self._gathering = None
        new = {rank: text for rank, text in lost.items() if rank not in self._reported_lost}
        if not hangs and not new and not troubled:
            return None  # nothing to report: the trouble ended while the stacks were gathered
        answered = [rank for rank in asked if rank not in late]
        given = (
            dict(zip(answered, map(_text, self._store.multi_get([f"stacks/{r}" for r in answered])), strict=True))
            if answered
            else {}
        )
        self._reported_lost |= new.keys()
        self._reported_troubled |= troubled.keys()
        # A lost rank explains why a collective failed, and so do different calls; else the report names who held up the others.
        is_explained = bool(lost) or texts.is_mismatch(judge.troubled())
        held_up = texts.held_up_by(judge, lost, clock_s) if hangs or (troubled and not is_explained) else ""
        parts = [
            texts.hang(judge, lost, clock_s, held_up) if hangs else "",
            texts.losses(lost if hangs else new, self._size),
            texts.trouble(troubled, held_up) if troubled and not hangs else "",
            texts.dead_threads(judge),
            texts.table(judge, lost, clock_s),
            texts.last_line(hangs, judge.hang_timeout_s) if hangs or new else "",
        ]
        missing = sorted({*late, *lost})
        short = "\n".join(filter(None, parts))
        return Report(gathering.number, short, texts.stacks(given, missing), hangs, held_up if hangs else "")

    def _publish(self, clock_s: float, report: Report | None) -> None:
        beats = self._judge.beats()
        asked = dict.fromkeys(self._judge.silent(clock_s))
        if self._judge.troubled():
            asked |= dict.fromkeys([rank for rank, beat in beats.items() if beat.left is None][:_MAX_ASKED])
        suspects = [(rank, beats[rank].node, beats[rank].pid, beats[rank].start) for rank in asked]
        if report is not None:
            self._reports = [
                *self._reports[1 - _KEPT_REPORTS :],
                (report.number, report.short, report.ends, report.hang),
            ]
            self._store.set("report", json.dumps(self._reports))
        request = self._gathering.number if self._gathering is not None else 0
        number = report.number if report is not None else self.status.report
        self._put(
            replace(
                self.status,
                count=self.status.count + 1,
                stacks_request=request,
                report=number,
                suspects=suspects,
                lost=sorted(self._reported_lost),
            )
        )

    def _put(self, status: WatcherStatus) -> None:
        self.status = status
        self._store.set("status", status.to_bytes().decode())


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def read_reports(store: dist.Store, after: int) -> list[Report]:
    """Return the reports with numbers above ``after``, without stacks."""
    found = [Report(number, text, "", ends, hang) for number, text, ends, hang in json.loads(store.get("report"))]
    return [report for report in found if report.number > after]


def read_beats(store: dist.Store | PatientStore, size: int, judge: Judge, clock_s: float) -> None:
    """Read the last beats of all ranks, and give them to the judge."""
    # Reading a missing key would block, so the keys of ranks without a beat are checked first; no key is ever removed.
    absent = {rank for rank in judge.without_beat() if not store.check([f"beat/{rank}"])}
    present = [rank for rank in range(size) if rank not in absent]
    for rank, data in zip(present, store.multi_get([f"beat/{r}" for r in present]), strict=True):
        judge.take(rank, Beat.from_bytes(data), clock_s)


def use_store(store: dist.Store | PatientStore, ranks: Collection[int]) -> bool:
    """Return whether any of these ranks may still send requests to the store, by their last beats."""
    keys = [f"beat/{rank}" for rank in ranks]
    if not all(store.check([key]) for key in keys):
        return True
    beats = [Beat.from_bytes(data) for data in store.multi_get(keys)] if keys else []
    return any(beat.left is None and not beat.released_store for beat in beats)
