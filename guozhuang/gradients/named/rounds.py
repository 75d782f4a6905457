"""One round of negotiation: each rank sends its new requests to all, and all ranks get the same list of collectives to do next.

[Note: rounds] There is no coordinator. In a round every rank sends one message to all others: the requests that were submitted
since its last round, whether it leaves, and on rank 0 new settings. So all ranks know the same facts, and decide alike.

1. Each rank keeps the same table of requests, by name and rank. A name is removed from it, and becomes a response of the round,
   when all ranks have requested it; ranks that have joined count as if they had. The responses have the order in which their
   names were first requested. If the ranks' requests for a name do not fit together, its response is an error.
2. When all ranks have joined, so everything in the table is a response of that round, the last response ends the join.

A rank takes part in a round when it has a request pending, has joined, or leaves. So a round begins when all ranks have a
reason, and this delays nothing: before that, no collective was ready. A rank that has joined supplies zeros (execution.py).

[Note: numbers] Programs request the same collectives again and again. So a response without error gets a number, and a rank
whose next request for the name is equal to its last one sends the number in its place. Every rank numbers and forgets the same
responses in the same order, because it does so only after facts that a round gave to all ranks; so a number means the same on
all ranks. Numbers are resolved before the round changes anything, so no rank receives a number that it has forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .requests import Message, NamedRequest, Response, difference, joined_difference
from .settings import Knobs
from .submission import JOIN_NAME, Kind


@dataclass
class RoundOutcome:
    """The decisions of one round, equal on all ranks.

    Attributes:
        responses: the responses, in the order in which they are carried out.
        leaving: ranks that took part for the last time.
        knobs: new settings, valid from this round on; None: no change.
        last_joined: the rank that joined last, if all ranks have joined now.
    """

    responses: list[Response] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    knobs: Knobs | None = None
    last_joined: int | None = None


class Rounds:
    """This rank's part in the rounds of a channel. See [Note: rounds]. Only one thread may use it.

    Args:
        exchange: sends a message to all ranks of the channel, and returns the messages of all, in rank order.
        rank: rank of this process in the channel.
        ranks: for each rank of the channel, its number in error texts.
        cache_capacity: most responses that have a number; the same on all ranks.

    Attributes:
        joined: ranks that have joined, in the order in which they did.
        num_rounds: number of rounds that this rank took part in.
        num_full_rounds: number of rounds in which some rank sent a request in full, not by its number.
    """

    def __init__(
        self, exchange: Callable[[bytes], list[bytes]], rank: int, ranks: Sequence[int], cache_capacity: int
    ) -> None:
        self._exchange, self._rank, self._ranks, self._capacity = exchange, rank, ranks, cache_capacity
        self._uses_numbers = cache_capacity > 0
        self._requested: dict[str, dict[int, NamedRequest]] = {}  # the table of [Note: rounds], by name and rank
        self._known: dict[int, Response] = {}  # responses by number; the least recently used first
        self._numbers: dict[str, int] = {}
        self._unused = itertools.count(1)
        self.joined: list[int] = []
        self.num_rounds = self.num_full_rounds = 0

    @property
    def has_joined(self) -> bool:
        """Whether this rank has joined, that is, has no more data."""
        return self._rank in self.joined

    def hold(
        self, fresh: Sequence[tuple[str, NamedRequest]], leaves: bool = False, knobs: Knobs | None = None
    ) -> RoundOutcome:
        """Carry out a round and return its decisions. Every rank of the channel must call it.

        Args:
            fresh: names and requests that were submitted on this rank since the last round.
            leaves: whether this rank takes part for the last time.
            knobs: new settings for all ranks; only rank 0 gives any.
        """
        own = Message([self._number_of(*each) or each for each in fresh], leaves, knobs)
        sent, outcome, is_full = own.encoded(), RoundOutcome(), False
        for rank, data in enumerate(self._exchange(sent)):
            message = own if data == sent else Message.decoded(data)  # equal messages are common
            for each in message.requests:
                if isinstance(each, int):
                    known = self._known[each]
                    name, request = known.name, known.requests[rank]
                else:
                    name, request = each
                    is_full = True
                if request.kind == Kind.JOIN:
                    self.joined.append(rank)
                else:
                    self._requested.setdefault(name, {})[rank] = request
            if message.leaves:
                outcome.leaving.append(rank)
            outcome.knobs = message.knobs or outcome.knobs
        self.num_rounds += 1
        self.num_full_rounds += is_full
        for name in [name for name, requests in self._requested.items() if self._is_complete(requests)]:
            outcome.responses.append(self._answer(name, self._requested.pop(name)))
        if len(self.joined) == len(self._ranks):
            outcome.responses.append(Response(JOIN_NAME, {rank: NamedRequest(Kind.JOIN) for rank in self.joined}))
            outcome.last_joined = self.joined[-1]
            self.joined.clear()
        if outcome.knobs is not None:
            self._uses_numbers = self._capacity > 0 and outcome.knobs.use_cache
            if not self._uses_numbers:
                self._known.clear()
                self._numbers.clear()
        return outcome

    def _number_of(self, name: str, request: NamedRequest) -> int | None:
        """Return the number that stands for an equal earlier request of this rank; None if there is none."""
        number = self._numbers.get(name)
        return number if number is not None and self._known[number].requests.get(self._rank) == request else None

    def _is_complete(self, requests: dict[int, NamedRequest]) -> bool:
        return len(requests) == len(self._ranks) or len(requests.keys() | set(self.joined)) == len(self._ranks)

    def _answer(self, name: str, requests: dict[int, NamedRequest]) -> Response:
        number = self._numbers.get(name)
        known = None if number is None else self._known[number]
        is_known = known is not None and known.requests == requests
        error = None if is_known else difference(name, requests, self._ranks)
        if self.joined and error is None:
            kind = next(iter(requests.values())).kind
            error = joined_difference(kind, name, self.joined, self._ranks)
        response = Response(name, requests, error)
        if self._uses_numbers and error is None:
            if number is None:
                number = self._numbers[name] = next(self._unused)
            self._known.pop(number, None)  # removed and set again: the most recently used is last
            self._known[number] = response
            if len(self._known) > self._capacity:
                del self._numbers[self._known.pop(next(iter(self._known))).name]
        return response
