"""Stores the programs of a rank's calls until a call like them comes: to build one costs more than a small collective."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from .program import Program

# About how much memory stored programs may take; one program takes some hundred bytes, with many ranks many kilobytes.
REMEMBERED_BYTES: Final = 16 << 20
MOST_SEEN: Final = 16384  # keys whose hashes are kept until they come again: about 1 MiB
Places = tuple[bytes, ...]  # what every rank told about where its tensor lies, by rank


class Stored(NamedTuple):
    """A program under its key.

    Attributes:
        key: everything that the program depends on besides the places.
        program: the program.
        places: the places for which it was made; None: it depends on none.
    """

    key: tuple[Hashable, ...]
    program: Program
    places: Places | None = None


class Programs:
    """Programs by key. One is stored when its key comes for the second time.

    Calls whose tensors are new each time have keys that never come again: their programs must not push out others.
    """

    def __init__(self) -> None:
        self._stored: dict[int, Stored] = {}  # by the key's hash
        self._num_bytes = 0
        self._seen: set[int] = set()  # hashes of keys that have come

    def find(self, key: tuple[Hashable, ...]) -> Stored | None:
        """Return what is stored under a key."""
        stored = self._stored.get(hash(key))
        return stored if stored is not None and stored.key == key else None

    def of(self, key: tuple[Hashable, ...], build: Callable[[], Program]) -> Program:
        """Return the program of a key, which depends on nothing else; ``build`` makes it if it is not stored."""
        number = hash(key)  # taken once, because it is a large part of a small collective's time
        stored = self._stored.get(number)
        if stored is not None and stored.key == key:
            return stored.program
        program = build()
        self._put(number, Stored(key, program))
        return program

    def put(self, stored: Stored) -> None:
        """Store a program, in place of one with the same key; or only note its key, if that has not come before."""
        self._put(hash(stored.key), stored)

    def _put(self, number: int, stored: Stored) -> None:
        there = self._stored.get(number)
        if there is None and number not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen.add(number)
        elif there is None or there.key == stored.key:
            num_bytes = size_of(stored)
            self._num_bytes += num_bytes - (size_of(there) if there else 0)
            if self._num_bytes > REMEMBERED_BYTES:
                self._stored.clear()
                self._num_bytes = num_bytes
            self._stored[number] = stored


def size_of(stored: Stored) -> int:
    """Estimate how many bytes a stored program takes as Python objects."""
    streams = stored.program.streams
    num_addresses = sum(len(stream.dsts) + len(stream.srcs) for stream in streams)
    num_parts = sum(len(part) if isinstance(part, tuple) else 1 for part in stored.key)
    return 500 + 400 * len(streams) + 150 * num_addresses + 100 * num_parts + 170 * len(stored.places or ())
