"""Stalls, and the words that ranks leave for each other, also where the store is gone."""

import threading
import time
from typing import Any

import pytest

from guozhuang.gradients.named import NegotiationError, Settings
from guozhuang.gradients.named.board import Board
from guozhuang.gradients.named.stalls import Watch


class SilentStore:
    """A store whose keeper is gone."""

    def __init__(self) -> None:
        self.is_gone = False
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._raise()
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._raise()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._raise()
        return all(key in self.held for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._raise()
        self.held[key] = str(int(self.held.get(key, b"0")) + amount).encode()
        return int(self.held[key])

    def _raise(self) -> None:
        if self.is_gone:
            raise RuntimeError("connection reset")


def test_words_need_no_new_thread_and_no_store_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SilentStore()
    boards = [Board(store, rank, 2) for rank in range(2)]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    boards[0].read_cards()
    boards[1].tell("rank 1 has shut down")
    assert boards[0].words() == {1: "rank 1 has shut down"} == boards[0].news(0.0)[1]
    store.is_gone = True
    boards[0].tell("nobody hears it")
    assert boards[0].words() == {} and boards[0].news(0.0) == ({}, {})
    with pytest.raises(RuntimeError):
        boards[0].ask()
    for board in boards:
        board.close()


class Pending:
    """A channel that waits for somebody."""

    def __init__(self, *names: str) -> None:
        self.number, self.ranks, self.since = 0, (0, 1, 2), time.monotonic()
        self.names = names

    def pending_since(self) -> dict[str, float]:
        return dict.fromkeys(self.names, self.since)


def test_a_stall_ends_at_its_limit_without_a_store_too() -> None:
    store: Any = SilentStore()
    board, ended = Board(store, 0, 3), threading.Event()
    store.is_gone = True
    failures: list[NegotiationError] = []

    def stop(error: NegotiationError) -> None:
        failures.append(error)
        ended.set()

    channel = Pending("x")
    watch = Watch(board, 0, Settings(), 0.1, lambda: [channel], stop, tick_s=0.02)
    watch.touch()
    assert ended.wait(5.0)
    watch.close()
    board.close()
    assert "stalled" in str(failures[0]) and "the store is gone" in str(failures[0])


def test_who_has_joined_is_not_missing() -> None:
    store: Any = SilentStore()
    boards = [Board(store, rank, 3) for rank in range(3)]
    channel = Pending("x", "join")
    failures: list[NegotiationError] = []
    watch = Watch(boards[0], 0, Settings(), 0.3, lambda: [channel], failures.append, tick_s=0.02)
    boards[1].answer(10, {0: ["join"]})
    watch._end({0: channel.pending_since()}, channel.since + 1.0)
    watch.close()
    for board in boards:
        board.close()
    text = str(failures[0])
    assert "missing: rank 2 for x, join" in text and "rank 1" not in text
