"""The decisions of an elastic run: who is started, who is ended, when a round begins, and when all is over. Pure.

The driver tells what happened (``found``, ``came``, ``ended``) and carries out what ``turn`` returns; the clock is an argument.

[Note: who fails] A worker that ends with anything but 0 takes its host with it: the host is left alone (``blacklist``), and its
other workers are ended, because what kills one of them mostly kills the others. Workers that were told to end, or whose host is
no longer among those found, may end as they like. Once one that has a slot has ended with 0 the job is done: no round begins
any more, and the others may finish, as long as they give signs of life.

[Note: who has the state] A new worker holds nothing until its first sync is done. Should all others be lost before, it must not
begin the training anew as if nothing had been. So each tells what it holds when it comes; rank 0 is one that has the state,
and when somebody had it and nobody has it any more, the job has failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from guozhuang.compat.horovod.runner.elastic.assignment import HostSlot, choose
from guozhuang.compat.horovod.runner.elastic.blacklist import Blacklist
from guozhuang.launch.failures import how

# A worker whose host was removed learns it from the next round; after so long without an end it is ended.
_REMOVED_S = 30.0
# So many rounds in a row may break before anybody is in them.
_EMPTY_ROUNDS = 10
_STATE_LOST = "all workers that had the state have failed or were ended: nobody holds it any more"


@dataclass(eq=False)
class Worker:
    """One process.

    Attributes:
        number: counts all that were started.
        slot: where it is.
        started: when.
        round: the newest one that it is in; 0: none yet.
        rank: in that round.
        is_waiting: it has come to wait for the next one.
        may_skip_sync: it holds what the survivors hold.
        has_state: when it came last, it had what had been trained; see [Note: who has the state].
        has_entered: when it came last, it had been in its round, with ``hvd.init()`` done.
        heard: when it last began, ended or printed something.
        leaving: since when it is no part of the run any more, so that its end is no failure; None: it is one.
        is_told: it was told to end, by a signal.
        code: how it ended; None while it runs.
        pid: of its process, where that is known.
    """

    number: int
    slot: HostSlot
    started: float
    round: int = 0
    rank: int | None = None
    is_waiting: bool = False
    may_skip_sync: bool = False
    has_state: bool = False
    has_entered: bool = True
    heard: float = -math.inf
    leaving: float | None = None
    is_told: bool = False
    code: int | None = None
    pid: int = 0

    @property
    def place(self) -> tuple[bool, float, int]:
        """For the order of ranks: who has the state, or may have it, before who has not; then by rank, and by age."""
        may_have_it = self.has_state if self.is_waiting else self.round > 0
        return not may_have_it, math.inf if self.rank is None else self.rank, self.number

    @property
    def title(self) -> str:
        """What it is called in texts."""
        name = f"rank {self.rank}" if self.rank is not None else "a worker without a rank yet"
        process = f", process {self.pid}" if self.pid else ""
        return f"{name} (host {self.slot.host}{process})"


@dataclass(frozen=True)
class ElasticLimits:
    """See ``settings.ElasticSettings``."""

    num_proc: int
    min_np: int
    max_np: int | None
    elastic_timeout_s: float
    start_timeout_s: float
    reset_limit: int | None


@dataclass
class Orders:
    """What the driver is to do, in this order.

    Attributes:
        say: lines for the user.
        end: workers to be ended, with a signal.
        start: new workers.
        changed: hosts came (``added``) or went (``removed``): to be told to the running workers.
        announce: the workers of a new round, in the order of their ranks; empty: none begins.
        may_skip_sync: in that round everybody holds the same state already.
        dismiss: tell those who wait for a round that none will come.
        over: the exit code of the job; None: it goes on.
    """

    say: list[str] = field(default_factory=list)
    end: list[Worker] = field(default_factory=list)
    start: list[Worker] = field(default_factory=list)
    changed: frozenset[str] = frozenset()
    announce: list[Worker] = field(default_factory=list)
    may_skip_sync: bool = False
    dismiss: str = ""
    over: int | None = None


class ElasticJob:
    """See the module.

    Args:
        limits: of the run.
        blacklist: its hosts that are left alone.
    """

    def __init__(self, limits: ElasticLimits, blacklist: Blacklist) -> None:
        self._limits, self._blacklist = limits, blacklist
        self._hosts: dict[str, int] = {}
        self.workers: list[Worker] = []
        self.round = 0
        self.first_failure: Worker | None = None
        self._round_failed = False  # a worker of the newest round
        self._had_state = False
        self._succeeded: Worker | None = None
        self._succeeded_at = -math.inf
        self._is_dismissed = False
        self._told: set[int] = set()  # the workers whose coming or going was told since the newest round began
        self._num_empty = 0  # rounds in a row that nobody was in
        self._said: list[str] = []
        self._short_since = self._broken_since = -math.inf
        self._has_started = False

    def found(self, hosts: Mapping[str, int]) -> None:
        """The discovery found these hosts with these slots."""
        if dict(hosts) == self._hosts:
            return
        gone = ", ".join(host for host in self._hosts if host not in hosts)
        # Hosts keep the order in which they were first seen.
        stay = [host for host in self._hosts if host in hosts]
        self._hosts = {host: hosts[host] for host in dict.fromkeys([*stay, *hosts])}
        there = ", ".join(f"{host}:{slots}" for host, slots in self._hosts.items()) or "none"
        if self._has_started:
            self._said.append(f"hosts are now: {there}" + (f" (gone: {gone})" if gone else ""))

    def came(self, number: int, after: int, may_skip_sync: bool, has_state: bool, has_entered: bool = True) -> None:
        """A worker waits for the round after round ``after``."""
        worker = self.workers[number]
        worker.is_waiting, worker.may_skip_sync, worker.has_state = worker.round == after, may_skip_sync, has_state
        worker.has_entered = has_entered
        self._had_state = self._had_state or has_state

    def heard(self, number: int, now: float) -> None:
        """A worker gave a sign of life."""
        self.workers[number].heard = now

    def ended(self, number: int, code: int, now: float) -> None:
        """The process of a worker has ended; ``code`` as of ``subprocess``."""
        worker = self.workers[number]
        worker.code, worker.is_waiting = code, False
        if worker.is_told:
            return
        others = [each for each in self.workers if each.code is None and each.leaving is None and self._has_slot(each)]
        # When all hosts seem to be gone, whoever ends with 0 has done the job all the same.
        if worker.leaving is not None or (not self._has_slot(worker) and (code != 0 or others)):
            self._said.append(f"{worker.title} has left with {how(code)}: its slot is gone")
        elif code == 0:
            self._succeeded, self._succeeded_at = self._succeeded or worker, now
        elif self._succeeded is not None:
            self._said.append(f"{worker.title} ended with {how(code)} after {self._succeeded.title} had ended well")
        else:
            self._said.append(f"{worker.title} ended with {how(code)}; {self._fail(worker, now)}")

    def turn(self, now: float) -> Orders:
        """What is to be done now."""
        orders = Orders(say=self._said)
        self._said = []
        running = [worker for worker in self.workers if worker.code is None]
        self._end_those_that_stay(running, now, orders)
        if self._succeeded is not None:
            self._finish(running, now, orders)
            return orders
        living = sorted((worker for worker in running if worker.leaving is None), key=lambda worker: worker.place)
        usable = {host: slots for host, slots in self._hosts.items() if not self._blacklist.holds(host, now)}
        wanted = choose(usable, [worker.slot for worker in living], self._limits.max_np)
        kept = [worker for worker in living if worker.slot in wanted]
        going = self._let_go([worker for worker in living if worker.slot not in wanted], now, orders)
        if self._is_lost(kept, going, orders) or self._is_short(wanted, kept, now, orders):
            return orders
        self._start(wanted, running, kept, now, orders)
        self._form(wanted, kept, going, now, orders)
        return orders

    def slots_of(self, host: str) -> int:
        """How many workers a host may have; at least 1."""
        return max(self._hosts.get(host, 1), 1)

    def _has_slot(self, worker: Worker) -> bool:
        return worker.slot.index < self._hosts.get(worker.slot.host, 0)

    @property
    def members(self) -> list[Worker]:
        """All workers of the newest round, living or not, in the order of their ranks."""
        found = [worker for worker in self.workers if self.round and worker.round == self.round]
        return sorted(found, key=lambda worker: worker.rank or 0)

    def _fail(self, worker: Worker, now: float) -> str:
        """See [Note: who fails]. Returns what becomes of the host, in words."""
        self.first_failure = self.first_failure or worker
        self._round_failed = self._round_failed or bool(worker.round)
        held_s = self._blacklist.add(worker.slot.host, now)
        return f"its host gets no workers {'any more' if math.isinf(held_s) else f'for {held_s:.0f} s'}"

    def _finish(self, running: list[Worker], now: float, orders: Orders) -> None:
        """Let the others finish. One that hangs is not waited for: the job is done."""
        assert self._succeeded is not None
        timeout_s = self._limits.elastic_timeout_s
        if not self._is_dismissed:
            self._is_dismissed = True
            orders.dismiss = f"the job is over: {self._succeeded.title} has ended well"
        for worker in running:
            if worker.round == 0 and not worker.is_told:
                self._end(worker, -math.inf, orders)
            elif not worker.is_told and now >= max(self._succeeded_at, worker.heard) + timeout_s:
                orders.say.append(
                    f"ending {worker.title}: {self._succeeded.title} has ended well, and it has neither ended nor printed "
                    f"anything for {timeout_s:g} s (--elastic-timeout)"
                )
                self._end(worker, now, orders)
        if not running:
            orders.over = 0

    def _end(self, worker: Worker, now: float, orders: Orders) -> None:
        worker.leaving, worker.is_told, worker.is_waiting = now, True, False
        orders.end.append(worker)

    def _let_go(self, unwanted: list[Worker], now: float, orders: Orders) -> list[Worker]:
        """Workers without a slot: end those whose host failed, or who hold no state; the others learn it, and are returned."""
        going = []
        for worker in unwanted:
            if self._blacklist.holds(worker.slot.host, now):
                orders.say.append(f"ending {worker.title} too: a worker of its host failed")
                self._end(worker, now, orders)
            elif worker.round == 0:
                self._end(worker, now, orders)
            else:
                going.append(worker)
        return going

    def _end_those_that_stay(self, running: list[Worker], now: float, orders: Orders) -> None:
        """Who has no slot any more learned it from the newest round, or from collectives that fail."""
        for worker in running:
            if worker.leaving is not None and not worker.is_told and now > worker.leaving + _REMOVED_S:
                orders.say.append(f"ending {worker.title}: its slot has been gone for {_REMOVED_S:.0f} s")
                self._end(worker, now, orders)

    def _is_lost(self, kept: list[Worker], going: list[Worker], orders: Orders) -> bool:
        """Whether nothing can come of it any more."""
        if self.round and self._round_failed and not going and not any(worker.round for worker in kept):
            orders.say.append(_STATE_LOST)
        elif (
            not kept and not going and self.first_failure is not None and self._hosts
            and all(map(self._blacklist.is_for_ever, self._hosts))
        ):  # fmt: skip
            orders.say.append("a worker failed on every host, so no host is left")
        elif (
            not self.round and self._hosts and all(map(self._blacklist.was_added, self._hosts))
            and not any(worker.is_waiting for worker in kept)
        ):  # fmt: skip
            # Hosts may come back after a while, but not for a script that fails everywhere.
            orders.say.append("a worker failed on every host before any had called hvd.init()")
        else:
            return False
        orders.over = 1
        return True

    def _is_short(self, wanted: list[HostSlot], kept: list[Worker], now: float, orders: Orders) -> bool:
        """Whether there is too little to go on with; over if that has been so for too long. What runs goes on meanwhile."""
        least = self._limits.min_np if self._has_started else self._limits.num_proc
        timeout_s = self._limits.elastic_timeout_s
        what = ""
        if len(wanted) < least:
            what = f"{self._slots_text(len(wanted))}, and {least} workers are needed at least"
        elif self.round and not any(worker.round for worker in kept):
            what = f"all hosts of the newest round are gone, and with them the state ({self._slots_text(len(wanted))})"
        if not what:
            self._short_since = -math.inf
            return False
        if math.isinf(self._short_since):
            self._short_since = now
            orders.say.append(f"{what}: waiting for hosts, {timeout_s:g} s at most (--elastic-timeout)")
        if now >= self._short_since + timeout_s:
            lost = ", ".join(worker.title for worker in self.members if worker not in kept)
            who = f"; the newest round has lost {lost}" if lost else ""
            orders.say.append(f"after {timeout_s:g} s (--elastic-timeout) {what}{who}")
            orders.over = 1
        return True

    def _slots_text(self, number: int) -> str:
        there = ", ".join(f"{host}:{slots}" for host, slots in self._hosts.items()) or "no host"
        held = ", ".join(filter(self._blacklist.was_added, self._hosts))
        failed = f"; a worker failed on {held}" if held else ""
        return f"{number} slot{'' if number == 1 else 's'} can be used (found: {there}{failed})"

    def _start(
        self, wanted: list[HostSlot], running: list[Worker], kept: list[Worker], now: float, orders: Orders
    ) -> None:
        self._has_started = True
        # One that leaves keeps its slot until it is gone.
        busy = {worker.slot for worker in running}
        for slot in wanted:
            if slot not in busy:
                worker = Worker(len(self.workers), slot, now)
                self.workers.append(worker)
                kept.append(worker)
                orders.start.append(worker)

    def _form(
        self, wanted: list[HostSlot], kept: list[Worker], going: list[Worker], now: float, orders: Orders
    ) -> None:
        """See [Note: rounds] in the package."""
        members = [worker for worker in kept if worker.round]
        ready = [worker for worker in kept if not worker.round and worker.is_waiting]
        late = [worker for worker in kept if not worker.round and not worker.is_waiting]
        awaited = [worker for worker in late if now < worker.started + self._limits.start_timeout_s]
        # Somebody of the newest round is gone, or wants a new one. Who is to leave, and trains, breaks nothing.
        is_broken = any(each.code is not None or each.leaving is not None or each.is_waiting for each in self.members)
        self._broken_since = now if is_broken and math.isinf(self._broken_since) else self._broken_since
        self._tell(ready if not awaited else [], going, orders)
        if self._end_the_silent(members, late, now, orders) or not (is_broken or ready):
            return
        least = min(len(wanted), self._limits.num_proc) if not self.round else self._limits.min_np
        coming = [worker for worker in members if worker.is_waiting]
        if len(coming) < len(members) or awaited or len(coming) + len(ready) < least:
            return
        limit = self._limits.reset_limit
        if limit is not None and self.round > limit:
            orders.say.append(
                f"Horovod was shutdown because number of resets during elastic job exceeded limit: {limit}"
            )
            orders.over = 1
            return
        if self.round and not any(worker.has_entered for worker in coming):
            self._num_empty += 1
        else:
            self._num_empty = 0
        if self._num_empty >= _EMPTY_ROUNDS:
            orders.say.append(f"{_EMPTY_ROUNDS} rounds in a row broke before hvd.init() was done in any of the workers")
            orders.over = 1
            return
        if self._had_state and not any(worker.has_state for worker in coming):
            orders.say.append(_STATE_LOST)
            orders.over = 1
            return
        self._announce(wanted, [*coming, *ready], going, now, orders)

    def _tell(self, ready: list[Worker], going: list[Worker], orders: Orders) -> None:
        """Running workers learn at once of those that leave, and of new ones when these have come."""
        gone, new = {worker.number for worker in going}, {worker.number for worker in ready}
        if self.round and (gone | new) - self._told:
            orders.changed = frozenset(["removed"] * bool(gone) + ["added"] * bool(new))
            self._told |= gone | new

    def _end_the_silent(self, members: list[Worker], late: list[Worker], now: float, orders: Orders) -> bool:
        """Whether somebody was waited for too long: a worker that hangs counts as one that failed.

        New workers wait for those that train to commit, however long that takes.
        """
        timeout_s = self._limits.elastic_timeout_s
        silent = [worker for worker in late if now >= worker.started + timeout_s]
        if not math.isinf(self._broken_since) and now >= self._broken_since + timeout_s:
            silent += [worker for worker in members if not worker.is_waiting]
        for worker in silent:
            did = "come to the new round" if worker.round else "call hvd.init()"
            text = f"{worker.title} did not {did} within {timeout_s:g} s (--elastic-timeout), and is ended"
            orders.say.append(f"{text}; {self._fail(worker, now)}")
            self._end(worker, now, orders)
        return bool(silent)

    def _announce(
        self, wanted: list[HostSlot], coming: list[Worker], going: list[Worker], now: float, orders: Orders
    ) -> None:
        # Not everybody who is wanted has come: ranks follow the order of those who have.
        at = {worker.slot: worker for worker in coming}
        chosen = [at[slot] for slot in wanted if slot in at]
        orders.may_skip_sync = all(worker.round and worker.may_skip_sync for worker in chosen)
        self.round += 1
        for rank, worker in enumerate(chosen):
            worker.round, worker.rank, worker.is_waiting = self.round, rank, False
        for worker in going:
            worker.leaving = now
        orders.announce = chosen
        self._round_failed, self._broken_since = False, -math.inf
        self._told.clear()
