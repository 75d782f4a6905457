"""Roll calls of many ranks: what waiting costs the store, and what those that wait find out."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError
from guozhuang.groups import roll_call
from guozhuang.groups.agreement import agree, store_of
from guozhuang.net.ended import tell_ended
from guozhuang.net.store import innermost
from tests.threads.ranks import run_threads
from tests.waiting import LIMIT_S, NEVER_S, until

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


class OwnTime(threading.local):
    """A clock for each rank that waits, which only its own sleeps move on; the first ones begin when all ranks have come."""

    now_s = 0.0
    all_have_come = threading.Barrier(SIZE - len(LATE), timeout=LIMIT_S)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        if not self.now_s:
            self.all_have_come.wait()
        self.now_s += pause_s


def test_many_that_wait_for_many_ask_the_store_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    store, limit_s = Counting(), 2.0
    monkeypatch.setattr(roll_call, "time", OwnTime())
    found = wait_for(store, LATE, limit_s)
    assert len(found) == SIZE - len(LATE)
    assert all(f"ranks {list(LATE)} did not come within {limit_s:g} s" in str(error) for error in found.values())
    # The bounds of [Note: what waiting costs the store]: polls (at first more often), looks, cards; and cards at the limit.
    num_waiting = SIZE - len(LATE)
    assert store.num_requests < (2000 + 4 * 500 + 2000) * limit_s + (20 + len(LATE)) * num_waiting


def test_all_get_the_cards_when_the_last_has_come() -> None:
    store = Counting()

    def come_late() -> None:
        until(lambda: store._store.check([f"met/{rank}" for rank in range(SIZE) if rank not in LATE]))
        wait_for(store, tuple(set(range(SIZE)) - set(LATE)), NEVER_S)

    late = threading.Thread(target=come_late)
    late.start()
    found = wait_for(store, LATE, NEVER_S)
    late.join(LIMIT_S)
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
    found = wait_for(store, LATE, NEVER_S, **prepare(store))
    assert len(found) == SIZE - len(LATE), "each learns of it long before its time is over"
    for error in found.values():
        assert type(error) is kind
        with pytest.raises(kind, match=text):
            raise error


def without_the_last(rank: int, size: int) -> str:
    if rank == size - 1:
        tell_ended(innermost(store_of(dist.group.WORLD)), rank)  # as its launcher does
        return ""
    with pytest.raises(PeerLost) as caught:
        agree(dist.group.WORLD, "the strategy", ["ddp"], NEVER_S, "")
    return str(caught.value)


def test_a_rank_that_ended_with_0_is_named_by_all_that_wait() -> None:
    for rank, text in enumerate(run_threads(without_the_last, 3)[:2]):
        assert text.startswith(f"[rank {rank}] rank 2 ended with exit code 0 before it came to compare the strategy"), (
            text
        )


def without_the_last_of_some(rank: int, size: int) -> str:
    some = dist.new_group([1, 2])
    if rank == 2:
        tell_ended(innermost(store_of(dist.group.WORLD)), rank)
    if rank != 1:
        return ""
    with pytest.raises(PeerLost) as caught:
        agree(some, "the strategy", ["ddp"], NEVER_S, "")
    return f"{caught.value.rank}: {caught.value}"


def test_it_is_named_in_a_group_of_some_ranks_too() -> None:
    assert run_threads(without_the_last_of_some, 3)[1].startswith(
        "1: [rank 0] rank 2 (rank 1 of this group) ended with exit code 0 before it came to compare the strategy"
    )
