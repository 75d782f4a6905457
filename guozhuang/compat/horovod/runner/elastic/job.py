"""The decisions of an elastic run: which workers to start and end, when a round begins, when the job is over. Pure.

The driver reports events (``found``, ``came``, ``ended``) and carries out what ``turn`` returns; the time is an argument.

[Note: who fails] When a worker ends with anything but 0 its host is blacklisted, and the other workers there are ended, because
what kills one of them mostly kills the others. Workers that the driver ended by a signal, or whose host is no longer found, may
end with any code. Once a worker that has a slot has ended with 0 the job is done: no further round begins, and the other
workers may finish, as long as they print something from time to time.

[Note: who has the state] A new worker holds no trained state until its first sync is done. If all other workers are lost before
that, it must not restart the training from scratch unnoticed. So each worker reports whether it has the state when it waits for
a round; rank 0 is a worker with the state, and the job fails when a worker had the state and none that waits has it any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from guozhuang.compat.horovod.runner.elastic.assignment import Blacklist, HostSlot, choose
from guozhuang.compat.horovod.runner.elastic.settings import ElasticSettings
from guozhuang.launch.failures import how

# A worker that has lost its slot is ended if it still runs this many seconds after a round began without it.
_REMOVED_S = 30.0
# The job fails after this many rounds in a row in which no worker completed ``hvd.init()``.
_EMPTY_ROUNDS = 10
_STATE_LOST = "all workers that had the state have failed or were ended: nobody holds it any more"


@dataclass(eq=False)
class Worker:
    """One worker process, running or ended. Its times are in seconds, by the same clock as ``now`` of ``Job.turn``.

    Attributes:
        number: the worker's number, counting all that were started from 0.
        slot: the host and slot it runs in.
        started: the time of its start.
        round: the newest round that it is in; 0: none yet.
        rank: its rank in that round.
        is_waiting: it waits for the next round.
        may_skip_sync: it holds the same state as the other survivors, as it last reported.
        has_state: it had the trained state when it last reported; see [Note: who has the state].
        has_entered: it had completed ``hvd.init()`` in its last round when it last reported.
        heard: the time when it last printed something.
        leaving: the time since when it does not belong to the run, so that its end is no failure; None: it belongs to the run.
        is_signalled: the driver has sent it a signal to end.
        code: its return code, as ``subprocess`` gives it; None while it runs.
        pid: its process id; 0 where it is not known.
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
    is_signalled: bool = False
    code: int | None = None
    pid: int = 0

    @property
    def place(self) -> tuple[bool, float, int]:
        """Return the sort key for ranks: workers that have or may have the state first, then by former rank, then by age."""
        may_have_it = self.has_state if self.is_waiting else self.round > 0
        return not may_have_it, math.inf if self.rank is None else self.rank, self.number

    @property
    def title(self) -> str:
        """Return the name of the worker in messages, such as "rank 1 (host a, process 123)"."""
        name = f"rank {self.rank}" if self.rank is not None else "a worker without a rank yet"
        process = f", process {self.pid}" if self.pid else ""
        return f"{name} (host {self.slot.host}{process})"


@dataclass
class Orders:
    """The actions that ``ElasticJob.turn`` has decided on, for the driver to carry out.

    Attributes:
        say: lines to show to the user.
        end: workers to end with a signal.
        start: new workers to start.
        changed: "added", "removed" or both: how hosts changed, to be reported to the running workers.
        announce: the workers of a new round, in the order of their ranks; empty: no round begins.
        may_skip_sync: all workers of that round hold the same state already.
        dismiss: the reason why no further round will begin, to be reported to waiting workers; "" if one may.
        over: the exit code of the job; None: it continues.
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
    """The state of an elastic run. From it ``turn`` decides which workers to start and end, and when a round begins.

    Args:
        settings: the numbers of workers, time-outs and limits of the run; the rest is not looked at.
    """

    def __init__(self, settings: ElasticSettings) -> None:
        self._limits, self._blacklist = settings, Blacklist(settings.cooldown_range)
        self._hosts: dict[str, int] = {}
        self.workers: list[Worker] = []
        self.round = 0
        self.first_failure: Worker | None = None
        self._round_failed = False  # a worker that had been in a round has failed since the newest round began
        self._had_state = False
        self._succeeded: Worker | None = None
        self._succeeded_at = -math.inf
        self._is_dismissed = False
        # Numbers of the workers, new or without a slot, of which running workers were notified in this round.
        self._notified: set[int] = set()
        self._num_empty = 0  # rounds in a row in which no worker completed hvd.init()
        self._messages: list[str] = []
        self._short_since = self._broken_since = -math.inf
        self._has_started = False

    def found(self, hosts: Mapping[str, int]) -> None:
        """Record the hosts that the discovery found, with their numbers of slots."""
        if dict(hosts) == self._hosts:
            return
        gone = ", ".join(host for host in self._hosts if host not in hosts)
        # Hosts keep the order in which they were first seen.
        stay = [host for host in self._hosts if host in hosts]
        self._hosts = {host: hosts[host] for host in dict.fromkeys([*stay, *hosts])}
        there = ", ".join(f"{host}:{slots}" for host, slots in self._hosts.items()) or "none"
        if self._has_started:
            self._messages.append(f"hosts are now: {there}" + (f" (gone: {gone})" if gone else ""))

    def came(self, number: int, after: int, may_skip_sync: bool, has_state: bool, has_entered: bool = True) -> None:
        """Record that a worker waits for the round after round ``after``; ``Worker`` describes the other arguments."""
        worker = self.workers[number]
        worker.is_waiting, worker.may_skip_sync, worker.has_state = worker.round == after, may_skip_sync, has_state
        worker.has_entered = has_entered
        self._had_state = self._had_state or has_state

    def heard(self, number: int, now: float) -> None:
        """Record the time at which a worker printed something."""
        self.workers[number].heard = now

    def ended(self, number: int, code: int, now: float) -> None:
        """Record that the process of a worker has ended; ``code`` is its return code as ``subprocess`` gives it."""
        worker = self.workers[number]
        worker.code, worker.is_waiting = code, False
        if worker.is_signalled:
            return
        others = [each for each in self.workers if each.code is None and each.leaving is None and self._has_slot(each)]
        # A worker without a slot that ends with 0 is a success only if no running worker has one, as when all hosts seem gone.
        if worker.leaving is not None or (not self._has_slot(worker) and (code != 0 or others)):
            self._messages.append(f"{worker.title} has left with {how(code)}: its slot is gone")
        elif code == 0:
            self._succeeded, self._succeeded_at = self._succeeded or worker, now
        elif self._succeeded is not None:
            self._messages.append(f"{worker.title} ended with {how(code)} after {self._succeeded.title} had ended well")
        else:
            self._messages.append(f"{worker.title} ended with {how(code)}; {self._fail(worker, now)}")

    def turn(self, now: float) -> Orders:
        """Return the driver's actions for the time ``now``: which workers to start and end, and whether a round begins."""
        orders = Orders(say=self._messages)
        self._messages = []
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
        """Return how many workers a host may have; at least 1, also for a host that is gone."""
        return max(self._hosts.get(host, 1), 1)

    def _has_slot(self, worker: Worker) -> bool:
        return worker.slot.index < self._hosts.get(worker.slot.host, 0)

    @property
    def members(self) -> list[Worker]:
        """Return all workers of the newest round, running or ended, in the order of their ranks."""
        found = [worker for worker in self.workers if self.round and worker.round == self.round]
        return sorted(found, key=lambda worker: worker.rank or 0)

    def _fail(self, worker: Worker, now: float) -> str:
        """Record a worker's failure and blacklist its host; return a phrase that states for how long. See [Note: who fails]."""
        self.first_failure = self.first_failure or worker
        self._round_failed = self._round_failed or bool(worker.round)
        held_s = self._blacklist.add(worker.slot.host, now)
        return f"its host gets no workers {'any more' if math.isinf(held_s) else f'for {held_s:.0f} s'}"

    def _finish(self, running: list[Worker], now: float, orders: Orders) -> None:
        """Let the remaining workers finish after a success; end those that were in no round yet, or are silent for too long."""
        assert self._succeeded is not None
        timeout_s = self._limits.elastic_timeout_s
        if not self._is_dismissed:
            self._is_dismissed = True
            orders.dismiss = f"the job is over: {self._succeeded.title} has ended well"
        for worker in running:
            if worker.round == 0 and not worker.is_signalled:
                self._end(worker, -math.inf, orders)
            elif not worker.is_signalled and now >= max(self._succeeded_at, worker.heard) + timeout_s:
                orders.say.append(
                    f"ending {worker.title}: {self._succeeded.title} has ended well, and it has neither ended nor printed "
                    f"anything for {timeout_s:g} s (--elastic-timeout)"
                )
                self._end(worker, now, orders)
        if not running:
            orders.over = 0

    def _end(self, worker: Worker, now: float, orders: Orders) -> None:
        worker.leaving, worker.is_signalled, worker.is_waiting = now, True, False
        orders.end.append(worker)

    def _let_go(self, unwanted: list[Worker], now: float, orders: Orders) -> list[Worker]:
        """End workers without a slot whose host failed or that were in no round yet; return the others, to be notified."""
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
        """End workers that still run long after their slot was removed, though the newest round told them to leave."""
        for worker in running:
            if worker.leaving is not None and not worker.is_signalled and now > worker.leaving + _REMOVED_S:
                orders.say.append(f"ending {worker.title}: its slot has been gone for {_REMOVED_S:.0f} s")
                self._end(worker, now, orders)

    def _is_lost(self, kept: list[Worker], going: list[Worker], orders: Orders) -> bool:
        """Return whether the job has failed for good: its state is lost, or workers failed on every host; then set ``over``."""
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
            # Blacklisted hosts may become usable again, but a program that failed at once on every host would fail again.
            orders.say.append("a worker failed on every host before any had called hvd.init()")
        else:
            return False
        orders.over = 1
        return True

    def _is_short(self, wanted: list[HostSlot], kept: list[Worker], now: float, orders: Orders) -> bool:
        """Return whether slots, or workers with the state, are lacking; set ``orders.over`` if they lacked for too long."""
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
        # A worker that leaves occupies its slot until its process has ended.
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
        """Begin the next round if one is needed and all its workers wait for it. See [Note: rounds] in the package."""
        members = [worker for worker in kept if worker.round]
        ready = [worker for worker in kept if not worker.round and worker.is_waiting]
        late = [worker for worker in kept if not worker.round and not worker.is_waiting]
        awaited = [worker for worker in late if now < worker.started + self._limits.start_timeout_s]
        # A round is broken if one of its workers is gone or waits for the next, but not if one that lost its slot still trains.
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
        """Notify the running workers of removed slots at once, and of new workers when these wait for a round."""
        gone, new = {worker.number for worker in going}, {worker.number for worker in ready}
        if self.round and (gone | new) - self._notified:
            orders.changed = frozenset(["removed"] * bool(gone) + ["added"] * bool(new))
            self._notified |= gone | new

    def _end_the_silent(self, members: list[Worker], late: list[Worker], now: float, orders: Orders) -> bool:
        """End workers for which others have waited too long, and count them as failed; return whether there were any.

        There is no limit for running workers to commit while only new workers wait for them.
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
        # Slots without a waiting worker are skipped, so that the ranks of the waiting ones are consecutive.
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
        self._notified.clear()
