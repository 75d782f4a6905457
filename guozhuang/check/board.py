"""What ranks tell each other before they have connections of their own: the store of the world, with limits.

See [Note: waiting for a store] in ``world/waiting.py``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from guozhuang.check.results import Facts
from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import waiting
from guozhuang.records import build
from guozhuang.world import session
from guozhuang.world.identity import Identity

T = TypeVar("T")

_LOOK_S = 0.03  # between looks
_ANSWER_S = 5.0  # for what the store does at once
_ASKING = "guozhuang store"  # threads of `waiting`


class OtherVersion(Exception):
    """A rank tells of itself in a form that is not known here.

    Attributes:
        host: its host.
    """

    def __init__(self, host: str) -> None:
        super().__init__("what it tells of itself has another form than here")
        self.host = host


class Board:
    """The store of the world as a board of messages; every method raises WorldError if the store is silent or gone.

    Args:
        identity: of this process.
        timeout_s: limit for connecting to the store.

    Raises:
        UsageError: the meeting point cannot be one, or another process says that it is this rank.
        WorldError: nobody came to the meeting point in time.
    """

    def __init__(self, identity: Identity, timeout_s: float) -> None:
        self._rank = identity.rank
        self._store, self._meeting = session.meet(identity, timeout_s)
        if self._ask(lambda store: store.add(f"claim/{identity.rank}", 1)) > 1:
            what = f"two processes say that they are rank {identity.rank} of {identity.size}"
            raise UsageError(explain(what, fix="give each process its own RANK; end processes of earlier runs"))

    @property
    def host(self) -> str | None:
        """Name or address of the node that keeps the store."""
        return self._meeting.host

    def everybody_came(self) -> None:
        """Rank 0 must call at the end: nobody needs a note of where it is any more."""
        self._meeting.everybody_came()

    def write(self, key: str, value: Any) -> None:
        """Put up what JSON can carry."""
        text = json.dumps(value)
        self._ask(lambda store: store.set(key, text))

    def read(self, key: str, limit_s: float = 0.0) -> Any:
        """What stands there; None if nothing does within ``limit_s``. Waits in steps, because the store is deaf to signals."""
        deadline = time.monotonic() + limit_s
        while not self._ask(lambda store: store.check([key])):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_S)
        return json.loads(self._ask(lambda store: store.get(key)))

    def write_facts(self, facts: Facts) -> None:
        """Tell of this rank."""
        self.write(f"facts/{facts.rank}", asdict(facts))

    def read_facts(self, rank: int, limit_s: float) -> Facts | None:
        """What a rank tells of itself; None if it does not in time.

        Raises:
            OtherVersion: it cannot be understood.
        """
        told = self.read(f"facts/{rank}", limit_s)
        try:
            return None if told is None else build(Facts, told)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise OtherVersion(str(told.get("host", "")) if isinstance(told, dict) else "") from error

    def _ask(self, what: Callable[[dist.Store], T]) -> T:
        where = f"the store of the world (at {self.host})" if self.host else "the store of the world"
        try:
            return waiting.within(_ANSWER_S, where, lambda: what(self._store), rank=self._rank)
        except WorldError:
            raise
        except RuntimeError as error:  # torch's own
            fix = "look at the output of rank 0 and of the launcher for the first error"
            raise WorldError(explain(f"{where} is gone: {error}", rank=self._rank, fix=fix)) from error


def is_stuck() -> bool:
    """A call to a store was given up in this process and has not come back."""
    return any(thread.name == _ASKING for thread in threading.enumerate())
