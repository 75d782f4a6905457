"""Gloo groups of this package: when the ranks of one may go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.errors import WorldError
from guozhuang.groups.gloo import Crossing
from tests.waiting import EXPIRES_S, LIMIT_S, until

GLOO: Any = dist.ProcessGroupGloo


class SilentStore(dist.HashStore):
    """A store to which rank 1 never gets the news that it has connected."""

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        if key != "listens/1":
            super().set(key, value)


class AskedStore(dist.HashStore):
    """A store that counts how often it was asked what is there."""

    num_checks = 0

    def check(self, keys: list[str]) -> bool:
        self.num_checks += 1
        return super().check(keys)


def connect(store: dist.Store, timeout_s: float) -> tuple[list[int], list[str]]:
    """The two ranks in the order in which they have their groups, and what they failed with."""
    order: list[int] = []
    errors = ["", ""]

    def rank_of(rank: int) -> None:
        try:
            Crossing(store, rank, 2, timeout_s, "127.0.0.1").close()
        except WorldError as error:
            errors[rank] = str(error)
        order.append(rank)

    ranks = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return order, errors


def test_no_rank_goes_on_before_all_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that closes its connections earlier would leave another one connecting for five times the limit."""
    store, went_on = AskedStore(), list[int]()

    class SlowGloo:
        """Gloo's backend, whose connections rank 1 has when rank 0 has asked for them again and again."""

        _Options, create_device = GLOO._Options, GLOO.create_device

        def __new__(cls, inner: dist.Store, rank: int, *more: Any) -> Any:
            made = GLOO(inner, rank, *more)
            if rank == 1:
                before = store.num_checks
                until(lambda: store.num_checks >= before + 5, goes_on=lambda: not went_on)
                went_on.append(1)
            return made

    monkeypatch.setattr(dist, "ProcessGroupGloo", SlowGloo)
    close = Crossing.close
    monkeypatch.setattr(Crossing, "close", lambda crossing: (went_on.append(0), close(crossing)))
    order, errors = connect(store, timeout_s=LIMIT_S)
    assert errors == ["", ""] and sorted(order) == [0, 1]
    assert went_on[0] == 1, "nobody went on before rank 1 had connected"


def test_a_rank_that_does_not_connect_is_named() -> None:
    _, errors = connect(SilentStore(), timeout_s=EXPIRES_S)
    assert all(f"rank 1 did not come within {EXPIRES_S:g} s to connect a gloo group" in text for text in errors)
