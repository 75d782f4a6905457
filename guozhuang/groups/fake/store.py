"""The store of a fake world."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any, Final

import torch.distributed as dist
from typing_extensions import override

_RANKS_KEY: Final = re.compile(r"(.*/)(\d+)")
_EVERYBODY: Final = "/all"  # where groups/roll_call.py keeps all cards
_TIMEOUT: Final = datetime.timedelta(seconds=60)


class FakeStore(dist.Store):
    """A store in which every rank has written what this rank has. See [Note: what the others would have sent]
    in process_group.py.

    Args:
        rank: this rank. Keys that end in the number of another one stand for those that end in it.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._held = rank, dist.HashStore()

    def _own(self, key: str) -> str:
        found = _RANKS_KEY.fullmatch(key)
        own = f"{found[1]}{self._rank}" if found else key
        return key if own == key or self._held.check([key]) or not self._held.check([own]) else own

    @override
    def set(self, key: str, value: Any) -> None:
        self._held.set(key, value)

    @override
    def get(self, key: str) -> bytes:
        if not self._held.check([key]) and key.endswith(_EVERYBODY):
            card = self._held.get(f"{key.removesuffix(_EVERYBODY)}/{self._rank}").decode()
            return json.dumps([card] * dist.get_world_size()).encode()
        return self._held.get(self._own(key))

    @override
    def check(self, keys: list[str]) -> bool:
        others = {key.removesuffix(_EVERYBODY) + f"/{self._rank}" if key.endswith(_EVERYBODY) else key for key in keys}
        return self._held.check(list({self._own(key) for key in others}))

    @override
    def wait(self, keys: list[str], timeout: datetime.timedelta = _TIMEOUT) -> None:
        self._held.wait([self._own(key) for key in keys], timeout)

    @override
    def add(self, key: str, value: int) -> int:
        return self._held.add(key, value)

    @override
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._held.compare_set(key, expected, desired)

    def deleteKey(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return self._held.delete_key(key)

    @override
    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]
