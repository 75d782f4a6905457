"""Gloo groups of this package: when the ranks of one may go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.errors import WorldError
from guozhuang.groups.gloo import Crossing

GLOO: Any = dist.ProcessGroupGloo


class SilentStore(dist.HashStore):
    """A store to which rank 1 never gets the news that it has connected."""

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        if key != "listens/1":
            super().set(key, value)


class SlowGloo:
    """Gloo's backend, whose connections rank 1 has later than rank 0."""

    _Options, create_device = GLOO._Options, GLOO.create_device

    def __new__(cls, store: dist.Store, rank: int, *more: Any) -> Any:
        made = GLOO(store, rank, *more)
        time.sleep(0.6 * rank)
        return made


def connect(store: dist.Store, timeout_s: float) -> tuple[list[float], list[str]]:
    """When each of two ranks has its group, in seconds, and what they failed with."""
    took_s, errors, began_s = [0.0, 0.0], ["", ""], time.monotonic()

    def rank_of(rank: int) -> None:
        try:
            Crossing(store, rank, 2, timeout_s, "127.0.0.1").close()
        except WorldError as error:
            errors[rank] = str(error)
        took_s[rank] = time.monotonic() - began_s

    ranks = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return took_s, errors


def test_no_rank_goes_on_before_all_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that closes its connections earlier would leave another one connecting for five times the limit."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", SlowGloo)
    took_s, errors = connect(dist.HashStore(), timeout_s=30.0)
    assert errors == ["", ""] and min(took_s) >= 0.6


def test_a_rank_that_does_not_connect_is_named() -> None:
    _, errors = connect(SilentStore(), timeout_s=1.0)
    assert all("rank 1 did not come within 1 s to connect a gloo group" in text for text in errors)
