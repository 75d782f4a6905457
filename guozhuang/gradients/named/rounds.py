"""One round of negotiation: each rank puts in its pending requests, and all ranks get the same list of collectives to do next.

[Note: rounds] There is no coordinator. A round gives every rank the same facts, and all decide alike from them.

1. One all-reduce (minimum) of a vector of bytes. Byte 0: 0 if this rank has a message, else 1. Byte 1 + s, for slot s of the
   cache: 2 if the request in the slot is pending on this rank (or the rank has joined, and so takes part in everything), 0 if
   this rank has another request under the slot's name, else 1. So the minimum is 2 for slots that are ready on all ranks, and 0
   for slots that are out of date. In a steady state this small all-reduce is the whole round.
2. Slots that are out of date are evicted; a rank on which such a request is pending sends it in full. If byte 0 shows that a
   rank has a message, all ranks exchange messages: requests without a slot, joins, whether a rank leaves, new settings from
   rank 0. Each rank keeps the same table of requests, and removes a name from it when all ranks have asked for it.
3. Names ready by their slots, and then names complete in the table, are the responses of the round. If the ranks' requests
   for a name do not fit together, that name's response is an error. Other names get a slot when they come for the second time:
   names that come once, as those of unnamed operations, would push lasting ones out.
4. When all ranks have joined, one more round ends the join. Each slot that is pending on some rank is carried out in it, with
   zeros from the other ranks; so in this round a byte is 1 if the slot is pending on this rank, else 2.

A rank takes part in a round when it has a request pending, has joined, or leaves. So a round begins when all ranks have a
reason, and this delays nothing: before that, no collective was ready. A rank that has joined supplies zeros (execution.py).

[Note: slots] Every rank puts, uses and evicts the same names in the same order, because it does so only after facts that a
round gave to all ranks. So a slot means the same on all ranks without further messages. A rank compares a new request with its
earlier one in the slot; if they are equal on all ranks, the cached response is still valid.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from .requests import Message, NamedRequest, Response, difference, joined_difference
from .settings import Knobs
from .submission import JOIN_NAME, Kind

if TYPE_CHECKING:
    from .control import Words

_OUT_OF_DATE, _NOT_HERE, _READY = 0, 1, 2
_ASKED, _QUIET = 1, 2  # bytes of slots in the last round of a join: pending on this rank, or not
_MOST_SEEN: Final = 4096  # names without a slot that are remembered
# Kinds that are not worth a slot of the cache: used once (barrier, join), or different each time (all-to-all).
_NOT_CACHED: Final = (Kind.BARRIER, Kind.JOIN, Kind.ALLTOALL)


class ResponseCache:
    """Responses by slot; the least recently used one is evicted first. See [Note: slots].

    Args:
        capacity: most responses to hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: dict[str, int] = {}
        self._held: OrderedDict[int, Response] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self.num_slots = 0  # number of slots that were ever in use

    def __len__(self) -> int:
        return len(self._held)

    def slot_of(self, name: str) -> int | None:
        """Return the slot of a name; None if it has none."""
        return self._slots.get(name)

    def name_at(self, slot: int) -> str:
        """Return the name of the response in a slot."""
        return self._held[slot].name

    def at(self, slot: int) -> Response | None:
        """Return the response in a slot; None if it is empty."""
        return self._held.get(slot)

    def use(self, slot: int) -> Response:
        """Return the response in a slot and mark it as most recently used."""
        self._held.move_to_end(slot)
        return self._held[slot]

    def put(self, response: Response) -> list[int]:
        """Put a response into a slot, under its new name; return the slots that were evicted for it."""
        if self.capacity == 0:
            return []
        given_up = []
        while len(self._held) >= self.capacity:
            slot = next(iter(self._held))
            self.evict(slot)
            given_up.append(slot)
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self.num_slots
            self.num_slots += 1
        self._slots[response.name] = slot
        self._held[slot] = response
        return given_up

    def evict(self, slot: int) -> None:
        """Empty a slot."""
        del self._slots[self._held.pop(slot).name]
        heapq.heappush(self._free, slot)

    def slots(self) -> list[int]:
        """Return the numbers of slots in use, in rising order."""
        return sorted(self._held)


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
        words: the collectives among the channel's ranks.
        rank: rank of this process in the channel.
        ranks: for each rank of the channel, its number in error texts.
        cache_capacity: most responses in the cache; the same on all ranks.

    Attributes:
        joined: ranks that have joined, in the order in which they did.
        num_rounds: number of rounds that this rank took part in.
        num_full_rounds: number of rounds in which messages were exchanged.
    """

    def __init__(self, words: Words, rank: int, ranks: Sequence[int], cache_capacity: int) -> None:
        self._words, self._rank, self._ranks, self._capacity = words, rank, ranks, cache_capacity
        self._cache = ResponseCache(cache_capacity)
        self._asked: dict[
            str, dict[int, NamedRequest]
        ] = {}  # the table: by name and rank, requests that not all ranks have sent yet; the same on every rank
        self._counted: dict[int, tuple[str, NamedRequest]] = {}  # by slot: pending here and in the cache
        self._unsent: list[tuple[str, NamedRequest]] = []  # requests pending on this rank that are not in the table yet
        self._mine = np.full(64, _NOT_HERE, dtype=np.uint8)  # by slot: the byte that this rank puts into the vector
        self._seen: dict[str, None] = {}  # names that came once and have no slot; the oldest first
        self._joins: dict[int, NamedRequest] = {}
        self.joined: list[int] = []
        self.num_rounds = self.num_full_rounds = 0

    @property
    def has_joined(self) -> bool:
        """Whether this rank has joined."""
        return self._rank in self.joined

    def hold(
        self, fresh: Sequence[tuple[str, NamedRequest]], leaves: bool = False, knobs: Knobs | None = None
    ) -> RoundOutcome:
        """Carry out a round and return its decisions. Every rank of the channel must call.

        Args:
            fresh: names and requests that were submitted on this rank since the last round.
            leaves: whether this rank takes part for the last time.
            knobs: new settings for all ranks; only rank 0 gives any.
        """
        ends_join = len(self.joined) == len(self._ranks)
        out_of_date = self._sort(fresh)
        has_news = bool(self._unsent) or leaves or knobs is not None
        vector = self._vector(out_of_date, has_news, ends_join)
        self._words.least(vector)
        self.num_rounds += 1
        told = vector.numpy()
        for slot in np.flatnonzero(told[1:] == _OUT_OF_DATE).tolist():
            self._saw(self._cache.name_at(slot))  # the changed request gets a slot as soon as it is complete
            self._cache.evict(slot)
            self._forget(slot)
        ready = np.flatnonzero(told[1:] == (_ASKED if ends_join else _READY)).tolist()
        outcome = RoundOutcome([self._from_slot(slot) for slot in ready])
        if told[0] == 0:
            self._exchange(leaves, knobs, outcome)
        if ends_join:
            outcome.responses.append(Response(JOIN_NAME, dict(sorted(self._joins.items()))))
            outcome.last_joined = self.joined[-1]
            self.joined.clear()
            self._joins.clear()
        return outcome

    def _sort(self, fresh: Sequence[tuple[str, NamedRequest]]) -> list[int]:
        """Sort new requests into cached and unsent ones; return the slots that are out of date because of them."""
        out_of_date = []
        for name, request in fresh:
            slot = self._cache.slot_of(name)
            if slot is None:
                self._unsent.append((name, request))
                continue
            held = self._cache.at(slot)
            if held is not None and held.requests.get(self._rank) == request:
                self._counted[slot] = name, request
                self._mine[slot] = _READY
            else:
                self._unsent.append((name, request))
                out_of_date.append(slot)
        return out_of_date

    def _vector(self, out_of_date: Sequence[int], has_news: bool, ends_join: bool) -> Tensor:
        num_slots = self._cache.num_slots
        vector = np.empty(1 + num_slots, dtype=np.uint8)
        vector[0] = 0 if has_news else 1
        if ends_join:
            vector[1:] = np.where(self._mine[:num_slots] == _READY, _ASKED, _QUIET)
        elif self.has_joined:
            vector[1:] = _NOT_HERE
            vector[[1 + slot for slot in self._cache.slots()]] = _READY
        else:
            vector[1:] = self._mine[:num_slots]
        vector[[1 + slot for slot in out_of_date]] = _OUT_OF_DATE
        return torch.from_numpy(vector)

    def _from_slot(self, slot: int) -> Response:
        self._counted.pop(slot, None)
        self._mine[slot] = _NOT_HERE
        response = self._cache.use(slot)
        if not self.joined:
            return response
        return response._replace(error=self._joined_error(response.name, response.request))

    def _forget(self, slot: int) -> None:
        """Send a request that was pending by its slot in full, because the slot was evicted."""
        self._mine[slot] = _NOT_HERE
        found = self._counted.pop(slot, None)
        if found is not None:
            self._unsent.append(found)

    def _exchange(self, leaves: bool, knobs: Knobs | None, outcome: RoundOutcome) -> None:
        own = None if knobs is None else (knobs.fusion_threshold_bytes, knobs.cycle_time_ms, knobs.use_cache)
        message = Message(self._unsent, leaves, own)
        self._unsent = []
        self.num_full_rounds += 1
        for rank, data in enumerate(self._words.exchange(message.encoded())):
            told = Message.decoded(data)
            if told.leaves:
                outcome.leaving.append(rank)
            if told.knobs is not None:
                outcome.knobs = Knobs(*told.knobs)
            for name, request in told.requests:
                if request.kind == Kind.JOIN:
                    self.joined.append(rank)
                    self._joins[rank] = request
                else:
                    self._asked.setdefault(name, {})[rank] = request
        if outcome.knobs is not None:
            self._take(outcome.knobs)
        complete = [
            name
            for name, requests in self._asked.items()
            if len(requests) == len(self._ranks) or len(requests.keys() | set(self.joined)) == len(self._ranks)
        ]
        for name in complete:  # in the order in which each was first asked for
            outcome.responses.append(self._answer(name, self._asked.pop(name)))

    def _answer(self, name: str, requests: dict[int, NamedRequest]) -> Response:
        one = next(iter(requests.values()))
        error = difference(name, requests, self._ranks) or self._joined_error(name, one)
        response = Response(name, requests, error)
        if error is None and one.kind not in _NOT_CACHED and self._saw(name):
            del self._seen[name]
            for slot in self._cache.put(response):
                self._forget(slot)
            if self._cache.num_slots > len(self._mine):
                self._mine = np.concatenate([self._mine, np.full_like(self._mine, _NOT_HERE)])
        return response

    def _saw(self, name: str) -> bool:
        """Record a name; return whether it was recorded before, among the last 4096 names without a slot."""
        if name in self._seen:
            return True
        if len(self._seen) >= _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[name] = None
        return False

    def _joined_error(self, name: str, request: NamedRequest) -> str | None:
        if not self.joined:
            return None
        return joined_difference(request.kind, name, self.joined, self._ranks)

    def _take(self, knobs: Knobs) -> None:
        """Apply new settings to the cache: drop it, or begin an empty one, if its use was switched."""
        is_used = self._cache.capacity > 0
        if is_used != knobs.use_cache:
            for slot in self._cache.slots():
                self._cache.evict(slot)
                self._forget(slot)
            self._cache = ResponseCache(self._capacity if knobs.use_cache else 0)
