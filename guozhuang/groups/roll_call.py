"""Every rank writes a card to the group's store and reads all cards, checking meanwhile whether missing ranks have ended.

[Note: who will not come] A rank that failed writes a card that says so. A rank whose process ended writes nothing; but its
card of an earlier roll call (of this group or its parent) names its process (pid and start time, since pids are reused), and
this node's /proc shows whether that runs. For a rank on another node, or without an earlier card, only the time-out tells.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Final, NoReturn

import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError, explain
from guozhuang.watch.processes import Process

_FAILED: Final = "failed: "
_LOOK_S: Final = 0.2  # between two checks of the missing ranks
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_FIX: Final = "look at that rank's own error"


def call(
    store: dist.Store,
    topic: str,
    rank: int,
    size: int,
    card: str,
    timeout_s: float,
    ended: Callable[[int], int | None] = lambda _: None,
) -> list[str]:
    """Write this rank's card and return the cards of all ranks. Every rank must call it.

    Args:
        store: the group's store.
        topic: the prefix of the cards' keys; a new one for each roll call of a group.
        rank: this process in the group.
        size: number of ranks.
        card: this rank's text.
        timeout_s: limit for the whole call, in seconds.
        ended: returns the pid of a rank whose process is known to have ended; else None.

    Raises:
        PeerLost: a rank ended before it wrote its card.
        WorldError: ranks did not join in time (the text names them), one reported a failure, or the store went away.
    """
    keys = [f"{topic}/{peer}" for peer in range(size)]
    try:
        store.set(keys[rank], card)
        deadline, look, pause_s = time.monotonic() + timeout_s, time.monotonic() + _LOOK_S, _FIRST_PAUSE_S
        while not store.check(keys):
            now = time.monotonic()
            if now >= min(look, deadline):
                look = now + _LOOK_S
                missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
                _look_after(store, keys, rank, missing, ended)
                if missing and now >= deadline:
                    what = f"ranks {missing} did not come within {timeout_s:g} s to make the group"
                    fix = "look at their own errors; every rank must reach this point"
                    raise WorldError(explain(what, rank=rank, fix=fix))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return [_well(store.get(key).decode(), peer, rank) for peer, key in enumerate(keys)]
    except (PeerLost, WorldError):
        raise
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        text = explain("the store went away while ranks met", rank=rank, fix="look at rank 0's own error")
        raise WorldError(text) from error


def tell_failed(store: dist.Store, topic: str, rank: int, error: BaseException) -> None:
    """Write a card that says that this rank failed, and why."""
    with contextlib.suppress(RuntimeError):
        why = str(error) if isinstance(error, PeerLost) else f"{type(error).__name__}: {error}"
        lost = (error.rank, error.pid) if isinstance(error, PeerLost) else None
        store.set(f"{topic}/{rank}", _FAILED + json.dumps([why, lost]))


def process_of(store: dist.Store, topic: str, rank: int) -> Process | None:
    """Return the process that a rank's card of an earlier roll call names, or None."""
    key = f"{topic}/{rank}"
    with contextlib.suppress(RuntimeError, ValueError):
        if store.check([key]):
            return Process.read(store.get(key).decode())
    return None


def _look_after(
    store: dist.Store, keys: list[str], rank: int, missing: list[int], ended: Callable[[int], int | None]
) -> None:
    """Raise if a missing rank has ended, or a rank has written a card that reports a failure."""
    for peer in missing:  # checked first: other ranks may have failed because of it
        if (pid := ended(peer)) is not None:
            _lost(peer, pid, rank)
    for peer, key in enumerate(keys):
        if peer not in missing:
            _well(store.get(key).decode(), peer, rank)


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
