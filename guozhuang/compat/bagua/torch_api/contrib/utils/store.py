"""``Store``, the interface of a key-value store, and ``ClusterStore``, which spreads keys over several."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from typing_extensions import override

from guozhuang.errors import UsageError, explain

Key = str
Value = str | bytes


class Store(ABC):
    """A key-value store. Values are texts or bytes, and come back as bytes."""

    @abstractmethod
    def set(self, key: Key, value: Value) -> None:
        """Store a value."""

    @abstractmethod
    def get(self, key: Key) -> bytes | None:
        """Return the value of a key, or None."""

    @abstractmethod
    def mset(self, dictionary: Mapping[Key, Value]) -> None:
        """Store several values."""

    @abstractmethod
    def mget(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the values of several keys, each None if it is not there."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all keys."""

    @abstractmethod
    def status(self) -> bool:
        """Return whether the store answers."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the servers of the store."""


class ClusterStore(Store):
    """Several stores as one: a digest of the key chooses the store, the same in all processes.

    Args:
        stores: at least one; in the same order on all ranks.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            fix = "give a RedisStore for each server"
            raise UsageError(explain("a cluster has at least one store", value=list(stores), fix=fix))
        self.stores = list(stores)

    def _number(self, key: Key) -> int:
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % len(self.stores)

    @override
    def set(self, key: Key, value: Value) -> None:
        self.stores[self._number(key)].set(key, value)

    @override
    def get(self, key: Key) -> bytes | None:
        return self.stores[self._number(key)].get(key)

    @override
    def mset(self, dictionary: Mapping[Key, Value]) -> None:
        for number, store in enumerate(self.stores):
            if some := {key: value for key, value in dictionary.items() if self._number(key) == number}:
                store.mset(some)

    @override
    def mget(self, keys: Sequence[Key]) -> list[bytes | None]:
        found: dict[Key, bytes | None] = {}
        for number, store in enumerate(self.stores):
            if some := [key for key in keys if self._number(key) == number]:
                found.update(zip(some, store.mget(some), strict=True))
        return [found[key] for key in keys]

    @override
    def num_keys(self) -> int:
        return sum(store.num_keys() for store in self.stores)

    @override
    def clear(self) -> None:
        for store in self.stores:
            store.clear()

    @override
    def status(self) -> bool:
        return all(store.status() for store in self.stores)

    @override
    def shutdown(self) -> None:
        for store in self.stores:
            store.shutdown()
