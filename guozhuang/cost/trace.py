"""What one rank does in some training steps: its own work, the communication that it begins, and what it waits for.

[Note: reading a trace] The events of one thread happen one after the other, in the order in which they stand in the trace;
those of different threads wait for each other only where a :class:`Wait` says so. Thread 0 is that of the training script.
``Wait(c)`` ends when the call ``c`` has ended. A call is a ``Start`` with that number, in any thread of the same rank. If the
trace begins ``c`` only after the ``Wait``, the ``Wait`` means ``c`` of the repetition before, and nothing in the first
repetition: this is how communication overlaps the next step. A thread hands work to another by the operation ``"hand_over"``,
which costs nothing and ends at once: the other thread waits for it.

All ranks of a collective begin it; the n-th collective that a rank begins among certain ranks, in a group of them, belongs to
the n-th of the others. A ``"send"`` belongs to a ``"recv"`` of the same two ranks in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError, explain

#: Parts of a step.
PARTS = ("data", "forward", "backward", "exchange", "optimizer")
#: An operation among the threads of one rank.
HAND_OVER = "hand_over"
#: Operations between two ranks; ``ranks`` of them is (sender, receiver).
SEND, RECV = "send", "recv"
#: Operations and what their ``num_bytes`` counts.
OPERATIONS = {
    "all_reduce": "the tensor",
    "reduce_scatter": "the whole input of one rank",
    "all_gather": "the whole output of one rank",
    "broadcast": "the tensor",
    "reduce": "the tensor",
    "gather": "the whole output of the receiving rank",
    "scatter": "the whole input of the sending rank",
    "all_to_all": "the whole input of one rank",
    SEND: "the message",
    RECV: "the message",
    "pair": "what each of two ranks sends to the other",
    "server": "what one rank sends to all servers, and gets from them",
    "barrier": "0",
    "meeting": "0: all ranks of one node wait for each other in shared memory",
    HAND_OVER: "0",
}


@dataclass(frozen=True)
class Compute:
    """Work of the rank's own cores or device.

    Attributes:
        part: the part of the step: one of :data:`PARTS`.
        seconds: how long it takes while nobody else computes.
        thread: the thread that does it.
    """

    part: str
    seconds: float
    thread: int = 0


@dataclass(frozen=True)
class Start:
    """A collective or a message begins.

    Attributes:
        call: its number, unique in the trace.
        operation: one of :data:`OPERATIONS`.
        num_bytes: what :data:`OPERATIONS` says for the operation.
        ranks: the ranks that take part, in the order of their group; of a message the sender and the receiver.
        blocking: True if the thread goes on only when the call has ended.
        thread: the thread that begins it.
        group: the number of the process group, in this rank's order: calls of one group begin in their order, and each
            group has lanes of its own.
        element_bytes: of one number of the tensor; 2 are added more slowly by processors.
    """

    call: int
    operation: str
    num_bytes: int
    ranks: tuple[int, ...]
    blocking: bool = False
    thread: int = 0
    group: int = 0
    element_bytes: int = 4


@dataclass(frozen=True)
class Wait:
    """The thread waits until the call with this number has ended; see [Note: reading a trace]."""

    call: int
    thread: int = 0


Event = Compute | Start | Wait


@dataclass(frozen=True)
class Trace:
    """What one rank does in ``num_steps`` whole training steps, which are repeated.

    ``dataclasses.asdict`` and :func:`guozhuang.records.build` convert it to JSON's types and back.

    Attributes:
        rank: whose trace it is.
        num_ranks: the ranks of the run.
        events: see [Note: reading a trace].
        num_steps: the steps in it: the period of a strategy that does not do the same in every step.
        num_threads: the cores that one :class:`Compute` keeps busy.
        peak_bytes: peak memory of the process that was recorded, as it was without peers; None if it was not measured.
    """

    rank: int
    num_ranks: int
    events: tuple[Compute | Start | Wait, ...]
    num_steps: int = 1
    num_threads: int = 1
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise UsageError(explain("a trace has at least one step", value=self.num_steps, rank=self.rank))
        begun: set[int] = set()
        for event in self.events:
            if isinstance(event, Compute):
                if event.part not in PARTS or not 0 <= event.seconds < float("inf"):
                    what = f"work in a trace belongs to one of {', '.join(PARTS)} and takes a finite time"
                    raise UsageError(explain(what, value=event, rank=self.rank))
            elif isinstance(event, Start):
                self._check(event, begun)
                begun.add(event.call)
        for event in self.events:
            if isinstance(event, Wait) and event.call not in begun:
                raise UsageError(explain("a trace waits for a call that nobody begins", value=event, rank=self.rank))

    def _check(self, start: Start, begun: set[int]) -> None:
        if start.operation not in OPERATIONS:
            what = f"operations of a trace are {', '.join(OPERATIONS)}"
            raise UsageError(explain(what, value=start.operation, rank=self.rank))
        if start.call in begun:
            raise UsageError(explain("two calls of a trace have the same number", value=start.call, rank=self.rank))
        inside = all(0 <= rank < self.num_ranks for rank in start.ranks) and len(set(start.ranks)) == len(start.ranks)
        if self.rank not in start.ranks or not inside or start.num_bytes < 0:
            what = (
                f"a call of a trace is among different ranks of the {self.num_ranks}, of which rank {self.rank} is one"
            )
            raise UsageError(explain(what, value=start, rank=self.rank))
        if start.operation in (SEND, RECV):
            at = 0 if start.operation == SEND else 1
            if len(start.ranks) != 2 or start.ranks[at] != self.rank:
                raise UsageError(
                    explain("a message goes from its first rank to its second", value=start, rank=self.rank)
                )
