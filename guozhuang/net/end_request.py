"""The request of a launcher that the ranks save a checkpoint and end by themselves: a key in the store of the world."""

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
        Whether the ranks look for the request now. If not, none is made.
    """
    if not store.check([_AWAITED_KEY]):
        return False
    store.set(_MADE_KEY, "1")
    return True


class EndRequest:
    """The request as rank 0 sees it.

    Args:
        store: the store in which the ranks and the launcher meet, or a part of it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = innermost(store)

    def is_made(self) -> bool:
        """Return whether a launcher has asked the ranks to end."""
        return self._store.check([_MADE_KEY])

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Let launchers know, inside the ``with`` block, that the ranks look for the request."""
        self._store.set(_AWAITED_KEY, "1")
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the store may be gone, if an error ends the block
                self._store.delete_key(_AWAITED_KEY)
