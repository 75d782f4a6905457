"""One round of negotiation: what each rank has pending goes in, what all of them do next comes out, the same on each.

[Note: rounds] There is no coordinator. A round tells every rank the same facts; all decide alike from them.

1. One all-reduce (minimum) of a vector of bytes. Byte 0: 1 if this rank has nothing else to tell. Byte 1 + s, for slot s of the
   cache: 2 if this rank has what the slot holds pending (or has joined, and takes part in everything), 0 if it asks for
   something else under that name, else 1. The minimum says what is ready on all ranks (2), and what is out of date (0).
   In a steady state this is all: one small all-reduce.
2. What is out of date is evicted; who has it pending asks in full. If byte 0 says that some rank has something to tell, all
   ranks exchange messages: requests that no slot stands for, joins, whether a rank leaves, new settings from rank 0. Each rank
   keeps the same table of requests, and takes from it what no rank is missing from any more.
3. Both together, cached ones first, are the responses of the round. What ranks disagree in is an error of its own, and only of
   those who asked. The others enter the cache when their name comes for the second time: names that come once, as those of
   unnamed operations, would push lasting ones out.
4. When all ranks have joined, one more round ends it. What slots stand for and some rank has pending is done in it, with zeros
   from the others; so here a byte is 1 if this rank has it pending, else 2.

A rank comes to a round when it has something pending, has joined, or leaves. So a round waits for all ranks to have something,
and an idle rank costs nothing: before that, nothing could have been done. What has joined supplies zeros (execution.py).

[Note: slots] Every rank puts, uses and evicts the same names in the same order, because it does so only for what a round told
all of them. So a slot means the same everywhere without a word about it. A rank compares what it is asked for with what it
asked under that name before; where that is equal on all ranks, all that was agreed on is still true.
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
_ASKED, _QUIET = 1, 2  # in the last round of a join
_MOST_SEEN: Final = 4096  # names that came once
# Kinds that are not worth a slot of the cache: used once (barrier, join), or different each time (all-to-all).
_NOT_CACHED: Final = (Kind.BARRIER, Kind.JOIN, Kind.ALLTOALL)


class ResponseCache:
    """Responses by slot, the longest unused given up first. See [Note: slots].

    Args:
        capacity: how many at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: dict[str, int] = {}
        self._held: OrderedDict[int, Response] = OrderedDict()  # the longest unused first
        self._free: list[int] = []
        self.num_slots = 0  # that were ever in use

    def __len__(self) -> int:
        return len(self._held)

    def slot_of(self, name: str) -> int | None:
        """Where a name is held."""
        return self._slots.get(name)

    def name_at(self, slot: int) -> str:
        """The name that a slot stands for."""
        return self._held[slot].name

    def at(self, slot: int) -> Response | None:
        """What a slot holds."""
        return self._held.get(slot)

    def use(self, slot: int) -> Response:
        """What a slot holds, which thereby is the last to be given up."""
        self._held.move_to_end(slot)
        return self._held[slot]

    def put(self, response: Response) -> list[int]:
        """Hold a response under a new name. Returns the slots that were given up for it."""
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
        """Give up what a slot holds."""
        del self._slots[self._held.pop(slot).name]
        heapq.heappush(self._free, slot)

    def slots(self) -> list[int]:
        """Those that hold something, rising."""
        return sorted(self._held)


@dataclass
class RoundOutcome:
    """What a round decided, equal on all ranks.

    Attributes:
        responses: in the order in which they are done.
        leaving: ranks that took part for the last time.
        knobs: new settings, valid from this round on.
        last_joined: who joined last, if all have joined now.
    """

    responses: list[Response] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    knobs: Knobs | None = None
    last_joined: int | None = None


class Rounds:
    """This rank's part in the rounds of a channel. See [Note: rounds]. One thread uses it.

    Args:
        words: joins the ranks.
        rank: this process in the channel.
        ranks: what the ranks of the channel are called in errors.
        cache_capacity: of the cache; the same on all ranks.

    Attributes:
        joined: ranks that have joined, in the order in which they did.
        num_rounds: that this rank took part in.
        num_full_rounds: those in which messages were exchanged.
    """

    def __init__(self, words: Words, rank: int, ranks: Sequence[int], cache_capacity: int) -> None:
        self._words, self._rank, self._ranks, self._capacity = words, rank, ranks, cache_capacity
        self._cache = ResponseCache(cache_capacity)
        self._asked: dict[
            str, dict[int, NamedRequest]
        ] = {}  # names that not all ranks asked for, by rank; the same on every rank
        self._counted: dict[int, tuple[str, NamedRequest]] = {}  # pending on this rank and in the cache, by slot
        self._unsent: list[tuple[str, NamedRequest]] = []  # pending on this rank, and not in the table yet
        self._mine = np.full(64, _NOT_HERE, dtype=np.uint8)  # by slot
        self._seen: dict[str, None] = {}  # names that came and have no slot; the oldest first
        self._joins: dict[int, NamedRequest] = {}
        self.joined: list[int] = []
        self.num_rounds = self.num_full_rounds = 0

    @property
    def has_joined(self) -> bool:
        """Whether this rank has."""
        return self._rank in self.joined

    def hold(
        self, fresh: Sequence[tuple[str, NamedRequest]], leaves: bool = False, knobs: Knobs | None = None
    ) -> RoundOutcome:
        """Hold a round. Every rank of the channel must come.

        Args:
            fresh: what this rank has asked for since the last round.
            leaves: whether it takes part for the last time.
            knobs: new settings for all ranks; of rank 0.
        """
        ends_join = len(self.joined) == len(self._ranks)
        out_of_date = self._sort(fresh)
        has_news = bool(self._unsent) or leaves or knobs is not None
        vector = self._vector(out_of_date, has_news, ends_join)
        self._words.least(vector)
        self.num_rounds += 1
        told = vector.numpy()
        for slot in np.flatnonzero(told[1:] == _OUT_OF_DATE).tolist():
            self._saw(self._cache.name_at(slot))  # it changes, and lasts
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
        """Find the slots that stand for new requests; return those that the new requests show to be out of date."""
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
        """What this rank counted on in a slot is asked for in full."""
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
        """Take note of a name; tell whether it came before, as far as is known."""
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
        """Give the cache up, or begin a new one."""
        is_used = self._cache.capacity > 0
        if is_used != knobs.use_cache:
            for slot in self._cache.slots():
                self._cache.evict(slot)
                self._forget(slot)
            self._cache = ResponseCache(self._capacity if knobs.use_cache else 0)
