"""Roll call: each rank writes a text, its card, to a group's store and reads all cards; it raises if a missing rank has ended.

[Note: who will not come] A rank that failed writes a card that says so. A rank whose process ended writes nothing; but its
card of an earlier roll call (of this group or its parent) names its process (pid and start time, since pids are reused), and
this node's /proc shows whether that runs. For a rank on another node, or without an earlier card, only the time-out shows it.

[Note: what waiting costs the store] Ranks may wait for minutes while one saves, and one process serves them all. So a rank
polls one key, less often where there are many ranks: only rank 0 asks whether all cards are there, and writes them all under
one key, which the others read. While ranks are missing, each rank also looks at the missing ranks' cards now and then.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError, explain
from guozhuang.net.client import look_s
from guozhuang.watch.processes import Process

_FAILED: Final = "failed: "
_LOOK_S: Final = 0.2  # seconds between two checks whether missing ranks have ended
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
        look_every_s: seconds between two such looks at the missing ranks.
        purpose: why the ranks wait for each other, for errors: "to compare the parameters of the model".
        named: returns a text that names some ranks, for errors.
        fix: advice about ranks that are late.

    Raises:
        PeerLost: a rank ended before it wrote its card.
        WorldError: ranks did not join in time (the text names them), one reported a failure, or the store went away.
    """
    keys, everybody = [f"{topic}/{peer}" for peer in range(size)], f"{topic}/all"
    try:
        store.set(keys[rank], card)
        began, next_look_s, pause_s = time.monotonic(), look_every_s, _FIRST_PAUSE_S
        missing = list(range(size))
        while missing and not store.check([everybody] if rank else keys):
            waited_s = time.monotonic() - began
            if waited_s >= min(next_look_s, timeout_s):
                next_look_s = waited_s + look_every_s
                missing = _look_after(store, keys, rank, missing, ended)
                if missing:
                    look(missing, waited_s)
                if missing and waited_s >= timeout_s:
                    what = f"{named(missing)} did not come within {timeout_s:g} s {purpose}"
                    raise WorldError(explain(what, rank=rank, fix=fix))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, look_s(waited_s, size))
        if rank and missing:
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
        for key in (f"{topic}/{rank}", f"{topic}/all")[: 1 if rank else 2]:
            store.delete_key(key)


def tell_failed(store: dist.Store, topic: str, rank: int, error: BaseException) -> None:
    """Write to the store, in place of this rank's card, that this rank failed and why; ranks that read it raise."""
    with contextlib.suppress(RuntimeError):
        why = str(error) if isinstance(error, PeerLost) else f"{type(error).__name__}: {error}"
        lost = (error.rank, error.pid) if isinstance(error, PeerLost) else None
        store.set(f"{topic}/{rank}", _FAILED + json.dumps([why, lost]))


def process_of(store: dist.Store, topic: str, rank: int) -> Process | None:
    """Return the process that a rank's card of an earlier roll call names; None if there is no such card."""
    key = f"{topic}/{rank}"
    with contextlib.suppress(RuntimeError, ValueError):
        if store.check([key]):
            return Process.read(store.get(key).decode())
    return None


def _look_after(
    store: dist.Store, keys: list[str], rank: int, missing: list[int], ended: Callable[[int], int | None]
) -> list[int]:
    """Return the ranks whose cards are still missing; raise if one of them has ended, or if a new card reports a failure."""
    left = [peer for peer in missing if not store.check([keys[peer]])]
    for peer in left:  # before the new cards: a rank may report a failure because this one ended
        if (pid := ended(peer)) is not None:
            _lost(peer, pid, rank)
    for peer in set(missing) - set(left):
        _well(store.get(keys[peer]).decode(), peer, rank)
    return left


def _well(card: str, peer: int, rank: int) -> str:
    if card.startswith(_FAILED):
        why, lost = json.loads(card.removeprefix(_FAILED))
        text = explain(f"rank {peer} failed before the group was made: {why}", rank=rank, fix=_FIX)
        if lost is not None and lost[0] != rank:
            raise PeerLost(text, rank=lost[0], pid=lost[1], waiting_in="making the group")
        raise WorldError(text)
    return card


def _lost(peer: int, pid: int, rank: int) -> NoReturn:
    text = explain(f"rank {peer} (pid {pid}) ended before the group was made", rank=rank, fix=_FIX)
    raise PeerLost(text, rank=peer, pid=pid, waiting_in="making the group")
