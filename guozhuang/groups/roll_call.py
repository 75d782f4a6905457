"""Each rank leaves a card in the group's store and reads those of all, while it looks whether the missing ones can still come.

[Note: who will not come] A rank that failed leaves a card that says so. A rank that ended leaves nothing; but the card of an
earlier roll, of this group or of the one that it was made from, names its process (pid and start time, since pids are used
again), which this node's /proc knows or not. Of a rank on another node, or with no earlier card, only the time-out tells.
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
_LOOK_S: Final = 0.2  # between two looks at those who are missing
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
    """Leave a card and return those of all ranks. Every rank must call it.

    Args:
        store: of the group.
        topic: of the cards; new for each roll of a group.
        rank: this process in the group.
        size: number of ranks.
        card: of this rank.
        timeout_s: limit for all of it, in seconds.
        ended: the pid of a rank of which it is known that its process has ended; else None.

    Raises:
        PeerLost: a rank ended before it came.
        WorldError: ranks did not come in time (the text names them), one failed before, or the store went away.
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
    """Leave a card that says that this rank will not come, and why."""
    with contextlib.suppress(RuntimeError):
        why = str(error) if isinstance(error, PeerLost) else f"{type(error).__name__}: {error}"
        lost = (error.rank, error.pid) if isinstance(error, PeerLost) else None
        store.set(f"{topic}/{rank}", _FAILED + json.dumps([why, lost]))


def process_of(store: dist.Store, topic: str, rank: int) -> Process | None:
    """The process that a card of an earlier roll names, if there is one."""
    key = f"{topic}/{rank}"
    with contextlib.suppress(RuntimeError, ValueError):
        if store.check([key]):
            return Process.read(store.get(key).decode())
    return None


def _look_after(
    store: dist.Store, keys: list[str], rank: int, missing: list[int], ended: Callable[[int], int | None]
) -> None:
    """Raise if a rank that is missing has ended, or one that is there has failed."""
    for peer in missing:  # first: others may have failed because of it
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
