"""How long a training step takes: traces of the ranks are replayed on the cores and links of a cluster.

[Note: order of collectives] The collectives of a group start in the order in which they were begun. Each takes one of the lanes
of its group on every rank, so bucket i waits until bucket i-1 has started; it moves bytes once all its ranks have come, and
gives the lanes back at its end. Messages between two ranks take no lane: the receiver has one as soon as it has arrived. Those
of one sender to one receiver in one group share a connection, which carries them one after another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import UsageError, explain
from .cluster import Cluster
from .collectives import CollectiveCost, collective_cost
from .sharing import CORES, Active, ActivePiece, Resource
from .trace import HAND_OVER, PARTS, RECV, SEND, Compute, Start, Trace, Wait

#: The part of a step in which the training script's thread waits for communication.
WAITING = "waiting"
_ADDING = ("all_reduce", "reduce_scatter", "reduce")
# Gloo adds numbers of 16 bits one by one: processor time for each byte added, of BERT-tiny's gradients on 2 ranks.
_HALF_S_PER_BYTE = 2e-9
#: The cost of a collective: operation, bytes, ranks and cluster.
Costs = Callable[[str, float, Sequence[int], Cluster], CollectiveCost]


@dataclass(frozen=True)
class StepTime:
    """What a simulation found. Times are per training step, in seconds.

    Attributes:
        step_s: the time of a step, once steps follow each other steadily.
        parts: time of the thread of the training script of the slowest rank: by part of its work, and ``"waiting"``.
        bounds: the larger of all work and all communication of that rank, and their sum: with any overlap at all the step
            lies between them, unless ranks wait for each other or share their cores.
        processor_s: processor time of one rank, mean over ranks, transport included.
        sent_bytes: what one node sends to others, mean over nodes.
        stretched: by event of the first trace, the seconds that its :class:`Compute` or its collective took; 0 for a wait.
    """

    step_s: float
    parts: dict[str, float]
    bounds: tuple[float, float]
    processor_s: float
    sent_bytes: float
    stretched: tuple[float, ...] = ()


def simulate(
    traces: Trace | Sequence[Trace],
    cluster: Cluster,
    *,
    costs: Costs = collective_cost,
    crowding: Sequence[float] = (),
    factors: Sequence[Sequence[float]] = (),
    num_repetitions: int = 3,
) -> StepTime:
    """Replay what the ranks do, and return the time of a training step.

    Args:
        traces: one for each rank, in their order; or one that stands for all ranks, which then costs no more than one rank.
        cluster: where the ranks run; its ``num_ranks`` must be that of the traces.
        crowding: how many times as long one rank takes to compute while 1, 2, ... ranks of its machine do so, waiting for
            cores included; the last value is continued in proportion to the ranks. Empty: cores are all that they share.
        factors: by rank, by repetition of the trace: how many times as long its own work takes. Empty: 1.
        num_repetitions: how often the trace is repeated, at least twice. The first repetition does not count.
        costs: the cost of a collective.

    Raises:
        UsageError: traces and cluster do not fit together, or the ranks would wait for each other for ever.
    """
    given = [traces] if isinstance(traces, Trace) else list(traces)
    if isinstance(traces, Trace):
        matching = traces.num_ranks == cluster.num_ranks
    else:
        matching = [each.rank for each in given] == list(range(cluster.num_ranks)) and {
            each.num_ranks for each in given
        } == {cluster.num_ranks}
    if not matching:
        what = f"the cluster has {cluster.num_ranks} ranks, and the traces are of others"
        raise UsageError(explain(what, value=[(each.rank, each.num_ranks) for each in given[:4]]))
    if num_repetitions < 2:
        raise UsageError(explain("the first repetition does not count, so there must be two", value=num_repetitions))
    run = _Replay(given, isinstance(traces, Trace), cluster, crowding, factors, num_repetitions, costs)
    run.to_the_end()
    return run.result()


@dataclass(eq=False)
class _Meeting:
    """A collective under way: which ranks have come, and what happens at its end."""

    missing: int
    cost: CollectiveCost
    begun_s: float = math.nan
    at_end: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class _Thread:
    """A thread of a rank: its events, and how far it has come."""

    rank: int
    number: int
    events: list[tuple[int, Compute | Start | Wait]]
    at: int = 0
    repetition: int = 0


@dataclass(eq=False)
class _Group:
    """The lanes of a rank's process group, and the calls that wait for one."""

    free: int
    queue: deque[Callable[[], None]] = field(default_factory=deque)


class _Replay:
    """One simulation. Ranks are those of the traces; if one stands for all, ``copies`` of it compute on its host."""

    def __init__(
        self,
        traces: list[Trace],
        folded: bool,
        cluster: Cluster,
        crowding: Sequence[float],
        factors: Sequence[Sequence[float]],
        num_repetitions: int,
        costs: Costs = collective_cost,
    ) -> None:
        self.traces, self.folded, self.cluster, self.factors = traces, folded, cluster, factors
        self.num_repetitions, self.costs = num_repetitions, costs
        self.now = 0.0
        self.copies = 1 if not folded else cluster.num_ranks if cluster.shares_host else cluster.ranks_per_node
        self.active = Active(float(cluster.cores_per_node or math.inf), crowding)
        self.ready: deque[_Thread] = deque()
        self.groups: dict[tuple[int, int], _Group] = {}
        self.calls: dict[object, deque[_Meeting]] = {}  # those that some ranks have begun, and others not
        self.joined: dict[object, int] = {}
        self.connections: dict[object, deque[Callable[[], None]]] = {}  # messages of each that have not arrived
        self.known: dict[object, CollectiveCost] = {}
        self.ended: set[tuple[int, int, int]] = set()  # (rank, repetition, call)
        self.waiting: dict[tuple[int, int, int], list[_Thread]] = {}
        self.ends: list[list[float]] = [[] for _ in traces]
        self.stretched = [0.0] * len(traces[0].events)
        self.own: list[dict[str, float]] = [dict.fromkeys(PARTS, 0.0) for _ in traces]  # of the measured repetitions
        self.spans: list[dict[str, float]] = [dict.fromkeys(PARTS, 0.0) for _ in traces]
        self.communication = [0.0] * len(traces)
        self.transport_s = [0.0] * len(traces)
        self.sent_bytes = 0.0
        self.earlier = [_earlier(trace) for trace in traces]
        for rank, trace in enumerate(traces):
            numbers = {0} | {event.thread for event in trace.events}
            for number in sorted(numbers):
                events = [(at, event) for at, event in enumerate(trace.events) if event.thread == number]
                self.ready.append(_Thread(rank, number, events))

    # Threads

    def to_the_end(self) -> None:
        """Run until the training script's thread of every rank has ended its last repetition."""
        while True:
            while self.ready:
                self._advance(self.ready.popleft())
            if all(len(ends) == self.num_repetitions for ends in self.ends):
                return
            if not self.active:
                stuck = [str(rank) for rank, ends in enumerate(self.ends) if len(ends) < self.num_repetitions]
                what = f"ranks {', '.join(stuck)} wait for each other for ever: their calls do not match"
                raise UsageError(explain(what, fix="compare the traces' collectives: operation, ranks and order"))
            self.now += self.active.pass_time()
            for done in self.active.take_ended():
                done()

    def _advance(self, thread: _Thread) -> None:
        """Carry out a thread's events until one takes time."""
        trace, rank = self.traces[thread.rank], thread.rank
        while thread.repetition < self.num_repetitions:
            if thread.at == len(thread.events):
                thread.at = 0
                thread.repetition += 1
                if thread.number == 0:
                    self.ends[rank].append(self.now)
                elif not thread.events:
                    return
                continue
            index, event = thread.events[thread.at]
            thread.at += 1
            if isinstance(event, Compute):
                factor = self.factors[rank][thread.repetition] if self.factors else 1.0
                if event.seconds > 0:
                    self._compute(thread, index, event, event.seconds * factor, trace.num_threads)
                    return
            elif isinstance(event, Start):
                key = rank, thread.repetition, event.call
                self._begin(key, event, index)
                if event.blocking and key not in self.ended:
                    self.waiting.setdefault(key, []).append(thread)
                    return
            else:
                key = rank, thread.repetition - (0 if index in self.earlier[rank] else 1), event.call
                if key[1] >= 0 and key not in self.ended:
                    self.waiting.setdefault(key, []).append(thread)
                    return

    def _compute(self, thread: _Thread, index: int, event: Compute, seconds: float, num_threads: int) -> None:
        began = self.now
        counts = thread.repetition > 0

        def done() -> None:
            self.ready.append(thread)
            if counts:
                self.own[thread.rank][event.part] += seconds
                if thread.number == 0:
                    self.spans[thread.rank][event.part] += self.now - began
            if thread.rank == 0 and thread.repetition == self.num_repetitions - 1:
                self.stretched[index] = self.now - began

        host = self._host(self.cluster.node_of(self.traces[thread.rank].rank))
        if self.cluster.device is None:
            threads = float(num_threads * self.copies)
            self.active.add(ActivePiece(seconds, {}, done, host, threads))
        else:
            self.active.add(ActivePiece(seconds, {}, done))

    # Communication

    def _begin(self, key: tuple[int, int, int], start: Start, index: int) -> None:
        """Begin a call: a message at once, a collective as soon as its group has a lane."""
        rank = key[0]
        if start.operation == HAND_OVER or len(start.ranks) == 1:
            self._end(key)
        elif start.operation in (SEND, RECV):
            self._message(key, start, index)
        else:
            group = self.groups.setdefault((rank, start.group), _Group(self.cluster.transport.lanes))
            group.queue.append(lambda: self._join(key, start, index, group))
            self._take_lanes(group)

    def _take_lanes(self, group: _Group) -> None:
        while group.free and group.queue:
            group.free -= 1
            group.queue.popleft()()

    def _join(self, key: tuple[int, int, int], start: Start, index: int, group: _Group) -> None:
        """A rank's lane has taken a collective, which moves bytes once those of all its ranks have."""
        rank = key[0]
        which = start.operation, start.num_bytes, start.ranks, start.element_bytes
        if self.folded:
            call = _Meeting(0, self._cost(which))
        else:  # the n-th of a rank among these ranks in this group is the n-th of the others
            among = start.ranks, start.group
            number = self.joined[rank, among] = self.joined.get((rank, among), 0) + 1
            open_calls = self.calls.setdefault((among, number), deque())
            if not open_calls:
                open_calls.append(_Meeting(len(start.ranks), self._cost(which)))
            call = open_calls[0]
            call.missing -= 1
            if not call.missing:
                del self.calls[among, number]

        def end() -> None:
            group.free += 1
            if rank == 0 and key[1] == self.num_repetitions - 1:
                self.stretched[index] = self.now - call.begun_s
            self._end(key)
            self._take_lanes(group)

        call.at_end.append(end)
        self._count(key, call.cost)
        if not call.missing:
            self._transfer(call, start.ranks, start.ranks)

    def _message(self, key: tuple[int, int, int], start: Start, index: int) -> None:
        """Begin one half of a message. The sender's half moves the bytes; the receiver's ends once they are there."""
        sends = start.operation == SEND
        pair: object = "folded" if self.folded else start.ranks
        name = "messages", pair, start.group  # collectives of the same two ranks are counted apart
        number = self.joined[name, sends] = self.joined.get((name, sends), 0) + 1
        calls = self.calls.setdefault((name, number), deque())
        if not calls:
            calls.append(_Meeting(2, self._cost((SEND, start.num_bytes, start.ranks, start.element_bytes))))
        call = calls[0]
        call.missing -= 1
        if not call.missing:
            del self.calls[name, number]
        if not sends and call.begun_s == math.inf:  # it has arrived already
            self._end(key)
            return

        def end() -> None:
            if sends and rank == 0 and key[1] == self.num_repetitions - 1:
                self.stretched[index] = self.now - began
            self._end(key)

        rank, began = key[0], self.now
        call.at_end.append(end)
        if sends:
            self._count(key, call.cost)
            waiting = self.connections.setdefault(name, deque())

            def left() -> None:
                waiting.popleft()
                if waiting:
                    waiting[0]()

            call.at_end.append(left)
            waiting.append(lambda: self._transfer(call, start.ranks[:1], start.ranks[1:]))
            if len(waiting) == 1:
                waiting[0]()

    def _transfer(self, call: _Meeting, senders: Sequence[int], receivers: Sequence[int]) -> None:
        """Move the bytes of a call: processor time on its ranks, and the links of their nodes."""
        call.begun_s = self.now
        cost, cluster = call.cost, self.cluster
        needs: dict[Resource, tuple[float, float]] = {}

        def use(what: str, where: int, amount: float, threads: float = 1.0) -> None:
            used, among = needs.get((what, where), (0.0, 0.0))
            if amount > 0:
                needs[what, where] = used + amount, among + threads

        def done() -> None:
            at_end, call.at_end = call.at_end, []
            if senders is not receivers:
                call.begun_s = math.inf
            for end in at_end:
                end()

        if cost.seconds <= 0:
            done()
            return
        alike = 1.0  # collectives of other groups that the ranks of this node are in at the same time
        if self.folded:
            here = cluster.node_of(self.traces[0].rank)
            placed, out, into, linked = [self._host(here)] * self.copies, {here}, {here}, {0}
            alike = cluster.ranks_per_node / cluster.placement(list({*senders, *receivers}))[1]
        else:
            linked = {*senders, *receivers}
            placed = [self._host(cluster.node_of(rank)) for rank in linked]
            out, into = ({cluster.node_of(rank) for rank in ranks} for ranks in (senders, receivers))
        if cluster.device is None and cluster.cores_per_node:
            for host in placed:
                use(CORES, host, cost.processor_s / cost.seconds)
        if cost.nic_bytes and cluster.between.bytes_per_s:
            share = min(1.0, cost.alternates * cost.nic_bytes / cost.seconds / cluster.between.bytes_per_s)
            for node in out:
                use("out", node, share * alike)
            for node in into:
                use("into", node, share * alike)
        elif cluster.device is not None and cost.wire_bytes and cluster.inside.bytes_per_s:  # else cores move the bytes
            for rank in linked:
                use("inside", rank, min(1.0, cost.wire_bytes / cost.seconds / cluster.inside.bytes_per_s))
        self.active.add(ActivePiece(cost.seconds, needs, done, messages=cost.messages / cost.seconds))

    def _end(self, key: tuple[int, int, int]) -> None:
        self.ended.add(key)
        self.ready.extend(self.waiting.pop(key, ()))

    def _cost(self, which: tuple[str, float, tuple[int, ...], int]) -> CollectiveCost:
        if which not in self.known:
            operation, num_bytes, ranks, element_bytes = which
            cost = self.costs(operation, num_bytes, ranks, self.cluster)
            if element_bytes == 2 and operation in _ADDING and self.cluster.transport.name == "gloo" and cost.seconds:
                added_s = _HALF_S_PER_BYTE * num_bytes * (len(ranks) - 1) / len(ranks)
                cost = replace(cost, seconds=cost.seconds + added_s, processor_s=cost.processor_s + added_s)
            self.known[which] = cost
        return self.known[which]

    def _count(self, key: tuple[int, int, int], cost: CollectiveCost) -> None:
        if key[1] > 0:
            self.communication[key[0]] += cost.seconds
            self.transport_s[key[0]] += cost.processor_s
            self.sent_bytes += cost.nic_bytes / self.cluster.ranks_per_node

    def _host(self, node: int) -> int:
        return 0 if self.cluster.shares_host else node

    def result(self) -> StepTime:
        """Return the mean over the repetitions but the first, per training step."""
        steps = self.traces[0].num_steps * (self.num_repetitions - 1)
        took = [ends[-1] - ends[0] for ends in self.ends]
        slowest = max(range(len(took)), key=lambda rank: (took[rank], sum(self.spans[rank].values())))
        parts = {part: seconds / steps for part, seconds in self.spans[slowest].items()}
        step_s = took[slowest] / steps
        parts[WAITING] = max(0.0, step_s - sum(parts.values()))
        work, communication = sum(self.own[slowest].values()) / steps, self.communication[slowest] / steps
        processor_s = sum(self.transport_s)
        processor_s += sum(sum(own.values()) * t.num_threads for own, t in zip(self.own, self.traces, strict=True))
        return StepTime(
            step_s,
            parts,
            (max(work, communication), work + communication),
            processor_s / steps / len(self.traces),
            self.sent_bytes / steps / len(self.traces) * self.cluster.ranks_per_node,
            tuple(self.stretched),
        )


def _earlier(trace: Trace) -> set[int]:
    """Return the indices of the waits for a call that the trace has begun before them."""
    begun: set[int] = set()
    found = set()
    for at, event in enumerate(trace.events):
        if isinstance(event, Start):
            begun.add(event.call)
        elif isinstance(event, Wait) and event.call in begun:
            found.add(at)
    return found
