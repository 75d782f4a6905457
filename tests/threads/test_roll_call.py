"""Roll calls of many ranks: what waiting costs the store, and what those that wait find out."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError
from guozhuang.groups import roll_call
from tests.waiting import LIMIT_S

SIZE, LATE = 128, tuple(range(0, 128, 2))


class Counting:
    """A store that counts the requests to it, those for several keys once for each key."""

    def __init__(self) -> None:
        self._store, self._lock, self.num_requests = dist.HashStore(), threading.Lock(), 0

    def check(self, keys: list[str]) -> bool:
        self._count(1 if len(keys) == SIZE else len(keys))  # rank 0 asks for all cards at once
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        self._count(1)
        return getattr(self._store, name)

    def _count(self, num: int) -> None:
        with self._lock:
            self.num_requests += num


def wait_for(store: Any, late: tuple[int, ...], limit_s: float, **more: Any) -> dict[int, Any]:
    """Let all ranks but the late ones come; return what each got or raised."""
    found: dict[int, Any] = {}

    def come(rank: int) -> None:
        try:
            found[rank] = roll_call.call(store, "met", rank, SIZE, str(rank), limit_s, **more)
        except WorldError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(SIZE) if rank not in late]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def test_many_that_wait_for_many_ask_the_store_for_little() -> None:
    store, began_s = Counting(), time.monotonic()
    found = wait_for(store, LATE, 2.0)
    took_s = time.monotonic() - began_s
    assert len(found) == SIZE - len(LATE)
    assert all(f"ranks {list(LATE)} did not come within 2 s" in str(error) for error in found.values())
    # The bounds of [Note: what waiting costs the store]: polls (at first more often), looks, cards; and cards at the limit.
    num_waiting = SIZE - len(LATE)
    assert store.num_requests < (2000 + 4 * 500 + 2000) * took_s + (20 + len(LATE)) * num_waiting, took_s


def test_all_get_the_cards_when_the_last_has_come() -> None:
    store = Counting()
    threading.Timer(0.7, wait_for, (store, tuple(set(range(SIZE)) - set(LATE)), 20.0)).start()
    found = wait_for(store, LATE, 20.0)
    assert set(map(tuple, found.values())) == {tuple(map(str, range(SIZE)))}


def has_ended(store: dist.Store) -> dict[str, Any]:
    """One of the missing ranks has ended, as its card of an earlier roll call shows."""
    gone = subprocess.Popen(["true"])
    card = f"{gone.pid} 1 here"
    gone.wait()
    store.set(
        "earlier/all", "[" + ", ".join(f'"{card if r == 6 else f"{os.getpid()} 0 here"}"' for r in range(SIZE)) + "]"
    )
    earlier = roll_call.EarlierProcesses(store, "earlier")
    return {"ended": lambda peer: earlier.ended(peer, "here")}


def has_failed(store: dist.Store) -> dict[str, Any]:
    """One of the ranks reports that it failed."""
    roll_call.tell_failed(store, "met", 6, KeyError("its own error"))
    roll_call.tell_failed(store, "met", 8, WorldError("because of rank 6"))
    return {}


@pytest.mark.parametrize(
    ("prepare", "kind", "text"),
    [(has_ended, PeerLost, r"rank 6 \(pid \d+\) ended"), (has_failed, WorldError, "rank 6 failed .*its own error")],
)
def test_who_waits_among_many_learns_of_one_that_will_not_come(
    prepare: Callable[[Any], dict[str, Any]], kind: type[WorldError], text: str
) -> None:
    store: Any = Counting()
    began_s = time.monotonic()
    found = wait_for(store, LATE, 20.0, **prepare(store))
    assert len(found) == SIZE - len(LATE) and time.monotonic() - began_s < 15.0
    for error in found.values():
        assert type(error) is kind
        with pytest.raises(kind, match=text):
            raise error
