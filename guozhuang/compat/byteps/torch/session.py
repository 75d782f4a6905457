"""Enter and leave BytePS's world, suspend and resume it, declare names, and say which variables mean nothing here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from guozhuang.compat.byteps import variables
from guozhuang.compat.horovod.common.basics import HorovodBasics
from guozhuang.compat.horovod.common.extension import BPSLAUNCH
from guozhuang.compat.horovod.common.speed import Speed
from guozhuang.compat.horovod.common.state import HorovodState, state
from guozhuang.compat.prepared import say_once
from guozhuang.errors import UsageError, explain

_NOT_INITIALIZED = "BytePS has not been initialized; use bps.init()."


class DeclaredNames:
    """The names that were declared in this process, each with a key: the place in their order.

    Attributes:
        keys: the key of each declared name, in their order; empty after ``shutdown`` and ``suspend``.
        names: all that were ever declared, in the order in which each came first.
    """

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.names: dict[str, None] = {}

    def declare(self, name: str) -> int:
        """Give a name the next key, unless it has one; return 0. It may be called before ``init``.

        Raises:
            ValueError: the name is no text.
        """
        if not isinstance(name, str):
            raise ValueError(explain("declare takes a name", value=type(name).__name__, fix="give a str"))
        self.names.setdefault(name)
        self.keys.setdefault(name, len(self.keys))
        return 0

    def of_training(self, names: Iterable[str]) -> None:
        """Declare the names under which gradients and parameters of these names are sent."""
        for prefix in ("Gradient.", "Parameter."):
            for name in sorted(names):
                self.declare(f"byteps.{prefix}{name}")


class RankPosition(NamedTuple):
    """Where a process is among the ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int


declared, speed = DeclaredNames(), Speed()
_basics = HorovodBasics()
_left: RankPosition | None = None  # in the world that this process has left last


def here(error: type[Exception] = ValueError) -> HorovodState:
    """Return the world of this process.

    Raises:
        error: ``init`` was not called.
    """
    found = state()
    if found is None or not _basics.is_initialized():
        raise error(_NOT_INITIALIZED)
    return found


def init(lazy: bool = True) -> None:
    """Meet the other ranks. Every rank must call this; a second call does nothing.

    Args:
        lazy: BytePS waits for other ranks in ``init`` only if it is False, else at the first tensor; here ranks meet at once.

    Raises:
        WorldError: a rank did not join in time; the text names it.
        UsageError: the launcher's variables contradict each other.
    """
    notes = variables.without_meaning(os.environ)
    _basics.init()
    speed.look(here())
    if here().rank == 0 and BPSLAUNCH not in os.environ:
        for note in notes:
            say_once(note)


def shutdown() -> None:
    """Leave the world, if this process is in one; operations that have not ended fail. ``init`` may be called again.

    ``rank``, ``size``, ``local_rank`` and ``local_size`` go on answering what they were, as in BytePS.
    """
    global _left
    if state() is not None:
        _left = _position()
    _basics.shutdown()
    declared.keys.clear()


def suspend() -> None:
    """Do as ``shutdown``, in order to ``resume`` later."""
    shutdown()


def resume(num_workers: int, num_servers: int, global_rank: int, context: Any = None) -> None:
    """Enter a world again after ``suspend``, and declare all names in their first order. Every rank must call this.

    Weights and optimizer stay as they are on each rank: broadcast them where ranks are new.

    Args:
        num_workers: number of machines, as in DMLC_NUM_WORKER, which it sets.
        num_servers: number of servers, as in DMLC_NUM_SERVER, which it sets.
        global_rank: the rank that this process is to have, as in BYTEPS_GLOBAL_RANK, which it sets.
        context: without meaning, as in BytePS.

    Raises:
        UsageError: not suspended; a number is invalid; the launcher gives another rank, or another number of machines.
        WorldError: a rank did not resume in time; the text names it.
    """
    given = (
        ("DMLC_NUM_WORKER", num_workers, 1),
        ("DMLC_NUM_SERVER", num_servers, 0),
        ("BYTEPS_GLOBAL_RANK", global_rank, 0),
    )
    for (_, value, least), name in zip(given, ("num_workers", "num_servers", "global_rank"), strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(explain(f"resume takes a whole number of at least {least} as {name}", value=value))
    if state() is not None:
        fix = "call bps.suspend() first, on every rank"
        raise UsageError(explain("resume was called while BytePS runs", rank=here().rank, fix=fix))
    os.environ.update({name: str(value) for name, value, _ in given})
    init(lazy=False)
    found = here()
    size = num_workers * found.place.local_size
    if (found.size, found.rank) != (size, global_rank):
        is_size, rank = found.size != size, found.rank
        shutdown()
        where = os.environ.get("DMLC_PS_ROOT_URI", "the launcher's address")
        what = f"{num_workers} machines of {found.place.local_size} ranks are {size} ranks, and {found.size} have met"
        fix = f"all {size} must call resume with these numbers, and meet at DMLC_PS_ROOT_URI ({where})"
        if not is_size:
            what, fix = f"the launcher gives this process rank {rank}", "give the rank that bps.rank() was"
        raise UsageError(
            explain(what, value=f"resume({num_workers}, {num_servers}, {global_rank})", rank=rank, fix=fix)
        )
    for name in declared.names:  # in their first order, so that keys are those from before
        declared.declare(name)


def _position() -> RankPosition:
    if state() is None and _left is not None:
        return _left
    found = here()
    return RankPosition(found.rank, found.size, found.place.local_rank, found.place.local_size)


def size() -> int:
    """Return the number of ranks. Like ``rank`` and the others it raises ValueError before the first ``init``."""
    return _position().size


def rank() -> int:
    """Return the rank of this process, from 0."""
    return _position().rank


def local_size() -> int:
    """Return how many ranks this machine has."""
    return _position().local_size


def local_rank() -> int:
    """Return the rank of this process among those of its machine."""
    return _position().local_rank


def get_pushpull_speed() -> tuple[int, float]:
    """Return (milliseconds since 1970, megabytes a second) of what operations by name carried on this rank.

    A value is a mean over the time since the one before, ten seconds at least; until the first has passed, and with
    BYTEPS_TELEMETRY_ON=0, it is (0, 0.0). Gradients of ``DistributedDataParallel`` are not counted. Raises as ``size`` does.
    """
    found = speed.look(here())
    return (0, 0.0) if os.environ.get("BYTEPS_TELEMETRY_ON", "").strip() == "0" else found


def is_asynchronous() -> bool:
    """Return whether BYTEPS_ENABLE_ASYNC asks for asynchronous training.

    Raises:
        UsageError: it is neither 0 nor 1.
    """
    text = os.environ.get("BYTEPS_ENABLE_ASYNC", "0").strip() or "0"
    if text not in ("0", "1"):
        raise UsageError(explain("BYTEPS_ENABLE_ASYNC is 0 or 1", value=text, fix="set 1 for asynchronous training"))
    return text == "1"
