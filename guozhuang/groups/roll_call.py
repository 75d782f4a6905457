"""Roll call: each rank writes a text, its card, to a group's store and reads all cards; it raises if a missing rank has ended.

[Note: who will not come] A rank that failed writes a card that says so. A rank whose process ended writes nothing; but its
card of an earlier roll call (of this group or its parent) names its process (pid and start time, since pids are reused), and
this node's /proc shows whether that runs. A launcher tells which ranks have ended with 0 (net/ended.py), by their numbers in
the world, which a caller names for a group of some of them. Else only the time-out shows it.

[Note: what waiting costs the store] Ranks may wait for minutes while one saves, and one process serves them all. So a rank
polls one key, less often where there are many ranks: only rank 0 asks whether all cards are there, and writes them all under
one key, which the others read. While ranks are missing, each rank also looks now and then who they are. A look at the cards
themselves is one request for each missing rank. So a rank that looks at them writes the missing ranks under one key; the
ranks count their looks in the store, and where many wait for many, only every n-th look is one at the cards. Together, up to
1000 ranks poll at most 2000 times a second and look at most 500 times a second, with four requests for each look (and those
of the caller's ``look``) and at most 2000 requests a second for cards. At its time limit each rank looks at the cards of the
missing ranks once more, so that its error names exactly those.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError, explain
from guozhuang.net.client import look_s
from guozhuang.net.ended import ended_with_0
from guozhuang.watch.processes import Process

_FAILED: Final = "failed: "
_LOOK_S: Final = 0.2  # seconds between two checks whether missing ranks have ended
_LOOKS_PER_S, _CARDS_PER_S = 500, 2000  # of all ranks together; see [Note: what waiting costs the store]
_FIRST_PAUSE_S: Final = 0.0005
_FIX: Final = "look at that rank's own error"


def call(
    store: dist.Store,
    topic: str,
    rank: int,
    size: int,
    card: str,
    timeout_s: float,
    ended: Callable[[int], int | None] = lambda _: None,
    look: Callable[[Sequence[int], float], object] = lambda missing, waited_s: None,
    look_every_s: float = _LOOK_S,
    purpose: str = "to make the group",
    named: Callable[[list[int]], str] = "ranks {}".format,
    fix: str = "look at their own errors; every rank must reach this point",
    members: Sequence[int] = (),
) -> list[str]:
    """Write this rank's text, its card, to the store; wait for all ranks' cards and return them. Every rank must call it.

    Args:
        store: the group's store.
        topic: the prefix of the cards' keys; a new one for each roll call of a group.
        rank: this process in the group.
        size: number of ranks.
        card: this rank's text.
        timeout_s: limit for the whole call, in seconds.
        ended: returns the pid of a rank whose process is known to have ended; else None.
        look: called now and then while ranks are missing, with these ranks and the seconds waited; it raises to end the wait.
            The ranks are none as long as no rank has looked who they are.
        look_every_s: seconds between two such looks at the missing ranks; longer where there are many ranks.
        purpose: why the ranks wait for each other, for errors: "to compare the parameters of the model".
        named: returns a text that names some ranks, for errors.
        fix: advice about ranks that are late.
        members: the numbers that these ranks have in the world, for what launchers tell; (): their launchers are not asked.

    Raises:
        PeerLost: a rank ended before it wrote its card, also with exit code 0.
        WorldError: ranks did not join in time (the text names them), one reported a failure, or the store went away.
    """
    keys, everybody = [f"{topic}/{peer}" for peer in range(size)], f"{topic}/all"
    try:
        store.set(keys[rank], card)
        look_every_s = max(look_every_s, size / _LOOKS_PER_S)
        began, next_look_s, pause_s = time.monotonic(), look_every_s, _FIRST_PAUSE_S
        has_seen_all = False
        while not has_seen_all and not store.check([everybody] if rank else keys):
            waited_s = time.monotonic() - began
            if waited_s >= min(next_look_s, timeout_s):
                next_look_s = waited_s + look_every_s
                is_over = waited_s >= timeout_s
                missing = _missing(store, topic, keys, None if is_over else look_every_s * _CARDS_PER_S)
                has_seen_all = missing == []
                if not has_seen_all:
                    _raise_for_failed(store, topic, rank, missing or [], ended)
                    _raise_for_left(store, keys, rank, missing or [], purpose, members)
                    look(missing or [], waited_s)
                if missing and is_over:
                    what = f"timed out: {named(missing)} did not come within {timeout_s:g} s {purpose}"
                    raise WorldError(explain(what, rank=rank, fix=fix))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, look_s(waited_s, size))
        if rank and not has_seen_all:
            cards: list[str] = json.loads(store.get(everybody))
        else:  # rank 0, or a rank that found all cards before rank 0 wrote them under one key
            cards = [store.get(key).decode() for key in keys]
            store.set(everybody, json.dumps(cards))
        return [_well(each, peer, rank) for peer, each in enumerate(cards)]
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise  # the failure of a rank, such as PeerLost, not of the store
        text = explain(f"the store went away while ranks came {purpose}", rank=rank, fix="look at rank 0's own error")
        raise WorldError(text) from error


def forget(store: dist.Store, topic: str, rank: int) -> None:
    """Delete this rank's keys of an earlier roll call, which no rank reads any more: all ranks have joined a later one."""
    with contextlib.suppress(RuntimeError):  # some stores cannot delete
        for name in (rank,) if rank else (rank, "all", "missing", "looks"):
            store.delete_key(f"{topic}/{name}")


def tell_failed(store: dist.Store, topic: str, rank: int, error: BaseException) -> None:
    """Write to the store, in place of this rank's card, that this rank failed and why; ranks that read it raise."""
    with contextlib.suppress(RuntimeError):
        why = str(error) if isinstance(error, PeerLost) else f"{type(error).__name__}: {error}"
        lost = (error.rank, error.pid) if isinstance(error, PeerLost) else None
        store.set(f"{topic}/{rank}", _FAILED + json.dumps([why, lost]))
        if not store.check([f"{topic}/failed"]):  # keep the first: ranks that read it fail too
            store.set(f"{topic}/failed", str(rank))


class EarlierProcesses:
    """The processes of ranks, as their cards of an earlier roll call name them.

    Args:
        store: the store of that roll call.
        topic: its topic; its cards are texts of ``Process``. This rank must have left it, else no process is known.
    """

    def __init__(self, store: dist.Store, topic: str) -> None:
        self._store, self._key = store, f"{topic}/all"
        self._processes: list[Process] | None = None

    def ended(self, rank: int, node: str) -> int | None:
        """Return the pid of a rank's process if it is known to have ended, asked on ``node``; else None."""
        if self._processes is None:
            self._processes = []
            with contextlib.suppress(RuntimeError, ValueError):
                if self._store.check([self._key]):
                    self._processes = [Process.read(card) for card in json.loads(self._store.get(self._key))]
        if rank >= len(self._processes):
            return None
        process = self._processes[rank]
        return process.pid if process.has_ended(node) else None


def _missing(store: dist.Store, topic: str, keys: list[str], most_cards: float | None) -> list[int] | None:
    """Return the ranks whose cards are missing, as this or another rank has seen; None if no rank has looked yet.

    Args:
        store: the group's store.
        topic: the prefix of the keys.
        keys: of the cards, by rank.
        most_cards: the most requests for cards that all ranks may make until their next look; None: look in any case.
    """
    key, size = f"{topic}/missing", len(keys)
    known: list[int] | None = json.loads(store.get(key)) if store.check([key]) else None
    num_waiting, suspected = (size, range(size)) if known is None else (size - len(known), known)
    if most_cards is not None:
        number = store.add(f"{topic}/looks", 1) - 1
        if number % math.ceil(num_waiting * len(suspected) / most_cards):
            return known
    missing = [peer for peer in suspected if not store.check([keys[peer]])]
    if missing:
        store.set(key, json.dumps(missing))
    return missing


def _raise_for_failed(
    store: dist.Store, topic: str, rank: int, missing: list[int], ended: Callable[[int], int | None]
) -> None:
    """Raise if a missing rank has ended, or if a rank that came reports a failure."""
    for peer in missing:  # checked first: other ranks may have failed because of it
        if (pid := ended(peer)) is not None:
            text = explain(f"rank {peer} (pid {pid}) ended before the group was made", rank=rank, fix=_FIX)
            raise PeerLost(text, rank=peer, pid=pid, waiting_in="making the group")
    if store.check([f"{topic}/failed"]):
        peer = int(store.get(f"{topic}/failed"))
        _well(store.get(f"{topic}/{peer}").decode(), peer, rank)


def _raise_for_left(
    store: dist.Store, keys: list[str], rank: int, missing: list[int], purpose: str, members: Sequence[int]
) -> None:
    """Raise if a missing rank's launcher told that it has ended with 0. See [Note: who will not come]."""
    ended = ended_with_0(store) if missing and members else ()
    for peer, in_world in enumerate(members):
        # A rank may have come after it was missed, and ended.
        if in_world in ended and peer in missing and not store.check([keys[peer]]):
            who = f"rank {in_world}" + (f" (rank {peer} of this group)" if peer != in_world else "")
            what = f"{who} ended with exit code 0 before it came {purpose}"
            fix = "let every rank reach this point: look for an exit or a return on some ranks only"
            raise PeerLost(explain(what, rank=rank, fix=fix), rank=peer, pid=None, waiting_in=purpose)


def _well(card: str, peer: int, rank: int) -> str:
    if card.startswith(_FAILED):
        why, lost = json.loads(card.removeprefix(_FAILED))
        text = explain(f"rank {peer} failed before the group was made: {why}", rank=rank, fix=_FIX)
        if lost is not None and lost[0] != rank:
            raise PeerLost(text, rank=lost[0], pid=lost[1], waiting_in="making the group")
        raise WorldError(text)
    return card
