"""The request of a launcher that the ranks save a checkpoint and end by themselves: a key in the store of the world.

[Note: a request that counts] A launcher that made the request sends the ranks no signal, so it must know if they will not see
it. Rank 0 sets a key while the ranks look for the request, and removes it after the last look, however they leave their loop.
The launcher checks it after it has made the request, and further on: ranks whose key is gone get a signal after all.
Ranks that end because of the request leave the key, so that they get none while they end. A launcher whose rank fails instead
takes the request back: the ranks cannot save without that one, and other launchers then send their ranks the signal too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from guozhuang.net.client import PatientStore
from guozhuang.net.store import innermost

_AWAITED_KEY = "guozhuang/awaits end request"  # set while the ranks look for the request between their steps
_MADE_KEY = "guozhuang/end request"


def ask_to_end(store: dist.Store | PatientStore) -> bool:
    """Ask the ranks to save a checkpoint after one of the next steps and to end then; launchers call it.

    Args:
        store: the store of the world, without a prefix.

    Returns:
        Whether the ranks will see the request; see [Note: a request that counts].
    """
    if not is_awaited(store):
        return False
    store.set(_MADE_KEY, "1")
    return is_awaited(store)


def take_back(store: dist.Store | PatientStore) -> None:
    """Take the request back; launchers call it."""
    store.delete_key(_MADE_KEY)


def is_awaited(store: dist.Store | PatientStore) -> bool:
    """Return whether the ranks look for the request, or end because of it; see [Note: a request that counts]."""
    return store.check([_AWAITED_KEY])


def is_made(store: dist.Store | PatientStore) -> bool:
    """Return whether a launcher has asked the ranks to end."""
    return store.check([_MADE_KEY])


class EndRequest:
    """The request as rank 0 sees it.

    Args:
        store: the store in which the ranks and the launcher meet, or a part of it.

    Attributes:
        is_obeyed: whether the ranks end now because of the request; the caller sets it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self.is_obeyed = innermost(store), False

    def is_made(self) -> bool:
        """Return whether a launcher has asked the ranks to end."""
        return is_made(self._store)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Let launchers know, inside the ``with`` block, that the ranks look for the request."""
        self._store.set(_AWAITED_KEY, "1")
        try:
            yield
        finally:
            if not self.is_obeyed:
                with contextlib.suppress(RuntimeError):  # the store may be gone, if an error ends the block
                    self._store.delete_key(_AWAITED_KEY)
