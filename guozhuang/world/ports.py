"""A secret and a sequence of TCP ports that every rank of a run comes to by itself, from what its launcher told all of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

# Below the ephemeral ports of Linux (32768 and up), which any program may be using, and off torchrun's 29400 and 29500.
_FIRST, _END = 15000, 29000
_NUM_PORTS = 12


def sequence(key: Sequence[str]) -> tuple[int, ...]:
    """The ports at which ranks with this key meet: the same on every rank, others for another key, in the order to try."""
    found: dict[int, None] = {}
    turn = 0
    while len(found) < _NUM_PORTS:
        digest = _digest("port", str(turn), *key)
        found[_FIRST + int.from_bytes(digest[:8], "big") % (_END - _FIRST)] = None
        turn += 1
    return tuple(found)


def secret(given: bytes, key: Sequence[str]) -> bytes:
    """The secret of the run with this key.

    Args:
        given: what the user or the launcher handed to all ranks and to nobody else; empty if nothing was. Only with it the
            result is a secret; without, it keeps runs apart that meet by accident, and whoever can guess the key knows it.
        key: what the launcher told all ranks of this run, and says differently for every other one.
    """
    return hmac.new(given, _digest("secret", *key), hashlib.sha256).digest()


def _digest(*parts: str) -> bytes:
    # With the length of each part, so that ("a", "b") and ("ab", "") differ.
    return hashlib.sha256(b"".join(b"%d:%b" % (len(each.encode()), each.encode()) for each in parts)).digest()
